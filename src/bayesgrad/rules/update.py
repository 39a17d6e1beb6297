"""The elementwise step: `UpdateRule`, made of a curvature, a transition and a move.

`bayesgrad.rules.transition` explains the three parts. A move receives the mean (the parameter), the gradient of the mean
loss and the new precision, and returns the new mean:

    >>> from bayesgrad.precision import Diagonal
    >>> mean, gradient = torch.tensor([1.0]), torch.tensor([0.5])
    >>> NaturalStep().move(mean, gradient, Diagonal(torch.tensor([2.0])), {}, {"step_scale": 0.1})
    tensor([0.9000])

This is w - step_scale v g for v = 2. A moving average of the gradient (momentum) is part of the move's state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesgrad.kernels import compute_dtype
from bayesgrad.precision import Pair, Precision, Scalar
from bayesgrad.rules.curvature import Curvature, Evidence, Memory, Scalars, average
from bayesgrad.rules.transition import OLDER_VARIANCE, Static, Transition

MOMENTUM = "momentum"  # the slot of the average of gradients or directions
# Slots of a prior that is the posterior of an earlier task:
PRIOR_PRECISION, PRIOR_MEAN, PRIOR_NATURAL = "prior_precision", "prior_mean", "prior_natural"


class Move(ABC):
    """Base class of all moves. The slots in `means` start at the value of the parameter."""

    means: tuple[str, ...] = ()

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of the move's state tensors, which may depend on the hyperparameters of `group`."""
        return ()

    def averages(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Those slots that average the gradient: if one is added late in a run, it starts at the current gradient."""
        return ()

    @abstractmethod
    def scalars(self, group: Mapping[str, Any], step: int, step_scale: float) -> dict[str, float]:
        """The scalars `n` that `move` reads; `step_scale` multiplies the whole step."""

    def axpy_coefficients(self, n: Scalars, slots: tuple[str, ...]) -> tuple[float, float, float, float] | None:
        """(keep, fresh, step_scale, shrink), if the step is mean <- shrink mean - step_scale m with these slots.

        For a preconditioned gradient d, m is the momentum, m <- keep m + fresh d, or d itself without momentum. None
        if the step has another form.
        """
        return None

    @abstractmethod
    def move(self, mean: Tensor, gradient: Tensor, precision: Precision, memory: Memory, n: Scalars) -> Tensor:
        """The new mean. Replaces the move's slots in `memory`."""


def momentum_of(group: Mapping[str, Any]) -> float:
    """The decay of the gradient's average: `betas[0]` or `momentum`, the names that torch's schedulers change."""
    return group["betas"][0] if "betas" in group else group.get("momentum", 0.0)


@dataclass(frozen=True)
class NaturalStep(Move):
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
    means = ("last_mean",)

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        averages = (MOMENTUM,) if momentum_of(group) else ()
        return (*averages, "last_mean") if self.natural_momentum else averages

    def averages(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return (MOMENTUM,) if momentum_of(group) and not self.heavy_ball else ()

    def scalars(self, group: Mapping[str, Any], step: int, step_scale: float) -> dict[str, float]:
        momentum = momentum_of(group)
        if self.heavy_ball:
            return {"step_scale": step_scale, "momentum": momentum}
        keep, take = average(momentum, step)
        return {"step_scale": step_scale, "momentum": keep, "fresh": take}

    def axpy_coefficients(self, n: Scalars, slots: tuple[str, ...]) -> tuple[float, float, float, float] | None:
        if slots not in ((), (MOMENTUM,)):
            return None
        return n["momentum"], n.get("fresh", 1.0), n["step_scale"], n.get("shrink", 1.0)

    def move(self, mean: Tensor, gradient: Tensor, precision: Precision, memory: Memory, n: Scalars) -> Tensor:
        if MOMENTUM in memory and not self.heavy_ball:
            gradient = memory[MOMENTUM] = n["momentum"] * memory[MOMENTUM] + n["fresh"] * gradient
        step = precision.solve(gradient + n["pull"] if "pull" in n else gradient)
        if MOMENTUM in memory and self.heavy_ball:
            step = memory[MOMENTUM] = n["momentum"] * memory[MOMENTUM] + step
        if "radius" in n:
            step = step.clamp(-n["radius"], n["radius"])
        moved = mean - n["step_scale"] * step
        if self.natural_momentum:
            ratio = precision.variance() / memory[OLDER_VARIANCE]
            moved = moved + n["natural_momentum"] * ratio * (mean - memory["last_mean"])
            memory["last_mean"] = mean
        return moved


@dataclass(frozen=True)
class PredictedStep(Move):
    """Updates weight and momentum, then predicts the weight at the next step, where the next gradient is taken.

    m = w - step_scale a g, p <- keep p - pull b g, w <- ahead m + eta p, with a the variance of the weight and b its
    covariance with the momentum. Gradients are taken at w, ahead of the posterior mean m: this is Nesterov's
    acceleration.

    Reference: Aitchison 2018, Eq. 15-18.
    Checked by: tests/equations/test_momentum_filter.py.
    """

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return (MOMENTUM,)

    def scalars(self, group: Mapping[str, Any], step: int, step_scale: float) -> dict[str, float]:
        """The optimizer adds `momentum` (keep), `pull`, `ahead` and `eta`."""
        return {"step_scale": step_scale}

    def move(self, mean: Tensor, gradient: Tensor, precision: Precision, memory: Memory, n: Scalars) -> Tensor:
        if not isinstance(precision, Pair):
            raise TypeError(f"PredictedStep needs a precision of type Pair, got {type(precision).__name__}.")
        posterior = mean - n["step_scale"] * (precision.weight * gradient)
        memory[MOMENTUM] = n["momentum"] * memory[MOMENTUM] - n["pull"] * (precision.cross * gradient)
        return n["ahead"] * posterior + n["eta"] * memory[MOMENTUM]


@dataclass(frozen=True)
class LangevinStep(Move):
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

    def axpy_coefficients(self, n: Scalars, slots: tuple[str, ...]) -> tuple[float, float, float, float]:
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


@dataclass(frozen=True)
class UpdateRule:
    """How the belief about each weight changes in one step: curvature, transition and move as one function.

    Args:
        curvature: the information of the batch; None if the precision of every weight is 1.
        transition: how the precision changes.
        move: how the mean moves.
    """

    curvature: Curvature | None
    transition: Transition
    move: Move

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of the state tensors of a parameter in this group."""
        learnt = () if self.curvature is None else (*self.curvature.slots, *self.transition.slots)
        return (*learnt, *self.move.slots(group))

    def averages(self, group: Mapping[str, Any]) -> set[str]:
        """Those slots that average the gradient."""
        return {*(self.curvature.slots if self.curvature else ()), *self.move.averages(group)}

    def initial(self, slot: str, p: Tensor, prior_variance: float) -> float | Tensor:
        """The initial value of a state tensor."""
        if slot in self.move.means:
            return p
        return prior_variance if slot in self.transition.variances else 0.0

    def scalars(
        self,
        group: Mapping[str, Any],
        step: int,
        step_scale: float,
        dynamics: Mapping[str, Any] | None = None,
        gradient_scale: float | None = None,
    ) -> dict[str, float]:
        """All scalars of one step. Kernels never combine two scalars, so eager and compiled steps round alike.

        Args:
            group: hyperparameters; `weight_decay` and `damping` are read here.
            step: the number of the step, from 1.
            step_scale: factor of the step.
            dynamics: arguments of the transition's `scalars`.
            gradient_scale: factor of the gradient before it is squared; None for 1.
        """
        n = self.move.scalars(group, step, step_scale)
        if self.curvature is not None:
            n |= self.curvature.scalars(step) | self.transition.scalars(**dynamics or {})
            if gradient_scale is not None:
                n["gradient_scale"] = gradient_scale
        if group["weight_decay"]:
            n["shrink"] = 1 - float(group["lr"]) * group["weight_decay"]
        if group.get("damping"):
            n["damping"] = group["damping"]
        return n

    def __call__(
        self, n: dict[str, Any], weight: Tensor, gradient: Tensor, evidence: Mapping[str, Tensor], memory: Memory
    ) -> Tensor:
        """The new weight; replaces the tensors in `memory`.

        Args:
            n: the scalars.
            weight, gradient: of the same shape.
            evidence: what the curvature reads beside the gradient, by the names of `Evidence`.
            memory: the state tensors by slot.
        """
        dtype = compute_dtype(weight.dtype)
        weight, gradient = weight.to(dtype), gradient.to(dtype)
        if "l2" in n:
            gradient = gradient + n["l2"] * weight
        gradient = self.transition.clip(gradient)
        if self.curvature is None:  # without curvature, the precision of every weight is 1
            precision = Scalar(torch.ones((), dtype=dtype, device=weight.device), tuple(weight.shape))
        else:
            seen = Evidence(gradient, **{name: values.to(dtype) for name, values in evidence.items()})
            increment = self.curvature.read(seen, memory, n)
            if "prior" in n:  # a Gaussian prior: its precision in the same units, and its gradient
                strength = n["prior"] * memory[PRIOR_PRECISION] if PRIOR_PRECISION in memory else n["prior"]
                increment = increment + strength
                n["pull"] = strength * (weight - memory[PRIOR_MEAN] if PRIOR_MEAN in memory else weight)
            precision = self.transition.merge(memory, increment, n)
        if "damping" in n:
            precision = precision.add(n["damping"])
        return self.move.move(self.transition.drift(weight, n), gradient, precision, memory, n)


@dataclass(frozen=True)
class BinaryRule(UpdateRule):
    """A rule for a latent value whose sign is the weight, sign(0) = 1; it has no curvature.

    The gradient with respect to the weight replaces that with respect to the latent value. It is multiplied by the
    slope between the two, if the evidence has one, and by the scalar `gradient_scale`. A slot `PRIOR_NATURAL` is
    subtracted from it.

    Args:
        latent: the slot of the latent value.
    """

    latent: str = "latent"

    @classmethod
    def of(cls, move: Move, latent: str) -> BinaryRule:
        return cls(None, Static(), move, latent)

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return (self.latent, *super().slots(group))

    def __call__(
        self, n: dict[str, Any], weight: Tensor, gradient: Tensor, evidence: Mapping[str, Tensor], memory: Memory
    ) -> Tensor:
        latent = memory[self.latent]
        gradient = gradient.to(latent.dtype)
        if "product" in evidence:
            gradient = evidence["product"].to(latent.dtype)
        elif "slope" in evidence:
            gradient = gradient * evidence["slope"].to(latent.dtype)
        if "gradient_scale" in n:
            largest = torch.finfo(latent.dtype).max / 4  # an infinite latent value would never change again
            gradient = (gradient * n["gradient_scale"]).clamp(-largest, largest)
        if PRIOR_NATURAL in memory:
            gradient = gradient - memory[PRIOR_NATURAL]
        moved = memory[self.latent] = super().__call__(n, latent, gradient, {}, memory)
        return signs(moved)


def signs(latent: Tensor) -> Tensor:
    """-1 or 1."""
    return torch.where(latent < 0, -1.0, 1.0)


@dataclass(frozen=True)
class Update:
    """An `UpdateRule` as a function for `kernels.run`.

    Args:
        rule: the rule.
        names: the names of the scalars, in order.
        slots: the names of the state tensors, in order.
        evidence: the names of the curvature's inputs beside the gradient, in order.
    """

    rule: UpdateRule
    names: tuple[str, ...]
    slots: tuple[str, ...]
    evidence: tuple[str, ...] = ()

    @property
    def writes(self) -> tuple[int, ...]:
        first = 2 + len(self.evidence)
        return (0, *range(first, first + len(self.slots)))

    def __call__(self, scalars: Sequence[Any], weight: Tensor, gradient: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        n = dict(zip(self.names, scalars))
        evidence = dict(zip(self.evidence, more))
        memory = dict(zip(self.slots, more[len(self.evidence) :]))
        weight = self.rule(n, weight, gradient, evidence, memory)
        return (weight, *(memory[slot] for slot in self.slots))
