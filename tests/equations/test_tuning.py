"""Priors, noise and temperature of Laplace's method: what they do to the posterior, and how they are found."""

from __future__ import annotations

import math
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesgrad
from bayesgrad.layers import batches
from bayesgrad.likelihoods import Gaussian, named
from bayesgrad.posterior import LaplacePosterior, load
from bayesgrad.posterior import heldout as heldout_module
from bayesgrad.posterior import laplace as laplace_module
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


def test_one_prior_for_a_block_is_asked_for_in_words() -> None:
    """Without numbers that a temperature has divided."""
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    with pytest.raises(ValueError, match=r"\['0.weight', '0.bias'\] are one block .*different ones: .*bias='separate'"):
        fitted(mlp(), "kron", prior_precision=dict(zip(names, (1.0, 2.0, 3.0, 4.0))), temperature=0.5)


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


def grouped() -> nn.Module:
    """Positions, groups of channels, a bias that is a block by itself, and parameters without a matrix."""
    torch.manual_seed(4)
    convolutions = [nn.Conv1d(2, 4, 3, groups=2, dtype=D), nn.GroupNorm(2, 4, dtype=D), nn.Tanh()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(16, 3, dtype=D))


def looked_up() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Embedding(5, 3, dtype=D), nn.Flatten(), nn.Linear(18, 3, dtype=D))


@pytest.mark.filterwarnings("ignore:structure=.* does not support")
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
@pytest.mark.parametrize("structure", ["diag", "kron", "input"])
@pytest.mark.parametrize("build", [grouped, looked_up])
def test_tables_of_variances_are_exact(build: Any, structure: str, likelihood: str, monkeypatch: Any) -> None:
    """Densities by interpolation are those of predictions with each prior; so are the values that are found."""
    torch.manual_seed(6)
    inputs = torch.randn(12, 2, 6, dtype=D) if build is grouped else torch.randint(5, (12, 6))
    labels = torch.randint(3, (12,)) if likelihood == "categorical" else torch.randn(12, 3, dtype=D)
    posterior = fitted(build(), structure, likelihood, loader=[(inputs, labels)])
    heldout = [(inputs[:7].flip(0), labels[:7]), (inputs[7:].flip(0), labels[7:])]
    seen: list[tuple[tuple[Any, ...], float]] = []
    fills: list[Any] = []
    fill = heldout_module.VarianceTable._fill
    monkeypatch.setattr(heldout_module.VarianceTable, "_fill", lambda *args: (fills.append(args), fill(*args)))

    def spy(density: Any, start: Any, steps: int) -> list[float]:
        values = torch.logspace(-4, 9, 12, dtype=D).tolist()
        rows = [[v / 3, *[v * (k % 2 + 0.5) for k in range(1, len(start))]] for v in values]
        seen.extend((tuple(row), density(row)) for row in rows)
        return maximise_by_search(density, start, steps)

    monkeypatch.setattr(laplace_module, "maximise_by_search", spy)
    options: dict[str, Any] = dict(method="heldout", heldout=heldout, noise_scale=likelihood == "gaussian")
    found = []
    for numbers in (heldout_module.NUMBERS, 0):
        monkeypatch.setattr(heldout_module, "NUMBERS", numbers)
        posterior.set_prior(PRIOR, 1.0, 1.0).tune_prior("layer", temperature=True, steps=12, **options)
        found.append([*posterior.prior_precision.values(), posterior.noise_scale, posterior.temperature])  # pyright: ignore
    half = len(seen) // 2
    assert 1 < len(fills) < half
    for (values, density), (others, exact) in zip(seen[:half], seen[half:], strict=True):
        assert values == others
        assert density == pytest.approx(exact, rel=1e-8)
    assert found[0] == pytest.approx(found[1], rel=1e-8)


