"""The Bayesian learning rule as an engine: nodes, factors, messages, one step."""

from bayesgrad.inference.collapsed import Chunked, Collapsed
from bayesgrad.inference.engine import OutsideDomain, Result, Sites, elbo, message, run, step
from bayesgrad.inference.expectation import Delta, GaussHermite, MonteCarlo, QuasiMonteCarlo
from bayesgrad.inference.factor import (
    Expected,
    Factor,
    Linear,
    LogDensity,
    MultiProjected,
    Prior,
    Projected,
    linear_gaussian,
)
from bayesgrad.inference.minimize import Minimum, minimize
from bayesgrad.inference.mixing import settle
from bayesgrad.inference.node import Node
from bayesgrad.inference.online import online
from bayesgrad.inference.pointwise import Pointwise

__all__ = [
    "Chunked",
    "Collapsed",
    "Delta",
    "Expected",
    "Factor",
    "GaussHermite",
    "Linear",
    "LogDensity",
    "Minimum",
    "MonteCarlo",
    "MultiProjected",
    "Node",
    "OutsideDomain",
    "Pointwise",
    "Prior",
    "Projected",
    "QuasiMonteCarlo",
    "Result",
    "Sites",
    "elbo",
    "linear_gaussian",
    "message",
    "minimize",
    "online",
    "run",
    "settle",
    "step",
]
