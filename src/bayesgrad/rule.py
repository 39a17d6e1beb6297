"""Rules: how the mean moves, given the precision.

The third part of an optimizer, after the curvature and the transition; `bayesgrad.transition` explains all three. A
rule receives the mean (the parameter), the gradient of the mean loss and the new precision, and returns the new mean:

    >>> from bayesgrad.precision import Diagonal
    >>> mean, gradient = torch.tensor([1.0]), torch.tensor([0.5])
    >>> NaturalGradient().move(mean, gradient, Diagonal(torch.tensor([2.0])), {}, {"step_scale": 0.1})
    tensor([0.9000])

This is w - step_scale v g for v = 2. A moving average of the gradient (momentum) is part of the rule's state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bayesgrad.curvature.gradients import Memory, Scalars, average
from bayesgrad.precision import Pair, Precision


class Rule(ABC):
    """Base class of all rules."""

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of the rule's state tensors, which may depend on the hyperparameters of `group`."""
        return ()

    def averages(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Those slots that average the gradient: if one is added late in a run, it starts at the current gradient."""
        return ()

    @abstractmethod
    def scalars(self, group: Mapping[str, Any], step: int, step_scale: float) -> dict[str, float]:
        """The scalars `n` that `move` reads; `step_scale` multiplies the whole step."""

    def axpy_coefficients(self, n: Scalars) -> tuple[float, float, float, float] | None:
        """(keep, fresh, step_scale, shrink), if the step is mean <- shrink mean - step_scale m.

        For a preconditioned gradient d, m is the momentum, m <- keep m + fresh d, or d itself without momentum. None
        if the step has another form.
        """
        return None

    @abstractmethod
    def move(self, mean: Tensor, gradient: Tensor, precision: Precision, memory: Memory, n: Scalars) -> Tensor:
        """The new mean. Replaces the rule's slots in `memory`."""


def momentum_of(group: Mapping[str, Any]) -> float:
    """The decay of the gradient's average: `betas[0]` or `momentum`, the names that torch's schedulers change."""
    return group["betas"][0] if "betas" in group else group.get("momentum", 0.0)


@dataclass(frozen=True)
class NaturalGradient(Rule):
    """w <- w - step_scale P^-1 <g>, where <g> is a debiased moving average of the gradient.

    If the optimizer has a prior, the gradient of its penalty is added to <g>. A scalar `radius` bounds each coordinate
    of P^-1 <g>.

    Args:
        heavy_ball: use the buffer b <- momentum b + P^-1 g of torch.optim.SGD, w <- w - step_scale b, in place of the
            moving average.
        natural_momentum: w <- w - step_scale P'^-1 <g> + gamma (P_old/P') (w - w_old), with P' the new precision and
            P_old the last but one. Together with the same option of `Forget`, this is exactly momentum of the natural
            parameters of a Gaussian.

    Reference: Aitchison 2020, Eq. 19b; Khan and Rue 2023, appendix F, Eq. 79-81.
    Differs from the paper: Eq. 81 of Khan and Rue counts the momentum of the precision twice.
    Checked by: tests/equations/test_declarations.py; the momentum by
    tests/equations/test_ivon.py::test_natural_momentum_is_momentum_of_natural_parameters.
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
    """Updates weight and momentum, then predicts the weight at the next step, where the next gradient is taken.

    m = w - step_scale a g, p <- keep p - pull b g, w <- ahead m + eta p, with a the variance of the weight and b its
    covariance with the momentum. Gradients are taken at w, ahead of the posterior mean m: this is Nesterov's
    acceleration.

    Reference: Aitchison 2018, Eq. 15-18.
    Checked by: tests/equations/test_momentum_filter.py.
    """

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum",)

    def scalars(self, group: Mapping[str, Any], step: int, step_scale: float) -> dict[str, float]:
        """The optimizer adds `momentum` (keep), `pull`, `ahead` and `eta`."""
        return {"step_scale": step_scale}

    def move(self, mean: Tensor, gradient: Tensor, precision: Precision, memory: Memory, n: Scalars) -> Tensor:
        if not isinstance(precision, Pair):
            raise TypeError(f"PredictedStep needs a precision of type Pair, got {type(precision).__name__}.")
        posterior = mean - n["step_scale"] * (precision.weight * gradient)
        memory["momentum"] = n["momentum"] * memory["momentum"] - n["pull"] * (precision.cross * gradient)
        return n["ahead"] * posterior + n["eta"] * memory["momentum"]


@dataclass(frozen=True)
class Langevin(Rule):
    r"""A step of a Langevin equation on the manifold whose metric is the precision P.

    .. math::
        w \leftarrow w - \epsilon P^{-1} (g + \lambda w) + \epsilon\tau\, c + \sqrt{2\epsilon\tau}\, P^{-1/2} \xi

    with the gradient g of the mean loss, lambda = delta/N for the prior precision delta, tau = T/N for the temperature
    T and the number of data N, standard normal xi, and the correction c for a metric that depends on w.

    Args:
        injected: whether the noise xi is added. If False, the noise of minibatch gradients takes its place.

    Reference: Smith et al. 2018, Eq. 2, 5, 6, 7 and 11, with corrected signs.
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
        """What a step subtracts from the weights. `n` has lr, heat (T/N) and pull (lambda; a number or a tensor)."""
        change = n["lr"] * precision.solve(gradient + n["pull"] * mean)
        if correction is not None:
            change = change - n["lr"] * n["heat"] * correction
        if noise is not None:
            change = change - (2 * n["lr"] * n["heat"]) ** 0.5 * precision.sample(noise)
        return change

    def move(self, mean: Tensor, gradient: Tensor, precision: Precision, memory: Memory, n: Scalars) -> Tensor:
        return mean - n["step_scale"] * precision.solve(gradient)
