"""Posteriors: sampling against closed forms, and predictions on linear models where all is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from bayesgrad import SubsampledFisher, likelihoods, noise
from bayesgrad.belief import Belief
from bayesgrad.optim import IVON, AdaBayes
from bayesgrad.posterior import GaussianPosterior, SampledPosterior
from bayesgrad.precision import Diagonal


def linear(outputs: int = 1) -> tuple[nn.Module, GaussianPosterior, torch.Tensor]:
    """A linear model, a belief about it, and inputs."""
    torch.manual_seed(0)
    model = nn.Linear(3, outputs, dtype=torch.float64)
    beliefs = {
        name: Belief(p.detach().clone(), Diagonal(torch.rand_like(p) + 0.1)) for name, p in model.named_parameters()
    }
    return model, GaussianPosterior(beliefs, model), torch.randn(5, 3, dtype=torch.float64)


def test_samples_have_the_mean_and_variance_of_the_belief() -> None:
    _, posterior, _ = linear()
    n = 20_000
    for name, draws in posterior.sample(n).items():
        variance = posterior.variance()[name]
        assert draws.shape == (n, *variance.shape)
        assert bool(((draws.mean(0) - posterior.mean[name]).abs() < 5 * (variance / n).sqrt()).all())
        assert bool(((draws.var(0) / variance - 1).abs() < 5 * math.sqrt(2 / n)).all())


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1])
def test_all_bits_of_a_seed_count(seed: int) -> None:
    """Torch's generator of the CPU looks at 32 of them: what is below 2^32 means what it always has, and no more."""
    _, posterior, _ = linear()
    expected = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + 3) % 2**63)
    found, others = noise.generator_of(seed, 3), [seed + 2**32, seed + 2**40, seed - 2**32, seed + 2**63]
    assert torch.equal(torch.rand(4, generator=found), torch.rand(4, generator=expected))
    draws = [posterior.sample(1, seed=number)["weight"] for number in (seed, *others)]
    assert len({float(draw.sum()) for draw in draws}) == len(draws)
    model, outputs = nn.Linear(1, 1), torch.zeros(64, 2)
    labels = [
        likelihoods.named("bernoulli").sample(outputs, noise.generator_of(number, 0)) for number in (seed, *others)
    ]
    fishers = [SubsampledFisher(model, torch.ones(64, 1), likelihood="bernoulli", seed=n) for n in (seed, *others)]
    for different in (labels, [fisher.labels for fisher in fishers]):
        assert len({tuple(value.flatten().tolist()) for value in different}) == len(draws)


def test_draws_are_a_function_of_seed_and_index_and_leave_the_global_generator_alone() -> None:
    model, posterior, x = linear()
    state = torch.get_rng_state()
    first, second = posterior.sample(2)["weight"], posterior.sample(2)["weight"]
    again = posterior.sample(4, seed=0)["weight"]
    assert torch.equal(torch.cat([first, second]), again)
    assert not torch.equal(first, posterior.sample(2, seed=1)["weight"])
    assert torch.equal(
        posterior.predict(x, 3, likelihood="gaussian").mean, posterior.predict(x, 3, likelihood="gaussian").mean
    )
    with posterior.sampled(model, seed=0):
        assert torch.equal(model.weight, again[0])
    assert torch.equal(state, torch.get_rng_state())


