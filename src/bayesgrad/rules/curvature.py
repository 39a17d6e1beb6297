"""Curvatures: the information of a batch about each weight, from its gradient and what sources collect beside it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Memory = dict[str, Tensor]
Scalars = Mapping[str, Any]


def average(decay: float, step: int) -> tuple[float, float]:
    """The weights of the old average and of the `step`-th value (from 1) in a debiased moving average.

    For m_t = d m_{t-1} + (1-d) x_t, the debiased <x>_t = m_t/(1-d^t) obeys
    <x>_t = d (1-d^(t-1))/(1-d^t) <x>_{t-1} + (1-d)/(1-d^t) x_t, so it can be stored without a correction.
    """
    level = 1 - decay**step
    return decay * (1 - decay ** (step - 1)) / level, (1 - decay) / level


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
            return (
                n["gradient_scale"] * (n["gradient_scale"] * evidence.squares)
                if "gradient_scale" in n
                else evidence.squares
            )
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
        return n["gradient_scale"] * product / memory["variance"]


@dataclass(frozen=True)
class PerExampleSquare(Curvature):
    """h = the mean over examples of (grad l_i)^2: the diagonal of the Gauss-Newton matrix (or of a Fisher).

    It squares per-example gradients. The square of their mean over a batch of B would be B times smaller where the
    gradients average to zero.

    Reference: Khan and Rue 2023, Eq. 47-48.
    Checked by: tests/equations/test_vogn.py, against BackPACK.
    """

    def read(self, evidence: Evidence, memory: Memory, n: Scalars) -> Tensor:
        return evidence.squares  # pyright: ignore[reportReturnType]


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
