"""Predictions and their parts against quadrature, conjugate posteriors and transcriptions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import bayesgrad
from bayesgrad.belief import Belief
from bayesgrad.posterior import GaussianPosterior, LaplacePosterior, mc_dropout
from bayesgrad.posterior.posterior import Posterior
from bayesgrad.precision import Diagonal
from bayesgrad.predictions import Decomposed, Moments

close = torch.testing.assert_close
D = torch.float64
NODES = torch.linspace(-9, 9, 6001, dtype=D)
WEIGHTS = torch.exp(-(NODES**2) / 2) / torch.exp(-(NODES**2) / 2).sum()


def integral(values: Tensor) -> Tensor:
    """E of a function of a standard normal, given at the nodes along the last dimension."""
    return (values * WEIGHTS).sum(-1)


def regression(
    outputs: int = 1, noise: float = 0.3, **options: Any
) -> tuple[LaplacePosterior, tuple[Tensor, Tensor], Tensor]:
    """A linear model at the mode of its posterior, whose covariance is conjugate; the data, and new inputs."""
    generator = torch.Generator().manual_seed(0)
    X, x = torch.randn(20, 4, dtype=D, generator=generator), torch.randn(5, 4, dtype=D, generator=generator)
    Y = X @ torch.randn(4, outputs, dtype=D, generator=generator)
    Y = Y + noise**0.5 * torch.randn(20, outputs, dtype=D, generator=generator)
    model = nn.Linear(4, outputs, bias=False, dtype=D)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.solve(X.T @ X / noise + 0.5 * torch.eye(4, dtype=D), X.T @ Y / noise).T)
    options = {"structure": "full", "prior_precision": 0.5, "noise_scale": noise**0.5, **options}
    return bayesgrad.laplace(model, [(X, Y)], likelihood="gaussian", **options), (X, Y), x


def logits(outputs: int) -> tuple[Posterior, Tensor, Tensor, Tensor]:
    """A linear classifier with a joint belief; its inputs, and mean and covariance of its outputs by hand."""
    torch.manual_seed(1)
    model = nn.Linear(3, outputs, dtype=D)
    X, y = torch.randn(6, 3, dtype=D), torch.randint(max(2, outputs), (6,))
    y = y if outputs > 1 else y[:, None].to(D)
    likelihood = "categorical" if outputs > 1 else "bernoulli"
    posterior = bayesgrad.laplace(model, [(X, y)], likelihood=likelihood, structure="full", prior_precision=0.3)
    x = 2 * torch.randn(4, 3, dtype=D)
    (belief,) = posterior.beliefs.values()
    jacobian = torch.stack([torch.cat([torch.kron(torch.eye(outputs), x), torch.eye(outputs)], 1) for x in x[:, None]])
    return posterior, x, model(x).detach(), jacobian @ belief.precision.covariance @ jacobian.mT  # pyright: ignore


@pytest.mark.parametrize("structure", ["full", "subsampled"])
def test_the_linear_gaussian_case_is_the_conjugate_posterior(structure: str) -> None:
    """f ~ N(x'm, x'(X'X/s + δ I)^-1 x), and a new label has s more."""
    posterior, (X, _), x = regression(outputs=2, structure=structure)
    covariance = torch.linalg.inv(X.T @ X / 0.3 + 0.5 * torch.eye(4, dtype=D))
    variance = torch.einsum("ni,ij,nj->n", x, covariance, x)[:, None].expand(-1, 2)
    found = posterior.predict(x, method="linear", decompose=True)
    assert isinstance(found.prediction, Moments)
    close(found.prediction.mean, posterior.model(x).detach(), rtol=1e-10, atol=1e-10)  # pyright: ignore
    for spread in (found.prediction.variance, found.epistemic, found.total - 0.3):
        close(spread, variance, rtol=1e-10, atol=1e-10)
    close(found.aleatoric, torch.full((5, 2), 0.3, dtype=D))
    assert type(posterior.predict(x, method="linear")) is Moments
    label = posterior.predict([(x[:3], None), (x[3:], None)], noise=True)
    close(label.mean, found.prediction.mean)
    close(label.variance, found.total)


def test_monte_carlo_approaches_it_at_its_rate() -> None:
    """The error of a mean over S draws has the variance Var f/S, for few as for many."""
    posterior, _, x = regression(outputs=3)
    exact = posterior.predict(x[:1], method="linear")
    assert isinstance(exact, Moments)
    for samples, seeds in ((2, 150), (32, 60)):
        errors = torch.stack(
            [posterior.predict(x[:1], samples, "mc", seed=seed).mean - exact.mean for seed in range(seeds)]  # pyright: ignore
        )
        ratio = (errors.square() * samples / exact.variance).mean()
        assert abs(float(ratio) - 1) < 5 * math.sqrt(2 / errors.numel())


def test_parts_of_a_categorical_prediction() -> None:
    """E H(p) and H(E p) - E H(p) over the draws themselves."""
    posterior, x, _, _ = logits(3)
    found = posterior.predict(x, 9, "mc", decompose=True)
    draws = posterior.sample(9, seed=0)
    p = (torch.einsum("soi,ni->sno", draws["weight"], x) + draws["bias"][:, None]).softmax(-1)
    entropy = torch.distributions.Categorical(p).entropy().mean(0)
    close(found.prediction, p.mean(0))
    close(found.aleatoric, entropy)
    close(found.total, torch.distributions.Categorical(p.mean(0)).entropy())
    assert found.aleatoric.shape == (4,)
    assert bool((found.epistemic > 0).all())
    alone = posterior.predict(x, method="mean", decompose=True)
    close(alone.epistemic, torch.zeros(4, dtype=D), rtol=0, atol=1e-12)


def test_drawn_outputs_are_correlated() -> None:
    """Two logits are one, their difference, of variance v_1 + v_2 - 2 c: expectations by quadrature."""
    posterior, x, mean, covariance = logits(2)
    m = mean[:, 1] - mean[:, 0]
    v = covariance[:, 0, 0] + covariance[:, 1, 1] - 2 * covariance[:, 0, 1]
    p = (m[:, None] + v.sqrt()[:, None] * NODES).sigmoid()
    each = torch.special.entr(p) + torch.special.entr(1 - p)
    n = 4000
    found = posterior.predict(x, samples=n, method="linear", decompose=True)
    error = 5 * ((integral(p**2) - integral(p) ** 2) / n).sqrt()
    assert bool(((found.prediction[:, 1] - integral(p)).abs() < error).all())
    error = 5 * ((integral(each**2) - integral(each) ** 2) / n).sqrt()
    assert bool(((found.aleatoric - integral(each)).abs() < error).all())
    close(posterior.predict(x, samples=n, method="linear", link="mc"), found.prediction)
    v_alone = covariance[:, 0, 0] + covariance[:, 1, 1]
    wrong = integral((m[:, None] + v_alone.sqrt()[:, None] * NODES).sigmoid())
    assert float((wrong - integral(p)).abs().max()) > float(error.max())  # so that correlations matter


def test_the_bernoulli_link() -> None:
    posterior, x, mean, covariance = logits(1)
    p = (mean + covariance[:, 0].sqrt() * NODES).sigmoid()
    found = posterior.predict(x, samples=4000, method="linear", decompose=True)
    error = 5 * ((integral(p**2) - integral(p) ** 2) / 4000).sqrt()
    assert bool(((found.prediction[:, 0] - integral(p)).abs() < error).all())
    entropies = torch.special.entr(p) + torch.special.entr(1 - p)
    error = 5 * ((integral(entropies**2) - integral(entropies) ** 2) / 4000).sqrt()
    assert bool(((found.aleatoric[:, 0] - integral(entropies)).abs() < error).all())
    close(found.total, torch.special.entr(found.prediction) + torch.special.entr(1 - found.prediction))
    probit = posterior.predict(x, method="linear")
    close(probit, posterior.predict(x, method="linear", link="probit"))
    close(probit, (mean / (1 + math.pi / 8 * covariance[:, 0]).sqrt()).sigmoid())


def test_counts() -> None:
    """Of a log-normal rate: E y = E rate, Var y = E rate + Var rate."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1, dtype=D)
    beliefs = {n: Belief(p.detach(), Diagonal(torch.full_like(p, 0.1))) for n, p in model.named_parameters()}
    posterior, x = GaussianPosterior(beliefs, model), torch.randn(3, 2, dtype=D)
    f = model(x).detach() + (0.1 * (x.square().sum(1, keepdim=True) + 1)).sqrt() * NODES
    rate = integral(f.exp())[:, None]
    found = posterior.predict(x, method="linear", likelihood="poisson", decompose=True)
    close(found.prediction, rate, rtol=1e-9, atol=0)
    close(found.aleatoric, rate, rtol=1e-9, atol=0)
    close(found.epistemic, integral(f.exp().square())[:, None] - rate**2, rtol=1e-9, atol=0)
    drawn = posterior.predict(x, 500, likelihood="poisson", decompose=True)
    close(drawn.epistemic, found.epistemic, rtol=0.5, atol=0)


def test_inputs_in_chunks() -> None:
    """The same predictions, from passes of so many inputs at most."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    beliefs = {n: Belief(p.detach(), Diagonal(torch.full_like(p, 0.1))) for n, p in model.named_parameters()}
    posterior, x = GaussianPosterior(beliefs, model), torch.randn(11, 3, dtype=D)
    sizes: list[int] = []
    for method in ("mc", "mean", "linear"):
        whole = posterior.predict(x, 3, method, decompose=True, likelihood="gaussian", statistics="running")
        handle = model[0].register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
        parts = posterior.predict(x, 3, method, decompose=True, likelihood="gaussian", statistics="running", chunk=4)
        handle.remove()
        for a, b in zip(whole, parts):
            close(a, b, rtol=1e-12, atol=1e-12)
    assert max(sizes) == 4
    estimated = [posterior.predict(x, 3, statistics=x, chunk=chunk) for chunk in (None, 4)]
    close(*estimated, rtol=1e-12, atol=1e-12)
    dropped = mc_dropout(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)))
    assert torch.equal(dropped.predict(x.float(), chunk=2), dropped.predict(x.float()))


