"""The units that a layer reads, and the weights that leave each of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Units:
    """Where the units that a layer reads are in its weight.

    Args:
        dim: the dimension of the weight that counts them.
        groups: of a convolution: that dimension then counts the units of one group.
    """

    dim: int
    groups: int = 1

    def count(self, shape: torch.Size) -> int:
        return self.groups * shape[self.dim]

    def spread(self, values: Tensor, shape: torch.Size) -> Tensor:
        """A value for each unit, (count,), as a factor of the weights that leave it: broadcasts to `shape`."""
        if self.groups > 1:  # (groups, units) to (out, units): each output reads the units of its own group
            values = values.view(self.groups, 1, -1).expand(-1, shape[0] // self.groups, -1).reshape(shape[0], -1)
            return values.view(*values.shape, *[1] * (len(shape) - 2))
        return values.view([-1 if dim == self.dim else 1 for dim in range(len(shape))])


def units_of(module: nn.Module) -> Units | None:
    """The units that a layer reads; None for what is not a Linear or a convolution."""
    if isinstance(module, nn.Linear):
        return Units(1)
    if isinstance(module, CONVOLUTIONS):
        return Units(1, module.groups)
    return Units(0) if isinstance(module, TRANSPOSED) else None
