"""Curvature estimates for the Bayesian learning rule: the Hessian, or an approximation of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bayesgrad.curvature.evidence import Evidence
from bayesgrad.curvature.gradients import Curvature, Memory, Scalars


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
