"""Exponential families: log-partition, mean map and its inverse, entropy, divergence, samples."""

from bayesgrad.families.family import Family, Parameters
from bayesgrad.families.gaussian import DiagonalGaussian, FixedGaussian, Gaussian

__all__ = ["DiagonalGaussian", "Family", "FixedGaussian", "Gaussian", "Parameters"]
