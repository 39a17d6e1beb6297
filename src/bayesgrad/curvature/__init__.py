"""What backward passes tell of the loss's curvature: each estimator reads evidence into a precision."""

from bayesgrad.curvature.evidence import Evidence
from bayesgrad.curvature.fisher import SubsampledFisher
from bayesgrad.curvature.gradients import CentredGradient, Curvature, SquaredGradient

__all__ = ["CentredGradient", "Curvature", "Evidence", "SquaredGradient", "SubsampledFisher"]
