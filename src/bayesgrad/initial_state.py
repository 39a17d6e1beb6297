"""The first state tensors of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bayesgrad.kernels import compute_dtype
from bayesgrad.parts import Preconditioner
from bayesgrad.rules.update import MOMENTUM, OPTIONAL
from bayesgrad.shards import any_process, gradient_of, local


def initialise(
    optimizer: Any, group: Mapping[str, Any], params: list[Tensor], preconditioner: Preconditioner | None
) -> None:
    """As `BeliefOptimizer.initialise`; deletes state tensors that are not used any more, which would become old."""
    curvature = None if preconditioner else optimizer.rule.curvature
    started = () if curvature is None else curvature.slots  # late in a run, at the current gradient
    slots = _slots(optimizer, group, preconditioner)
    for p in params:
        entry = optimizer.state[p]
        if "step" not in entry:
            entry["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")  # a constant to FakeTensorMode
        entry["step"] = entry["step"].to("cpu", torch.float32)
        for slot in (slot for slot in OPTIONAL if slot not in slots):
            entry.pop(slot, None)
        for slot in slots:
            if slot not in entry:
                entry[slot] = torch.empty_like(p, dtype=compute_dtype(p.dtype))
                value = optimizer.initial(slot, group, p)
                entry[slot].copy_(value) if isinstance(value, Tensor) else entry[slot].fill_(value)
                if slot in started and entry["step"] > 0:
                    local(entry[slot]).copy_(gradient_of(p))
            if entry[slot].shape != p.shape:
                raise ValueError(
                    f"{slot} of a parameter has shape {tuple(entry[slot].shape)}, but the parameter now has "
                    f"{tuple(p.shape)}: build a new optimizer after reshaping parameters."
                )


def _slots(optimizer: Any, group: Mapping[str, Any], preconditioner: Preconditioner | None) -> tuple[str, ...]:
    return preconditioner.rule.slots(group) if preconditioner else optimizer.slots(group, optimizer.rule)


def late_slots(
    optimizer: Any, group: Mapping[str, Any], params: list[Tensor], preconditioner: Preconditioner | None
) -> list[tuple[str, ...]]:
    """The state tensors of each parameter that begin after its first step.

    Deletes those of another rule first, if parameters follow the preconditioner from now on, or no longer: an average
    of directions is none of gradients.
    """
    rule, slots = optimizer.rule, _slots(optimizer, group, preconditioner)
    learnt = () if rule.curvature is None else (*rule.curvature.slots, *rule.transition.slots)
    entries = [entry if (entry := optimizer.state.get(p, {})).get("step", 0) else None for p in params]
    for entry in entries if optimizer.preconditioner is not None and learnt else ():
        if entry is not None and any(slot in entry for slot in learnt) == (preconditioner is not None):
            for slot in (*learnt, MOMENTUM):
                entry.pop(slot, None)
    return [() if entry is None else tuple(slot for slot in slots if slot not in entry) for entry in entries]


def is_requested(optimizer: Any) -> bool:
    """Whether this is the step by which `torch.distributed.checkpoint` creates the state that it loads into.

    It has no state, zero gradients and lr = 0. It creates the state, and learns nothing.
    """
    if any(float(group["lr"]) for group in optimizer.param_groups):
        return False
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not params or any(p.grad.layout is not torch.strided for p in params):
        return False
    moves = torch.stack([gradient_of(p).any().cpu() for p in params]).any()
    return not bool(any_process(moves, params))


def create(optimizer: Any) -> None:
    """Creates all state tensors of parameters with a gradient."""
    preconditioner = optimizer.preconditioner
    for group in optimizer.param_groups:
        for p in (p for p in group["params"] if p.grad is not None):
            covered = preconditioner is not None and preconditioner.covers(p)
            optimizer.initialise(group, [p], preconditioner if covered else None)
    for part in (*optimizer.sources, *([preconditioner] if preconditioner else ())):
        part.initialise_state()
