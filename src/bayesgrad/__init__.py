"""Learning rules as belief updates: Bayesian optimizers for PyTorch."""

from bayesgrad import curvature, optim, posterior, samplers
from bayesgrad.laplace import laplace
from bayesgrad.posterior import Posterior

__version__ = "0.1.0"
__all__ = ["Posterior", "curvature", "laplace", "optim", "posterior", "samplers"]
