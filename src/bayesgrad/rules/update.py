"""The elementwise step: `UpdateRule`, made of a curvature, a transition and a move.

`bayesgrad.rules.transition` explains the three parts. A curvature computes the information of a batch about each weight
from its gradient and from what sources collect beside it. A move receives the mean (the parameter), the gradient of the
mean loss and the new precision, and returns the new mean:

    >>> from bayesgrad.precision import Diagonal
    >>> mean, gradient = torch.tensor([1.0]), torch.tensor([0.5])
    >>> NaturalStep().move(mean, gradient, Diagonal(torch.tensor([2.0])), {}, {"step_scale": 0.1})
    tensor([0.9000])

This is w - step_scale v g for v = 2. A moving average of the gradient (momentum) is part of the move's state.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bayesgrad.kernels import compute_dtype
from bayesgrad.packing import VARIANCE
from bayesgrad.precision import Precision, Scalar
from bayesgrad.rules.transition import LARGEST, LAST_VARIANCE, OLDER_VARIANCE, Memory, Scalars, Transition, average

MOMENTUM = "momentum"  # the slot of the average of gradients or directions
LAST_STEP = "last_step"  # the slot of the last change of the mean
OPTIONAL = (MOMENTUM, LAST_STEP, LAST_VARIANCE)  # slots that a rule has only while an option is not zero
PRIOR_PRECISION, PRIOR_MEAN = "prior_precision", "prior_mean"  # slots of a prior: the posterior of an earlier task


# --- curvatures ---


@dataclass(frozen=True, eq=False)
class Evidence:
    """Gradients and related statistics for one block of weights.

    Args:
        gradient: of the mean loss over the minibatch, in the dtype of the state.
        offset: the weights at which the gradient was taken, minus the mean.
        product: the product of gradient and offset, for several samples of the weights.
        squares: the mean over examples of squared per-example gradients.
        hessian: the diagonal of the Hessian of the mean loss.
    """

    gradient: Tensor
    offset: Tensor | None = None
    product: Tensor | None = None
    squares: Tensor | None = None
    hessian: Tensor | None = None


class Curvature(ABC):
    """Computes an increment of the precision from `Evidence`. Its state is in its own slots of `memory`.

    The slots contain averages of the gradient; a slot that is missing late in a run is initialised with the gradient.
    """

    slots: tuple[str, ...] = ()

    def scalars(self, step: int) -> dict[str, float]:
        """The scalars that `read` needs, at the `step`-th step (from 1) of a block."""
        return {}

    @abstractmethod
    def read(self, evidence: Evidence, memory: Memory, n: Scalars) -> Tensor:
        """The elementwise increment of the precision; updates its slots in `memory`."""


@dataclass(frozen=True)
class SquaredGradient(Curvature):
    """h = (c g)^2: the squared gradient of the summed loss, if the scalar `gradient_scale` is c = B (default 1).

    Unbiased for the Fisher information of the batch at the optimum, where gradients average to zero.

    Reference: Aitchison 2020, Eq. 18a and 42.
    Checked by: tests/equations/test_adabayes.py.
    """

    def read(self, evidence: Evidence, memory: Memory, n: Scalars) -> Tensor:
        if evidence.squares is not None:  # means of squares over several samples of weights or labels
            squares = evidence.squares.clamp(max=LARGEST[evidence.squares.dtype] ** 2)
            return n["gradient_scale"] * (n["gradient_scale"] * squares) if "gradient_scale" in n else squares
        error = evidence.gradient * n["gradient_scale"] if "gradient_scale" in n else evidence.gradient
        return error * error


@dataclass(frozen=True)
class CentredGradient(Curvature):
    """h = c^2 k_t (g_t - mean_{t-1})^2, an unbiased estimate of the gradient's variance times c^2.

    mean_{t-1} is the debiased moving average of the gradients before this one, with decay d. Under independent
    gradients of variance s^2 it has variance s^2 r_t, r_t = (1-d)/(1+d) (1+d^(t-1))/(1-d^(t-1)), so that
    k_t = 1/(1 + r_t) makes h unbiased at every step. At the first step there is no mean to subtract: h = (c g)^2.

    Reference: Aitchison 2018, section 2.2.8.
    Differs from the paper: the paper does not specify the estimate of the mean.
    Checked by: tests/statistics/test_gradients.py.

    Args:
        decay: d, of the moving average.
    """

    decay: float = 0.99
    slots = ("gradient_mean",)

    def scalars(self, step: int) -> dict[str, float]:
        d, weight = self.decay, self.decay ** (step - 1)
        spread = (1 - d) / (1 + d) * (1 + weight) / (1 - weight) if step > 1 else 0.0
        keep, take = average(d, step)
        return {"mean_keep": keep, "mean_take": take, "mean_unbias": math.sqrt(1 / (1 + spread))}

    def read(self, evidence: Evidence, memory: Memory, n: Scalars) -> Tensor:
        mean = memory["gradient_mean"]
        error = (evidence.gradient - mean) * n["mean_unbias"]
        error = error * n["gradient_scale"] if "gradient_scale" in n else error
        memory["gradient_mean"] = n["mean_keep"] * mean + n["mean_take"] * evidence.gradient
        return error * error


@dataclass(frozen=True)
class Reparameterised(Curvature):
    """h = g(w + d) d/v for a sample w + d of variance v: the expected Hessian by Price's theorem, from gradients alone.

    E[g(w + d) d] = v E[h] for Gaussian d, by integration by parts; h itself may be negative. v is the variance in
    memory divided by the scalar `gradient_scale`.

    Reference: Khan and Rue 2023, Eq. 11; Shen et al., 2024.
    Checked by: tests/equations/test_ivon.py, against ivon-opt and by quadrature.
    """

    def read(self, evidence: Evidence, memory: Memory, n: Scalars) -> Tensor:
        product = evidence.product
        if product is None:
            product = evidence.gradient * evidence.offset  # pyright: ignore[reportOperatorIssue]
        return n["gradient_scale"] * product / memory[VARIANCE]


@dataclass(frozen=True)
class PerExampleSquare(Curvature):
    """h = the mean over examples of (grad l_i)^2: the diagonal of the Gauss-Newton matrix (or of a Fisher).

    It squares per-example gradients. The square of their mean over a batch of B would be B times smaller where the
    gradients average to zero.

    Reference: Khan and Rue 2023, Eq. 45.
    Checked by: tests/equations/test_vogn.py, against BackPACK.
    """

    def read(self, evidence: Evidence, memory: Memory, n: Scalars) -> Tensor:
        # A large input has an infinite square; times an error of zero it is NaN, and no information.
        return evidence.squares.nan_to_num(nan=0.0)  # pyright: ignore[reportOptionalMemberAccess]


@dataclass(frozen=True)
class AbsoluteHessian(Curvature):
    """h = |diagonal of the Hessian|, so that steps decrease the loss where it is concave too.

    Reference: Khan and Rue 2023, Eq. 36-37 and 44.
    Checked by: tests/equations/test_newton.py.
    """

    def read(self, evidence: Evidence, memory: Memory, n: Scalars) -> Tensor:
        return evidence.hessian.abs()  # pyright: ignore[reportOptionalMemberAccess]


@dataclass(frozen=True)
class ExpectedHessian(Curvature):
    """h = the diagonal of the Hessian at weights sampled from the posterior, which may be negative.

    Reference: Khan and Rue 2023, Eq. 46.
    Checked by: tests/equations/test_newton.py.
    """

    def read(self, evidence: Evidence, memory: Memory, n: Scalars) -> Tensor:
        return evidence.hessian  # pyright: ignore[reportReturnType]


# --- moves ---


class Move(ABC):
    """Base class of all moves."""

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of the move's state tensors, which may depend on the hyperparameters of `group`."""
        return ()

    @abstractmethod
    def scalars(self, group: Mapping[str, Any], step: int, step_scale: float) -> dict[str, float]:
        """The scalars `n` that `move` reads; `step_scale` multiplies the whole step."""

    def begin(self, n: dict[str, float], slots: tuple[str, ...]) -> dict[str, float]:
        """The scalars of the first step with these slots, if others were there before: an option was switched on."""
        return n

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
        averaged: whether the gradients that are given are averages already; no further average is kept.

    Reference: Aitchison 2020, Eq. 19b; Khan and Rue 2023, appendix F, Eq. 79-81.
    Differs from the paper: Eq. 81 of Khan and Rue counts the momentum of the precision twice.
    Checked by: tests/equations/test_declarations.py; the momentum by
    tests/equations/test_ivon.py::test_natural_momentum_is_momentum_of_natural_parameters.
    """

    heavy_ball: bool = False
    natural_momentum: bool = False
    averaged: bool = False

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        averages = (MOMENTUM,) if momentum_of(group) and not self.averaged else ()
        return (*averages, LAST_STEP) if self.natural_momentum else averages

    def scalars(self, group: Mapping[str, Any], step: int, step_scale: float) -> dict[str, float]:
        momentum = momentum_of(group)
        if self.heavy_ball:
            return {"step_scale": step_scale, "momentum": momentum}
        keep, take = average(momentum, step)
        return {"step_scale": step_scale, "momentum": keep, "fresh": take}

    def begin(self, n: dict[str, float], slots: tuple[str, ...]) -> dict[str, float]:
        """An average begins with its first value, as in the first step of all."""
        return {**n, "momentum": 0.0, "fresh": 1.0} if MOMENTUM in slots and not self.heavy_ball else n

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
            largest = LARGEST[mean.dtype]
            moved = moved + (n["natural_momentum"] * ratio * memory[LAST_STEP]).clamp(-largest, largest)
            memory[LAST_STEP] = moved - mean  # not the old mean: weights that are loaded since are no step
        return moved


# --- the update ---


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

    def initial(self, slot: str, p: Tensor, prior_variance: Callable[[], float]) -> float | Tensor:
        """The initial value of a state tensor."""
        return prior_variance() if slot in self.transition.variances else 0.0

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
        n = {} if self.curvature is None else self.curvature.scalars(step)
        n |= self.move.scalars(group, step, step_scale)
        if self.curvature is not None:
            n |= self.transition.scalars(step, **dynamics or {})
            if gradient_scale is not None:
                n["gradient_scale"] = gradient_scale
        if group["weight_decay"]:
            n["shrink"] = 1 - float(group["lr"]) * group["weight_decay"]
        if group.get("damping"):
            n["damping"] = group["damping"]
        return n

    def begin(self, n: dict[str, float], slots: tuple[str, ...]) -> dict[str, float]:
        """The scalars of the first step with these slots, if others were there before, or another rule."""
        if not slots:
            return n
        return self.move.begin(n if self.curvature is None else self.transition.begin(n, slots), slots)

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
        dtype = next(iter(memory.values())).dtype if memory else compute_dtype(weight.dtype)
        weight, gradient = weight.to(dtype), gradient.to(dtype)
        if "l2" in n:
            gradient = gradient + n["l2"] * weight
        largest = LARGEST[dtype]  # an average of squares that is infinite once stays infinite
        gradient = gradient.clamp(-largest, largest)
        if self.curvature is None:  # without curvature, the precision of every weight is 1
            precision = Scalar(torch.ones((), dtype=dtype, device=weight.device), tuple(weight.shape))
        else:
            beside = {name: values.to(dtype) for name, values in evidence.items()} if evidence else {}
            seen = Evidence(gradient, **beside)
            increment = self.curvature.read(seen, memory, n)
            if "prior" in n:  # a Gaussian prior: its precision in the same units, and its gradient
                strength = n["prior"] * memory[PRIOR_PRECISION] if PRIOR_PRECISION in memory else n["prior"]
                increment = increment + strength
                n["pull"] = strength * (weight - memory[PRIOR_MEAN] if PRIOR_MEAN in memory else weight)
            precision = self.transition.merge(memory, increment, n)
        if "damping" in n:
            precision = precision.add(n["damping"])
        if "shrink" in n:  # decoupled weight decay: 1 - lr weight_decay
            weight = n["shrink"] * weight
        return self.move.move(weight, gradient, precision, memory, n)


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
    writes: tuple[int, ...] = field(init=False, compare=False)  # see `kernels`

    def __post_init__(self) -> None:
        first = 2 + len(self.evidence)
        object.__setattr__(self, "writes", (0, *range(first, first + len(self.slots))))

    def __call__(self, scalars: Sequence[Any], weight: Tensor, gradient: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        n = dict(zip(self.names, scalars))
        evidence = dict(zip(self.evidence, more))
        memory = dict(zip(self.slots, more[len(self.evidence) :]))
        weight = self.rule(n, weight, gradient, evidence, memory)
        return (weight, *map(memory.__getitem__, self.slots))


kernel_of = cache(Update)  # one object for each rule, so that nothing is computed twice
