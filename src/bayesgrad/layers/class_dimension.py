"""Which dimension of outputs has the classes, from the autograd graph: that of a softmax, or of the last layer.

The graph is followed backwards through views, permutations and elementwise operations, as far as it is known where each
of them puts the dimensions of its input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from bayesgrad.layers.operations import AFFINE, CONVOLUTION

STEPS = 16  # nodes of the graph that are followed
SIZES_CHANGE = ("Slice", "Cat", "ConstantPad", "Upsample", "MaxPool", "AvgPool", "AdaptiveAvgPool")  # not the order
RESHAPES = ("View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze")
PRODUCTS = ("Addmm", "Mm", "Embedding")  # (rows, in) x (in, out)
OPAQUE = ("Bmm", "Baddbmm", "Linalg", "CompiledFunction")
Dims = tuple[int | None, ...]  # for each dimension of a tensor, that of the tensor from which the graph is followed


def softmax_dim(outputs: Tensor, loss: Any) -> int | None:
    """The dimension of the outputs over which the loss has a softmax; None if there is none, or it is not found."""
    node = getattr(loss, "grad_fn", None)
    for _ in range(STEPS):
        if node is None or not node.next_functions:
            return None
        (before, index), *_ = node.next_functions
        if before is not None and node.name().startswith("LogSoftmax"):
            shape = _shape(before, index)
            dim = _dimension(node._saved_dim, len(shape))
            found = (dims for there, dims in _before(before, shape) if there is outputs.grad_fn)
            dims = next(found, ())
            return dims.index(dim) if dim in dims else None
        node = before
    return None


def layer_dim(outputs: Tensor) -> int | None:
    """The dimension of the outputs that a softmax or the features of the last layer have; None if it is not known."""
    if outputs.grad_fn is None:
        return None
    for node, dims in _before(outputs.grad_fn, tuple(outputs.shape)):
        name, kind = node.name(), getattr(node, "op", (None,))[0]
        if "LogSoftmax" in name or name.startswith("Softmax"):
            return dims[_dimension(node._saved_dim, len(dims))]
        if kind == CONVOLUTION or name.startswith(("Convolution", "SlowConv", "ThnnConv")):
            return dims[1] if len(dims) > 2 else None
        if kind not in (None, AFFINE) or name.startswith(PRODUCTS):
            return dims[-1]
    return None


def _before(node: Any, shape: Sequence[int]) -> Iterator[tuple[Any, Dims]]:
    """A node and those before it, each with the dimensions of its result."""
    dims: Dims = tuple(range(len(shape)))
    for _ in range(STEPS):
        yield node, dims
        name = node.name()
        if name.startswith(OPAQUE):
            return
        inputs = [(n, _shape(n, i)) for n, i in node.next_functions if n is not None and not hasattr(n, "variable")]
        if name.startswith("Transpose"):
            one, other = (_dimension(d, len(dims)) for d in (node._saved_dim0, node._saved_dim1))
            order = list(range(len(dims)))
            order[one], order[other] = other, one
        elif name.startswith("Permute"):
            order = [_dimension(d, len(dims)) for d in node._saved_dims]
        else:
            order = None
        if order is not None:
            dims = tuple(dims[order.index(k)] for k in range(len(dims)))
        elif name.startswith(RESHAPES) and inputs:
            dims = _reshaped(dims, shape, inputs[0][1])
        elif name.startswith(SIZES_CHANGE):
            inputs = [(n, s) for n, s in inputs if len(s) == len(shape)]
        else:
            inputs = [(n, s) for n, s in inputs if s == tuple(shape)]
        if not inputs:
            return
        node, shape = inputs[0]


def _reshaped(dims: Dims, after: Sequence[int], before: Sequence[int]) -> Dims:
    """The dimensions before a reshape: those at both ends whose sizes it leaves as they are."""
    most = min(len(before), len(after))
    first = next((k for k in range(most) if before[k] != after[k]), most)
    last = next((k for k in range(most - first) if before[-1 - k] != after[-1 - k]), most - first)
    return (*dims[:first], *[None] * (len(before) - first - last), *dims[len(dims) - last :])


def _shape(node: Any, index: int) -> tuple[int, ...]:
    return tuple(node._input_metadata[index].shape)


def _dimension(number: int, dims: int) -> int:
    """A dimension that a node has saved, where negative ones are unsigned."""
    return (number - (1 << 64) if number >> 63 else number) % dims
