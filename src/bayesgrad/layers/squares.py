"""Squares of per-example gradients, from recorded layer calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesgrad import layers
from bayesgrad.layers.per_example import OuterProducts, PerExampleGradients, matmul
from bayesgrad.layers.probe import Projection, random_column, rows_to_compare
from bayesgrad.layers.recorder import LayerCall


@dataclass(frozen=True, eq=False)
class Examples:
    """The per-example gradients of one parameter in several backward passes."""

    passes: Sequence[PerExampleGradients]

    @property
    def count(self) -> int:
        return sum(columns.count for columns in self.passes)

    def squares(self) -> Tensor:
        """The sum of g_j^2 over all examples of all passes."""
        first, *others = (columns.squares() for columns in self.passes)
        for squares in others:
            first += squares
        return first

    def projection(self, gradient: Tensor) -> Projection:
        """Random projections of `gradient` and of sum_j g_j, to which it should be proportional."""
        if all(isinstance(columns, OuterProducts) for columns in self.passes):
            outers = [columns for columns in self.passes if isinstance(columns, OuterProducts)]
            groups, _, _, fan_out = outers[0].errors.shape
            matrix = gradient.reshape(groups, fan_out, -1).to(outers[0].inputs.dtype)
            some = rows_to_compare([gradient], fan_out)
            probe = random_column(matrix.shape[-1], matrix.dtype, matrix.device)
            seen = (matrix[:, some] @ probe).flatten()
            parts = [(own.inputs.flatten(1, 2), own.errors.flatten(1, 2)) for own in outers]
            made = torch.stack([matmul(e[..., some].mT, a @ probe).flatten() for a, e in parts]).sum(0)
            norms = torch._foreach_norm([rows for pair in parts for rows in pair])
        else:
            sums = [columns.combine(torch.ones(columns.count).to(floating_tensor(columns))) for columns in self.passes]
            made = torch.stack(sums).sum(0).flatten()
            seen = gradient.flatten().to(made.dtype)
            own = [t for columns in self.passes for t in columns.tensors().values() if t.is_floating_point()]
            total = made.abs().max() + torch.stack(torch._foreach_norm(own)).sum()
            norms = [total, torch.ones_like(total)]
        eps = max(torch.finfo(dtype).eps for dtype in (made.dtype, gradient.dtype))
        return Projection(seen, made, torch.stack(list(norms)), eps)


def floating_tensor(columns: PerExampleGradients) -> Tensor:
    """One of their floating-point tensors, for its dtype and device."""
    return next(t for t in columns.tensors().values() if t.is_floating_point())


def examples_of(passes: Sequence[Sequence[LayerCall]]) -> dict[Tensor, Examples]:
    """The per-example gradients of every parameter of the called layers; calls in one pass are summed."""
    found: dict[Tensor, list[PerExampleGradients]] = {}
    for calls in passes:
        for p, columns in layers.gradients_of_calls(calls).items():
            found.setdefault(p, []).append(columns)
    return {p: Examples(columns) for p, columns in found.items()}
