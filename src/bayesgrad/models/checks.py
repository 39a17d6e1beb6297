"""What estimators say of settings they cannot use, and to whom."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesgrad.models.arrays import as_numpy

INSIDE = ("bayesgrad", "sklearn")


def require_whole(**settings: Any) -> None:
    """Whole numbers of at least one, each under its name."""
    for name, value in settings.items():
        if not (isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value >= 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")


def require_one_of(estimator: Any, **known: Iterable[str]) -> None:
    """Attributes that are one of a few words."""
    for name, words in known.items():
        value, words = getattr(estimator, name), list(words)
        if not (isinstance(value, str) and value in words):
            raise ValueError(f"{name} must be one of {', '.join(map(repr, words))}, got {value!r}.")


def is_number(value: Any) -> bool:
    """Whether it is one, real and finite; words, lists and arrays are not."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def require_array(name: str, value: Any) -> Tensor:
    """Numbers in an array of any shape, copied as float64; not yet checked further."""
    try:
        return torch.as_tensor(np.array(as_numpy(value), dtype=np.float64))
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be made of numbers, in rows of one length, got {value!r}.") from None


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """At the line outside this package, and scikit-learn's wrappers, that led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def require_matrix(name: str, value: Any) -> Tensor:
    """Finite numbers in rows and columns, as float64."""
    matrix = value.double() if isinstance(value, Tensor) else require_array(name, value)
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
