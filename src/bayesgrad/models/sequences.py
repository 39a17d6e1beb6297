"""Sequences of any lengths as one tensor with NaN for what is missing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.utils import check_array
from torch import Tensor

from bayesgrad.models import checks
from bayesgrad.models.kalman import StateMoments


class Sequences:
    """Sequences as one tensor (T, sequences, K), and the conversion back."""

    def __init__(self, y: Any, parts: int) -> None:
        self.many = isinstance(y, (list, tuple)) and bool(y) and not np.isscalar(y[0]) and y[0] is not None
        items: Sequence[Any] = y if self.many else [y]
        self.numpy = not any(isinstance(item, Tensor) for item in items)
        tensors = [_rows(item, parts) for item in items]
        self.lengths = [len(item) for item in tensors]
        self.single = not self.many and tensors[0].dim() == 2
        if self.many:
            if any(item.dim() != 2 for item in tensors):
                raise ValueError("each sequence of a list must have shape (T, K) or (T,).")
            longest = max(self.lengths)
            gaps = [item.new_full((longest - len(item), parts), math.nan) for item in tensors]
            self.values = torch.stack([torch.cat(pair) for pair in zip(tensors, gaps)], 1)
        else:
            whole = tensors[0]
            self.values = whole[:, None] if self.single else whole.transpose(0, 1)
            self.lengths = [len(self.values)] * self.values.shape[1]
        if bool(self.values.isinf().any()):
            raise ValueError("y contains infinity: use NaN for missing observations.")

    def kind(self, value: Tensor) -> Any:
        return value.detach().numpy() if self.numpy else value

    def each(self, value: Tensor) -> Any:
        return self.kind(value[0] if self.single else value)

    def _cut(self, value: Tensor) -> Any:
        """(T, sequences, ...) in the layout of y."""
        if self.single:
            return self.kind(value[:, 0])
        if self.many and len(value) == max(self.lengths):
            return [self.kind(value[:n, k]) for k, n in enumerate(self.lengths)]
        return self.kind(value.transpose(0, 1))

    def out(self, moments: StateMoments, log_likelihood: Tensor) -> tuple[Any, Any, Any]:
        mean, covariance = moments
        covariance = covariance.expand(*mean.shape, mean.shape[-1])
        return (self._cut(mean), self._cut(covariance), self.each(log_likelihood))

    def paths(self, paths: Tensor) -> Any:
        """(T, n_samples, sequences, D) as (n_samples, ...)."""
        if self.single:
            return self.kind(paths[:, :, 0].transpose(0, 1))
        if self.many:
            return [self.kind(paths[:n, :, k].transpose(0, 1)) for k, n in enumerate(self.lengths)]
        return self.kind(paths.permute(1, 2, 0, 3))


def _rows(y: Any, parts: int) -> Tensor:
    if hasattr(y, "shape") and not isinstance(y, Tensor):
        # Sparse, complex and empty arrays are refused in scikit-learn's words.
        y = check_array(y, dtype=None, ensure_2d=False, allow_nd=True, ensure_all_finite=False)  # pyright: ignore
    rows = checks.require_numbers("y", y, live=True)
    if rows.dim() == 1 and parts == 1:
        rows = rows[:, None]
    if rows.dim() not in (2, 3) or rows.shape[-1] != parts or not rows.numel():
        raise ValueError(f"y must have one row per time and {parts} columns, got shape {tuple(rows.shape)}.")
    return rows
