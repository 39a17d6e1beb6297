"""Preconditioned gradients of a layer from the rows of its inputs and errors, without forming the gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from bayesgrad.directions import Direction, Product
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.call import LayerCall
from bayesgrad.layers.modules import Layer, error_rows, input_rows, rows_in
from bayesgrad.layers.moments import joined
from bayesgrad.layers.operations import operation, parameter_gradients
from bayesgrad.precision import Kronecker, Precision
from bayesgrad.products import mm
from bayesgrad.shards import Solve, gradient_of, solved, summed


def inner_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a.reshape(-1), b.to(a).reshape(-1))


class InnerProduct:
    """d·g over layers, for directions d and gradients g, as a tensor.

    Args:
        needed: whether it is used.
    """

    def __init__(self, needed: bool, total: Tensor | None = None) -> None:
        self.needed, self.total = needed, total

    def add(self, direction: Tensor, gradient: Tensor) -> None:
        if self.needed:
            self.include(inner_product(direction, gradient))

    def add_rows(self, left: Tensor, errors: Tensor, right: Tensor, rows: Tensor, ones: Tensor | None) -> None:
        """For d = left' [right ones] and g = errors' [rows 1], without forming them."""
        if self.needed:
            inputs = mm(right, rows.mT)
            inputs = inputs if ones is None else inputs.add_(ones)
            self.include(torch.dot(mm(left, errors.mT).flatten(), inputs.flatten()))

    def root(self) -> Tensor:
        assert self.total is not None
        return self.total.clamp(min=0).sqrt()

    def include(self, value: Tensor) -> None:
        """Adds the inner product of some parameters."""
        self.total = value if self.total is None else self.total + value.to(self.total)


def from_call(
    layer: Layer, precision: Precision, call: LayerCall, inner: InnerProduct
) -> Mapping[Tensor | None, Direction]:
    """The preconditioned gradient of each parameter from one call, whose own gradients are formed."""
    needs = layer.weight is not None, layer.bias is not None
    weight = call.module._parameters["weight"].to(call.error.dtype)  # pyright: ignore[reportOptionalMemberAccess]
    pair = parameter_gradients(operation(call.module), call.error, call.input, weight, needs)
    kind = compute_dtype(layer.owner.dtype)
    gradient = layer.join([g.to(kind) for g in pair if g is not None])
    solved = precision.solve(gradient)
    inner.add(solved, gradient)
    return dict(zip(layer.members, layer.parted(solved)))


def from_gradients(several: Mapping[Layer, Precision], inner: InnerProduct) -> dict[Tensor | None, Direction]:
    """The preconditioned gradient of each parameter; one process solves each layer of which each has a part."""
    found: dict[Tensor | None, Direction] = {}
    jobs, products = [], {}
    for layer, precision in several.items():
        if layer.sharded:
            jobs.append(Solve(layer.members, layer.gradients(), partial(_solve, layer, precision)))
            continue
        gradient = layer.matrix()
        solution = precision.solve(gradient)
        inner.add(solution, gradient)
        found |= layer.split(solution)
    for job, parts in zip(jobs, solved(jobs) if jobs else ()):
        for p, part in zip(job.params, parts):
            if p.grad is not None:
                found[p], products[p] = part, inner_product(part, gradient_of(p))
    for total in summed(list(products.values()), list(products)) if inner.needed and products else ():
        inner.include(total)
    return found


def _solve(layer: Layer, precision: Precision, gradients: list[Tensor]) -> list[Tensor]:
    return layer.parted(precision.solve(layer.join(gradients)))


def rows_are_cheaper(layer: Layer, call: LayerCall, full: Sequence[str]) -> bool:
    """Whether (E L)'(A R) needs fewer multiplications than L G R; `full` are the sides whose factors are matrices."""
    _, fan_out, fan_in = layer.shape
    sizes = [layer.sizes[side] for side in full]
    per_row = fan_in * fan_out + sum(size * size for size in sizes)
    return rows_in(call.module, call.error) * per_row < fan_in * fan_out * sum(sizes)


def from_rows(
    layer: Layer, precision: Kronecker, calls: Sequence[LayerCall], inner: InnerProduct, factor: Tensor | None = None
) -> dict[Tensor | None, Direction]:
    """factor (E L)'(A R) of each parameter, with the rows of these calls."""
    errors = joined([error_rows(call.module, call.error) for call in calls])
    rows = joined([input_rows(call.module, call.input) for call in calls])
    by_rows, by_columns = precision.left, precision.right
    if len(errors) == 1:  # products of plain matrices are faster than those of stacks
        errors, rows = errors[0], rows[0]
        by_rows, by_columns = (None if side is None else side[0] for side in (by_rows, by_columns))
    errors = errors if factor is None else errors * factor.to(errors)
    rows = rows if layer.weight is not None else rows[..., :0]
    left = _times(errors, by_rows)
    inputs, ones = _inputs_times(layer, rows, by_columns)
    inner.add_rows(left, errors, inputs, rows, ones)
    found: dict[Tensor | None, Direction] = {}
    if layer.weight is not None:
        rows, columns = (inputs, left) if layer.transposed else (left, inputs)
        shape = layer.weight.shape
        found[layer.weight] = Product(rows, columns, shape) if left.dim() == 2 else mm(rows.mT, columns).view(shape)
    if ones is not None and layer.bias is not None:
        found[layer.bias] = (left.mT @ ones).view_as(layer.bias)
    return found


def _inputs_times(layer: Layer, rows: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A times a factor, without forming the column of ones: the columns of the weight and that of the bias."""
    size = rows.shape[-1]
    if layer.bias is None:
        return _times(rows, factor), None
    if factor is None:
        return rows, rows.new_ones(*rows.shape[:-1], 1)
    if factor.dim() < rows.dim():
        return rows * factor[..., None, :size], factor[..., None, size:].expand(*rows.shape[:-1], 1)
    found = mm(rows, factor[..., :size, :]).add_(factor[..., size:, :])
    return found[..., :size].contiguous(), found[..., size:]  # which two products would copy, each for itself


def _times(rows: Tensor, factor: Tensor | None) -> Tensor:
    if factor is None:
        return rows
    return mm(rows, factor) if factor.dim() == rows.dim() else rows * factor[..., None, :]
