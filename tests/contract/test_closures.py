"""The contract of `step(closure)`: gradients that exist are kept, and only what a closure computes is a draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesgrad.optim import VON, AdaBayes, KalmanMomentum, Newton
from cases import CASES, Case, batch, same, small_model, states, train, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* trains .* by "),
    pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning"),
]
D = torch.float64
NAMES = (
    *("IVON", "IVON-natural", "VOGN", "VOGGN", "BayesBiNN", "VON", "SpikeSlab", "SpikeSlab-newton"),
    *("AdaBayes-drawn", "KalmanMomentum-sampled"),
)
DRAWING = [case for case in CASES if case.name in NAMES]
drawing = pytest.mark.parametrize("case", DRAWING, ids=lambda case: case.name)


def make(case: Case, **options: Any) -> tuple[nn.Module, Any]:
    model = small_model(D, width=30)
    return model, case.of(model, seed=0, **options)


def loss_of(model: nn.Module, optimizer: Any, index: int, part: slice = slice(None), parts: int = 1) -> Tensor:
    x, y = batch(index, D)
    outputs = model(x[part])
    loss = F.cross_entropy(outputs, y[part]) / parts
    optimizer.observe(outputs, loss=loss, labels=y[part])
    return loss


def test_all_rules_that_draw_are_tested() -> None:
    assert {case.make for case in CASES if case.of(small_model()).needs.draws} == {case.make for case in DRAWING}


@drawing
@pytest.mark.parametrize("samples", [1, 3])
def test_a_closure_that_computes_nothing_leaves_the_step_as_it_is(case: Case, samples: int) -> None:
    """The closure that Lightning's manual optimisation passes: gradients are those of the user's own passes."""
    (model, optimizer), (other, plain) = make(case, samples=samples), make(case, samples=samples)
    train(other, plain, range(3))
    for index in range(3):
        optimizer.zero_grad()
        with optimizer.sampled():
            loss_of(model, optimizer, index).backward()
        optimizer.step(lambda: None)
    assert same(weights(model), weights(other))
    assert same(states(optimizer), states(plain))
    assert optimizer.draws == plain.draws


@drawing
def test_a_closure_adds_to_gradients_of_other_draws(case: Case) -> None:
    """Three micro-batches in contexts of their own and one in a closure, against four in contexts."""
    (model, optimizer), (other, plain) = make(case), make(case)
    for index in range(3):
        for net, opt in ((model, optimizer), (other, plain)):
            opt.zero_grad()
            for part in range(4 if opt is plain else 3):
                with opt.sampled():
                    loss_of(net, opt, index, slice(part, None, 4), 4).backward()

        def closure(index: int = index) -> Tensor:
            loss = loss_of(model, optimizer, index, slice(3, None, 4), 4)
            loss.backward()
            return loss

        optimizer.step(closure)
        plain.step()
    assert same(weights(model), weights(other))
    assert same(states(optimizer), states(plain))


@drawing
def test_gradients_at_the_mean_are_not_mixed_with_a_draw(case: Case) -> None:
    """Accumulation around step(closure): three micro-batches without `sampled()`, the fourth in the closure."""
    model, optimizer = make(case)
    train(model, optimizer, range(1))
    before = weights(model)

    def closure() -> Tensor:
        loss = loss_of(model, optimizer, 1, slice(3, None, 4), 4)
        loss.backward()
        return loss

    for stale in (False, True):  # gradients at the mean, and those that the last step has used
        if not stale:
            optimizer.zero_grad()
            x, y = batch(1, D)
            (F.cross_entropy(model(x), y) / 4).backward()
        with pytest.raises(RuntimeError, match=r"not computed at sampled weights.* call optimizer.zero_grad\(\)"):
            optimizer.step(closure)
        assert same(weights(model), before)
        optimizer.zero_grad()
        train(model, optimizer, range(1, 2))
        before = weights(model)


@drawing
@pytest.mark.parametrize("where", ["closure", "loop"])
@pytest.mark.parametrize("how", ["optimizer", "model", "in place"])
def test_however_gradients_are_set_to_zero(case: Case, where: str, how: str) -> None:
    """By the optimizer, by the model, or in place before the closure is called: gradients of the last step are gone."""
    (model, optimizer), (other, plain) = make(case), make(case)

    def zero() -> None:
        if how == "in place":
            for p in model.parameters():
                p.grad = None if p.grad is None else p.grad.zero_()
        else:
            (optimizer if how == "optimizer" else model).zero_grad()

    for index in range(3):

        def closure(index: int = index) -> Tensor:
            if how != "in place":
                zero()
            loss = loss_of(model, optimizer, index)
            loss.backward()
            return loss

        if how == "in place":
            zero()
        if where == "closure":
            optimizer.step(closure)
        else:
            with optimizer.sampled():
                closure()
            optimizer.step()
    train(other, plain, range(3))
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-15)
    for a, b in zip(states(optimizer).values(), states(plain).values()):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


@drawing
def test_what_cannot_be_told_from_accumulation_is_refused(case: Case) -> None:
    """Gradients that the model sets to zero in place inside the context look like those that others are added to."""
    model, optimizer = make(case)
    train(model, optimizer, range(1))
    before = weights(model)
    with optimizer.sampled():
        model.zero_grad(set_to_none=False)
        loss_of(model, optimizer, 1).backward()
    with pytest.raises(RuntimeError, match=r"call optimizer.zero_grad\(\) before the first pass of a step"):
        optimizer.step()
    assert same(weights(model), before)


def test_gradients_with_a_graph_and_of_several_dtypes_add_up() -> None:
    """A backward pass with create_graph=True replaces the gradient by a sum; here the first layer is float32."""
    models = [small_model(D, width=5) for _ in range(2)]
    (case,) = (case for case in DRAWING if case.name == "IVON")
    for model in models:
        model.conv.float()
        model.conv.register_forward_pre_hook(lambda module, args: args[0].float())
    optimizers = [case.make(model.parameters(), num_data=1000, seed=0) for model in models]
    for index in range(2):
        for graph, (model, optimizer) in enumerate(zip(models, optimizers)):
            optimizer.zero_grad()
            for part in range(3):
                with optimizer.sampled():
                    loss = loss_of(model, optimizer, index, slice(part, None, 3), 3)
                    loss.backward(create_graph=bool(graph))
            for p in model.parameters():
                p.grad = p.grad.detach()
            optimizer.step()
    for p, q in zip(*(model.parameters() for model in models)):
        torch.testing.assert_close(p, q, rtol=1e-12 if p.dtype == D else 1e-6, atol=0)


@drawing
@pytest.mark.parametrize("closure", [lambda optimizer: None, lambda optimizer: optimizer.zero_grad()])
def test_a_closure_that_leaves_no_gradients_is_refused(case: Case, closure: Callable[[Any], None]) -> None:
    model, optimizer = make(case)
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"left no gradients: it must call loss.backward\(\)"):
        optimizer.step(lambda: closure(optimizer))
    assert same(weights(model), before)
    assert not any(value.item() for name, value in states(optimizer).items() if name.endswith(".step"))
    for p in model.parameters():
        p.requires_grad_(False)
    optimizer.step(lambda: None)  # as in torch.optim, there is nothing to do


@drawing
def test_several_draws_of_a_closure_are_not_added_to_another(case: Case) -> None:
    model, optimizer = make(case, samples=2)
    with optimizer.sampled():
        loss_of(model, optimizer, 0, slice(0, None, 2), 2).backward()
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"averaged over samples=2 draws cannot add to gradients of earlier passes"):
        optimizer.step(lambda: loss_of(model, optimizer, 0, slice(1, None, 2), 2).backward())
    assert same(weights(model), before)


@pytest.mark.parametrize("rule", [AdaBayes, KalmanMomentum])
def test_all_draws_of_a_closure_give_sampled_labels(rule: Any) -> None:
    """They act like the observations of a larger batch, as draws of the user's own passes do."""
    found = []
    for samples in (3, 1):
        model = small_model(D, width=30)
        optimizer = rule(
            model.named_parameters(), batch_size=8, fisher="sampled", sample_weights=True, samples=samples, seed=0
        )
        if samples > 1:

            def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, optimizer, 0)
                loss.backward()
                return loss

            optimizer.step(closure)
        else:
            for _ in range(3):
                with optimizer.sampled():
                    loss_of(model, optimizer, 0, parts=3).backward()
            optimizer.step()
        found.append(optimizer.posterior(model).variance())
    for name, variance in found[0].items():
        torch.testing.assert_close(variance, found[1][name], rtol=1e-10, atol=0)


