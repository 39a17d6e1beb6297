"""Posterior samples with the manners of an optimizer, and what becomes of them."""

from bayesgrad.samplers.chains import Chains
from bayesgrad.samplers.diagnostics import Diagnostics, diagnose, inference_data, trace_plot
from bayesgrad.samplers.ensemble import Diverged, Ensemble, Predictive

__all__ = [
    "Chains",
    "Diagnostics",
    "Diverged",
    "Ensemble",
    "Predictive",
    "diagnose",
    "inference_data",
    "trace_plot",
]
