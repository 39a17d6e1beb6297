"""Estimators of the curvature of the loss, from the results of backward passes."""

from bayesgrad.curvature.evidence import Evidence
from bayesgrad.curvature.gradients import CentredGradient, Curvature, SquaredGradient
from bayesgrad.curvature.variational import AbsoluteHessian, ExpectedHessian, PerExampleSquare, Reparameterised
from bayesgrad.layers.fisher import SubsampledFisher

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
