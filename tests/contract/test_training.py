"""Training loops of every kind: closures, groups, accumulation, clipping, casts, layouts, missing gradients."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from bayesgrad import samplers
from bayesgrad.optim import KroneckerFilterFP
from cases import (
    CASES,
    Case,
    backward,
    batch,
    drawn,
    elementwise_case,
    every_case,
    observe,
    same,
    small_model,
    states,
    still,
    train,
    weights,
)


@elementwise_case
def test_parameters_may_be_laid_out_anew_or_cast_during_a_run(case: Case) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Conv2d(64, 64, 3)

    def step(module: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        with drawn(optimizer):
            for p in module.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()

    plain, moved = model(), model()
    optimizers = case(plain.parameters()), case(moved.parameters())
    for index in range(6):
        if index == 2:
            moved.to(memory_format=torch.channels_last)
        if index == 4:
            wide = torch.zeros(64, 128, 3, 3)
            wide[:, ::2] = moved.weight.detach()
            moved.weight.data = wide[:, ::2]
        for module, optimizer in zip((plain, moved), optimizers):
            step(module, optimizer, index)
    assert same(weights(plain), weights(moved))
    assert bool((wide[:, 1::2] == 0).all())
    moved.double()
    step(moved, optimizers[1], 6)
    kept = {v.dtype for entry in optimizers[1].state.values() for k, v in entry.items() if k != "step"}
    assert kept == {torch.float64}
    moved.weight.data = torch.zeros(3, dtype=torch.float64)
    moved.weight.grad = None

    def other_shape() -> None:
        with drawn(optimizers[1]):
            moved.weight.grad = torch.zeros(3, dtype=torch.float64)
        optimizers[1].step()

    with pytest.raises(ValueError, match=r"has shape \(64, 64, 3, 3\), but the parameter now has \(3,\)"):
        other_shape()


@elementwise_case
def test_gradients_of_another_dtype_than_the_weights(case: Case) -> None:
    params = [nn.Parameter(torch.zeros(200, 200, dtype=torch.bfloat16)) for _ in range(3)]
    for p in params[1:]:
        p.grad_dtype = torch.float32
    optimizer = case(params)
    with still(optimizer):
        for p in params:
            p.grad = torch.full((200, 200), 0.5, dtype=p.dtype if p is params[0] else torch.float32)
    optimizer.step()
    assert all(torch.equal(p, params[0]) for p in params)
    assert params[0].unique().numel() == 1


@elementwise_case
@pytest.mark.filterwarnings("ignore:the standard deviation of .* is below the spacing of torch")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_wide_gradients_of_narrow_weights_keep_their_precision(case: Case, dtype: torch.dtype) -> None:
    """A large tensor takes the steps of its halves, which are packed with other small ones, beside others."""
    start = torch.linspace(-1, 1, 40_000).to(dtype)
    gradients = torch.linspace(-1, 1, 40_000) * torch.logspace(-9, 6, 40_000)  # beyond float16 at both ends
    runs = []
    for parts in (1, 2):
        params = [nn.Parameter(part.clone()) for part in start.chunk(parts)]
        for p in params:
            p.grad_dtype = torch.float32
        ordinary = nn.Parameter(start.clone())
        optimizer = case([*params, ordinary])
        for _ in range(3):
            with still(optimizer):
                ordinary.grad = gradients.clamp(-1, 1).to(dtype)
                for p, gradient in zip(params, gradients.chunk(parts)):
                    p.grad = gradient.clone()
            optimizer.step()
        runs.append(torch.cat([p.detach() for p in params]))
        assert bool(torch.isfinite(runs[-1]).all())
    assert torch.equal(*runs)


@every_case
def test_a_closure_is_called_with_gradients_on_and_its_loss_returned(case: Case) -> None:
    model, other = small_model(), small_model()
    optimizer, by_hand = case.of(model), case.of(other)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        x, y = batch(0)
        outputs = model(x)
        loss = nn.functional.cross_entropy(outputs, y)
        observe(optimizer, outputs, y, loss)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.item() == backward(other, 0, by_hand).item()
    by_hand.step()
    assert same(weights(model), weights(other))


@every_case
def test_gradients_are_left_alone(case: Case) -> None:
    model = small_model()
    optimizer = case.of(model, weight_decay=0.1)
    backward(model, 0, optimizer)
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    assert same(before, {name: p.grad for name, p in model.named_parameters()})


@elementwise_case
def test_parameters_without_gradient_are_left_alone(case: Case) -> None:
    model, other = small_model(), small_model()
    optimizer = case(model.parameters(), weight_decay=0.1)
    separate = {name: case([p], weight_decay=0.1) for name, p in other.named_parameters()}
    for index in range(6):
        optimizer.zero_grad()
        with still(optimizer):
            backward(model, index)
        # Different parameters have gradients at each step, so their step counters differ.
        absent = [name for i, (name, _) in enumerate(model.named_parameters()) if (i + index) % 3 == 0]
        for name, p in model.named_parameters():
            if name in absent:
                p.grad = None
        before, known = weights(model), states(optimizer)
        for name, p in other.named_parameters():
            q = dict(model.named_parameters())[name]
            separate[name].zero_grad()
            with still(separate[name]):
                p.grad = None if q.grad is None else q.grad.clone()
        optimizer.step()
        for name in absent:
            assert torch.equal(before[name], weights(model)[name])
        assert set(known) <= set(states(optimizer))
        for one in separate.values():
            one.step()
        assert same(weights(model), weights(other))


@elementwise_case
def test_groups_have_their_own_settings_and_can_be_added_later(case: Case) -> None:
    model, other = small_model(), small_model()
    first, second = list(model.parameters())[:3], list(model.parameters())[3:]
    optimizer = case([{"params": first, "lr": 0.02}], weight_decay=0.0)
    decay = {"weight_decay": 0.3} if case.decays else {}
    optimizer.add_param_group({"params": second, "lr": 0.005, **decay})
    separate = [
        case(list(other.parameters())[:3], lr=0.02, weight_decay=0.0),
        case(list(other.parameters())[3:], lr=0.005, weight_decay=0.3),
    ]
    for index in range(3):
        optimizer.zero_grad()
        other.zero_grad()
        with still(optimizer), still(separate[0]), still(separate[1]):
            backward(model, index)
            backward(other, index)
        for one in (optimizer, *separate):
            one.step()
    assert same(weights(model), weights(other))


@elementwise_case
def test_dtypes_can_be_mixed(case: Case) -> None:
    params = [nn.Parameter(torch.randn(50, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    alone = [nn.Parameter(p.detach().clone()) for p in params]
    optimizer = case(params)
    with still(optimizer):
        for p in params:
            p.grad = torch.ones_like(p)
    for p in alone:
        one = case([p])
        with still(one):
            p.grad = torch.ones_like(p)
        one.step()
    optimizer.step()
    for p, q in zip(params, alone):
        assert torch.equal(p, q)
        assert p.dtype == q.dtype


@every_case
def test_accumulated_gradients_act_like_one_batch(case: Case) -> None:
    model, other = small_model(torch.float64), small_model(torch.float64)
    # Preconditioned in several backward passes, a step is bounded by the sum of their norms: see test_precondition.py.
    unbounded = case.options.get("precondition") == "backward" and case.make is not KroneckerFilterFP
    options: dict[str, Any] = {"max_norm": math.inf} if unbounded else {}
    if case.name == "Langevin-default":  # steps are limited by each loss, and noise in null spaces depends on rounding
        options |= {"limit_step": False, "temperature": 0.0}
    optimizer, whole = case.of(model, **options), case.of(other, **options)
    for index in range(3):
        optimizer.zero_grad()
        x, y = batch(index, torch.float64)
        with drawn(optimizer):
            for part in range(4):
                outputs = model(x[part::4])
                loss = nn.functional.cross_entropy(outputs, y[part::4]) / 4
                observe(optimizer, outputs, y[part::4], loss)
                loss.backward()
        optimizer.step()
        train(other, whole, range(index, index + 1))
    for a, b in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@elementwise_case
def test_clipping_acts_on_what_the_step_sees(case: Case) -> None:
    model, other = small_model(), small_model()
    optimizer, by_hand = case(model.parameters()), case(other.parameters())
    backward(model, 0, optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with drawn(by_hand):
        for p, q in zip(model.parameters(), other.parameters()):
            q.grad = p.grad.clone()
    optimizer.step()
    by_hand.step()
    assert same(weights(model), weights(other))


@every_case
def test_grad_scaler_unscales_and_skips_overflows(case: Case) -> None:
    model, other = small_model(), small_model()
    optimizer, plain = case.of(model), case.of(other)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for index in range(3):
        optimizer.zero_grad()
        x, y = batch(index)
        with drawn(optimizer):
            outputs = model(x)
            loss = nn.functional.cross_entropy(outputs, y)
            observe(optimizer, outputs, y, loss)
            scaler.scale(loss).backward()
        if index == 1:
            model.out.weight.grad[0, 0] = float("inf")
            before, known = weights(model), states(optimizer)
            scaler.step(optimizer)
            with drawn(plain):
                pass  # a skipped step also counts its draw
            assert same(before, weights(model))
            assert same(known, states(optimizer))
            plain.param_groups[0]["draws"] = optimizer.param_groups[0].get("draws", 0)  # a draw is a draw
        else:
            scaler.step(optimizer)
            train(other, plain, range(index, index + 1))
        scaler.update()
    for a, b in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@every_case
def test_a_compiled_model_trains_like_any_other(case: Case) -> None:
    model, other = small_model(), small_model()
    # A compiled model has no second derivatives, by which steps could be shortened.
    options = {"limit_step": False} if case.make is samplers.Langevin else {}
    optimizer, plain = case.of(model, **options), case.of(other, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own deprecations on import
        compiled = torch.compile(model, backend="eager")
        train(compiled, optimizer, range(2))
    train(other, plain, range(2))
    assert same(weights(model), weights(other))


@every_case
def test_bfloat16_weights_have_float32_state_and_train(case: Case) -> None:
    model = small_model(torch.bfloat16)
    optimizer = case.of(model, **({} if case.layers else {"lr": 0.01}))
    x, y = batch(0, torch.bfloat16)
    before = nn.functional.cross_entropy(model(x), y).item()
    for _ in range(30):
        train(model, optimizer, range(1))
    assert nn.functional.cross_entropy(model(x), y).item() < before / 2
    kept = {v.dtype for entry in optimizer.state.values() for k, v in entry.items() if k not in optimizer.on_cpu()}
    assert {dtype for dtype in kept if dtype.is_floating_point} <= {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def gradient_like(p: torch.Tensor) -> torch.Tensor:
    return torch.arange(p.numel(), dtype=p.dtype).reshape(p.shape).cos()


@elementwise_case
def test_layout_of_memory_does_not_matter(case: Case) -> None:
    """Transposed, channels-last, sliced and empty parameters, with gradients in another layout."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "transposed": torch.randn(300, 200, generator=generator).T,
        "channels_last": torch.randn(8, 16, 20, 20, generator=generator).contiguous(memory_format=torch.channels_last),
        "sliced": torch.randn(400, 200, generator=generator)[::2],
        "small_sliced": torch.randn(9, generator=generator)[::2],
        "scalar": torch.tensor(0.5),
        "empty": torch.empty(0, 3),
    }
    params = {name: nn.Parameter(tensor) for name, tensor in tensors.items()}
    plain = {
        name: nn.Parameter(tensor.clone(memory_format=torch.contiguous_format)) for name, tensor in tensors.items()
    }
    optimizer, reference = case(params.values()), case(plain.values())
    for _ in range(3):
        with drawn(optimizer), drawn(reference):
            for name, p in params.items():
                gradient = torch.randn(p.shape, generator=generator)
                p.grad, plain[name].grad = gradient, gradient.clone()
        optimizer.step()
        reference.step()
    for name, p in params.items():
        assert torch.equal(p, plain[name]), name
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    with drawn(optimizer), drawn(reference):
        for p in (*params.values(), *plain.values()):
            p.grad = gradient_like(p)
    optimizer.step()
    reference.step()
    for name, p in params.items():
        assert torch.equal(p, plain[name]), name


