"""Evidence belongs to the gradients of a step: what was collected in passes that a loop gave up is not used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from bayesgrad import samplers
from cases import CASES, Case, backward, batch, drawn, observe, same, small_model, states, train, weights

DISCARDED = r"load_state_dict\(\) between backward\(\) and step\(\) has discarded what was recorded beside these"


def trained(case: Case) -> tuple[nn.Module, Any]:
    model = small_model(torch.float64, width=20)
    optimizer = case.of(model)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("zero", [nn.Module.zero_grad, lambda model: model.zero_grad(set_to_none=False)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_pass_that_the_model_zeroed_is_discarded(case: Case, zero: Callable[[nn.Module], None]) -> None:
    """A batch is given up after its backward pass, and the gradients are zeroed by model or optimizer."""
    results = []
    for by_model in (False, True):
        model, optimizer = trained(case)
        backward(model, 5, optimizer)
        zero(model) if by_model else optimizer.zero_grad()
        backward(model, 6, optimizer)
        optimizer.step()
        results.append(weights(model) | states(optimizer))
    assert same(*results)


OBSERVERS = [case for case in CASES if case.of(small_model(width=2)).needs[1:3] != (False, False)]
observer_case = pytest.mark.parametrize("case", OBSERVERS, ids=lambda case: case.name)


def drawn_again(optimizer: Any, index: int) -> Any:
    """The index-th draw, whatever was drawn before."""
    optimizer.param_groups[0] |= {"seed": 0, "draws": index}
    return drawn(optimizer)


@pytest.mark.parametrize("zero", ["optimizer", "model"])
@observer_case
def test_a_pass_that_was_given_up_before_the_next_observation_is_discarded(case: Case, zero: str) -> None:
    """Loops in the order forward, observe, zero_grad, backward, step; a GradScaler skips a step."""
    results = []
    for given_up in (False, True):
        model, optimizer = trained(case)
        for index in (3, 4, 5):
            x, y = batch(index, torch.float64)
            with drawn_again(optimizer, index):
                outputs = model(x)
                loss = nn.functional.cross_entropy(outputs, y)
                if index == 4 and not given_up:
                    continue
                observe(optimizer, outputs, y, loss)
                (optimizer if zero == "optimizer" else model).zero_grad()
                if index == 5 and given_up and zero == "model":
                    with pytest.raises(RuntimeError, match=r"call optimizer.zero_grad\(\) instead"):
                        loss.backward()
                    return
                loss.backward()
            if index != 4:
                optimizer.step()
        results.append(weights(model) | states(optimizer))
    assert same(*results)


class Interrupt(Exception):
    pass


def interrupt(*args: Any) -> None:
    raise Interrupt


@pytest.mark.parametrize("early", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("where", ["observation", "backward"])
@observer_case
def test_what_an_error_interrupts_is_discarded(case: Case, where: str, early: bool) -> None:
    results = []
    for interrupted in (False, True):
        model, optimizer = trained(case)
        train(model, optimizer, range(2, 3))
        if early:
            optimizer.zero_grad()
        if interrupted and where == "backward":
            handle = model.wide.weight.register_post_accumulate_grad_hook(interrupt)
        elif interrupted:
            handle = model.out.register_full_backward_pre_hook(interrupt)
        if interrupted:
            with pytest.raises(Interrupt):
                backward(model, 5, optimizer)
            handle.remove()
        model.zero_grad()
        with drawn_again(optimizer, 6):
            backward(model, 6, optimizer)
        optimizer.step()
        results.append(weights(model) | states(optimizer))
    assert same(*results)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_state_loaded_between_micro_batches_is_refused_or_loses_nothing(case: Case) -> None:
    results = []
    for load in (False, True):
        model, optimizer = trained(case)
        backward(model, 5, optimizer)
        if load:
            optimizer.load_state_dict(optimizer.state_dict())
        backward(model, 6, optimizer)
        if load and optimizer._parts:
            with pytest.raises(RuntimeError, match=DISCARDED):
                optimizer.step()
            optimizer.zero_grad()
            backward(model, 7, optimizer)
            optimizer.step()  # after zero_grad() training goes on
            return
        optimizer.step()
        results.append(weights(model) | states(optimizer))
    assert same(*results)


def test_a_state_may_be_loaded_when_gradients_were_used_or_are_zero() -> None:
    model, optimizer = trained(next(case for case in CASES if case.name == "FOOF"))
    for prepare in (lambda: None, lambda: model.zero_grad(set_to_none=False), model.zero_grad):
        backward(model, 3, optimizer)
        optimizer.step()
        prepare()
        optimizer.load_state_dict(optimizer.state_dict())
        backward(model, 4, optimizer)
        optimizer.step()


@pytest.mark.parametrize("name", ["KFAC-backward", "KroneckerFilterFP-backward"])
def test_assigned_gradients_are_preconditioned_in_the_step(name: str) -> None:
    """`torch.autograd.grad` does not precondition, so `step()` does, as with precondition="step"."""
    results = []
    for assigned in (False, True):
        model = small_model(torch.float64, width=20)
        optimizer: Any = next(case for case in CASES if case.name == name).of(model)
        train(model, optimizer, range(5))
        x, y = batch(5, torch.float64)
        optimizer.zero_grad()
        params = list(model.parameters())
        outputs = model(x)
        loss = nn.functional.cross_entropy(outputs, y)
        optimizer.observe(outputs, loss=loss, labels=y)
        if assigned:
            gradients = torch.autograd.grad(loss, params)
            for p, gradient in zip(params, gradients):
                p.grad = gradient
        else:
            optimizer.param_groups[0]["precondition"] = "step"
            loss.backward()
        optimizer.step()
        results.append(weights(model))
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("frozen", ["wide", ""], ids=["layer", "model"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_frozen_after_a_backward_pass_takes_the_step_of_its_gradient(case: Case, frozen: str) -> None:
    """As in torch.optim, which trains whatever has a gradient."""
    results = []
    for freeze in (False, True):
        model, optimizer = trained(case)
        for index in range(2, 5):
            optimizer.zero_grad()
            backward(model, index, optimizer)
            model.get_submodule(frozen).requires_grad_(not (freeze and index == 3))
            optimizer.step()
            model.requires_grad_(True)
        results.append(weights(model) | states(optimizer))
    assert same(*results)


@pytest.mark.filterwarnings("ignore:gradients were changed between")
@pytest.mark.parametrize("change", ["clamp", "add", "multiply"])
@pytest.mark.parametrize("name", ["FOOF", "KFAC", "KroneckerFilterFP", "NaturalGradient", "OGN"])
def test_changes_of_the_data_of_gradients_are_seen(name: str, change: str) -> None:
    """`.grad.data` has no version counter; with two rows a step would use these in place of the gradient."""
    results = []
    for by_data in (False, True):
        model = small_model(torch.float64, width=20)
        optimizer: Any = next(case for case in CASES if case.name == name).of(model)
        for index in range(5):
            x, y = (value[:2] for value in batch(index, torch.float64))
            optimizer.zero_grad()
            outputs = model(x)
            optimizer.observe(outputs, labels=y)
            nn.functional.cross_entropy(outputs, y).backward()
            for factor, p in enumerate(model.parameters(), 1):
                gradient: Any = p.grad.data if by_data and p.grad is not None else p.grad
                if change == "clamp":
                    gradient.clamp_(-1e-3, 1e-3)
                elif change == "add":
                    gradient.add_(p.detach())
                else:
                    gradient.mul_(factor)
            optimizer.step()
        results.append(weights(model))
    assert same(*results)


@pytest.mark.parametrize("metric", ["diagonal", "kronecker"])
def test_the_metric_of_thawed_weights_has_no_zeros_of_the_time_when_they_were_frozen(metric: str) -> None:
    """What is thawed begins with the Fisher of its first batch, like what is added to the sampler."""
    model = small_model(torch.float64, width=20)
    sampler: Any = samplers.Langevin(model, lr=1e-3, num_data=100, metric=metric, ema=0.9, limit_step=False, seed=0)
    fresh: Any = None
    for index in range(4):
        model.wide.requires_grad_(index == 3)
        if index == 3:
            fresh = samplers.Langevin(
                copy.deepcopy(model), lr=1e-3, num_data=100, metric=metric, ema=0.9, limit_step=False, seed=0
            )
            outputs = fresh.model(batch(index, torch.float64)[0])
            fresh.observe(outputs)
            nn.functional.cross_entropy(outputs, batch(index)[1]).backward()
            fresh.step()
        sampler.zero_grad()
        outputs = model(batch(index, torch.float64)[0])
        sampler.observe(outputs)
        nn.functional.cross_entropy(outputs, batch(index)[1]).backward()
        sampler.step()
    found, expected = sampler.state[model.wide.weight], fresh.state[fresh.model.wide.weight]
    compared = [key for key, value in expected.items() if key != "step" and value.numel() > 4]
    assert compared
    for key in compared:
        torch.testing.assert_close(found[key], expected[key], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("penalty", ["weights", "inputs"])
@pytest.mark.parametrize("first", ["loss", "penalty"])
@pytest.mark.parametrize("name", ["NaturalGradient", "NaturalGradient-layer", "FOOF", "KroneckerFilterFP-prior"])
@pytest.mark.filterwarnings("ignore:.* trains .* by ")
def test_a_backward_pass_of_a_penalty_adds_to_the_gradient(name: str, first: str, penalty: str) -> None:
    """The step is that of assigned gradients, also while the Fisher matrix is that of an earlier batch."""
    results = []
    for assigned in (False, True):
        model = small_model(torch.float64, width=20)
        optimizer: Any = next(case for case in CASES if case.name == name).of(model)
        for index in range(6):
            x, y = batch(index, torch.float64)
            optimizer.zero_grad()
            outputs = model(x.requires_grad_())
            loss = nn.functional.cross_entropy(outputs, y)
            optimizer.observe(outputs, loss=loss, labels=y)
            by_input = torch.autograd.grad(loss, x, create_graph=True)[0] if penalty == "inputs" else torch.zeros(())
            terms = [loss, sum(p.square().sum() for p in model.parameters()) / 10 + 100 * by_input.square().sum()]
            for term in terms if first == "loss" else reversed(terms):
                term.backward(retain_graph=True)
            for p in model.parameters() if assigned else ():
                p.grad = p.grad.clone()  # pyright: ignore[reportOptionalMemberAccess]
            optimizer.step()
        results.append(weights(model))
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loop", ["every second", "zeroed in place", "second micro-batch"])
@pytest.mark.parametrize("penalty", ["weights", "gradients"])
@pytest.mark.parametrize("name", ["NaturalGradient", "FOOF", "KFAC", "KroneckerFilter", "KroneckerFilterFP-prior"])
@pytest.mark.filterwarnings("ignore:.* trains .* by ")
def test_a_penalty_in_some_of_the_steps_adds_to_the_gradient(name: str, penalty: str, loop: str) -> None:
    """The step is that of assigned gradients, also where the pass before had no such term."""
    results = []
    for assigned in (False, True):
        model = small_model(torch.float64, width=20)
        optimizer: Any = next(case for case in CASES if case.name == name).of(model)
        params = list(model.parameters())
        for index in range(12):
            optimizer.zero_grad(set_to_none=loop != "zeroed in place")
            for part in range(2 if loop == "second micro-batch" else 1):
                x, y = (t[:2] for t in batch(2 * index + part, torch.float64))  # so few rows replace a gradient
                outputs = model(x)
                loss = nn.functional.cross_entropy(outputs, y)
                optimizer.observe(outputs, loss=loss, labels=y)
                if part or index % {"every second": 2, "zeroed in place": 4}.get(loop, 13) == 1:
                    of = torch.autograd.grad(loss, params, create_graph=True) if penalty == "gradients" else params
                    loss = loss + sum(p.square().sum() for p in of)
                loss.backward()
            for p in params if assigned else ():
                p.grad = p.grad.clone()  # pyright: ignore[reportOptionalMemberAccess]
            optimizer.step()
        results.append(weights(model))
    for key, expected in results[0].items():
        torch.testing.assert_close(results[1][key], expected, rtol=1e-9, atol=1e-12)


def test_a_pass_of_second_derivatives_has_no_squares_of_examples() -> None:
    """Layers do not see these terms, so the parameters are named in a warning, as with one pass of the sum."""
    model = small_model(torch.float64, width=20)
    optimizer: Any = next(case for case in CASES if case.name == "OGN").of(model)
    x, y = batch(0, torch.float64)
    loss = nn.functional.cross_entropy(model(x.requires_grad_()), y)
    (by_input,) = torch.autograd.grad(loss, x, create_graph=True)
    loss.backward(retain_graph=True)
    by_input.square().sum().backward()
    with pytest.warns(UserWarning, match="OGN trains .*wide.weight.*out.weight"):
        optimizer.step()


@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize("metric", ["fisher", "empirical", "diagonal", "kronecker"])
@pytest.mark.parametrize("steps", [0, 1])
def test_the_metric_beside_a_frozen_layer_is_that_of_the_latest_batch(metric: str, frozen: int, steps: int) -> None:
    """Against a sampler of the other layer alone."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(40, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    options: Any = {"lr": 0.1, "num_data": 100, "temperature": 0.0, "metric": metric, "limit_step": False}

    def run(sampler: Any, indices: range) -> None:
        for index in indices:
            sampler.zero_grad()
            x, y = batch(index, torch.float64)
            outputs = sampler.model(x)
            sampler.observe(outputs, labels=y if metric == "empirical" else None)
            nn.functional.cross_entropy(outputs, y).backward()
            sampler.step()

    sampler = samplers.Langevin(model, **options)
    run(sampler, range(steps))
    model[frozen].requires_grad_(False)
    other = copy.deepcopy(model)
    run(sampler, range(steps, 4))
    run(samplers.Langevin(other, params=list(other[2 - frozen].parameters()), **options), range(steps, 4))
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["VON", "VOGGN", "KalmanMomentum-sampled"])
def test_an_observation_before_an_error_inside_a_draw_is_discarded(name: str) -> None:
    """The loop catches the error and sets gradients to None itself: no gradient tells that the pass was given up."""
    case = next(case for case in CASES if case.name == name)
    results = []
    for interrupted in (False, True):
        model, optimizer = trained(case)
        if interrupted:
            with suppress(ZeroDivisionError), optimizer.sampled():
                x, y = batch(5, torch.float64)
                outputs = model(x)
                optimizer.observe(outputs, loss=nn.functional.cross_entropy(outputs, y), labels=y)
                raise ZeroDivisionError
        for p in model.parameters():
            p.grad = None
        optimizer.draws = 100
        backward(model, 6, optimizer)
        optimizer.step()
        results.append(weights(model) | states(optimizer))
    assert same(*results)


