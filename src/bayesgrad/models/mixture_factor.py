"""The factor of rows that come from a mixture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from bayesgrad.families import Parameters
from bayesgrad.inference import LatentVariableFactor, Node
from bayesgrad.models import covariances
from bayesgrad.models.covariances import WIDE, Covariance, Full, Tied, packed, triangle_of
from bayesgrad.models.designs import weighted_gram

KEPT = 1 << 20  # number of features that are kept between sweeps


class MixtureFactor(LatentVariableFactor):
    r"""Rows that each come from one of K components, with a latent indicator z for each row:

    .. math::
        \sum_i \log \sum_k \exp\left(E[\log \pi_k] + E[\log N(x_i \mid m_k, \Lambda_k^{-1})]\right)

    Messages are counts, and the statistics of rows weighted by the responsibilities q(z = k).

    Args:
        weights, components: a Dirichlet node and a node of the covariance's family, or `Point` of them.
        rows: (n, P).
        blur: rows count as x + e with e ~ N(0, blur I), in expectation of the logarithm: every covariance is at least
            blur I, and the value remains a bound.

    Reference: Bishop, 2006, section 10.2; Khan and Rue 2023, sections 5.2 and 5.3.
    Checked by: tests/equations/test_latent_variable.py.
    """

    def __init__(
        self,
        weights: Node,
        components: Node,
        covariance: Covariance,
        rows: Tensor,
        *,
        blur: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        super().__init__(weights, components, scale=scale)
        self.covariance, self.blur, self.size = covariance, blur, rows.shape[1]
        self.columns, count = covariance.chunks(rows), weights.natural[0].shape[-1]
        self._wide = isinstance(covariance, Full) and len(self.columns) > 1 and self.size > WIDE * count
        if self._wide:
            self.columns = rows.split(max(256, covariances.CHUNK // self.size))
        small = not self._wide and len(rows) * covariance.width(self.size) <= KEPT
        self._kept = [covariance.features(rows.mT, blur)] if small else None

    def evaluate(self) -> tuple[Tensor, Mapping[Node, Parameters]]:
        weights, components = self.nodes
        coefficients = self.covariance.coefficients(components.mean)
        coefficients[:, 0] += weights.mean[0]
        total, sums = self._by_matrices(coefficients) if self._wide else self._by_features(coefficients)
        return total, {weights: (sums[:, 0],), components: self.covariance.message(sums, self.size)}

    def _by_features(self, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """The bound, and the weighted sums of features."""
        total, sums = coefficients.new_zeros(()), torch.zeros_like(coefficients)
        for features in self._kept or self._features():
            shares = coefficients @ features  # (K, n)
            total += _normalise(shares)
            sums.addmm_(shares, features.mT)
        return total, sums

    def _by_matrices(self, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """The same without products of columns, which take too long for many columns and few components."""
        K, P = len(coefficients), self.size
        matrices = coefficients[:, triangle_of(P, coefficients.device).unpacked].view(K, P, P) / 2
        constant = coefficients[:, :1] + self.blur * matrices.diagonal(dim1=-2, dim2=-1).mul_(2).sum(1, keepdim=True)
        first, total = torch.zeros_like(coefficients[:, : P + 1]), coefficients.new_zeros(())
        second, tied = torch.zeros_like(matrices), isinstance(self.covariance, Tied)  # the first one gets their sum
        for rows in self.columns:
            forms = [(rows @ matrix).mul_(rows).sum(1) for matrix in (matrices[:1] if tied else matrices)]
            shares = torch.stack(forms) + constant
            total += _normalise(shares.addmm_(coefficients[:, 1 : P + 1], rows.mT))
            first[:, 0] += shares.sum(1)
            first[:, 1:].addmm_(shares, rows)
            for own, weights in zip(second, shares.sum(0, keepdim=True) if tied else shares):
                own += weighted_gram(rows, weights)
        return total, packed(first, second, self.blur)

    def _features(self) -> Iterator[Tensor]:
        buffer = self.covariance.buffer(self.columns[0])
        return (self.covariance.features(part, self.blur, buffer) for part in self.columns)


def _normalise(logits: Tensor) -> Tensor:
    """Softmax over the first dimension, in place; returns the sum of the log normalisers."""
    top = logits.amax(0)
    norm = logits.sub_(top).exp_().sum(0)
    logits.div_(norm)
    return norm.log().add_(top).sum()
