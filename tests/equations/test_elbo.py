"""The variational bound: exact where all is Gaussian, by quadrature elsewhere, never above the evidence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from bayesgrad.belief import Belief
from bayesgrad.optim import IVON, VOGN
from bayesgrad.posterior import GaussianPosterior
from bayesgrad.precision import Diagonal
from equations.test_laplace import STRUCTURES, data, dense, fitted, flat, mlp
from equations.test_predictive import NODES, integral, regression

close = torch.testing.assert_close
D = torch.float64
PRIOR, NOISE = 0.5, 0.3


def expected_fit(covariance: Tensor, weight: Tensor, X: Tensor, Y: Tensor) -> float:
    """E_q log N(Y | Xw, s), w ~ N(weight, covariance)."""
    square = (Y - X @ weight[:, None]).square().sum() + torch.einsum("ni,ij,nj->", X, covariance, X)
    return float(-square / (2 * NOISE) - len(X) / 2 * math.log(2 * math.pi * NOISE))


def test_the_linear_gaussian_case() -> None:
    """At the exact posterior the bound is the evidence, which other Gaussians stay below."""
    exact, (X, Y), _ = regression(noise=NOISE)
    model = exact.model
    assert isinstance(model, nn.Linear)
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(20, dtype=D), X @ X.T / PRIOR + NOISE * torch.eye(20, dtype=D)
    ).log_prob(Y[:, 0])
    close(exact.log_marginal_likelihood(), marginal, rtol=1e-10, atol=1e-10)
    weight, loader = model.weight.detach()[0], [(X[:13], Y[:13]), (X[13:], Y[13:])]
    covariance = torch.linalg.inv(dense(exact))
    bound = exact.elbo(loader, prior_precision=PRIOR)
    close(expected_fit(covariance, weight, X, Y) - bound.divergence, float(marginal), rtol=1e-10, atol=1e-10)
    assert abs(bound.value - float(marginal)) < 5 * bound.error
    assert bound.value == bound.log_likelihood - bound.divergence
    variance = 1 / dense(exact).diagonal()
    diagonal = GaussianPosterior({"weight": Belief(weight[None], Diagonal(variance[None]))}, model)
    given = {"prior_precision": PRIOR, "likelihood": "gaussian", "noise_scale": NOISE**0.5}
    bound = diagonal.elbo(loader, samples=200, **given)
    fit = expected_fit(torch.diag(variance), weight, X, Y)
    assert abs(bound.log_likelihood - fit) < 5 * bound.error
    assert fit - bound.divergence < float(marginal)
    assert 0 < bound.error < 1
    half = diagonal.elbo(loader[:1], samples=200, num_data=20, **given)
    fit = 20 / 13 * expected_fit(torch.diag(variance), weight, X[:13], Y[:13])
    assert abs(half.log_likelihood - fit) < 5 * half.error


def test_a_logistic_weight_by_quadrature() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=D)
    x, y = torch.tensor([[0.5], [-1.0], [2.0]], dtype=D), torch.tensor([[1.0], [1.0], [0.0]], dtype=D)
    mean, variance = torch.tensor([[0.4]], dtype=D), torch.tensor([[0.7]], dtype=D)
    posterior = GaussianPosterior({"weight": Belief(mean, Diagonal(variance))}, model)
    bound = posterior.elbo([(x, y)], prior_precision=2.0, likelihood="bernoulli", samples=2000)
    weights = mean + variance.sqrt() * NODES  # (1, nodes)
    fit = torch.distributions.Bernoulli(logits=x * weights).log_prob(y).sum(0)
    assert abs(bound.log_likelihood - float(integral(fit))) < 5 * bound.error
    spread, fourth = (float(integral((fit - integral(fit)) ** power)) for power in (2, 4))
    error = math.sqrt((fourth / spread**2 - 1) / 2000) / 2  # of a standard deviation, relative
    assert bound.error == pytest.approx(math.sqrt(spread / 2000), rel=5 * error)
    prior = Normal(torch.zeros(1, 1, dtype=D), torch.tensor(0.5**0.5, dtype=D))
    assert bound.divergence == pytest.approx(float(kl_divergence(Normal(mean, variance.sqrt()), prior)))
    grid = torch.linspace(-12, 12, 40001, dtype=D)
    joint = torch.distributions.Bernoulli(logits=x * grid).log_prob(y).sum(0) + Normal(0.0, 0.5**0.5).log_prob(grid)
    assert bound.value < float(torch.logsumexp(joint, 0) + math.log(24 / 40000)) + 5 * bound.error


@pytest.mark.parametrize("structure", STRUCTURES)
def test_divergences_of_structures(structure: str) -> None:
    """Against torch's divergence of dense Gaussians, with one prior and with one for each layer."""
    posterior = fitted(mlp(), structure)
    mean = flat(posterior.mean)
    q = torch.distributions.MultivariateNormal(mean, precision_matrix=dense(posterior))
    for prior in (0.9, {"0.weight": 0.4, "0.bias": 0.4, "2.weight": 3.0, "2.bias": 3.0}):
        each = {
            n: torch.full_like(m, prior[n] if isinstance(prior, dict) else prior) for n, m in posterior.mean.items()
        }
        p = torch.distributions.MultivariateNormal(torch.zeros_like(mean), precision_matrix=torch.diag(flat(each)))
        assert posterior.divergence(prior) == pytest.approx(float(kl_divergence(q, p)), rel=1e-9)


