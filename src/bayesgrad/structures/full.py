"""The dense Hessian of all weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.fisher import BatchGradients
from bayesgrad.structures.structure import Accumulator, Structure

MAX_DENSE_WEIGHTS = 1 << 15


@dataclass(frozen=True, eq=False)
class FullStructure(Structure):
    """The dense matrix Σ g g' for all parameters.

    Args:
        matrix: (n, n).
    """

    matrix: Tensor
    name = "full"
    kind = "DenseHessian"

    @classmethod
    def check(cls, params: Mapping[str, nn.Parameter]) -> None:
        size = sum(p.numel() for p in params.values())
        if size > MAX_DENSE_WEIGHTS:
            raise ValueError(f"structure='full' needs a dense {size} x {size} matrix: use 'subsampled' or 'kron'.")

    @classmethod
    def blocks(
        cls, params: Mapping[str, nn.Parameter], model: nn.Module, bias: str, first: BatchGradients
    ) -> list[Accumulator]:
        return [cls.empty(params)]

    @classmethod
    def empty(cls, params: Mapping[str, nn.Parameter]) -> Structure:
        shapes = {name: p.shape for name, p in params.items()}
        size = sum(shape.numel() for shape in shapes.values())
        wide = any(p.dtype == torch.float64 for p in params.values())
        first = next(iter(params.values()))
        dtype = torch.float64 if wide else compute_dtype(first.dtype)
        return cls(shapes, torch.zeros(size, size, dtype=dtype, device=first.device))

    def add(self, seen: BatchGradients) -> None:
        columns = [seen.columns[name] for name in self.shapes]
        rows = torch.cat([own.rows().reshape(own.count, -1) for own in columns], 1)
        self.matrix.addmm_(rows.T, rows)

    def dense(self) -> Tensor:
        return self.matrix
