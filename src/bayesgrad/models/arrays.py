"""Conversion between NumPy arrays and tensors: results have the type of the input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


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
    wrong = ~np.isfinite(X).all(1)
    if wrong.any():
        raise ValueError(f"X contains NaN or infinity in {wrong.sum()} of {len(X)} rows: remove or impute them first.")
    X = np.require(X, requirements="W")  # torch warns about read-only arrays
    return torch.as_tensor(X, device=given.device if isinstance(given, Tensor) else None)


def near_mean(rows: Tensor) -> Tensor:
    """A point within 1/256 standard deviation of the rows' mean, (P,), with so few bits that subtracting it is exact
    for numbers that are closer to it than to zero."""
    mean, deviation = rows.mean(0), rows.std(0, correction=0)
    grid = torch.exp2(deviation.log2().floor() - 8)
    return torch.where(deviation > 0, (mean / grid).round() * grid, rows[0])
