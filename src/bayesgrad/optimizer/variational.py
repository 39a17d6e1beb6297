"""Filters that fit a Gaussian belief by the Bayesian learning rule, at the mean or at weights drawn from it."""

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
CHECK_AT_STEP = 1000  # steps after which a Hessian that has not moved is worth a word
_NOTHING = torch.empty(0, 0, 0)
Mark = tuple[Tensor, int] | None
Noise = Mapping[Any, Tensor] | Callable[[Tensor], Tensor]


class VariationalOptimizer(BeliefOptimizer):
    """A Gaussian belief N(m, S^-1), fitted to minimise E_q[loss] + kl_weight KL(q, prior)/N for N data.

    The state holds v = 1/(h + kl_weight delta/N), with h the running mean curvature of an example's loss and delta the
    prior's precision: the belief's variance is kl_weight v/N.

    Args:
        params, defaults: as for `BeliefOptimizer`.
        prior: a Gaussian posterior of an earlier task, to be the prior of this one; parameters are found by name, so
            `params` must be named, or the model's. Those that it does not name have the prior N(0, 1/prior_precision).
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
        """Reads the prior of each parameter into the state."""
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
        """Adds a group of parameters; they have the prior N(0, 1/prior_precision)."""
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
        """The prior's precision beside the curvature of one example."""
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
        """What turns v into the belief's variance."""
        return group["kl_weight"] / group["num_data"]

    def _variance(self, group: Mapping[str, Any], p: Tensor) -> Tensor:
        entry = self.state.get(p, {})
        if "variance" in entry:
            return self._scale(group) * Diagonal(entry["variance"]).variance()
        like = torch.ones_like(p, dtype=kernels.compute_dtype(p.dtype))
        return self._scale(group) * self.initial("variance", group, p) * like


