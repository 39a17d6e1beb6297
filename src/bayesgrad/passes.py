"""To which gradients the evidence of a step belongs, so that what was collected in an abandoned pass is discarded.

Evidence is collected before and in a backward pass, and used in the step. A training loop may give up in between: it
sets gradients to zero by `optimizer.zero_grad()`, or by `model.zero_grad()`, of which an optimizer is not told. It may
also load a state, which discards the evidence, but not the gradients. Both are noticed by comparing gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from bayesgrad.distributed import after_averaging
from bayesgrad.parts import Host, Part
from bayesgrad.shards import any_process, local, version
from bayesgrad.warning import warn

Versions = list[tuple[int, int]]


class Passes:
    """The passes since the last step of an optimizer.

    Attributes:
        marked: gradients at the last observation, or at `zero_grad()`.
        observed: whether something was observed for the next step (1), and `zero_grad()` called since (2).
        earlier: whether something was observed before the gradients that existed at the last observation were computed.
        current: the arguments of the observations since then, until their backward pass.
        interrupted: whether an observation, a backward pass of one, a draw or a closure has begun and not ended,
            because it raised.
        computed: gradients after the last backward pass; None before one, or if that is not known.
        used: gradients at the end of the last step.
        lost: gradients whose evidence was discarded when a state was loaded.
        forgotten: whether an observation was, before its gradients were computed.
    """

    def __init__(self, optimizer: Host) -> None:
        self.optimizer: Host = weakref.proxy(optimizer)
        self.marked: Versions = []
        self.observed = 0
        self.earlier = False
        self.current: list[tuple[Any, ...]] = []
        self.interrupted = False
        self.computed: Versions | None = None
        self.used: Versions = []
        self.lost: list[TensorWeakRef] = []
        self.forgotten = False

    def begin(self, parts: Sequence[Part]) -> None:
        """Called before a pass: discards what belongs to gradients that were set to zero without `zero_grad()`."""
        last, now = self.marked if self.computed is None and self.observed else self.computed, self._versions()
        if not self.interrupted and (last is None or last == now):
            return
        if (self.interrupted and self.computed is None and now == self.used) or not _nonzero(self._gradients()):
            self.discard(parts)
            self.zeroed(True)

    def begin_observation(self, parts: Sequence[Part]) -> None:
        """As `begin`; also discards an observation that no backward pass followed before `zero_grad()`."""
        self.begin(parts)
        if self.observed == 2 and self.marked == self._versions():
            # Second derivatives notice which losses are differentiated.
            self.discard([part for part in parts if not part.needs.loss])
        needed = any(part.needs.outputs or part.needs.loss for part in parts)
        if needed and self.observed and self.marked != self._versions():
            self.earlier, self.current = True, []
        self.interrupted = True

    def end_observation(self, outputs: Any, loss: Any, labels: Any, weights: Any) -> None:
        """Called after an observation, before its backward pass."""
        if self.earlier and not (isinstance(outputs, Tensor) and not outputs.numel()):  # an empty batch is not observed
            self.current.append((outputs, loss, labels, weights))
        self.observed, self.interrupted, self.marked = 1, False, self._versions()
        self.forgotten = False
        seen = loss if isinstance(loss, Tensor) else outputs
        if isinstance(seen, Tensor) and seen.requires_grad:
            own = weakref.ref(self)

            def differentiated(gradient: Tensor) -> None:
                if (passes := own()) is not None:
                    passes.check_zeroed()
                    passes.interrupted = True
                after_averaging(finished)

            def finished() -> None:
                if (passes := own()) is not None:
                    passes.interrupted, passes.current = False, []
                    passes.end()

            seen.register_hook(differentiated)

    def check_zeroed(self) -> None:
        """Raises if `zero_grad()` of the model has discarded gradients, but not what was observed for them."""
        if self.current and self.marked != self._versions() and not _nonzero(self._gradients()):
            raise RuntimeError(
                "model.zero_grad() between observe() and backward() has discarded the gradients of earlier passes, but "
                "not what was observed for them: call optimizer.zero_grad() instead."
            )

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """A context of passes: an exception that leaves it has interrupted one of them."""
        try:
            yield
        except BaseException:
            self.interrupted = True
            raise

    def end(self) -> None:
        """Called after a backward pass."""
        now = self._versions()
        if now and now != self.marked:  # else `torch.autograd.grad` was called, which changes none
            self.computed = now

    @staticmethod
    def discard(parts: Sequence[Part]) -> None:
        for part in parts:
            part.zeroed(True)

    def stale(self) -> bool:
        """Whether gradients were computed since the last observation, or an error has interrupted it."""
        return self.interrupted or self.marked != self._versions()

    def repeat(self, parts: Sequence[Part]) -> None:
        """Called in `zero_grad()`: if a pass was given up after the gradients of its observation were computed, and the
        next one was observed before they were set to zero, discards both and repeats the second observation."""
        some = [part for part in parts if not part.needs.loss]  # the others know which losses are differentiated
        self.discard(some)
        again, self.current = self.current, []
        for seen in again:
            for part in some:
                part.observe(*seen)

    def zeroed(self, stale: bool) -> None:
        """Called after gradients were set to zero."""
        self.earlier, self.current, self.forgotten = False, [], False
        self.marked, self.computed, self.lost = self._versions(), None, []
        self.observed, self.interrupted = 2 if self.observed and not stale else 0, False

    def stepped(self) -> None:
        """Called at the end of a step."""
        self.earlier, self.current = False, []
        self.observed, self.interrupted, self.computed, self.lost = 0, False, None, []
        self.used = self._versions()

    def loaded(self, observes: bool) -> None:
        """Called when a state was loaded.

        Args:
            observes: whether the optimizer reads outputs or losses of passes.
        """
        self.earlier, self.current, self.forgotten = False, [], observes and bool(self.observed)
        if self._versions() != self.used and _nonzero(found := self._gradients()):
            self.lost = [TensorWeakRef(gradient) for gradient in found]
        self.observed, self.interrupted, self.computed = 0, False, None

    def check(self) -> None:
        """Raises if a step would use gradients whose evidence was discarded."""
        gone = [gradient for ref in self.lost if (gradient := ref()) is not None]
        if self.forgotten or any(gradient is other for gradient in gone for other in self._gradients()):
            raise RuntimeError(
                f"load_state_dict() between {'observe' if self.forgotten else 'backward'}() and step() has discarded "
                "what was recorded beside these gradients: call optimizer.zero_grad() after loading, and repeat the "
                "passes of this step."
            )

    def _versions(self) -> Versions:
        return gradient_versions(self.optimizer.param_groups)

    def _gradients(self) -> list[Tensor]:
        every = (p for group in self.optimizer.param_groups for p in group["params"])
        return [p.grad for p in every if p.grad is not None]


@contextmanager
def warned_of_interrupts(what: str) -> Iterator[None]:
    """A context that is not left half-way without a warning: by Ctrl-C, or by a handler of signals that exits."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        warn(
            f"{what} was interrupted: some weights may have taken the step, and others not. To continue the run "
            "exactly, load model and optimizer from a checkpoint.",
            RuntimeWarning,
        )
        raise


def gradient_versions(groups: Iterable[Mapping[str, Any]]) -> Versions:
    """Identity and version of all gradients: two equal results mean that no gradient changed in between."""
    found = []
    for group in groups:
        for p in group["params"]:
            if (gradient := p.grad) is not None:
                found.append((id(gradient), gradient._version if type(gradient) is Tensor else version(gradient)))
    return found


def _nonzero(gradients: Sequence[Tensor]) -> bool:
    return any(bool(any_process(local(gradient).any(), [gradient])) for gradient in gradients)
