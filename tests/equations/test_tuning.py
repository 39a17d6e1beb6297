"""Priors, noise and temperature of Laplace's method: what they do to the posterior, and how they are found."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesgrad
from bayesgrad.likelihoods import Gaussian, named
from bayesgrad.posterior import LaplacePosterior, load
from bayesgrad.posterior.tuning import maximise_by_search
from equations.test_laplace import PRIOR, STRUCTURES, data, dense, eye, fitted, mlp

close = torch.testing.assert_close
D = torch.float64


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_temperature_multiplies_the_covariance(structure: str, tmp_path: Any) -> None:
    """exp(-loss/T), with the prior in the loss: precision/T; the evidence is another question."""
    cold, plain = (fitted(mlp(), structure, temperature=t) for t in (0.25, 1.0))
    close(dense(cold), 4 * dense(plain), rtol=1e-9, atol=1e-9)
    close(cold.log_marginal_likelihood(), plain.log_marginal_likelihood(), rtol=0, atol=0)
    x, _ = data()
    spread = [p.predict(x, method="linear", likelihood="gaussian").variance for p in (cold, plain)]
    close(4 * spread[0], spread[1], rtol=1e-8, atol=1e-10)
    cold.save(tmp_path / "posterior")
    again = load(tmp_path / "posterior")
    assert isinstance(again, LaplacePosterior)
    assert again.temperature == 0.25
    close(dense(again), dense(cold), rtol=0, atol=0)
    close(dense(again.set_prior(2 * PRIOR)), 4 * (dense(plain) + PRIOR * eye(38)), rtol=1e-9, atol=1e-9)


def linear(noise: float = 0.5) -> tuple[LaplacePosterior, list[Tensor]]:
    """Ridge regression on few data, and many held-out ones."""
    generator = torch.Generator().manual_seed(3)
    X, x = torch.randn(4, 5, dtype=D, generator=generator), torch.randn(16, 5, dtype=D, generator=generator)
    truth = torch.randn(5, 1, dtype=D, generator=generator)
    Y, y = (z @ truth + 0.7 * torch.randn(len(z), 1, dtype=D, generator=generator) for z in (X, x))
    model = nn.Linear(5, 1, bias=False, dtype=D)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.solve(X.T @ X + noise * eye(5), X.T @ Y).T)
    return fitted(model, "full", "gaussian", loader=[(X, Y)], noise_scale=noise**0.5), [X, x, y]


def test_heldout_labels_find_the_prior_and_the_temperature() -> None:
    """Against a fine grid of the predictive density, transcribed."""
    posterior, (X, x, y) = linear()
    f = posterior.model(x).detach()  # pyright: ignore[reportOptionalCall]

    def density(prior: float, temperature: float = 1.0) -> float:
        covariance = temperature * torch.linalg.inv(X.T @ X / 0.5 + prior * eye(5))
        spread = torch.einsum("ni,ij,nj->n", x, covariance, x)[:, None] + 0.5
        return float(torch.distributions.Normal(f, spread.sqrt()).log_prob(y).mean())

    grid = torch.logspace(-3, 3, 601, dtype=D).tolist()
    posterior.tune_prior(method="heldout", heldout=[(x[:9], y[:9]), (x[9:], y[9:])])
    best = max(grid, key=density)
    assert posterior.prior_precision == pytest.approx(best, rel=0.03)
    posterior.set_prior(1.0).tune_prior(method="heldout", heldout=[(x, y)], temperature=True, steps=200)
    found = density(posterior.prior_precision, posterior.temperature)  # pyright: ignore[reportArgumentType]
    for factor in (0.95, 1.05):
        assert density(posterior.prior_precision * factor, posterior.temperature) < found  # pyright: ignore
        assert density(posterior.prior_precision, posterior.temperature * factor) < found  # pyright: ignore


@pytest.mark.parametrize("structure", ["kron", "subsampled"])
def test_heldout_tuning_of_layers_and_noise(structure: str) -> None:
    """More numbers predict better, and none of them can be doubled or halved for more than a thousandth of a nat."""
    heldout = [data("gaussian", 15)]
    posterior = fitted(mlp(), structure, "gaussian")
    densities = [posterior._log_density(heldout)]
    for per, noise in (("model", False), ("layer", False), ("layer", True)):
        posterior.tune_prior(per, method="heldout", heldout=heldout, noise_scale=noise)
        densities.append(posterior._log_density(heldout))
    assert densities == sorted(densities)
    assert densities[-1] > densities[0] + 0.01
    prior, noise = posterior.prior_precision, posterior.noise_scale
    assert isinstance(prior, dict)
    assert prior["0.weight"] == prior["0.bias"] != prior["2.weight"]
    for factor in (0.5, 2.0):
        assert posterior.set_prior(prior, noise * factor**0.5)._log_density(heldout) < densities[-1]
        for layer in ("0", "2"):
            other = {name: value * (factor if name[0] == layer else 1) for name, value in prior.items()}
            assert posterior.set_prior(other, noise)._log_density(heldout) < densities[-1] + 1e-3


def test_densities_of_labels() -> None:
    """For one output, by a fine quadrature; the probit's within what it promises."""
    nodes = torch.linspace(-9, 9, 20001, dtype=D)
    weights = (-nodes.square() / 2).softmax(0)
    mean, variance = torch.tensor([[0.3], [-1.2], [2.0]], dtype=D), torch.tensor([[0.1], [1.5], [0.4]], dtype=D)
    f = mean + variance.sqrt() * nodes
    counts, reals, flags = (torch.tensor(v, dtype=D)[:, None] for v in ([0, 2, 9], [0.1, -3.0, 2.2], [1, 0, 1]))
    exact = {
        "poisson": (counts, torch.distributions.Poisson(f.exp()).log_prob(counts)),
        "gaussian": (reals, torch.distributions.Normal(f, 0.4**0.5).log_prob(reals)),
        "bernoulli": (flags, torch.distributions.Bernoulli(logits=f).log_prob(flags)),
    }
    for name, (labels, log_prob) in exact.items():
        expected = (log_prob.exp() * weights).sum(1).log()
        found = named(name).with_noise(0.4**0.5).log_density(mean, variance, labels)
        close(found, expected, rtol=0, atol=0.05 if name == "bernoulli" else 1e-7)
    logits = torch.cat([torch.zeros_like(mean), mean], 1)
    found = named("categorical").log_density(logits, torch.zeros_like(logits), flags[:, 0].long())
    close(found, torch.distributions.Categorical(logits=logits).log_prob(flags[:, 0]))


