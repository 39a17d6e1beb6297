"""Norms from elementary operations, whose higher derivatives are right.

In torch 2.13 `layer_norm` and `instance_norm` have wrong second derivatives if one of the two is in forward mode, and
wrong third derivatives in any mode; the statistics of the norm count as constants there. `group_norm` lacks some.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from bayesgrad.kernels import compute_dtype


class ElementaryNorms(TorchFunctionMode):
    """Within the context layer, group and instance norms are evaluated from means and squares.

    They do not change running statistics.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NORMS.get(func, func)(*args, **(kwargs or {}))


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    return _affine(_standardised(input, tuple(range(-len(normalized_shape), 0)), eps), weight, bias)


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    groups = input.reshape(len(input), num_groups, -1)
    return _affine(_standardised(groups, (-1,), eps).reshape(input.shape), weight, bias, input.dim() - 2)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats:
        return functional.instance_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    return _affine(_standardised(input, tuple(range(2, input.dim())), eps), weight, bias, input.dim() - 2)


NORMS: dict[Any, Any] = {  # by the function that they replace
    functional.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    functional.group_norm: _group_norm,
    torch.group_norm: _group_norm,
    functional.instance_norm: _instance_norm,
}


def _standardised(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    """(x - mean)/(variance + eps)^1/2 over these dimensions."""
    wide = x.to(compute_dtype(x.dtype))
    centered = wide - wide.mean(dims, keepdim=True)
    return (centered / (centered.square().mean(dims, keepdim=True) + eps).sqrt()).to(x.dtype)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, trailing: int = 0) -> Tensor:
    """Times weight plus bias, which are followed by so many dimensions of x."""
    for given, join in ((weight, torch.mul), (bias, torch.add)):
        x = x if given is None else join(x, given.reshape(*given.shape, *[1] * trailing))
    return x
