"""What `observe` is given of the forward pass of any model: tensors, dicts, ModelOutputs and tuples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

IGNORED = -100  # the label of no loss, as in torch.nn.functional.cross_entropy
TOLERANCE = 1e-3  # relative, between the loss of a model and the cross entropy of its logits and labels


def observation(model: nn.Module) -> Callable[[tuple, dict, Any], Mapping[str, Any]]:
    """A function that reads the arguments of `BeliefOptimizer.observe` from forward passes of a model.

    Which logits of a sequence have a loss follows from the labels. Language models predict the next token, others the
    token at its own position; the loss shows which, in the first pass.
    """
    shifts: list[bool] = []

    def observed(args: tuple, kwargs: dict, outputs: Any) -> Mapping[str, Any]:
        predicted, loss = predictions(outputs)
        if predicted is None:
            return {}  # the loss alone, as of LightningModule.training_step: step() says what is missing
        found = {"outputs": predicted, **({"loss": loss} if loss is not None else {})}
        if predicted.dim() < 3:
            return found
        labels: Any = kwargs.get("labels")
        shape = labels.shape if isinstance(labels, Tensor) and not labels.is_floating_point() else None
        if shape == predicted.shape[:-1]:
            if not shifts:
                shifts.append(_predicts_next(predicted, labels, loss, kwargs.get("num_items_in_batch")))
            counted = labels != IGNORED
            return {**found, "weights": pad(counted[:, 1:], (0, 1)) if shifts[0] else counted}
        if shape == predicted.shape[:1] + predicted.shape[2:]:
            return {**found, "class_dim": 1, "weights": labels != IGNORED}
        raise ValueError(
            f"outputs of shape {tuple(predicted.shape)} have several losses for each example, and without labels of "
            "the same leading shape it is not known which: pass labels= to the model, or observed= to attach()."
        )

    return observed


def has_several_labels(kwargs: Mapping[str, Any]) -> bool:
    """Whether a model was given several labels for each example, some of which may have no loss."""
    labels = kwargs.get("labels")
    return isinstance(labels, Tensor) and labels.dim() > 1 and not labels.is_floating_point()


def predictions(outputs: Any) -> tuple[Tensor | None, Tensor | None]:
    """The logits (or predicted values) and the loss among the outputs of a model; None for what is not there."""
    if isinstance(outputs, Mapping):
        rest = {k: v for k, v in outputs.items() if k != "loss" and isinstance(v, Tensor) and v.dim()}
        if "logits" not in rest and len(rest) > 1:
            raise ValueError(f"outputs {sorted(rest)} have no 'logits': pass observed= to attach().")
        found, loss = rest.get("logits", next(iter(rest.values()), None)), outputs.get("loss")
    elif isinstance(outputs, (tuple, list)):
        scalars = [v for v in outputs[:1] if isinstance(v, Tensor) and not v.dim()]  # the loss comes first
        rest = [v for v in outputs if isinstance(v, Tensor) and v.dim()]
        found, loss = (rest or [None])[0], (scalars or [None])[0]
    else:
        found, loss = outputs if isinstance(outputs, Tensor) and outputs.dim() else None, None
    return found, loss if isinstance(loss, Tensor) else None


def _predicts_next(logits: Tensor, labels: Tensor, loss: Tensor | None, items: Any) -> bool:
    """Whether logits predict the next label, from the loss: a sum over tokens, divided by their number or `items`."""
    if loss is None:
        raise ValueError(
            "the model returned no loss, which would show whether logits predict the next token or that at their own "
            "position: pass observed= to attach()."
        )
    found = {}
    with torch.no_grad():
        for shifted in (False, True):
            first, second = (logits[:, :-1], labels[:, 1:]) if shifted else (logits, labels)
            total = cross_entropy(first.flatten(0, 1).double(), second.flatten(), reduction="sum", ignore_index=IGNORED)
            count = float((second != IGNORED).sum()) if items is None else float(items)
            found[shifted] = abs(float(total) / count - float(loss)) / abs(float(loss)) if count else math.inf
    closer = min(found, key=lambda shifted: found[shifted])
    if not found[closer] < TOLERANCE:
        raise ValueError(
            f"the loss of the model is not the cross entropy of its logits of shape {tuple(logits.shape)} and its "
            "labels, so it is not known which of them have a loss: pass observed= to attach()."
        )
    return closer
