"""Learning rules as belief updates: Bayesian optimizers for PyTorch."""

from bayesgrad import families, inference, metrics, optim, plots, posterior, samplers
from bayesgrad.laplace import laplace
from bayesgrad.layers.fisher import SubsampledFisher
from bayesgrad.posterior import EWC, Posterior

__version__ = "0.1.0"
__all__ = [
    "EWC",
    "Posterior",
    "SubsampledFisher",
    "families",
    "inference",
    "laplace",
    "metrics",
    "optim",
    "plots",
    "posterior",
    "samplers",
]
