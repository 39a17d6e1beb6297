"""What backward passes tell of the loss's curvature: each estimator reads evidence into a precision."""

from bayesgrad.curvature.evidence import Evidence
from bayesgrad.curvature.fisher import SubsampledFisher
from bayesgrad.curvature.gradients import CentredGradient, Curvature, SquaredGradient
from bayesgrad.curvature.variational import AbsoluteHessian, ExpectedHessian, PerExampleSquare, Reparameterised

__all__ = [
    "AbsoluteHessian",
    "CentredGradient",
    "Curvature",
    "Evidence",
    "ExpectedHessian",
    "PerExampleSquare",
    "Reparameterised",
    "SquaredGradient",
    "SubsampledFisher",
]
