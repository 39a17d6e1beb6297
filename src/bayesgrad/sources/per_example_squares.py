"""Squares of per-example gradients, from the inputs and errors of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bayesgrad import layers, likelihoods
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.call import LayerCall
from bayesgrad.layers.fisher import check_outputs
from bayesgrad.layers.statistics import SPLIT
from bayesgrad.packing import gradient_of
from bayesgrad.parts import Evidence, Groups, Host, Needs, Source, weak
from bayesgrad.sources.recorded_layers import RecordedLayers


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

    def bind(self, optimizer: Host) -> None:
        super().bind(optimizer)
        self.fisher = optimizer.param_groups[0]["fisher"]
        self.needs = Needs(outputs=self.fisher != "empirical")
        self.recorded = RecordedLayers(
            self.optimizer,
            "the squares of their mean gradients, times the batch size",
            (layers.is_matrix, layers.normalises),
            by_layer=False,
            receive=weak(self.receive) if self.fisher == "empirical" else None,
        )
        modules = self.recorded.recorder.layers.values()
        owners = [set(layers.own_parameters(module).values()) for module in modules]
        self.siblings = {  # modules that share parameters, whose gradients are summed before they are squared
            module: min(i for i, other in enumerate(owners) if own & other) for module, own in zip(modules, owners)
        }
        self.forget(observed=True)

    def forget(self, observed: bool) -> None:
        super().forget(observed)
        self.pending: dict[int, list[LayerCall]] = {}  # the calls of the latest pass, by the first of the siblings
        self.sums: dict[Tensor, Tensor] = {}  # squares of earlier passes
        self.counts: dict[Tensor, int] = {}
        self.squared: set[tuple[int, tuple[int, int]]] = set()  # siblings and passes
        self.lost: str | None = None  # a layer that got errors of a pass that was squared before

    def receive(self, call: LayerCall, restarted: bool) -> None:
        key = self.siblings[call.module]
        before = self.pending.get(key)
        if restarted:
            self.pending.pop(key, None)
            for p in layers.own_parameters(call.module).values():
                self.sums.pop(p, None)
                self.counts.pop(p, None)
            self.squared = {(other, passed) for other, passed in self.squared if other != key}
        elif before and before[-1].pass_id != call.pass_id:
            self.squared.add((key, before[-1].pass_id))
            self._square(self.pending.pop(key))
        if (key, call.pass_id) in self.squared:
            self.lost = call.name
        self.pending.setdefault(key, []).append(call.kept())

    def _square(self, calls: Sequence[LayerCall]) -> None:
        """Adds the squares of one pass."""
        for p, columns in layers.gradients_of_calls(calls).items():
            squares = columns.squares()
            self.sums[p] = self.sums[p].add_(squares) if p in self.sums else squares
            self.counts[p] = self.counts.get(p, 0) + columns.count

    def observe(self, outputs: Any, loss: Any, labels: Any) -> None:
        if self.fisher == "empirical":
            return
        check_outputs(outputs)
        trace = self.recorded.recorder.trace(outputs)
        elsewhere = trace.used_elsewhere()
        if self.fisher == "exact" and labels is None:
            likelihood = likelihoods.named(self.optimizer.param_groups[0]["likelihood"])
            directions = list(likelihood.hessian_roots(outputs))
        else:
            directions = [self.residual(outputs, labels)]
        found: dict[Tensor, Tensor] = {}
        for direction in directions:
            for p, columns in layers.gradients_of_calls(trace.backpropagate(direction), elsewhere).items():
                found[p] = found[p].add_(columns.squares()) if p in found else columns.squares()
        self.observed.append((found, len(outputs)))

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
        if self.fisher != "empirical":
            return self._observed_squares(params)
        for calls in self.pending.values():
            self._square(calls)
        self.pending = {}
        if not self.recorded.recorder.layers:
            raise ValueError(
                f"{self.optimizer.__class__.__name__} counts examples at Linear, Conv, Embedding and normalisation "
                "layers, but found none of them: use IVON, or fisher='sampled' or 'exact' with observe(outputs)."
            )
        if not self.sums and any(bool(gradient_of(p).any()) for p in params):
            raise self.recorded.missing_observation("no backward pass was recorded", "call loss.backward() on outputs")
        if self.lost is not None:
            raise ValueError(SPLIT.format(self.lost))
        marks, losses = self.recorded.marks, group["losses_per_example"]
        odd = marks.unexplained
        common = marks.factor() if marks.untouched(p for p in params if p in self.sums) else None
        found = {}
        for p in (p for p in params if p in self.sums and p not in odd):
            factor = marks.factor([p]) if common is None else common
            square = 1.0 if factor is None else factor.to(self.sums[p]).square()
            found[p] = self.sums[p].mul_(self.counts[p] * losses * square)
        count = max(self.counts.values(), default=1) * losses
        return self._with_fallback(found, params, count)

    def _with_fallback(self, found: dict[Tensor, Tensor], params: list[Tensor], count: int) -> dict[Tensor, Tensor]:
        """The squares of mean gradients, times the number of losses, for parameters without others."""
        rest = [p for p in params if p not in found]
        self.recorded.warn_fallback({p for p in rest if p not in self.optimizer.warned and bool(gradient_of(p).any())})
        return found | {p: gradient_of(p).to(compute_dtype(p.dtype)).square() * count for p in rest}

    def _observed_squares(self, params: list[Tensor]) -> dict[Tensor, Tensor]:
        observed, self.observed = self.observed, []
        if not observed:
            raise self.recorded.missing_observation(
                "observe() was not called", "call observe(outputs), before loss.backward(), on outputs"
            )
        total = sum(number for _, number in observed) * self.optimizer.param_groups[0]["losses_per_example"]
        found: dict[Tensor, Tensor] = {}
        for squares, _ in observed:
            for p, square in squares.items():
                found[p] = found[p] + square / total if p in found else square / total
        return self._with_fallback({p: found[p] for p in params if p in found}, params, total)
