"""Independent weights with different variances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesgrad.precision.algebra import BilinearForm, Precision


@dataclass(frozen=True, eq=False)
class Diagonal(Precision):
    """P = diag(1/v), stored as the variances v.

    >>> belief = Diagonal(torch.tensor([1.0, 4.0]))
    >>> belief.add(torch.tensor([1.0, 0.0])).variance()
    tensor([0.5000, 4.0000])

    Args:
        covariance: v, in the shape of the weights.
    """

    covariance: Tensor

    def _with(self, covariance: Tensor) -> Diagonal:
        return Diagonal(covariance)

    def scale(self, factor: Any) -> Diagonal:
        return self._with(self.covariance / factor)

    def add(self, increment: Any) -> Diagonal:
        return self._with(self.covariance / (1 + self.covariance * increment))

    def propagate(self, retain: Any, noise: Any) -> Diagonal:
        return self._with(retain * self.covariance + noise)

    def solve(self, vector: Tensor) -> Tensor:
        return self.covariance * vector

    def multiply(self, vector: Tensor) -> Tensor:
        return vector / self.covariance

    def sample(self, noise: Tensor) -> Tensor:
        return self.covariance.sqrt() * noise

    def variance(self) -> Tensor:
        return self.covariance

    def logdet(self) -> Tensor:
        return -self.covariance.log().sum()

    def to_dense(self) -> Tensor:
        return torch.diag(1 / self.variance().flatten())

    def bilinear_form(self) -> BilinearForm:
        return BilinearForm(variance=self.covariance)

    def storable(self) -> Tensor:
        """The variances plus the smallest normal number, so that their reciprocals are finite."""
        return self.covariance + torch.finfo(self.covariance.dtype).tiny
