"""Gaussian beliefs about weights: a mean and a precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesgrad.precision import Precision


@dataclass(frozen=True, eq=False)
class Belief:
    """The Gaussian N(mean, precision^-1) of one block of weights.

    During training the mean is the parameter and the precision is in the optimizer's state. `posterior()` copies both
    into a `Belief`.
    """

    mean: Tensor
    precision: Precision

    def sample(self, noise: Tensor) -> Tensor:
        """One sample for each leading index of standard normal `noise` (..., *mean.shape)."""
        return self.mean + self.precision.sample(noise)

    def split(self, name: str, values: Tensor) -> dict[str, Tensor]:
        """Values in the shape of the mean (..., *mean.shape), as a dict by parameter name."""
        return {name: values}


@dataclass(frozen=True, eq=False)
class Joint(Belief):
    """A joint belief about several parameters, the columns of one matrix [W b], (groups, out, in).

    Args:
        shapes: shapes of the parameters by name, in the order of their columns.
    """

    shapes: Mapping[str, torch.Size]

    def split(self, name: str, values: Tensor) -> dict[str, Tensor]:
        rows = self.mean.shape[:-1].numel()
        parts = values.split([shape.numel() // rows for shape in self.shapes.values()], -1)
        ahead = values.shape[: values.dim() - self.mean.dim()]
        return {own: part.reshape((*ahead, *shape)) for (own, shape), part in zip(self.shapes.items(), parts)}

    def join(self, values: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `split`."""
        parts = []
        for name, shape in self.shapes.items():
            ahead = values[name].shape[: values[name].dim() - len(shape)]
            parts.append(values[name].reshape(*ahead, *self.mean.shape[:-1], -1))
        return torch.cat(parts, -1)
