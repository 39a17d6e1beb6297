"""Learning rules as belief updates: Bayesian optimizers for PyTorch."""

from bayesgrad import curvature, families, inference, metrics, optim, plots, posterior, samplers
from bayesgrad.laplace import laplace
from bayesgrad.posterior import EWC, Posterior

__version__ = "0.1.0"
__all__ = [
    "EWC",
    "Posterior",
    "curvature",
    "families",
    "inference",
    "laplace",
    "metrics",
    "optim",
    "plots",
    "posterior",
    "samplers",
]
