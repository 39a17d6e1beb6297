"""The closure of `step(closure)`, which re-evaluates the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from bayesgrad.parts import Host, Needs, Part
from bayesgrad.sources.weight_sampling import mark, same


class Sampling(Host, Protocol):
    """What a closure needs of the optimizer."""

    attachment: Any

    @property
    def needs(self) -> Needs: ...

    def zero_grad(self) -> None: ...

    def share(self) -> None: ...

    def sampled(self) -> AbstractContextManager[None]: ...


def evaluate(optimizer: Sampling, parts: Sequence[Part], closure: Callable[[], Any]) -> Any:
    """Calls the closure; if gradients are computed at sampled weights, once for each draw.

    Gradients that exist are not discarded: as in torch.optim, the closure adds to them, or sets them to zero itself.
    """
    if optimizer.needs.draws:
        loss = _average_draws(optimizer, parts, closure)
    else:
        with torch.enable_grad():
            loss = closure()
        optimizer.share()
    if loss is not None:
        for part in parts:
            part.note_loss(loss)
    return loss


def _average_draws(optimizer: Sampling, parts: Sequence[Part], closure: Callable[[], Any]) -> Any:
    """Sets gradients and what parts have collected to their mean over draws; returns the mean of the losses.

    A closure that computes no gradients is not a draw. Trainers pass one after the backward passes of a step, whose
    gradients are then used as they are.

    Raises:
        RuntimeError: there are no gradients after the closure.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    samples, draws = int(optimizer.param_groups[0]["samples"]), optimizer.draws
    for part in parts:
        part.begin_draws()
    before = [mark(p) for p in params]
    drawn = optimizer.sampled if optimizer.attachment is None else optimizer.attachment.passes
    losses: list[Any] = []
    totals: dict[Tensor, Tensor] = {}
    for k in range(samples):
        if k:
            optimizer.zero_grad()  # the totals have what the last draw gave
        with torch.enable_grad(), drawn():
            losses.append(closure())
        if any(p.requires_grad for p in params) and all(p.grad is None for p in params):
            raise RuntimeError(
                f"the closure of {type(optimizer).__name__}.step() left no gradients: it must call loss.backward()."
            )
        computed = not all(map(same, before, map(mark, params)))
        if not k and not computed:
            optimizer.draws = draws
        optimizer.share()
        if samples == 1 or not computed:
            return losses[0]
        for part in parts:
            part.store_draw(samples)
        for p in (p for p in params if p.grad is not None):
            gradient: Any = p.grad
            totals[p] = totals[p] + gradient if p in totals else gradient.clone()
    for p, total in totals.items():
        p.grad = total / samples
    for part in parts:
        part.merge_draws(samples)
    return sum(losses[1:], losses[0]) / samples if losses[0] is not None else None
