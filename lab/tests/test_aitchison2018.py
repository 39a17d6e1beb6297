"""The experiments of Aitchison 2018 in small: reports, caches, and what is measured."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from bayesgrad import optim
from bayesgrad_lab import aitchison2018, datasets, networks
from bayesgrad_lab.aitchison2018 import closed_form, displacement, moments, power, region, simulate, steady
from bayesgrad_lab.aitchison2018_convergence import PROBLEMS, STANDING, STILL, WAYS, follow
from bayesgrad_lab.aitchison2018_questions import QUESTIONS, judged, significant
from bayesgrad_lab.aitchison2018_runs import (
    VARIANTS,
    MomentumOnly,
    Revisiting,
    clock,
    counted,
    loss_at,
    run,
    score,
    squares,
)
from bayesgrad_lab.methods import Method
from bayesgrad_lab.results import Results
from bayesgrad_lab.task import Task

from .conftest import at_smoke_scale


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture(scope="module")
def task() -> Task:
    return Task(datasets.load("digits").part(100), "mlp", 2, 20)


@pytest.mark.parametrize("experiment", ["momentum", "kronecker", "convergence", "open-questions"])
def test_an_experiment_reports_and_a_second_run_measures_nothing(experiment: str, second_run) -> None:
    second_run(f"aitchison2018-{experiment}")


# --- the map ---


def test_the_riccati_solver_is_what_the_filter_tends_to() -> None:
    """Against the recursion of the corrected equations in its own letters, iterated; cw = 1, eta = 1."""
    x, eta_p = numbers(0.01, 0.3, 1.0, 30.0), numbers(0.1, 0.03, 0.5, 0.2)
    sww, swp, spp = torch.ones(4).double(), torch.zeros(4).double(), torch.ones(4).double()
    for _ in range(5000):
        pww = sww + 2 * swp + spp
        pwp = (1 - eta_p) * (swp + spp)
        ppp = (1 - eta_p) ** 2 * spp + eta_p**2
        d = 1 + x**2 * pww
        sww, swp, spp = pww / d, pwp / d, ppp - x**2 * pwp**2 / d
    for found, expected in zip(steady(x, eta_p), (sww, swp, spp)):
        assert_close(found, expected, rtol=1e-9, atol=0)


def test_figures_of_the_reference_table() -> None:
    """Exact over printed S_wp, and momentum over direct displacement, at six settings."""
    x, eta_p = numbers(1e-3, 0.1, 1, 10, 1, 1), numbers(0.1, 0.1, 0.1, 0.1, 0.01, 1e-3)
    ww, wp, _ = steady(x, eta_p)
    assert_close(wp * x / eta_p, numbers(0.005, 0.25, 0.52, 0.42, 0.81, 0.94), rtol=0.02, atol=0.0005)
    assert_close(wp / (eta_p * ww), numbers(0.005, 0.35, 1.7, 5.6, 6.6, 22), rtol=0.03, atol=0.0005)
    small = numbers(1e-3), numbers(1e-3)
    for exact, near in zip(steady(*small), closed_form(*small)):
        assert_close(near, exact, rtol=0.02, atol=0)


def test_regions_by_hand() -> None:
    moved, share = numbers(1.05, 1.05, 0.95, 0.8, 0.8), numbers(0.95, 0.5, 0.05, 0.95, 0.05)
    assert region(moved, share).tolist() == [0, 2, 1, 2, 2]
    total, part = displacement(numbers(3.0), numbers(0.2), numbers(0.5), numbers(0.1))
    assert_close((total, part), (numbers(2.5), numbers(0.4)))


def test_momentum_only_moves_weights_by_momentum_alone() -> None:
    weight = nn.Parameter(torch.zeros(3).double())
    optimizer = MomentumOnly([weight], lr=0.1, batch_size=2)
    for _ in range(3):
        before = weight.detach().clone()
        weight.grad = torch.tensor([1.0, -2.0, 0.5]).double()
        optimizer.step()
        assert_close(weight.detach(), before + 0.1 * optimizer.state[weight]["momentum"])
    assert weight.abs().min() > 0


# --- Kronecker factors ---


def test_without_noise_one_input_and_error_are_exact(monkeypatch) -> None:
    """For N = M = 1 the precision is 1 + sum of x^2 d^2."""
    monkeypatch.setattr(aitchison2018, "SIDES", (1, 1))
    found = simulate(0.0, 50, 0, 1, 3, (50,))["at"]
    generator = torch.Generator().manual_seed(3)
    root = moments(1, 0).sqrt()
    draws = [torch.randn(1, 1, 1, generator=generator, dtype=torch.float64) @ root for _ in range(100)]
    total = sum((x * d).square() for x, d in zip(draws[::2], draws[1::2]))
    assert_close(found.view(()), 1 / (1 + torch.as_tensor(total).view(())))


def test_powers_of_moments() -> None:
    moment = moments(4, 0)
    assert_close(power(moment, -0.5) @ power(moment, -0.5) @ moment, torch.eye(4).double())
    assert_close(torch.linalg.eigvalsh(moment)[[0, -1]], numbers(0.3, 3.0))


# --- convergence ---


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.title)
def test_gradients_have_their_mean(problem) -> None:
    gradients = problem.gradients(30_000, 4, 0)
    assert set(gradients.unique().tolist()) == {-1.0, problem.large}
    error = gradients.std().item() / math.sqrt(gradients.numel())
    assert gradients.mean().item() == pytest.approx(problem.mean, abs=5 * error)


def test_eta_zero_is_the_sum_of_squares() -> None:
    """x <- clamp(x - g / (10 + sum g^2)), by hand."""
    for way in STANDING:
        found = follow(PROBLEMS[0], way, STILL, 200, 1, 1)
        x, precision, values = 0.0, 10.0, []
        for t in range(200):
            g = 3.0 if t % 3 == 0 else -1.0
            precision += g * g
            x = min(1.0, max(-1.0, x - g / precision))
            values.append(x)
        assert_close(found["path"][:, 0], numbers(*values), rtol=1e-6, atol=1e-9)


def test_adam_goes_to_the_wrong_end_and_a_slow_filter_does_not() -> None:
    """Reddi et al., 2018, theorem 1, C = 3: beta_2 = 1/(1 + C^2)."""
    adam = next(way for way in WAYS if way.kind == "adam1")
    own = next(way for way in WAYS if way.kind == "filter")
    assert follow(PROBLEMS[0], adam, 0.1, 600, 1, 1)["end"].item() > 0.8
    assert follow(PROBLEMS[0], own, 0.01, 900, 1, 1)["end"].item() < -0.8


# --- training ---


def test_searches_are_as_long_for_each_method() -> None:
    assert {len(one.lrs) for one in VARIANTS.values()} == {3}
    assert {k for q in QUESTIONS for k in (q.new, q.plain)} <= set(VARIANTS)


@pytest.mark.parametrize("kind", [k for k in VARIANTS if k != "soap"])
def test_runs_are_functions_of_their_seed_and_do_not_touch_the_global_generator(kind, task, tmp_path: Path) -> None:
    variant, state = VARIANTS[kind], torch.get_rng_state()
    found = [run(at_smoke_scale(tmp_path / str(i)), task, variant, variant.lr, s) for i, s in enumerate((1, 1, 2))]
    assert torch.equal(torch.get_rng_state(), state)
    assert found[0]["loss"].shape == found[0]["seconds"].shape == (10,)
    for name in ("loss", "scores"):
        assert torch.equal(found[0][name], found[1][name])
        assert not torch.equal(found[0][name], found[2][name])


def test_revisiting_counts_likelihoods_to_a_power() -> None:
    """In visit k: 1/v = 1/v_prior + (B g)^2 / k, and a step of v B g / k; by hand, without drift or momentum."""
    weight = nn.Parameter(torch.zeros(1).double())
    optimizer = Revisiting([weight], lr=1e-12, batch_size=4, sgd_lr=1.0, momentum=0.0)
    precision, w = 4.0, 0.0
    for visit, g in ((1, 0.5), (2, -1.0), (3, 0.7)):
        optimizer.param_groups[0]["visit"] = visit
        weight.grad = torch.tensor([g]).double()
        optimizer.step()
        precision += (4 * g) ** 2 / visit
        w -= 4 * g / visit / precision
        assert weight.item() == pytest.approx(w, rel=1e-6)


def test_copies_are_counted_once_in_the_first_epoch(task: Task, tmp_path: Path) -> None:
    """With evidence at drawn labels and hardly any drift or steps, each epoch adds the data's information once."""
    slow = Method(
        "slow",
        "slow",
        (1e-9,),
        lambda m, setup: optim.AdaBayes(
            m.parameters(), lr=setup.lr, batch_size=setup.batch_size, sgd_lr=1e-3, momentum=0.0, fisher="sampled"
        ),
    )
    copies = counted(at_smoke_scale(tmp_path), task, slow, 1e-9, 0)["copies"]
    assert copies[0].item() == pytest.approx(1.0, rel=0.3)
    assert (copies[1] / copies[0]).item() == pytest.approx(2.0, rel=0.3)


