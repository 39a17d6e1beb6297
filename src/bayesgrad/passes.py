"""To which gradients the evidence of a step belongs, so that what was collected in an abandoned pass is discarded.

Evidence is collected before and in a backward pass, and used in the step. A training loop may give up in between: it
sets gradients to zero by `optimizer.zero_grad()`, or by `model.zero_grad()`, of which an optimizer is not told. It may
also load a state, which discards the evidence, but not the gradients. Both are noticed by comparing gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from bayesgrad.parts import Host, Part, gradient_versions

Versions = list[tuple[int, int]]


class Passes:
    """The passes since the last step of an optimizer.

    Attributes:
        marked: gradients at the last observation, or at `zero_grad()`.
        observed: whether something was observed for the next step (1), and `zero_grad()` called since (2).
        computed: gradients after the last backward pass; None before one, or if that is not known.
        used: gradients at the end of the last step.
        lost: gradients whose evidence was discarded when a state was loaded.
    """

    def __init__(self, optimizer: Host) -> None:
        self.optimizer: Host = weakref.proxy(optimizer)
        self.marked: Versions = []
        self.observed = 0
        self.computed: Versions | None = None
        self.used: Versions = []
        self.lost: list[TensorWeakRef] = []

    def begin(self, parts: Sequence[Part]) -> None:
        """Called before a pass: discards what belongs to gradients that were set to zero without `zero_grad()`."""
        if self.computed is None or self.computed == gradient_versions(self.optimizer):
            return
        if not _nonzero(self._gradients()):
            self.discard(parts)
            self.zeroed(True)

    def begin_observation(self, parts: Sequence[Part]) -> None:
        """As `begin`; also discards an observation that no backward pass followed before `zero_grad()`."""
        self.begin(parts)
        if self.observed == 2 and self.marked == gradient_versions(self.optimizer):
            # Second derivatives notice which losses are differentiated.
            self.discard([part for part in parts if not part.needs.loss])

    def end_observation(self, outputs: Any, loss: Any) -> None:
        """Called after an observation, before its backward pass."""
        self.observed, self.marked = 1, gradient_versions(self.optimizer)
        seen = loss if isinstance(loss, Tensor) else outputs
        if isinstance(seen, Tensor) and seen.requires_grad:
            own = weakref.ref(self)

            def differentiated(gradient: Tensor) -> None:
                torch.autograd.Variable._execution_engine.queue_callback(finished)  # pyright: ignore

            def finished() -> None:
                if (passes := own()) is not None:
                    passes.end()

            seen.register_hook(differentiated)

    def end(self) -> None:
        """Called after a backward pass."""
        now = gradient_versions(self.optimizer)
        if now != self.marked:  # else `torch.autograd.grad` was called, which changes none
            self.computed = now

    @staticmethod
    def discard(parts: Sequence[Part]) -> None:
        for part in parts:
            part.zeroed(True)

    def stale(self) -> bool:
        """Whether gradients were computed since the last observation."""
        return self.marked != gradient_versions(self.optimizer)

    def zeroed(self, stale: bool) -> None:
        """Called after gradients were set to zero."""
        self.marked, self.computed, self.lost = gradient_versions(self.optimizer), None, []
        self.observed = 2 if self.observed and not stale else 0

    def stepped(self) -> None:
        """Called at the end of a step."""
        self.observed, self.computed, self.used, self.lost = 0, None, gradient_versions(self.optimizer), []

    def loaded(self) -> None:
        """Called when a state was loaded."""
        if gradient_versions(self.optimizer) != self.used and _nonzero(found := self._gradients()):
            self.lost = [TensorWeakRef(gradient) for gradient in found]
        self.observed, self.computed = 0, None

    def check(self) -> None:
        """Raises if a step would use gradients whose evidence was discarded."""
        gone = [gradient for ref in self.lost if (gradient := ref()) is not None]
        if any(gradient is other for gradient in gone for other in self._gradients()):
            raise RuntimeError(
                "load_state_dict() between backward() and step() has discarded what was recorded beside these "
                "gradients: call optimizer.zero_grad() after loading, and repeat the passes of this step."
            )

    def _gradients(self) -> list[Tensor]:
        every = (p for group in self.optimizer.param_groups for p in group["params"])
        return [p.grad for p in every if p.grad is not None]


def _nonzero(gradients: Sequence[Tensor]) -> bool:
    return any(bool(gradient.any()) for gradient in gradients)
