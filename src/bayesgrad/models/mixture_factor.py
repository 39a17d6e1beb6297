"""Rows that come from a mixture, and their factor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bayesgrad.families import Parameters
from bayesgrad.inference import LatentVariableFactor, Node
from bayesgrad.models import covariances
from bayesgrad.models.covariances import WIDE, Covariance, Full, Tied, packed, triangle_of
from bayesgrad.models.designs import weighted_gram

KEPT = 1 << 20  # number of features that are kept between sweeps


class Rows:
    """Rows and their features, which the start and all sweeps share.

    Args:
        rows: (n, P).
        count: K.
        blur: rows count as x + e with e ~ N(0, blur I), in expectation of the logarithm: every covariance is at least
            blur I, and the value remains a bound.
        centre: subtracted from each row, (P,).
    """

    def __init__(
        self, rows: Tensor, covariance: Covariance, count: int, blur: float = 0.0, centre: Tensor | float = 0.0
    ) -> None:
        self.covariance, self.count, self.blur, size = covariance, count, blur, rows.shape[1]
        self.wide = isinstance(covariance, Full) and len(covariance.chunks(rows)) > 1 and size > WIDE * count
        few = not self.wide and len(rows) * covariance.width(size) <= KEPT
        self._memory = covariance.buffer(rows.mT) if few else None
        own = None if self._memory is None else self._memory[1 : size + 1].mT  # rows are among their features
        self.rows = rows = torch.sub(rows, centre, out=own)
        self.columns = rows.split(max(256, covariances.CHUNK // size)) if self.wide else covariance.chunks(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, places: Any) -> Rows:
        return Rows(self.rows[places], self.covariance, self.count, self.blur)

    @cached_property
    def kept(self) -> Tensor | None:
        """The features of all rows, (D, n), if they are few."""
        if self._memory is None:
            return None
        return self.covariance.completed(self._memory, self.rows.shape[1], self.blur)

    def features(self) -> Iterable[Tensor]:
        """Features (D, n) of a few rows at a time, in memory that the next ones overwrite."""
        if self.kept is not None:
            return [self.kept]
        buffer = self.covariance.buffer(self.columns[0])
        return (self.covariance.features(part, self.blur, buffer) for part in self.columns)

    def sums(self, shares: Tensor) -> Tensor:
        """Features summed with weights `shares` (K, n), (K, D)."""
        if self.kept is None:
            return self.covariance.sums(self.rows, shares, self.blur)
        return (_in_fours(shares) @ self.kept.mT)[: len(shares)]


class MixtureFactor(LatentVariableFactor):
    r"""Rows that each come from one of K components, with a latent indicator z for each row:

    .. math::
        \sum_i \log \sum_k \exp\left(E[\log \pi_k] + E[\log N(x_i \mid m_k, \Lambda_k^{-1})]\right)

    Messages are counts, and the statistics of rows weighted by the responsibilities q(z = k).

    Args:
        weights, components: a Dirichlet node and a node of the covariance's family, or `Point` of them.

    Reference: Bishop, 2006, section 10.2; Khan and Rue 2023, sections 5.2 and 5.3.
    Checked by: tests/equations/test_latent_variable.py.
    """

    def __init__(self, weights: Node, components: Node, rows: Rows, *, scale: float = 1.0) -> None:
        super().__init__(weights, components, scale=scale)
        self.rows, self.size = rows, rows.rows.shape[1]

    def evaluate(self) -> tuple[Tensor, Mapping[Node, Parameters]]:
        (weights, components), covariance = self.nodes, self.rows.covariance
        coefficients = covariance.coefficients(components.mean)
        coefficients[:, 0].add_(weights.mean[0])
        total, sums = self._by_matrices(coefficients) if self.rows.wide else self._by_features(coefficients)
        return total, {weights: (sums[:, 0],), components: covariance.message(sums, self.size)}

    def _by_features(self, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """The bound, and the weighted sums of features."""
        count, coefficients = len(coefficients), _in_fours(coefficients)  # shares of added components are zero too
        total, sums = coefficients.new_zeros(()), torch.zeros_like(coefficients)
        for features in self.rows.features():
            shares = coefficients @ features  # (K, n)
            total += _normalise(shares[:count])
            sums.addmm_(shares, features.mT)
        return total, sums[:count]

    def _by_matrices(self, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """The same without products of columns, which take too long for many columns and few components."""
        K, P, blur = len(coefficients), self.size, self.rows.blur
        matrices = coefficients[:, triangle_of(P, coefficients.device).unpacked].view(K, P, P) / 2
        constant = coefficients[:, :1] + blur * matrices.diagonal(dim1=-2, dim2=-1).mul_(2).sum(1, keepdim=True)
        first, total = torch.zeros_like(coefficients[:, : P + 1]), coefficients.new_zeros(())
        second, tied = torch.zeros_like(matrices), isinstance(self.rows.covariance, Tied)  # the first gets their sum
        for rows in self.rows.columns:
            forms = [(rows @ matrix).mul_(rows).sum(1) for matrix in (matrices[:1] if tied else matrices)]
            shares = torch.stack(forms) + constant
            total += _normalise(shares.addmm_(coefficients[:, 1 : P + 1], rows.mT))
            first[:, 0] += shares.sum(1)
            first[:, 1:].addmm_(shares, rows)
            for own, weights in zip(second, shares.sum(0, keepdim=True) if tied else shares):
                own += weighted_gram(rows, weights)
        return total, packed(first, second, blur)


def _in_fours(matrix: Tensor) -> Tensor:
    """A matrix with rows of zeros added, where products with many columns are faster for it: they take four rows at a
    time, and two or three that are left over take longer than four."""
    count, width = matrix.shape
    return torch.cat([matrix, matrix.new_zeros(-count % 4, width)]) if count > 2 and count % 4 > 1 else matrix


def _normalise(logits: Tensor) -> Tensor:
    """Softmax over the first dimension, in place; returns the sum of the log normalisers."""
    top = logits.amax(0)
    norm = logits.sub_(top).exp_().sum(0)
    logits.div_(norm)
    return norm.log().add_(top).sum()
