"""The gradient of one layer's matrix [W b], preconditioned by Kronecker factors.

The gradient of the mean loss is E'A, with a row of inputs A (a one appended for the bias) and a row of errors E for
each example and position. L E'A R can be computed from the gradient, or as (E L)'(A R), which is cheaper if rows are
fewer than outputs. Both agree only if `.grad` was not changed since the backward pass (clipping, unscaling, penalties).
So `layers.probe.gradient_factors` first compares E'A with `.grad`, and allows for a common factor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bayesgrad.block.elementwise import Product
from bayesgrad.layers.layer import Layer
from bayesgrad.layers.per_example import matmul
from bayesgrad.layers.probe import gradient_factors
from bayesgrad.layers.statistics import LayerStatistics
from bayesgrad.precision import Kronecker, Precision


def directions(blocks: Sequence[tuple[Layer, Precision, LayerStatistics | None]]) -> dict[Tensor, Tensor | Product]:
    """The preconditioned gradients of layers, for each parameter.

    Args:
        blocks: layers with their precisions, and the inputs and errors of the backward passes, if recorded.
    """
    few = [
        (layer, batch)
        for layer, precision, batch in blocks
        if isinstance(precision, Kronecker) and batch is not None and _is_cheaper(layer, precision, batch)
    ]
    factors = gradient_factors(few)
    found: dict[Tensor, Tensor | Product] = {}
    for layer, precision, batch in blocks:
        if layer in factors and isinstance(precision, Kronecker) and batch is not None:
            found |= _from_rows(layer, precision, batch, factors[layer])
        else:
            found |= layer.split(precision.solve(layer.matrix()))
    return found


def _is_cheaper(layer: Layer, precision: Kronecker, batch: LayerStatistics) -> bool:
    """Whether (E L)'(A R) needs fewer multiplications than L G R."""
    if layer.lookup or any(p.grad is None for p in layer.members):
        return False
    _, fan_out, fan_in = layer.shape
    per_row = fan_in * fan_out
    whole = 0
    for factor, size in ((precision.left, fan_out), (precision.right, fan_in)):
        if factor is not None and factor.dim() == 3:
            per_row += size * size
            whole += fan_in * fan_out * size
    return batch.rows * per_row < whole


def _from_rows(
    layer: Layer, precision: Kronecker, batch: LayerStatistics, factor: float
) -> dict[Tensor, Tensor | Product]:
    inputs, errors = _inputs_times(batch, precision.right), _times(batch.errors, precision.left)
    size = inputs.shape[-1] - (layer.bias is not None)
    found: dict[Tensor, Tensor | Product] = {}
    if layer.weight is not None:
        right = inputs[..., :size]
        if len(inputs) == 1:
            found[layer.weight] = Product(errors[0], right[0], factor, layer.weight.shape)
        else:
            found[layer.weight] = torch.bmm(errors.mT, right).mul_(factor).view(layer.weight.shape)
    if layer.bias is not None:
        found[layer.bias] = matmul(errors.mT, inputs[..., size:]).mul_(factor).view(layer.bias.shape)
    return found


def _inputs_times(batch: LayerStatistics, factor: Tensor | None) -> Tensor:
    """A times a factor, without forming the column of ones where possible."""
    if batch.layer.bias is None or factor is None or factor.dim() == 2 or "inputs" in batch.__dict__:
        return _times(batch.inputs, factor)
    rows = batch.features
    if len(factor) > 1:
        return torch.baddbmm(factor[:, -1:], rows, factor[:, :-1])
    return torch.addmm(factor[0, -1:], rows[0], factor[0, :-1])[None]


def _times(rows: Tensor, factor: Tensor | None) -> Tensor:
    if factor is None:
        return rows
    return matmul(rows, factor) if factor.dim() == 3 else rows * factor[:, None]