@pytest.mark.parametrize("name", ["KFAC", "AdaBayes-sampled", "KroneckerFilter"])
def test_an_observation_before_an_error_in_a_closure_is_discarded(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    results = []
    for interrupted in (False, True):
        model, optimizer = trained(case)

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            x, y = batch(5, torch.float64)
            optimizer.observe(model(x), labels=y)
            raise ZeroDivisionError

        if interrupted:
            with pytest.raises(ZeroDivisionError):
                optimizer.step(closure)
        model.zero_grad()
        backward(model, 6, optimizer)
        optimizer.step()
        results.append(weights(model) | states(optimizer))
    assert same(*results)


@pytest.mark.parametrize("metric", ["diagonal", "kronecker"])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_part_of_a_layer_that_was_frozen_begins_with_the_metric_of_its_first_batch(metric: str, name: str) -> None:
    """Against a new sampler; all batches are equal and nothing moves, so that averages are those of one batch."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(40, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    options: Any = {"num_data": 100, "temperature": 0.0, "metric": metric, "ema": 0.9, "limit_step": False}
    x, y = batch(0, torch.float64)

    def run(sampler: Any, steps: int, lr: float) -> None:
        for _ in range(steps):
            sampler.param_groups[0]["lr"] = lr
            sampler.zero_grad()
            outputs = sampler.model(x)
            sampler.observe(outputs)
            nn.functional.cross_entropy(outputs, y).backward()
            sampler.step()

    sampler, part = samplers.Langevin(model, **options), getattr(model[0], name)
    part.requires_grad_(False)
    run(sampler, 5, 0.0)
    part.requires_grad_(True)
    other = copy.deepcopy(model)
    run(sampler, 1, 0.1)
    run(samplers.Langevin(other, **options), 1, 0.1)
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("metric", ["fisher", "diagonal", "kronecker"])
@pytest.mark.parametrize("options", [{"update_every": 9}, {"ema": 0.9}], ids=str)
@pytest.mark.parametrize("added", [False, True])
def test_the_metric_is_updated_when_parameters_are_thawed_or_added(metric: str, options: Any, added: bool) -> None:
    """Against a new sampler; nothing moves before, so that averages are those of one batch."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(40, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    options = {"num_data": 100, "temperature": 0.0, "metric": metric, "limit_step": False, **options}
    x, y = batch(0, torch.float64)

    def step(sampler: Any, lr: float) -> None:
        for group in sampler.param_groups:
            group["lr"] = lr
        sampler.zero_grad()
        outputs = sampler.model(x)
        sampler.observe(outputs)
        nn.functional.cross_entropy(outputs, y).backward()
        sampler.step()

    first = list(model[0].parameters()) if added else None
    model[2].requires_grad_(added)
    sampler = samplers.Langevin(model, params=first, **options)
    step(sampler, 0.0)
    step(sampler, 0.0)
    model.requires_grad_(True)
    if added:
        sampler.add_param_group({"params": list(model[2].parameters())})
    other = copy.deepcopy(model)
    step(sampler, 0.1)
    step(samplers.Langevin(other, **options), 0.1)
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
