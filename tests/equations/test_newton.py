"""Newton and VON: against a transcription, exact posteriors, torch.func's Hessians, and the best Gaussian."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev

from bayesgrad import noise
from bayesgrad.optim import VON, Newton
from bayesgrad.sources import hessian_diagonal as hessian
from cases import diagonals, same, states, weights
from equations.test_ivon import best_gaussian, toy

D = torch.float64


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(D)


def data(index: int = 0, n: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randn(n, 3, generator=generator, dtype=D), torch.randint(0, 2, (n,), generator=generator)


def loss_of(model: Callable[[Tensor], Tensor], index: int = 0) -> Tensor:
    x, y = data(index)
    return nn.functional.cross_entropy(model(x), y)


def derivatives(model: nn.Module, at: dict[str, Tensor], index: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradient and diagonal of the Hessian, by torch.func on the flattened weights."""
    names, shapes = list(at), [w.shape for w in at.values()]

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        held = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes)}
        return loss_of(lambda x: functional_call(model, held, (x,)), index)

    flat = torch.cat([w.flatten() for w in at.values()])
    found = grad(loss)(flat), jacrev(grad(loss))(flat).diagonal()
    first, second = (
        {name: part.view(shape) for name, part, shape in zip(names, each.split([s.numel() for s in shapes]), shapes)}
        for each in found
    )
    return first, second


def take(model: nn.Module, optimizer: Newton | VON, index: int, eps: dict | None = None) -> None:
    optimizer.zero_grad()
    if isinstance(optimizer, VON):
        with optimizer.sampled(noise=eps):
            loss = loss_of(model, index)
            optimizer.observe(loss=loss)
            loss.backward()
    else:
        loss = loss_of(model, index)
        optimizer.observe(loss=loss)
        loss.backward()
    optimizer.step()


def precision_of(optimizer: Newton | VON, p: Tensor) -> Tensor:
    return 1 / optimizer.variance_of(optimizer.param_groups[0], p)


# --- the rules ---


@pytest.mark.parametrize("tau", [1.0, 0.4, 3.0])
@pytest.mark.parametrize("rule", ["newton", "improved", "plain"])
def test_steps_are_those_of_a_transcription(rule: str, tau: float) -> None:
    """Ten steps in the paper's units, s = (N/tau) h + delta, with injected noise and derivatives by torch.func.

    E[loss] + tau KL/N is tau/N times the paper's objective for N/tau data.
    """
    model = network()
    lr, size, delta, b1, b2, start = 0.05, 50.0, 2.0, 0.8, 0.7, 0.3
    options = dict(num_data=size, prior_precision=delta, kl_weight=tau, hess_init=start, betas=(b1, b2))
    options |= {"hessian": "exact"}
    size = size / tau
    if rule == "newton":
        optimizer = Newton(model.parameters(), lr, **options)
    else:
        optimizer = VON(model.parameters(), lr, improved=rule == "improved", **options)
    m = weights(model)
    s = {name: torch.full_like(w, size * start + delta) for name, w in m.items()}
    average = {name: torch.zeros_like(w) for name, w in m.items()}
    rho, negative, halved = 1 - b2, 0, 0
    for t in range(1, 11):
        torch.manual_seed(t)
        eps = {name: torch.randn_like(w) for name, w in m.items()}
        at = m if rule == "newton" else {name: m[name] + eps[name] / s[name].sqrt() for name in m}
        gradient, diagonal = derivatives(model, at, t)
        take(model, optimizer, t, {p: eps[name] for name, p in model.named_parameters()})
        for name, p in model.named_parameters():
            g, h = size * gradient[name], size * diagonal[name]
            h = (h.abs() if rule == "newton" else h) + delta
            negative += int((h < 0).sum())
            old = s[name]
            if rule == "improved":
                x = rho * (h - old) / old
                s[name] = old * (1 + x + x * x / 2)
            else:
                s[name] = (1 - rho) * old + rho * h
            if rule == "plain":
                low = (h < 0) & (s[name] < old / 2)
                halved += int(low.sum())
                s[name] = torch.where(low, old / 2, s[name])
            average[name] = b1 * average[name] + (1 - b1) * g
            m[name] = m[name] - lr * (average[name] / (1 - b1**t) + delta * m[name]) / s[name]
            torch.testing.assert_close(p.detach(), m[name], rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(precision_of(optimizer, p), s[name], rtol=1e-10, atol=0)
    assert rule == "newton" or negative > 0  # else the lower bound of the precision is not tested


@pytest.mark.parametrize("h", [-1e6, -3.0, -0.5, 0.0, 1e6])
@pytest.mark.parametrize("rho", [0.2, 0.9, 1.0])
@pytest.mark.parametrize("improved", [True, False])
def test_precisions_stay_positive_whatever_comes(h: float, rho: float, improved: bool) -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=D))
    optimizer = VON([weight], 0.1, num_data=10, hess_init=1.0, betas=(0.0, 1 - rho), improved=improved)
    old = 10 * 1.0 + 1.0
    with optimizer.sampled():
        loss = 0.5 * h * weight.square().sum()
        optimizer.observe(loss=loss)
        loss.backward()
    optimizer.step()
    total = 10 * h + 1.0
    x = rho * (total - old) / old
    plain = (1 - rho) * old + rho * total
    expected = old * (1 + x + x * x / 2) if improved else max(plain, old / 2) if total < 0 else plain
    assert precision_of(optimizer, weight).item() == pytest.approx(expected, rel=1e-10)
    assert expected >= old / 2 or (not improved and total > 0)


