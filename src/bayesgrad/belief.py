"""Gaussian beliefs about weights: a mean and a precision."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
        turned: names of weights that are (in, out), which are transposed in the matrix.
    """

    shapes: Mapping[str, torch.Size]
    turned: frozenset[str] = frozenset()

    def split(self, name: str, values: Tensor) -> dict[str, Tensor]:
        rows = self.mean.shape[:-1].numel()
        parts = values.split([shape.numel() // rows for shape in self.shapes.values()], -1)
        parts = [part.mT if own in self.turned else part for own, part in zip(self.shapes, parts)]
        ahead = values.shape[: values.dim() - self.mean.dim()]
        return {own: part.reshape((*ahead, *shape)) for (own, shape), part in zip(self.shapes.items(), parts)}

    def join(self, values: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `split`."""
        return joined(values, self.shapes, self.mean.shape[:-1], self.turned)


def joined(
    values: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    leading: Sequence[int],
    turned: Collection[str] = (),
) -> Tensor:
    """Values by name (..., *shape) as one matrix (..., *leading, columns).

    Args:
        leading: (groups, out), where there are weights that are turned.
        turned: as in `Joint`.
    """
    parts = []
    for name, shape in shapes.items():
        value = values[name]
        ahead = value.shape[: value.dim() - len(shape)]
        if name in turned:
            parts.append(value.reshape(*ahead, *leading[:-1], -1, leading[-1]).mT)
        else:
            parts.append(value.reshape(*ahead, *leading, -1))
    return torch.cat(parts, -1)
