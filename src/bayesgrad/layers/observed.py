"""Outputs that are observed: the dimension of their classes, and which of their losses count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesgrad.layers.call import COMPILED, LayerCall
from bayesgrad.layers.class_dimension import layer_dim, softmax_dim
from bayesgrad.likelihoods import Likelihood, classes_second, named

if TYPE_CHECKING:
    from bayesgrad.layers.recorder import LayerRecorder


def classes_last(outputs: Tensor, class_dim: int | None) -> Tensor:
    """The outputs with classes in the last dimension.

    Args:
        class_dim: the dimension of classes; None for the last one.
    """
    return outputs if class_dim is None else outputs.movedim(class_dim, -1)


def check_class_dim(outputs: Tensor, likelihood: Any, loss: Any, *given: Any) -> None:
    """Raises ValueError if it is not known that classes are in the last dimension.

    Args:
        likelihood: an option of the optimizer; only some have classes.
        given: labels and weights. Where their shape shows the dimension, it is compared later.
    """
    shape, other = outputs.shape[:-1], outputs.shape[:1] + outputs.shape[2:]
    shown = shape != other and any(isinstance(t, Tensor) and t.shape in (shape, other) for t in given)
    if shown or outputs.dim() < 3 or not named(likelihood).has_classes:
        return
    known, why = softmax_dim(outputs, loss), "the loss has"
    if known is None:
        known, why = layer_dim(outputs), "the last layer has"
    if known == 1:
        raise ValueError(classes_second(outputs, why))
    if known != outputs.dim() - 1:
        raise ValueError(
            f"it is not known which dimension of outputs of shape {tuple(outputs.shape)} is that of classes: pass "
            "class_dim=-1, or class_dim=1 for outputs (N, C, ...)."
        )


def known_class_dim(outputs: Tensor, class_dim: int | None, loss: Any, labels: Any) -> int | None:
    """The dimension of classes if it is given, or if loss or labels show it; None if it is not known."""
    if class_dim is not None or outputs.dim() < 3:
        return class_dim
    fits = isinstance(labels, Tensor) and outputs.shape[:-1] != labels.shape == outputs.shape[:1] + outputs.shape[2:]
    return 1 if fits else softmax_dim(outputs, loss)


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


class ObservedShares:
    """The part of the losses of each forward pass that counts; passes of compiled models have one entry."""

    def __init__(self) -> None:
        self._shares: dict[int, Tensor] = {}
        self._numbers: dict[int, float] = {}

    def note(self, recorder: LayerRecorder, likelihood: Any, outputs: Any, labels: Tensor | None, weights: Any) -> None:
        """Notes which losses of the pass of these outputs count, if not all of them do.

        Outputs of several passes that were concatenated have one part, which is that of each pass.
        """
        each = loss_weights(named(likelihood), outputs, labels, weights) if isinstance(outputs, Tensor) else None
        if each is not None:
            self._shares |= dict.fromkeys((*recorder.ids_of(outputs), COMPILED), each.mean())
            self._numbers = {}

    def of(self, call: LayerCall) -> Tensor | None:
        """The part for the pass of a call; None for all losses."""
        return self._shares.get(min(call.forward_id, COMPILED))

    def number_of(self, call: LayerCall) -> float:
        """The part for the pass of a call, which the host reads once for each pass."""
        part, key = self.of(call), min(call.forward_id, COMPILED)
        if part is not None and key not in self._numbers:
            self._numbers[key] = float(part)
        return 1.0 if part is None else self._numbers[key]


def _like(weights: Tensor, outputs: Tensor) -> Tensor:
    return weights.to(outputs).detach()[(..., *[None] * (outputs.dim() - weights.dim()))]
