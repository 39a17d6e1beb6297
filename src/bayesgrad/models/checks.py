"""Validation of settings and data, and conversion between arrays and tensors, shared by the estimators."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor


def is_number(value: Any) -> bool:
    """Whether the value is a finite real number; strings, lists and arrays are not."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def require_positive_integer(**settings: Any) -> None:
    """Raises a ValueError unless all settings are positive integers."""
    for name, value in settings.items():
        if not (isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value >= 1):
            raise ValueError(f"{name} must be a positive integer, got {value!r}.")


def require_non_negative(**settings: Any) -> None:
    """Raises a ValueError unless all settings are non-negative numbers."""
    for name, value in settings.items():
        if not (is_number(value) and value >= 0):
            raise ValueError(f"{name} must be a non-negative number, got {value!r}.")


def require_integer(**settings: Any) -> None:
    """Raises a ValueError unless all settings are integers."""
    for name, value in settings.items():
        if not isinstance(value, Integral):
            raise ValueError(f"{name} must be an integer, got {value!r}.")


def require_numbers(name: str, value: Any, *, live: bool = False) -> Tensor:
    """The value as a float64 tensor: a copy, except for tensors with `live=True`, which keep their graph."""
    if isinstance(value, Tensor):
        return value.double() if live else value.detach().double().clone()
    try:
        return torch.as_tensor(np.array(value, dtype=np.float64))
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a numeric array, got {value!r}.") from None


def require_precision(name: str, value: Any, size: int) -> Tensor:
    """A positive number, a positive vector or a positive definite matrix, returned as a matrix."""
    precision = require_numbers(name, value)
    if precision.dim() > 2 or any(n != size for n in precision.shape):
        shape = tuple(precision.shape)
        raise ValueError(f"{name} must be a number, ({size},) or ({size}, {size}), got shape {shape}.")
    if not torch.isfinite(precision).all():
        raise ValueError(f"{name} contains NaN or infinity: pass positive numbers.")
    if precision.dim() < 2:
        if not (precision > 0).all():
            raise ValueError(f"{name} must be positive, got {precision.min().item():g}.")
        return torch.diag(precision.expand(size))
    even = torch.allclose(precision, precision.mT, rtol=1e-8, atol=0)
    precision = (precision + precision.mT) / 2
    if not even or torch.linalg.cholesky_ex(precision)[1]:
        raise ValueError(f"{name} must be a symmetric positive definite matrix, got one that is not.")
    return precision


@contextlib.contextmanager
def restore_on_error(estimator: Any) -> Iterator[None]:
    """Restores the attributes of the estimator, and the parameters of its nodes, if the body raises."""
    kept = dict(vars(estimator))
    naturals = [(node, node.natural) for node in kept.get("_nodes", ())]
    try:
        yield
    except BaseException:
        vars(estimator).clear()
        vars(estimator).update(kept)
        for node, natural in naturals:
            node.natural = natural
        raise


def require_one_of(estimator: Any, **known: Iterable[str]) -> None:
    """Raises a ValueError for attributes that are not among the known options."""
    for name, words in known.items():
        value, words = getattr(estimator, name), list(words)
        if not (isinstance(value, str) and value in words):
            raise ValueError(f"{name} must be one of {', '.join(map(repr, words))}, got {value!r}.")


def require_matrix(name: str, value: Any, *, varying: bool = False) -> Tensor:
    """A matrix of finite numbers, as float64; with `varying`, also one for each time, (T, ...)."""
    matrix = require_numbers(name, value, live=True)
    if matrix.dim() not in ((2, 3) if varying else (2,)) or not matrix.numel() or not torch.isfinite(matrix).all():
        raise ValueError(f"{name} must be a matrix of finite numbers, got shape {tuple(matrix.shape)}.")
    return matrix


def require_covariance(name: str, value: Any, size: int, *, definite: bool = False, varying: bool = False) -> Tensor:
    """A symmetric matrix that is positive semi-definite, or positive definite if `definite`; see `require_matrix`."""
    matrix = require_matrix(name, value, varying=varying)
    if matrix.shape[-2:] != (size, size) or not torch.allclose(matrix, matrix.mT, rtol=1e-8, atol=0):
        raise ValueError(f"{name} must be a symmetric matrix of shape {(size, size)}, got shape {tuple(matrix.shape)}.")
    matrix = (matrix + matrix.mT) / 2
    values = torch.linalg.eigvalsh(matrix.detach())[..., 0]
    limits = 1e-14 * matrix.detach().abs().amax((-2, -1))
    worst = (values - limits if definite else values + limits).argmin()
    least, tiny = float(values.flatten()[worst]), float(limits.flatten()[worst])
    if least <= tiny and definite:
        raise ValueError(f"{name} must be positive definite, got a smallest eigenvalue of {least:g}.")
    if least < -tiny:
        raise ValueError(f"{name} must be positive semi-definite, got a smallest eigenvalue of {least:g}.")
    return matrix


def as_numpy(values: Any) -> Any:
    """Converts tensors to arrays; returns other values unchanged."""
    if not isinstance(values, Tensor):
        return values
    values = values.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()  # NumPy has no bfloat16


def like(X: Any) -> Callable[[Tensor], Any]:
    """A function that converts a tensor to the array type of X."""
    return (lambda result: result.to(X.device)) if isinstance(X, Tensor) else (lambda result: result.cpu().numpy())


def as_finite(X: Any, given: Any) -> Tensor:
    """A validated array as a tensor on the device of `given`.

    Raises:
        ValueError: it contains NaN or infinity.
    """
    finite = np.isfinite(X)
    if not finite.all():
        wrong = ~finite.all(1)
        raise ValueError(f"X contains NaN or infinity in {wrong.sum()} of {len(X)} rows: remove or impute them first.")
    X = np.require(X, requirements="W")  # torch warns about read-only arrays
    return torch.as_tensor(X, device=given.device if isinstance(given, Tensor) else None)


def near_mean(rows: Tensor) -> Tensor:
    """A point within 1/256 standard deviation of the rows' mean, (P,), with so few bits that subtracting it is exact
    for numbers that are closer to it than to zero."""
    mean = rows.mean(0)
    deviation = (rows - mean).square_().mean(0).sqrt()  # which takes a tenth of the time of rows.std(0)
    grid = torch.exp2(deviation.log2().floor() - 8)
    return torch.where(deviation > 0, (mean / grid).round() * grid, rows[0])
