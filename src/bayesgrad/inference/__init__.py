"""Variational inference by the Bayesian learning rule: nodes, factors, messages and steps.

A `Node` is a variable with a distribution q; a `Factor` is one term of the model's log joint density (see
`bayesgrad.inference.factor`); `step` updates nodes from the messages of factors; `run` repeats it.
"""

from bayesgrad.inference.check import Check
from bayesgrad.inference.conjugate import Linear, Prior, linear_gaussian
from bayesgrad.inference.drivers import Minimum, minimize, online, run_to_convergence
from bayesgrad.inference.engine import OutsideDomain, Result, Sites, elbo, message, run, step
from bayesgrad.inference.expectation import Delta, GaussHermite, MonteCarlo, QuasiMonteCarlo
from bayesgrad.inference.factor import (
    ElementwiseFactor,
    Expected,
    Factor,
    LinearPredictorFactor,
    MultiLinearPredictorFactor,
)
from bayesgrad.inference.latent_variable import Chunked, LatentVariableFactor
from bayesgrad.inference.log_density import LogDensity
from bayesgrad.inference.node import Node

__all__ = [
    "Check",
    "Chunked",
    "Delta",
    "ElementwiseFactor",
    "Expected",
    "Factor",
    "GaussHermite",
    "LatentVariableFactor",
    "Linear",
    "LinearPredictorFactor",
    "LogDensity",
    "Minimum",
    "MonteCarlo",
    "MultiLinearPredictorFactor",
    "Node",
    "OutsideDomain",
    "Prior",
    "QuasiMonteCarlo",
    "Result",
    "Sites",
    "elbo",
    "linear_gaussian",
    "message",
    "minimize",
    "online",
    "run",
    "run_to_convergence",
    "step",
]
