"""How the mean moves, once the belief's precision is known."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bayesgrad.curvature.gradients import Memory, Scalars, average
from bayesgrad.precision import Pair, Precision


class Rule(ABC):
    """Base of all rules."""

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """What the rule remembers under the hyper-parameters of `group`."""
        return ()

    def averages(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Those of its slots that average the gradient: missing late in a run, they start at the gradient."""
        return ()

    @abstractmethod
    def scalars(self, group: Mapping[str, Any], step: int, step_scale: float) -> dict[str, float]:
        """The scalars that `move` asks for; `step_scale` multiplies the whole step."""

    def axpy_coefficients(self, n: Scalars) -> tuple[float, float, float, float] | None:
        """(keep, fresh, step_scale, shrink), where a solved gradient d takes the mean to shrink mean - step_scale m.

        m is the momentum, keep m + fresh d, or d itself where there is none.
        """
        return None

    @abstractmethod
    def move(self, mean: Tensor, gradient: Tensor, precision: Precision, memory: Memory, n: Scalars) -> Tensor:
        """The new mean; replaces its slots in `memory`."""


def momentum_of(group: Mapping[str, Any]) -> float:
    """The decay of the gradient's average, under the name that schedulers know it by."""
    return group["betas"][0] if "betas" in group else group.get("momentum", 0.0)


@dataclass(frozen=True)
class NaturalGradient(Rule):
    """w <- w - step_scale P^-1 <g>, where <g> is a debiased moving average of the gradient.

    With `heavy_ball`, the buffer b <- momentum b + P^-1 g of torch.optim.SGD instead: w <- w - step_scale b.

    Where there is a prior, its pull joins <g>; a `radius` bounds each coordinate of the step before the step_scale.

    With `natural`, w <- w - step_scale P'^-1 <g> + natural (P_old/P') (w - w_old): the exact image of momentum in the
    natural parameters of a Gaussian, together with the transition's; P' is the new precision, P_old the last but one.

    Reference: 001, Eq. 19b; 002, appendix F.
    Differs from the paper: whose Eq. 81 counts the momentum of the precision twice.

    Args:
        heavy_ball: which of the two momenta.
        natural: whether there is one of natural parameters.
    """

    heavy_ball: bool = False
    natural_momentum: bool = False

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        averages = ("momentum",) if momentum_of(group) else ()
        return (*averages, "last_mean") if self.natural_momentum else averages

    def averages(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum",) if momentum_of(group) and not self.heavy_ball else ()

    def scalars(self, group: Mapping[str, Any], step: int, step_scale: float) -> dict[str, float]:
        momentum = momentum_of(group)
        if self.heavy_ball:
            return {"step_scale": step_scale, "momentum": momentum}
        keep, take = average(momentum, step)
        return {"step_scale": step_scale, "momentum": keep, "fresh": take}

    def axpy_coefficients(self, n: Scalars) -> tuple[float, float, float, float]:
        return n["momentum"], n.get("fresh", 1.0), n["step_scale"], n.get("shrink", 1.0)

    def move(self, mean: Tensor, gradient: Tensor, precision: Precision, memory: Memory, n: Scalars) -> Tensor:
        if "momentum" in memory and not self.heavy_ball:
            gradient = memory["momentum"] = n["momentum"] * memory["momentum"] + n["fresh"] * gradient
        step = precision.solve(gradient + n["pull"] if "pull" in n else gradient)
        if "momentum" in memory and self.heavy_ball:
            step = memory["momentum"] = n["momentum"] * memory["momentum"] + step
        if "radius" in n:
            step = step.clamp(-n["radius"], n["radius"])
        moved = mean - n["step_scale"] * step
        if self.natural_momentum:
            ratio = precision.variance() / memory["older_variance"]
            moved = moved + n["natural_momentum"] * ratio * (mean - memory["last_mean"])
            memory["last_mean"] = mean
        return moved


@dataclass(frozen=True)
class PredictedStep(Rule):
    """The mean of weight and momentum moves, and on to where the next gradient is to be taken.

    m = w - step_scale a g, p <- keep p - pull b g, w <- ahead m + eta p, with a, b the weight's variance and
    its covariance with the momentum. That gradients are taken at w, ahead of the belief's mean m,
    is Nesterov's acceleration.

    Reference: 000, Eq. 15-18.
    """

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum",)

    def scalars(self, group: Mapping[str, Any], step: int, step_scale: float) -> dict[str, float]:
        """The declaration adds momentum (what is kept of it), pull, ahead and eta."""
        return {"step_scale": step_scale}

    def move(self, mean: Tensor, gradient: Tensor, precision: Precision, memory: Memory, n: Scalars) -> Tensor:
        if not isinstance(precision, Pair):
            raise TypeError(f"a rule with momentum asks for a Pair, got {type(precision).__name__}.")
        posterior = mean - n["step_scale"] * (precision.weight * gradient)
        memory["momentum"] = n["momentum"] * memory["momentum"] - n["pull"] * (precision.cross * gradient)
        return n["ahead"] * posterior + n["eta"] * memory["momentum"]


@dataclass(frozen=True)
class Langevin(Rule):
    r"""A step of a Langevin equation on the manifold whose metric is the precision P.

    .. math::
        w \leftarrow w - \epsilon P^{-1} (g + \lambda w) + \epsilon\tau\, c + \sqrt{2\epsilon\tau}\, P^{-1/2} \xi

    with the gradient g of the mean loss, the prior's pull lambda = delta/N, the temperature over the number of data
    tau = T/N, standard normal xi, and the correction c for a metric that is not the same everywhere. Without
    `injected`, gradients are noisy enough by themselves and there is no xi.

    Reference: 003, Eq. 2, 5, 6, 7 and 11, with the signs put right.

    Args:
        injected: whether noise is added.
    """

    injected: bool = True

    def scalars(self, group: Mapping[str, Any], step: int, step_scale: float) -> dict[str, float]:
        return {"step_scale": step_scale}

    def axpy_coefficients(self, n: Scalars) -> tuple[float, float, float, float]:
        return 0.0, 1.0, n["step_scale"], 1.0

    def change(
        self,
        mean: Tensor,
        gradient: Tensor,
        precision: Precision,
        correction: Tensor | None,
        noise: Tensor | None,
        n: Scalars,
    ) -> Tensor:
        """What a step subtracts from the weights, for lr, heat (T/N) and pull (a number, or one for each weight)."""
        change = n["lr"] * precision.solve(gradient + n["pull"] * mean)
        if correction is not None:
            change = change - n["lr"] * n["heat"] * correction
        if noise is not None:
            change = change - (2 * n["lr"] * n["heat"]) ** 0.5 * precision.sample(noise)
        return change

    def move(self, mean: Tensor, gradient: Tensor, precision: Precision, memory: Memory, n: Scalars) -> Tensor:
        return mean - n["step_scale"] * precision.solve(gradient)
