"""What samplers draw, against quadrature, closed forms that include the step, and a long NUTS run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bayesgrad import samplers
from bayesgrad.samplers import SNGD, Langevin

F64 = torch.float64


class Chains(nn.Module):
    """Weights of many chains side by side, (chains, n)."""

    def __init__(self, start: torch.Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(start.clone())


def simulate(sampler: torch.optim.Optimizer, gradient, steps: int, skip: int) -> torch.Tensor:
    """Every `skip`-th state of the second half, (kept, chains, n)."""
    (w,) = sampler.param_groups[0]["params"]
    kept = []
    for step in range(steps):
        w.grad = gradient(w.detach())
        sampler.step()
        if 2 * step >= steps and step % skip == 0:
            kept.append(w.detach().clone())
    return torch.stack(kept)


def langevin(start: torch.Tensor, metric, correction: str | None, lr: float) -> Langevin:
    """At T = N = 1."""
    return Langevin(Chains(start), lr, num_data=1, metric=metric, correction=correction, prior_precision=0.0)


@pytest.mark.parametrize(("correction", "power"), [("flat", 0.0), ("jeffreys", 0.5), (None, 1.0)])
def test_in_one_dimension_moments_are_those_of_quadrature(correction: str | None, power: float) -> None:
    """G = exp(1.2 tanh 2w), C = w^2/2, step 0.0025, 40000 chains: 0.02. None samples exp(-C) G, in 1-D only.

    Chains begin at quantiles of the target, and would be away from it by more at time 0.4 if it were another.
    """

    def metric(w: torch.Tensor) -> torch.Tensor:
        return (1.2 * torch.tanh(2 * w)).exp().reshape(-1, 1, 1)

    grid = torch.linspace(-8, 8, 20001, dtype=F64)
    p = (-(grid**2) / 2 + power * metric(grid).flatten().log()).softmax(0)
    mean = (p * grid).sum()
    variance = (p * (grid - mean) ** 2).sum()
    levels = (torch.arange(40000, dtype=F64) + 0.5) / 40000
    start = grid[torch.searchsorted(p.cumsum(0), levels)]
    w = simulate(langevin(start[:, None], metric, correction, 0.0025), lambda w: w, 160, 20)
    assert abs(float(w.mean() - mean)) < 0.02
    assert abs(float(w.var() - variance)) < 0.02


def test_in_two_dimensions_moments_are_those_of_quadrature() -> None:
    """A metric that is not diagonal, step 0.005: within 0.04; without a correction 0.1 and more."""
    H = torch.tensor([[1.0, 0.4], [0.4, 0.8]], dtype=F64)

    def metric(flat: torch.Tensor) -> torch.Tensor:
        w = flat.reshape(-1, 2)
        a, b = (0.6 * torch.tanh(w[:, 0] + 0.5 * w[:, 1])).exp(), (0.6 * torch.tanh(w[:, 1] - w[:, 0])).exp()
        c = 0.9 * torch.tanh(0.7 * w[:, 0] + w[:, 1])
        return torch.stack([torch.stack([a * a, a * c], 1), torch.stack([a * c, c * c + b * b], 1)], 1)

    def gradient(w: torch.Tensor) -> torch.Tensor:
        return w @ H + 0.2 * w**3

    side = torch.linspace(-5, 5, 201, dtype=F64)
    grid = torch.cartesian_prod(side, side)
    cost = torch.einsum("ni,ij,nj->n", grid, H, grid) / 2 + 0.05 * (grid**4).sum(1)
    logdet = torch.linalg.slogdet(metric(grid.flatten()))[1]

    def moments(w: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        mean = p @ w
        spread = torch.einsum("n,ni,nj->ij", p, w - mean, w - mean)
        return torch.stack([*mean, spread[0, 0], spread[1, 1], spread[0, 1]])

    for correction, power, published in (
        ("flat", 0.0, (0.0, 0.0, 0.783, 0.8831, -0.2519)),
        ("jeffreys", 0.5, (-0.0256, 0.3889, 0.7353, 0.8276, -0.2173)),
    ):
        p = (power * logdet - cost).softmax(0)
        target = moments(grid, p)
        torch.testing.assert_close(target, torch.tensor(published, dtype=F64), rtol=0, atol=1e-3)
        levels = (torch.arange(3000, dtype=F64) + 0.5) / 3000
        start = grid[torch.searchsorted(p.cumsum(0), levels)]
        w = simulate(langevin(start, metric, correction, 0.005), gradient, 200, 20).flatten(0, 1)
        assert float((moments(w, torch.full((len(w),), 1 / len(w), dtype=F64)) - target).abs().max()) < 0.04
    plain = simulate(langevin(start, metric, None, 0.005), gradient, 200, 20).flatten(0, 1)
    assert float((plain.mean(0) - target[:2]).abs().max()) > 0.1


@pytest.mark.parametrize("lr", [0.1, 0.5])
def test_a_finite_step_widens_the_samples_of_a_quadratic_cost(lr: float) -> None:
    """An AR(1) process: variance 1/(1 - eps/2), five standard errors of 20000 chains."""
    normal = torch.distributions.Normal(0.0, 1.0).icdf((torch.arange(20000, dtype=F64) + 0.5) / 20000)
    w = simulate(langevin(normal[:, None], "identity", None, lr), lambda w: w, 60, 15)[-1]
    expected = samplers.step_inflation(lr)
    assert abs(float(w.var()) / expected - 1) < 5 * math.sqrt(2 / 20000)
    assert lr < 0.2 or float(w.var()) > 1.2


def test_minibatch_natural_gradients_spread_as_lyapunovs_equation_says() -> None:
    """Logistic regression, N = 300, B = 15, eps = 0.1: each variance and the covariance within five standard errors.

    An error of 1/N of the variance is allowed for what is not quadratic about the cost.
    """
    generator = torch.Generator().manual_seed(0)
    N, B, lr, chains, damping = 300, 15, 0.1, 400, 0.1
    x = torch.randn(N, 2, dtype=F64, generator=generator)
    y = (torch.rand(N, dtype=F64, generator=generator) < (x @ torch.tensor([1.0, -0.5], dtype=F64)).sigmoid()).double()
    products = torch.einsum("ni,nj->nij", x, x).reshape(N, 4)

    def fisher(flat: torch.Tensor) -> torch.Tensor:
        p = (flat.reshape(-1, 2) @ x.T).sigmoid()
        return (p * (1 - p) @ products / N).reshape(-1, 2, 2)

    optimum = torch.zeros(2, dtype=F64)
    for _ in range(20):
        optimum -= torch.linalg.solve(fisher(optimum)[0], x.T @ ((x @ optimum).sigmoid() - y) / N)
    single = x * ((x @ optimum).sigmoid() - y)[:, None]
    F, Sigma = fisher(optimum)[0], single.T @ single / N
    expected = samplers.minibatch_covariance(F, Sigma, lr=lr, num_data=N, batch_size=B, damping=damping)

    def gradient(w: torch.Tensor) -> torch.Tensor:
        batch = torch.rand(len(w), N, generator=generator).topk(B, 1).indices  # without replacement
        error = (w @ x.T).sigmoid() - y
        return torch.einsum("cb,cbi->ci", error.gather(1, batch), x[batch]) / B

    start = optimum + torch.randn(chains, 2, dtype=F64, generator=generator) @ torch.linalg.cholesky(expected).T
    options = dict(num_data=N, batch_size=B, damping=damping, prior_precision=0.0)
    sampler = SNGD(Chains(start), lr, metric=fisher, seed=0, **options)
    w = simulate(sampler, gradient, 160, 20)  # draws 20 apart are correlated by 0.9^20 = 0.12, their squares by 0.01
    found = (w - optimum).flatten(0, 1).T @ (w - optimum).flatten(0, 1) / w[..., 0].numel()
    diagonal = expected.diagonal()
    error = ((expected**2 + torch.outer(diagonal, diagonal)) / w[..., 0].numel()).sqrt()
    allowed = 5 * error + torch.outer(diagonal, diagonal).sqrt() * 5 / N
    assert bool(((found - expected).abs() < allowed).all())
    settings = dict(lr=lr, num_data=N, batch_size=B, damping=damping, damping_noise=False)
    damped = samplers.minibatch_covariance(F, Sigma, **settings)
    assert float(((expected - damped).abs() / allowed).max()) > 1  # which the test could tell apart


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (SNGD, {}),
        (SNGD, {"correction": "flat"}),
        (SNGD, {"damping_noise": False}),
        (Langevin, {}),
    ],
    ids=["natural-gradients", "SNGD", "no-noise-for-damping", "Langevin"],
)
def test_damping_does_not_change_variances_in_any_direction(make: type, options: dict[str, Any]) -> None:
    """A quadratic cost with curvatures 0.03, 0.3 and 2 whose gradient noise is the Fisher's; damping 0.1, T = 0.98, 1.

    Variances divided by those of the posterior are 1.00 +- 0.05 in each direction, and within five standard errors of
    the closed form, which includes the step. Measured, with a standard error of 0.014:

    | curvature | 0.03 | 0.3 | 2 |
    |---|---|---|---|
    | minibatch natural gradients, and SNGD | 0.988 | 1.003 | 1.010 |
    | without the noise for the damping | 0.230 | 0.765 | 0.959 |
    | Langevin | 1.005 | 1.005 | 1.028 |

    Chains begin at the posterior, and forget their beginning by exp(-2 * 300 * 0.04 * 0.23) = 0.004 in the flattest
    direction.
    """
    curvature, lr, N, chains, damping = torch.tensor([0.03, 0.3, 2.0], dtype=F64), 0.04, 1000, 10000, 0.1
    B, minibatches = lr * N / 2, make is SNGD
    F, generator = torch.diag(curvature), torch.Generator().manual_seed(3)
    posterior = 1 / (N * curvature)
    start = torch.randn(chains, 3, dtype=F64, generator=generator) * posterior.sqrt()
    deviation = (curvature * samplers.batch_noise(N, B)).sqrt() if minibatches else torch.zeros(3, dtype=F64)

    def gradient(w: torch.Tensor) -> torch.Tensor:
        return w * curvature + deviation * torch.randn(w.shape, dtype=F64, generator=generator)

    settings = dict(num_data=N, damping=damping) | ({"batch_size": B} if minibatches else {})
    metric = {"metric": lambda w: curvature.repeat(chains), "prior_precision": 0.0, "seed": 0}
    sampler = make(Chains(start), lr, **settings, **metric, **options)
    w = simulate(sampler, gradient, 300, 300 - 1)[-1]
    ratio, error = w.square().mean(0) / posterior, math.sqrt(2 / chains)
    noisy = {name: value for name, value in options.items() if name == "damping_noise"}
    closed = (
        samplers.minibatch_covariance(F, F, lr=lr, **settings, **noisy)
        if minibatches
        else samplers.langevin_covariance(F, lr=lr, **settings)
    )
    oracle = closed.diagonal() / posterior
    assert bool(((ratio / oracle - 1).abs() < 5 * error).all())
    assert bool(((oracle - 1).abs() < 0.03).all()) != bool(noisy)
    assert bool(((ratio - 1).abs() < 0.05).all()) != bool(noisy)


def in_two_parameterisations(lr: float, correction: str | None, N: int, ones: int, chains: int) -> tuple[float, float]:
    """How far the means of a, of a = w and of a = sinh w, are apart in posterior deviations; and the standard error.

    Both see the same minibatches, so that the difference of a pair of chains has little noise.
    """
    mode, deviation = math.log(ones / (N - ones)), math.sqrt(N / (ones * (N - ones)))
    normal = torch.distributions.Normal(0.0, 1.0).icdf((torch.arange(chains, dtype=F64) + 0.5) / chains)
    B = round(lr * N / 2)
    means = []
    for value, slope in ((lambda w: w, torch.ones_like), (torch.sinh, torch.cosh)):
        rng = np.random.default_rng(0)
        start = mode + deviation * normal[:, None]

        def metric(w: torch.Tensor, value=value, slope=slope) -> torch.Tensor:
            p = value(w).sigmoid()
            return (p * (1 - p) * slope(w) ** 2).reshape(-1, 1, 1)

        def gradient(w: torch.Tensor, value=value, slope=slope, rng=rng) -> torch.Tensor:
            seen = torch.from_numpy(rng.hypergeometric(ones, N - ones, B, tuple(w.shape))) / B
            return (value(w).sigmoid() - seen) * slope(w)

        start = torch.asinh(start) if value is torch.sinh else start
        options = dict(metric=metric, correction=correction, prior_precision=0.0)
        sampler = SNGD(Chains(start), lr, num_data=N, batch_size=B, seed=0, **options)
        w = simulate(sampler, gradient, round(6 / lr), round(1 / lr))
        means.append(value(w).mean((0, 2)) / deviation)
    gap = means[1] - means[0]
    return float(gap.mean()), float(gap.std()) / math.sqrt(chains)


def test_only_corrected_minibatches_draw_the_same_functions_in_two_parameterisations() -> None:
    """y ~ Bernoulli(s(a)), with a the weight, or a = sinh w of a weight w; damping 0, two step sizes.

    Plain natural gradients are apart by far more than five standard errors, at any step. Corrected ones come together
    with the step, but for an error of 1/N where the noise of batches is not the Fisher's.
    """
    plain, corrected = (
        [in_two_parameterisations(lr, correction, 160, 128, 600) for lr in (0.1, 0.025)]
        for correction in (None, "jeffreys")
    )
    assert all(gap > 50 * error for gap, error in plain)
    assert abs(plain[0][0] - plain[1][0]) < 0.05 * plain[1][0]
    (coarse, error), (fine, _) = corrected
    assert coarse - fine > 2 * error
    assert abs(coarse) < 0.12 * plain[0][0]
    assert abs(fine) < 0.06 * plain[1][0]


def test_logistic_regression_on_breast_cancer_is_sampled_as_by_nuts() -> None:
    """Standardised features and a column of ones under N(0, I): 31 means and deviations of NumPyro's NUTS.

    20000 draws of NumPyro 0.22 are in breast_cancer.json (least effective sample size 21000). In 20000 steps of 0.1,
    means were within 0.064 deviations and deviations within 7.1 %. This is a short run, for which n draws at a step eps
    are worth n eps/2 of a mean, and a variance is allowed its 1/(1 - eps/2).
    """
    from sklearn.datasets import load_breast_cancer

    known = json.loads((Path(__file__).parent / "breast_cancer.json").read_text())
    mean, std = (torch.tensor(known[name], dtype=F64) for name in ("mean", "std"))
    x, y = (torch.tensor(part, dtype=F64) for part in load_breast_cancer(return_X_y=True))
    x = torch.cat([(x - x.mean(0)) / x.std(0, correction=0), torch.ones(len(x), 1, dtype=F64)], 1)
    model = nn.Linear(31, 1, bias=False, dtype=F64)
    lr, steps = 0.2, 800
    sampler = Langevin(
        model,
        lr,
        num_data=len(x),
        prior_precision=1.0,
        metric="fisher",
        damping=1 / len(x),
        correction="flat",
        likelihood="bernoulli",
    )
    with torch.no_grad():
        model.weight.copy_(mean)
    draws = []
    for _ in range(steps):
        sampler.zero_grad()
        outputs = model(x)
        sampler.observe(outputs)
        nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], y).backward()
        sampler.step()
        draws.append(model.weight.detach().flatten().clone())
    w = torch.stack(draws[50:])
    error = math.sqrt(2 / (lr * len(w)))
    assert sampler.correction_form == "closed"
    assert float(((w.mean(0) - mean) / std).abs().max()) < 4 * error
    ratio = w.std(0) / std / math.sqrt(samplers.step_inflation(lr))
    assert float((ratio - 1).abs().max()) < 4 * math.sqrt(1 / (2 * lr * len(w))) + 0.05
