"""The experiments of Benzing 2021 in small: reports, caches, searches, and what is measured."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesgrad.optim import FOOF, KFAC
from bayesgrad_lab import benzing2021_runs, datasets
from bayesgrad_lab.benzing2021_runs import KEY, SIZES, Grid, factor, layers_of, rule, score, similarities, train, tune
from bayesgrad_lab.results import Results
from bayesgrad_lab.task import Task

from .conftest import at_smoke_scale

FIGURES = ("fig1", "fig2", "fig3", "fig4", "fig5", "fig9", "conv")


@pytest.fixture(scope="module")
def task() -> Task:
    return Task(datasets.load("digits").part(100), "mlp", 1, 20, (8, 8), lengths=(6, 4), name=KEY)


@pytest.mark.parametrize("figure", FIGURES)
def test_an_experiment_reports_and_a_second_run_measures_nothing(figure: str, second_run) -> None:
    assert "chosen by the training loss" in second_run(f"benzing2021-{figure}").settings["protocol"]


def test_grids_have_as_many_values_for_each_method_at_laptop_scale() -> None:
    for where, grids in SIZES["laptop"].grids.items():
        count = 4 if where in ("fig2", "fig4") else 3
        assert {len(grid.lrs) for grid in grids.values()} == {count}
        assert {len(grid.seconds) for kind, grid in grids.items() if kind not in ("sgd", "adam")} == {count}


def test_a_run_that_diverges_stops_and_counts_as_infinite(task: Task, tmp_path: Path, monkeypatch) -> None:
    steps: list[int] = []
    monkeypatch.setattr(benzing2021_runs, "POINTS", 3)
    here = at_smoke_scale(tmp_path, progress=lambda trial, epoch, step, *_: steps.append(step))
    run = train(here, replace(task, lengths=(40, 4)), rule("sgd", Grid((1e12,), (0.0,))), 1e12, 0.0, 0, "final")
    assert run["loss"].tolist() == [math.inf] * 3
    assert math.isnan(run["error"])
    assert not steps


def test_a_search_takes_the_lowest_training_loss_and_names_edges(task: Task, tmp_path: Path) -> None:
    foof = rule("foof", Grid((1e-4, 0.3, 1e9), (0.1, 0.2), power=1.0))
    here = at_smoke_scale(tmp_path)
    chosen = tune(here, task, foof)
    tried = {
        (lr * damping, damping): train(here, task, foof, lr * damping, damping, 1000, "search")["loss"][-1].item()
        for lr in foof.lrs
        for damping in foof.seconds
    }
    lr, damping = chosen.settings["lr"], chosen.settings["damping"]
    assert (lr, damping) == min(tried, key=tried.__getitem__)
    assert chosen.edges == (f"damping {damping:g} is the {'lowest' if damping == 0.1 else 'highest'} tried",)
    assert tune(here, task, replace(foof, lrs=(1e-6, 1e-5))).edges[0].endswith("is the highest tried")
    assert tune(here, task, replace(foof, lrs=(1e9,))).edges == ("all that was tried diverged",)


def test_a_search_does_not_choose_what_went_well_by_luck(task: Task, tmp_path: Path, monkeypatch) -> None:
    """The lowest loss diverges with another seed, the next one is higher with others, the third is not looked at."""
    losses = {0.1: (0.1, math.inf, 0.1), 0.2: (0.2, 0.9, 0.4), 0.3: (0.3, 0.4, 0.5), 0.4: (0.45, 0.0, 0.0)}
    asked: list[tuple[float, int]] = []

    def fake(context, task, rule, lr, second, seed, purpose):
        asked.append((lr, seed - 1000))
        return {"loss": torch.tensor([losses[lr][seed - 1000]], dtype=torch.float64)}

    monkeypatch.setattr(benzing2021_runs, "train", fake)
    chosen = tune(at_smoke_scale(tmp_path), task, rule("adam", Grid(tuple(losses))))
    assert chosen.lr == 0.3
    assert asked[4:] == [(lr, seed) for lr in (0.1, 0.2, 0.3) for seed in (1, 2)]


def test_the_factor_between_losses_is_over_pairs_of_seeds() -> None:
    def finals(*losses: float) -> Results:
        return Results("", [{"loss": torch.tensor([loss])} for loss in losses], score)

    log, error = factor(finals(2.0, 20.0), finals(1.0, 10.0))
    assert log == pytest.approx(math.log(2))
    assert error == pytest.approx(0, abs=1e-6)
    assert factor(finals(1.0, math.inf), finals(1.0, 2.0))[0] == math.inf
    assert factor(finals(1.0, 2.0), finals(1.0, math.inf))[0] == -math.inf


@pytest.mark.parametrize("exact", [False, True])
def test_similarity_is_the_cosine_between_real_steps(exact: bool) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(30, 5, dtype=torch.float64), torch.randint(0, 4, (30,))
    damping = 0.01
    start = nn.Linear(5, 4, dtype=torch.float64)

    def step(make, **settings) -> tuple[torch.Tensor, torch.optim.Optimizer]:
        model = nn.Linear(5, 4, dtype=torch.float64)
        model.load_state_dict(start.state_dict())
        optimizer = make(model, lr=1.0, damping_mode="absolute", max_norm=math.inf, **settings)
        outputs = model(x)
        if make is KFAC:
            optimizer.observe(outputs)
        F.cross_entropy(outputs, y).backward()
        optimizer.step()
        return torch.cat([(p - q).flatten() for p, q in zip(model.parameters(), start.parameters())]), optimizer

    kfac, optimizer = step(KFAC, damping=damping, exact_damping=exact)
    assert isinstance(optimizer, KFAC)
    (layer,) = layers_of(optimizer)
    preconditioner: Any = optimizer.preconditioner
    entry, group = optimizer.state[layer.owner], optimizer.param_groups[0]
    foof, _ = step(FOOF, damping=preconditioner.dampings(entry, group)["input"])
    expected = F.cosine_similarity(kfac, foof, dim=0).item()
    assert similarities(optimizer, (1.0, damping))[int(exact), 1].item() == pytest.approx(expected, rel=1e-9)
