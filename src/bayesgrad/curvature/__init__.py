"""What gradients tell of the loss's curvature: each estimator reads evidence into a precision increment."""

from bayesgrad.curvature.evidence import Evidence
from bayesgrad.curvature.gradients import CentredGradient, Curvature, SquaredGradient

__all__ = ["CentredGradient", "Curvature", "Evidence", "SquaredGradient"]
