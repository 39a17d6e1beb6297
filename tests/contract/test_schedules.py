"""Learning rates that change, also to zero and back."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.optim import lr_scheduler

from bayesgrad.optim.variational import VariationalOptimizer
from cases import Case, backward, elementwise_case, every_case, same, small_model, states, train, weights


def _cycles(optimizer: torch.optim.Optimizer) -> bool:
    return "momentum" in optimizer.defaults or "betas" in optimizer.defaults


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: t / 4),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, step_size_up=3, cycle_momentum=_cycles(o)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=10, cycle_momentum=_cycles(o)),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)]
    ),
}

WIDTHS = {"KroneckerFilter": 100, "KroneckerFilterFP": 100}  # which decompose square matrices of this side every step


@every_case
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_gives_the_steps_of_setting_lr_by_hand(case: Case, name: str) -> None:
    width = WIDTHS.get(case.name, 1000)
    model = small_model(width=width)
    optimizer = case.of(model)
    scheduler = SCHEDULERS[name](optimizer)
    settings = []
    for index in range(9):
        settings.append({k: v for k, v in optimizer.param_groups[0].items() if k in ("lr", "momentum", "betas")})
        train(model, optimizer, range(index, index + 1))
        scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
    assert len({setting["lr"] for setting in settings}) > 1

    other = small_model(width=width)
    by_hand = case.of(other)
    for index, setting in enumerate(settings):
        by_hand.param_groups[0].update(setting)
        train(other, by_hand, range(index, index + 1))
    assert all(bool(torch.isfinite(value).all()) for value in weights(model).values())
    assert same(weights(model), weights(other))


def test_the_list_of_schedulers_is_complete() -> None:
    public = {
        name
        for name, member in vars(lr_scheduler).items()
        if inspect.isclass(member) and issubclass(member, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert public - {"LRScheduler"} <= set(SCHEDULERS)


@every_case
def test_lr_zero_changes_no_weight_and_no_belief(case: Case) -> None:
    model = small_model()
    optimizer = case.of(model, lr=0.01)
    optimizer.param_groups[0]["lr"] = 0.0
    start = weights(model)
    train(model, optimizer, range(1))
    assert same(start, weights(model))
    optimizer.param_groups[0]["lr"] = 0.01
    train(model, optimizer, range(1, 4))
    believed = [e for e in optimizer.state.values() if "variance" in e]
    before, variances = weights(model), [e["variance"].clone() for e in believed]
    assert not same(start, before)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, range(4, 6))
    assert same(before, weights(model))
    if not isinstance(optimizer, VariationalOptimizer):  # which update the curvature while the mean is constant
        for old, entry in zip(variances, believed):
            torch.testing.assert_close(entry["variance"], old, rtol=1e-6, atol=0)
    assert all(bool(torch.isfinite(value).all()) for value in states(optimizer).values())


@every_case
def test_an_optimizer_built_with_lr_zero_takes_its_ratios_from_the_first_lr(case: Case) -> None:
    model, other = small_model(), small_model()
    optimizer, late = case.of(model, lr=0.01), case.of(other, lr=0.0)
    late.param_groups[0]["lr"] = 0.01
    train(model, optimizer, range(3))
    train(other, late, range(3))
    assert same(weights(model), weights(other))


@elementwise_case
def test_steps_at_lr_zero_before_the_first_positive_lr_keep_the_prior(case: Case) -> None:
    """The averages may differ, so the gradient is the same at every step."""
    model, other = small_model(), small_model()
    optimizer, late = case.of(model, lr=0.01), case.of(other, lr=0.0)
    for p, q in zip(model.parameters(), other.parameters()):
        p.grad, q.grad = torch.full_like(p, 1e-3), torch.full_like(q, 1e-3)
    if "gradient_mean" in case.slots or optimizer.needs.draws:
        return  # the information of a second equal gradient differs from that of the first
    late.step()
    late.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] = 0.01
    late.step()
    optimizer.step()
    if "Bound" not in case.name:  # whose range depends on the number of steps
        for p, q in zip(model.parameters(), other.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    assert all(bool(torch.isfinite(q).all()) for q in other.parameters())


@every_case
def test_a_schedule_that_rounds_below_zero_ends_at_zero_and_worse_is_refused(case: Case) -> None:
    model = small_model()
    optimizer = case.of(model, lr=1e-3)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    backward(model, 2, optimizer)
    before, known = weights(model), states(optimizer)
    for bad, message in ((-0.5, "got -0.5"), (float("nan"), "got nan")):
        optimizer.param_groups[0]["lr"] = bad
        with pytest.raises(ValueError, match=message):
            optimizer.step()
        assert same(before, weights(model))
        assert same(known, states(optimizer))
    optimizer.param_groups[0]["lr"] = -1.9e-19
    optimizer.step()
    assert same(before, weights(model))


@every_case
def test_a_learning_rate_may_be_a_tensor(case: Case) -> None:
    model, other = small_model(), small_model()
    train(model, case.of(model, lr=0.01), range(3))
    train(other, case.of(other, lr=torch.tensor(0.01, dtype=torch.float64)), range(3))
    assert same(weights(model), weights(other))
