"""Whether `.grad` is a multiple of the sum of the observed examples' gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bayesgrad.layers.per_example import PerExampleGradients, floating_tensor
from bayesgrad.shards import gradient_of

SLACK = 8  # tolerance in units of the rounding error


def kind(columns: PerExampleGradients) -> torch.dtype:
    """The dtype of per-example gradients."""
    return next(t.dtype for t in columns.tensors().values() if t.is_floating_point())


def size_bound(columns: PerExampleGradients) -> Tensor:
    """A bound of the norm of the gradients."""
    return torch.stack([part.norm() for part in columns.tensors().values() if part.is_floating_point()]).prod()


def dot(a: Mapping[Tensor, Tensor], b: Mapping[Tensor, Tensor]) -> Tensor:
    """The inner product of tensors by parameter, of those that b has; float64 on the CPU."""
    return torch.stack([torch.dot(a[p].flatten().double(), b[p].flatten().double()).cpu() for p in b]).sum()


def common_factor(columns: Mapping[Tensor, PerExampleGradients]) -> float | None:
    """c, if every gradient is c times the sum of the per-example gradients up to rounding; else None."""
    if any(gradient_of(p).dtype != kind(own) for p, own in columns.items()):
        return None
    sums = {p: own.combine(torch.ones(own.count).to(floating_tensor(own))) for p, own in columns.items()}
    square = dot(sums, sums)
    factor = float(dot({p: gradient_of(p) for p in sums}, sums) / square) if square > 0 else 1.0
    for p, own in columns.items():
        allowed = SLACK * torch.finfo(kind(own)).eps * abs(factor) * size_bound(own)
        if not bool((gradient_of(p) - factor * sums[p]).abs().max() <= allowed):
            return None
    return factor
