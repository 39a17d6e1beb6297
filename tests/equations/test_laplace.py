"""Laplace's method against explicit Jacobians, closed forms and laplace-torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

import bayesgrad
from bayesgrad.belief import Joint
from bayesgrad.layers import output_covariance
from bayesgrad.layers.network import Network
from bayesgrad.likelihoods import Categorical
from bayesgrad.posterior import LaplacePosterior, load

close = torch.testing.assert_close
STRUCTURES = ("diag", "kron", "input", "full", "subsampled")
N, IN, OUT = 12, 3, 3
PRIOR = 0.7

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of one example
    "categorical": lambda f, y: F.cross_entropy(f[None], y[None]),
    "bernoulli": lambda f, y: F.binary_cross_entropy_with_logits(f, y, reduction="sum"),
    "gaussian": lambda f, y: -torch.distributions.Normal(f, 1.0).log_prob(y).sum(),
    "poisson": lambda f, y: -torch.distributions.Poisson(f.exp()).log_prob(y).sum(),
}


def mlp(outputs: int = OUT) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, 4), nn.LayerNorm(4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, OUT)).double()


def conv() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Unflatten(1, (1, IN)), nn.Conv1d(1, 4, 2, padding=1), nn.Tanh(), nn.Conv1d(4, 2, 2, groups=2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * IN, OUT)).double()


def data(likelihood: str = "categorical", count: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, IN, dtype=torch.float64, generator=generator)
    if likelihood == "categorical":
        return x, torch.randint(OUT, (count,), generator=generator)
    y = torch.randn(count, OUT, dtype=torch.float64, generator=generator)
    return x, {"gaussian": y, "bernoulli": (y > 0).double(), "poisson": y.exp().round()}[likelihood]


def batches(x: Tensor, y: Tensor, size: int = 5) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size)))


def eye(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


def flat(values: Any) -> Tensor:
    return torch.cat([v.flatten() for v in values.values()])


def jacobians(model: nn.Module, x: Tensor) -> Tensor:
    """(N, outputs, n), by torch.func alone."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    rows = [jacrev(lambda p, x=x: functional_call(model, p, (x[None],)).flatten())(params) for x in x]
    return torch.stack([torch.cat([row[name].flatten(1) for name in params], 1) for row in rows])


def gauss_newton(model: nn.Module, x: Tensor, y: Tensor, likelihood: str) -> Tensor:
    J, f = jacobians(model, x), model(x).detach()
    H = torch.stack([jacrev(jacrev(LOSSES[likelihood]))(f, y) for f, y in zip(f, y)])
    return torch.einsum("nci,ncd,ndj->ij", J, H, J)


def dense(posterior: LaplacePosterior) -> Tensor:
    """The precision of the whole posterior, in the order of the model's parameters."""
    names, sizes = list(posterior.mean), [m.numel() for m in posterior.mean.values()]
    starts = dict(zip(names, [0, *torch.tensor(sizes).cumsum(0).tolist()]))
    total = torch.zeros(sum(sizes), sum(sizes), dtype=torch.float64)
    for name, belief in posterior.beliefs.items():
        where = {
            own: starts[own] + torch.arange(m.numel()).view(m.shape)
            for own, m in belief.split(name, belief.mean).items()
        }
        index = (belief.join(where) if isinstance(belief, Joint) else where[name]).flatten()
        total[index[:, None], index] = belief.precision.to_dense()
    return total


def fitted(model: nn.Module, structure: str, likelihood: str = "categorical", **options: Any) -> LaplacePosterior:
    loader = options.pop("loader", None) or batches(*data(likelihood))
    options = {"prior_precision": PRIOR, **options}
    return bayesgrad.laplace(model.eval(), loader, likelihood=likelihood, structure=structure, **options)


