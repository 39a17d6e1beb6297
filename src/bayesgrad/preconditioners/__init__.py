"""Preconditioners: beliefs that do not factorise over elements."""

from bayesgrad.preconditioners.dense_kalman import DenseKalman
from bayesgrad.preconditioners.kronecker_belief import KroneckerBelief, LayerBelief, Whitening
from bayesgrad.preconditioners.kronecker_factors import InputFactor, KroneckerFactors
from bayesgrad.preconditioners.orthogonal import OrthogonalSteps
from bayesgrad.preconditioners.woodbury import Woodbury

__all__ = [
    "DenseKalman",
    "InputFactor",
    "KroneckerBelief",
    "KroneckerFactors",
    "LayerBelief",
    "OrthogonalSteps",
    "Whitening",
    "Woodbury",
]
