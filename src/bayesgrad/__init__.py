"""Learning rules as belief updates: Bayesian optimizers for PyTorch."""

from bayesgrad import curvature, optim, posterior
from bayesgrad.laplace import laplace
from bayesgrad.posterior import EWC, Posterior

__version__ = "0.1.0"
__all__ = ["EWC", "Posterior", "curvature", "laplace", "optim", "posterior"]
