"""Squares of per-example gradients, from the inputs and errors of layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bayesgrad import layers
from bayesgrad.distributed import Exchange, Sum
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.call import LayerCall, loss_id
from bayesgrad.layers.layout import ForwardPass
from bayesgrad.layers.observed import ObservedShares
from bayesgrad.layers.pass_losses import PassLosses
from bayesgrad.layers.recorder import check_outputs
from bayesgrad.layers.statistics import SPLIT
from bayesgrad.parts import Evidence, Groups, Host, Needs, Source
from bayesgrad.shards import gradient_of, has_nonzero_gradient, part_of
from bayesgrad.sources.recorded_layers import RecordedLayers

SHARED = 0, 0  # in place of a pass: those of all processes


class PerExampleSquares(Source):
    """The sum over examples of squared gradients, divided by the number of losses, for each parameter.

    The option `fisher` of the first param group says which gradients are squared: those of the loss (`"empirical"`), or
    those for labels that the model predicts, `"sampled"` or `"exact"`, which `observe(outputs)` computes. Parameters
    outside of known layers, and of layers that mix examples, have the squares of their mean gradients, times the number
    of losses.

    An example is one index of the first dimension of the model's outputs. Which rows of a layer belong to it is found
    by two more backward passes of the first forward pass with given shapes, and of later ones with layers that were
    frozen in it, or that it left out. In a compiled model, and if the model returns no tensor, it is the first
    dimension of the layer's input.

    Reference: Khan and Rue 2023, Eq. 45.
    Checked by: tests/equations/test_vogn.py, against BackPACK.
    """

    whole = "squares of per-example gradients"

    def __init__(self) -> None:
        self.stored: list[dict[Tensor, Tensor]] = []  # squares of several draws of a closure

    def bind(self, optimizer: Host) -> None:
        super().bind(optimizer)
        self.fisher = optimizer.param_groups[0]["fisher"]
        self.observes = self.fisher != "empirical"
        self.needs, self.counts_losses = Needs(outputs=self.observes), not self.observes
        self.recorded = RecordedLayers(
            self.optimizer,
            "the squares of their mean gradients, times the batch size",
            (layers.is_matrix, layers.normalises),
            by_layer=False,
            receiver=self if self.fisher == "empirical" else None,
            returned=True,
        )
        self.norms = [module for module in self.recorded.model.modules() if isinstance(module, layers.NORMS)]
        self.layouts = self.row_layouts()
        self.shapes: dict[int, tuple[torch.Size, ...]] = {}  # of the outputs of forward passes
        # Modules that share parameters, directly or by others, whose gradients are summed before they are squared.
        self.siblings: dict[nn.Module, int] = {}
        self.parameters: dict[int, set[Tensor]] = {}
        for i, module in enumerate(self.recorded.recorder.layers.values()):
            own = set(layers.own_parameters(module).values())
            joined = [key for key, others in self.parameters.items() if own & others]
            self.parameters[i] = own.union(*(self.parameters.pop(key) for key in joined))
            self.siblings |= {m: i for m, key in self.siblings.items() if key in joined} | {module: i}
        self.forget(observed=True)

    def forget(self, observed: bool) -> None:
        super().forget(observed)
        # Of the latest pass, by siblings: the number of its losses, and the calls.
        self.pending: dict[int, tuple[Any, list[LayerCall]]] = {}
        self.began: dict[int, int] = {}  # siblings -> their latest backward pass
        self.sums: dict[Tensor, Tensor] = {}  # squares of earlier passes
        self.counts: dict[Tensor, dict[tuple[int, int], Any]] = {}  # of losses, by pass
        self.losses = PassLosses()
        self.squared: set[tuple[int, tuple[int, int]]] = set()  # siblings and passes
        self.lost: str | None = None  # a layer that got errors of a pass that was squared before
        self.mixed: set[int] = set()  # ids of parameters of layers that mix examples
        if observed:
            self.shares = ObservedShares()

    def returned(self, outputs: list[Tensor], arguments: Any) -> None:
        """Finds out which rows of layers belong to which example."""
        recorder = self.recorded.recorder
        forward = recorder.passes[recorder.current]
        group = forward.group(self.optimizer.param_groups[0]["losses_per_example"])
        self.layouts.tolerant = any(map(layers.mixes_examples, self.norms))
        what = arguments, self.layouts.tolerant
        self.layouts.search(outputs, recorder.backpropagate, group, what, recorder.called())
        self.shapes[recorder.current] = tuple(t.shape for t in outputs)
        if len(self.shapes) > len(recorder.passes):
            del self.shapes[next(iter(self.shapes))]

    def _with_layout(self, call: LayerCall, forward: ForwardPass | None) -> LayerCall:
        if forward is None:
            return call
        group = forward.group(self.optimizer.param_groups[0]["losses_per_example"])
        return self.layouts.of(call, self.shapes.get(call.forward_id, (forward.outputs,)), group)

    def receive(self, call: LayerCall, restarted: bool) -> None:
        key, forward = self.siblings[call.module], self.recorded.forward_pass(call)
        call = self._with_layout(call, forward)
        count = self._count(call, forward)
        _, before = self.pending.get(key, (0, []))
        if restarted and self._restarts(key, call):
            self.pending.pop(key, None)
            for p in self.parameters[key]:
                self.sums.pop(p, None)
                self.counts.pop(p, None)
                self.mixed.discard(id(p))
            self.squared = {(other, passed) for other, passed in self.squared if other != key}
            self.losses.forget(key)
        elif before and before[-1].pass_id != call.pass_id:
            self.squared.add((key, before[-1].pass_id))
            self._square(*self.pending.pop(key))
        self.began[key] = call.backward_id
        if (key, call.pass_id) in self.squared:
            self.lost = call.name
        self.pending.setdefault(key, (count, []))[1].append(call.kept())
        self.losses.note(key, call, count, forward is not None)

    def _restarts(self, key: int, call: LayerCall) -> bool:
        """Whether a call is the first of siblings in a backward pass, and the gradients of all of them are zero."""
        others = self.parameters[key].difference(layers.own_parameters(call.module).values())
        marks = self.recorded.marks
        return self.began.get(key) != call.backward_id and marks.restarted([p for p in others if p.requires_grad])

    def _count(self, call: LayerCall, forward: ForwardPass | None) -> Any:
        """The number of losses of the pass of a call."""
        per_example = self.optimizer.param_groups[0]["losses_per_example"]
        count = self.recorded.losses(call, forward, per_example)
        count = layers.examples_in(call.module, call.input) if count is None else count
        share = self.shares.of(call)
        return count if share is None else count * share

    def _square(self, count: Any, calls: Sequence[LayerCall]) -> None:
        """Adds the squares of one pass.

        Args:
            count: the number of its losses when it was received; a later pass of a compiled model has another share.
            calls: of siblings.
        """
        self.mixed |= layers.mixed_parameters(calls)
        for p, columns in layers.gradients_of_calls(calls).items():
            squares = columns.squares()
            self.sums[p] = self.sums[p].add_(squares) if p in self.sums else squares
            self.counts.setdefault(p, {})[calls[0].pass_id] = count

    def _forget_lost_passes(self) -> None:
        """Forgets the losses of passes that were given up: all siblings that had them began anew, or are zero."""
        latest, marks = max(self.began.values()), self.recorded.marks

        def lost(key: int) -> bool:
            own = [p for p in self.parameters[key] if p.requires_grad]
            return self.began[key] != latest and marks.restarted(own)

        self.losses.forget_lost(lost)

    def _count_of(self, p: Tensor) -> Any:
        """The number of losses of all passes, also of those that do not depend on the parameter."""
        own = self.counts[p]
        return sum(own.values()) + self.losses.beside(set(map(loss_id, own)))

    def _square_pending(self, params: list[Tensor]) -> None:
        frozen = [p for p in params if not p.requires_grad]  # since the backward pass
        for p in frozen:
            p.requires_grad_(True)
        for count, calls in self.pending.values():
            self._square(count, calls)
        if self.pending:
            self._forget_lost_passes()
        for p in frozen:
            p.requires_grad_(False)
        self.pending = {}

    def observe(self, outputs: Any, loss: Any, labels: Any, weights: Any) -> None:
        recorder, group = self.recorded.recorder, self.optimizer.param_groups[0]
        if self.fisher == "empirical":
            self.shares.note(recorder, group["likelihood"], outputs, labels, weights)
            return
        check_outputs(outputs)
        forward, share = self.observed_pass(outputs, labels, weights)
        size = forward.group(group["losses_per_example"])
        self.layouts.tolerant = any(map(layers.mixes_examples, self.norms))
        elsewhere = recorder.trace(outputs).used_elsewhere()
        found: dict[Tensor, Tensor] = {}
        for direction in self.output_directions(outputs, labels, weights, self.fisher == "exact", size):
            calls = recorder.backpropagate(outputs, direction)
            calls = self.layouts.attach(calls, outputs, recorder.backpropagate, size)
            for p, columns in layers.gradients_of_calls(calls, elsewhere).items():
                found[p] = found[p].add_(columns.squares()) if p in found else columns.squares()
        self.observed.append((found, share * forward.losses(group["losses_per_example"])))

    def share(self, exchange: Exchange) -> None:
        """Sums over processes: of squares, of the numbers of losses, and of reasons to use the fallback."""
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        exchange.expect(params[0])
        if self.fisher != "empirical":
            found, total = self._observed_sums()
            self.observed = [(found, total)] if total else []
            for i, p in ((i, p) for i, p in enumerate(params) if p in found):
                exchange.add(Sum(found[p], total), partial(self._receive_observed, p), i)
            return
        self._square_pending([p for p in params if p.grad is not None])
        like = {"dtype": compute_dtype(params[0].dtype), "device": params[0].device}
        for i, p in ((i, p) for i, p in enumerate(params) if p in self.sums):
            own = Sum(self.sums[p].to(compute_dtype(p.dtype)), self._count_of(p))
            exchange.add(own, partial(self._receive, p), i)
        flags = torch.tensor([float(id(p) in self.mixed) for p in params], **like)

        def receive(found: Sum) -> None:
            self.mixed = {id(p) for p, number in zip(params, found.total.tolist()) if number}
            self.losses.counts = {SHARED: found.count} if self.losses.counts else {}

        exchange.add(Sum(flags, self.losses.total()), receive)
        self.recorded.marks.share(exchange)

    def _receive(self, p: Tensor, found: Sum) -> None:
        # Errors are those of the mean loss of one process; its gradient is averaged over processes.
        self.sums[p], self.counts[p] = part_of(found.total, p) / self.processes**2, {SHARED: found.count}

    def _receive_observed(self, p: Tensor, found: Sum) -> None:
        self.observed[0][0][p] = found.total
        self.observed[0] = self.observed[0][0], found.count

    def collect(self, groups: Groups, active: list[list[Tensor]]) -> Evidence:
        params = [p for some in active for p in some]
        stored, self.stored = self.stored, []
        if stored:
            every = {p: [squares[p] for squares in stored if p in squares] for p in params}
            return {"squares": {p: torch.stack(parts).sum(0) / len(stored) for p, parts in every.items()}}
        return {"squares": self._squares(params)}

    def begin_draws(self) -> None:
        self.stored = []

    def store_draw(self, samples: int) -> None:
        params = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.stored.append(self._squares(params))

    def _squares(self, params: list[Tensor]) -> dict[Tensor, Tensor]:
        if self.fisher != "empirical":
            return self._observed_squares(params)
        self._square_pending(params)
        every = [p for m in self.recorded.recorder.layers.values() for p in layers.own_parameters(m).values()]
        if params and not self.losses.counts and not any(p.requires_grad or p.grad is not None for p in every):
            raise ValueError(
                f"{self.optimizer.__class__.__name__} counts examples at Linear, Conv, Embedding and normalisation "
                "layers, but found none of them that is trained: use IVON, or fisher='sampled' or 'exact' with "
                "observe(outputs)."
            )
        if not self.losses.counts and any(map(has_nonzero_gradient, params)):
            raise self.recorded.missing_observation("no backward pass was recorded", "call loss.backward() on outputs")
        if self.lost is not None:
            raise ValueError(SPLIT.format(self.lost))
        marks = self.recorded.marks
        known = marks.unexplained
        twice = marks.extended | {p for p in marks.twice if marks.accumulated_twice(p)}
        odd = {p for p in self.sums if p in known or p in twice or id(p) in self.mixed}
        alone = self.processes == 1  # what other processes have done to their gradients is not known
        squared = [p for p in params if p in self.sums]
        common = marks.factor(squared) if alone and marks.untouched(squared) else None
        found = {p: self.sums[p] for p in params if p in self.sums and p not in odd}
        found = {p: part_of(one, p) for p, one in found.items()} if self.sharded else found
        several = [[p] for p in found]
        factors = [common] * len(found) if common is not None else marks.factors(several, "squared gradients")
        for (p, squares), factor in zip(found.items(), factors):
            square = 1.0 if factor is None else factor.to(squares).square()
            found[p] = squares * (self._count_of(p) * square)
        return self._with_fallback(found, params, self.losses.total() or 1)

    def _with_fallback(self, found: dict[Tensor, Tensor], params: list[Tensor], count: Any) -> dict[Tensor, Tensor]:
        """The squares of mean gradients, times the number of losses, for parameters without others."""
        if not (rest := [p for p in params if p not in found]):
            return found
        self.recorded.warn_fallback({p for p in rest if p not in self.optimizer.warned and has_nonzero_gradient(p)})
        return found | {p: gradient_of(p).to(compute_dtype(p.dtype)).square() * count for p in rest}

    def _observed_squares(self, params: list[Tensor]) -> dict[Tensor, Tensor]:
        if not self.observed and any(map(has_nonzero_gradient, params)):
            raise self.recorded.missing_observation(
                "observe() was not called", "call observe(outputs), before loss.backward(), on outputs"
            )
        found, total = self._observed_sums()
        self.observed = []
        own = {p: part_of(found[p], p) / total for p in params if p in found}
        return self._with_fallback(own, params, total)

    def _observed_sums(self) -> tuple[dict[Tensor, Tensor], Any]:
        """Squares, and the number of losses."""
        found: dict[Tensor, Tensor] = {}
        for squares, _ in self.observed:
            for p, square in squares.items():
                found[p] = found[p] + square if p in found else square
        return found, sum(number for _, number in self.observed)
