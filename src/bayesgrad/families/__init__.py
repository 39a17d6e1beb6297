"""Exponential families: log-partition, mean map and its inverse, entropy, divergence, samples."""

from bayesgrad.families.discrete import Bernoulli, Categorical
from bayesgrad.families.family import Family, Parameters
from bayesgrad.families.gaussian import DiagonalGaussian, FixedGaussian, Gaussian
from bayesgrad.families.matrix import NormalWishart, TiedNormalWishart, Wishart
from bayesgrad.families.mixture import MixtureOfGaussians
from bayesgrad.families.point import Point
from bayesgrad.families.positive import Beta, Dirichlet, Gamma

__all__ = [
    "Bernoulli",
    "Beta",
    "Categorical",
    "DiagonalGaussian",
    "Dirichlet",
    "Family",
    "FixedGaussian",
    "Gamma",
    "Gaussian",
    "MixtureOfGaussians",
    "NormalWishart",
    "Parameters",
    "Point",
    "TiedNormalWishart",
    "Wishart",
]
