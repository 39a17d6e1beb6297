"""Sums of r r' over rows that arrive in parts, for second moments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bayesgrad.distributed import Exchange, Sum
from bayesgrad.kernels import compute_dtype
from bayesgrad.products import addmm_


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows of several calls, (groups, rows, size)."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)


class Moment:
    """Σ r r' / count over rows r that arrive in parts, in each group.

    Rows are stored while they are few, so that one product adds them to a moving average. Else products are summed.

    Args:
        size: of a row.
        ones: whether a one is appended to each row.
        diagonal: whether only the diagonal is formed.

    Attributes:
        parts: stored rows, (groups, n, size), without ones; or indices (n,) of one-hot rows.
        total: the sum of products of further rows, of which only the lower triangle is valid; or its diagonal.
        count: what the sum is divided by.
    """

    def __init__(self, size: int, ones: bool, diagonal: bool = False) -> None:
        self.size, self.ones, self.diagonal = size, ones, diagonal
        self.parts: list[Tensor] = []
        self.total: Tensor | None = None
        self.count = 1.0

    def stores(self, rows: int) -> bool:
        """Whether so many rows are stored."""
        return not self.diagonal and 2 * rows <= self.size

    def add(self, rows: Tensor, weight: float = 1.0, volatile: bool = False) -> None:
        """Adds rows, each of which counts as this many (for indices, one); `volatile` ones are copied to be stored."""
        if not rows.is_floating_point():
            self.parts.append(rows.clone() if volatile else rows)
        elif self.diagonal:
            squares = rows.square().sum(1)
            squares = torch.cat([squares, squares.new_full((len(rows), 1), rows.shape[1])], 1) if self.ones else squares
            squares = squares if weight == 1 else weight * squares
            self.total = squares if self.total is None else self.total + squares
        else:
            if weight != 1 and self.parts:
                self._form()
            self.parts.append(rows)
            if weight != 1 or len(rows) > 1 or not self.stores(sum(part.shape[1] for part in self.parts)):
                self._form(weight)
            elif volatile:
                self.parts[-1] = rows.clone()

    def _form(self, weight: float = 1.0) -> None:
        """Adds the products of the stored rows to the total."""
        if self.total is None:
            self.total = self.parts[0].new_zeros(len(self.parts[0]), self.size, self.size)
        self._add_to(self.total, 1.0, weight)
        self.parts = []

    def _add_to(self, matrix: Tensor, keep: float, take: float) -> None:
        """matrix <- keep * matrix + take * Σ r r' over the stored rows, in its lower triangle."""
        rows = joined(self.parts)
        size = rows.shape[-1]
        if len(matrix) == 1:
            one = rows[0]
            for start, end in _strips(size, len(one)):
                addmm_(matrix[0, start:end, :end], one[:, start:end].T, one[:, :end], beta=keep, alpha=take)
        else:
            addmm_(matrix[:, :size, :size], rows.mT, rows, beta=keep, alpha=take)
        if self.ones:
            last = matrix[:, size]
            last.mul_(keep)
            last[:, :size].add_(rows.sum(1), alpha=take)
            last[:, size].add_(take * rows.shape[1])

    def share(self, exchange: Exchange, groups: int, like: dict[str, Any]) -> None:
        """Adds the rows of other processes; of a matrix, its lower triangle is communicated.

        Args:
            groups: their number.
            like: dtype and device of the sum.
        """
        total = torch.zeros(groups, *[self.size] * (1 if self.diagonal else 2), **like)
        if self.parts or self.total is not None:
            self._sum_into(total, 0.0, 1.0)
        own, rows, columns = total, None, None
        if not self.diagonal:
            rows, columns = torch.tril_indices(self.size, self.size, device=total.device)
            own = total[:, rows, columns]

        def receive(found: Sum) -> None:
            self.parts, self.total, self.count = [], found.total, float(found.count)
            if not self.diagonal:
                total[:, rows, columns] = found.total
                self.total = total

        exchange.add(Sum(own, self.count), receive)

    def mean(self) -> Tensor:
        """The moment as a matrix (groups, size, size), with both triangles."""
        return self.sum() / self.count

    def sum(self) -> Tensor:
        """Σ r r', (groups, size, size), with both triangles; of one-hot rows the diagonal (1, size), as integers."""
        if self.parts and not self.parts[0].is_floating_point():
            return torch.bincount(torch.cat(self.parts), minlength=self.size)[None]
        assert self.parts or self.total is not None
        like = self.parts[0] if self.parts else self.total
        shape = (self.size,) if self.diagonal else (self.size, self.size)
        total = like.new_zeros(len(like), *shape)  # pyright: ignore
        self._sum_into(total, 0.0, 1.0)
        return symmetric(total)

    def into(self, factor: Tensor, keep: float, take: float, scale: Tensor | None = None) -> None:
        """factor <- keep * factor + take * moment, in place; only the diagonal if that is one.

        Only the lower triangle of the result is valid: use `symmetric` to fill the upper one.

        Args:
            factor: (groups, size, size), or (groups, size) for a diagonal.
            keep, take: weights of old and new.
            scale: a tensor with one element that multiplies the moment.
        """
        self._sum_into(factor, keep, take / (self.count or 1.0), scale)  # none, and zero, if all lookups were padding

    def _sum_into(self, factor: Tensor, keep: float, take: float, scale: Tensor | None = None) -> None:
        if self.parts and not self.parts[0].is_floating_point():
            counts = torch.bincount(torch.cat(self.parts), minlength=self.size)[None]
            factor.mul_(keep).add_(counts.to(factor), alpha=take)
        elif scale is None and self.total is None and self.parts:
            self._add_to(factor, keep, take)
        else:
            if self.parts:
                self.total = torch.zeros_like(factor) if self.total is None else self.total
                self._add_to(self.total, 1.0, 1.0)
                self.parts = []
            factor.mul_(keep)
            if self.total is not None:
                factor.add_(self.total if scale is None else self.total * scale, alpha=take)

    def is_finite(self) -> Tensor:
        """Whether all rows and their squares are finite, as a tensor."""
        parts = [norm(part) for part in self.parts if part.is_floating_point()]
        if self.total is not None:
            parts.append((self.total if self.diagonal else self.total.diagonal(dim1=1, dim2=2)).sum().sqrt())
        return has_finite_square(torch.stack(parts)).all() if parts else torch.tensor(True)


def norm(rows: Tensor) -> Tensor:
    """The norm in the dtype of the state, in which rows are squared: in float16 the square of 256 is infinite."""
    return torch.linalg.vector_norm(rows, dtype=compute_dtype(rows.dtype))


def has_finite_square(size: Tensor) -> Tensor:
    """Whether the square is finite, also times 2^20: errors are multiplied by the batch size, then squared."""
    return size < math.sqrt(torch.finfo(size.dtype).max) / 1024


def _strips(size: int, rows: int) -> list[tuple[int, int]]:
    """Ranges of a lower triangle. More of them would save operations but use slower, smaller products."""
    count = 1 if size < 128 else 2 if size < 256 or rows < 256 else 4
    ends = [round(i * size / count) for i in range(count + 1)]
    return list(pairwise(ends))


def symmetric(factor: Tensor) -> Tensor:
    """A factor with its upper triangle filled in; a diagonal is returned unchanged."""
    return factor if factor.dim() == 2 else factor.tril() + factor.tril(-1).mT
