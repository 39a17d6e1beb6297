"""Learning rules as belief updates: Bayesian optimizers for PyTorch."""

import importlib
from typing import Any

from bayesgrad import (
    conformal,
    custom_likelihoods,
    distributed,
    families,
    inference,
    integrations,
    likelihoods,
    metrics,
    optim,
    plots,
    posterior,
    samplers,
)
from bayesgrad.data_shards import DataShard
from bayesgrad.joining import joined_state
from bayesgrad.laplace import laplace
from bayesgrad.layers.fisher import SubsampledFisher
from bayesgrad.lost_processes import name_lost_processes
from bayesgrad.posterior import EWC, Posterior

__version__ = "0.2.0"
__all__ = [
    "EWC",
    "DataShard",
    "Posterior",
    "SubsampledFisher",
    "conformal",
    "custom_likelihoods",
    "distributed",
    "families",
    "inference",
    "integrations",
    "joined_state",
    "laplace",
    "likelihoods",
    "metrics",
    "name_lost_processes",
    "optim",
    "plots",
    "posterior",
    "samplers",
]


def __getattr__(name: str) -> Any:
    """`bayesgrad.models`, which needs scikit-learn, is imported when it is first used."""
    if name == "models":
        return importlib.import_module("bayesgrad.models")
    raise AttributeError(f"module 'bayesgrad' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "models"})
