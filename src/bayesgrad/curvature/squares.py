"""Squares of per-example gradients, from what layers have seen in backward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesgrad.curvature import layers
from bayesgrad.curvature.columns import Columns, Outer, added, matmul, random_vector
from bayesgrad.curvature.tap import Use

ROWS = 16  # of a gradient that seems untouched, to be compared


@dataclass(frozen=True, eq=False)
class Examples:
    """The per-example gradients of one parameter, pass by pass."""

    passes: Sequence[Columns]

    @property
    def count(self) -> int:
        return sum(columns.count for columns in self.passes)

    def squares(self) -> Tensor:
        """The sum of g_j^2 over all examples of all passes."""
        first, *others = (columns.squares() for columns in self.passes)
        for squares in others:
            first += squares
        return first

    def factor(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The c for which `gradient` is c sum_j g_j, by least squares, and the deviation in units of rounding errors.

        Of a matrix, a random projection is looked at; of one that nobody has written into, but for a common factor, a
        few rows of it.
        """
        first = self.passes[0]
        if all(isinstance(columns, Outer) for columns in self.passes):
            outers = [columns for columns in self.passes if isinstance(columns, Outer)]
            groups, _, _, fan_out = outers[0].errors.shape
            matrix = gradient.reshape(groups, fan_out, -1).to(outers[0].inputs.dtype)
            step = max(1, fan_out // ROWS) if gradient._version == 0 else 1
            probe = random_vector(matrix.shape[-1], matrix.dtype, matrix.device)[:, None]
            seen = (matrix[:, ::step] @ probe).flatten()
            parts, bound = [], 0.0
            for own in outers:
                a, e = own.inputs.flatten(1, 2), own.errors.flatten(1, 2)
                parts.append(matmul(e[..., ::step].mT, a @ probe).flatten())
                bound = bound + torch.linalg.vector_norm(a) * torch.linalg.vector_norm(e)
            made = torch.stack(parts).sum(0)
        else:
            sums = [columns.combine(torch.ones(columns.count).to(columns_like(columns))) for columns in self.passes]
            made = torch.stack(sums).sum(0).flatten()
            seen = gradient.flatten().to(made.dtype)
            bound = made.abs().max() + sum(
                torch.linalg.vector_norm(t) for t in first.tensors().values() if t.is_floating_point()
            )
        square = torch.dot(made, made)
        factor = torch.where(square > 0, torch.dot(seen, made) / square, 1.0)
        rounding = max(torch.finfo(dtype).eps for dtype in (made.dtype, gradient.dtype))
        tolerance = 8 * rounding * factor.abs() * bound
        return factor, (seen - factor * made).abs().max() / tolerance


def columns_like(columns: Columns) -> Tensor:
    """A tensor of the dtype and device of what they are made of."""
    return next(t for t in columns.tensors().values() if t.is_floating_point())


def examples_of(passes: Sequence[Sequence[Use]]) -> dict[Tensor, Examples]:
    """The per-example gradients of every parameter that these passes explain; calls in one pass add up."""
    found: dict[Tensor, list[Columns]] = {}
    for uses in passes:
        here: dict[Tensor, list[Columns]] = {}
        for use in uses:
            for p, columns in layers.columns_of(use.module, use.input, use.error):
                here.setdefault(p, []).append(columns)
        for p, parts in here.items():
            found.setdefault(p, []).append(added(parts))
    return {p: Examples(columns) for p, columns in found.items()}
