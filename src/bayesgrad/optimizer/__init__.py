"""Every optimizer of this package is a `BeliefOptimizer`; those that look at layers are a `LayerwiseOptimizer`."""

from bayesgrad.optimizer.base import BeliefOptimizer, Parts

__all__ = ["BeliefOptimizer", "Parts"]
