"""Posteriors: distributions over the weights of a model, with samples, predictions and storage."""

from bayesgrad.posterior.bernoulli import BernoulliPosterior
from bayesgrad.posterior.concrete import ConcreteDropout
from bayesgrad.posterior.dropout import DropoutPosterior, mc_dropout
from bayesgrad.posterior.ewc import EWC
from bayesgrad.posterior.gaussian import Bound, GaussianPosterior
from bayesgrad.posterior.laplace import LaplacePosterior
from bayesgrad.posterior.posterior import Posterior, load
from bayesgrad.posterior.samples import SampledPosterior, StoredPosterior
from bayesgrad.posterior.store import Samples

__all__ = [
    "EWC",
    "BernoulliPosterior",
    "Bound",
    "ConcreteDropout",
    "DropoutPosterior",
    "GaussianPosterior",
    "LaplacePosterior",
    "Posterior",
    "SampledPosterior",
    "Samples",
    "StoredPosterior",
    "load",
    "mc_dropout",
]
