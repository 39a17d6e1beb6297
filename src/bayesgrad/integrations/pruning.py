"""Pruning of Optuna trials, from any training loop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def report(trial: Any, metrics: Mapping[str, Any], monitor: str, step: int) -> None:
    """Reports one of the metrics of a run to an Optuna trial.

    A value that is not finite prunes at once: pruners of Optuna let a trial go on whose first values are NaN.

    Args:
        trial: `optuna.Trial`.
        metrics: name -> number.
        monitor: the name of the metric to report.
        step: of the run.

    Raises:
        optuna.TrialPruned: if the trial is to be pruned.
        KeyError: there is no such metric.
    """
    try:
        from optuna import TrialPruned
    except ImportError as error:  # pragma: no cover
        raise ImportError("pruning needs optuna: pip install optuna.") from error
    if monitor not in metrics:
        raise KeyError(f"there is no metric {monitor!r}: monitor one of {sorted(metrics)}.")
    value = float(metrics[monitor])
    if not math.isfinite(value):
        raise TrialPruned(f"{monitor} is {value} at step {step}.")
    trial.report(value, step)
    if trial.should_prune():
        raise TrialPruned(f"pruned at step {step}, with {monitor}={value:g}.")
