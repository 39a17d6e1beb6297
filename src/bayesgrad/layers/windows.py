"""Rows of convolutions: what a kernel covers at each position, and the channels there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def windows(module: Any, x: Tensor, every: int) -> Tensor:
    """What the kernel covers at each position, (groups, N, positions, channels * kernel), of x (N, channels, *size)."""
    rank = len(module.kernel_size)
    for d, (kernel, stride, dilation) in enumerate(zip(module.kernel_size, module.stride, module.dilation)):
        x = x.unfold(2 + d, (kernel - 1) * dilation + 1, stride)[..., ::dilation]
    x = _lines(x, every).unflatten(1, (module.groups, -1))  # (N, groups, channels, *places, *kernel)
    order = (1, 0, *range(3, 3 + rank), 2, *range(3 + rank, 3 + 2 * rank))
    x = x.permute(order)
    return x.reshape(*x.shape[:2], x.shape[2 : 2 + rank].numel(), -1)


def uncropped(module: Any, error: Tensor) -> Tensor:
    """The error at the whole area that kernels cover: with zeros for `padding`, and without `output_padding`."""
    ends = [(p, p - extra) for p, extra in zip(module.padding, module.output_padding)]
    return F.pad(error, [n for pair in reversed(ends) for n in pair])


def channels_last(module: Any, x: Tensor, every: int) -> Tensor:
    """(groups, N, positions, channels), of x (N, channels, *size)."""
    return _lines(x, every).flatten(2).mT.unflatten(2, (module.groups, -1)).permute(2, 0, 1, 3)


def _lines(x: Tensor, every: int) -> Tensor:
    """Every k-th line of x (N, channels, *size), as (lines, channels, 1, *size[1:])."""
    if every == 1:
        return x
    chosen = torch.arange(0, x.shape[0] * x.shape[2], every, device=x.device)
    return x.transpose(1, 2)[chosen // x.shape[2], chosen % x.shape[2]].unsqueeze(2)
