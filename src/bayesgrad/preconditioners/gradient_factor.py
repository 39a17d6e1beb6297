"""Whether `.grad` is a multiple of the sum of the observed examples' gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bayesgrad.layers.per_example import PerExampleGradients, floating_tensor
from bayesgrad.shards import any_process, gradient_of, local, part_of, summed

SLACK = 8  # tolerance in units of the rounding error


def kind(columns: PerExampleGradients) -> torch.dtype:
    """The dtype of per-example gradients."""
    return next(t.dtype for t in columns.tensors().values() if t.is_floating_point())


def size_bound(columns: PerExampleGradients) -> Tensor:
    """A bound of the norm of the gradients."""
    return torch.stack([part.norm() for part in columns.tensors().values() if part.is_floating_point()]).prod()


def dot(a: Mapping[Tensor, Tensor], b: Mapping[Tensor, Tensor]) -> Tensor:
    """The inner product of tensors, or of this process's parts, by parameter of b; float64 on the CPU."""
    products = [torch.dot(local(a[p]).flatten().double(), local(b[p]).flatten().double()) for p in b]
    return torch.stack([product.cpu() for product in summed(products, list(b))]).sum()


def common_factor(columns: Mapping[Tensor, PerExampleGradients]) -> float | None:
    """c, if every gradient is c times the sum of the per-example gradients up to rounding; else None."""
    if any(gradient_of(p).dtype != kind(own) for p, own in columns.items()):
        return None
    sums = {p: part_of(own.combine(torch.ones(own.count).to(floating_tensor(own))), p) for p, own in columns.items()}
    square = dot(sums, sums)
    factor = float(dot({p: gradient_of(p) for p in sums}, sums) / square) if square > 0 else 1.0
    for p, own in columns.items():
        allowed = SLACK * torch.finfo(kind(own)).eps * abs(factor) * size_bound(own)
        if bool(any_process(~((gradient_of(p) - factor * sums[p]).abs() <= allowed).all(), [p])):
            return None
    return factor
