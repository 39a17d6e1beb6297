"""Optimizers that fit a Gaussian by the Bayesian learning rule, with gradients at its mean or at its samples."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesgrad import kernels, noise
from bayesgrad.block import gradient_of
from bayesgrad.block.sampled import SampledBlock
from bayesgrad.optimizer.base import BeliefOptimizer
from bayesgrad.optimizer.constraints import COUNT, FRACTION, INTEGER, NONNEGATIVE, POSITIVE, POSITIVE_INTEGER
from bayesgrad.posterior import GaussianPosterior, Posterior
from bayesgrad.precision import Diagonal

PRIOR = ("prior_precision", "prior_mean")
CHECK_AT_STEP = 1000  # the step at which to warn about a Hessian that has not changed
_NOTHING = torch.empty(0, 0, 0)
Mark = tuple[Tensor, int] | None
Noise = Mapping[Any, Tensor] | Callable[[Tensor], Tensor]


class VariationalOptimizer(BeliefOptimizer):
    """Base class: fits q = N(m, S^-1) with diagonal S to minimise E_q[loss] + kl_weight KL(q, prior)/N for N data.

    The state is v = 1/(h + kl_weight delta/N), with h the moving average of the curvature of an example's loss and
    delta the prior precision. The variance of q is kl_weight v/N.

    Args:
        params, defaults: as for `BeliefOptimizer`.
        prior: the Gaussian posterior of an earlier task, used as the prior of this one. Parameters are matched by name,
            so pass named parameters (or the model). Parameters that it does not contain have the prior
            N(0, 1/prior_precision).
    """

    accepts = {
        **BeliefOptimizer.accepts,
        "num_data": COUNT,
        "prior_precision": NONNEGATIVE,
        "hess_init": POSITIVE,
        "kl_weight": POSITIVE,
        "clip_radius": POSITIVE,
        "natural_momentum": FRACTION,
        "samples": POSITIVE_INTEGER,
        "seed": INTEGER,
    }

    def _load_prior(self, prior: Posterior | None) -> None:
        """Copies the prior of each parameter to the state."""
        if prior is None:
            return
        if not isinstance(prior, GaussianPosterior):
            raise TypeError(f"prior must be a Gaussian posterior, got {type(prior).__name__}.")
        means, variances = prior.mean, prior.variance()
        check_prior(self.param_groups, means)
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"]):
                mean = torch.zeros_like(p, dtype=kernels.compute_dtype(p.dtype))
                precision = torch.full_like(mean, group["prior_precision"])
                if name in means:
                    mean.copy_(means[name])
                    precision.copy_(1 / variances[name])
                self.state[p] |= {"prior_mean": mean, "prior_precision": precision}
            group["informed"] = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group; its parameters have the prior N(0, 1/prior_precision)."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("draws", 0)
        group.setdefault("informed", False)

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return (*super().slots(group), *(PRIOR if group.get("informed") else ()))

    def _is_partial(self, entry: Mapping[str, Tensor]) -> bool:
        return "step" not in entry

    def dynamics(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        beta = group["betas"][1]
        return {"keep": beta, "take": 1 - beta}

    def gradient_scale(self, group: Mapping[str, Any]) -> float | None:
        return group["num_data"] / group["kl_weight"]

    def strength(self, group: Mapping[str, Any]) -> float:
        """The prior precision in units of the curvature of one example."""
        delta = 1.0 if group.get("informed") else group["prior_precision"]
        return group["kl_weight"] * delta / group["num_data"]

    def scalars(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        n = super().scalars(group, step)
        n["prior"] = self.strength(group)
        if math.isfinite(group.get("clip_radius", math.inf)):
            n["radius"] = group["clip_radius"]
        if group["natural_momentum"]:
            n["natural_momentum"] = (
                group["natural_momentum"] if group["lr"] > 0 else 0.0
            )  # where lr is 0, nothing moves
        return n

    def prior_variance(self, group: Mapping[str, Any]) -> float:
        return 1 / (group["hess_init"] + self.strength(group))

    def initial(self, slot: str, group: Mapping[str, Any], p: Tensor) -> float | Tensor:
        known = self.state[p].get("prior_precision") if slot in ("variance", "last_variance") else None
        if known is None:
            return super().initial(slot, group, p)
        return 1 / (group["hess_init"] + self.strength(group) * known)

    def _scale(self, group: Mapping[str, Any]) -> float:
        """The factor from v to the variance of q."""
        return group["kl_weight"] / group["num_data"]

    def _variance(self, group: Mapping[str, Any], p: Tensor) -> Tensor:
        entry = self.state.get(p, {})
        if "variance" in entry:
            return self._scale(group) * Diagonal(entry["variance"]).variance()
        like = torch.ones_like(p, dtype=kernels.compute_dtype(p.dtype))
        return self._scale(group) * self.initial("variance", group, p) * like


class WeightSampling(BeliefOptimizer):
    """Base class of optimizers whose gradients are computed at weights sampled from the belief.

    `draw_evidence` is what the step needs of a draw beside the gradient: None, the difference between sampled weight
    and mean (`"offset"`), the derivative of the sampled weight by the mean (`"slope"`), or the squared gradient of each
    draw (`"squares"`). `block_type` implements the sampling, with the scalars `sampling_scalars(group)`.
    """

    draw_evidence: ClassVar[str | None] = "offset"
    block_type: ClassVar[type[SampledBlock]] = SampledBlock

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reset_draws()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset_draws()

    def _reset_draws(self) -> None:
        """Discards the record of draws since the last step."""
        self._offsets: dict[Tensor, Tensor] = {}  # offset (or slope) of a parameter whose gradient is from one draw
        self._sums: dict[Tensor, Tensor] = {}  # sums of contributions, if the gradient is from several draws
        self._seen: dict[Tensor, Tensor | None] = {}  # gradients that belong to these sums
        self._sampled_params: set[Tensor] = set()  # parameters whose gradients were computed in sampled()
        self._count = 0  # number of draws
        self._fresh: set[Tensor] = set()  # parameters without a gradient at the beginning of the current context
        self._before: dict[Tensor, Mark] = {}  # gradients at its beginning

    # --- sampling ---

    @property
    def takes_draws(self) -> bool:
        """Whether gradients must be computed inside `sampled()`."""
        return True

    def sampling_scalars(self, group: Mapping[str, Any]) -> list[float]:
        """The scalars of the sampling kernel; defined by optimizers that sample weights."""
        raise RuntimeError(f"{type(self).__name__} cannot sample weights.")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim; the number of draws starts at zero."""
        super().add_param_group(param_group)
        self.param_groups[-1].setdefault("draws", 0)

    @contextmanager
    def sampled(self, noise: Noise | None = None) -> Iterator[None]:
        """A context in which weights are one sample of the belief; afterwards they are the mean again, bit for bit.

        Run forward and backward passes inside. Call `zero_grad` inside or before it; clip and unscale gradients between
        the context and `step()`. Micro-batches inside one context share the sample; a context for each samples anew.
        Divide losses by the number of micro-batches and draws, as for any gradient accumulation. Parameters that do not
        require gradients are not perturbed. Draws under `torch.no_grad()` do not affect training.

        Args:
            noise: noise to use in place of random numbers (standard normal for a Gaussian belief, uniform in (0, 1) for
                binary weights), as a dict by parameter or as a function of the parameter.
        """
        if self.__dict__.get("_active_draw"):
            raise RuntimeError("sampled() is already active: leave the context before entering it again.")
        training = torch.is_grad_enabled()
        drawn = self._layout_of_draws()
        elements = sum(part.elements for part in drawn)
        if training:
            self._begin(drawn)
        else:  # offsets of an earlier draw are in buffers that this draw overwrites
            self._offsets = {p: offset.clone() for p, offset in self._offsets.items()}
        key = self._next_key(training)
        finished = False
        self._active_draw = []
        try:
            with torch.no_grad():
                for part in drawn:
                    states = [self.state[p][self.block_type.state_key] for p in part.params]
                    self._active_draw.append(part)
                    part.perturb(states, self.sampling_scalars(part.group), key, noise, _fused(part, elements))
            yield
            finished = True
        finally:
            with torch.no_grad():
                for part in self._active_draw:
                    part.restore(self.draw_evidence is not None and training and finished, _fused(part, elements))
            self._active_draw = []
            if training and finished:
                self._collect(drawn)
            self._before = {}

    def _layout_of_draws(self) -> list[SampledBlock]:
        """The blocks of parameters to perturb; reused from draw to draw until parameters change."""
        parts: list[SampledBlock] = self.__dict__.get("_drawn", [])
        wanted = [(group, [p for p in group["params"] if p.requires_grad]) for group in self.param_groups]
        every = [p for _, params in wanted for p in params]
        if [p for part in parts for p in part.params] != every or not all(part.fits() for part in parts):
            starts, start = {}, 0
            for group in self.param_groups:
                for p in group["params"]:
                    starts[p] = start
                    start += p.numel()
            parts = []
            for group, params in wanted:
                for kind in dict.fromkeys((p.dtype, p.device) for p in params):
                    some = [p for p in params if (p.dtype, p.device) == kind]
                    parts.append(self.block_type(group, some, [starts[p] for p in some]))
            # With several dtypes or devices in a group the order differs; the blocks are then built for each draw.
            self._drawn = parts if [p for part in parts for p in part.params] == every else []
        owners = {p: group for group, params in wanted for p in params}
        for part in parts:
            part.group = owners[part.params[0]]  # loading a state replaces groups
        for group, params in wanted:
            if any(self.state.get(p, {}).get(self.block_type.state_key, _NOTHING).shape != p.shape for p in params):
                with torch.no_grad():
                    self._initialise(group, params, self.slots(group))
        return parts

    def _next_key(self, training: bool) -> noise.Key:
        first = self.param_groups[0]
        if training:
            first["draws"] += 1
            return noise.key(first["seed"], first["draws"])
        self._draws_without_grad = self.__dict__.get("_draws_without_grad", 0) + 1
        return noise.key(first["seed"], first["draws"], self._draws_without_grad)

    # --- gradients of draws ---

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim; discards the record of draws."""
        super().zero_grad(set_to_none)
        self._reset_draws()
        every = [p for group in self.param_groups for p in group["params"]]
        self._fresh = set(every)
        self._zeroed = self._before = {p: _mark(p) for p in every}

    def _begin(self, drawn: list[SampledBlock]) -> None:
        """Records which gradients exist already, and their values."""
        params = [p for part in drawn for p in part.params]
        self._before = {p: _mark(p) for p in params}
        zeroed = self.__dict__.get("_zeroed", {})
        self._fresh = {p for p in params if p.grad is None or (p in zeroed and _same(zeroed[p], self._before[p]))}
        for p in params:
            if p in self._fresh:
                continue
            if self.draw_evidence is not None:
                self._fold(p)
                self._seen[p] = gradient_of(p).clone()

    def _fold(self, p: Tensor) -> None:
        """Replaces the offset of a single draw by its contribution, to which others can be added."""
        offset = self._offsets.pop(p, None)
        if offset is not None:
            self._sums[p] = self._contribution(gradient_of(p), offset)

    def _contribution(self, gradient: Tensor, offset: Tensor) -> Tensor:
        gradient = gradient.to(kernels.compute_dtype(gradient.dtype))
        return gradient.square() if self.draw_evidence == "squares" else gradient * offset

    def _collect(self, drawn: list[SampledBlock]) -> None:
        self._count += 1
        for part in drawn:
            for p, offset in part.offsets():
                if p.grad is None or _same(_mark(p), self._before[p]):
                    continue
                self._sampled_params.add(p)
                if self.draw_evidence is None:
                    continue
                if p in self._fresh:
                    self._offsets[p] = offset
                    continue
                seen = self._seen.get(p)
                new = gradient_of(p) - seen if seen is not None else gradient_of(p)
                more = self._contribution(new, offset)
                self._sums[p] = self._sums[p] + more if p in self._sums else more
                self._seen[p] = gradient_of(p).clone()

    def evidence(self, groups: list[dict[str, Any]], active: list[list[Tensor]]) -> dict[str, Mapping[Tensor, Tensor]]:
        params = [p for some in active for p in some]
        missing = [p for p in params if p not in self._sampled_params]
        if missing:
            raise RuntimeError(
                f"a gradient of shape {tuple(missing[0].shape)} was not computed at sampled weights: run forward and "
                f"backward passes inside `with optimizer.sampled():`, then call {type(self).__name__}.step()."
            )
        if self.draw_evidence is None:
            return super().evidence(groups, active)
        if not self._sums:
            return {} if self.draw_evidence == "squares" else {self.draw_evidence: self._offsets}
        sums = {}
        for p in params:
            if p in self._offsets:
                sums[p] = self._contribution(gradient_of(p), self._offsets[p])
                continue
            seen, now = self._seen[p], gradient_of(p)
            # Apply later changes of the gradient (clipping, unscaling) to the sum.
            factor = 1.0 if seen is None else torch.where(now == seen, 1.0, now / seen).nan_to_num(0.0, 0.0, 0.0)
            sums[p] = self._sums[p] * (self._count * factor * factor if self.draw_evidence == "squares" else factor)
        return {"squares" if self.draw_evidence == "squares" else "product": sums}

    # --- steps ---

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As `BeliefOptimizer.step`; a closure is called for each of `samples` draws, and the gradients are averaged.

        Args:
            closure: re-evaluates the model, calls backward and returns the loss.
        """
        loss = None if closure is None else self._average_draws(closure)
        super().step()
        self._reset_draws()
        self._warn_if_unchanged()
        return loss

    def _average_draws(self, closure: Callable[[], Any]) -> Any:
        samples = int(self.param_groups[0]["samples"])
        losses, totals, sums = [], {}, {}
        for _ in range(samples):
            self.zero_grad()
            with torch.enable_grad(), self.sampled():
                losses.append(closure())
            if samples == 1:
                return losses[0]
            self._store_draw(samples)
            for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                totals[p] = totals[p] + gradient_of(p) if p in totals else gradient_of(p).clone()
                if self.draw_evidence is not None and p in self._offsets:
                    part = self._contribution(gradient_of(p), self._offsets[p])
                    sums[p] = sums[p] + part if p in sums else part
        self._reset_draws()
        self._count = 1
        self._sampled_params = set(totals)
        for p, total in totals.items():
            p.grad = total / samples
        self._sums = {p: value / samples for p, value in sums.items()}
        self._seen = dict.fromkeys(sums)
        return sum(losses[1:], losses[0]) / samples if losses[0] is not None else None

    def _store_draw(self, samples: int) -> None:
        """Stores what one of several draws of a closure gives beside gradients."""

    def _warn_if_unchanged(self) -> None:
        """Warns once, after many steps, if the Hessian still has its initial value."""
        for group in (group for group in self.param_groups if "hess_init" in group):
            moved = [
                float((entry["variance"] / self.initial("variance", group, p) - 1).abs().mean())
                for p in group["params"]
                if (entry := self.state.get(p)) and "variance" in entry and int(entry["step"]) == CHECK_AT_STEP
            ]
            if moved and max(moved) < 0.01:
                warnings.warn(
                    f"after {CHECK_AT_STEP} steps the Hessian has changed by {max(moved):.1%} of hess_init="
                    f"{group['hess_init']:g}: the variances are still the initial ones. "
                    f"Lower betas[1]={group['betas'][1]:g} or hess_init.",
                    UserWarning,
                    stacklevel=3,
                )