def test_a_compass_finds_what_is_not_aligned_with_it() -> None:
    found = maximise_by_search(
        lambda v: -((math.log(v[0]) + math.log(v[1]) - 1) ** 2) - 0.1 * math.log(v[0]) ** 2, [9.0, 9.0], 500
    )
    close(torch.tensor(found), torch.tensor([1.0, math.e]), rtol=0.1, atol=0)


def test_bad_requests_leave_the_prior() -> None:
    posterior = fitted(mlp(), "diag")
    before = dense(posterior)
    cases: list[tuple[dict[str, Any], str]] = [
        (dict(method="grid"), "method must be one of 'evidence', 'heldout', got 'grid'"),
        (dict(temperature=True), "the evidence does not depend on temperature: use method='heldout'"),
        (dict(method="heldout"), "method='heldout' needs heldout="),
        (dict(heldout=[data()]), "method='evidence' takes no heldout="),
        (dict(method="heldout", heldout=[]), "heldout gave no batches"),
        (dict(method="heldout", heldout=[(data()[0], data()[1] + 7)]), "labels must be in 0..2, got 7 to 9"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            posterior.tune_prior(**options)
        assert torch.equal(dense(posterior), before)
    for temperature in (0, -1.0, math.inf):
        with pytest.raises(ValueError, match="temperature must be a finite positive number"):
            posterior.set_prior(1.0, temperature=temperature)
    with pytest.raises(ValueError, match="temperature must be a finite positive number, got 0"):
        bayesgrad.laplace(mlp(), [data()], likelihood="categorical", temperature=0)


def test_noise_that_was_not_given_is_tuned() -> None:
    """`tune_prior()` finds prior and noise together, unless the noise is known."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1, dtype=D), torch.randn(60, 3, dtype=D)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(60, 1, dtype=D)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.zero_()
    unknown = bayesgrad.laplace(model, [(x, y)], likelihood="gaussian", structure="full")
    both = bayesgrad.laplace(model, [(x, y)], likelihood="gaussian", structure="full").tune_prior(noise_scale=True)
    assert unknown.tune_prior().noise_scale == both.noise_scale
    assert unknown.noise_scale == pytest.approx(0.1, rel=0.3)
    for options in (dict(likelihood="gaussian", noise_scale=1.0), dict(likelihood=Gaussian(1.0))):
        known = bayesgrad.laplace(model, [(x, y)], structure="full", **options).tune_prior()  # pyright: ignore
        assert known.noise_scale == 1.0