def test_heldout_tuning_costs_a_few_predictions() -> None:
    """The model runs for one or two tables, not for each of the evaluations; other structures take a pass for each."""
    model, (x, y) = mlp(), data("categorical", 15)
    runs: list[int] = []
    model.register_forward_hook(lambda *_: runs.append(1))
    posterior = fitted(model, "kron")
    runs.clear()
    posterior.predict(x)
    once = len(runs)
    runs.clear()
    posterior.tune_prior(method="heldout", heldout=[(x, y)])
    assert len(runs) <= 3 * once


@pytest.mark.parametrize("structure", ["kron", "full"])
def test_heldout_tuning_shows_progress(structure: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(batches.time, "monotonic", count(step=3).__next__)  # every operation takes three seconds
    posterior = fitted(mlp(), structure)
    posterior.tune_prior(method="heldout", heldout=[data("categorical", 15)], progress=True)
    assert "step 2/100, log-density -" in (shown := capsys.readouterr().err)
    assert ("step 15/15" in shown) == (structure == "kron")
    posterior.tune_prior(method="heldout", heldout=[data("categorical", 15)], progress=False)
    assert not capsys.readouterr().err


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


def regression(*widths: int, structure: str = "full") -> tuple[LaplacePosterior, float]:
    """The posterior of a network that has the mean of its 40 targets, and the root-mean-square of their noise."""
    torch.manual_seed(0)
    layers = [part for a, b in zip((3, *widths), (*widths, 1)) for part in (nn.Linear(a, b, dtype=D), nn.ReLU())][:-1]
    model, x, noise = nn.Sequential(*layers), torch.randn(40, 3, dtype=D), 0.1 * torch.randn(40, 1, dtype=D)
    y = model(x).detach() + noise
    posterior = bayesgrad.laplace(model, [(x, y)], likelihood="gaussian", structure=structure)
    return posterior, float(noise.square().mean().sqrt())


def test_evidence_that_finds_too_much_noise_warns() -> None:
    """The evidence of a structure that ignores errors, for a deep network; that of the whole matrix is right."""
    posterior, rmse = regression(16, 16)
    assert posterior.fit.rmse == pytest.approx(rmse)
    assert posterior.tune_prior().noise_scale < 2 * rmse  # warnings are errors
    posterior, rmse = regression(16, 16, structure="input")
    words = (
        rf"found a noise of [0-9.]+, more than 2 times the .* on the data of laplace\(\), {rmse:.4g}: .*heldout=\.\.\."
    )
    with pytest.warns(UserWarning, match=words):
        posterior.tune_prior()
    assert posterior.noise_scale > 2 * rmse
    posterior.tune_prior(noise_scale=False)


def test_intervals_with_noise_that_nobody_chose_warn_once(tmp_path: Any) -> None:
    x = torch.randn(5, 3, dtype=D)
    posterior, _ = regression()
    posterior.save(tmp_path / "posterior")
    loaded = load(tmp_path / "posterior", posterior.model)
    for one in (posterior, loaded):
        one.interval(x, likelihood=Gaussian(0.2))
        with pytest.warns(
            UserWarning, match=r"neither given nor tuned, .* deviation of 1: call tune_prior\(\), or pass"
        ):
            one.interval(x) if one is posterior else one.predict(x, noise=True)
        one.interval(x)  # warnings are errors
    for chosen in (regression()[0].tune_prior(), regression()[0].set_prior(1.0, 1.0)):
        chosen.interval(x)
        chosen.save(tmp_path / "posterior")
        load(tmp_path / "posterior", posterior.model).interval(x)
    given = bayesgrad.laplace(nn.Linear(3, 1, dtype=D), [(x, x[:, :1])], likelihood="gaussian", noise_scale=1.0)
    given.interval(x)


def test_numbers_are_shown_with_four_digits() -> None:
    shown = repr(regression()[0].set_prior(math.pi, math.e))
    assert "prior_precision=3.142, noise_scale=2.718, " in shown