@pytest.mark.parametrize("make", [Newton, VON])
def test_ridge_regression_is_exact_after_one_step(make: type) -> None:
    """With rho = 1 and X'X diagonal, N(m, S^-1) has S = X'X/s^2 + delta, S m = X'y/s^2."""
    torch.manual_seed(0)
    n, d, noise_variance, delta = 40, 5, 0.3, 2.5
    q, _ = torch.linalg.qr(torch.randn(n, d, dtype=D))
    x = q * torch.tensor([0.1, 1.0, 3.0, 10.0, 30.0], dtype=D)
    y = torch.randn(n, dtype=D)
    weight = nn.Parameter(torch.randn(d, dtype=D))
    more = {"improved": False} if make is VON else {}
    optimizer = make([weight], 1.0, num_data=n, prior_precision=delta, hess_init=7.0, betas=(0.0, 0.0), **more)
    precision = (x * x).sum(0) / noise_variance + delta
    if make is VON:
        with optimizer.sampled(noise=torch.zeros_like):  # the mean: of a quadratic, gradients average to that
            loss = (x @ weight - y).square().mean() / (2 * noise_variance)
            optimizer.observe(loss=loss)
            loss.backward()
    else:
        loss = (x @ weight - y).square().mean() / (2 * noise_variance)
        optimizer.observe(loss=loss)
        loss.backward()
    optimizer.step()
    torch.testing.assert_close(precision_of(optimizer, weight), precision, rtol=1e-10, atol=0)
    torch.testing.assert_close(weight.detach(), x.T @ y / noise_variance / precision, rtol=1e-10, atol=1e-12)


def test_with_the_hessian_at_rest_it_is_sgd_at_a_rate_for_each_weight() -> None:
    """On a quadratic with h = hess_init: torch's SGD on weights multiplied by the root of h."""
    curvature = torch.tensor([0.5, 2.0, 8.0], dtype=D)
    for h in curvature:
        weight, other = (nn.Parameter(torch.ones(4, dtype=D)) for _ in range(2))
        optimizer = Newton([weight], 0.3, num_data=1, prior_precision=0.0, hess_init=float(h), betas=(0.0, 0.9))
        peer = torch.optim.SGD([other], lr=0.3 / float(h))
        for _ in range(10):
            for w, opt in ((weight, optimizer), (other, peer)):
                opt.zero_grad()
                loss = 0.5 * h * (w - 3).square().sum()
                if opt is optimizer:
                    optimizer.observe(loss=loss)
                loss.backward()
                opt.step()
        torch.testing.assert_close(weight, other, rtol=1e-12, atol=0)


