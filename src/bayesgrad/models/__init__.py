"""Ready estimators over the inference engine, with scikit-learn's manners; they need scikit-learn."""

from bayesgrad.models import kernels, observations
from bayesgrad.models.gaussian_process import GaussianProcess
from bayesgrad.models.glm import GLM
from bayesgrad.models.hidden_markov import HiddenMarkov
from bayesgrad.models.state_space import LinearStateSpace, States

__all__ = ["GLM", "GaussianProcess", "HiddenMarkov", "LinearStateSpace", "States", "kernels", "observations"]
