"""Base classes of the optimizers: `BeliefOptimizer`, and `LayerwiseOptimizer` for those that need a model's layers."""

from bayesgrad.optimizer.base import BeliefOptimizer, Parts

__all__ = ["BeliefOptimizer", "Parts"]
