"""The input units of a layer, and the outgoing weights of each unit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayesgrad.layers import CONVOLUTIONS

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Units:
    """The place of a layer's input units in its weight.

    Args:
        dim: the dimension of the weight that belongs to input units.
        groups: of a convolution; `dim` then has the units of one group.
    """

    dim: int
    groups: int = 1

    def count(self, shape: torch.Size) -> int:
        return self.groups * shape[self.dim]

    def spread(self, values: Tensor, shape: torch.Size) -> Tensor:
        """Expands a value for each unit, (count,), to a factor of its outgoing weights that broadcasts to `shape`."""
        if self.groups > 1:  # (groups, units) to (out, units): each output reads the units of its own group
            values = values.view(self.groups, 1, -1).expand(-1, shape[0] // self.groups, -1).reshape(shape[0], -1)
            return values.view(*values.shape, *[1] * (len(shape) - 2))
        return values.view([-1 if dim == self.dim else 1 for dim in range(len(shape))])


def units_of(module: nn.Module) -> Units | None:
    """The input units of a Linear or convolution; None for other modules."""
    if isinstance(module, nn.Linear):
        return Units(1)
    if isinstance(module, CONVOLUTIONS):
        return Units(1, module.groups)
    return Units(0) if isinstance(module, TRANSPOSED) else None
