"""Estimators with the interface of scikit-learn, built on `bayesgrad.inference`; they need scikit-learn."""

try:
    import sklearn as _sklearn  # noqa: F401
except ImportError as error:
    raise ImportError("bayesgrad.models needs scikit-learn: pip install scikit-learn.") from error

from bayesgrad.models import kernels, observations
from bayesgrad.models.factor_analysis import FactorAnalysis
from bayesgrad.models.gaussian_mixture import GaussianMixture
from bayesgrad.models.gaussian_process import GaussianProcess
from bayesgrad.models.glm import GLM
from bayesgrad.models.hidden_markov import HiddenMarkov
from bayesgrad.models.latent_dirichlet import LatentDirichlet
from bayesgrad.models.state_space import LinearStateSpace, States

__all__ = [
    "GLM",
    "FactorAnalysis",
    "GaussianMixture",
    "GaussianProcess",
    "HiddenMarkov",
    "LatentDirichlet",
    "LinearStateSpace",
    "States",
    "kernels",
    "observations",
]
