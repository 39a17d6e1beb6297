"""STE and BayesBiNN: against transcriptions, automatic differentiation, and the enumeration of all weights."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesgrad import kernels, noise
from bayesgrad.optim import STE, BayesBiNN
from bayesgrad.posterior import BernoulliPosterior, GaussianPosterior, Posterior, load
from bayesgrad.sources.relaxed import Relax

D = torch.float64
pytestmark = pytest.mark.filterwarnings("ignore:.* sets all its parameters")  # models here have biases
N = 50


def uniform(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.rand(shape, dtype=D, generator=torch.Generator().manual_seed(seed)).clamp(1e-6, 1 - 1e-6)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def loss_of(w: torch.Tensor) -> torch.Tensor:
    """Smooth, neither convex nor separable."""
    return (w * torch.linspace(-1, 2, w.numel(), dtype=w.dtype)).sum().sin() + 0.3 * (w[0] * w[1] + w.prod())


def signs(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x >= 0, 1.0, -1.0).to(x)


# --- the maths of the kernels ---


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-7), (D, 1e-15)])
def test_hyperbolic_functions(dtype: torch.dtype, tolerance: float) -> None:
    x = torch.cat([torch.linspace(-40, 40, 9001, dtype=dtype), torch.logspace(-8, 0, 50, dtype=dtype)])
    exact = x.double()
    torch.testing.assert_close(kernels.tanh(x).double(), exact.tanh(), rtol=0, atol=tolerance)
    expected = 4 / (exact.exp() + (-exact).exp()) ** 2
    torch.testing.assert_close(kernels.sech_square(x).double(), expected, rtol=20 * tolerance, atol=0)
    far = torch.tensor([0.0, 1e4, -1e4, math.inf, -math.inf], dtype=dtype)
    assert kernels.tanh(far).tolist() == [0, 1, -1, 1, -1]
    assert bool(torch.isfinite(kernels.exp(-far.abs())).all())


def test_the_slope_is_the_derivative_by_the_mean() -> None:
    """s g = d loss(w(mu))/d mu, with lambda = atanh(mu), to 1e-12."""
    mean = torch.tanh(1.5 * normal(6)).requires_grad_()
    u = uniform((6,), 1)
    relaxed = torch.tanh((mean.atanh() + 0.5 * torch.log(u / (1 - u))) / 0.5)
    (expected,) = torch.autograd.grad(loss_of(relaxed), mean)

    drawn, slope = Relax.at([2.0, 0.5, 0.0], mean.detach().atanh(), torch.log(u) - torch.log1p(-u))
    drawn.requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(drawn), drawn)
    torch.testing.assert_close(drawn.detach(), relaxed.detach(), rtol=0, atol=1e-14)
    torch.testing.assert_close(slope * gradient, expected, rtol=1e-12, atol=1e-12)


def test_slopes_keep_their_digits_where_signs_are_certain() -> None:
    """Where 1 - w^2 is zero in float32, for w and for the mean alike."""
    natural, logistic = torch.tensor([12.0, -12.0]), torch.tensor([1.0, 0.4])
    _, slope = Relax.at([1.0, 1.0, 0.0], natural, logistic)
    z = natural.double() + 0.5 * logistic.double()
    torch.testing.assert_close(slope.double(), (natural.double().cosh() / z.cosh()) ** 2, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, D], ids=str)
def test_slopes_without_eps_where_sech_underflows(dtype: torch.dtype) -> None:
    """sech^2(60) is below the smallest float32, sech^2(400) below the smallest float64; their quotients are not."""
    natural = torch.tensor([60.0, -60.0, 400.0, 3.0, 60.0], dtype=dtype)
    logistic = torch.tensor([1.0, 0.4, -2.0, 0.7, -80.0], dtype=dtype)
    _, slope = Relax.at([1.0, 1.0], natural, logistic)
    a, b = (x.double().abs() for x in (natural + 0.5 * logistic, natural))
    expected = torch.exp(2 * (b - a)) * ((1 + torch.exp(-2 * b)) / (1 + torch.exp(-2 * a))) ** 2
    torch.testing.assert_close(slope.double(), expected, rtol=1e-4 if dtype == torch.float32 else 1e-12, atol=0)
    weight = nn.Parameter(torch.ones(1, dtype=dtype))
    optimizer = BayesBiNN([weight], lr=1.0, num_data=1, relaxation=1.0, eps=0.0, momentum=0.0, natural_init=400.0)
    with optimizer.sampled(noise=lambda p: torch.full_like(p, 0.3)):
        weight.sum().backward()
    optimizer.step()
    torch.testing.assert_close(optimizer.state[weight]["natural"].item(), -7 / 3, rtol=1e-4, atol=0)


# --- recursions ---


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("eps", [1e-10, 1e-2])
@pytest.mark.parametrize("informed", [False, True])
def test_bayesbinn_equals_its_transcription(momentum: float, eps: float, informed: bool) -> None:
    """The corrected equations, with the moving average written the usual way."""
    weight, tau = nn.Parameter(normal(6)), 0.7
    start, prior = normal(6) / normal(6).square().mean().sqrt(), torch.zeros(6, dtype=D)
    known = None
    if informed:
        prior = start = normal(6, seed=7)
        known = BernoulliPosterior({"w": prior})
    optimizer = BayesBiNN([("w", weight)], lr=0.1, num_data=N, relaxation=tau, eps=eps, momentum=momentum, prior=known)
    natural, buffer = start.clone(), torch.zeros(6, dtype=D)
    assert torch.equal(weight.detach(), signs(start))
    for step in range(1, 8):
        rate = 0.1 / step
        optimizer.param_groups[0]["lr"] = rate
        u = uniform((6,), step)
        with optimizer.sampled(noise={weight: u}):
            optimizer.zero_grad()
            loss_of(weight).backward()
        optimizer.step()

        z = (natural + 0.5 * torch.log(u / (1 - u))) / tau
        w = torch.tanh(z).requires_grad_()
        (g,) = torch.autograd.grad(loss_of(w), w)
        s = (1 / z.cosh() ** 2 + eps) / (tau / natural.cosh() ** 2 + eps)  # 1 - tanh^2, without cancellation
        buffer = momentum * buffer + (1 - momentum) * (N * s * g - prior)
        natural = (1 - rate) * natural - rate * buffer / (1 - momentum**step)
        torch.testing.assert_close(optimizer.state[weight]["natural"], natural, rtol=1e-10, atol=1e-10)
        assert torch.equal(weight.detach(), signs(natural))


@pytest.mark.parametrize("informed", [False, True])
def test_an_average_that_is_switched_on_late_starts_at_the_natural_gradient(informed: bool) -> None:
    """The first step with momentum is that without."""
    found = []
    for momentum in (0.0, 0.9):
        weight = nn.Parameter(normal(6))
        prior = BernoulliPosterior({"w": normal(6, seed=7)}) if informed else None
        optimizer = BayesBiNN([("w", weight)], lr=0.1, num_data=N, momentum=0.0, prior=prior, seed=0)
        for step in range(4):
            optimizer.param_groups[0]["momentum"] = momentum if step == 3 else 0.0
            optimizer.zero_grad()
            with optimizer.sampled():
                loss_of(weight).backward()
            optimizer.step()
        found.append(optimizer.state[weight]["natural"])
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_ste_equals_a_loop_by_hand(momentum: float) -> None:
    weight = nn.Parameter(normal(6))
    optimizer = STE([weight], lr=0.3, momentum=momentum, weight_decay=0.2)
    latent, buffer, flips = normal(6), torch.zeros(6, dtype=D), 0
    for step in range(1, 12):
        optimizer.zero_grad()
        loss_of(weight).backward()
        optimizer.step()
        w = signs(latent).requires_grad_()
        (g,) = torch.autograd.grad(loss_of(w), w)
        buffer = momentum * buffer + (1 - momentum) * g
        latent = (1 - 0.3 * 0.2) * latent - 0.3 * buffer / (1 - momentum**step)
        torch.testing.assert_close(optimizer.state[weight]["latent"], latent, rtol=1e-12, atol=1e-12)
        assert torch.equal(weight.detach(), signs(latent))
        flips += int((signs(latent) != w.detach()).sum())
    assert flips > 2


def test_ste_is_the_limit_of_bayesbinn_without_noise() -> None:
    """tau -> 0 at u = 1/2 draws signs, and eps >> tau makes all slopes one: STE with weight decay 1 and loss N l."""
    weights = [nn.Parameter(normal(6)) for _ in range(2)]
    optimizer = BayesBiNN([weights[0]], lr=0.05, num_data=4, relaxation=1e-12, eps=1e-2)
    start = optimizer.state[weights[0]]["natural"].clone()
    with torch.no_grad():
        weights[1].copy_(start)
    limit = STE([weights[1]], lr=0.05, weight_decay=1.0)
    for _ in range(30):
        optimizer.zero_grad()
        with optimizer.sampled(noise=lambda p: torch.full_like(p, 0.5)):
            loss_of(weights[0]).backward()
        optimizer.step()
        limit.zero_grad()
        (4 * loss_of(weights[1])).backward()
        limit.step()
    latent = limit.state[weights[1]]["latent"]
    torch.testing.assert_close(optimizer.state[weights[0]]["natural"], latent, rtol=1e-8, atol=1e-8)
    assert not torch.equal(signs(start), weights[1].detach())


# --- stationarity ---


def expected_loss(mean: torch.Tensor) -> torch.Tensor:
    """E[loss] under independent signs of this mean, by enumeration."""
    every = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=len(mean))), dtype=D)
    return sum(((1 + w * mean) / 2).prod() * loss_of(w) for w in every)


def test_the_fixed_point_is_the_best_bernoulli() -> None:
    """With exact gradients by the mean, lambda* - lambda_0 = -N grad E[loss], the minimum of N E[loss] + KL.

    The slope is one at zero noise and tau = 1, so gradients that replace those of the draw are used unchanged.
    """
    prior = 0.5 * normal(4, seed=3)
    weight = nn.Parameter(normal(4))
    optimizer = BayesBiNN(
        [("w", weight)], lr=0.1, num_data=3, relaxation=1.0, momentum=0.5, prior=BernoulliPosterior({"w": prior})
    )
    for _ in range(600):
        mean = optimizer.state[weight]["natural"].tanh().requires_grad_()
        (exact,) = torch.autograd.grad(expected_loss(mean), mean)
        optimizer.zero_grad()
        with optimizer.sampled(noise=lambda p: torch.full_like(p, 0.5)):
            (weight * exact).sum().backward()
        optimizer.step()
    natural = optimizer.state[weight]["natural"].clone()
    mean = natural.tanh().requires_grad_()
    (exact,) = torch.autograd.grad(expected_loss(mean), mean)
    torch.testing.assert_close(natural - prior, -3 * exact, rtol=1e-10, atol=1e-10)

    def objective(natural: torch.Tensor) -> torch.Tensor:
        mean = natural.tanh()
        p, q = (1 + mean) / 2, (1 - mean) / 2
        divergence = p * (p.log() - F.logsigmoid(2 * prior)) + q * (q.log() - F.logsigmoid(-2 * prior))
        return 3 * expected_loss(mean) + divergence.sum()

    best = natural.clone().requires_grad_()
    (slope,) = torch.autograd.grad(objective(best), best)
    torch.testing.assert_close(slope, torch.zeros(4, dtype=D), rtol=0, atol=1e-9)
    for direction in torch.cat([torch.eye(4, dtype=D), -torch.eye(4, dtype=D)]):
        assert objective(natural + 0.05 * direction) > objective(natural)


# --- draws ---


def test_relaxed_draws_have_the_distribution_they_should() -> None:
    """P(w > 0) = P(w = 1) = 1/(1 + exp(-2 lambda)) for any tau, within five standard errors."""
    for level in (-1.0, 0.3):
        weight = nn.Parameter(torch.ones(40_000))
        optimizer = BayesBiNN([weight], num_data=1)
        optimizer.state[weight]["natural"].fill_(level)
        with optimizer.sampled():
            share = (weight > 0).double().mean().item()
            assert bool((weight.abs() <= 1).all())
        p = 1 / (1 + math.exp(-2 * level))
        assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / 40_000)


def test_drawn_noise_is_the_logistic_of_the_position() -> None:
    weights = [nn.Parameter(torch.randn(shape)) for shape in ((50_000,), (7, 3), (5,))]  # large and small ones
    optimizer = BayesBiNN(weights, num_data=10, relaxation=0.8, seed=3)
    with optimizer.sampled():
        start = 0
        for p in weights:
            d = noise.logistic(noise.positions(start, p), *noise.key(3, 1)).view(p.shape).double()
            natural = optimizer.state[p]["natural"].double()
            torch.testing.assert_close(p.double(), torch.tanh((natural + 0.5 * d) / 0.8), rtol=0, atol=1e-6)
            start += p.numel()
    assert all(bool((p.abs() == 1).all()) for p in weights)


def network(dtype: torch.dtype = D) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def examples(index: int = 0, count: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    return normal(count, 5, seed=100 + index), torch.arange(count) % 3


def naturals(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [entry["natural"].clone() for entry in optimizer.state.values()]


def close(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    for x, y in zip(a, b):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def make(model: nn.Module, **options) -> BayesBiNN:
    return BayesBiNN(model.named_parameters(), **{"lr": 0.05, "num_data": N, **options})


def test_micro_batches_inside_of_a_draw_are_one_batch() -> None:
    ends = []
    for parts in (1, 4):
        model = network()
        optimizer = make(model)
        for index in range(3):
            x, y = examples(index)
            optimizer.zero_grad()
            with optimizer.sampled():
                for part in range(parts):
                    (F.cross_entropy(model(x[part::parts]), y[part::parts]) / parts).backward()
            optimizer.step()
        ends.append(naturals(optimizer))
    close(*ends)


@pytest.mark.parametrize("between", ["nothing", "clipping", "evaluation"])
def test_several_draws_add_up_their_slopes_times_gradients(between: str) -> None:
    model = network()
    optimizer = make(model, momentum=0.0, relaxation=1.0)
    start, total = naturals(optimizer), None
    for index in range(3):
        x, y = examples(index)
        variates = {p: uniform(p.shape, 10 * index + i) for i, p in enumerate(model.parameters())}
        held = [p.grad.clone() if p.grad is not None else 0 for p in model.parameters()]
        with optimizer.sampled(noise=variates):
            (F.cross_entropy(model(x), y) / 3).backward()
        new = [p.grad - old for p, old in zip(model.parameters(), held)]
        slopes = []
        for natural, u in zip(start, variates.values()):
            w = torch.tanh(natural + 0.5 * torch.log(u / (1 - u)))
            slopes.append((1 - w**2 + 1e-10) / (1 - natural.tanh() ** 2 + 1e-10))
        products = [s * g for s, g in zip(slopes, new)]
        total = products if total is None else [a + b for a, b in zip(total, products)]
        if between == "evaluation":
            with torch.no_grad(), optimizer.sampled():
                model(x)
    factor = 1.0
    if between == "clipping":
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        factor = float(1e-2 / (norm + 1e-6))
    optimizer.step()
    close(naturals(optimizer), [0.95 * n - 0.05 * N * factor * t for n, t in zip(start, total)])


def test_evaluation_between_a_draw_and_its_step_leaves_no_trace() -> None:
    ends = []
    for looks in (0, 2):
        model = network(torch.float32)
        optimizer = make(model)
        for index in range(2):
            x, y = examples(index)
            optimizer.zero_grad()
            with optimizer.sampled():
                F.cross_entropy(model(x.float()), y).backward()
            for _ in range(looks):
                with torch.no_grad(), optimizer.sampled():
                    model(x.float())
            optimizer.step()
        ends.append(naturals(optimizer))
    assert all(torch.equal(a, b) for a, b in zip(*ends))


def test_a_closure_averages_its_draws() -> None:
    ends = []
    for by_hand in (False, True):
        model = network()
        optimizer = make(model, samples=3)
        x, y = examples()

        def closure(model=model, optimizer=optimizer, x=x, y=y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        for _ in range(2):
            if not by_hand:
                assert optimizer.step(closure).item() > 0
                continue
            optimizer.zero_grad()
            for _ in range(3):
                with optimizer.sampled():
                    (F.cross_entropy(model(x), y) / 3).backward()
            optimizer.step()
        ends.append(naturals(optimizer))
    close(*ends)


def test_exceptions_and_frozen_parameters_leave_weights_alone() -> None:
    model = network(torch.float32)
    real = model[2].bias.detach().clone()
    model[2].bias.requires_grad_(False)
    optimizer = make(model)
    assert torch.equal(model[2].bias, real)
    held = [p.detach().clone() for p in model.parameters()]

    def fail() -> None:
        with optimizer.sampled():
            assert not torch.equal(model[0].weight, held[0])
            assert torch.equal(model[2].bias, real)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    outside = r"noise for binary weights must be in \(0, 1\), got values outside"
    with pytest.raises(ValueError, match=outside), optimizer.sampled(noise=torch.randn_like):
        pass
    assert all(torch.equal(a, b) for a, b in zip(held, model.parameters()))
    assert set(optimizer.posterior(model).natural) == {"0.weight", "0.bias", "2.weight"}
    F.cross_entropy(model(examples()[0].float()), examples()[1]).backward()
    with pytest.raises(RuntimeError, match=r"not computed at sampled weights: .*BayesBiNN.step\(\)"):
        optimizer.step()

    model[2].bias.requires_grad_(True)  # binary from its first draw on
    optimizer.zero_grad()
    with optimizer.sampled():
        F.cross_entropy(model(examples()[0].float()), examples()[1]).backward()
    assert bool((model[2].bias.abs() == 1).all())
    optimizer.step()
    assert "2.bias" in optimizer.posterior(model).natural


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resumes_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    def go(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
        for index in steps:
            x, y = examples(index)
            optimizer.zero_grad()
            with optimizer.sampled():
                F.cross_entropy(model(x.to(dtype)).float(), y).backward()
            optimizer.step()
        return [*naturals(optimizer), *(p.detach().clone() for p in model.parameters())]

    prior = BernoulliPosterior({name: 0.1 * normal(*p.shape) for name, p in network().named_parameters()})
    model = network(dtype)
    optimizer = make(model, prior=prior)
    go(model, optimizer, range(3))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    copied = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    other = network(dtype)
    resumed = make(other, prior=prior)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters()))  # without the model's own
    end = go(model, optimizer, range(3, 6))
    for pair in (*copied, (other, resumed)):
        assert all(torch.equal(a, b) for a, b in zip(end, go(*pair, range(3, 6))))


# --- weights are binary ---


@pytest.mark.parametrize("rule", [STE, lambda params: BayesBiNN(params, num_data=10)], ids=["STE", "BayesBiNN"])
def test_weights_are_binary_from_construction_on(rule) -> None:
    for dtype in (torch.float32, torch.bfloat16, D):
        p = nn.Parameter(torch.tensor([[0.5, -0.1], [0.0, -0.0]], dtype=dtype))
        q = nn.Parameter(torch.tensor(-3.0, dtype=dtype))
        optimizer = rule([p])
        optimizer.add_param_group({"params": [q]})
        assert p.tolist() == [[1, -1], [1, 1]]
        assert q.item() == -1
        assert set(optimizer.state[q]) == set(optimizer.state[p])


@pytest.mark.parametrize("rule", [STE, lambda params: BayesBiNN(params, num_data=10)], ids=["STE", "BayesBiNN"])
def test_weights_that_are_loaded_after_construction_are_refused(rule) -> None:
    """The first step would replace them by the signs of those before; weights of a resumed run are these signs."""
    models = [nn.Linear(4, 3, bias=False) for _ in range(3)]
    first, second, resumed = (rule(model.parameters()) for model in models)

    def step(model: nn.Module, optimizer: Any) -> None:
        with optimizer.sampled():
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    models[1].load_state_dict({"weight": torch.randn(3, 4)})
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"were changed after .* was built, which copied them to its state"):
            step(models[1], second)
    step(models[0], first)
    models[2].load_state_dict(models[0].state_dict())
    resumed.load_state_dict(first.state_dict())
    models[2].load_state_dict(models[0].state_dict())
    step(models[2], resumed)
    best = {"weight": -models[2].weight.detach()}
    with torch.no_grad():
        models[2].weight.copy_(-models[2].weight).neg_()  # others for a while, as those of an average
    step(models[2], resumed)
    models[2].load_state_dict(best)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"were changed since the last step of .*: load the state of the optim"):
            step(models[2], resumed)
    assert torch.equal(models[2].weight, best["weight"])


@pytest.mark.parametrize("rule", [STE, lambda params: BayesBiNN(params, num_data=10)], ids=["STE", "BayesBiNN"])
def test_weights_that_are_changed_through_data_are_refused(rule) -> None:
    """`.data` has no version counter: before the first step of each group, and where steps compare values."""
    weights = [nn.Parameter(normal(3, 4, seed=index)) for index in range(2)]
    optimizer = rule(weights[:1])

    def step() -> None:
        with optimizer.sampled():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = torch.ones_like(p)
        optimizer.step()

    def refused(p: nn.Parameter, words: str) -> None:
        signs = p.detach().clone()
        nn.init.normal_(p.data)
        given = p.detach().clone()
        with pytest.raises(RuntimeError, match=words):
            step()
        assert torch.equal(p, given)
        p.data.copy_(signs)

    refused(weights[0], "were changed after .* was built, which copied them to its state")
    for _ in range(8):
        step()
    optimizer.add_param_group({"params": weights[1:]})
    refused(weights[1], "were changed after .* was built, which copied them to its state")
    for _ in range(7):
        step()
    refused(weights[0], "were changed since the last step of .*: load the state of the optimizer too")
    step()


def test_a_constructor_that_fails_leaves_weights_alone() -> None:
    p, q = nn.Parameter(torch.tensor([0.5])), nn.Parameter(torch.tensor([0.5]))
    with pytest.raises(ValueError, match="lr must be"):
        STE([{"params": [p]}, {"params": [q], "lr": -1}])
    with pytest.raises(ValueError, match="needs named parameters"):
        BayesBiNN([p], num_data=1, prior=BernoulliPosterior({"p": torch.zeros(1)}))
    assert p.item() == q.item() == 0.5


def test_bad_arguments() -> None:
    weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"lr must be at most 1, got 1.5: it is the fraction"):
        BayesBiNN([weight], lr=1.5, num_data=1)
    with pytest.raises(TypeError, match=r"prior must be a BernoulliPosterior .*, got GaussianPosterior"):
        BayesBiNN([("w", weight)], num_data=1, prior=GaussianPosterior({}))
    with pytest.raises(ValueError, match="the prior must contain parameters of the optimizer, such as 'w', got none"):
        BayesBiNN([("w", weight)], num_data=1, prior=BernoulliPosterior({}))
    with pytest.raises(ValueError, match=r"'w' must have the shape \(2,\) in the prior, got \(3,\)"):
        BayesBiNN([("w", weight)], num_data=1, prior=BernoulliPosterior({"w": torch.zeros(3)}))
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="STE has no posterior"):
        STE(model.parameters()).posterior(model)


# --- the posterior ---


def test_posterior_moments_and_draws() -> None:
    natural = torch.tensor([-2.0, -0.3, 0.0, 0.7, 15.0], dtype=D)
    posterior = BernoulliPosterior({"w": natural})
    p = 1 / (1 + torch.exp(-2 * natural))
    torch.testing.assert_close(posterior.mean["w"], 2 * p - 1, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(posterior.variance()["w"], 1 - natural.tanh() ** 2, rtol=1e-10, atol=1e-15)
    assert posterior.mode["w"].tolist() == [-1, -1, 1, 1, 1]
    draws = posterior.sample(10_000)["w"]
    assert set(draws.unique().tolist()) == {-1.0, 1.0}
    error = (draws.mean(0) - posterior.mean["w"]).abs()
    assert bool((error <= 5 * (posterior.variance()["w"] / 10_000).sqrt() + 1e-12).all())


def test_posterior_predicts_and_is_stored(tmp_path: Path) -> None:
    model = network()
    optimizer = make(model)
    x, y = examples()
    for _ in range(5):
        optimizer.zero_grad()
        with optimizer.sampled():
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    posterior = optimizer.posterior(model)
    torch.testing.assert_close(posterior.predict(x, method="mode"), model(x).softmax(1).detach())
    means = torch.func.functional_call(model, posterior.mean, (x,)).softmax(1).detach()
    torch.testing.assert_close(posterior.predict(x, method="mean"), means)
    draws = posterior.sample(8, seed=4)
    each = [torch.func.functional_call(model, {k: v[i] for k, v in draws.items()}, (x,)).softmax(1) for i in range(8)]
    sampled = posterior.predict(x, samples=8, seed=4)
    torch.testing.assert_close(sampled, torch.stack(each).mean(0).detach())
    with pytest.raises(ValueError, match="method must be one of 'mc', 'mean', 'mode', got 'linear'"):
        posterior.predict(x, method="linear")
    with pytest.raises(ValueError, match="method must be one of 'mc', 'linear', 'mean', got 'mode'"):
        GaussianPosterior({}, model).predict(x, method="mode")
    posterior.save(tmp_path / "posterior.safetensors")
    loaded = load(tmp_path / "posterior.safetensors", model)
    assert isinstance(loaded, BernoulliPosterior)
    assert torch.equal(loaded.predict(x, samples=8, seed=4), sampled)
    with pytest.raises(ValueError, match="the state of the posterior is incomplete"):
        Posterior.from_state_dict({**posterior.state_dict(), "tensors": {}})
    less = optimizer.posterior(model, scale=2.0)
    assert torch.equal(less.natural["0.weight"], posterior.natural["0.weight"] / 2)
    with pytest.raises(ValueError, match="scale must be a finite positive number, got 0"):
        optimizer.posterior(model, scale=0)
    with pytest.raises(ValueError, match="is not in the model"):
        optimizer.posterior(nn.Linear(2, 2))


def test_a_posterior_is_the_prior_of_the_next_task() -> None:
    """With zero gradients the belief remains the prior."""
    model = network()
    known = BernoulliPosterior({name: normal(*p.shape, seed=9) for name, p in model.named_parameters()})
    optimizer = make(model, prior=known)
    for _ in range(3):
        optimizer.zero_grad()
        with optimizer.sampled():
            (0.0 * model(examples()[0]).sum()).backward()
        optimizer.step()
    close(naturals(optimizer), list(known.natural.values()))
    assert all(torch.equal(p, known.mode[name]) for name, p in model.named_parameters())


def test_a_prior_is_that_of_a_group_which_is_added_later() -> None:
    """The belief about its weights begins at the prior, as that of the first group."""
    model = network()
    known = BernoulliPosterior({name: normal(*p.shape, seed=9) for name, p in model.named_parameters()})
    named = list(model.named_parameters())
    optimizer = BayesBiNN(named[2:], num_data=N, prior=known)
    optimizer.add_param_group({"params": named[:2]})
    close([optimizer.state[p]["natural"] for _, p in named], list(known.natural.values()))
    close([optimizer.state[p]["prior_natural"] for _, p in named], list(known.natural.values()))


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.float32, D, torch.bfloat16], ids=str)
def test_compiled_draws_and_steps_agree_to_the_last_bit(dtype: torch.dtype) -> None:
    ends = []
    for fused in (True, False):
        generator = torch.Generator().manual_seed(0)
        shapes = [(300, 200), (40_000,), (64, 64), (7,), ()]
        params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
        optimizer, seen = BayesBiNN(params, lr=0.01, num_data=N, fused=fused), []
        for _ in range(3):
            with optimizer.sampled():
                for p in params:
                    p.grad = torch.randn(p.shape, generator=generator).to(dtype)
                seen += [p.detach().clone() for p in params]
            assert all(torch.equal(p, signs(optimizer.state[p]["natural"]).to(dtype)) for p in params)
            optimizer.step()
        ends.append([*seen, *naturals(optimizer), *(p.detach() for p in params)])
    assert all(torch.equal(a, b) for a, b in zip(*ends))
    assert "cpu" not in kernels._unusable
