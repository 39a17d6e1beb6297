"""What states of a chain show: rows of numbers, or symbols."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bayesgrad.families import Parameters
from bayesgrad.families.gaussian import LOG_2PI

ROOM = 1 << 25  # numbers that are kept of what can be computed again


class Rows:
    r"""Gaussian rows x of K states, with a full or a diagonal precision.

    .. math::
        E[\log N(x \mid m, \Lambda^{-1})] = E[\Lambda m]^T x - \tfrac12 E[m^T \Lambda m]
            - \tfrac12 x^T E[\Lambda] x + \tfrac12 E[\log |\Lambda|] - \tfrac{D}{2} \log 2\pi

    is linear in (1, x, x x'), so that one product gives it for all states and rows, and another the statistics of a
    `NormalWishart` of plates (K,), or of (K, D) and one dimension each where the precision is diagonal.

    Args:
        rows: (N, D), in the order of the layout; a row that is NaN is missing.
        diagonal: whether columns are independent.
    """

    def __init__(self, rows: Tensor, *, diagonal: bool) -> None:
        self.rows, self.diagonal = rows, diagonal
        self._whole: Tensor | None = None

    def logs(self, mean: Parameters, out: Tensor) -> Tensor:
        """E[log p(x | k)], (K, N); 0 for what is missing."""
        push, square, precision, volume = mean
        if self.diagonal:
            second, push = -precision[..., 0, 0] / 2, push[..., 0]
            square, volume = square.sum(-1), volume.sum(-1)
        else:
            i, j = self._pairs()
            second = -precision[:, i, j] * torch.where(i == j, 0.5, 1.0).to(precision)
        constant = (volume - square - self.rows.shape[1] * LOG_2PI) / 2
        numbers = torch.cat([constant[:, None], push, second], 1)
        for part, design in self._designs():
            torch.mm(numbers, design, out=out[:, part])
        return out

    def message(self, shares: Tensor) -> Parameters:
        """(Σ x, -n/2, -Σ x x'/2, n/2), weighted by the shares (K, N) of states."""
        D = self.rows.shape[1]
        total = sum((shares[:, part] @ design.mT for part, design in self._designs()), torch.zeros(()).to(shares))
        count, first, second = total[:, 0], total[:, 1 : D + 1], total[:, D + 1 :]
        if self.diagonal:
            count = count[:, None].expand_as(first)
            return first[..., None], -count / 2, -second[..., None, None] / 2, count / 2
        i, j = self._pairs()
        square = second.new_empty(len(count), D, D)
        square[:, i, j] = second
        square[:, j, i] = second
        return first, -count / 2, -square / 2, count / 2

    def _pairs(self) -> tuple[Tensor, Tensor]:
        i, j = torch.triu_indices(self.rows.shape[1], self.rows.shape[1], device=self.rows.device)
        return i, j

    def _designs(self) -> Iterator[tuple[slice, Tensor]]:
        """(1, x, x x') as columns, in parts that fit into memory; kept where all of it does."""
        N, D = self.rows.shape
        numbers = 1 + D + (D if self.diagonal else D * (D + 1) // 2)
        if numbers * N <= ROOM:
            if self._whole is None:
                self._whole = self._design(self.rows)
            yield slice(None), self._whole
            return
        for begin in range(0, N, size := max(1, ROOM // (8 * numbers))):
            yield slice(begin, begin + size), self._design(self.rows[begin : begin + size])

    def _design(self, rows: Tensor) -> Tensor:
        x = rows.mT
        if self.diagonal:
            second = x.square()
        else:
            i, j = self._pairs()
            second = x[i] * x[j]
        return torch.cat([torch.ones_like(x[:1]), x, second]).masked_fill_(x.isnan().any(0), 0)


class Symbols:
    """Symbols of K states, each with a `Dirichlet` belief about their probabilities.

    Args:
        symbols: (N,), in the order of the layout; `count` is one that is missing.
        count: how many symbols there are, V.
    """

    def __init__(self, symbols: Tensor, count: int) -> None:
        self.symbols, self.count = symbols, count

    def logs(self, mean: Parameters, out: Tensor) -> Tensor:
        """E[log p(x | k)], (K, N); 0 for what is missing."""
        for row, own in zip(torch.nn.functional.pad(mean[0], (0, 1)), out):
            torch.index_select(row, 0, self.symbols, out=own)
        return out

    def message(self, shares: Tensor) -> Parameters:
        """How often each state is expected to show each symbol, (K, V)."""
        counts = [torch.bincount(self.symbols, row, minlength=self.count + 1) for row in shares]
        return (torch.stack(counts)[:, : self.count],)
