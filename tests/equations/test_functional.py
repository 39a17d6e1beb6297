"""Posteriors as distributions of functions: samples of outputs, linearised ones, densities, and what predicts."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import bayesgrad
from bayesgrad.belief import Belief
from bayesgrad.posterior import (
    BernoulliPosterior,
    DropoutPosterior,
    GaussianPosterior,
    LaplacePosterior,
    Posterior,
    SampledPosterior,
    mc_dropout,
)
from bayesgrad.posterior.averages import FAR
from bayesgrad.posterior.units import Units
from bayesgrad.precision import Diagonal

close = torch.testing.assert_close
D = torch.float64
STRUCTURES = ["diag", "kron", "input", "full", "subsampled"]


def network(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def fitted(structure: str = "full", **options: Any) -> tuple[LaplacePosterior, Tensor]:
    model = network()
    x, y = torch.randn(12, 4, dtype=D), torch.randint(3, (12,))
    options = {"likelihood": "categorical", "prior_precision": 2.0, **options}
    return bayesgrad.laplace(model, [(x, y)], structure=structure, **options), torch.randn(6, 4, dtype=D)


def jacobian(posterior: Posterior, x: Tensor) -> Tensor:
    """(examples, outputs, weights) of the posterior's model at its mean, by torch.func."""
    model, mean = posterior.model, posterior.mean
    assert model is not None
    found = jacrev(lambda w: functional_call(model, w, (x,)))(mean)
    return torch.cat([found[name].flatten(2) for name in mean], 2)


def flat(values: dict[str, Tensor], posterior: Posterior) -> Tensor:
    return torch.cat([values[name].flatten(1) for name in posterior.mean], 1)


