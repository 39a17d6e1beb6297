"""Transitions: how the precision of each weight changes in one step.

An optimizer of this package keeps a Gaussian belief about each weight. Its mean is the parameter w, its variance is v,
and its precision is P = 1/v. A step has three parts. In AdaBayes, with g = `w.grad` (the gradient of the mean loss), B
the batch size, and r and q the decay and the noise of the variance in one step:

| part | question | in AdaBayes |
|---|---|---|
| curvature | How much information does this batch add? | `SquaredGradient`: h = (B g)^2 |
| transition | How do old precision and new information combine? | `OrnsteinUhlenbeck`: v <- r v + q, 1/v <- 1/v + h |
| move | How does the mean move, given the precision? | `NaturalStep`: w <- w - v B g |

The curvature returns an increment h for each weight. The transition turns the old state and h into the new precision
P = 1/v. The move then changes the mean with that precision. Replacing only the transition gives other optimizers:

| transition | precision | with `SquaredGradient` and `NaturalStep` |
|---|---|---|
| `Static` | P <- P + h | a step size that falls as 1/t |
| `Forget` | P <- keep P + take h | division by the mean square of the gradient |
| `OrnsteinUhlenbeck` | v <- r v + q, then P <- 1/v + h | AdaBayes |
| `OrnsteinUhlenbeckPair` | the same for a weight and its momentum, 2x2 | with `PredictedStep`: KalmanMomentum |
| `MovingAverage` | P = <h> | division by the mean square, without a prior |
| `SteadyState(OrnsteinUhlenbeck())` | P = k + sqrt(k^2 + <h>) | AdaBayesFP: h = g^2, w <- w - lr g/P; k = 0: Adam |

<h> is a moving average of h; in formulas for a steady state it is the expectation.

A Kalman filter has two steps, predict and update. A transition does both in one method, `merge`.
(`Forget(retract=True)` and `SteadyState` cannot be split into two.) `merge` reads and replaces the tensors in `memory`
that are named in `slots`, and returns the precision:

    >>> memory = {"variance": torch.tensor([2.0])}  # precision 0.5
    >>> precision = Static().merge(memory, torch.tensor([1.5]), {})
    >>> precision.variance(), memory["variance"]
    (tensor([0.5000]), tensor([0.5000]))

`rules.update.UpdateRule` calls `merge` in each step, elementwise, compiled for large models. `n`
holds the numbers of this step: those from `scalars`, and those of the curvature, the move and the optimizer (`shrink`,
`natural_momentum`). An optimizer without a curvature never calls `merge`; all its precisions are 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesgrad.kernels import sqrt
from bayesgrad.packing import VARIANCE
from bayesgrad.precision import Diagonal, Pair

FLOOR = torch.finfo(torch.float32).tiny
LAST_VARIANCE = "last_variance"  # the slot of the variance before the last step
OLDER_VARIANCE = "older_variance"  # in memory during a step: the variance before the last, for `NaturalStep`

# A quarter of the largest number whose square is finite, 4.6e18 in float32: the bound of gradients.
LARGEST = {dtype: math.sqrt(torch.finfo(dtype).max) / 4 for dtype in (torch.float32, torch.float64)}

Memory = dict[str, Tensor]
Scalars = Mapping[str, Any]


def average(decay: float, step: int) -> tuple[float, float]:
    """The weights of the old average and of the `step`-th value (from 1) in a debiased moving average.

    For m_t = d m_{t-1} + (1-d) x_t, the debiased <x>_t = m_t/(1-d^t) obeys
    <x>_t = d (1-d^(t-1))/(1-d^t) <x>_{t-1} + (1-d)/(1-d^t) x_t, so it can be stored without a correction.
    """
    level = 1 - decay**step
    return decay * (1 - decay ** (step - 1)) / level, (1 - decay) / level


class Transition(ABC):
    """Base class of all transitions.

    `slots` names the state tensors of a weight; those in `variances` start at the variance of the prior. An optimizer
    passes its `dynamics(group)` to `scalars`.
    """

    slots: tuple[str, ...] = (VARIANCE,)
    variances: tuple[str, ...] = (VARIANCE, LAST_VARIANCE)

    def scalars(self, *step: Any, **dynamics: Any) -> dict[str, float]:
        """The scalars `n` that the other methods read, by the number of the step (from 1) and `dynamics`."""
        return {}

    def begin(self, n: dict[str, float], slots: tuple[str, ...]) -> dict[str, float]:
        """The scalars of the first step with these slots, if it is not the first step of all."""
        return n

    @abstractmethod
    def merge(self, memory: Memory, increment: Tensor, n: Scalars) -> Diagonal | Pair:
        """Combines the old state with a new increment.

        Args:
            memory: state tensors by slot; replaced by the new ones.
            increment: h, the information of this batch, in the shape of the weights.
            n: scalars.

        Returns:
            The new precision.
        """

    def current_precision(self, memory: Memory, n: Scalars) -> Diagonal:
        """The precision of the weights according to the state in `memory`, without an update."""
        return Diagonal(memory[VARIANCE])


@dataclass(frozen=True)
class Static(Transition):
    """P <- P + h: the optimal weights are constant, so the precision only grows.

    Reference: Aitchison 2018, Eq. 13-14, the limit of no process noise (a step size that falls as 1/t).
    """

    def merge(self, memory: Memory, increment: Tensor, n: Scalars) -> Diagonal:
        posterior = Diagonal(memory[VARIANCE]).add(increment)
        memory[VARIANCE] = posterior.storable()
        return posterior


@dataclass(frozen=True)
class Forget(Transition):
    """P <- keep P + take h: the weight of old increments decays exponentially.

    With take = 1 this is the fading-memory filter, whose variance grows without bound where gradients are zero. With
    take = 1 - keep it is the moving average of the Bayesian learning rule. Its steady state is P = take/(1-keep) <h>: a
    mean-square normaliser.

    Args:
        retract: P <- P (1 + x + x^2/2), x = take (h - P)/P, for take = 1 - keep. This equals keep P + take h to first
            order in x and is at least P/2 for any h, so increments may be negative.
        bounded: P <- keep P + take h, but at least P/2 where h is negative.
        natural_momentum: add gamma (P_t - P_{t-1}) to P_{t+1}: momentum of the natural parameter of a Gaussian. The
            result is at least half of what it is without momentum. Also writes `memory[OLDER_VARIANCE]`, the variance
            before the last, for the move; it is not saved.

    Reference: Aitchison 2020, Eq. 28-31; Khan and Rue 2023, Eq. 12, and appendix F, Eq. 79-81, for the momentum; Lin
    et al., 2020, for the retraction.
    Checked by: tests/equations/test_declarations.py, test_ivon.py, test_vogn.py, test_newton.py; the momentum by
    tests/equations/test_ivon.py::test_natural_momentum_is_momentum_of_natural_parameters.
    """

    retract: bool = False
    natural_momentum: bool = False
    bounded: bool = False

    @property
    def slots(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (VARIANCE, LAST_VARIANCE) if self.natural_momentum else (VARIANCE,)

    def scalars(self, step: int = 1, *, keep: float, take: float) -> dict[str, float]:
        return {"take": take} if self.retract else {"keep": keep, "take": take}

    def merge(self, memory: Memory, increment: Tensor, n: Scalars) -> Diagonal:
        variance = memory[VARIANCE]
        if self.retract:
            x = n["take"] * (increment * variance - 1)
            posterior = Diagonal(variance / (1 + x * (1 + 0.5 * x)))  # in this form x = -inf is not inf - inf
        else:
            growth = n["keep"] + n["take"] * (increment * variance)
            if self.bounded:
                growth = torch.where(increment < 0, growth.clamp(min=0.5), growth)
            posterior = Diagonal(variance / growth)
        if self.natural_momentum:
            older = memory[OLDER_VARIANCE] = memory[LAST_VARIANCE]
            change = n["natural_momentum"] * (1 / variance - 1 / older) * posterior.covariance
            posterior = Diagonal(posterior.covariance / (1 + change.clamp(min=-0.5)))
            memory[LAST_VARIANCE] = variance
        # Without a prior the variance of a weight whose increments are zero grows in every step.
        posterior = Diagonal(posterior.covariance.clamp(max=LARGEST[variance.dtype]))
        memory[VARIANCE] = posterior.storable()
        return posterior


@dataclass(frozen=True)
class MovingAverage(Transition):
    """P = <h>, a debiased moving average of the increments.

    This is `Forget` with take = 1 - keep and without a prior. The state is the precision, not the variance, because
    the precision may be zero. The optimizer's damping makes it invertible.

    Checked by: tests/equations/test_kfac.py.
    """

    slots = ("moment",)

    def scalars(self, step: int = 1, *, decay: float) -> dict[str, float]:
        keep, take = average(decay, step)
        return {"keep": keep, "take": take, "floor": FLOOR}

    def merge(self, memory: Memory, increment: Tensor, n: Scalars) -> Diagonal:
        memory["moment"] = n["keep"] * memory["moment"] + n["take"] * increment
        return self.current_precision(memory, n)

    def current_precision(self, memory: Memory, n: Scalars) -> Diagonal:
        return Diagonal(1 / (memory["moment"] + n["floor"]))


@dataclass(frozen=True)
class OrnsteinUhlenbeck(Transition):
    """v <- r v + q, then 1/v <- 1/v + h: the optimum of each weight drifts while the other weights are trained.

    For process noise eta^2 per step and stationary variance sigma^2 the exact discretisation has
    r = exp(-eta^2/sigma^2) and q = sigma^2 (1 - r), which leaves sigma^2 invariant for any eta; sigma = inf gives
    r = 1, q = eta^2.

    Its steady state, to first order in eta, is 1/v = 1/(2 sigma^2) + sqrt(1/(4 sigma^4) + <h>/eta^2): a
    root-mean-square normaliser. In AdaBayes, eta is the learning rate and h = (B g)^2. `steady` returns P eta/B, for
    which the step is w <- w - lr g/P: k + sqrt(k^2 + <g^2>), with k = eta/(2 B sigma^2).

    Reference: Aitchison 2020, Eq. 17b, 18a and 21.
    Differs from the paper: the paper's first-order step r = (1 - eta^2/(2 sigma^2))^2, q = eta^2 needs a bound on eta.
    Checked by: tests/equations/test_adabayes.py, against the root of its fixed-point equation.
    """

    def scalars(self, step: int = 1, *, process: float, stationary: float) -> dict[str, float]:
        """Args: process: eta^2; stationary: sigma^2."""
        if process == 0:
            return {"retain": 1.0, "noise": 0.0}
        if math.isinf(stationary):
            return {"retain": 1.0, "noise": process}
        return {"retain": math.exp(-process / stationary), "noise": -stationary * math.expm1(-process / stationary)}

    def merge(self, memory: Memory, increment: Tensor, n: Scalars) -> Diagonal:
        posterior = Diagonal(memory[VARIANCE]).propagate(n["retain"], n["noise"]).add(increment)
        memory[VARIANCE] = posterior.storable()
        return posterior

    def steady_scalars(self, *, half: float = 0.0) -> dict[str, float]:
        """Args: half: k."""
        # Where squares of gradients underflow in float32, the floor keeps the step bounded by lr, and finite.
        return {"half": half, "half_square": max(half * half, FLOOR)}

    def steady(self, moment: Tensor, n: Scalars) -> Diagonal:
        """The precision k + sqrt(k^2 + moment)."""
        return Diagonal(1 / (n["half"] + sqrt(n["half_square"] + moment)))


@dataclass(frozen=True)
class OrnsteinUhlenbeckPair(Transition):
    r"""The optimum of each weight drifts, driven by a momentum that itself drifts.

    .. math::
        p \leftarrow (1 - \eta_p)\, p + \eta_p\, \xi_p, \quad
        w \leftarrow c_w w + \eta\, p_{old} + \eta_w\, \xi_w, \quad
        c_w = 1 - (\eta^2 + \eta_w^2)/(2\sigma^2)

    S is the covariance of weight (w) and momentum (p); xi_p and xi_w are standard normal noise. S follows from these
    equations; then the information h about w is added. The stationary
    variance of w is sigma^2 if (eta^2 + eta_w^2)/(2 sigma^2) is small compared with eta_p.

    Its steady state, for sigma = inf, eta_w = 0 and small steps, is with s = <h>, a = eta_p/(eta sqrt(s)) and
    phi = sqrt(1 + a/2) - sqrt(a/2): S_wp = eta_p/sqrt(s) phi^2, S_ww = sqrt(2 eta eta_p)/s^(3/4) phi and
    S_pp = S_wp (eta_p + s S_ww)/eta.

    Reference: Aitchison 2018, Eq. 15-20.
    Differs from the paper: Eq. 21 is this steady state for a << 1 only.
    Checked by: tests/equations/test_momentum_filter.py, against the 2x2 matrix filter and its Riccati equation.
    """

    slots = (VARIANCE, "cross", "momentum_variance")

    def scalars(self, step: int = 1, *, eta: float, eta_p: float, eta_w: float, retain: float) -> dict[str, float]:
        """Args: retain: c_w."""
        keep = 1 - eta_p
        return {
            "retain": retain * retain,
            "couple": 2 * retain * eta,
            "kick": eta * eta,
            "noise": eta_w * eta_w,
            "cross_retain": keep * retain,
            "cross_kick": keep * eta,
            "momentum_retain": keep * keep,
            "momentum_noise": eta_p * eta_p,
        }

    def merge(self, memory: Memory, increment: Tensor, n: Scalars) -> Pair:
        ww, wp, pp = (memory[slot] for slot in self.slots)
        prior = Pair(
            n["retain"] * ww + n["couple"] * wp + n["kick"] * pp + n["noise"],
            n["cross_retain"] * wp + n["cross_kick"] * pp,
            n["momentum_retain"] * pp + n["momentum_noise"],
        )
        posterior = prior.add(increment)
        memory[VARIANCE] = posterior.of_weights().storable()
        memory["cross"], memory["momentum_variance"] = posterior.cross, posterior.momentum
        return posterior

    def steady_scalars(self, *, eta: float, eta_p: float, count: float) -> dict[str, float]:
        """Args: count: B; the information of a batch is B^2 times the moment."""
        return {
            "ratio": eta_p / (2 * eta * count),
            "weight_scale": math.sqrt(2 * eta * eta_p / count**3),
            "cross_scale": eta_p / count,
            "weak": eta_p / eta,
            "strong": count * count / eta,
            "floor": FLOOR,
        }

    def steady(self, moment: Tensor, n: Scalars) -> Pair:
        """The steady-state covariance for <h> = B^2 moment."""
        inverse = 1 / sqrt(moment + n["floor"])  # scalar/tensor is rounded twice, but only in eager mode
        half = n["ratio"] * inverse
        phi = 1 / (sqrt(1 + half) + sqrt(half))
        weight, cross = n["weight_scale"] * (phi * (inverse * sqrt(inverse))), n["cross_scale"] * (phi * phi * inverse)
        return Pair(weight, cross, cross * (n["weak"] + n["strong"] * (moment * weight)))


@dataclass(frozen=True)
class SteadyState(Transition):
    """The steady state of another transition, `of.steady(<h>)`, for a moving average <h> of the increments.

    Args:
        of: the transition whose fixed point is used.
        debias: whether the average is debiased, as in Adam; RMSprop does not debias.

    Reference: Aitchison 2020, Algorithm 2.
    """

    of: OrnsteinUhlenbeck | OrnsteinUhlenbeckPair = OrnsteinUhlenbeck()
    debias: bool = True
    slots = ("moment",)

    def scalars(self, step: int = 1, *, beta: float, **dynamics: float) -> dict[str, float]:
        keep, take = average(beta, step) if self.debias else (beta, 1 - beta)
        return {"keep": keep, "take": take} | self.of.steady_scalars(**dynamics)

    def begin(self, n: dict[str, float], slots: tuple[str, ...]) -> dict[str, float]:
        """A debiased average begins with its first value, as in the first step of all."""
        return {**n, "keep": 0.0, "take": 1.0} if self.debias and "moment" in slots else n

    def merge(self, memory: Memory, increment: Tensor, n: Scalars) -> Diagonal | Pair:
        memory["moment"] = n["keep"] * memory["moment"] + n["take"] * increment
        return self.steady_state(memory, n)

    def current_precision(self, memory: Memory, n: Scalars) -> Diagonal:
        steady = self.steady_state(memory, n)
        return steady.of_weights() if isinstance(steady, Pair) else steady

    def steady_state(self, memory: Memory, n: Scalars) -> Diagonal | Pair:
        """The precision for the average in `memory`."""
        return self.of.steady(memory["moment"], n)
