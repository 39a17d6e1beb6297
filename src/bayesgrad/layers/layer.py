"""The matrix [W b] of one layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from bayesgrad import layers
from bayesgrad.kernels import compute_dtype


@dataclass(frozen=True, eq=False)
class Layer:
    """The parameters of a layer that multiplies by a matrix; several modules may share them.

    Args:
        names: names of the modules.
        module: the first of them.
        weight, bias: the trained parameters; at least one is not None.
    """

    names: tuple[str, ...]
    module: nn.Module
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    @cached_property
    def owner(self) -> nn.Parameter:
        """The parameter whose state has the layer's factors."""
        return self.weight if self.weight is not None else self.bias  # pyright: ignore[reportReturnType]

    @cached_property
    def members(self) -> list[nn.Parameter]:
        return [p for p in (self.weight, self.bias) if p is not None]

    @cached_property
    def lookup(self) -> bool:
        """Whether this is an Embedding, whose weight (rows, features) is the transpose of that of a Linear layer."""
        return layers.is_lookup(self.module)

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """(groups, out, in) of [W b]; for an Embedding (1, rows, features)."""
        groups, rows = layers.groups_of(self.module), len(self.owner)
        size = self.weight.numel() // rows if self.weight is not None else 0
        return groups, rows // groups, size + (self.bias is not None)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The number of inputs and of errors of a row, in each group: the sizes of the second moments of both sides."""
        _, fan_out, fan_in = self.shape
        return {"input": fan_out, "error": fan_in} if self.lookup else {"input": fan_in, "error": fan_out}

    def matrix(self) -> Tensor:
        """The gradient of [W b], (groups, out, in), with zeros for a parameter without a gradient."""
        groups, fan_out, _ = self.shape
        dtype = compute_dtype(self.owner.dtype)
        parts = []
        for p in self.members:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            parts.append(gradient.to(dtype).reshape(groups, fan_out, -1))
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def values(self) -> Tensor:
        """A copy of [W b], (groups, out, in)."""
        groups, fan_out, _ = self.shape
        dtype = compute_dtype(self.owner.dtype)
        return torch.cat([p.detach().to(dtype).reshape(groups, fan_out, -1) for p in self.members], -1)

    def split(self, matrix: Tensor) -> dict[Tensor, Tensor]:
        """Splits a matrix (groups, out, in) into a tensor for each parameter that has a gradient."""
        size = matrix.shape[-1] - (self.bias is not None)
        parts = {self.weight: matrix[..., :size], self.bias: matrix[..., size:]}
        return {p: parts[p].reshape(p.shape) for p in self.members if p.grad is not None}
