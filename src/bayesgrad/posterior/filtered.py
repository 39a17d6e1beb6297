"""The posterior of an optimizer: a copy of its belief."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bayesgrad import likelihoods, shards
from bayesgrad.belief import Belief, Joint
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.network import parameters_of
from bayesgrad.likelihoods import Likelihood
from bayesgrad.posterior.gaussian import GaussianPosterior
from bayesgrad.posterior.posterior import Posterior
from bayesgrad.precision import Diagonal
from bayesgrad.schedule import unit_lr


def names_in(optimizer: Any, model: nn.Module) -> dict[int, str]:
    """The id of each parameter of the optimizer -> its name in the model; raises if the model lacks one.

    It opens every `posterior()`, which is refused inside `sampled()`.
    """
    optimizer.require_mean("posterior()")
    shards.refuse_posterior(p for group in optimizer.param_groups for p in group["params"])
    names = {id(p): name for name, p in parameters_of(model).items()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in names:
                raise ValueError(f"{optimizer.name_of(p)} is not in the model: pass the model that was optimised.")
    return names


def is_constant(optimizer: Any, p: Tensor) -> bool:
    """Whether a parameter is frozen and was never updated; its state may have a prior."""
    return not p.requires_grad and not float(optimizer.state.get(p, {}).get("step", 0))


def check_scale(scale: float) -> None:
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be a finite positive number, got {scale!r}.")


def gaussian_posterior(optimizer: Any, model: nn.Module, scale: float) -> GaussianPosterior:
    """The belief of an optimizer about the model's weights, which are the mean; see `BeliefOptimizer.posterior`."""
    check_scale(scale)
    names = names_in(optimizer, model)
    with optimizer.mode(training=False):
        beliefs: dict[str, Belief] = dict(optimizer.joint_beliefs(names, scale))
        joint = {name for belief in beliefs.values() if isinstance(belief, Joint) for name in belief.shapes}
        for group in optimizer.param_groups:
            for p in group["params"]:
                if names[id(p)] in joint or is_constant(optimizer, p):
                    continue
                variance = optimizer.variance_of(group, p) * scale
                beliefs[names[id(p)]] = Belief(p.detach().clone(), Diagonal(variance))
        return GaussianPosterior(beliefs, model)


def with_likelihood(found: Posterior, likelihood: str | Likelihood | None, group: Mapping[str, Any]) -> Posterior:
    """The posterior, with a likelihood; with None that of the options of an optimizer."""
    reading = likelihoods.named(group.get("likelihood", found.likelihood) if likelihood is None else likelihood)
    found.likelihood, found.noise_scale = reading, reading.noise_scale
    return found


def filtered_variance(optimizer: Any, group: Mapping[str, Any], p: Tensor) -> Tensor:
    """sigma_post^2 of each weight after the last step of a filter.

    The mean moves by step_scale P^-1 g for the mean gradient g, and by sigma_post^2 (B g), so
    sigma_post^2 = step_scale P^-1 / B.
    """
    name, rule = type(optimizer).__name__, optimizer.rule
    if rule.curvature is None or "batch_size" not in group:
        raise TypeError(f"{name} has no posterior: it does not estimate the variance of weights.")
    if group["batch_size"] is None:
        raise ValueError(f"a posterior needs the number of examples in a gradient: pass batch_size= to {name}.")
    return learning_rates(optimizer, group, p) / group["batch_size"]


def learning_rates(optimizer: Any, group: Mapping[str, Any], p: Tensor) -> Tensor:
    """step_scale P^-1 after the last step: by what a rule of single weights multiplies the (averaged) gradient."""
    # Before the first step with lr > 0 the belief is the prior, which is given for the unit of the state.
    entry = optimizer.state.get(p, {})
    lr = group["last_lr"] if "step" in entry else unit_lr(group)
    then = {**group, "lr": lr or 1.0, "base_lr": group["base_lr"] or 1.0}
    step_scale = optimizer.step_scale(then)
    if "step" not in entry:
        return torch.full_like(p, step_scale * optimizer.prior_variance(then), dtype=compute_dtype(p.dtype))
    transition = optimizer.rule.transition
    scalars = transition.scalars(int(entry["step"]), **optimizer.dynamics(then))
    try:
        return step_scale * transition.current_precision(entry, scalars).variance()
    except KeyError as error:
        raise ValueError(
            f"the state of {optimizer.name_of(p)} has no {error}: its layer was frozen, or taken over by another rule, "
            "after it was trained. Call posterior() before that, or train the layer for a step again."
        ) from None
