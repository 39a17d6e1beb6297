"""Posterior samplers with the manners of optimizers, and the arithmetic of their temperature."""

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
from bayesgrad.samplers.langevin import SNGD, Langevin
from bayesgrad.samplers.sampler import Diverged

__all__ = [
    "SNGD",
    "Diverged",
    "Langevin",
    "batch_noise",
    "batch_size",
    "damping_bias",
    "langevin_covariance",
    "learning_rate",
    "minibatch_covariance",
    "step_inflation",
    "temperature",
]