def test_linear_prediction_is_exact_for_a_linear_model_and_monte_carlo_agrees() -> None:
    """Var f = x' diag(v_w) x + v_b."""
    model, posterior, x = linear(outputs=2)
    v = posterior.variance()
    variance = x.square() @ v["weight"].T + v["bias"]
    exact = posterior.predict(x, method="linear", likelihood="gaussian")
    torch.testing.assert_close(exact.mean, model(x).detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(exact.variance, variance, rtol=1e-12, atol=1e-12)
    n = 4000
    sampled = posterior.predict(x, samples=n, likelihood="gaussian")
    assert bool(((sampled.mean - exact.mean).abs() < 5 * (variance / n).sqrt()).all())
    assert bool(((sampled.variance / variance - 1).abs() < 5 * math.sqrt(2 / n)).all())
    point = posterior.predict(x, method="mean", likelihood="gaussian")
    torch.testing.assert_close(point.mean, exact.mean)
    assert bool((point.variance == 0).all())


def test_probabilities_are_averages_of_softmax_and_sigmoid() -> None:
    model, posterior, x = linear(outputs=3)
    draws = posterior.sample(7, seed=0)
    logits = torch.einsum("noi,bi->nbo", draws["weight"], x) + draws["bias"][:, None]
    torch.testing.assert_close(posterior.predict(x, samples=7), logits.softmax(-1).mean(0))
    torch.testing.assert_close(posterior.predict(x, samples=7, likelihood="bernoulli"), logits.sigmoid().mean(0))
    torch.testing.assert_close(posterior.predict(x, method="mean"), model(x).softmax(-1).detach())


def test_the_probit_link_is_near_the_gaussian_integral() -> None:
    """MacKay's approximation of E sigmoid(f) is good to 0.02 for any mean and variance."""
    model, posterior, x = linear()
    moments = posterior.predict(x, method="linear", likelihood="gaussian")
    nodes = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    weights = torch.exp(-(nodes**2) / 2) / torch.exp(-(nodes**2) / 2).sum()
    integral = ((moments.mean[..., None] + moments.variance.sqrt()[..., None] * nodes).sigmoid() * weights).sum(-1)
    probit = posterior.predict(x, method="linear", likelihood="bernoulli")
    assert (probit - integral).abs().max() < 0.02
    assert (model(x).sigmoid() - integral).abs().max() > 0.02
    # Two classes are one logit: softmax(0, f), with all variance in f, is sigmoid(f) but for where the probit puts it.
    expected = (moments.mean / (1 + math.pi / 8 * moments.variance).sqrt()).sigmoid()
    torch.testing.assert_close(probit, expected)
    logits, variances = torch.randn(6, 3, dtype=torch.float64), torch.rand(6, 3, dtype=torch.float64)
    found = likelihoods.named("categorical").from_gaussian(logits, variances)
    torch.testing.assert_close(found, (logits / (1 + math.pi / 8 * variances).sqrt()).softmax(-1))


def test_sampled_weights_are_put_back_bit_for_bit_even_after_an_exception() -> None:
    model, posterior, _ = linear()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def fails() -> None:
        with posterior.sampled(model):
            assert not torch.equal(model.weight, before["weight"])
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert torch.equal(model.weight, before["weight"])
    with posterior.sampled() as outer:
        held = outer.weight.detach().clone()
        with posterior.sampled(model):
            assert not torch.equal(model.weight, held)
        assert torch.equal(model.weight, held)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
        assert p.requires_grad


def test_prediction_leaves_modes_and_statistics_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model[2].eval()
    beliefs = {n: Belief(p.detach().clone(), Diagonal(torch.full_like(p, 0.01))) for n, p in model.named_parameters()}
    posterior = GaussianPosterior(beliefs, model)
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    x = torch.randn(6, 3)
    for method in ("mc", "linear", "mean"):
        probabilities = posterior.predict(x, method=method, statistics="running")
        torch.testing.assert_close(probabilities.sum(-1), torch.ones(6))
        assert not probabilities.requires_grad
    assert [module.training for module in model] == [True, True, False, True]
    assert all(torch.equal(buffer, statistics[name]) for name, buffer in model.named_buffers())


def test_a_bag_of_samples() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    members = [{name: torch.randn_like(p) for name, p in model.named_parameters()} for _ in range(5)]
    posterior = SampledPosterior(members, model)
    x = torch.randn(4, 3)
    outputs = torch.stack([nn.functional.linear(x, m["weight"], m["bias"]) for m in members])
    torch.testing.assert_close(posterior.predict(x), outputs.softmax(-1).mean(0))
    moments = posterior.predict(x, likelihood="gaussian")
    torch.testing.assert_close(moments.variance, outputs.var(0, correction=0))
    stacked = torch.stack([m["weight"] for m in members])
    torch.testing.assert_close(posterior.mean["weight"], stacked.mean(0))
    torch.testing.assert_close(posterior.variance()["weight"], stacked.var(0))
    drawn = posterior.sample(200)["weight"]
    counts = torch.stack([(drawn == member).flatten(1).all(1).sum() for member in stacked])
    assert counts.sum() == 200
    assert bool(((counts - 40).abs() < 5 * math.sqrt(200 * 0.2 * 0.8)).all())
    fewer = posterior.predict(x, samples=2)
    pairs = [(outputs[i].softmax(-1) + outputs[j].softmax(-1)) / 2 for i in range(5) for j in range(i)]
    assert min((fewer - pair).abs().max().item() for pair in pairs) < 1e-6
    with pytest.raises(ValueError, match="no linearised prediction"):
        posterior.predict(x, method="linear")
    bad: list = [[], [{}], {"w": x}]
    for members in bad:
        with pytest.raises(ValueError, match="a list of at least one member"):
            SampledPosterior(members, model)
    with pytest.raises(ValueError, match="member 1 has other names"):
        SampledPosterior([{"a": x}, {"b": x}])
    with pytest.raises(ValueError, match=r"'a' has shape \(3, 3\) in member 1"):
        SampledPosterior([{"a": x}, {"a": x[:3]}])
    alone = SampledPosterior([{"weight": model.weight, "bias": model.bias}], model)
    assert bool((alone.variance()["weight"] == 0).all())


def test_bad_requests_get_one_sentence() -> None:
    model, posterior, x = linear()
    cases = [
        (lambda: posterior.predict(x, method="exact"), "method must be one of 'mc', 'linear', 'mean', got 'exact'"),
        (lambda: posterior.predict(x, samples=0), "samples must be at least 1, got 0"),
        (lambda: posterior.predict(x, likelihood="poison"), "likelihood must be one of .*, got 'poison'"),
        (lambda: posterior.sample(0), "n must be at least 1, got 0"),
        (lambda: posterior.predict(x, model=nn.Linear(4, 1)), r"shape \(1, 4\) in the model and \(1, 3\)"),
        (
            lambda: posterior.predict(x, model=nn.Sequential(model)),
            "the posterior has a parameter 'weight' that the model lacks",
        ),
        (lambda: GaussianPosterior(posterior.beliefs).predict(x), "the posterior has no model"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


def test_wrapped_models_keep_their_names() -> None:
    model, posterior, x = linear(outputs=2)
    expected = posterior.predict(x, method="mean")
    for wrapped in (torch.compile(model, backend="eager"), nn.DataParallel(model)):
        assert torch.equal(posterior.predict(x, model=wrapped, method="mean"), expected)
        bag = SampledPosterior([dict(wrapped.named_parameters())], wrapped)
        torch.testing.assert_close(bag.predict(x), expected)


def test_a_child_called_module_is_no_wrapper() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(3, 3, bias=False)
            self.weight = nn.Parameter(torch.ones(3, 3))

    model = Model()
    assert set(AdaBayes(model.parameters(), batch_size=4).posterior(model).mean) == {"weight", "module.weight"}


@pytest.mark.parametrize("shape", [(5, 3), (4, 4, 3), (2, 3, 5, 3), (0, 3)])
def test_linear_prediction_of_any_shape_of_outputs(shape: tuple) -> None:
    """Positions of a sequence have outputs of their own: Var f = x' diag(v_w) x + v_b at each."""
    _, posterior, _ = linear(outputs=4)
    x = torch.randn(shape, dtype=torch.float64)
    v = posterior.variance()
    found = posterior.predict(x, method="linear", likelihood="gaussian")
    torch.testing.assert_close(found.variance, x.square() @ v["weight"].T + v["bias"])
    assert found.mean.shape == found.variance.shape


def test_models_with_several_inputs_and_with_one_number_out() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.weight[0] * a + self.weight[1] * b  # (batch,)

    model = Sum()
    posterior = GaussianPosterior(
        {"weight": Belief(torch.tensor([1.0, 2.0]), Diagonal(torch.tensor([0.5, 0.1])))}, model
    )
    a, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 0.0, -1.0])
    found = posterior.predict((a, b), method="linear", likelihood="gaussian")
    torch.testing.assert_close(found.variance, 0.5 * a**2 + 0.1 * b**2)
    assert posterior.predict((a, b), 3, likelihood="gaussian").mean.shape == (3,)


def test_half_precision_models_are_averaged_in_single_precision() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 3).bfloat16()
    beliefs = {n: Belief(p.detach().clone(), Diagonal(torch.ones(p.shape))) for n, p in model.named_parameters()}
    posterior = GaussianPosterior(beliefs, model)
    x = torch.randn(6, 8).bfloat16()
    probabilities = posterior.predict(x, 512)
    assert probabilities.dtype == torch.float32
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(6), atol=1e-5, rtol=0)
    variance = posterior.predict(x, 2048, likelihood="gaussian").variance
    expected = (x.float().square().sum(1) + 1)[:, None].expand(6, 3)
    assert bool(((variance / expected - 1).abs() < 5 * math.sqrt(2 / 2048) + 2**-7).all())  # bfloat16 rounds by 2^-8