def test_the_parts_of_other_posteriors() -> None:
    """Masks on weights, linearised: correlated outputs have the covariance J diag(k(1-k)) J'."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    posterior = bayesgrad.optim.SpikeSlab(model, keep=0.3, drop_inputs=True).posterior(model)
    x = torch.randn(4, 3, dtype=D)
    _, covariance = posterior._linear_moments(bayesgrad.layers.network.Network(model, (x,)), joint=True)
    masks = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=D)] * 3)
    chance = (0.3**masks * 0.7 ** (1 - masks)).prod(1)
    slab = posterior.slab["weight"]
    f = torch.stack([functional_call(model, {"weight": slab * mask}, (x,)) for mask in masks]).detach()
    centred = f - torch.einsum("m,mno->no", chance, f)
    close(covariance, torch.einsum("m,mno,mnp->nop", chance, centred, centred))
    assert isinstance(posterior.predict(x, method="linear", decompose=True), Decomposed)


def test_bad_requests() -> None:
    posterior, x, _, _ = logits(3)
    with pytest.raises(ValueError, match="link must be None, 'probit' or 'mc', got 'laplace'"):
        posterior.predict(x, method="linear", link="laplace")
    with pytest.raises(ValueError, match=r"predict\(noise=True\) are for numbers .* the likelihood is 'categorical'"):
        posterior.predict(x, noise=True)
    with pytest.raises(ValueError, match="noise=True and decompose=True exclude each other"):
        posterior.predict(x, noise=True, decompose=True)  # pyright: ignore
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        posterior.predict(x, chunk=0)
    with pytest.raises(ValueError, match="link='probit' cannot decompose uncertainty"):
        posterior.predict(x, method="linear", link="probit", decompose=True)
