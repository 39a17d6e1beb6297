"""Outputs that are observed: the dimension of their classes, and which of their losses count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bayesgrad.likelihoods import Likelihood, classes_second

STEPS = 8  # from a loss to the softmax of its logits in the autograd graph


def classes_last(outputs: Tensor, class_dim: int | None, loss: Any) -> Tensor:
    """The outputs with classes in the last dimension.

    Args:
        class_dim: the dimension of classes; None for the last one.
        loss: of these outputs, if it is known.

    Raises:
        ValueError: class_dim is None, and the loss has classes in dimension 1.
    """
    if class_dim is not None:
        return outputs.movedim(class_dim, -1)
    if _softmax_over_second(outputs, loss):
        raise ValueError(classes_second(outputs, "the loss has"))
    return outputs


def known_class_dim(outputs: Tensor, class_dim: int | None, loss: Any, labels: Any) -> int | None:
    """The dimension of classes if it is given, or 1 if loss or labels show it; None if it is not known."""
    if class_dim is not None or outputs.dim() < 3:
        return class_dim
    fits = isinstance(labels, Tensor) and outputs.shape[:-1] != labels.shape == outputs.shape[:1] + outputs.shape[2:]
    return 1 if fits or _softmax_over_second(outputs, loss) else None


def _softmax_over_second(outputs: Tensor, loss: Any) -> bool:
    """Whether the loss has a softmax over dimension 1 of outputs with more than two dimensions."""
    node = getattr(loss, "grad_fn", None) if outputs.dim() > 2 else None
    for _ in range(STEPS):
        if node is None or not node.next_functions:
            break
        (before, _), *_ = node.next_functions
        if node.name().startswith("LogSoftmax") and before is outputs.grad_fn and node._saved_dim == 1:
            return True
        node = before
    return False


def residual(kind: Likelihood, outputs: Tensor, labels: Tensor) -> Tensor:
    """The derivative of each loss by the outputs, zero for labels that are ignored."""
    kept = kind.mask(labels) if isinstance(labels, Tensor) else None
    if kept is None:
        return kind.residual(outputs, labels)
    return kind.residual(outputs, torch.where(kept, labels, 0)) * kept[..., None]


def loss_weights(kind: Likelihood, outputs: Tensor, labels: Tensor | None, weights: Any) -> Tensor | None:
    """How often each loss counts, in a shape that multiplies the outputs; None if all of them count once.

    Args:
        labels: those that are ignored do not count.
        weights: one for each loss, in the shape of leading dimensions of the outputs: all but the classes, if there are
            classes.
    """
    kept = kind.mask(labels)
    if weights is None:
        return None if kept is None else _like(kept, outputs)
    shape = outputs.shape[:-1] if kind.has_classes else outputs.shape[: max(1, getattr(weights, "ndim", 1))]
    if not isinstance(weights, Tensor) or weights.shape != shape:
        given = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(
            f"weights must be a tensor of shape {tuple(shape)}, with one entry for each loss, got {given}."
        )
    return _like(weights if kept is None else weights * kept, outputs)


def _like(weights: Tensor, outputs: Tensor) -> Tensor:
    return weights.to(outputs).detach()[(..., *[None] * (outputs.dim() - weights.dim()))]
