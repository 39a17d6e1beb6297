"""Input of sequences: a list of them, or rows with lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayesgrad.models.arrays import as_numpy, like


class SequenceInput(NamedTuple):
    """X as passed by the user, and the lengths of its sequences."""

    X: Any
    lengths: Any = None

    def is_list(self, dims: int) -> bool:
        """Whether X is a list of sequences with this number of dimensions."""
        return isinstance(self.X, (list, tuple)) and len(self.X) > 0 and np.ndim(as_numpy(self.X[0])) >= dims

    def concatenated(self, dims: int) -> tuple[Any, list[int] | None]:
        """All rows, and the lengths of the sequences if X is a list.

        Raises:
            ValueError: there is no sequence, an empty one, or one with a different number of columns.
        """
        if isinstance(self.X, (list, tuple)) and not self.X:
            raise ValueError("X is empty: pass a list of sequences, or rows.")
        if not self.is_list(dims):
            X = as_numpy(self.X)
            return (np.asarray(X)[:, None] if dims == 1 and np.ndim(X) == 1 else X), None
        if self.lengths is not None:
            raise ValueError("a list of sequences cannot be combined with lengths: pass one array, or no lengths.")
        parts = [np.asarray(as_numpy(part), dtype=np.float64) for part in self.X]
        parts = [part[:, None] if part.ndim == 1 else part for part in parts]
        for place, part in enumerate(parts):
            if not len(part):
                raise ValueError(f"sequence {place} is empty: remove it.")
            if part.shape[1:] != parts[0].shape[1:]:
                raise ValueError(f"sequence {place} has shape {part.shape}, but sequence 0 has {parts[0].shape}.")
        return np.concatenate(parts), [len(part) for part in parts]

    def split(self, rows: int) -> list[int]:
        """The lengths of the sequences in this number of rows.

        Raises:
            ValueError: they are not positive integers, or do not sum to the number of rows.
        """
        if self.lengths is None:
            return [rows]
        lengths = np.atleast_1d(np.asarray(as_numpy(self.lengths)))
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or not (lengths > 0).all():
            raise ValueError(f"lengths must be positive integers, got {self.lengths!r}.")
        if lengths.sum() != rows:
            raise ValueError(f"lengths must sum to the number of rows of X, {rows}, got {lengths.sum()}.")
        return lengths.tolist()

    def first(self, dims: int) -> Any:
        """The first sequence of a list, or X."""
        return self.X[0] if self.is_list(dims) else self.X

    def like(self, values: Tensor, lengths: Sequence[int], dims: int) -> Any:
        """Converts one value per row of X to the type of X: a list, an array or a tensor."""
        kind = like(self.first(dims))
        found = [kind(part) for part in (torch.split(values, list(lengths)) if self.is_list(dims) else (values,))]
        return found if self.is_list(dims) else found[0]
