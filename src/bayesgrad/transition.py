"""How old belief and new evidence meet.

A transition is predict and update in one verb, `merge`, because the rules that stay positive by construction need
both at once. What it remembers is in its slots of `memory`; what it returns is the precision that moves the mean.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesgrad.curvature.gradients import Memory, Scalars, average
from bayesgrad.kernels import sqrt
from bayesgrad.precision import Diagonal, Pair

FLOOR = torch.finfo(torch.float32).tiny


class Transition(ABC):
    """Base of all transitions. `dynamics` are the quantities a declaration hands to `scalars`."""

    slots: tuple[str, ...] = ("variance",)

    def scalars(self, *args: Any, **dynamics: Any) -> dict[str, float]:
        """The scalars that the methods below ask for."""
        return {}

    @abstractmethod
    def merge(self, memory: Memory, increment: Tensor, n: Scalars) -> Diagonal | Pair:
        """The posterior precision; replaces its slots in `memory`."""

    def current_precision(self, memory: Memory, n: Scalars) -> Diagonal:
        """The precision of weights that `memory` holds now."""
        return Diagonal(memory["variance"])

    def clip(self, gradient: Tensor) -> Tensor:
        """The gradient as far as it can be made use of."""
        return gradient

    def drift(self, mean: Tensor, n: Scalars) -> Tensor:
        """The mean's own motion: decoupled weight decay."""
        return n["shrink"] * mean if "shrink" in n else mean


@dataclass(frozen=True)
class Static(Transition):
    """P <- P + h: the weights do not move by themselves, so certainty only grows.

    Reference: 000, section 2.1, in the limit of no process noise (a step size that falls as 1/t).
    """

    def merge(self, memory: Memory, increment: Tensor, n: Scalars) -> Diagonal:
        posterior = Diagonal(memory["variance"]).add(increment)
        memory["variance"] = posterior.storable()
        return posterior