def test_squares_are_of_summed_losses(task: Task) -> None:
    model, data = networks.build("mlp", task.data, 0), task.data
    found = squares(model, data.train_x[:40], data.train_y[:40], 20, torch.Generator().manual_seed(0))[0]
    total = torch.zeros_like(found)
    for part in (slice(0, 20), slice(20, 40)):
        model.zero_grad()
        nn.functional.cross_entropy(model(data.train_x[part]), data.train_y[part], reduction="sum").backward()
        total += torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double().square() / 2
    assert_close(found, total)


def made(task: Task, losses: list[float]) -> Results:
    runs = [
        {"loss": torch.full((10,), v).double(), "seconds": torch.ones(10).double(), "scores": numbers(v, v, v, v)}
        for v in losses
    ]
    return Results("AdamW", runs, partial(score, task), {"lr": 1.0}, of=task)


def test_judgements_are_paired_and_at_95_percent(task: Task) -> None:
    plain = made(task, [1.0, 2.0, 3.0])
    assert judged(made(task, [0.9, 1.91, 2.89]), plain, "nll") == "better"
    assert judged(made(task, [1.1, 2.09, 3.11]), plain, "loss") == "worse"
    assert judged(made(task, [0.9, 2.1, 2.9]), plain, "nll") == "no difference"
    assert judged(made(task, [math.nan, 1.0, 1.0]), plain, "nll") == "diverged"
    assert not significant((-1.0, math.nan), 1)
    assert significant((-1.0, 0.2), 3)
    assert not significant((-1.0, 0.25), 3)


def test_losses_at_a_time_look_back_one_epoch(task: Task) -> None:
    one = made(task, [1.0])
    one.runs[0]["loss"] = torch.arange(10).double()
    assert loss_at(one, 7.5)[0] == pytest.approx(4.0)  # steps 2 to 6
    assert clock(one) == [5.0, 10.0]
