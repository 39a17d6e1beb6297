"""Elementwise filters with a choice of Fisher estimate, and optionally gradients at sampled weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesgrad import likelihoods
from bayesgrad.curvature import CentredGradient, Curvature, SquaredGradient
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.fisher import check_outputs
from bayesgrad.layers.recorder import check_graph
from bayesgrad.optimizer.base import BeliefOptimizer
from bayesgrad.optimizer.constraints import BOOLEAN, INTEGER, POSITIVE_INTEGER, one_of
from bayesgrad.optimizer.update import Parts
from bayesgrad.optimizer.variational import Noise, WeightSampling


class FisherOptimizer(WeightSampling):
    """Base class of filters that add an estimate of the Fisher information of a batch to each weight's precision.

    `fisher` selects the estimate: the squared gradient of the summed loss (`"empirical"`), the variance of that
    gradient over time (`"centered"`), or its square for labels sampled from the model (`"sampled"`), which
    `observe(outputs)` computes with a backward pass of its own.

    With `sample_weights`, gradients are computed at weights sampled from the belief, inside
    `with optimizer.sampled():` (statistical linearisation).

    Reference: Aitchison 2018, sections 2.2.2 and 2.2.8.
    Checked by: tests/contract/test_evidence.py.
    """

    draw_evidence: ClassVar[str | None] = None
    accepts = {
        **BeliefOptimizer.accepts,
        "fisher": one_of("empirical", "centered", "sampled"),
        "likelihood": one_of("categorical", "bernoulli", "gaussian"),
        "sample_weights": BOOLEAN,
        "samples": POSITIVE_INTEGER,
        "seed": INTEGER,
    }

    def fisher_curvature(self, group: Mapping[str, Any]) -> Curvature:
        """The curvature for the group's `fisher`."""
        return CentredGradient() if group["fisher"] == "centered" else SquaredGradient()

    def parts(self, group: Mapping[str, Any]) -> Parts:
        return Parts(self.fisher_curvature(group), self.transition, self.rule)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim; `fisher` and `sample_weights` must be the same in all groups."""
        given = {**self.defaults, **param_group}
        self._check(given)
        for other in self.param_groups[:1]:
            for name in ("fisher", "sample_weights"):
                if given.get(name) != other.get(name):
                    raise ValueError(
                        f"{name} must be the same in all groups, got {given.get(name)!r} beside {other[name]!r}."
                    )
        super().add_param_group(param_group)

    # --- sampled labels ---

    def _reset_draws(self) -> None:
        super()._reset_draws()
        self._observed: dict[Tensor, Tensor] = {}  # gradients for sampled labels
        self._losses = 0  # the number of losses in their sum
        self._marked: list[tuple[int, int]] = []

    def observe(self, outputs: Tensor, labels: Tensor | None = None) -> None:
        """Samples labels from the outputs and stores the gradient of their summed loss until the next step.

        Does nothing unless `fisher="sampled"`. Call it before `loss.backward()`, with the same outputs or with those of
        another batch. Several calls act like one call with a larger batch.

        Args:
            outputs: outputs of the model with their graph; neither the graph nor `.grad` is changed.
            labels: replace the sampled labels.
        """
        group = self.param_groups[0]
        if group["fisher"] != "sampled":
            return
        check_outputs(outputs)
        check_graph(outputs)
        likelihood = likelihoods.named(group["likelihood"])
        if labels is None:
            labels = likelihoods.draw(likelihood, outputs, group["seed"], group["draws"])
            group["draws"] += 1
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        gradients = torch.autograd.grad(
            outputs, params, likelihood.residual(outputs, labels), retain_graph=True, allow_unused=True
        )
        self._losses += likelihood.losses(outputs)
        for p, gradient in zip(params, gradients):
            if gradient is not None:
                self._observed[p] = self._observed[p] + gradient if p in self._observed else gradient
        self._marked = self._mark()

    def evidence(self, groups: list[dict[str, Any]], active: list[list[Tensor]]) -> dict[str, Mapping[Tensor, Tensor]]:
        evidence = super().evidence(groups, active) if self.takes_draws else {}
        if groups[0]["fisher"] != "sampled":
            return evidence
        owners = {p: group for group, params in zip(groups, active) for p in params}
        missing = [p for p in owners if p not in self._observed]
        if missing:
            raise RuntimeError(
                f"observe() found no gradient of a parameter of shape {tuple(missing[0].shape)}: with "
                "fisher='sampled', call observe(outputs) before loss.backward() in every step."
            )
        # B^2 times this estimates the information of a batch of B losses.
        count = {p: self._losses * (group.get("batch_size") or self._losses) for p, group in owners.items()}
        squares = {p: self._observed[p].to(compute_dtype(p.dtype)).square() / count[p] for p in owners}
        return {**evidence, "squares": squares}

    def _skips(self, active: list[list[Tensor]]) -> bool:
        if super()._skips(active):
            return True
        wants = self.param_groups[0]["nonfinite"]
        if wants == "ignore" or all(bool(torch.isfinite(one).all()) for one in self._observed.values()):
            return False
        if wants == "skip":
            return True
        raise FloatingPointError(
            "gradients for the sampled labels are not finite; nothing was changed. Lower lr, or pass nonfinite='skip'."
        )

    # --- sampled weights ---

    @property
    def takes_draws(self) -> bool:
        """Whether gradients must be computed inside `sampled()`."""
        return self.param_groups[0].get("sample_weights", False)

    @contextmanager
    def sampled(self, noise: Noise | None = None) -> Iterator[None]:
        """A context in which weights are a sample of the belief, for `sample_weights=True`; see `IVON.sampled`."""
        if not self.takes_draws:
            raise RuntimeError(
                f"sampled() needs sample_weights=True, but this {type(self).__name__} computes gradients at the mean: "
                "set the option, or sample posterior(model)."
            )
        with super().sampled(noise):
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim; discards the data of draws, and what was observed for a step that was not taken."""
        kept = (self._observed, self._losses, self._marked)
        stale = bool(self._observed) and self._marked != self._mark()
        if self.takes_draws:
            super().zero_grad(set_to_none)
        else:
            BeliefOptimizer.zero_grad(self, set_to_none)
        if stale:
            self._observed, self._losses = {}, 0
        elif self._observed or kept[0]:
            self._observed, self._losses, self._marked = *kept[:2], self._mark()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As `BeliefOptimizer.step`; with `sample_weights`, the closure is called once for each of `samples` draws."""
        if self.takes_draws:
            return super().step(closure)
        loss = BeliefOptimizer.step(self, closure)
        self._observed, self._losses = {}, 0
        return loss
