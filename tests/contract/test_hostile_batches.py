"""Layer rules under hostile sequences of batches: weights and factors stay finite, and refusals say why.

Many small networks are trained side by side, each with its own kind of inputs; each is a sequence. `make test` runs
some hundreds of sequences per optimizer, and `make soak` a hundred thousand.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bayesgrad import optim
from cases import BY_EXAMPLE, LAYERWISE, SAMPLERS, Case, same, states, weights
from hostile_batches import batches, network

CASES = (
    *LAYERWISE,
    *BY_EXAMPLE,
    *SAMPLERS,
    Case("FOOF-absolute", optim.FOOF, {"damping_mode": "absolute"}, layers=True),
    Case("KFAC-absolute", optim.KFAC, {"damping_mode": "absolute"}, layers=True),
    Case("NaturalGradient-quadratic", optim.NaturalGradient, {"step_size": "quadratic", "momentum": 0.9}, layers=True),
    Case("DenseFilter", optim.DenseFilter, {"batch_size": 8}, layers=True),
)
every_hostile_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
REFUSALS = re.compile(
    r"the (input|error) factor of layer '\d' is singular with damping .*: raise damping\."
    r"|the (inputs|errors) of layer '.*', or their squares, are not finite: check the batch and the loss, or scale .*\."
    r"|the quadratic model of this step is not finite: lower lr, scale the inputs, or use step_size='lr'\."
    r"|observe\(\) found per-example gradients that are not finite: .*; lower lr\."
    r"|.* of the metric is (not finite: check the batch and the loss, scale the inputs, or lower lr|singular with .*)\."
    r"|the metric of layer '.*' is (not finite: check the batch and the loss, scale the inputs, or lower lr|singular"
    r" with .*)\."
)
WARNINGS = re.compile(
    r".* is singular with damping .* and was inverted with damping .*: raise damping\."
    r"|(the loss has .* times the curvature of likelihood='categorical'|lr=.* is .* times the ).*"
    r"|the curvature of the loss is unknown, so that .*"
)
COVARIANCES = ("covariance", "input_covariance", "error_covariance", "input_inverse", "error_inverse")


def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, squared: bool) -> None:
    with optimizer.sampled():
        optimizer.zero_grad()
        outputs = model(x)
        if squared:
            loss = (outputs - 1).square().sum(-1).mean() / 2
        else:
            loss = cross_entropy(outputs.flatten(0, -2), y.flatten())
        optimizer.observe(outputs, loss=loss, class_dim=-1 if outputs.dim() > 2 else None)
        loss.backward()
    optimizer.step()


def check_finite(model: nn.Module, optimizer: Any, where: tuple) -> None:
    for name, value in {**weights(model), **states(optimizer)}.items():
        assert not value.is_floating_point() or bool(torch.isfinite(value).all()), (name, *where)
        slot = name.split(".")[-1]
        if slot in ("variance", "last_variance"):
            assert bool((value > 0).all()), (name, *where)
        if slot.endswith("_moment"):
            diagonal = value if value.dim() == 2 else value.diagonal(dim1=-2, dim2=-1)
            assert bool((diagonal >= 0).all()), (name, *where)
        if slot in COVARIANCES and value.dim() > 1 and value.shape[-1] == value.shape[-2]:
            matrix, largest = value.double(), value.double().abs().amax((-2, -1))
            assert bool(((matrix - matrix.mT).abs().amax((-2, -1)) <= 1e-4 * largest).all()), (name, *where)
            smallest = torch.linalg.eigvalsh((matrix + matrix.mT) / 2)[..., 0]
            assert bool((smallest >= -1e-5 * largest).all()), (name, *where)


def check(case: Case, groups: int, steps: int, seed: int) -> None:
    """A run with a bad batch, an empty one and a resume in the middle."""
    dtype = (torch.float32, torch.float64)[seed % 2]
    groups = 1 if case.make is optim.DenseFilter else groups
    torch.manual_seed(seed)
    model = network(groups, dtype)
    optimizer: Any = case.of(model, nonfinite="skip")
    other = None
    for index, (x, y) in enumerate(batches(groups, steps, seed, dtype)):
        where, squared = (case.name, seed, index), seed % 4 >= 2
        before, refusal = weights(model), ""
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                step(model, optimizer, x, y, squared)
            assert all(WARNINGS.fullmatch(str(one.message)) for one in said), [str(one.message) for one in said]
        except (ValueError, FloatingPointError) as error:
            refusal = str(error)
        if refusal:
            assert REFUSALS.fullmatch(refusal), (refusal, *where)
            assert same(before, weights(model)), where
            return
        check_finite(model, optimizer, where)
        if other is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of singular factors, as above
                step(*other, x, y, squared)
            assert same(weights(model), weights(other[0])), where
            assert same(states(optimizer), states(other[1])), where
            other = None
        if index == steps // 2:
            image = {**weights(model), **states(optimizer)}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step(model, optimizer, x * math.nan, y, squared)
            assert same(image, {**weights(model), **states(optimizer)}), where
            other = copy.deepcopy(model), None
            fresh: Any = case.of(other[0], nonfinite="skip")
            fresh.load_state_dict(optimizer.state_dict())
            other = other[0], fresh


@every_hostile_case
def test_hundreds_of_hostile_sequences(case: Case) -> None:
    for seed in range(4):
        check(case, 26, 8, seed)


@pytest.mark.soak
@every_hostile_case
def test_a_hundred_thousand_hostile_sequences(case: Case) -> None:
    groups = 1 if case.make is optim.DenseFilter else 50
    for seed in range(100_000 // groups):
        check(case, groups, 12, seed)
