"""Sources: what an optimizer collects beside gradients."""

from bayesgrad.sources.hessian_diagonal import HessianDiagonal
from bayesgrad.sources.per_example_squares import PerExampleSquares
from bayesgrad.sources.sampled_labels import SampledLabels
from bayesgrad.sources.unit_dropout import UnitDropout
from bayesgrad.sources.weight_sampling import WeightSampling

__all__ = ["HessianDiagonal", "PerExampleSquares", "SampledLabels", "UnitDropout", "WeightSampling"]
