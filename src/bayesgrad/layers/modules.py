"""The layers that are known: their matrices, and per-example gradients from their inputs and errors.

`known_layers` lists those of a model, including the linear layers inside of recurrent layers and attention.

Supported are layers of torch.nn with their own forward pass. A subclass that overrides it, or a weight or bias that is
pruned or has a parametrisation, is not supported. Inputs and errors are reshaped to (groups, example, position,
feature), in the dtype of the state. The input of a layer is here what its weight is applied to: see
`layers.operations.prepare`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.call import LayerCall, is_derived
from bayesgrad.layers.call import forward as recorded_forward
from bayesgrad.layers.combination import summed
from bayesgrad.layers.layout import MIXED, RowLayout
from bayesgrad.layers.operations import (
    CONVOLUTIONS,
    NORMS,
    TRANSPOSED_CONVOLUTIONS,
    is_transposed_linear,
    padding_of,
)
from bayesgrad.layers.per_example import (
    EmbeddingGradients,
    OuterProducts,
    PerExampleGradients,
    StoredGradients,
)
from bayesgrad.layers.windows import channels_last, uncropped, windows
from bayesgrad.shards import FSDP, gradient_of, is_shard, local, owner


def is_matrix(module: nn.Module) -> bool:
    """Whether the layer multiplies by a matrix: Linear, Conv, ConvTranspose and Embedding."""
    if not _own_weight(module):
        return False
    if isinstance(module, TRANSPOSED_CONVOLUTIONS):
        return _own_forward(module, TRANSPOSED_CONVOLUTIONS)
    if is_transposed_linear(module):
        return _own_forward(module, (type(module),))
    if isinstance(module, nn.Linear):  # attention uses the weight of its output projection without calling the module
        return _own_forward(module, (nn.Linear,)) and not isinstance(module, NonDynamicallyQuantizableLinear)
    if isinstance(module, CONVOLUTIONS):
        base = next(kind for kind in CONVOLUTIONS if isinstance(module, kind))
        return _own_forward(module, CONVOLUTIONS) and type(module)._conv_forward is base._conv_forward
    return is_lookup(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is (in, out), the transpose of that of a Linear layer."""
    return isinstance(module, TRANSPOSED_CONVOLUTIONS) or is_transposed_linear(module)


def joins_bias(module: nn.Module) -> bool:
    """Whether the bias belongs to an input that is always one. ConvTranspose adds it at more positions than inputs."""
    return not isinstance(module, TRANSPOSED_CONVOLUTIONS)


def is_lookup(module: nn.Module) -> bool:
    plain = isinstance(module, nn.Embedding) and _own_forward(module, (nn.Embedding,))
    return plain and _own_weight(module) and module.max_norm is None and not module.scale_grad_by_freq


def is_norm(module: nn.Module) -> bool:
    """Whether the layer normalises each example by itself and has a weight."""
    return normalises(module) and not mixes_examples(module)


def normalises(module: nn.Module) -> bool:
    """As `is_norm`, but also for batch statistics, which mix examples."""
    return isinstance(module, NORMS) and _own_forward(module, NORMS) and _own_weight(module)


def mixes_examples(module: nn.Module) -> bool:
    """Whether an example's output depends on the other examples of its batch."""
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


