"""The experiments of Smith et al. 2018 in small: reports, caches, and what is measured."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.func import grad, jacrev, vmap
from torch.testing import assert_close

from bayesgrad_lab import datasets, smith2018_jeffreys, smith2018_logistic
from bayesgrad_lab.results import Results
from bayesgrad_lab.smith2018_chains import Chain, Sweep, batches, chain, convolutional, projected, score, where
from bayesgrad_lab.smith2018_jeffreys import WAYS, Curve, bent, exact, information, pulled, quadrature


@pytest.mark.parametrize("experiment", ["smith2018-fig3", "smith2018-fig4", "sngd-jeffreys"])
def test_an_experiment_reports_and_a_second_run_measures_nothing(experiment: str, second_run) -> None:
    second_run(experiment)


def test_the_network_of_figure_6_has_the_paper_s_weights() -> None:
    sizes = [p.numel() for p in convolutional(0).parameters()]
    assert (sum(sizes[:-1]), sizes[-1]) == (1890, 1600)


def test_features_are_projections_of_pixels_between_0_and_1() -> None:
    digits = datasets.load("digits")
    found = projected(digits, 50, seed=3)
    x = digits.part(50, 3).train_x.flatten(1)
    pixels = (x - digits.train_x.min()) / (digits.train_x.max() - digits.train_x.min())
    turn = torch.randn(64, 10, generator=torch.Generator().manual_seed(3))
    assert (pixels.min(), pixels.max()) == (0, 1)
    assert_close(pixels @ turn, found.train_x)
    assert not torch.equal(found.test_x, projected(digits, 50, seed=4).test_x)


def test_batches_are_without_replacement_and_a_function_of_the_seed() -> None:
    some = batches(10, 6, 1)
    rows = [next(some) for _ in range(3)]
    assert all(len(set(row.tolist())) == 6 for row in rows)
    assert not torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], next(batches(10, 6, 1)))


def test_scores_by_hand() -> None:
    p = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).double()
    assert score(p, torch.tensor([1, 1])).tolist() == pytest.approx([-(math.log(0.5) + math.log(0.1)) / 2, 1.0])
    both = smith2018_logistic.scores(torch.tensor([[0.25, 0.9]]), torch.tensor([[0.0, 0.0]]))
    assert both[:, 0].tolist() == pytest.approx([-(math.log(0.75) + math.log(0.1)) / 2, 0.5])


def test_differences_from_the_minimum_are_paired() -> None:
    """Seeds differ by 1, temperatures by 0.1: the second is better for each seed, and the third not told from it."""
    rows = [[[0.5, 1.5], 0.0], [[0.4, 1.4], 0.0], [[0.39, 1.45], 0.0]]
    runs = [Results("some", [{"nll": v, "single nll": 2.0} for v in values]) for values, _ in rows]
    some = Sweep([0.5, 1.0, 2.0], [], runs)
    assert some.best() == 1
    assert some.above(0) == pytest.approx((0.1, 0.0), abs=1e-12)
    assert some.alike() == [1.0, 2.0]
    assert some.one() == 1
    assert "smallest at T = 1" in where(some)
    diverged = Sweep([0.5, 1.0], [], [runs[0], Results("lost", [{"nll": math.nan, "single nll": 1.0}] * 2)])
    assert diverged.best() == 0
    batched = Sweep([0.4, 0.9], [128, 64], [runs[1], runs[0]], middle=64.0)
    assert batched.near()
    assert not Sweep([0.2, 0.9], [200, 64], [runs[1], runs[0]], middle=64.0).near()


def test_a_chain_that_diverges_has_no_scores() -> None:
    digits = datasets.load("digits").part(60)
    task = Chain("t", lambda seed: digits, partial(convolutional, size=8, channels=2), 1e30, 0.1, 2, 20, refresh=1000)
    assert all(math.isnan(value) for value in chain(task, 0, batch=4).values())


def test_best_weights_and_the_noise_there() -> None:
    task = smith2018_logistic.Regression("t", 3, 500, 5, 1, 1)
    x, y = (part[:500] for part in task.data(2))
    best, hessian, spread = smith2018_logistic.optimum(x, y)
    cost = lambda w: (torch.logaddexp(x @ w, torch.zeros_like(y)) - y * (x @ w)).mean()  # noqa: E731
    assert grad(cost)(best).abs().max() < 1e-9
    assert_close(jacrev(grad(cost))(best), hessian, rtol=1e-9, atol=1e-12)
    slopes = x * ((x @ best).sigmoid() - y)[:, None]
    assert_close(slopes.T @ slopes / 500, spread, rtol=1e-6, atol=1e-9)


def test_labels_have_the_frequencies_of_the_best_weights_and_noise_is_the_fisher_there() -> None:
    """Theorem 5 asks for the covariance of single gradients to be the Fisher, in either parameterisation."""
    curve = Curve(9)
    x, y = curve.data()
    assert len(x) == curve.count == 72
    for way, start in WAYS.values():
        u = torch.tensor(start).double()
        slopes = vmap(grad(_loss, argnums=1), in_dims=(None, None, 0, 0))(way, u, x, y)
        assert slopes.mean(0).abs().max() < 1e-12
        assert_close(slopes.T @ slopes / len(x), information(x, way, u), rtol=1e-10, atol=1e-12)


def _loss(way, u: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    w = way(u)
    logit = w[0] + w[1] * x
    return torch.nn.functional.softplus(logit) - y * logit


def test_jeffreys_target_is_the_same_in_both_parameterisations() -> None:
    """|F_u|^1/2 du = |F_w|^1/2 dw: the density on a grid of threshold and log slope gives the same predictions."""
    curve = Curve(9)
    x, y = curve.data()
    way = WAYS["threshold and log slope"][0]
    grid = torch.cartesian_prod(torch.linspace(-3.5, 2.5, 201).double(), torch.linspace(-2.5, 1.5, 201).double())
    w = vmap(way)(grid)
    logits = w[:, :1] + w[:, 1:] * x
    log = torch.linalg.slogdet(vmap(partial(information, x, way))(grid))[1] / 2
    log = log - (torch.nn.functional.softplus(logits) - y * logits).sum(1)
    p = (w[:, :1] + w[:, 1:] * smith2018_jeffreys.PLACES).sigmoid()
    assert_close((log - log.logsumexp(0)).exp() @ p, exact(curve, 0.5)[0], rtol=0, atol=2e-3)


def test_known_targets_have_the_moments_of_the_reference() -> None:
    """One weight, |G|^1/2 (.413, .881); two weights, |G|^1/2 (-.026, .389, .735, .828, -.217)."""
    assert_close(quadrature(1, 0.5), torch.tensor([0.413, 0.881]).double(), rtol=0, atol=1e-3)
    expected = torch.tensor([-0.026, 0.389, 0.735, -0.217, 0.828]).double()
    assert_close(quadrature(2, 0.5), expected, rtol=0, atol=2e-3)


def test_what_girolami_and_calderhead_add_is_the_corrected_drift_once_more() -> None:
    """G^-1(-u + t/2) = -V + T/2 of the corrected equations."""
    w = torch.tensor([0.3, -0.6]).double()
    inverse, change = torch.linalg.inv(bent(w)), jacrev(bent)(w).permute(2, 0, 1)
    v = torch.einsum("ia,jab,bj->i", inverse, change, inverse)
    t = inverse @ torch.einsum("ab,jba->j", inverse, change)
    assert_close(inverse @ pulled(w), -v + t / 2, rtol=1e-10, atol=1e-12)


def test_chains_without_noise_end_at_the_best_weights_without_a_prior() -> None:
    """Laplace's approximation, which the samples of smith2018-fig1 are compared with, has no prior either."""
    task = smith2018_logistic.Regression("fig1", 2, 200, 10, 0, 500)
    weights = smith2018_logistic.sample(task, 2, heat=1e-20, keep=True)["samples"][-1]
    for seed in range(2):
        best, *_ = smith2018_logistic.optimum(*(part[:200] for part in task.data(seed)))
        assert weights[seed] == pytest.approx(best, rel=1e-6)
