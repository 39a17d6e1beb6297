"""Diagnostics of a run, as numbers that any logger takes."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch

from bayesgrad import shards
from bayesgrad.integrations.automatic import belief_optimizer
from bayesgrad.optim.momentum import PredictedStep
from bayesgrad.parts import entries
from bayesgrad.posterior.filtered import learning_rates
from bayesgrad.preconditioners.refresh import moment_changes
from bayesgrad.rules.update import NaturalStep
from bayesgrad.samplers.sampler import Sampler
from bayesgrad.schedule import relative_lr

SGD_LIMIT = 0.5  # of SGD's learning rate: weights above it are in the SGD limit


class Log(Protocol):
    """A function that stores numbers: `wandb.log`, `mlflow.log_metrics`, `accelerator.log`."""

    def __call__(self, values: dict[str, float], /, *, step: int) -> Any: ...


def diagnostics(optimizer: Any) -> dict[str, float]:
    """Numbers that describe the state of an optimizer, for TensorBoard, MLflow, wandb or a file.

    | name | what it is | of |
    |---|---|---|
    | `lr` | the learning rate of the first group | all |
    | `effective_lr`, `effective_lr_min`, `effective_lr_max` | by what the (averaged) gradient of a weight is multiplied, before a bound: mean, smallest and largest | rules of single weights; of layer rules, the parameters outside of layers |
    | `sgd_share` | the share of weights whose effective learning rate is at least half of `sgd_lr` | AdaBayes, AdaBayesFP |
    | `factor_drift` | the largest relative change of a layer's second moment since it was last inverted | FOOF, KFAC, KroneckerFilterFP |
    | `temperature` | T of the density exp(-loss/T) that is sampled or approximated; `kl_weight` | samplers, variational rules |

    It reads tensors to the host, and is for every hundredth step, not for each.

    Args:
        optimizer: of this package, or a wrapper of one.

    Example:
        >>> from bayesgrad.optim import AdaBayesFP
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = AdaBayesFP([weight], lr=1e-3)
        >>> weight.grad = torch.tensor([1e-6, 1e3])
        >>> optimizer.step()
        >>> diagnostics(optimizer)["sgd_share"]
        0.5

    Checked by: tests/contract/test_integration_helpers.py.
    """  # noqa: E501
    own = belief_optimizer(optimizer)
    found = {"lr": float(own.param_groups[0]["lr"])} | _rates(own)
    changes = [change for _, entry in entries(own) for change in moment_changes(entry)]
    if changes:
        found["factor_drift"] = float(torch.stack([c.cpu().double() for c in changes]).max())
    if isinstance(own, Sampler):
        found["temperature"] = own.temperature()
    elif "kl_weight" in own.param_groups[0]:
        found["temperature"] = float(own.param_groups[0]["kl_weight"])
    return found


@torch.no_grad()
def _rates(own: Any) -> dict[str, float]:
    """The learning rates of weights that follow the optimizer's own rule, and how many are in the SGD limit."""
    if own.rule.curvature is None or type(own.rule.move) not in (NaturalStep, PredictedStep):  # others bound the rates
        return {}
    total, slow, count, lows, highs = 0.0, 0.0, 0, [], []
    bounded = "sgd_lr" in own.param_groups[0]
    for group in own.param_groups:
        limit = SGD_LIMIT * relative_lr({**group, "lr": group["last_lr"]}) * group.get("sgd_lr", math.inf)
        for p in group["params"]:
            if "step" not in own.state.get(p, {}) or (own.preconditioner and own.preconditioner.covers(p)):
                continue
            rates = learning_rates(own, group, p).double()
            damping = own.scalars(group, int(own.state[p]["step"])).get("damping", 0.0)
            if damping:  # step_scale / (P + damping)
                rates = 1 / (1 / rates + damping / own.step_scale({**group, "lr": group["last_lr"]}))
            total += float(shards.whole(rates.sum()))
            slow += float(shards.whole((rates >= limit).double().sum()))
            count += p.numel()
            lows.append(float(shards.whole(rates.min())))
            highs.append(float(shards.whole(rates.max())))
    if not count:
        return {}
    rates = {"effective_lr": total / count, "effective_lr_min": min(lows), "effective_lr_max": max(highs)}
    return rates | ({"sgd_share": slow / count} if bounded else {})