def _own_forward(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether the forward pass is that of torch.nn, for this class and this instance."""
    base = next(kind for kind in kinds if isinstance(module, kind))
    given = getattr(module.__dict__.get("forward"), "__func__", None)
    mine = "forward" not in module.__dict__ or given in (recorded_forward, base.forward)
    return type(module).forward is base.forward and mine


def _own_weight(module: nn.Module) -> bool:
    """Whether the module computes with its parameters, and not with tensors that are computed from them.

    A weight without entries (a layer of no features) has no matrix, so the bias is left to the fallback.
    """
    weight = module._parameters.get("weight")
    there = weight is not None and "parametrizations" not in module._modules and (is_lazy(weight) or weight.numel() > 0)
    return there and not is_derived(module, "weight", "bias")


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Those that are trained: DTensors, also while `fully_shard` has put gathered parameters in their place."""
    found = {name: p for name in ("weight", "bias") if (p := module._parameters.get(name)) is not None}
    return {name: owner(p) for name, p in found.items()} if FSDP in sys.modules else found


def groups_of(module: nn.Module) -> int:
    return module.groups if isinstance(module, (*CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS)) else 1


def examples_in(module: nn.Module, x: Tensor) -> int:
    """The length of the leading dimension; 1 for an unbatched input."""
    return 1 if is_unbatched(module, x) else x.shape[0]


def is_unbatched(module: nn.Module, x: Tensor) -> bool:
    """Whether an input is one example without a leading dimension."""
    return x.dim() == _dimensions(module)


def leading_rows(module: nn.Module, error: Tensor) -> int:
    """The number of rows that each belong to one example: of a convolution its first dimension, else all positions."""
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return error.numel() // weight_of(module).numel()
    return rows_in(module, error) if isinstance(module, (nn.Linear, nn.Embedding)) else examples_in(module, error)


def rows_in(module: nn.Module, error: Tensor) -> int:
    """The number of pairs of an example and a position."""
    if isinstance(module, CONVOLUTIONS):
        return examples_in(module, error) * error.shape[-len(module.kernel_size) :].numel()
    if isinstance(module, TRANSPOSED_CONVOLUTIONS):
        return examples_in(module, error) * math.prod(_places(module, error))
    return error.numel() // error.shape[-1]


def lines_in(module: nn.Module, error: Tensor) -> int:
    """The number of rows, or of a convolution, of pairs of an example and a place in the first dimension."""
    if isinstance(module, TRANSPOSED_CONVOLUTIONS):
        return examples_in(module, error) * _places(module, error)[0]
    if isinstance(module, CONVOLUTIONS):
        return examples_in(module, error) * error.shape[-len(module.kernel_size)]
    return rows_in(module, error)


def _places(module: Any, error: Tensor) -> list[int]:
    """The size of a transposed convolution's input in each dimension, from the error at its output."""
    settings = zip(module.kernel_size, module.stride, module.padding, module.dilation, module.output_padding)
    sizes = error.shape[-len(module.kernel_size) :]
    return [
        (size + 2 * padding - dilation * (kernel - 1) - 1 - extra) // stride + 1
        for size, (kernel, stride, padding, dilation, extra) in zip(sizes, settings)
    ]


def weight_of(module: nn.Module) -> Tensor:
    """The weight of a layer that has one, for its shape and dtype."""
    weight: Any = module._parameters["weight"]
    return owner(weight) if FSDP in sys.modules else weight


def _dtype(module: nn.Module) -> torch.dtype:
    return compute_dtype(weight_of(module).dtype)


def _dimensions(module: nn.Module) -> int:
    """The number of dimensions of an unbatched input."""
    if isinstance(module, (*CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS)):
        return 1 + len(module.kernel_size)
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return len(module.normalized_shape)
    return 0 if isinstance(module, nn.Embedding) else 1


def inputs_of(module: nn.Module, x: Tensor, layout: RowLayout | None = None, every: int = 1) -> Tensor:
    """a, (groups, N, positions, in), for Linear and Conv: out = a W' + b at each position.

    Args:
        layout: of the rows of x; None if the first dimension is that of examples.
        every: k, to take every k-th line of a convolution (see `lines_in`), as if it were an example.
    """
    x = x.to(_dtype(module))
    if is_unbatched(module, x):
        x = x[None]
    if isinstance(module, TRANSPOSED_CONVOLUTIONS):
        return _arranged(channels_last(module, x, every), layout)
    if not isinstance(module, CONVOLUTIONS):
        return _arranged(x.reshape(1, -1, 1, x.shape[-1]), layout or RowLayout(1, len(x)))
    if padding_of(module) is not None:  # else it is padded already
        x = F.pad(x, module._reversed_padding_repeated_twice)
    return _arranged(windows(module, x, every), layout)


def errors_of(module: nn.Module, error: Tensor, layout: RowLayout | None = None, every: int = 1) -> Tensor:
    """e, (groups, N, positions, out): the derivative of the loss by the layer's output; `layout`, `every` as above.

    A transposed convolution adds a W' to its output around each position of its input, so its positions are those, and
    e is what the kernel covers of the error at the output, (groups, N, positions, out * kernel).
    """
    error = error.to(_dtype(module))
    if error.dim() == _dimensions(module):
        error = error[None]
    if isinstance(module, TRANSPOSED_CONVOLUTIONS):
        return _arranged(windows(module, uncropped(module, error), every), layout)
    if not isinstance(module, CONVOLUTIONS):
        return _arranged(error.reshape(1, -1, 1, error.shape[-1]), layout or RowLayout(1, len(error)))
    return _arranged(channels_last(module, error, every), layout)


def input_rows(module: nn.Module, x: Tensor, every: int = 1) -> Tensor:
    """a, (groups, rows, in), with a row for each example and position, or those of every k-th line of a convolution."""
    if isinstance(module, nn.Linear):
        return x.to(_dtype(module)).reshape(1, -1, x.shape[-1])
    return inputs_of(module, x, every=every).flatten(1, 2)


def error_rows(module: nn.Module, error: Tensor, every: int = 1) -> Tensor:
    """e, (groups, rows, out), as `input_rows`."""
    if isinstance(module, nn.Linear):
        return error.to(_dtype(module)).reshape(1, -1, error.shape[-1])
    return errors_of(module, error, every=every).flatten(1, 2)


def _arranged(rows: Tensor, layout: RowLayout | None) -> Tensor:
    """(groups, rows, positions, features) as (groups, examples, positions, features)."""
    return rows if layout is None or layout == (1, rows.shape[1]) else layout.arrange(rows, 1)


def lookups_of(
    module: nn.Embedding, x: Tensor, error: Tensor, layout: RowLayout | None = None
) -> tuple[Tensor, Tensor]:
    """Indices (examples, positions) and errors (N, positions, features), zero at the padding index."""
    arranged = layout or RowLayout(1, len(x) if x.dim() else 1)
    indices = arranged.arrange(x.reshape(-1, 1), 0)
    errors = error.to(_dtype(module)).reshape(-1, 1, error.shape[-1])
    errors = arranged.arrange(errors, 0) if layout else errors  # of several directions there is no layout
    errors = errors.reshape(len(indices), -1, indices.shape[1], error.shape[-1])
    if module.padding_idx is not None:
        errors = errors.masked_fill((indices == module.padding_idx)[:, None, :, None], 0.0)
    errors = errors.flatten(0, 1)
    return indices, errors


def per_example_gradients(
    module: nn.Module, x: Tensor, error: Tensor, layout: RowLayout | None = None
) -> Iterator[tuple[nn.Parameter, PerExampleGradients]]:
    """The per-example gradients of each parameter of the layer that requires gradients.

    Args:
        module: the layer.
        x: its input.
        error: of each example of x, or of several directions for each example, which are consecutive.
        layout: of the rows of x and error; None if the first dimension is that of examples.
    """
    trained = {name: p for name, p in own_parameters(module).items() if p.requires_grad}
    if not trained:
        return
    if is_lookup(module):
        yield trained["weight"], EmbeddingGradients(trained["weight"].shape, *lookups_of(module, x, error, layout))  # pyright: ignore
        return
    if is_matrix(module):
        errors = errors_of(module, error, layout)
        if "weight" in trained:
            inputs, shape = inputs_of(module, x, layout), trained["weight"].shape
            if is_transposed(module):
                directions = errors.shape[1] // inputs.shape[1]
                yield trained["weight"], OuterProducts(shape, errors, inputs.repeat_interleave(directions, 1))
            else:
                yield trained["weight"], OuterProducts(shape, inputs, errors)
        if "bias" in trained:
            bias = trained["bias"]
            if not joins_bias(module):  # at the positions of the output
                places = error.shape[-len(module.kernel_size) :].numel()  # pyright: ignore[reportArgumentType]
                errors = _arranged(error.to(_dtype(module)).reshape(1, -1, len(bias), places).mT, layout)
            sums = errors.squeeze(2) if errors.shape[2] == 1 else errors.sum(2)
            yield bias, StoredGradients(bias.shape, sums.transpose(0, 1).reshape(-1, *bias.shape))
        return
    x, error = (t.to(_dtype(module)) for t in (x, error))
    if len(error) > len(x):
        x = x.repeat_interleave(len(error) // len(x), 0)
    products = {"weight": error * x, "bias": error}
    layout = layout or RowLayout(1, examples_in(module, x))
    for name, p in trained.items():
        values = products[name]
        if not isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            values = values.reshape(-1, p.numel(), values.shape[2:].numel()).sum(2)
        yield p, StoredGradients(p.shape, layout.arrange(values.reshape(-1, 1, *p.shape), 0).sum(1))


def batch_first(call: LayerCall) -> LayerCall:
    """The same call with examples as the first dimension, and without a layout; it mixes examples if there is none."""
    layout = call.layout
    if layout is None or layout == MIXED:
        return call
    if layout == (1, examples_in(call.module, call.input)):
        return replace(call, layout=None)
    if not isinstance(call.module, (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)):
        return replace(call, layout=MIXED)
    trailing = 0 if isinstance(call.module, nn.Embedding) else _dimensions(call.module)
    x, error = (
        layout.arrange(t.reshape(-1, 1, *t.shape[t.dim() - n :]), 0)
        for t, n in ((call.input, trailing), (call.error, max(1, trailing)))
    )
    return replace(call, input=x, error=error, layout=None)


def gradients_of_calls(
    calls: Iterable[LayerCall], without: Collection[int] = ()
) -> dict[nn.Parameter, PerExampleGradients]:
    """The per-example gradients of the parameters of the called layers, summed over the calls.

    Those of layers that mix examples are left out.

    Args:
        calls: of one pass.
        without: ids of parameters to leave out.
    """
    calls = list(calls)
    without = {*without, *mixed_parameters(calls)}
    found: dict[nn.Parameter, list[PerExampleGradients]] = {}
    for call in calls:
        if any(id(p) not in without for p in own_parameters(call.module).values()):
            for p, columns in per_example_gradients(call.module, call.input, call.error, call.layout):
                found.setdefault(p, []).append(columns)
    return {p: summed(parts) for p, parts in found.items() if id(p) not in without}


def mixed_parameters(calls: Iterable[LayerCall]) -> set[int]:
    """The ids of the parameters of layers that mix examples."""
    return {id(p) for call in calls if call.layout == MIXED for p in own_parameters(call.module).values()}


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
        return is_lookup(self.module)

    @cached_property
    def transposed(self) -> bool:
        """Whether the weight is (in, out). Matrices of the layer are (groups, out, in) nevertheless."""
        return is_transposed(self.module)

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """(groups, out, in) of [W b]; for an Embedding (1, rows, features)."""
        groups, rows = groups_of(self.module), len(self.owner)
        size = self.weight.numel() // rows if self.weight is not None else 0
        fan_out, fan_in = (
            (size, rows // groups) if self.transposed and self.weight is not None else (rows // groups, size)
        )
        return groups, fan_out, fan_in + (self.bias is not None)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The number of inputs and of errors of a row, in each group: the sizes of the second moments of both sides."""
        _, fan_out, fan_in = self.shape
        return {"input": fan_out, "error": fan_in} if self.lookup else {"input": fan_in, "error": fan_out}

    @cached_property
    def sharded(self) -> bool:
        """Whether each process has a part of a parameter."""
        return any(map(is_shard, self.members))

    def matrix(self) -> Tensor:
        """The gradient of [W b], (groups, out, in), with zeros for a parameter without a gradient."""
        return self.join(self.gradients())

    def gradients(self) -> list[Tensor]:
        """The gradients of weight and bias, or the parts of them that this process has."""
        dtype = compute_dtype(self.owner.dtype)
        if not self.sharded:
            return [(torch.zeros_like(p) if p.grad is None else p.grad).to(dtype) for p in self.members]
        return [(torch.zeros_like(local(p)) if p.grad is None else gradient_of(p)).to(dtype) for p in self.members]

    def values(self) -> Tensor:
        """A copy of [W b], (groups, out, in)."""
        dtype = compute_dtype(self.owner.dtype)
        return self.join([p.detach().to(dtype, copy=True) for p in self.members])

    def split(self, matrix: Tensor) -> dict[Tensor, Tensor]:
        """Splits a matrix (groups, out, in) into a tensor for each parameter that has a gradient."""
        return {p: part for p, part in zip(self.members, self.parted(matrix)) if p.grad is not None}

    def join(self, values: Sequence[Tensor]) -> Tensor:
        """Tensors in the shapes of the members as one matrix (groups, out, in)."""
        groups, fan_out, _ = self.shape
        parts = [
            part.reshape(groups, -1, fan_out).mT if self._is_turned(p) else part.reshape(groups, fan_out, -1)
            for p, part in zip(self.members, values)
        ]
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def parted(self, matrix: Tensor) -> list[Tensor]:
        """The inverse of `join`."""
        groups, fan_out, _ = self.shape
        pieces = matrix.split([p.numel() // (groups * fan_out) for p in self.members], -1)
        turned = [piece.mT if self._is_turned(p) else piece for p, piece in zip(self.members, pieces)]
        return [piece.reshape(p.shape) for p, piece in zip(self.members, turned)]

    def _is_turned(self, p: Tensor) -> bool:
        return self.transposed and p is self.weight