def test_a_gradient_that_was_clipped_between_draws_has_the_hessian_of_what_is_left() -> None:
    """IVON at lr = 0: h = sum over draws of g_k e_k/sigma^2, with the first gradient halved."""
    model = small_model(D, width=30)
    (case,) = (case for case in DRAWING if case.name == "IVON")
    optimizer = case.make(model.parameters(), 0.0, num_data=1000, betas=(0.0, 0.9), seed=0)
    start, expected = weights(model), {}
    for k in range(3):
        with optimizer.sampled():
            inside = weights(model)
            earlier = {name: 0.0 if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
            x, y = batch(k, D)
            (F.cross_entropy(model(x), y) / 3).backward()
        for name, p in model.named_parameters():
            product = (p.grad - earlier[name]) * (inside[name] - start[name]) * 1000 * (1 + 1e-3)
            expected[name] = product + (0.5 * expected[name] if k else 0.0)
            p.grad *= 0.5
    optimizer.step()
    for name, p in model.named_parameters():
        h = 0.5 * expected[name]
        new = 0.9 + 0.1 * h + 0.5 * 0.01 * (1.0 - h) ** 2 / (1 + 1e-3)
        torch.testing.assert_close(1 / optimizer.state[p]["variance"], new + 1e-3, rtol=1e-8, atol=0)


@pytest.mark.parametrize("order", ["zero first", "observe first", "abandoned", "graph kept"])
@pytest.mark.parametrize("rule", [Newton, VON])
def test_hessians_have_the_weights_of_their_losses(rule: Any, order: str) -> None:
    """Losses that are divided after `observe`, as trainers do, against losses that are divided before."""
    model, other = small_model(D, width=5), small_model(D, width=5)
    optimizer, plain = (rule(net.parameters(), num_data=1000, hessian="exact", seed=0) for net in (model, other))
    shares = (0.5, 0.3, 0.2)
    for index in range(3):
        plain.zero_grad()
        with plain.sampled():
            for k, share in enumerate(shares):
                x, y = batch(3 * index + k, D)
                loss = share * F.cross_entropy(other(x), y)
                plain.observe(loss=loss)
                loss.backward()
        plain.step()
        with optimizer.sampled():
            if order != "observe first":
                optimizer.zero_grad()
            for k, share in enumerate(shares):
                x, y = batch(3 * index + k, D)
                if order == "abandoned":
                    optimizer.observe(loss=3 * F.cross_entropy(model(x), y))
                loss = F.cross_entropy(model(x), y)
                optimizer.observe(loss=loss)
                if order == "observe first" and k == 0:
                    optimizer.zero_grad()
                if order == "graph kept":
                    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
                    (share / 2 * loss).backward(retain_graph=True)
                    (share / 2 * loss).backward()
                else:
                    (share * loss).backward()
        optimizer.step()
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(optimizer.state[p]["variance"], plain.state[q]["variance"], rtol=1e-12, atol=0)


def test_a_pass_that_was_abandoned_before_zero_grad_adds_no_hessian() -> None:
    model, other = small_model(D, width=5), small_model(D, width=5)
    optimizer, plain = (Newton(net.parameters(), num_data=1000, hessian="exact") for net in (model, other))
    for index in (7, 0):
        x, y = batch(index, D)
        loss = F.cross_entropy(model(x), y)
        optimizer.observe(loss=loss)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
    optimizer.step()
    train(other, plain, range(1))
    assert same(weights(model), weights(other))
