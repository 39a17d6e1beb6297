"""Gradients for labels that are sampled from the model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bayesgrad import likelihoods
from bayesgrad.distributed import Exchange, Sum
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.call import Through, without_hooks
from bayesgrad.layers.graph import check_graph, check_visible, explained
from bayesgrad.layers.observed import loss_weights
from bayesgrad.layers.recorder import check_outputs
from bayesgrad.parts import Evidence, Groups, Needs, Source
from bayesgrad.shards import any_process, gathered, gradient_of, has_nonzero_gradient, part_of, unreduced


class SampledLabels(Source):
    """Squares of the gradient of the summed loss for labels that are sampled from the model's predictions.

    `observe(outputs)` samples the labels and computes the gradient with a backward pass of its own.

    Reference: Aitchison 2018, section 2.2.8.
    Checked by: tests/contract/test_evidence.py.
    """

    needs = Needs(outputs=True)
    observes = True
    whole = "gradients for sampled labels"

    def __init__(self) -> None:
        # Of each draw of a closure.
        self.stored: list[tuple[dict[Tensor, Tensor], float | Tensor, set[Tensor]]] = []
        self.reset()

    def reset(self) -> None:
        self.gradients: dict[Tensor, Tensor] = {}
        self.losses: float | Tensor = 0.0  # the number of losses in their sum
        self.zero: set[Tensor] = set()  # of compiled models: parameters without a gradient, or that are not used

    def zeroed(self, stale: bool) -> None:
        if stale:
            self.reset()

    def observe(self, outputs: Any, loss: Any, labels: Any, weights: Any) -> None:
        check_outputs(outputs)
        check_graph(outputs)
        compiled = check_visible(outputs)
        optimizer = self.optimizer
        params = gathered(p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
        used = list(params.values())
        (direction,) = self.output_directions(outputs, labels, weights)
        try:
            with without_hooks(used, but=Through), unreduced(params):
                gradients = torch.autograd.grad(outputs, used, direction, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            raise explained(error) from error
        likelihood = likelihoods.named(optimizer.param_groups[0]["likelihood"])
        each = loss_weights(likelihood, outputs, labels, weights)
        losses = likelihood.losses(outputs) * (1 if each is None else float(each.mean()))
        found = {p: gradient for p, gradient in zip(params, gradients) if gradient is not None}
        unused = {p for p, gradient in found.items() if compiled and not bool(gradient.any())}
        self.zero |= unused
        self._add({p: gradient for p, gradient in found.items() if p not in unused}, losses)

    def _add(self, gradients: dict[Tensor, Tensor], losses: float | Tensor) -> None:
        """Adds the gradients of the sum of this number of losses."""
        self.losses = self.losses + losses
        for p, gradient in gradients.items():
            self.gradients[p] = self.gradients[p] + gradient if p in self.gradients else gradient

    def share(self, exchange: Exchange) -> None:
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        exchange.expect(params[0])

        def receive(p: Tensor, found: Sum) -> None:
            self.gradients[p], self.losses = part_of(found.total, p), found.count

        for i, p in ((i, p) for i, p in enumerate(params) if p in self.gradients):
            exchange.add(Sum(self.gradients[p], self.losses), partial(receive, p), i)

    def begin_draws(self) -> None:
        self.stored = []

    def store_draw(self, samples: int) -> None:
        self.stored.append((self.gradients, self.losses, self.zero))
        self.reset()

    def merge_draws(self, samples: int) -> None:
        """As for several observations before a step, which act like one of a larger batch."""
        stored, self.stored = self.stored, []
        for gradients, losses, zero in stored:
            self._add(gradients, losses)
            self.zero |= zero

    def collect(self, groups: Groups, active: list[list[Tensor]]) -> Evidence:
        owners = {p: group for group, params in zip(groups, active) for p in params}
        zero = {p for p in owners if p in self.zero and p not in self.gradients and not has_nonzero_gradient(p)}
        missing = next((p for p in owners if p not in self.gradients and p not in zero), None)
        if missing is not None:
            raise RuntimeError(
                f"observe() found no gradient of {self.optimizer.name_of(missing)}: with fisher='sampled', call "
                "observe(outputs) before loss.backward() in every step, and take no step for an empty batch."
            )
        # B^2 times this estimates the information of a batch of B losses.
        count = {p: self.losses * (group.get("batch_size") or self.losses) for p, group in owners.items()}
        found = self.gradients | {p: gradient_of(p) for p in zero}
        own = {p: part_of(found[p], p).to(compute_dtype(p.dtype)) for p in owners}
        return {"squares": {p: gradient.square() / count[p] for p, gradient in own.items()}}

    def nonfinite(self, index: int, params: list[Tensor]) -> str | None:
        bad = [~torch.isfinite(self.gradients[p]).all() for p in params if p in self.gradients]
        found = bool(bad) and bool(any_process(torch.stack(bad).any(), params))
        return "gradients for the sampled labels are not finite" if found else None