class SampledVariational(WeightSampling, VariationalOptimizer):
    """Base class of variational optimizers whose gradients are computed at samples of q."""

    def sampling_scalars(self, group: Mapping[str, Any]) -> list[float]:
        return [self._scale(group)]


def check_prior(groups: list[dict[str, Any]], prior: Mapping[str, Tensor]) -> None:
    """Checks that a prior fits the parameters.

    Raises:
        ValueError: parameters have no names, or the prior contains none of them, or one with another shape.
    """
    if any(group.get("param_names") is None for group in groups):
        raise ValueError("prior= needs named parameters: pass model.named_parameters().")
    named = {name: p for group in groups for name, p in zip(group["param_names"], group["params"])}
    if not named.keys() & prior.keys():
        raise ValueError(
            f"the prior must contain parameters of the optimizer, such as {next(iter(named))!r}, got none of them."
        )
    for name in named.keys() & prior.keys():
        if prior[name].shape != named[name].shape:
            raise ValueError(
                f"{name!r} must have the shape {tuple(named[name].shape)} in the prior, got {tuple(prior[name].shape)}."
            )


def _mark(p: Tensor) -> Mark:
    return None if p.grad is None else (p.grad, p.grad._version)


def _same(a: Mark, b: Mark) -> bool:
    """Whether a gradient did not change between two marks."""
    return a is b or (a is not None and b is not None and a[0] is b[0] and a[1] == b[1])


def _fused(part: SampledBlock, elements: int) -> bool:
    wanted = part.group["fused"]
    return kernels.should_compile(part.device, elements) if wanted is None else wanted