def test_draws_are_made_on_the_cpu_whatever_the_default_device() -> None:
    _, posterior, x = linear()
    expected, predicted = posterior.sample(2, seed=1)["weight"], posterior.predict(x, 2, likelihood="bernoulli")
    bag = SampledPosterior([posterior.mean, posterior.mean], posterior.model)
    torch.set_default_device("meta")
    try:
        assert torch.equal(posterior.sample(2, seed=1)["weight"], expected)
        assert torch.equal(posterior.predict(x, 2, likelihood="bernoulli"), predicted)
        assert bag.sample(1)["weight"].device.type == "cpu"
        assert bag.predict(x, likelihood="bernoulli").device.type == "cpu"
    finally:
        torch.set_default_device(None)


def test_the_posterior_of_an_optimizer_has_a_likelihood() -> None:
    """That of the call, of the optimizer's option, or classes, of which there are at least two; files keep it."""
    model = nn.Linear(2, 1).double()
    x, y = torch.randn(5, 2, dtype=torch.float64), torch.randn(5, 1, dtype=torch.float64)
    optimizer = IVON(model.parameters(), lr=0.1, num_data=5)
    with optimizer.sampled():
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
    optimizer.step()
    for call in ("predict", "ood_score", "interval"):
        with pytest.raises(ValueError, match="at least two classes"):
            getattr(optimizer.posterior(model), call)(x)
    posterior = optimizer.posterior(model, likelihood=likelihoods.Gaussian(0.1))
    lower, upper = posterior.interval(x, method="linear")
    variance = optimizer.posterior(model).functional_variance(x)
    half = 1.6448536269514722 * (variance.view(5, 1) + 0.01).sqrt()
    torch.testing.assert_close(upper - lower, 2 * half, rtol=1e-9, atol=0)
    restored = type(posterior).from_state_dict(posterior.state_dict(), model)
    assert all(map(torch.equal, restored.interval(x, method="linear"), (lower, upper)))
    own = AdaBayes(model.parameters(), batch_size=5, fisher="sampled", likelihood="gaussian", lr=0.1)
    assert own.posterior(model).likelihood == likelihoods.Gaussian()
    with pytest.raises(ValueError, match="likelihood must be one of"):
        optimizer.posterior(model, likelihood="normal")
