"""Sequences as one array: a list of them, or rows with lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayesgrad.models.arrays import as_numpy


class SequenceInput(NamedTuple):
    """X as somebody gave it, and the lengths of the sequences in it."""

    X: Any
    lengths: Any = None

    def listed(self, dims: int) -> bool:
        """Whether X is a list of sequences, which have so many dimensions."""
        return isinstance(self.X, (list, tuple)) and len(self.X) > 0 and np.ndim(as_numpy(self.X[0])) >= dims

    def joined(self, dims: int) -> tuple[Any, list[int] | None]:
        """Rows, and the lengths of sequences where they are known.

        Raises:
            ValueError: no sequence, an empty one, or one with other columns than the first.
        """
        if isinstance(self.X, (list, tuple)) and not self.X:
            raise ValueError("X is empty: give a list of sequences, or rows.")
        if not self.listed(dims):
            X = as_numpy(self.X)
            return (np.asarray(X)[:, None] if dims == 1 and np.ndim(X) == 1 else X), None
        if self.lengths is not None:
            raise ValueError("lengths are for rows of one array: a list of sequences has its own.")
        parts = [np.asarray(as_numpy(part), dtype=np.float64) for part in self.X]
        parts = [part[:, None] if part.ndim == 1 else part for part in parts]
        for place, part in enumerate(parts):
            if not len(part):
                raise ValueError(f"sequence {place} is empty: leave it out.")
            if part.shape[1:] != parts[0].shape[1:]:
                raise ValueError(f"sequence {place} has shape {part.shape}, but sequence 0 {parts[0].shape}.")
        return np.concatenate(parts), [len(part) for part in parts]

    def split(self, rows: int) -> list[int]:
        """The lengths of sequences in so many rows.

        Raises:
            ValueError: they are not whole numbers above zero, or do not add up.
        """
        if self.lengths is None:
            return [rows]
        lengths = np.atleast_1d(np.asarray(as_numpy(self.lengths)))
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or not (lengths > 0).all():
            raise ValueError(f"lengths must be whole numbers above zero, got {self.lengths!r}.")
        if lengths.sum() != rows:
            raise ValueError(f"lengths add up to {lengths.sum()}, but X has {rows} rows.")
        return lengths.tolist()

    def kind(self, dims: int) -> tuple[bool, Any]:
        """Whether X is made of tensors, and the device that they are on."""
        first = self.X[0] if self.listed(dims) else self.X
        return isinstance(first, Tensor), getattr(first, "device", None)

    def like(self, values: Tensor, lengths: Sequence[int], dims: int) -> Any:
        """A number or a row for each row of X, as X is: a list, an array, a tensor."""
        tensors, device = self.kind(dims)
        parts = torch.split(values, list(lengths)) if self.listed(dims) else (values,)
        found = [part.to(device) if tensors else part.numpy() for part in parts]
        return found if self.listed(dims) else found[0]
