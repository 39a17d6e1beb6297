"""Per-example gradients of one parameter from several uses, or from several batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch

from bayesgrad.layers.per_example import EmbeddingGradients, OuterProducts, PerExampleGradients, StoredGradients


def summed(parts: Sequence[PerExampleGradients]) -> PerExampleGradients:
    """The per-example gradients of a parameter that is used several times: the sum over its uses."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if len(counts := sorted({part.count for part in parts})) > 1:
        raise ValueError(
            f"a parameter of shape {tuple(first.shape)} was used with {' and '.join(map(str, counts))} examples in one "
            "forward pass, so its per-example gradients are not known: use the same number in all calls of its layers."
        )
    if any(isinstance(part, OuterProducts) for part in parts):
        parts = [part.as_outer() if isinstance(part, EmbeddingGradients) else part for part in parts]
    parts = _with_equal_directions(parts)
    if not isinstance(parts[0], StoredGradients) and _alike(parts, positions=True):
        return _joined(parts, 1 + parts[0].example_dim)  # a sum over more positions
    return StoredGradients(first.shape, torch.stack([part.rows() for part in parts]).sum(0))


def concatenated(parts: Sequence[PerExampleGradients]) -> PerExampleGradients:
    """The per-example gradients of several batches, concatenated along the examples."""
    parts = _with_equal_directions(parts)
    first = parts[0]
    if len(parts) == 1:
        return first
    if not _alike(parts):
        raise ValueError(
            "batches that were observed together must have the same shape but for the number of examples: "
            "observe batches of one length, or call step() in between."
        )
    return _joined(parts, first.example_dim)


def _with_equal_directions(parts: Sequence[PerExampleGradients]) -> Sequence[PerExampleGradients]:
    """The same, with inputs for each gradient if examples have different numbers of gradients."""
    return [part.repeated() for part in parts] if len({part.directions for part in parts}) > 1 else parts


def _joined(parts: Sequence[PerExampleGradients], dim: int) -> PerExampleGradients:
    own = [field.name for field in fields(parts[0]) if field.name != "shape"]
    return type(parts[0])(parts[0].shape, *(torch.cat([getattr(p, name) for p in parts], dim) for name in own))


def _alike(parts: Sequence[PerExampleGradients], positions: bool = False) -> bool:
    """Whether all are of one class, with tensors of one shape but for examples, and for `positions`."""
    dims = {parts[0].example_dim, 1 + parts[0].example_dim} if positions else {parts[0].example_dim}
    shapes = {
        tuple(tuple(size for dim, size in enumerate(t.shape) if dim not in dims) for t in part.tensors().values())
        for part in parts
    }
    return len({type(part) for part in parts}) == 1 and len(shapes) == 1