@every_case
def test_a_step_counts_as_a_change_for_autograd(case: Case) -> None:
    model = small_model()
    optimizer = case.of(model)
    loss = backward_later = model(batch(0)[0]).square().sum()
    backward(model, 0, optimizer)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward_later.backward()
    assert loss.requires_grad


@every_case
def test_trains_a_small_network_on_digits_with_its_defaults(case: Case) -> None:
    """Fifteen epochs with default options reach 90 %; weight decay is zero."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    order = torch.randperm(len(x))
    x, y = x[order], y[order]
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    if case.binary:  # which need normalisation and more weights
        normal = [nn.BatchNorm1d(width, affine=False) for width in (256, 10)]
        model = nn.Sequential(nn.Linear(64, 256), normal[0], nn.ReLU(), nn.Linear(256, 10), normal[1])
    optimizer = case.of(model, weight_decay=0.0)
    for _ in range(15):
        for i in range(0, 1344, 32):
            optimizer.zero_grad()
            with drawn(optimizer):
                outputs = model(x[i : i + 32])
                loss = nn.functional.cross_entropy(outputs, y[i : i + 32])
                observe(optimizer, outputs, None, loss)
                loss.backward()
            optimizer.step()
    accuracy = (model(x[1344:]).argmax(1) == y[1344:]).float().mean().item()
    assert accuracy > 0.9


OBSERVING = ("KFAC", "KroneckerFilter", "KroneckerFilterFP", "VOGGN", "AdaBayes-sampled", "AdaBayesFP-sampled", "SNGD")


@pytest.mark.parametrize("case", [case for case in CASES if case.name in OBSERVING], ids=lambda case: case.name)
def test_a_loop_may_skip_a_batch_after_its_observation(case: Case) -> None:
    """As for a loss that is not finite: `zero_grad()` discards the observation, although no backward pass followed."""
    model, plain = (small_model(torch.float64, width=8) for _ in range(2))
    optimizer, reference = case.of(model, seed=0), case.of(plain, seed=0)
    for index in range(3):
        optimizer.zero_grad()
        x, y = batch(index, torch.float64)
        with still(optimizer):
            optimizer.observe(model(x * math.nan), labels=y)
        for net, opt in ((model, optimizer), (plain, reference)):
            opt.zero_grad()
            with still(opt):
                backward(net, index, opt)
            opt.step()
    assert same(weights(model), weights(plain))
