"""Posterior samplers with the interface of torch.optim, formulas for their temperature, ensembles and diagnostics."""

from bayesgrad.samplers.arithmetic import (
    batch_noise,
    batch_size,
    damping_bias,
    langevin_covariance,
    learning_rate,
    minibatch_covariance,
    step_inflation,
    temperature,
)
from bayesgrad.samplers.chains import Chains
from bayesgrad.samplers.diagnostics import Diagnostics, diagnose, inference_data, trace_plot
from bayesgrad.samplers.ensemble import Ensemble, Predictive
from bayesgrad.samplers.langevin import SNGD, Langevin
from bayesgrad.samplers.parallel import joint_posterior, run_chains
from bayesgrad.samplers.sampler import Diverged

__all__ = [
    "SNGD",
    "Chains",
    "Diagnostics",
    "Diverged",
    "Ensemble",
    "Langevin",
    "Predictive",
    "batch_noise",
    "batch_size",
    "damping_bias",
    "diagnose",
    "inference_data",
    "joint_posterior",
    "langevin_covariance",
    "learning_rate",
    "minibatch_covariance",
    "run_chains",
    "step_inflation",
    "temperature",
    "trace_plot",
]