@pytest.mark.parametrize("make", [IVON, VOGN])
def test_variational_training_raises_it(make: type) -> None:
    """By more than its error, from the first belief to the one after 200 steps."""
    model, (x, y) = mlp(), data()
    first = model if make is VOGN else model.parameters()
    optimizer = make(first, lr=0.1, num_data=12, prior_precision=1.0, betas=(0.9, 0.99))
    bounds = []
    for steps in (1, 200):
        for _ in range(steps):
            with optimizer.sampled():
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        bounds.append(optimizer.posterior(model).elbo([(x, y)], prior_precision=1.0, samples=64))
    assert bounds[1].value - bounds[0].value > 5 * (bounds[0].error + bounds[1].error)


class Far(Tensor):
    """A tensor that can be moved and counted, and refuses everything else, as one of another device."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") == "to":
                return args[0].as_subclass(Tensor)
            if getattr(func, "__name__", "") in ("__len__", "__get__", "dim", "size", "numel", "is_floating_point"):
                return func(*args, **(kwargs or {}))
        raise RuntimeError("Expected all tensors to be on the same device")


@pytest.mark.parametrize("structure", ["kron", "full"])
def test_batches_are_moved_to_the_device_of_the_model(structure: str) -> None:
    """The bound, and a prior that is tuned on held-out labels, are those of batches that are there already."""
    x, y = data()
    near, far = [(x, y)], [(x.as_subclass(Far), y.as_subclass(Far))]
    posterior = fitted(mlp(), structure)
    bounds = [posterior.elbo(loader, prior_precision=1.0, samples=2, seed=0) for loader in (near, far)]
    assert bounds[0] == bounds[1]
    tuned = [
        fitted(mlp(), structure).tune_prior(method="heldout", heldout=loader, steps=4).prior_precision
        for loader in (near, far)
    ]
    assert tuned[0] == tuned[1] != posterior.prior_precision


def test_bad_requests() -> None:
    posterior, loader = fitted(mlp(), "diag"), [data()]
    with pytest.raises(
        ValueError, match=r"the loader gave 0 and 12 examples in different passes: it is iterated once for each sample"
    ):
        posterior.elbo(iter(loader), prior_precision=1.0)
    with pytest.raises(ValueError, match="the loader gave 0 examples"):
        posterior.elbo([], prior_precision=1.0)
    with pytest.raises(ValueError, match="prior_precision must be a finite positive number, got 0"):
        posterior.elbo(loader, prior_precision=0)
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        posterior.elbo(loader, prior_precision=1.0, samples=0)
    assert math.isnan(posterior.elbo(loader, prior_precision=1.0, samples=1).error)