def covariance(posterior: Posterior) -> Tensor:
    """Σ of all weights, in the order of the mean, from the dense matrices of blocks."""
    assert isinstance(posterior, GaussianPosterior)
    names = list(posterior.mean)
    sizes = [posterior.mean[name].numel() for name in names]
    total = torch.zeros(sum(sizes), sum(sizes), dtype=D)
    starts = dict(zip(names, [0, *torch.tensor(sizes).cumsum(0).tolist()]))
    for name, belief in posterior.beliefs.items():
        dense = torch.linalg.inv(belief.precision.to_dense())
        count = torch.arange(len(dense), dtype=D).view(belief.mean.shape)
        parts = belief.split(name, count)
        place = torch.cat([starts[own] + torch.arange(part.numel()) for own, part in parts.items()])
        order = torch.cat([part.flatten() for part in parts.values()]).long()
        total[place[:, None], place] = dense[order[:, None], order]
    return total


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_variance_of_functions_is_that_of_explicit_jacobians(structure: str) -> None:
    posterior, x = fitted(structure)
    J, S = jacobian(posterior, x), covariance(posterior)
    expected = J @ S @ J.mT
    close(posterior.functional_variance(x, joint=True), expected, rtol=1e-9, atol=1e-12)
    close(posterior.functional_variance(x), expected.diagonal(dim1=1, dim2=2), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_samples_of_functions_are_linear_in_samples_of_weights(structure: str) -> None:
    """f(m) + J (w - m) for the same weights as `sample` has, for all inputs at once and in chunks."""
    posterior, x = fitted(structure)
    draws = posterior.sample(5, seed=0)
    assert posterior.model is not None
    centre = posterior.model(x).detach()
    change = flat(draws, posterior) - flat({n: m[None] for n, m in posterior.mean.items()}, posterior)
    expected = centre + torch.einsum("nkp,sp->snk", jacobian(posterior, x), change)
    close(posterior.functional_samples(x, 5), expected, rtol=1e-10, atol=1e-12)
    close(posterior.functional_samples(x, 5, chunk=4), expected, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(posterior.functional_samples(x, 5, seed=1), expected)
    outputs = torch.stack(
        [functional_call(posterior.model, {n: w[k] for n, w in draws.items()}, (x,)) for k in range(5)]
    )
    close(posterior.predictive_samples(x, 5), outputs.detach(), rtol=1e-12, atol=1e-12)
    close(posterior.predictive_samples(x, 5).softmax(-1).mean(0), posterior.predict(x, 5, "mc"))


def test_samples_of_functions_have_the_linearised_variance() -> None:
    posterior, x = fitted("kron")
    n = 1000
    drawn, variance = posterior.functional_samples(x[:2], n), posterior.functional_variance(x[:2])
    assert bool(((drawn.var(0) / variance - 1).abs() < 5 * math.sqrt(2 / n)).all())


def test_functions_of_dropout_are_linear_in_the_masks() -> None:
    """Weights are linear in the masks, so samples have the variance that the masks give."""
    model = network()
    slab = {"2.weight": model[2].weight.detach()}
    posterior = DropoutPosterior(slab, {"2.weight": torch.full((5,), 0.6, dtype=D)}, {"2.weight": Units(1)}, model)
    x, n = torch.randn(3, 4, dtype=D), 1000
    ratio = posterior.functional_samples(x, n).var(0) / posterior.functional_variance(x)
    assert bool(((ratio - 1).abs() < 6 * math.sqrt(2 / n)).all())


def test_posteriors_without_a_linearisation_say_so() -> None:
    model = network()
    bag = SampledPosterior([{n: p.detach() for n, p in model.named_parameters()}] * 2, model)
    dropped = mc_dropout(nn.Sequential(model, nn.Dropout(0.5)))
    x = torch.randn(3, 4, dtype=D)
    assert bag.predictive_samples(x, 2).shape == dropped.predictive_samples(x, 2).shape == (2, 3, 3)
    for posterior in (bag, dropped):
        for use in (posterior.functional_samples, posterior.functional_variance):
            with pytest.raises(ValueError, match="no linearised prediction: use method='mc'"):
                use(x)
        with pytest.raises(TypeError, match="has no density"):
            posterior.log_prob(posterior.mean)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("prior", [2.0, {"0.weight": 1.0, "0.bias": 1.0, "2.weight": 3.0, "2.bias": 3.0}])
def test_log_prob_is_that_of_the_dense_gaussian(structure: str, prior: Any) -> None:
    posterior, _ = fitted(structure, prior_precision=prior, temperature=0.5)
    draws = posterior.sample(4)
    centre = torch.cat([m.flatten() for m in posterior.mean.values()])
    expected = torch.distributions.MultivariateNormal(centre, covariance(posterior)).log_prob(flat(draws, posterior))
    close(posterior.log_prob(draws), expected, rtol=1e-8, atol=1e-8)
    close(posterior.log_prob({name: w[1] for name, w in draws.items()}), expected[1], rtol=1e-8, atol=1e-8)
    with pytest.raises(ValueError, match="weights of all parameters"):
        posterior.log_prob({"0.weight": draws["0.weight"]})


def test_log_prob_of_binary_weights_and_of_diagonal_beliefs() -> None:
    binary = BernoulliPosterior({"a": torch.tensor([0.3, -1.0], dtype=D), "b": torch.tensor(0.2, dtype=D)})
    signs = [
        {"a": torch.tensor([i, j]), "b": torch.tensor(k)} for i in (-1.0, 1.0) for j in (-1.0, 1.0) for k in (-1.0, 1.0)
    ]
    assert sum(float(binary.log_prob(s).exp()) for s in signs) == pytest.approx(1, abs=1e-12)
    assert binary.log_prob(binary.sample(7)).shape == (7,)
    with pytest.raises(ValueError, match="a must have entries -1 and 1"):
        binary.log_prob({"a": torch.zeros(2), "b": torch.tensor(1.0)})
    scalar = GaussianPosterior({"s": Belief(torch.tensor(1.0, dtype=D), Diagonal(torch.tensor(4.0, dtype=D)))})
    expected = torch.distributions.Normal(1.0, 2.0).log_prob(torch.tensor([0.5, 2.0], dtype=D))
    close(scalar.log_prob({"s": torch.tensor([0.5, 2.0], dtype=D)}), expected)


# --- which method predicts ---


def wide(prior_precision: float) -> tuple[LaplacePosterior, Tensor, Tensor]:
    """A classifier of three separate clusters; with a weak prior its diagonal Gaussian is much too wide to sample."""
    torch.manual_seed(0)
    y = torch.arange(90) % 3
    x = 4 * nn.functional.one_hot(y, 3).to(D) + torch.randn(90, 3, dtype=D)
    model = nn.Sequential(nn.Linear(3, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 3)).double()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return bayesgrad.laplace(model, [(x, y)], likelihood="categorical", prior_precision=prior_precision), x, y


def test_laplace_predicts_by_linearisation_and_samples_that_are_far_off_are_reported_once() -> None:
    posterior, x, y = wide(1e-2)
    p = posterior.predict(x)
    assert torch.equal(p, posterior.predict(x, method="linear"))
    wrong = float((p.argmax(1) != y).double().mean())
    with pytest.warns(UserWarning, match=r"changes \d+% of what the mean weights predict, .*method='linear'") as seen:
        drawn = posterior.predict(x, method="mc")
    assert len(seen) == 1
    posterior.predict(x, method="mc", seed=1)  # without another warning
    share = float((drawn.argmax(1) != posterior.predict(x, method="mean").argmax(1)).double().mean())
    assert share > FAR
    assert f"{share:.0%}" in str(seen[0].message)
    assert float((drawn.argmax(1) != y).double().mean()) > wrong + FAR / 2
    narrow, x, _ = wide(1e4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        narrow.predict(x, method="mc")
        posterior, x, _ = wide(1e-2)
        posterior.predict(x[:5], method="mc")  # too few predictions for a share


def test_means_that_samples_move_are_reported_and_so_are_errors_of_few_samples() -> None:
    """The squares of weights have the mean m^2 + v; a linear network has no such change, but needs many samples."""

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, dtype=D))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.square()[:, None]

    x = torch.randn(30, 2, dtype=D, generator=torch.Generator().manual_seed(0))
    beliefs = {"weight": Belief(torch.ones(2, dtype=D), Diagonal(torch.full((2,), 2.0, dtype=D)))}
    with pytest.warns(UserWarning, match="of what the mean weights predict"):
        GaussianPosterior(beliefs, Square()).predict(x, 200, likelihood="gaussian")
    linear = nn.Linear(2, 1, bias=False, dtype=D)
    wide = {"weight": Belief(torch.ones(1, 2, dtype=D), Diagonal(torch.full((1, 2), 100.0, dtype=D)))}
    with pytest.warns(UserWarning, match="changes 1[0-9]{2,3}% of what the mean weights predict.* for so few samples"):
        GaussianPosterior(wide, linear).predict(x, 16, likelihood="gaussian", seed=1)
    GaussianPosterior(wide, linear).predict(x, 4096, likelihood="gaussian", seed=1)


def test_other_posteriors_average_over_samples_by_default() -> None:
    posterior, x = fitted()
    gaussian = GaussianPosterior(posterior.beliefs, posterior.model)
    assert torch.equal(gaussian.predict(x, 7), gaussian.predict(x, 7, "mc"))


class OnceOnly(torch.autograd.Function):
    """An operation without a derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        raise NotImplementedError("no derivative of this operation")


def test_a_model_that_cannot_be_linearised_is_sampled_with_a_warning() -> None:
    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last, self.opaque = nn.Linear(4, 5, dtype=D), nn.Linear(5, 3, dtype=D), False

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            return self.last(OnceOnly.apply(h) if self.opaque else h.tanh())  # pyright: ignore[reportArgumentType]

    torch.manual_seed(0)
    model, x = Opaque(), torch.randn(6, 4, dtype=D)
    posterior = bayesgrad.laplace(model, [(x, torch.arange(6) % 3)], likelihood="categorical", prior_precision=10.0)
    model.opaque = True
    with pytest.warns(UserWarning, match="cannot be linearised .no derivative of this operation.*method='mc'"):
        found = posterior.predict(x, 9)
    assert torch.equal(found, posterior.predict(x, 9, "mc"))
    with pytest.raises(NotImplementedError, match="no derivative"):
        posterior.predict(x, 9, "linear")
    with pytest.raises(RuntimeError, match=r"shape|size"):
        posterior.predict(torch.randn(3, 7, dtype=D))


# --- copies ---


@pytest.mark.parametrize("structure", STRUCTURES)
def test_copies_in_another_dtype_predict_alike(structure: str) -> None:
    posterior, x = fitted(structure, likelihood="categorical", prior_precision=3.0, temperature=0.7)
    posterior.sample(3)
    single = posterior.to(torch.float32)
    assert {m.dtype for m in single.mean.values()} == {torch.float32}
    assert {m.dtype for m in posterior.mean.values()} == {D}
    assert single.model is posterior.model
    close(single.predict(x), posterior.predict(x), rtol=1e-5, atol=1e-6, check_dtype=False)
    assert isinstance(single, LaplacePosterior)
    close(single.log_marginal_likelihood(), posterior.log_marginal_likelihood(), rtol=1e-5, atol=1e-5)
    assert (single.temperature, single.fit) == (posterior.temperature, posterior.fit)
    again = posterior.to(dtype=D)
    assert all(torch.equal(a, b) for a, b in zip(again.sample(2).values(), posterior.sample(2).values()))
    assert torch.equal(again.predict(x), posterior.predict(x))
    meta = posterior.to("meta") if structure == "diag" else None
    assert meta is None or {m.device.type for m in meta.mean.values()} == {"meta"}
    with pytest.raises(ValueError, match=r"must be float32 or float64, got torch.bfloat16"):
        posterior.to(torch.bfloat16)


def test_copies_of_other_posteriors() -> None:
    model = network()
    weights = {n: p.detach() for n, p in model.named_parameters()}
    kept = DropoutPosterior(weights, {"2.weight": torch.full((5,), 0.6, dtype=D)}, {"2.weight": Units(1)}, model)
    for posterior in (SampledPosterior([weights, weights], model), kept, BernoulliPosterior(weights, model)):
        posterior.likelihood = "bernoulli"
        copy = posterior.to(torch.float32)
        assert type(copy) is type(posterior)
        assert copy.likelihood == "bernoulli"
        assert {m.dtype for m in copy.mean.values()} == {torch.float32}


def test_representations_say_what_a_posterior_is() -> None:
    posterior, _ = fitted("kron", temperature=0.5)
    shown = repr(posterior)
    assert shown.startswith(
        "LaplacePosterior(structure=kron, weights=43, parameters=4, likelihood=categorical, method=linear"
    )
    assert "prior_precision=2," in shown
    assert "temperature=0.5" in shown
    x, y = torch.randn(5, 4, dtype=D), torch.randn(5, 3, dtype=D)
    gaussian = bayesgrad.laplace(network(), [(x, y)], likelihood="gaussian", structure="diag", noise_scale=0.5)
    assert "noise_scale=0.5" in repr(gaussian.set_prior({n: 1.0 + i for i, n in enumerate(gaussian.mean)}))
    assert "prior_precision=1 to 4" in repr(gaussian)
    beliefs = GaussianPosterior({"w": Belief(torch.zeros(2), Diagonal(torch.ones(2)))})
    assert repr(beliefs) == (
        "GaussianPosterior(precision=Diagonal, weights=2, parameters=1, likelihood=categorical, method=mc, model=None)"
    )
    assert "samples=2" in repr(SampledPosterior([{"w": torch.zeros(2)}] * 2))


# --- export ---


class Exported(nn.Module):
    def __init__(self, posterior: Posterior, method: str | None) -> None:
        super().__init__()
        self.model, self.posterior, self.method = posterior.model, posterior, method

    def forward(self, x: Tensor) -> Tensor:
        return self.posterior.predict(x, 3, self.method, seed=0)


def test_exported_samples_would_ignore_their_seed_and_are_refused() -> None:
    posterior, x = fitted()
    with pytest.raises(Exception, match="draw weights before"):
        torch.export.export(Exported(posterior, "mc"), (x,), strict=False)
    mean = torch.export.export(Exported(posterior, "mean"), (x,), strict=False).module()
    close(mean(x), posterior.predict(x, method="mean"))
    weights = posterior.sample(3, seed=0)

    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = posterior.model

        def forward(self, x: Tensor) -> Tensor:
            assert self.model is not None
            each = [functional_call(self.model, {n: w[k] for n, w in weights.items()}, (x,)) for k in range(3)]
            return torch.stack(each).softmax(-1).mean(0)

    module = torch.export.export(Average(), (x,), strict=False).module()
    for _ in range(2):
        close(module(x), posterior.predict(x, 3, "mc", seed=0))


def test_linearised_samples_of_a_model_in_half_precision_have_the_variance_of_the_posterior() -> None:
    """Also where the deviations are smaller than the rounding of weights and outputs."""
    model, variance, n = nn.Linear(1, 1, bias=False).bfloat16(), 1e-8, 2000
    with torch.no_grad():
        model.weight.fill_(1.0)
    belief = Belief(torch.ones(1, 1), Diagonal(torch.full((1, 1), variance)))
    posterior = GaussianPosterior({"weight": belief}, model)
    ratio = posterior.functional_samples(torch.ones(1, 1, dtype=torch.bfloat16), n).var() / variance
    close(ratio, torch.tensor(1.0), rtol=0, atol=5 * math.sqrt(2 / n) + 0.01)
