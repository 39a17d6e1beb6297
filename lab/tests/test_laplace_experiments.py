"""Laplace's method on classifiers: averages over draws, searches, and the two experiments in small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from bayesgrad import laplace
from bayesgrad_lab import benzing2021_laplace, datasets, laplace_runs
from bayesgrad_lab.khan2023_runs import Prediction, classifier, named
from bayesgrad_lab.laplace_runs import (
    Approximation,
    averaged,
    choose,
    laplace_rows,
    linearised,
    steps,
)
from bayesgrad_lab.results import Results
from bayesgrad_lab.task import Task

from .conftest import at_smoke_scale as context


@pytest.fixture(scope="module")
def task() -> Task:
    data = datasets.load("digits").part(60)
    few = replace(data, test_x=data.test_x[:40], test_y=data.test_y[:40])
    return classifier(few, data.test_x[40:60], (6,), 2, 20, samples=3)


@pytest.fixture(scope="module")
def posterior():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
    x, y = torch.randn(20, 3), torch.arange(20) % 4
    return laplace(model, [(x, y)], likelihood="categorical", structure="kron"), model, x


def test_draws_are_those_that_predict_averages(posterior) -> None:
    belief, model, x = posterior
    found = averaged(model, steps(belief, 6, 3), x, (1.0,), "draws")[0]
    assert_close(found, belief.predict(x, method="mc", samples=6, seed=3), rtol=1e-4, atol=1e-6)


def test_linearised_draws_have_the_variance_of_linearised_outputs(posterior) -> None:
    """Within five standard errors of a variance from n Gaussian draws, sqrt(2/n)."""
    belief, model, x = posterior
    n = 500
    slopes = torch.stack([linearised(model, step, x)[1] for step in steps(belief, n, 0)]).detach()
    exact = belief.predict(x, method="linear", likelihood="gaussian").variance
    assert_close(slopes.square().mean(0) / exact, torch.ones_like(exact), rtol=0, atol=5 * (2 / n) ** 0.5)


def test_links_agree_for_a_linear_model_and_a_cold_one_is_the_network_alone() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 4), torch.randn(20, 3)
    some = steps(laplace(model, [(x, torch.arange(20) % 4)], likelihood="categorical", structure="full"), 4, 0)
    linear, draws = (averaged(model, some, x, (0.0, 0.5, 2.0), link) for link in ("linear", "draws"))
    assert_close(linear, draws, rtol=1e-4, atol=1e-6)
    assert_close(linear[0], model(x).softmax(-1))
    assert not torch.allclose(linear[1], linear[2], atol=1e-3)


def test_the_pair_with_the_lowest_held_out_nll_is_chosen(task: Task, tmp_path: Path) -> None:
    kind = Approximation("Diagonal", "diag", links=("linear",))
    pair = choose(context(tmp_path), task, kind, (1e-2, 1e-3))["linear"]
    held = replace(task, data=task.data.validation())
    model = laplace_runs.network(context(tmp_path), held, (1e-2, 1e-3), laplace_runs.SEARCH_SEED, "search")
    belief = kind.posterior(model, held.data, 0)
    values = {}
    for prior in laplace_runs.PRIORS:
        some = steps(belief.set_prior(prior), task.samples, laplace_runs.SEARCH_SEED)
        for t, p in zip(
            laplace_runs.TEMPERATURES,
            averaged(model, some, held.data.test_x, laplace_runs.TEMPERATURES, "linear"),
        ):
            values[prior, t] = -p[range(len(p)), held.data.test_y].log().mean().item()
    assert (pair.prior, pair.temperature) == min(values, key=values.__getitem__)
    assert pair.value == pytest.approx(min(values.values()), rel=1e-5)


def test_a_network_is_trained_once_and_read_as_it_was(task: Task, tmp_path: Path, monkeypatch) -> None:
    here = context(tmp_path)
    one = laplace_runs.network(here, task, (1e-2, 1e-3), 0)
    monkeypatch.setattr(laplace_runs, "fit", None)
    two = laplace_runs.network(here, task, (1e-2, 1e-3), 0)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))
    assert not two.training


def test_rows_are_paired_and_each_way_of_tuning_has_one(task: Task, tmp_path: Path) -> None:
    rows = laplace_rows(context(tmp_path), task, [Approximation("Input factor", "input")])
    assert [row.of.key for row in rows] == [
        ("map",),
        ("soft",),
        ("input", "linear", "evidence"),
        ("input", "draws", "evidence"),
        ("input", "linear", "held out"),
        ("input", "draws", "held out"),
    ]
    one = named(rows, "input", "linear", "held out")
    gaps = [a["nll"] - b["nll"] for a, b in zip(one.runs, rows[0].runs)]
    assert one.less(rows[0], "nll")[0] == pytest.approx(sum(gaps) / 2)
    assert rows[0].of.first is not None
    nll = -rows[0].of.first[range(40), task.data.test_y].log().mean().item()
    assert rows[0].runs[0]["nll"] == pytest.approx(nll, rel=1e-5)


def test_the_peer_s_posterior_is_ours_with_separate_biases(posterior) -> None:
    """laplace-torch's draws have the variance of our Kronecker factors: within five standard errors."""
    if laplace_runs.peer_package() is None:
        pytest.skip("laplace-torch is not installed")
    _, model, x = posterior
    y, n = torch.arange(20) % 4, 1000
    ours = laplace(model, [(x, y)], likelihood="categorical", structure="kron", bias="separate").variance()
    drawn = torch.cat([s["0.weight"][None] for s in steps(laplace_runs.Peer(model, [(x, y)]), n, 0)])
    ratio = drawn.square().mean(0) / ours["0.weight"]
    assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=5 * (2 / n) ** 0.5)


def test_what_counts_as_as_good_as_both_factors() -> None:
    def row(kind: str, nll: float, ece: float, auroc: float) -> Results:
        values = [{"nll": nll + k, "ece": ece + k, "auroc entropy": auroc + k} for k in (0.0, 0.1)]
        return Results(kind, values, of=Prediction((kind, "linear", "held out"), ""))

    both = row("kron", 0.5, 0.02, 0.9)
    for other, fine in (((0.4, 0.02, 0.9), True), ((0.6, 0.02, 0.9), False), ((0.5, 0.02, 0.8), False)):
        rows = [both, row("input", *other)]
        assert benzing2021_laplace.compared(rows, "linear", "held out")[0] is fine


@pytest.mark.parametrize("experiment", ["benzing2021-laplace", "khan2023-laplace-vs-variational"])
def test_an_experiment_reports_and_a_second_run_measures_nothing(experiment: str, second_run) -> None:
    second_run(experiment)