class WeightSampling(BeliefOptimizer):
    """A filter whose gradients are taken at weights drawn from the belief.

    A named optimizer says in `keeps` what it wants to know of a draw at the step: nothing, where gradients were taken
    (`offset`), the drawn weight's derivative by the mean (`slope`), or the squares of gradients. `draws` is how weights
    are drawn, and `sampling_scalars` the scalars that takes.
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
        """Drops what draws have shown since the last step."""
        self._offsets: dict[Tensor, Tensor] = {}  # of the one draw that a gradient is from
        self._sums: dict[Tensor, Tensor] = {}  # over several draws
        self._seen: dict[Tensor, Tensor | None] = {}  # gradients these sums belong to
        self._sampled_params: set[Tensor] = set()  # whose gradients are from draws
        self._count = 0  # of draws
        self._fresh: set[Tensor] = set()  # whose gradients begin within the present context
        self._before: dict[Tensor, Mark] = {}  # gradients at its beginning

    # --- sampling_scalars ---

    @property
    def takes_draws(self) -> bool:
        """Whether gradients are to be taken inside `sampled()`."""
        return True

    def sampling_scalars(self, group: Mapping[str, Any]) -> list[float]:
        """The scalars that the kernel of a draw asks for; for optimizers that draw weights."""
        raise RuntimeError(f"{type(self).__name__} has no belief to draw weights from.")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim; counts draws from none."""
        super().add_param_group(param_group)
        self.param_groups[-1].setdefault("draws", 0)

    @contextmanager
    def sampled(self, noise: Noise | None = None) -> Iterator[None]:
        """Within the context the weights are one draw from the belief; afterwards they are the mean, bit for bit.

        Run forward and backward passes inside; `zero_grad` may stand inside or outside, clipping and unscaling come
        between the context and `step()`. Micro-batches looped inside hold the draw; a context inside the loop draws
        anew. Scale losses as for any accumulation: by the number of micro-batches and draws. Parameters that do not
        require gradients are not perturbed. Under `torch.no_grad()` a draw leaves no trace in training.

        Args:
            noise: variates to use in place of drawn ones (standard normal for a Gaussian belief, uniform in (0, 1) for
                binary weights), by parameter, or a function of the parameter.
        """
        if self.__dict__.get("_active_draw"):
            raise RuntimeError("sampled() is already active: one context is one draw, leave it before the next.")
        training = torch.is_grad_enabled()
        drawn = self._layout_of_draws()
        elements = sum(part.elements for part in drawn)
        if training:
            self._begin(drawn)
        else:  # what an earlier draw has shown is in buffers that this one writes into
            self._offsets = {p: offset.clone() for p, offset in self._offsets.items()}
        key = self._next_key(training)
        finished = False
        self._active_draw = []
        try:
            with torch.no_grad():
                for part in drawn:
                    spreads = [self.state[p][self.block_type.state_key] for p in part.params]
                    self._active_draw.append(part)
                    part.perturb(spreads, self.sampling_scalars(part.group), key, noise, _fused(part, elements))
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
        """What is perturbed together, kept from draw to draw for as long as it fits."""
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
            # Orders differ where a group has several kinds: compare like with like the next time.
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

    # --- what draws show ---

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim; forgets what draws have shown."""
        super().zero_grad(set_to_none)
        self._reset_draws()
        every = [p for group in self.param_groups for p in group["params"]]
        self._fresh = set(every)
        self._zeroed = self._before = {p: _mark(p) for p in every}

    def _begin(self, drawn: list[SampledBlock]) -> None:
        """Marks the gradients as they are, and remembers those that are there already."""
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
        """Turns the evidence of a single draw into a sum that others can be added to."""
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
                f"a gradient of shape {tuple(missing[0].shape)} was not taken at sampled weights: run forward and "
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
            # Whatever was done to the gradient since (clipping, unscaling) is done to the sum.
            factor = 1.0 if seen is None else torch.where(now == seen, 1.0, now / seen).nan_to_num(0.0, 0.0, 0.0)
            sums[p] = self._sums[p] * (self._count * factor * factor if self.draw_evidence == "squares" else factor)
        return {"squares" if self.draw_evidence == "squares" else "product": sums}

    # --- steps ---

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As `BeliefOptimizer.step`. A closure is called inside of `samples` draws, whose gradients are averaged.

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
        """Keeps what one of several draws of a closure has shown to the layers."""

    def _warn_if_unchanged(self) -> None:
        """Once, after many steps: a Hessian that is still where it began says nothing."""
        for group in (group for group in self.param_groups if "hess_init" in group):
            moved = [
                float((entry["variance"] / self.initial("variance", group, p) - 1).abs().mean())
                for p in group["params"]
                if (entry := self.state.get(p)) and "variance" in entry and int(entry["step"]) == CHECK_AT_STEP
            ]
            if moved and max(moved) < 0.01:
                warnings.warn(
                    f"after {CHECK_AT_STEP} steps the Hessian has moved by {max(moved):.1%} of hess_init="
                    f"{group['hess_init']:g}: the variances are still the initial ones. "
                    f"Lower betas[1]={group['betas'][1]:g} or hess_init.",
                    UserWarning,
                    stacklevel=3,
                )


class SampledVariational(WeightSampling, VariationalOptimizer):
    """A variational filter whose gradients are taken at weights drawn from its Gaussian."""

    def sampling_scalars(self, group: Mapping[str, Any]) -> list[float]:
        return [self._scale(group)]


def check_prior(groups: list[dict[str, Any]], prior: Mapping[str, Tensor]) -> None:
    """Refuses a prior that is about other parameters.

    Raises:
        ValueError: parameters have no names, or the prior knows none of them, or some of another shape.
    """
    if any(group.get("param_names") is None for group in groups):
        raise ValueError("prior= needs the parameters' names: pass model.named_parameters().")
    named = {name: p for group in groups for name, p in zip(group["param_names"], group["params"])}
    if not named.keys() & prior.keys():
        raise ValueError(f"the prior says nothing of any parameter, {next(iter(named))!r} for one: leave it out.")
    for name in named.keys() & prior.keys():
        if prior[name].shape != named[name].shape:
            raise ValueError(
                f"{name!r} has shape {tuple(prior[name].shape)} in the prior and {tuple(named[name].shape)} in the "
                "model."
            )


def _mark(p: Tensor) -> Mark:
    return None if p.grad is None else (p.grad, p.grad._version)


def _same(a: Mark, b: Mark) -> bool:
    """Whether a gradient has been left alone in between."""
    return a is b or (a is not None and b is not None and a[0] is b[0] and a[1] == b[1])


def _fused(part: SampledBlock, elements: int) -> bool:
    wanted = part.group["fused"]
    return kernels.should_compile(part.device, elements) if wanted is None else wanted