def test_von_finds_the_best_gaussian_of_a_logistic_regression() -> None:
    """With rho = 0.02 and 8 samples, m within 0.01, s within 1 %, averaged over 6400 steps.

    They are 100 steps of 64 copies of the problem, whose Hessian is diagonal: Hutchinson's estimate is exact.
    """
    x, y = toy()
    m, s = best_gaussian(x, y)
    inputs, labels = torch.tensor(x), torch.tensor(y)
    weight = nn.Parameter(torch.ones(64, dtype=D))
    optimizer = VON([weight], 0.02, num_data=40, hess_init=0.1, betas=(0.0, 0.98), samples=8, hessian="hutchinson")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.softplus(-(labels * inputs)[:, None] * weight).mean(0).sum()
        optimizer.observe(loss=loss)
        loss.backward()
        return loss

    found = []
    for step in range(250):
        optimizer.step(closure)
        if step >= 150:
            found.append((weight.mean().item(), precision_of(optimizer, weight).mean().item()))
    mean, precision = np.mean(found, 0)
    assert mean == pytest.approx(m, abs=0.01)
    assert precision == pytest.approx(s, rel=0.01)


# --- second derivatives ---


def test_exact_diagonals_are_those_of_torch_func_and_leave_graph_and_gradients_alone() -> None:
    model, other = network(), network()
    optimizer = Newton(model.parameters(), num_data=10)  # "auto": few weights
    loss = loss_of(model)
    optimizer.observe(loss=loss)
    assert all(p.grad is None for p in model.parameters())
    _, expected = derivatives(model, weights(model), 0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(diagonals(optimizer)[p], expected[name], rtol=1e-10, atol=1e-14)
    loss.backward()
    loss_of(other).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters()))
    big = nn.Linear(40, 30).to(D)  # more than one chunk of rows, and more than the limit of "auto"
    values = {}
    for how in ("auto", "hutchinson", "exact"):
        optimizer = Newton(big.parameters(), num_data=10, hessian=how)
        optimizer.observe(loss=nn.functional.cross_entropy(big(torch.eye(40, dtype=D)), torch.arange(40) % 30))
        values[how] = diagonals(optimizer)[big.weight]
    assert torch.equal(values["auto"], values["hutchinson"])
    assert not torch.equal(values["auto"], values["exact"])
    p = big(torch.eye(40, dtype=D)).softmax(1).detach()
    torch.testing.assert_close(values["exact"], (p * (1 - p) / 40).T, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels last"])
@pytest.mark.parametrize(("examples", "groups", "channels", "side"), [(1, 1, 4, 2), (3, 2, 4, 3)])
def test_exact_diagonals_of_group_norm_are_those_of_single_rows(
    examples: int, groups: int, channels: int, side: int, layout: torch.memory_format
) -> None:
    """torch's own batches of rows are wrong for the first of these shapes, without an error, and raise for others."""
    torch.manual_seed(0)
    norm = nn.GroupNorm(groups, channels)
    model = nn.Sequential(nn.Conv2d(2, channels, 1), norm, nn.Tanh(), nn.Flatten(), nn.Linear(channels * side**2, 3))
    model = model.to(D).to(memory_format=layout)
    x = torch.randn(examples, 2, side, side, dtype=D).to(memory_format=layout)
    params = list(model.parameters())
    optimizer = Newton(params, num_data=10)
    optimizer.observe(loss=nn.functional.cross_entropy(model(x), torch.arange(examples)))
    found = torch.cat([diagonals(optimizer)[p].flatten() for p in params])
    gradients = torch.autograd.grad(
        nn.functional.cross_entropy(model(x), torch.arange(examples)), params, create_graph=True
    )
    rows = []
    for entry in torch.cat([g.flatten() for g in gradients]):
        row = torch.autograd.grad(entry, params, retain_graph=True, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([r.flatten() for r in row]))
    torch.testing.assert_close(found, torch.stack(rows).diagonal(), rtol=1e-9, atol=1e-13)


def test_exact_diagonals_where_an_intermediate_gradient_is_retained() -> None:
    """torch cannot add batches of gradients to that of a tensor with retain_grad()."""
    torch.manual_seed(0)
    x, y, model = torch.randn(5, 3).double(), torch.arange(5) % 2, nn.Linear(3, 2).double()
    found = []
    for retained in (False, True):
        optimizer = Newton(model.parameters(), num_data=5, hessian="exact")
        outputs = model(x)
        if retained:
            outputs.retain_grad()
        optimizer.observe(loss=nn.functional.cross_entropy(outputs, y))
        found.append(diagonals(optimizer))
    for p in model.parameters():
        torch.testing.assert_close(found[1][p], found[0][p], rtol=1e-12, atol=1e-15)


def test_hutchinson_is_unbiased_within_its_closed_form_spread_and_exact_for_diagonal_hessians() -> None:
    torch.manual_seed(0)
    a = torch.randn(12, 12, dtype=D)
    a = a + a.T
    params = [nn.Parameter(torch.randn(2, 3, dtype=D)), nn.Parameter(torch.randn(6, dtype=D))]
    count = 400
    optimizer = Newton(params, num_data=1, hessian="hutchinson", probes=count)
    flat = torch.cat([p.flatten() for p in params])
    optimizer.observe(loss=0.5 * flat @ a @ flat)
    found = torch.cat([diagonals(optimizer)[p].flatten() for p in params])
    spread = ((a**2).sum(1) - a.diagonal() ** 2).sqrt() / math.sqrt(count)
    scores = (found - a.diagonal()) / spread
    assert bool((scores.abs() < 4.5).all())
    assert bool((scores.abs() > 1e-3).any())
    keys = [noise.key(1, probe) for probe in range(count)]
    gradients = hessian.gradients_of(0.5 * flat @ a @ flat, params)
    singles = torch.stack(
        [torch.cat([h.flatten() for h in hessian.hutchinson(gradients, params, [0, 6], [key])]) for key in keys]
    )
    expected = (a**2).sum(1) - a.diagonal() ** 2
    assert bool(((singles.var(0) / expected - 1).abs() < 5 * math.sqrt(2 / count)).all())
    one = Newton(params, num_data=1, hessian="hutchinson")
    one.observe(loss=sum((p**3).sum() for p in params))
    for p in params:
        torch.testing.assert_close(diagonals(one)[p], 6 * p.detach(), rtol=1e-12, atol=0)


def test_probes_are_a_function_of_seed_step_and_position() -> None:
    def seen(seed: int, steps: int, freeze: bool = False) -> Tensor:
        model = network()
        optimizer = Newton(model.parameters(), 0.0, num_data=10, hessian="hutchinson", seed=seed)
        for _ in range(steps):
            take(model, optimizer, 0)
        model[0].requires_grad_(not freeze)
        signs = []
        with pytest.MonkeyPatch.context() as patch:
            original = hessian._signs
            patch.setattr(hessian, "_signs", lambda *args: signs.append(original(*args)) or signs[-1])
            optimizer.observe(loss=loss_of(model))
        return signs[-2]

    assert torch.equal(seen(0, 2), seen(0, 2))
    assert torch.equal(seen(0, 2), seen(0, 2, freeze=True))
    assert not torch.equal(seen(0, 2), seen(1, 2))
    assert not torch.equal(seen(0, 2), seen(0, 3))


# --- loops ---


@pytest.mark.parametrize("how", ["exact", "hutchinson"])
def test_micro_batches_and_draws_add_up(how: str) -> None:
    """Losses of micro-batches divided by their number, in one draw and in several, against a closure's average."""
    for make in (Newton, VON):
        model, other = network(), network()
        optimizer, whole = (make(net.parameters(), num_data=10, hessian=how) for net in (model, other))
        for index in range(3):
            optimizer.zero_grad()
            x, y = data(index)
            noise_of = {p: torch.full_like(p, 0.3) for p in (*model.parameters(), *other.parameters())}
            context = optimizer.sampled(noise=noise_of) if make is VON else torch.enable_grad()
            with context:
                for part in range(4):
                    loss = nn.functional.cross_entropy(model(x[part::4]), y[part::4]) / 4
                    optimizer.observe(loss=loss)
                    loss.backward()
            optimizer.step()
            take(other, whole, index, noise_of)
        for p, q in zip(model.parameters(), other.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(precision_of(optimizer, p), precision_of(whole, q), rtol=1e-10, atol=0)
    model, other = network(), network()
    optimizer, by_hand = (VON(net.parameters(), num_data=10, samples=3, hessian=how) for net in (model, other))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        optimizer.observe(loss=loss)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
        by_hand.zero_grad()
        for _ in range(3):
            with by_hand.sampled():
                loss = loss_of(other) / 3
                by_hand.observe(loss=loss)
                loss.backward()
        by_hand.step()
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(precision_of(optimizer, p), precision_of(by_hand, q), rtol=1e-12, atol=0)


def test_an_average_that_was_interrupted_leaves_nothing_behind() -> None:
    model, other = network(), network()
    optimizer, plain = (VON(net.parameters(), num_data=10, samples=2) for net in (model, other))
    calls = []

    def closure(net: nn.Module, opt: VON) -> Tensor:
        opt.zero_grad()
        calls.append(net)
        loss = loss_of(net)
        opt.observe(loss=loss)
        loss.backward()
        if len(calls) == 2:
            raise KeyError("interrupted")
        return loss

    with pytest.raises(KeyError):
        optimizer.step(lambda: closure(model, optimizer))
    plain.param_groups[0]["draws"] = 2
    optimizer.step(lambda: closure(model, optimizer))
    plain.step(lambda: closure(other, plain))
    assert same(weights(model), weights(other))
    assert same(states(optimizer), states(plain))


def test_a_scaled_loss_is_unscaled_for_the_gradient_and_clipping_shortens_the_step() -> None:
    """observe() gets the unscaled loss: state and step are those without a scaler; clipping keeps the state."""
    nets = [network() for _ in range(3)]
    plain, scaled, clipped = (
        Newton(net.parameters(), num_data=10, betas=(0.0, 0.9), prior_precision=0.0) for net in nets
    )
    start = weights(nets[0])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    take(nets[0], plain, 0)
    loss = loss_of(nets[1])
    scaled.observe(loss=loss)
    scaler.scale(loss).backward()
    scaler.step(scaled)
    loss = loss_of(nets[2])
    clipped.observe(loss=loss)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(nets[2].parameters(), 1e-2)
    clipped.step()
    for (name, p), q, r in zip(nets[0].named_parameters(), nets[1].parameters(), nets[2].parameters()):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=0)
        for opt, other in ((scaled, q), (clipped, r)):
            torch.testing.assert_close(precision_of(plain, p), precision_of(opt, other), rtol=1e-12, atol=0)
        torch.testing.assert_close(r - start[name], (p - start[name]) * 1e-2 / norm, rtol=1e-3, atol=1e-12)


def test_what_was_observed_for_gradients_that_are_gone_is_forgotten() -> None:
    for forget in (lambda net, opt: opt.zero_grad(), lambda net, opt: net.zero_grad()):
        model, other = network(), network()
        optimizer, plain = Newton(model.parameters(), num_data=10), Newton(other.parameters(), num_data=10)
        loss = loss_of(model, 5)
        optimizer.observe(loss=loss)
        loss.backward()
        forget(model, optimizer)  # as after a step that a GradScaler skipped
        loss = loss_of(model)
        optimizer.observe(loss=loss)
        loss.backward()
        optimizer.step()
        take(other, plain, 0)
        assert same(weights(model), weights(other))


@pytest.mark.parametrize("make", [Newton, VON])
def test_resumes_bit_for_bit(make: type) -> None:
    model = network()
    optimizer = make(model.parameters(), num_data=10, hessian="hutchinson", seed=3)
    for index in range(3):
        take(model, optimizer, index)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    other = network(1)
    resumed = make(other.parameters(), num_data=5)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    for index in range(3, 6):
        for net, opt in ((model, optimizer), (other, resumed), (twin, twin_optimizer)):
            take(net, opt, index)
    assert same(weights(model), weights(other))
    assert same(weights(model), weights(twin))
    assert same(states(optimizer), states(resumed))


def test_posteriors_are_priors_of_the_next_task() -> None:
    """Linear regression on two halves of the data gives the exact posterior of the whole."""
    torch.manual_seed(0)
    q, _ = torch.linalg.qr(torch.randn(30, 4, dtype=D))
    x, y = q * torch.arange(1, 5, dtype=D), torch.randn(30, dtype=D)
    model = nn.Linear(4, 1, bias=False).to(D)
    posterior = None
    for _ in range(2):
        optimizer = Newton(model.named_parameters(), 1.0, num_data=30, betas=(0.0, 0.0), prior=posterior)
        loss = 0.5 * (model(x)[:, 0] - y).square().mean()
        optimizer.observe(loss=loss)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        posterior = optimizer.posterior(model)
    precision = 2 * (x * x).sum(0) + 1.0
    torch.testing.assert_close(1 / posterior.variance()["weight"][0], precision, rtol=1e-10, atol=0)
    torch.testing.assert_close(posterior.mean["weight"][0], 2 * x.T @ y / precision, rtol=1e-10, atol=1e-12)


# --- errors ---


def test_what_cannot_be_observed_is_one_clear_error() -> None:
    model = network()
    optimizer, von = Newton(model.parameters(), num_data=10), VON(model.parameters(), num_data=10)
    before = weights(model)
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match=r"^Newton needs second derivatives: call optimizer.observe\(loss=loss\)"):
        optimizer.step()
    von.zero_grad()
    with von.sampled():
        loss_of(model).backward()
    with pytest.raises(RuntimeError, match=r"^VON needs second derivatives: call optimizer.observe\(loss=loss\)"):
        von.step()
    with pytest.raises(RuntimeError, match=r"^call observe\(loss=loss\) inside `with optimizer.sampled"):
        von.observe(loss=loss_of(model))
    with pytest.raises(TypeError, match=r"^loss must be a tensor, got float\.$"):
        optimizer.observe(loss=0.5)
    with pytest.raises(ValueError, match=r"^loss must be a single number, got shape \(8, 2\): average it"):
        optimizer.observe(loss=model(data()[0]))
    with pytest.raises(ValueError, match=r"^the loss has no graph: "):
        optimizer.observe(loss=loss_of(model).detach())
    loss = loss_of(model)
    loss.backward()
    with pytest.raises(RuntimeError, match=r"call observe\(loss=loss\) before loss.backward\(\)"):
        optimizer.observe(loss=loss)
    assert same(before, weights(model))
    assert optimizer.param_groups[0]["draws"] == 0


