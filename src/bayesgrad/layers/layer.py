"""The matrix [W b] of one layer, its recorded inputs and errors, and the gradient that follows from them.

The gradient of the mean loss is E'A, with a row of inputs A (a one appended for the bias) and a row of errors E for
each example and position.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from bayesgrad import layers
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.per_example import matmul
from bayesgrad.layers.probe import Projection, fit_factors, random_column, rows_to_compare
from bayesgrad.layers.recorder import LayerCall


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


class LayerBatch:
    """The rows of inputs and errors of one layer, over examples, positions, calls and passes.

    Args:
        layer: the layer.
        passes: the recorded calls of each pass; the examples of a pass are counted once.
    """

    def __init__(self, layer: Layer, passes: Sequence[Sequence[LayerCall]]) -> None:
        self.layer = layer
        self.passes = passes
        self.examples = sum(max(layers.examples_in(use.module, use.input) for use in uses) for uses in passes)

    @property
    def uses(self) -> Iterable[LayerCall]:
        return (use for uses in self.passes for use in uses)

    @cached_property
    def indices(self) -> Tensor:
        """The indices of an Embedding's inputs, (rows,)."""
        return torch.cat([use.input.flatten() for use in self.uses])

    @cached_property
    def features(self) -> Tensor:
        """The inputs without the column of ones, (groups, rows, in)."""
        if self.layer.weight is None:
            return self.errors[..., :0]
        parts = [layers.inputs_of(use.module, use.input).flatten(1, 2) for use in self.uses]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    @cached_property
    def inputs(self) -> Tensor:
        """A: features, with a column of ones for the bias."""
        return _with_ones(self.features) if self.layer.bias is not None else self.features

    @cached_property
    def errors(self) -> Tensor:
        """E, (groups, rows, out); for an Embedding (1, rows, features)."""
        parts = [self._errors(use) for use in self.uses]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def with_errors(self, errors: Tensor) -> LayerBatch:
        """A copy with other errors, in the shape of `errors`."""
        other = LayerBatch(self.layer, self.passes)
        other.__dict__ |= {**self.__dict__, "errors": errors}
        return other

    def is_finite(self) -> Tensor:
        """Whether inputs, errors and their squares are finite, as a tensor."""
        rows = [self.errors] if self.layer.lookup else [self.inputs, self.errors]
        return torch.stack([torch.linalg.vector_norm(part) for part in rows]).isfinite().all()

    def _errors(self, use: LayerCall) -> Tensor:
        if isinstance(use.module, nn.Embedding):
            return layers.lookups_of(use.module, use.input, use.error)[1].flatten(0, 1)[None]
        return layers.errors_of(use.module, use.error).flatten(1, 2)

    def rows(self) -> int:
        """The number of rows, without forming them."""
        if isinstance(self.layer.module, layers.CONVOLUTIONS):
            rank = len(self.layer.module.kernel_size)
            return sum(len(use.error) * use.error.shape[-rank:].numel() for use in self.uses)
        return sum(use.error.numel() // use.error.shape[-1] for use in self.uses)

    def reduced(self) -> tuple[Tensor, Tensor]:
        """One row for each example: the mean of inputs and the sum of errors over its positions."""
        inputs, errors = [], []
        for uses in self.passes:
            if len({layers.examples_in(use.module, use.input) for use in uses}) > 1:
                raise ValueError(
                    f"layer {self.layer.names[0]!r} was called with different numbers of examples in one pass: "
                    "sharing='reduce' needs the same number in all calls, use 'expand'."
                )
            a = torch.cat([layers.inputs_of(use.module, use.input) for use in uses], 2).mean(2)
            e = torch.cat([layers.errors_of(use.module, use.error) for use in uses], 2).sum(2)
            a = a if self.layer.weight is not None else a[..., :0]
            inputs.append(_with_ones(a) if self.layer.bias is not None else a)
            errors.append(e)
        return torch.cat(inputs, 1), torch.cat(errors, 1)


def gradient_from_calls(layer: Layer, uses: Sequence[LayerCall]) -> Tensor:
    """The gradient of the weight that follows from these calls."""
    total = torch.zeros(layer.owner.shape, dtype=compute_dtype(layer.owner.dtype), device=layer.owner.device)
    for use in uses:
        for p, columns in layers.per_example_gradients(use.module, use.input, use.error):
            if p is layer.owner:
                total += columns.combine(torch.ones(columns.count).to(total))
    return total


def _with_ones(rows: Tensor) -> Tensor:
    """Rows with a one appended to each, for the bias."""
    wider = rows.new_empty(*rows.shape[:-1], rows.shape[-1] + 1)
    wider[..., :-1] = rows
    wider[..., -1] = 1
    return wider


def gradient_factors(blocks: Sequence[tuple[Layer, LayerBatch]]) -> dict[Layer, float]:
    """c for each layer whose gradient is c E'A up to rounding; other layers are omitted."""
    found = {layer: projection for layer, batch in blocks if (projection := _projection(layer, batch)) is not None}
    return {layer: factor for layer, (factor, excess) in zip(found, fit_factors(list(found.values()))) if excess <= 1}


def estimated_factor(layer: Layer, batch: LayerBatch) -> float:
    """The c for which c E'A is closest to the gradient (the effect of unscaling and clipping); 1 if unknown."""
    if layer.lookup:
        made = gradient_from_calls(layer, list(batch.uses)).flatten()
        seen = layer.owner.grad.to(made).flatten()  # pyright: ignore[reportOptionalMemberAccess]
        projection = Projection(seen, made, made.new_ones(2), torch.finfo(made.dtype).eps)
    elif any(p.grad is None for p in layer.members) or (projection := _projection(layer, batch)) is None:
        return 1.0
    ((factor, _),) = fit_factors([projection])
    return factor if math.isfinite(factor) else 1.0


def _projection(layer: Layer, batch: LayerBatch) -> Projection | None:
    features, errors = batch.features, batch.errors
    gradients = [p.grad for p in layer.members if p.grad is not None]
    if features.dtype != errors.dtype or any(gradient.dtype != features.dtype for gradient in gradients):
        return None
    groups, fan_out, fan_in = layer.shape
    size = fan_in - (layer.bias is not None)
    probe = random_column(fan_in, features.dtype, features.device)
    some = rows_to_compare(gradients, fan_out)
    rows = features @ probe[:size]
    seen = probe.new_zeros(())
    if layer.weight is not None:
        seen = (gradients[0].reshape(groups, fan_out, size)[:, some].reshape(-1, size) @ probe[:size])[:, 0]
    if layer.bias is not None:
        rows += probe[size:]
        seen = torch.addcmul(seen, gradients[-1].view(groups, fan_out)[:, some].reshape(-1), probe[size])
    made = matmul(errors[..., some].mT, rows).flatten()
    sizes = torch.stack(torch._foreach_norm([features, errors]))
    return Projection(seen, made, sizes, torch.finfo(made.dtype).eps, 0 if layer.bias is None else features.shape[1])
