"""Preconditioned gradients of a layer from the rows of its inputs and errors, without forming the gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bayesgrad.directions import Direction, Product
from bayesgrad.layers.call import LayerCall
from bayesgrad.layers.modules import Layer, errors_of, inputs_of
from bayesgrad.layers.per_example import matmul
from bayesgrad.layers.statistics import joined
from bayesgrad.precision import Kronecker
from bayesgrad.preconditioners.stability import inner_product


class InnerProduct:
    """d·g over layers, for directions d and gradients g, as a tensor.

    Args:
        needed: whether it is used.
    """

    def __init__(self, needed: bool) -> None:
        self.needed, self.total = needed, None

    def add(self, direction: Tensor, gradient: Tensor) -> None:
        if self.needed:
            self._add(inner_product(direction, gradient))

    def add_rows(self, left: Tensor, errors: Tensor, right: Tensor, rows: Tensor, ones: Tensor | None) -> None:
        """For d = left' [right ones] and g = errors' [rows 1], without forming them."""
        if self.needed:
            inputs = matmul(right, rows.mT)
            inputs = inputs if ones is None else inputs.add_(ones)
            self._add(torch.dot(matmul(left, errors.mT).flatten(), inputs.flatten()))

    def join(self, parts: Iterable[InnerProduct], factor: Tensor | None) -> None:
        """Adds the square of the sum of roots: d·g is at most that, if d and g are sums of these parts."""
        roots = [one.total.clamp(min=0).sqrt() for one in parts if one.total is not None]
        if self.needed and roots:
            square = torch.stack(roots).sum().square()
            self._add(square if factor is None else square * factor.to(square).square())

    def _add(self, value: Tensor) -> None:
        self.total = value if self.total is None else self.total + value.to(self.total)


def from_rows(
    layer: Layer, precision: Kronecker, calls: Sequence[LayerCall], inner: InnerProduct, factor: Tensor | None = None
) -> dict[Tensor | None, Direction]:
    """factor (E L)'(A R) of each parameter, with the rows of these calls."""
    errors = joined([errors_of(call.module, call.error).flatten(1, 2) for call in calls])
    errors = errors if factor is None else errors * factor.to(errors)
    left = _times(errors, precision.left)
    rows = joined([inputs_of(call.module, call.input).flatten(1, 2) for call in calls])
    rows = rows if layer.weight is not None else rows[..., :0]
    inputs, ones = _inputs_times(layer, rows, precision.right)
    inner.add_rows(left, errors, inputs, rows, ones)
    found: dict[Tensor | None, Direction] = {}
    if layer.weight is not None:
        sides = (inputs, left) if layer.transposed else (left, inputs)
        if len(inputs) == 1:
            found[layer.weight] = Product(sides[0][0], sides[1][0], layer.weight.shape)
        else:
            found[layer.weight] = torch.bmm(sides[0].mT, sides[1]).view(layer.weight.shape)
    if ones is not None and layer.bias is not None:
        found[layer.bias] = matmul(left.mT, ones).view(layer.bias.shape)
    return found


def _inputs_times(layer: Layer, rows: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A times a factor, without forming the column of ones: the columns of the weight and that of the bias."""
    size = rows.shape[-1]
    if layer.bias is None:
        return _times(rows, factor), None
    if factor is None:
        return rows, rows.new_ones(*rows.shape[:-1], 1)
    if factor.dim() == 2:
        return rows * factor[:, None, :size], factor[:, None, size:].expand(-1, rows.shape[1], -1)
    if len(factor) > 1:
        found = torch.baddbmm(factor[:, size:], rows, factor[:, :size])
    else:
        found = torch.addmm(factor[0, size:], rows[0], factor[0, :size])[None]
    return found[..., :size], found[..., size:]


def _times(rows: Tensor, factor: Tensor | None) -> Tensor:
    if factor is None:
        return rows
    return matmul(rows, factor) if factor.dim() == 3 else rows * factor[:, None]
