"""The family of optimizers that fit a Gaussian by the Bayesian learning rule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bayesgrad import kernels, shards
from bayesgrad.constraints import (
    COUNT,
    FINITE,
    FRACTION,
    NONNEGATIVE,
    OPTIONAL_INTEGER,
    POSITIVE_INTEGER,
    PRIOR_DECAYS,
)
from bayesgrad.layers.network import clean_name
from bayesgrad.optimizer import BeliefOptimizer
from bayesgrad.packing import VARIANCE
from bayesgrad.posterior import GaussianPosterior, Posterior
from bayesgrad.precision import Diagonal
from bayesgrad.rules import Forget, NaturalStep, UpdateRule
from bayesgrad.rules.transition import LARGEST, LAST_VARIANCE
from bayesgrad.rules.update import PRIOR_MEAN, PRIOR_PRECISION
from bayesgrad.sources import WeightSampling
from bayesgrad.warning import warn

IN_THE_AVERAGE = ("kl_weight", "num_data", "prior_precision")  # options that are part of the averaged precision
CHECK_AT_STEP = 1000  # the step at which to warn about a Hessian that has not changed


class NamedPrior:
    """A prior of parameters by their names, for the groups of an optimizer, also those that are added later.

    Args:
        prior: name -> tensors. Those of parameters that the optimizer has are given up as soon as its state has them.
    """

    def __init__(self, prior: Mapping[str, tuple[Tensor, ...]]) -> None:
        self.prior = {clean_name(name): values for name, values in prior.items()}

    def inform(self, optimizer: Any) -> None:
        """Calls `optimizer.inform` for all groups, with the prior of each parameter that has one."""
        check_prior(optimizer.param_groups, self.prior)
        self._inform(optimizer, optimizer.param_groups)

    def inform_last(self, optimizer: Any) -> None:
        """As `inform`, for a group that was added, which may be without a prior; removes one that does not fit."""
        try:
            check_prior(optimizer.param_groups[-1:], self.prior, added=True)
        except ValueError:
            optimizer.param_groups.pop()
            raise
        self._inform(optimizer, optimizer.param_groups[-1:])

    def _inform(self, optimizer: Any, groups: Sequence[dict[str, Any]]) -> None:
        for group in groups:
            named = zip(map(clean_name, group["param_names"]), group["params"])
            optimizer.inform(group, {p: self.prior[name] for name, p in named if name in self.prior})
            group["informed"] = True
        taken = {clean_name(name) for group in groups for name in group["param_names"]}
        self.prior = {name: values for name, values in self.prior.items() if name not in taken}


class VariationalOptimizer(BeliefOptimizer):
    """Base class: fits q = N(m, S^-1) with diagonal S to minimise E_q[loss] + kl_weight KL(q, prior)/N for N data.

    The state is v = 1/(h + kl_weight delta/N), with h the moving average of the curvature of an example's loss and
    delta the prior precision. The variance of q is kl_weight v/N, its precision N h/kl_weight + delta.

    Args:
        params, defaults: as for `BeliefOptimizer`.
        prior: the Gaussian posterior of an earlier task, used as the prior of this one. Parameters are matched by name,
            so pass named parameters (or the model), also to `add_param_group`. Parameters that it does not contain have
            the prior N(0, 1/prior_precision).
    """

    kept = (*BeliefOptimizer.kept, "_prior")
    _prior: NamedPrior | None = None
    accepts = {
        **BeliefOptimizer.accepts,
        "weight_decay": PRIOR_DECAYS,
        "num_data": COUNT,
        "prior_precision": NONNEGATIVE,
        "hess_init": FINITE,
        "kl_weight": FINITE,
        "natural_momentum": FRACTION,
        "samples": POSITIVE_INTEGER,
        "seed": OPTIONAL_INTEGER,
    }

    def load_prior(self, prior: Posterior | None) -> None:
        """Copies the prior of each parameter to the state."""
        if prior is None:
            return
        if not isinstance(prior, GaussianPosterior):
            raise TypeError(f"prior must be a Gaussian posterior, got {type(prior).__name__}.")
        means = prior.mean
        self._prior = NamedPrior({name: (means[name], 1 / variance) for name, variance in prior.variance().items()})
        self._prior.inform(self)

    def group_added(self) -> None:
        if self._prior is not None:
            self._prior.inform_last(self)
        super().group_added()

    def inform(self, group: dict[str, Any], known: Mapping[Tensor, tuple[Tensor, ...]]) -> None:
        """Copies the prior of a group to the state: mean and precision where they are known."""
        for p in group["params"]:
            mean = torch.zeros_like(p, dtype=kernels.compute_dtype(p.dtype))
            precision = torch.full_like(mean, group["prior_precision"])
            for own, value in zip((mean, precision), known.get(p, ())):
                own.copy_(shards.placed_like(value, p))
            self.state[p] |= {PRIOR_MEAN: mean, PRIOR_PRECISION: precision}
        # A distributed checkpoint is read into the tensors that exist, and takes some for all.
        self.initialise({**group, "informed": True}, [p for p in group["params"] if p.requires_grad])

    def slots(self, group: Mapping[str, Any], rule: UpdateRule) -> tuple[str, ...]:
        return (*super().slots(group, rule), *((PRIOR_PRECISION, PRIOR_MEAN) if group.get("informed") else ()))

    def is_partial(self, entry: Mapping[str, Tensor]) -> bool:
        return "step" not in entry

    def rule_of(self, group: Mapping[str, Any]) -> UpdateRule:
        """The rule, with momentum of the natural parameters if `natural_momentum` is not zero."""
        return _with_natural_momentum(type(self).rule) if group["natural_momentum"] else type(self).rule

    def dynamics(self, group: Mapping[str, Any]) -> dict[str, float]:
        beta = group["betas"][1]
        return {"keep": beta, "take": 1 - beta}

    def strength(self, group: Mapping[str, Any]) -> float:
        """The prior precision in units of the curvature of one example."""
        delta = 1.0 if group.get("informed") else group["prior_precision"]
        return group["kl_weight"] * delta / group["num_data"]

    def scalars(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        n = super().scalars(group, step)
        n["prior"] = self.strength(group)
        # Where gradients are strong and curvature is not, weights would overflow without a bound.
        n["radius"] = min(self.clip_radius(group), LARGEST[torch.float32])
        if group["natural_momentum"]:
            n["natural_momentum"] = (
                group["natural_momentum"] if group["lr"] > 0 else 0.0
            )  # where lr is 0, nothing moves
        return n

    def clip_radius(self, group: Mapping[str, Any]) -> float:
        """The bound of each coordinate of a step, before it is multiplied by the learning rate."""
        return math.inf

    def prior_variance(self, group: Mapping[str, Any]) -> float:
        return 1 / (group["hess_init"] + self.strength(group))

    def initial(self, slot: str, group: Mapping[str, Any], p: Tensor) -> float | Tensor:
        if slot == LAST_VARIANCE:  # also where natural momentum is switched on during a run: nothing has changed yet
            return self.state[p][VARIANCE]
        known = self.state[p].get(PRIOR_PRECISION) if slot in self.rule.transition.variances else None
        if known is None:
            return super().initial(slot, group, p)
        return 1 / (group["hess_init"] + self.strength(group) * known)

    def _variance_unit(self, group: Mapping[str, Any]) -> float:
        """The factor from v to the variance of q."""
        return group["kl_weight"] / group["num_data"]

    def variance_of(self, group: Mapping[str, Any], p: Tensor) -> Tensor:
        entry = self.state.get(p, {})
        if VARIANCE in entry:
            return self._variance_unit(group) * Diagonal(entry[VARIANCE]).variance()
        like = torch.ones_like(p, dtype=kernels.compute_dtype(p.dtype))
        return self._variance_unit(group) * self.initial(VARIANCE, group, p) * like

    def weight_sampling(self, evidence: str | None) -> WeightSampling:
        """The source of gradients at weights sampled from q."""
        return WeightSampling(evidence, self._sampling_scalars)

    def _sampling_scalars(self, group: Mapping[str, Any]) -> list[float]:
        return [self._variance_unit(group)]

    def check_changes(self, groups: Sequence[Mapping[str, Any]]) -> None:
        super().check_changes(groups)
        pairs = [(name, old, new) for new, old in zip(groups, self.last_options) for name in IN_THE_AVERAGE]
        changed = [(name, old[name], new[name]) for name, old, new in pairs if old[name] != new[name]]
        if changed and IN_THE_AVERAGE not in self.warned:
            self.warned.add(IN_THE_AVERAGE)
            name, old, new = changed[0]
            warn(
                f"{name} changed from {old:g} to {new:g} during a run: h + kl_weight delta/N is averaged as a whole, "
                f"so variances follow over about {1 / (1 - groups[0]['betas'][1]):g} steps. Build a new optimizer for "
                "variances that do at once.",
            )

    def finished(self) -> None:
        """Warns once, after many steps at sampled weights, if the Hessian still has its initial value."""
        for group in self.param_groups if self.needs.draws else ():
            moved = [
                float(shards.whole((entry[VARIANCE] / self.initial(VARIANCE, group, p) - 1).abs().mean()))
                for p in group["params"]
                if (entry := self.state.get(p)) and VARIANCE in entry and int(entry["step"]) == CHECK_AT_STEP
            ]
            if moved and max(moved) < 0.01:
                warn(
                    f"after {CHECK_AT_STEP} steps the Hessian has changed by {max(moved):.1%} of hess_init="
                    f"{group['hess_init']:g}: the variances are still the initial ones. "
                    f"Lower betas[1]={group['betas'][1]:g} or hess_init.",
                )


@cache
def _with_natural_momentum(rule: UpdateRule) -> UpdateRule:
    assert isinstance(rule.transition, Forget)
    transition = replace(rule.transition, natural_momentum=True)
    return replace(rule, transition=transition, move=NaturalStep(natural_momentum=True))


def check_prior(
    groups: Sequence[Mapping[str, Any]], prior: Mapping[str, tuple[Tensor, ...]], added: bool = False
) -> None:
    """Checks that a prior fits the parameters.

    Args:
        groups: of parameters.
        prior: by the names of parameters without prefixes of compiled modules.
        added: whether the groups are added to others, and may be without a prior.

    Raises:
        ValueError: parameters have no names, or the prior contains none of them, or one with another shape.
    """
    if any(group.get("param_names") is None for group in groups):
        raise ValueError("prior= needs named parameters: pass model.named_parameters().")
    named = {clean_name(name): p for group in groups for name, p in zip(group["param_names"], group["params"])}
    if not named.keys() & prior.keys() and not added:
        raise ValueError(
            f"the prior must contain parameters of the optimizer, such as {next(iter(named))!r}, got none of them."
        )
    for name in named.keys() & prior.keys():
        given, wanted = tuple(prior[name][0].shape), tuple(named[name].shape)
        if given != wanted:
            raise ValueError(f"{name!r} must have the shape {wanted} in the prior, got {given}.")
