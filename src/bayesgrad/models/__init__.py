"""Ready estimators over the inference engine."""

from bayesgrad.models import kernels, observations
from bayesgrad.models.gaussian_process import GaussianProcess
from bayesgrad.models.state_space import LinearStateSpace, States

__all__ = ["GaussianProcess", "LinearStateSpace", "States", "kernels", "observations"]
