"""Optimizers. Each declares its curvature, transition and rule; `bayesgrad.optimizer` has the common `step()`."""

from bayesgrad.optim.adabayes import AdaBayes, AdaBayesFP
from bayesgrad.optim.adabound import AdaBound, AMSBound
from bayesgrad.optim.binary import STE, BayesBiNN
from bayesgrad.optim.dense import DenseFilter
from bayesgrad.optim.dropout import SpikeSlab
from bayesgrad.optim.foof import FOOF
from bayesgrad.optim.ivon import IVON
from bayesgrad.optim.kfac import KFAC
from bayesgrad.optim.kronecker import KroneckerFilter, KroneckerFilterFP
from bayesgrad.optim.momentum import KalmanMomentum
from bayesgrad.optim.natural_gradient import NaturalGradient
from bayesgrad.optim.newton import VON, Newton
from bayesgrad.optim.ogn import OGN, VOGN
from bayesgrad.optim.spectral import SpectralFOOF

__all__ = [
    "FOOF",
    "IVON",
    "KFAC",
    "OGN",
    "STE",
    "VOGN",
    "VON",
    "AMSBound",
    "AdaBayes",
    "AdaBayesFP",
    "AdaBound",
    "BayesBiNN",
    "DenseFilter",
    "KalmanMomentum",
    "KroneckerFilter",
    "KroneckerFilterFP",
    "NaturalGradient",
    "Newton",
    "SpectralFOOF",
    "SpikeSlab",
]