@pytest.mark.parametrize("likelihood", LOSSES)
@pytest.mark.parametrize("make", [mlp, normed, conv])
def test_full_diag_and_subsampled_are_the_gauss_newton_matrix(make: Callable[[], nn.Module], likelihood: str) -> None:
    """P = δ I + Σ_j J_j' H_j J_j, with an explicit Jacobian and Hessian of each example."""
    model = make().eval()
    x, y = data(likelihood)
    expected = gauss_newton(model, x, y, likelihood) + PRIOR * eye(sum(p.numel() for p in model.parameters()))
    close(dense(fitted(model, "full", likelihood)), expected, rtol=1e-9, atol=1e-9)
    close(dense(fitted(model, "diag", likelihood)), torch.diag(expected.diagonal()), rtol=1e-10, atol=1e-10)
    close(dense(fitted(model, "subsampled", likelihood)), expected, rtol=1e-10, atol=1e-10)
    rescaled = PRIOR * eye(len(expected)) + 3 * (expected - PRIOR * eye(len(expected)))
    close(dense(fitted(model, "full", likelihood, num_data=3 * N)), rescaled, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fisher", ["sampled", "empirical"])
def test_other_fishers_are_sums_of_outer_products(fisher: str) -> None:
    model, (x, y) = mlp(), data("gaussian")
    found = dense(fitted(model, "full", "gaussian", fisher=fisher, loader=[(x, y)], noise_scale=0.5**0.5))
    J = jacobians(model, x)
    if fisher == "empirical":
        residual = (model(x) - y).detach() / 0.5
    else:
        drawn = torch.randn(N, OUT, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        residual = -drawn / 0.5**0.5
    g = torch.einsum("nc,nci->ni", residual, J)
    close(found, PRIOR * eye(J.shape[-1]) + g.T @ g, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bias", ["joint", "separate"])
@pytest.mark.parametrize("structure", ["kron", "input"])
def test_kronecker_factors(structure: str, bias: str) -> None:
    """N A ⊗ E of each layer, transcribed, plus the prior; with separate biases their blocks are exact."""
    model, (x, y) = mlp(), data()
    p = model(x).softmax(1).detach()
    H = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    exact = gauss_newton(model, x, y, "categorical")
    hidden = model[1](model[0](x)).detach()
    slopes = (1 - hidden**2)[:, :, None] * model[2].weight.detach().T  # (N, 5, out)
    errors = [slopes @ H @ slopes.mT, H]
    found, offset = dense(fitted(model, structure, bias=bias)), 0
    for a, e, layer in zip((x, hidden), errors, (model[0], model[2])):
        fan_out, fan_in = layer.weight.shape
        if bias == "joint":
            a = torch.cat([a, torch.ones(N, 1)], 1)
        E = e.mean(0) if structure == "kron" else eye(fan_out)
        block = torch.kron(E, a.T @ a)
        size = fan_out * (fan_in + 1)
        own = found[offset : offset + size, offset : offset + size]
        weights = torch.arange(fan_out * fan_in).view(fan_out, fan_in)
        shifts = fan_out * fan_in + torch.arange(fan_out)
        expected = torch.zeros(size, size, dtype=torch.float64)
        if bias == "joint":
            order = torch.cat([weights, shifts[:, None]], 1).flatten()
            expected[order[:, None], order] = block
        else:
            expected[: fan_out * fan_in, : fan_out * fan_in] = block
            ones = N * eye(fan_out) if structure == "input" else exact[offset:, offset:][shifts[:, None], shifts]
            expected[shifts[:, None], shifts] = ones
        close(own, expected + PRIOR * eye(size), rtol=1e-10, atol=1e-10)
        offset += size


def test_one_example_has_an_exact_kronecker_factorisation() -> None:
    """Also in grouped convolutions, at a single position."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 4, 2, groups=2), nn.Flatten()).double()
    x, y = torch.randn(1, 4, dtype=torch.float64), torch.randn(1, 4, dtype=torch.float64)
    close(
        dense(fitted(model, "kron", "gaussian", loader=[(x, y)])),
        gauss_newton(model, x, y, "gaussian") + PRIOR * eye(12),
    )


def test_an_embedding_has_a_diagonal_of_counts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 3), nn.Flatten(0, 1), nn.Unflatten(0, (-1, 1)), nn.Flatten()).double()
    x, y = torch.tensor([[0], [2], [2]]), torch.randn(3, 3, dtype=torch.float64)
    expected = torch.kron(torch.diag(torch.tensor([1.0, 0, 2, 0], dtype=torch.float64)), eye(3)) + PRIOR * eye(12)
    for structure in ("kron", "input", "full"):
        close(dense(fitted(model, structure, "gaussian", loader=[(x, y)])), expected)


@pytest.mark.parametrize("prior", [PRIOR, {"0.weight": 0.4, "0.bias": 3.0, "2.weight": 0.7, "2.bias": 1.0}])
def test_subsampled_is_full(prior: Any) -> None:
    """Cov of the map (y, z) -> sample is B B' for its matrix B, found by its columns; no Monte Carlo."""
    model, (x, _) = mlp(), data()
    full, posterior = (fitted(model, s, num_data=2.5 * N, prior_precision=prior) for s in ("full", "subsampled"))
    (belief,) = posterior.beliefs.values()
    size, few = belief.mean.numel(), len(belief.precision.gram)
    B = torch.stack([belief.precision.draw(u[None, :size], u[size:]).flatten() for u in eye(size + few)], 1)
    covariance = torch.linalg.inv(dense(full))
    close(B @ B.T, covariance, rtol=1e-10, atol=1e-10)
    roots = torch.stack([belief.precision.sample(unit[None]).flatten() for unit in eye(size)], 1)
    close(roots @ roots.T, covariance, rtol=1e-10, atol=1e-10)
    close(flat(posterior.variance()), covariance.diagonal(), rtol=1e-10, atol=1e-10)
    close(flat(full.variance()), covariance.diagonal(), rtol=1e-10, atol=1e-10)
    close(belief.precision.logdet(), -torch.logdet(covariance), rtol=1e-10, atol=1e-10)
    close(posterior.log_marginal_likelihood(), full.log_marginal_likelihood(), rtol=1e-10, atol=1e-10)
    close(posterior.predict(x, method="linear"), full.predict(x, method="linear"), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_sampled_covariance(structure: str) -> None:
    """Within five standard errors of the covariance, in every entry."""
    posterior = fitted(mlp(), structure)
    expected, count = torch.linalg.inv(dense(posterior)), 4000
    draws = posterior.sample(count)
    deviation = torch.cat([(draws[name] - m).flatten(1) for name, m in posterior.mean.items()], 1)
    error = (torch.outer(expected.diagonal(), expected.diagonal()) + expected**2).sqrt() / math.sqrt(count)
    assert ((deviation.T @ deviation / count - expected).abs() / error).max() < 5


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_evidence(structure: str, likelihood: str) -> None:
    """The formula, transcribed with the dense precision; and its derivatives by finite differences."""
    model, (x, y) = mlp(), data(likelihood)
    noise = 0.3**0.5 if likelihood == "gaussian" else 1.0
    posterior = fitted(model, structure, likelihood, noise_scale=noise)
    w, f = flat(dict(model.named_parameters())).detach(), model(x).detach()
    if likelihood == "gaussian":
        fit = torch.distributions.Normal(f, noise).log_prob(y).sum()
    else:
        fit = -F.cross_entropy(f, y, reduction="sum")
    volume = torch.logdet(dense(posterior)) - len(w) * math.log(PRIOR) + PRIOR * w @ w
    close(posterior.log_marginal_likelihood(), fit - volume / 2, rtol=1e-10, atol=1e-10)
    prior, sigma = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (PRIOR, noise))
    gradients = torch.autograd.grad(posterior.log_marginal_likelihood(prior, sigma), [prior, sigma])

    def evidence(prior: float, noise: float) -> Tensor:
        return fitted(model, structure, likelihood, prior_precision=prior, noise_scale=noise).log_marginal_likelihood()

    slope = (evidence(PRIOR + 1e-4, noise) - evidence(PRIOR - 1e-4, noise)) / 2e-4
    close(gradients[0], slope, rtol=1e-6, atol=1e-6)
    slope = torch.zeros_like(slope)  # of a likelihood without noise, which takes no other
    if likelihood == "gaussian":
        slope = (evidence(PRIOR, noise + 1e-5) - evidence(PRIOR, noise - 1e-5)) / 2e-5
    close(gradients[1], slope, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_tuning_finds_the_optimum(structure: str) -> None:
    posterior = fitted(mlp(), structure, "gaussian")
    before = posterior.log_marginal_likelihood()
    posterior.tune_prior(noise_scale=True)
    values = [
        torch.tensor(v, dtype=torch.float64, requires_grad=True)
        for v in (posterior.prior_precision, posterior.noise_scale)
    ]
    best = posterior.log_marginal_likelihood(*values)
    assert best > before
    slopes = torch.stack(torch.autograd.grad(best, values)) * torch.stack(values).detach()  # by logarithms
    assert slopes.abs().max() < 1e-5
    for factor in (0.9, 1.1):
        assert posterior.log_marginal_likelihood(posterior.prior_precision * factor) < best
        assert posterior.log_marginal_likelihood(noise_scale=posterior.noise_scale * factor**0.5) < best


@pytest.mark.parametrize("structure", STRUCTURES)
def test_tuning_of_layers(structure: str) -> None:
    one, each = (fitted(mlp(), structure).tune_prior(per) for per in ("model", "layer"))
    assert each.log_marginal_likelihood() > one.log_marginal_likelihood()
    prior = each.prior_precision
    assert prior["0.weight"] == prior["0.bias"] != prior["2.weight"]
    close(
        dense(each) - torch.diag(flat({n: torch.full_like(m, prior[n]) for n, m in each.mean.items()})),
        dense(one) - one.prior_precision * eye(38),
        rtol=1e-9,
        atol=1e-9,
    )


def test_tuning_is_bayesian_ridge_regression() -> None:
    """Weights at their optimum, then the prior's and the noise's, in turns: scikit-learn's fixed point."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, dtype=torch.float64, generator=generator)
    y = x @ torch.randn(6, 1, dtype=torch.float64, generator=generator) + 0.4 * torch.randn(
        40, 1, dtype=torch.float64, generator=generator
    )
    flatter = {"alpha_1": 0.0, "alpha_2": 0.0, "lambda_1": 0.0, "lambda_2": 0.0}
    ridge = linear_model.BayesianRidge(max_iter=2000, tol=1e-14, fit_intercept=False, **flatter).fit(
        x.numpy(), y[:, 0].numpy()
    )
    model, prior, noise = nn.Linear(6, 1, bias=False).double(), 1.0, 1.0
    for _ in range(60):
        with torch.no_grad():
            model.weight.copy_(torch.linalg.solve(x.T @ x + prior * noise * eye(6), x.T @ y).T)
        posterior = fitted(model, "full", "gaussian", loader=[(x, y)], prior_precision=prior, noise_scale=noise**0.5)
        posterior.tune_prior(noise_scale=True)
        prior, noise = posterior.prior_precision, posterior.noise_scale**2
    assert prior == pytest.approx(ridge.lambda_, rel=1e-6)
    assert 1 / noise == pytest.approx(ridge.alpha_, rel=1e-6)
    close(torch.linalg.inv(dense(posterior)), torch.tensor(ridge.sigma_), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("make", [mlp, conv, normed])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.filterwarnings("ignore:structure=")
def test_linearised_prediction(structure: str, make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs have the covariance J P^-1 J', whatever the model's weights and flags are by now."""
    model, (x, _) = make().eval(), data()
    posterior = fitted(model, structure, "gaussian")
    monkeypatch.setattr(output_covariance, "CHUNK", 200)
    monkeypatch.setattr(output_covariance, "BLOCK", 30)
    J, f = jacobians(model, x), model(x).detach()
    expected = torch.einsum("nci,ij,ndj->ncd", J, torch.linalg.inv(dense(posterior)), J)
    model.requires_grad_(False)
    model.get_parameter("1.weight" if make is not mlp else "2.weight").mul_(2)
    mean, variance = posterior.predict(x, method="linear")
    close(mean, f)
    close(variance, expected.diagonal(dim1=1, dim2=2), rtol=1e-10, atol=1e-10)
    close(posterior._linear_moments(Network(model, (x,)), joint=True)[1], expected, rtol=1e-10, atol=1e-10)
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("structure", STRUCTURES)
def test_subsets_and_what_is_left_alone(structure: str) -> None:
    """The posterior of the last layer is the block of it; mode, flags, gradients and weights are as they were."""
    model = mlp().eval()
    model[0].weight.requires_grad_(False)
    model[2].weight.grad = torch.ones_like(model[2].weight)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ways = [fitted(model, structure, params=params) for params in ("last_layer", "2", ["2.weight", "2.bias"])]
    whole = dense(fitted(model, structure, params=list(before)))[-18:, -18:]
    for posterior in ways:
        assert list(posterior.mean) == ["2.weight", "2.bias"]
        close(dense(posterior), whole, rtol=1e-9, atol=1e-9)
    assert list(fitted(model, structure, params="0.weight").mean) == ["0.weight"]  # trained or not
    named = pytest.warns(UserWarning, match=r"does not support 0\.bias:") if structure == "input" else nullcontext()
    with named:  # without its weight, the positions of a bias are not known
        assert list(fitted(model, structure).mean) == ["0.bias", "2.weight", "2.bias"]
    assert [p.requires_grad for p in model.parameters()] == [False, True, True, True]
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert torch.equal(model[2].weight.grad, torch.ones_like(model[2].weight))
    assert all(p.grad is None for name, p in model.named_parameters() if name != "2.weight")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_subsample_counts_for_all() -> None:
    """H is N/n times that of the n drawn examples; the loss is that of all."""
    model, (x, y) = mlp(), data()
    found = fitted(model, "full", subsample=4, seed=3)
    options = [set(c) for c in torch.combinations(torch.arange(N), 4).tolist()]
    each = torch.stack([gauss_newton(model, x[i : i + 1], y[i : i + 1], "categorical") for i in range(N)])
    H = dense(found) - PRIOR * eye(38)
    errors = [float((N / 4 * each[list(o)].sum(0) - H).abs().max()) for o in options]
    assert min(errors) < 1e-9 < sorted(errors)[1]
    assert found.fit.loss == pytest.approx(fitted(model, "full").fit.loss)
    again, other = (dense(fitted(model, "full", subsample=4, seed=seed)) for seed in (3, 4))
    assert torch.equal(again, dense(found))
    assert not torch.allclose(other, again)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_directions_may_come_one_by_one(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together = dense(fitted(conv(), structure))
    monkeypatch.setattr(sys.modules["bayesgrad.laplace"], "DIRECTIONS", 2)
    close(dense(fitted(conv(), structure)), together, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_saving(structure: str, tmp_path: Any) -> None:
    model = mlp()
    posterior = fitted(model, structure, "gaussian", noise_scale=0.5**0.5).tune_prior()
    posterior.save(tmp_path / "posterior.safetensors")
    again = load(tmp_path / "posterior.safetensors", model)
    x, _ = data()
    assert isinstance(again, LaplacePosterior)
    assert torch.equal(again.predict(x, samples=3).mean, posterior.predict(x, samples=3).mean)
    close(again.log_marginal_likelihood(), posterior.log_marginal_likelihood(), rtol=0, atol=0)


def test_what_has_no_factors_gets_a_diagonal() -> None:
    model = normed().eval()
    x, y = data()
    exact = gauss_newton(model, x, y, "categorical")
    with pytest.warns(UserWarning, match=r"structure='kron' does not support 1.weight, 1.bias, 3.weight, 3.bias: they"):
        found = dense(fitted(model, "kron")) - PRIOR * eye(len(exact))
    close(found[16:24, 16:24], torch.diag(exact.diagonal()[16:24]), rtol=1e-10, atol=1e-10)


def test_a_layer_that_mixes_examples_in_a_later_batch() -> None:
    """One example alone cannot show that a layer has its examples in another order."""

    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(IN, OUT, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.flip(0)).flip(0)

    model, (x, y) = Reversed(), data()
    with pytest.raises(ValueError, match=r"inner.weight mixes the examples of a later batch.* structure='diag'"):
        fitted(model, "kron", loader=[(x[:1], y[:1]), (x[1:], y[1:])])
    found = fitted(model, "full", loader=[(x[:1], y[:1]), (x[1:], y[1:])])
    close(dense(found) - PRIOR * eye(12), gauss_newton(model, x, y, "categorical"), rtol=1e-9, atol=1e-9)


def test_inputs_alone_need_one_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that the Fisher has; unless there are parameters that have a diagonal."""
    directions: list[int] = []
    roots = Categorical.hessian_roots
    monkeypatch.setattr(Categorical, "hessian_roots", lambda *a: (directions.append(1) or root for root in roots(*a)))
    fitted(mlp(), "input", loader=[data()])
    assert len(directions) == 1
    with pytest.warns(UserWarning, match="they get a diagonal"):
        fitted(normed(), "input", loader=[data()])
    assert len(directions) == 1 + OUT


def test_a_small_prior_is_not_rounded_away_in_float32() -> None:
    """Of two features that are equal in the data, the difference of the weights has the variance of the prior."""
    torch.manual_seed(0)
    a = torch.randint(1, 4, (1000, 1)).float()
    x, model = torch.cat([a, a], 1), nn.Linear(2, 1, bias=False)
    options: dict[str, Any] = dict(likelihood="gaussian", structure="full", prior_precision=0.5, noise_scale=0.003)
    posterior = bayesgrad.laplace(model, [(x, model(x).detach())], **options)
    close(posterior.functional_variance(torch.tensor([[1.0, -1.0]])), torch.tensor([[4.0]]), rtol=1e-3, atol=0)
    draws = posterior.sample(4000)["weight"]  # also where the covariance is singular in float32
    close((draws[..., 0] - draws[..., 1]).var(), torch.tensor(4.0), rtol=5 * math.sqrt(2 / 4000), atol=0)
