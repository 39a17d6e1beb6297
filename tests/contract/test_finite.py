"""Gradients and weights that are not finite: one warning with nonfinite="ignore", and causes that are named."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesgrad.optim import FOOF, KFAC, STE, AdaBayes, AdaBayesFP
from cases import Case, batch, every_case, small_model, train

REMEDY = r"pass nonfinite='raise' or nonfinite='skip'"


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def step(model: nn.Module, optimizer: Any, bad: float | None = None, where: str = "2.weight") -> None:
    """One step; with `bad`, an entry of one gradient has this value."""
    x, y = batch(0, next(model.parameters()).dtype)
    with optimizer.sampled():
        optimizer.zero_grad()
        outputs = model(x)
        loss = F.cross_entropy(outputs, y)
        optimizer.observe(outputs, loss=loss)
        loss.backward()
    if bad is not None:
        model.get_parameter(where).grad.view(-1)[1] = bad  # pyright: ignore[reportOptionalMemberAccess]
    optimizer.step()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_is_reported_once(value: float, dtype: torch.dtype) -> None:
    model = net(dtype)
    optimizer = AdaBayesFP(model.named_parameters())
    step(model, optimizer)
    words = rf"AdaBayesFP: the gradient of parameter '2.weight' has 1 entries of 15 .*, found at step 2\..*{REMEDY}"
    with pytest.warns(RuntimeWarning, match=words):
        step(model, optimizer, value)
    for _ in range(30):  # a second warning would be an error
        step(model, optimizer)
    optimizer.state_dict()
    optimizer.eval()


def test_weights_that_are_not_finite_are_reported() -> None:
    """A bad gradient between two checks is found in the weights, also where later gradients are finite."""
    rows = nn.Parameter(torch.zeros(4, 2))
    optimizer = AdaBayesFP([("rows", rows)])
    for index in range(3):
        rows.grad = torch.zeros(4, 2)
        if index == 2:
            rows.grad[3, 1] = math.nan
        optimizer.step()
    rows.grad = torch.zeros(4, 2)
    with pytest.warns(RuntimeWarning, match="parameter 'rows' has 1 entries of 8 that are not finite, found at step 4"):
        optimizer.step()


@pytest.mark.parametrize("read", ["eval", "state_dict", "posterior"])
def test_weights_are_checked_before_they_are_read(read: str) -> None:
    model = net()
    optimizer = AdaBayes(model.named_parameters(), batch_size=32)
    for _ in range(5):
        step(model, optimizer)
    step(model, optimizer, math.nan)
    with pytest.warns(RuntimeWarning, match="found at step 6"):
        optimizer.posterior(model) if read == "posterior" else getattr(optimizer, read)()


def test_gradients_of_no_step_are_not_reported() -> None:
    """Those that a GradScaler has skipped stay until zero_grad()."""
    model = net()
    optimizer = AdaBayes(model.named_parameters(), batch_size=32)
    step(model, optimizer)
    model[0].weight.grad.fill_(math.inf)  # pyright: ignore[reportOptionalMemberAccess]
    optimizer.state_dict()
    optimizer.eval()


@pytest.mark.filterwarnings("ignore:STE sets all its parameters")
def test_state_that_is_nan_behind_finite_weights_is_reported() -> None:
    """The sign of NaN is 1: weights and later gradients look right."""
    model = net()
    optimizer = STE(model.named_parameters())
    for index in range(3):
        step(model, optimizer, math.nan if index == 2 else None)
    assert all(p.isfinite().all() for p in model.parameters())
    with pytest.warns(RuntimeWarning, match="the state of parameter '2.weight' has 1 entries of 15 that are NaN"):
        step(model, optimizer)


@pytest.mark.parametrize("option", ["raise", "skip"])
def test_other_options_do_not_warn(option: str) -> None:
    model = net()
    optimizer = AdaBayesFP(model.named_parameters(), nonfinite=option)
    step(model, optimizer)
    if option == "skip":
        step(model, optimizer, math.nan)
    else:
        with pytest.raises(FloatingPointError, match=r"'2.weight' has 1 .*; nothing was changed. Check the batch and"):
            step(model, optimizer, math.nan)
    step(model, optimizer)
    assert all(p.isfinite().all() for p in model.parameters())


def test_sums_that_overflow_are_finite() -> None:
    """Values decide, not their sum."""
    weight = nn.Parameter(torch.full((8,), 3e38))
    for option in ("ignore", "raise"):
        optimizer = AdaBayesFP([weight], lr=0.0, nonfinite=option)
        weight.grad = torch.full((8,), 3e38)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()


@every_case
def test_training_as_usual_warns_of_nothing(case: Case) -> None:
    """No state of any rule has NaN, and weights and gradients are finite."""
    model = small_model(width=30)
    optimizer: Any = case.of(model, nonfinite="ignore", fused=False)
    train(model, optimizer, range(5))
    optimizer.state_dict()
    optimizer.eval()


@pytest.mark.parametrize("rule", [FOOF, KFAC])
@pytest.mark.parametrize("option", ["ignore", "raise"])
def test_inputs_that_are_not_finite_are_named(rule: type, option: str) -> None:
    model = net()
    optimizer = rule(model, nonfinite=option)
    x, y = batch(0, torch.float64)
    x[3, 1] = math.nan
    outputs = model(x)
    optimizer.observe(outputs, labels=y)
    F.cross_entropy(outputs, y).backward()
    with pytest.raises(FloatingPointError, match=r"the inputs of layer '0', or their squares, are not finite") as error:
        optimizer.step()
    assert "heck the batch" in str(error.value)


@pytest.mark.parametrize("option", ["ignore", "raise"])
def test_errors_that_are_not_finite_are_named(option: str) -> None:
    """Inputs are finite; the loss is not."""
    model = net()
    optimizer = KFAC(model, nonfinite=option)
    x, y = batch(0, torch.float64)
    outputs = model(x)
    optimizer.observe(outputs * math.inf, labels=y)
    F.cross_entropy(outputs, y).backward()
    with pytest.raises(FloatingPointError, match=r"the errors of layer '2', or their squares, are not finite"):
        optimizer.step()
