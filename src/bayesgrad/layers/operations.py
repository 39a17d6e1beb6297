"""The operations of the layers that are known: output, gradient of the input, gradients of weight and bias.

An operation is a tuple of constants: its kind and the settings of the layer, as torch.compile wants them. `operation`
reads it from a module, and `prepare` computes the tensor that the weight is applied to: a convolution's padded input,
or the normalised input of a normalisation layer, whose weight and bias are then an elementwise operation of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _BatchNorm)
LINEAR, TRANSPOSED_LINEAR, RECURRENT, CONVOLUTION, EMBEDDING, AFFINE = (
    "linear", "transposed linear", "projection of a recurrent layer", "convolution", "embedding", "affine"
)  # fmt: skip
NARROW = 8  # outputs for each input of a recurrent layer, from which on the other order of a product is faster
Operation = tuple[Any, ...]


def operation(module: nn.Module) -> Operation:
    """The operation of a layer that is known."""
    if isinstance(module, nn.Linear):
        return (LINEAR,)
    if is_transposed_linear(module):
        return (TRANSPOSED_LINEAR,)
    if isinstance(module, CONVOLUTIONS):
        padding = padding_of(module) or (0,) * len(module.kernel_size)
        return CONVOLUTION, module.stride, padding, module.dilation, module.groups, None
    if isinstance(module, TRANSPOSED_CONVOLUTIONS):
        return CONVOLUTION, module.stride, module.padding, module.dilation, module.groups, module.output_padding
    if isinstance(module, nn.Embedding):
        return EMBEDDING, module.padding_idx
    return AFFINE, not isinstance(module, (nn.LayerNorm, nn.RMSNorm))  # whether the weight is one for each channel


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether this is the Conv1D of transformers: a Linear layer whose weight is (in, out)."""
    kind = type(module)
    return (kind.__module__, kind.__qualname__) == ("transformers.pytorch_utils", "Conv1D")


def padding_of(module: nn.Module) -> tuple[int, ...] | None:
    """The zeros that a convolution adds at both ends of each dimension; None if `prepare` pads the input."""
    twice: list[int] = module._reversed_padding_repeated_twice  # pyright: ignore[reportAssignmentType]
    if module.padding_mode != "zeros" or twice[::2] != twice[1::2]:
        return None
    return tuple(twice[::-2])


def prepare(module: nn.Module, x: Tensor) -> Tensor:
    """The tensor that the weight is applied to."""
    if isinstance(module, CONVOLUTIONS) and padding_of(module) is None:
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        return F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, eps=module.eps)
    if isinstance(module, nn.RMSNorm):
        return F.rms_norm(x, module.normalized_shape, eps=module.eps)
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(x, module.num_groups, eps=module.eps)
    return _batch_normalised(module, x) if isinstance(module, _BatchNorm) else x


def _batch_normalised(module: _BatchNorm, x: Tensor) -> Tensor:
    """Batch normalisation without weight and bias; updates the running statistics as the module does."""
    module._check_input_dim(x)
    tracks = module.training and module.track_running_stats
    share = module.momentum
    if tracks and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        share = 1 / float(module.num_batches_tracked) if share is None else share
    by_batch = module.training or (module.running_mean is None and module.running_var is None)
    mean, variance = (module.running_mean, module.running_var) if tracks or not module.training else (None, None)
    return F.batch_norm(x, mean, variance, training=by_batch, momentum=share or 0.0, eps=module.eps)


def run(op: Operation, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The output."""
    kind = op[0]
    if kind == LINEAR:
        return F.linear(x, weight.flatten(1), bias)
    if kind == TRANSPOSED_LINEAR:
        return F.linear(x, weight.T, bias)
    if kind == CONVOLUTION:
        _, stride, padding, dilation, groups, output_padding = op
        if output_padding is not None:
            convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(stride) - 1]
            return convolve(x, weight, bias, stride, padding, output_padding, groups, dilation)
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(stride) - 1]
        return convolve(x, weight, bias, stride, padding, dilation, groups)
    if kind == EMBEDDING:
        return F.embedding(x, weight, op[1])
    scaled = x * _broadcast(op, weight, x)
    return scaled if bias is None else scaled + _broadcast(op, bias, x)


def input_gradient(op: Operation, error: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The derivative of a loss by the input, given that by the output."""
    if op[0] == LINEAR:
        return error @ weight.flatten(1)
    if op[0] == TRANSPOSED_LINEAR:
        return error @ weight.T
    if op[0] == CONVOLUTION:
        return _convolution_backward(op, error, x, weight, (True, False, False))[0]
    return error * _broadcast(op, weight, x)


def parameter_gradients(
    op: Operation, error: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The derivatives of a loss by weight and bias where they are needed, given that by the output."""
    kind, (needs_weight, needs_bias) = op[0], needs
    if kind in (LINEAR, TRANSPOSED_LINEAR, RECURRENT):
        rows = error.reshape(-1, error.shape[-1])
        by_weight = None
        if needs_weight:
            inputs = x.reshape(-1, x.shape[-1])
            if kind == TRANSPOSED_LINEAR:
                by_weight = inputs.T @ rows
            elif kind == RECURRENT and rows.shape[1] >= NARROW * inputs.shape[1]:
                by_weight = (inputs.T @ rows).T.contiguous()
            else:
                by_weight = (rows.T @ inputs).view(weight.shape)
        return by_weight, rows.sum(0) if needs_bias else None
    if kind == CONVOLUTION:
        found = _convolution_backward(op, error, x, weight, (False, needs_weight, needs_bias))
        return found[1], found[2]
    if kind == EMBEDDING:
        padding = -1 if op[1] is None else op[1]
        return torch.ops.aten.embedding_dense_backward(error, x, len(weight), padding, False), None
    product = error * x
    by_weight = _reduce(op, product, weight.shape) if needs_weight else None
    return by_weight, _reduce(op, error, weight.shape) if needs_bias else None


def _convolution_backward(op: Operation, error: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]) -> Any:
    _, stride, padding, dilation, groups, output_padding = op
    batched = x.dim() == weight.dim()
    if not batched:
        error, x = error[None], x[None]
    transposed, extra = output_padding is not None, output_padding or [0] * len(stride)
    sizes = [error.shape[1]]
    found = torch.ops.aten.convolution_backward(
        error, x, weight, sizes, stride, padding, dilation, transposed, extra, groups, mask
    )
    return found if batched or found[0] is None else (found[0][0], *found[1:])


def _broadcast(op: Operation, values: Tensor, x: Tensor) -> Tensor:
    """Weight or bias of a normalisation layer in a shape that multiplies its input."""
    return values.view(-1, *[1] * (x.dim() - 2)) if op[1] else values


def _reduce(op: Operation, values: Tensor, shape: torch.Size) -> Tensor:
    """The sum over all dimensions but those of the parameter."""
    if op[1]:
        return values.sum([d for d in range(values.dim()) if d != 1])
    return values.reshape(-1, *shape).sum(0)
