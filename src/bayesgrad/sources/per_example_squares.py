"""Squares of per-example gradients, from the inputs and errors of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bayesgrad import layers, likelihoods
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.fisher import check_outputs
from bayesgrad.layers.per_example import PerExampleGradients
from bayesgrad.layers.recorder import LayerCall
from bayesgrad.layers.rescaling import fit_factors, per_example_projection
from bayesgrad.packing import gradient_of
from bayesgrad.parts import Evidence, Groups, Host, Needs, Source
from bayesgrad.sources.recorded_layers import RecordedLayers

MAX_EXCESS = 1e3  # in rounding errors; a larger difference means that a gradient has other terms than the layers'


class PerExampleSquares(Source):
    """The mean over examples of squared gradients, for each parameter.

    The option `fisher` of the first param group says which gradients are squared: those of the loss (`"empirical"`), or
    those for labels that the model predicts, `"sampled"` or `"exact"`, which `observe(outputs)` computes. Parameters
    outside of known layers have the squares of their mean gradients, times the batch size.

    Reference: Khan and Rue 2023, Eq. 47-48.
    Checked by: tests/equations/test_vogn.py, against BackPACK.
    """

    def __init__(self) -> None:
        self.stored: list[dict[Tensor, Tensor]] = []  # squares of several draws of a closure
        self.explained: dict[Tensor, bool] = {}  # whether the recorded calls explain a parameter's gradient

    def bind(self, optimizer: Host) -> None:
        super().bind(optimizer)
        self.fisher = optimizer.param_groups[0]["fisher"]
        self.needs = Needs(outputs=self.fisher != "empirical")
        self.recorded = RecordedLayers(
            self.optimizer,
            "the squares of their mean gradients, times the batch size",
            (layers.is_matrix, layers.normalises),
            by_layer=False,
            annotate_graph=True,
        )
        self.observed = []

    def observe(self, outputs: Any, loss: Any, labels: Any) -> None:
        if self.fisher == "empirical":
            return
        check_outputs(outputs)
        likelihood = likelihoods.named(self.optimizer.param_groups[0]["likelihood"])
        trace = self.recorded.recorder.trace(outputs)
        if self.fisher == "exact" and labels is None:
            directions = list(likelihood.hessian_roots(outputs))
        else:
            labels = self.optimizer.draw_labels(outputs) if labels is None else labels
            directions = [likelihood.residual(outputs, labels)]
        self.observed.append(([trace.backpropagate(direction) for direction in directions], len(outputs)))

    def collect(self, groups: Groups, active: list[list[Tensor]]) -> Evidence:
        params = [p for some in active for p in some]
        stored, self.stored = self.stored, []
        if stored:
            every = {p: [squares[p] for squares in stored if p in squares] for p in params}
            return {"squares": {p: torch.stack(parts).mean(0) for p, parts in every.items()}}
        return {"squares": self._squares(params)}

    def begin_draws(self) -> None:
        self.stored = []

    def store_draw(self, samples: int) -> None:
        params = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.stored.append(self._squares(params))

    def _squares(self, params: list[Tensor]) -> dict[Tensor, Tensor]:
        group = self.optimizer.param_groups[0]
        passes = self.recorded.backward_passes()
        recorded = _by_parameter(passes)
        if not recorded and any(bool(gradient_of(p).any()) for p in params):
            raise self.recorded.missing_observation("no backward pass was recorded", "call loss.backward() on outputs")
        count = max((_count(columns) for columns in recorded.values()), default=1) * group["losses_per_example"]
        if self.fisher != "empirical":
            return self._observed_squares(params, count)
        known = [p for p in params if p in recorded]
        factors, odd = self._factors(known, recorded)
        found = {
            p: _squares(recorded[p]).mul_(_count(recorded[p]) * group["losses_per_example"] * factors[p] ** 2)
            for p in known
            if p not in odd
        }
        if lost := {p for p in params if p not in recorded and bool(gradient_of(p).any())} | odd:
            self.recorded.warn_fallback(lost)
        for p in params:
            if p not in found:
                found[p] = gradient_of(p).to(compute_dtype(p.dtype)).square() * count
        return found

    def _factors(
        self, params: list[Tensor], recorded: Mapping[Tensor, list[PerExampleGradients]]
    ) -> tuple[dict[Tensor, float], set[Tensor]]:
        """The factors by which gradients were multiplied since the backward pass; parameters with other gradients.

        If no gradient was modified in place, all have the same factor (unscaling), so one parameter is enough if all
        were checked before.
        """
        if not params:
            return {}, set()
        untouched = all(gradient_of(p)._version == 0 for p in params)
        good = [p for p in params if self.explained.get(p, True)]
        some = (good[:1] or params) if untouched and all(p in self.explained for p in params) else params
        table = fit_factors([per_example_projection(recorded[p], gradient_of(p)) for p in some])
        factors = {p: factor for p, (factor, _) in zip(some, table)}
        if untouched:
            self.explained |= {p: excess <= MAX_EXCESS for p, (_, excess) in zip(some, table)}
            common = next((factors[p] for p in some if self.explained[p]), 1.0)
            factors = dict.fromkeys(params, common)
        return factors, {p for p in params if not self.explained.get(p, True)}

    def _observed_squares(self, params: list[Tensor], count: int) -> dict[Tensor, Tensor]:
        observed, self.observed = self.observed, []
        if not observed:
            raise self.recorded.missing_observation(
                "observe() was not called", "call observe(outputs), before loss.backward(), on outputs"
            )
        total = sum(number for _, number in observed) * self.optimizer.param_groups[0]["losses_per_example"]
        found: dict[Tensor, Tensor] = {}
        for directions, _ in observed:
            for uses in directions:
                for p, columns in _by_parameter([uses]).items():
                    squares = _squares(columns) / total
                    found[p] = found[p] + squares if p in found else squares
        self.recorded.warn_fallback({p for p in params if p not in found and bool(gradient_of(p).any())})
        return {p: found[p] if p in found else gradient_of(p).square() * count for p in params}


def _by_parameter(passes: Sequence[Sequence[LayerCall]]) -> dict[Tensor, list[PerExampleGradients]]:
    """The per-example gradients of every parameter of the called layers, for each pass; its calls are summed."""
    found: dict[Tensor, list[PerExampleGradients]] = {}
    for calls in passes:
        for p, columns in layers.gradients_of_calls(calls).items():
            found.setdefault(p, []).append(columns)
    return found


def _count(passes: Sequence[PerExampleGradients]) -> int:
    return sum(columns.count for columns in passes)


def _squares(passes: Sequence[PerExampleGradients]) -> Tensor:
    """The sum of g_j^2 over all examples of all passes."""
    first, *others = (columns.squares() for columns in passes)
    for squares in others:
        first += squares
    return first
