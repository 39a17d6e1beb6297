"""What estimators say of settings they cannot use, and to whom."""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

INSIDE = ("bayesgrad", "sklearn")


def is_number(value: Any) -> bool:
    """Whether it is one, real and finite; words, lists and arrays are not."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def require_whole(**settings: Any) -> None:
    """Whole numbers of at least one, each under its name."""
    for name, value in settings.items():
        if not (isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value >= 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")


def require_tolerance(**settings: Any) -> None:
    """Numbers that are not negative."""
    for name, value in settings.items():
        if not (is_number(value) and value >= 0):
            raise ValueError(f"{name} must be a number of at least 0, got {value!r}.")


def require_seed(**settings: Any) -> None:
    """Whole numbers."""
    for name, value in settings.items():
        if not isinstance(value, Integral):
            raise ValueError(f"{name} must be a whole number, got {value!r}.")


def require_numbers(name: str, value: Any, *, live: bool = False) -> Tensor:
    """An array of them of any shape, as float64: a copy, but for tensors that are to keep their graph."""
    if isinstance(value, Tensor):
        return value.double() if live else value.detach().double().clone()
    try:
        return torch.as_tensor(np.array(value, dtype=np.float64))
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be made of numbers, in rows of one length, got {value!r}.") from None


def require_precision(name: str, value: Any, size: int) -> Tensor:
    """A positive number, a vector of them or a positive definite matrix, as a matrix."""
    precision = require_numbers(name, value)
    if precision.dim() > 2 or any(n != size for n in precision.shape):
        shape = tuple(precision.shape)
        raise ValueError(f"{name} must be a number, ({size},) or ({size}, {size}), got shape {shape}.")
    if not torch.isfinite(precision).all():
        raise ValueError(f"{name} holds NaN or infinity: give positive numbers.")
    if precision.dim() < 2:
        if not (precision > 0).all():
            raise ValueError(f"{name} must be positive, got {precision.min().item():g}.")
        return torch.diag(precision.expand(size))
    even = torch.allclose(precision, precision.mT, rtol=1e-8, atol=0)
    precision = (precision + precision.mT) / 2
    if not even or torch.linalg.cholesky_ex(precision)[1]:
        raise ValueError(f"{name} must be a symmetric positive definite matrix.")
    return precision


@contextlib.contextmanager
def all_or_nothing(estimator: Any) -> Iterator[None]:
    """What fails leaves an estimator as it was."""
    kept = dict(vars(estimator))
    try:
        yield
    except BaseException:
        vars(estimator).clear()
        vars(estimator).update(kept)
        raise


def require_same(begun: Mapping[str, Any], estimator: Any) -> None:
    """Settings of a stream that cannot change on the way."""
    for name, before in begun.items():
        if (now := getattr(estimator, name)) != before:
            raise ValueError(
                f"{name} was {before!r} when learning began, and is {now!r} now: set it back, or start anew with fit "
                "or another estimator."
            )


def require_one_of(estimator: Any, **known: Iterable[str]) -> None:
    """Attributes that are one of a few words."""
    for name, words in known.items():
        value, words = getattr(estimator, name), list(words)
        if not (isinstance(value, str) and value in words):
            raise ValueError(f"{name} must be one of {', '.join(map(repr, words))}, got {value!r}.")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """At the line outside this package, and scikit-learn's wrappers, that led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def require_matrix(name: str, value: Any) -> Tensor:
    """Finite numbers in rows and columns, as float64."""
    matrix = require_numbers(name, value, live=True)
    if matrix.dim() != 2 or not torch.isfinite(matrix).all():
        raise ValueError(f"{name} must be a matrix of finite numbers, got shape {tuple(matrix.shape)}.")
    return matrix


def require_covariance(name: str, value: Any, size: int, *, definite: bool = False) -> Tensor:
    """A symmetric matrix without negative eigenvalues, or with positive ones only."""
    matrix = require_matrix(name, value)
    if matrix.shape != (size, size) or not torch.allclose(matrix, matrix.mT, rtol=1e-8, atol=0):
        raise ValueError(f"{name} must be a symmetric matrix of shape {(size, size)}, got shape {tuple(matrix.shape)}.")
    matrix = (matrix + matrix.mT) / 2
    least = float(torch.linalg.eigvalsh(matrix.detach())[0])
    tiny = 1e-14 * float(matrix.detach().abs().max())
    if least <= tiny and definite:
        raise ValueError(f"{name} must be positive definite, got a least eigenvalue of {least:g}.")
    if least < -tiny:
        raise ValueError(f"{name} must be positive semi-definite, got a least eigenvalue of {least:g}.")
    return matrix
