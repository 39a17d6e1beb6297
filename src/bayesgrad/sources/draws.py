"""Draws: gradients that are computed while weights are changed at random."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bayesgrad import noise
from bayesgrad.parts import Evidence, Groups, Needs, Noise, Source

Mark = tuple[Tensor, int] | None


class Draws(Source):
    """Base class: runs the context of `sampled()` and records which gradients were computed in it."""

    needs = Needs(draws=True)

    def __init__(self) -> None:
        self.active = False  # whether weights are changed now
        self.key: noise.Key | None = None  # of the current draw in training
        self.before: dict[Tensor, Mark] = {}  # gradients at the beginning of the current context
        self.at_zero_grad: dict[Tensor, Mark] = {}
        self.without_grad = 0  # draws under torch.no_grad() since the last draw in training
        self.stored: dict[Tensor, Tensor] = {}  # of several draws of a closure
        self.reset()

    @abstractmethod
    def perturb(self, key: noise.Key, given: Noise | None, training: bool) -> None:
        """Changes the weights."""

    @abstractmethod
    def restore(self, finished: bool) -> None:
        """Restores them, bit for bit. `finished` is False under `torch.no_grad()` and after an error."""

    @property
    def drawing(self) -> bool:
        return self.key is not None

    def begin(self, training: bool) -> None:
        """Called before the weights are changed."""

    @abstractmethod
    def end(self) -> None:
        """Called after the weights were restored, if gradients were computed in training."""

    def reset(self) -> None:
        self.sampled: set[Tensor] = set()  # parameters whose gradients were computed in sampled()

    def zeroed(self, stale: bool) -> None:
        self.reset()
        self.at_zero_grad = self.before = {p: mark(p) for group in self.optimizer.param_groups for p in group["params"]}

    @contextmanager
    def draw(self, noise: Noise | None) -> Iterator[None]:
        if self.active:
            raise RuntimeError("sampled() is already active: leave the context before entering it again.")
        training = torch.is_grad_enabled()
        if training:
            every = (p for group in self.optimizer.param_groups for p in group["params"])
            self.before = {p: mark(p) for p in every if p.requires_grad}
        self.begin(training)
        key = self._next_key(training)
        self.key = key if training else None
        self.active = True
        finished = False
        try:
            with torch.no_grad():
                self.perturb(key, noise, training)
            yield
            finished = training
        finally:
            with torch.no_grad():
                self.restore(finished)
            self.active, self.key = False, None
            if finished:
                self.end()
            self.before = {}

    def _next_key(self, training: bool) -> noise.Key:
        optimizer, seed = self.optimizer, self.optimizer.param_groups[0]["seed"]
        if training:
            optimizer.draws += 1
            return noise.key(seed, optimizer.draws)
        self.without_grad += 1
        return noise.key(seed, optimizer.draws, self.without_grad)

    def collect(self, groups: Groups, active: list[list[Tensor]]) -> Evidence:
        missing = next((p for some in active for p in some if p not in self.sampled), None)
        if missing is not None:
            raise RuntimeError(
                f"a gradient of shape {tuple(missing.shape)} was not computed at sampled weights: run forward and "
                f"backward passes inside `with optimizer.sampled():`, then call {type(self.optimizer).__name__}.step()."
            )
        return {}

    def merge_draws(self, samples: int) -> None:
        self.reset()
        every = (p for group in self.optimizer.param_groups for p in group["params"])
        self.sampled = {p for p in every if p.grad is not None}


def mark(p: Tensor) -> Mark:
    return None if p.grad is None else (p.grad, p.grad._version)


def same(a: Mark, b: Mark) -> bool:
    """Whether a gradient did not change between two marks."""
    return a is b or (a is not None and b is not None and a[0] is b[0] and a[1] == b[1])
