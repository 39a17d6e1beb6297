"""How the mean moves, once the belief's precision is known."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bayesgrad.curvature.gradients import Memory, Numbers, average
from bayesgrad.precision import Precision


class Rule(ABC):
    """Base of all rules."""

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """What the rule remembers under the hyper-parameters of `group`."""
        return ()

    def averages(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Those of its slots that average the gradient: missing late in a run, they start at the gradient."""
        return ()

    @abstractmethod
    def numbers(self, group: Mapping[str, Any], step: int, gain: float) -> dict[str, float]:
        """The scalars that `move` asks for; `gain` multiplies the whole step."""

    def straight(self, n: Numbers) -> tuple[float, float] | None:
        """(gain, shrink), where without slots a solved gradient d takes the mean to shrink mean - gain d."""
        return None

    @abstractmethod
    def move(self, mean: Tensor, gradient: Tensor, precision: Precision, memory: Memory, n: Numbers) -> Tensor:
        """The new mean; replaces its slots in `memory`."""


def momentum_of(group: Mapping[str, Any]) -> float:
    """The decay of the gradient's average, under the name that schedulers know it by."""
    return group["betas"][0] if "betas" in group else group.get("momentum", 0.0)


@dataclass(frozen=True)
class NaturalGradient(Rule):
    """w <- w - gain P^-1 <g>, where <g> is a debiased moving average of the gradient.

    With `heavy_ball`, the buffer b <- momentum b + P^-1 g of torch.optim.SGD instead: w <- w - gain b.

    Reference: 001, Eq. 19b.

    Args:
        heavy_ball: which of the two momenta.
    """

    heavy_ball: bool = False

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum",) if momentum_of(group) else ()

    def averages(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return () if self.heavy_ball else self.slots(group)

    def numbers(self, group: Mapping[str, Any], step: int, gain: float) -> dict[str, float]:
        momentum = momentum_of(group)
        if self.heavy_ball:
            return {"gain": gain, "momentum": momentum}
        keep, take = average(momentum, step)
        return {"gain": gain, "momentum": keep, "fresh": take}

    def straight(self, n: Numbers) -> tuple[float, float]:
        return n["gain"], n.get("shrink", 1.0)

    def move(self, mean: Tensor, gradient: Tensor, precision: Precision, memory: Memory, n: Numbers) -> Tensor:
        if "momentum" not in memory:
            return mean - n["gain"] * precision.solve(gradient)
        if self.heavy_ball:
            step = memory["momentum"] = n["momentum"] * memory["momentum"] + precision.solve(gradient)
        else:
            memory["momentum"] = n["momentum"] * memory["momentum"] + n["fresh"] * gradient
            step = precision.solve(memory["momentum"])
        return mean - n["gain"] * step
