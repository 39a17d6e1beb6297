"""Preconditioners with one matrix for all parameters of a network."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bayesgrad.parts import Host, Preconditioner
from bayesgrad.sources.recorded_layers import RecordedLayers

# Entries of `clock`: number of observations; step of the last; steps of parameters that had taken fewer than others.
MERGES, MERGED, BEHIND = range(3)


class NetworkPreconditioner(Preconditioner):
    """Base class: observations of per-example gradients, and a clock in the state of the first parameter.

    Attributes:
        params: the parameters of all groups in the order of the model; the first has the state of the whole network.
    """

    on_cpu = ("clock",)
    params: Sequence[Tensor] = ()

    @abstractmethod
    def record(self, optimizer: Host) -> RecordedLayers:
        """Begins to record the layers of the model."""

    def bind(self, optimizer: Host) -> None:
        super().bind(optimizer)
        self.close()
        self.recorded = self.record(self.optimizer)
        known, self.params = len(self.params), self.recorded.in_model_order()
        self._keep_clock(added=0 < known < len(self.params))
        self.forget(observed=True)

    def _keep_clock(self, added: bool) -> None:
        """Moves the clock to the first parameter, which may be one that was added; then an update is due."""
        state = self.optimizer.state
        holder = next((p for p in self.params if "clock" in state.get(p, {})), None)
        if holder is None:
            return
        if holder is not self.params[0]:
            state[self.params[0]]["clock"] = state[holder].pop("clock")
        if added:
            state[self.params[0]]["clock"][MERGED] = 0

    def covers(self, p: Tensor) -> bool:
        return True

    def clock(self) -> Tensor | None:
        clock = self.optimizer.state.get(self.params[0], {}).get("clock")
        return None if clock is None or not int(clock[MERGES]) else clock

    def initialise_state(self) -> None:
        self.optimizer.state[self.params[0]]["clock"] = torch.zeros(3, dtype=torch.int64)

    def count_merge(self) -> int:
        """Notes that the matrix was updated for the next step; returns how often it was so far."""
        clock = self._clock()
        clock[MERGES] += 1
        clock[MERGED] = self.steps_taken() + 1
        return int(clock[MERGES])

    def due(self, every: int) -> bool:
        """Whether the matrix is to be updated in the next step."""
        clock = self.clock()
        return clock is None or self.steps_taken() + 1 - int(clock[MERGED]) >= every

    def prepare(self, closure: Callable[[], Any] | None) -> None:
        super().prepare(closure)
        self._before = self._most_steps()

    def finish(self, closure: Callable[[], Any] | None, loss: Any) -> None:
        super().finish(closure, loss)
        if self._most_steps() == self._before and any(p.grad is not None for p in self.params):
            self._clock()[BEHIND] += 1

    def steps_taken(self) -> int:
        """Steps in which any parameter had a gradient: noise and updates of the matrix depend on their number."""
        clock = self.optimizer.state.get(self.params[0], {}).get("clock")
        return self._most_steps() + (0 if clock is None else int(clock[BEHIND]))

    def _most_steps(self) -> int:
        found, state = 0, self.optimizer.state
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p in state and "step" in state[p]:
                    found = max(found, int(state[p]["step"]))
        return found

    def _clock(self) -> Tensor:
        return self.optimizer.state[self.params[0]].setdefault("clock", torch.zeros(3, dtype=torch.int64))
