"""Weights with a common variance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesgrad.precision.algebra import BilinearForm
from bayesgrad.precision.diagonal import Diagonal


@dataclass(frozen=True, eq=False)
class Scalar(Diagonal):
    """P = I/v for weights of a given shape, stored as the variance v.

    >>> Scalar(torch.tensor(0.5), (2,)).solve(torch.tensor([1.0, 2.0]))
    tensor([0.5000, 1.0000])

    Args:
        covariance: v, a tensor without dimensions.
        shape: the shape of the weights.
    """

    shape: tuple[int, ...]

    def _with(self, covariance: Tensor) -> Scalar:
        return Scalar(covariance, self.shape)

    def variance(self) -> Tensor:
        return self.covariance.expand(self.shape)

    def logdet(self) -> Tensor:
        return -self.covariance.log() * torch.Size(self.shape).numel()

    def bilinear_form(self) -> BilinearForm:
        return BilinearForm(scale=self.covariance)