def test_losses_that_are_linear_or_leave_weights_out_have_no_curvature() -> None:
    for how in ("exact", "hutchinson"):
        a, b, c = (nn.Parameter(torch.ones(3, dtype=D)) for _ in range(3))
        optimizer = Newton([a, b, c], num_data=1, hessian=how)
        loss = a.sum() + (2 * b**2).sum()
        optimizer.observe(loss=loss)
        loss.backward()
        optimizer.step()
        assert torch.equal(c.detach(), torch.ones(3, dtype=D))
        rho = 1 - 0.999
        for p, h in ((a, 0.0), (b, 4.0)):
            torch.testing.assert_close(
                precision_of(optimizer, p), torch.full_like(p, 0.999 * 1.1 + rho * (h + 1)).detach()
            )
        optimizer.zero_grad()
        a.sum().backward()
        optimizer.observe(loss=a.sum())
        optimizer.step()


def test_hessians_that_are_not_finite_are_refused_or_skipped() -> None:
    """The gradient of |w|^1.5 at 0 is 0, its second derivative is infinite."""
    for option in ("raise", "skip"):
        weight = nn.Parameter(torch.tensor([0.0, 1.0], dtype=D))
        optimizer = Newton([weight], num_data=1, nonfinite=option)
        loss = (weight.abs() ** 1.5).sum()
        optimizer.observe(loss=loss)
        loss.backward()
        assert bool(torch.isfinite(weight.grad).all())
        if option == "raise":
            with pytest.raises(FloatingPointError, match=r"the Hessian of parameter 0 of .* has 1 entries of 2"):
                optimizer.step()
        else:
            optimizer.step()
        assert torch.equal(weight.detach(), torch.tensor([0.0, 1.0], dtype=D))
        assert not optimizer.state[weight]
