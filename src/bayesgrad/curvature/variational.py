"""Curvature for beliefs that are fitted by the Bayesian learning rule: a Hessian, or what stands in for it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bayesgrad.curvature.evidence import Evidence
from bayesgrad.curvature.gradients import Curvature, Memory, Scalars


@dataclass(frozen=True)
class Reparameterised(Curvature):
    """h = g(w + d) d/v for a draw w + d of variance v: the expected Hessian by Price's theorem, from gradients alone.

    E[g(w + d) d] = v E[h] for Gaussian d, by an integration by parts; h itself may well be negative. v is the belief's
    variance: that in memory divided by the number `information`.

    Reference: 002, Eq. 11; Shen et al., 2024.
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

    Squares are taken of per-example gradients: the square of their mean would be B times smaller, where gradients
    average out.

    Reference: 002, Eq. 47-48.
    Checked by: tests/equations/test_vogn.py, against BackPACK.
    """

    def read(self, evidence: Evidence, memory: Memory, n: Scalars) -> Tensor:
        return evidence.squares  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class AbsoluteHessian(Curvature):
    """h = |diagonal of the Hessian|, so that steps go downhill where the loss is concave too.

    Reference: 002, Eq. 36-37 and 44.
    Checked by: tests/equations/test_newton.py.
    """

    def read(self, evidence: Evidence, memory: Memory, n: Scalars) -> Tensor:
        return evidence.hessian.abs()  # pyright: ignore[reportOptionalMemberAccess]


@dataclass(frozen=True)
class ExpectedHessian(Curvature):
    """h = the diagonal of the Hessian at weights drawn from the belief, which may be negative.

    Reference: 002, Eq. 46.
    Checked by: tests/equations/test_newton.py.
    """

    def read(self, evidence: Evidence, memory: Memory, n: Scalars) -> Tensor:
        return evidence.hessian  # pyright: ignore[reportReturnType]