@dataclass(frozen=True)
class Forget(Transition):
    """P <- keep P + take h: old evidence fades.

    With take = 1 this is the fading-memory filter, with take = 1 - keep the moving average of the Bayesian learning
    rule. Its steady state is P = take/(1-keep) <h>: a mean-square normaliser.

    With `retract`, P <- P (1 + x + x^2/2), x = take (h - P)/P, for take = 1 - keep: the same to second order, and at
    least P/2 for any h, so that increments may be negative. With `bounded` the first form, but at least P/2 where h is
    negative.

    With `natural`, P <- ... + natural (P - P_old), momentum of the natural parameter; at least half of what it were
    without.

    Reference: 001, Eq. 28-31; 002, Eq. 12 and appendix F; Lin et al., 2020, for the retraction.
    Checked by: tests/equations/test_declarations.py, test_ivon.py, test_vogn.py, test_newton.py.
    """

    retract: bool = False
    natural_momentum: bool = False
    bounded: bool = False

    @property
    def slots(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ("variance", "last_variance") if self.natural_momentum else ("variance",)

    def scalars(self, *, keep: float, take: float) -> dict[str, float]:
        return {"take": take} if self.retract else {"keep": keep, "take": take}

    def clip(self, gradient: Tensor) -> Tensor:
        return _capped(gradient) if self.retract else gradient

    def merge(self, memory: Memory, increment: Tensor, n: Scalars) -> Diagonal:
        variance = memory["variance"]
        if self.retract:
            x = n["take"] * (increment * variance - 1)
            posterior = Diagonal(variance / (1 + x + 0.5 * x * x))
        else:
            growth = n["keep"] + n["take"] * (increment * variance)
            if self.bounded:
                growth = torch.where(increment < 0, growth.clamp(min=0.5), growth)
            posterior = Diagonal(variance / growth)
        if self.natural_momentum:
            older = memory["older_variance"] = memory["last_variance"]
            change = n["natural_momentum"] * (1 / variance - 1 / older) * posterior.covariance
            posterior = Diagonal(posterior.covariance / (1 + change.clamp(min=-0.5)))
            memory["last_variance"] = variance
        memory["variance"] = posterior.storable()
        return posterior


@dataclass(frozen=True)
class MovingAverage(Transition):
    """P = <h>, a debiased moving average of the increments, kept as a precision because it may be zero.

    The same as `Forget` with take = 1 - keep from no prior at all; whatever damping is added makes it invertible.

    Checked by: tests/equations/test_kfac.py.
    """

    slots = ("moment",)

    def scalars(self, *, decay: float, step: int) -> dict[str, float]:
        keep, take = average(decay, step)
        return {"keep": keep, "take": take, "floor": FLOOR}

    def merge(self, memory: Memory, increment: Tensor, n: Scalars) -> Diagonal:
        memory["moment"] = n["keep"] * memory["moment"] + n["take"] * increment
        return self.current_precision(memory, n)

    def clip(self, gradient: Tensor) -> Tensor:
        return _capped(gradient)

    def current_precision(self, memory: Memory, n: Scalars) -> Diagonal:
        return Diagonal(1 / (memory["moment"] + n["floor"]))


@dataclass(frozen=True)
class OrnsteinUhlenbeck(Transition):
    """v <- r v + q, then 1/v <- 1/v + h: the optimum of each weight drifts while the others are trained.

    For process noise eta^2 per step and stationary variance sigma^2 the exact discretisation has
    r = exp(-eta^2/sigma^2) and q = sigma^2 (1 - r), which leaves sigma^2 invariant for any eta; sigma = inf gives
    r = 1, q = eta^2.

    Its steady state, to first order in eta, is 1/v = 1/(2 sigma^2) + sqrt(1/(4 sigma^4) + <h>/eta^2): a
    root-mean-square normaliser. `steady` returns it in units in which the mean moves by lr v g (see AdaBayesFP):
    1/v = k + sqrt(k^2 + <h>), with k = eta/(2 sigma^2).

    Reference: 001, Eq. 17b, 18a and 21.
    Differs from the paper: whose first-order step r = (1 - eta^2/(2 sigma^2))^2, q = eta^2 needs a bound on eta.
    Checked by: tests/equations/test_adabayes.py, against the root of its own quadratic.
    """

    def scalars(self, *, process: float, stationary: float) -> dict[str, float]:
        """Args: process: eta^2; stationary: sigma^2."""
        if process == 0:
            return {"retain": 1.0, "noise": 0.0}
        if math.isinf(stationary):
            return {"retain": 1.0, "noise": process}
        return {"retain": math.exp(-process / stationary), "noise": -stationary * math.expm1(-process / stationary)}

    def merge(self, memory: Memory, increment: Tensor, n: Scalars) -> Diagonal:
        posterior = Diagonal(memory["variance"]).propagate(n["retain"], n["noise"]).add(increment)
        memory["variance"] = posterior.storable()
        return posterior

    def steady_scalars(self, *, half: float = 0.0) -> dict[str, float]:
        # Where squares of gradients underflow in float32, the floor keeps the step bounded by lr, and finite.
        return {"half": half, "half_square": max(half * half, FLOOR)}

    def steady(self, moment: Tensor, n: Scalars) -> Diagonal:
        return Diagonal(1 / (n["half"] + sqrt(n["half_square"] + moment)))


@dataclass(frozen=True)
class OrnsteinUhlenbeckPair(Transition):
    r"""Each weight's optimum drifts, driven by a momentum that itself drifts.

    .. math::
        p &\leftarrow (1 - \eta_p)\, p + \eta_p\, \xi_p, \quad
        w \leftarrow c_w w + \eta\, p_{old} + \eta_w\, \xi_w, \quad
        c_w = 1 - (\eta^2 + \eta_w^2)/(2\sigma^2)

    and the covariance of the two accordingly; then evidence about w is added. The stationary variance of w is sigma^2
    as far as (eta^2 + eta_w^2)/(2 sigma^2) is small beside eta_p.

    Its steady state, for sigma = inf, eta_w = 0 and small steps, is with s = <h>, r = eta_p/(eta sqrt(s)) and
    phi = sqrt(1 + r/2) - sqrt(r/2): S_wp = eta_p/sqrt(s) phi^2, S_ww = sqrt(2 eta eta_p)/s^(3/4) phi and
    S_pp = S_wp (eta_p + s S_ww)/eta.

    Reference: 000, Eq. 15-20.
    Differs from the paper: whose Eq. 21 is this steady state for r << 1 only.
    Checked by: tests/equations/test_momentum_filter.py, against the 2x2 matrix filter and its Riccati equation.
    """

    slots = ("variance", "cross", "momentum_variance")

    def scalars(self, *, eta: float, eta_p: float, eta_w: float, retain: float) -> dict[str, float]:
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
        memory["variance"] = posterior.of_weights().storable()
        memory["cross"], memory["momentum_variance"] = posterior.cross, posterior.momentum
        return posterior

    def steady_scalars(self, *, eta: float, eta_p: float, count: float) -> dict[str, float]:
        """Args: count: B, for which the information is B^2 times the moment."""
        return {
            "ratio": eta_p / (2 * eta * count),
            "weight_scale": math.sqrt(2 * eta * eta_p / count**3),
            "cross_scale": eta_p / count,
            "weak": eta_p / eta,
            "strong": count * count / eta,
            "floor": FLOOR,
        }

    def steady(self, moment: Tensor, n: Scalars) -> Pair:
        inverse = 1 / sqrt(moment + n["floor"])  # a number over a tensor is rounded twice in eager mode only
        half = n["ratio"] * inverse
        phi = 1 / (sqrt(1 + half) + sqrt(half))
        weight, cross = n["weight_scale"] * (phi * (inverse * sqrt(inverse))), n["cross_scale"] * (phi * phi * inverse)
        return Pair(weight, cross, cross * (n["weak"] + n["strong"] * (moment * weight)))


@dataclass(frozen=True)
class SteadyState(Transition):
    """The steady state of a filter under a moving average of the increments, `of.steady(<h>)`.

    Reference: 001, Algorithm 2.

    Args:
        of: the filter whose fixed point is taken.
        debias: whether the average starts unbiased, as Adam's does and RMSprop's does not.
    """

    of: OrnsteinUhlenbeck | OrnsteinUhlenbeckPair = OrnsteinUhlenbeck()
    debias: bool = True
    slots = ("moment",)

    def scalars(self, *, beta: float, step: int, **dynamics: float) -> dict[str, float]:
        keep, take = average(beta, step) if self.debias else (beta, 1 - beta)
        return {"keep": keep, "take": take} | self.of.steady_scalars(**dynamics)

    def merge(self, memory: Memory, increment: Tensor, n: Scalars) -> Diagonal | Pair:
        memory["moment"] = n["keep"] * memory["moment"] + n["take"] * increment
        return self.steady_state(memory, n)

    def clip(self, gradient: Tensor) -> Tensor:
        return _capped(gradient)

    def current_precision(self, memory: Memory, n: Scalars) -> Diagonal:
        steady = self.steady_state(memory, n)
        return steady.of_weights() if isinstance(steady, Pair) else steady

    def steady_state(self, memory: Memory, n: Scalars) -> Diagonal | Pair:
        return self.of.steady(memory["moment"], n)


def _capped(gradient: Tensor) -> Tensor:
    """Where squares would overflow: an average that is infinite once would stay so."""
    largest = math.sqrt(torch.finfo(gradient.dtype).max) / 4
    return gradient.clamp(-largest, largest)
