"""NumPy or torch in, the same kind out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_numpy(values: Any) -> Any:
    """Tensors as arrays; all else as it is."""
    if not isinstance(values, Tensor):
        return values
    values = values.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()  # NumPy has no bfloat16


def like(X: Any) -> Callable[[Tensor], Any]:
    """What turns a result into the kind of array that X is."""
    return (lambda result: result) if isinstance(X, Tensor) else (lambda result: result.cpu().numpy())


def as_finite(X: Any, given: Any) -> Tensor:
    """A checked array as a tensor, on the device of what was given.

    Raises:
        ValueError: it holds NaN or infinity.
    """
    wrong = ~np.isfinite(X).all(1)
    if wrong.any():
        raise ValueError(f"X holds NaN or infinity in {wrong.sum()} of {len(X)} rows: remove or impute them first.")
    X = np.require(X, requirements="W")  # torch warns of arrays that cannot be written to
    return torch.as_tensor(X, device=given.device if isinstance(given, Tensor) else None)


def near_mean(rows: Tensor) -> Tensor:
    """A point within 1/256 deviation of the rows' mean, (P,), of so few bits that subtracting it rounds nothing of
    numbers that are nearer to it than to zero."""
    mean, deviation = rows.mean(0), rows.std(0, correction=0)
    grid = torch.exp2(deviation.log2().floor() - 8)
    return torch.where(deviation > 0, (mean / grid).round() * grid, rows[0])
