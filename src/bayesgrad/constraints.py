"""Constraints of hyperparameters: which values are valid."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesgrad import likelihoods


class Constraint(NamedTuple):
    """The valid values of a hyperparameter, as words for the error message and as a predicate."""

    words: str
    holds: Callable[[Any], bool]


NONNEGATIVE = Constraint("a finite number >= 0", lambda x: 0 <= x < math.inf)
POSITIVE = Constraint("a positive number", lambda x: x > 0)
FINITE = Constraint("a finite positive number", lambda x: 0 < x < math.inf)
DEVIATION = Constraint("inf or between 1e-18 and 1e18", lambda x: x == math.inf or 1e-18 <= x <= 1e18)
PRIOR_DECAYS = Constraint("0, because the prior decays weights", lambda x: x == 0)
FRACTION = Constraint("in [0, 1)", lambda x: 0 <= x < 1)
OPEN_FRACTION = Constraint("in (0, 1)", lambda x: 0 < x < 1)
FRACTIONS = Constraint("two numbers in [0, 1)", lambda x: len(x) == 2 and all(0 <= b < 1 for b in x))
COUNT = Constraint("a number >= 1", lambda x: 1 <= x < math.inf)
OPTIONAL_COUNT = Constraint("None or a number >= 1", lambda x: x is None or 1 <= x < math.inf)
POSITIVE_INTEGER = Constraint("an integer >= 1", lambda x: x == int(x) and x >= 1)
OPTIONAL_INTEGER = Constraint("None or an integer", lambda x: x is None or x == int(x))
BOOLEAN = Constraint("True or False", lambda x: x is True or x is False)
OPTIONAL_BOOLEAN = Constraint("None, True or False", lambda x: x is None or x is True or x is False)


def one_of(*choices: Any) -> Constraint:
    """The constraint to be one of these values."""
    return Constraint(" or ".join(map(repr, choices)), lambda x: x in choices)


def likelihood_of(*kinds: str) -> Constraint:
    """The constraint to be a likelihood of one of these kinds, as a name or as an object."""
    return Constraint(one_of(*kinds).words, lambda x: likelihoods.named(x).kind in kinds)


# The options of optimizers that take a model:
LAYER_OPTIONS: Mapping[str, Constraint] = {
    "ema": FRACTION,
    "update_every": POSITIVE_INTEGER,
    "stats_every": POSITIVE_INTEGER,
    "stats_rows": POSITIVE,
    "max_factor": COUNT,
    "losses_per_example": OPTIONAL_COUNT,
    "precondition": one_of("step", "backward"),
    "damping_mode": one_of("absolute", "relative"),
    "max_norm": POSITIVE,
    "fallback_lr": NONNEGATIVE,
    "likelihood": likelihood_of("categorical", "bernoulli", "gaussian"),
    "seed": OPTIONAL_INTEGER,
}


def square_matrix(matrix: Any, name: str) -> Tensor:
    """A float64 copy of `matrix`; raises unless it is square, floating-point and finite."""
    if not isinstance(matrix, Tensor) or not matrix.is_floating_point():
        kind = matrix.dtype if isinstance(matrix, Tensor) else type(matrix).__name__
        raise TypeError(f"{name} must be a tensor of floating-point numbers, got {kind}.")
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise ValueError(f"{name} must be a square matrix, got shape {tuple(matrix.shape)}.")
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError(f"{name} must be finite, got {int((~torch.isfinite(matrix)).sum())} entries that are not.")
    return matrix.detach().to(torch.float64, copy=True)


def covariance_matrix(matrix: Any, name: str) -> Tensor:
    """A float64 copy of `matrix`; raises unless it is symmetric and positive semi-definite up to rounding."""
    checked = square_matrix(matrix, name)
    tolerance = 100 * torch.finfo(matrix.dtype).eps * float(checked.abs().max())
    gap = float((checked - checked.mT).abs().max())
    if gap > tolerance:
        raise ValueError(f"{name} must be symmetric, got entries that differ by {gap:g} from their mirror images.")
    smallest = float(torch.linalg.eigvalsh(checked)[0])
    if smallest < -len(checked) * tolerance:
        raise ValueError(f"{name} must be positive semi-definite, got an eigenvalue of {smallest:g}.")
    return (checked + checked.mT) / 2
