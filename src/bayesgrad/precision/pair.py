"""Weights with a momentum each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesgrad.precision.algebra import Precision
from bayesgrad.precision.diagonal import Diagonal


@dataclass(frozen=True, eq=False)
class Pair(Precision):
    """P = [[a, b], [b, c]]^-1 for each weight and its momentum, stored as the covariance; vectors are (2, *shape).

    Observations are of weights: `add` takes an increment of their precision alone.

    >>> belief = Pair(torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([1.0]))
    >>> belief.add(torch.tensor([1.0])).variance()  # observing the weight informs about its momentum
    tensor([[0.5000],
            [0.8750]])

    Args:
        weight: a, the variances of weights, in their shape.
        cross: b, their covariances with momenta.
        momentum: c, the variances of momenta.
    """

    weight: Tensor
    cross: Tensor
    momentum: Tensor

    def scale(self, factor: Any) -> Pair:
        return Pair(self.weight / factor, self.cross / factor, self.momentum / factor)

    def add(self, increment: Tensor) -> Pair:
        shrink = 1 + increment * self.weight
        # In this form the gain is finite for an infinite increment.
        gain = 1 / (1 / increment + self.weight)
        return Pair(self.weight / shrink, self.cross / shrink, self.momentum - self.cross * (self.cross * gain))

    def propagate(self, retain: Any, noise: Any) -> Pair:
        return Pair(retain * self.weight + noise, retain * self.cross, retain * self.momentum + noise)

    def solve(self, vector: Tensor) -> Tensor:
        weight, momentum = vector
        return torch.stack(
            [self.weight * weight + self.cross * momentum, self.cross * weight + self.momentum * momentum]
        )

    def sample(self, noise: Tensor) -> Tensor:
        root = self.weight.sqrt()
        slope = self.cross / root
        return torch.stack([root * noise[0], slope * noise[0] + (self.momentum - slope * slope).sqrt() * noise[1]])

    def variance(self) -> Tensor:
        return torch.stack([self.weight, self.momentum])

    def logdet(self) -> Tensor:
        return -(self.weight * self.momentum - self.cross * self.cross).log().sum()

    def to_dense(self) -> Tensor:
        rows = [[self.weight, self.cross], [self.cross, self.momentum]]
        return torch.linalg.inv(torch.cat([torch.cat([torch.diag(b.flatten()) for b in row], 1) for row in rows]))

    def of_weights(self) -> Diagonal:
        """The marginal precision of the weights."""
        return Diagonal(self.weight)
