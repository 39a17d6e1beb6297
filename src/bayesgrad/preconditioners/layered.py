"""Preconditioners with Kronecker factors for each layer: how factors are kept, and the gradient times their inverses.

The gradient of the mean loss is E'A, with a row of inputs A (a one appended for the bias) and a row of errors E for
each example and position. L E'A R can be computed from the gradient, or as (E L)'(A R), which is cheaper if rows are
fewer than outputs. By the option `precondition` it is computed in one of two places:

- "step": in `step()`, from `.grad`. (E L)'(A R) takes its place if one backward pass made it and nothing changed it.
- "backward": in the backward pass, which returns it as the gradient. The gradient itself is never formed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesgrad.directions import Direction, Directions, dense
from bayesgrad.distributed import Exchange, Job, divided
from bayesgrad.layers.call import LayerCall, Pair
from bayesgrad.layers.layout import ForwardPass
from bayesgrad.layers.modules import Layer
from bayesgrad.layers.recorder import check_outputs
from bayesgrad.layers.statistics import SIDES, LayerStatistics
from bayesgrad.parts import Groups, Host, Needs, Preconditioner, weak
from bayesgrad.precision import Kronecker, Precision
from bayesgrad.preconditioners import refresh
from bayesgrad.preconditioners.block_options import LAYER_OPTIONS, LayerOptions
from bayesgrad.preconditioners.collected import Collected
from bayesgrad.preconditioners.in_backward import PreconditionedGradients
from bayesgrad.preconditioners.rows import InnerProduct, from_call, from_gradients, from_rows, rows_are_cheaper
from bayesgrad.preconditioners.stability import damped_inverse, finite, limit_norm, nonfinite_cause, split_damping
from bayesgrad.rules.transition import average
from bayesgrad.saved_state import saved_entry
from bayesgrad.shards import gradient_of
from bayesgrad.sources.recorded_layers import RecordedLayers

Settings = Mapping[Layer, Mapping[str, Any]]
Entry = dict[str, Tensor]


class LayerPreconditioner(Preconditioner):
    """Base class: keeps moving averages of each layer's second moments, and their inverses.

    The averages are updated every `stats_every` steps, but not by inputs and errors that are not finite, or whose
    squares are not. They are inverted when they have changed: a tenth of `update_every` steps after an inversion, and
    after every further tenth, the diagonals of the averages are compared with those at the inversion, and after
    `update_every` steps at the latest, layers one after the other. Early in a run averages change fast: they are
    updated at steps 1, 2, 3, 5, 8 and so on, and inverted then if they have changed or the number of steps has doubled.
    A large layer with few outputs is updated every 4 `stats_every` steps, if `stats_every` is more than 1.

    Statistics come from the backward passes of the loss, or from `observe(outputs)`: a label is sampled for each
    output, and the errors at the layers' outputs are stored until the next step.

    Args:
        fallback: by what parameters outside of known layers are trained, for a warning.
    """

    sides: ClassVar[tuple[str, ...]] = SIDES  # whose second moments are kept
    factor: ClassVar[str] = "moment"  # the name of each side's matrix in the state
    reads_outputs: ClassVar[bool] = False
    on_cpu = ("clock", "damped", "traces")
    stats_interval = staticmethod(refresh.stats_interval)
    has_own_shape = staticmethod(refresh.is_layer_tensor)  # pyright: ignore[reportAssignmentType]

    def __init__(self, fallback: str) -> None:
        self.fallback, self.factors = fallback, [f"{side}_{self.factor}" for side in self.sides]

    def from_labels(self, group: Mapping[str, Any]) -> bool:
        """Whether the statistics of a group come from `observe(outputs)`."""
        return False

    def uses(self, layer: Layer) -> bool:
        """Whether this preconditioner supports a layer."""
        return True

    def layer_options(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of options that weight and bias of a layer must have in common."""
        return LAYER_OPTIONS

    def bind(self, optimizer: Host) -> None:
        super().bind(optimizer)
        self.observes = any(map(self.from_labels, optimizer.param_groups))
        self.needs = Needs(outputs=self.observes)
        self.close()
        self.recorded = RecordedLayers(
            self.optimizer, self.fallback, receiver=self, only=weak(self.uses), returned=self.reads_outputs
        )
        self.groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        self.options, self.warned = LayerOptions(), set[str]()  # and the factors that were singular
        self.scheduled: dict[Layer, tuple[int, bool]] = {}  # `stats_every`, and whether statistics are due
        self.known_shapes: dict[Layer, dict[str, tuple[int, ...]]] = {}  # of factors, by name
        self.ready: dict[Layer, tuple[Any, Sequence[Any]]] = {}  # dtype, device and tensors of an initialised state
        self.layouts, self.done = self.row_layouts(), PreconditionedGradients()
        self.forget(observed=True)

    def finish(self, closure: Any, loss: Any) -> None:
        refresh.count_beside(self.recorded.layers, self.optimizer.state)

    def reset(self) -> None:
        done, self.scheduled = self.done, {}
        self.forget(observed=True)
        if done.used:
            self.done = done
            done.stepped()
        self.recorded.marks.twice.clear()

    def forget(self, observed: bool) -> None:
        if observed:
            self.from_observations = Collected()
        self.from_passes = Collected()
        self.unfrozen: set[Tensor] = set()  # owners of layers that were frozen in the passes of this step
        self.called: set[Layer] = set()  # in its passes
        self.kept: dict[Layer, list[LayerCall]] = {}  # the calls of a single backward pass
        self.passes: dict[Layer, int] = {}  # the latest backward pass
        if self.done.used:
            self.done = PreconditionedGradients()

    def covers(self, p: Tensor) -> bool:
        return self.recorded.covers(p)

    # --- statistics ---

    def observe(self, outputs: Any, loss: Any, labels: Any, weights: Any) -> None:
        if not self.observes:
            return
        check_outputs(outputs)
        recorder = self.recorded.recorder
        due = [layer for layer in self.recorded.layers_of(outputs) if self.due(layer, self.groups[layer.owner])]
        if not due:
            return
        (direction,) = self.output_directions(outputs, labels, weights)
        forward, share = self.observed_pass(outputs, labels, weights)

        def receive(call: LayerCall) -> None:
            self.recorded.begin_compiled(call)
            if (layer := self.recorded.layer_of(call)) is not None:
                self._add(self.from_observations, layer, call, forward, share)

        reduces = [group for group in self.optimizer.param_groups if group.get("sharing") == "reduce"]
        if reduces:  # positions of an example are summed
            size = forward.group(reduces[0]["losses_per_example"])
            calls = recorder.backpropagate(outputs, direction)
            for call in self.layouts.attach(calls, outputs, recorder.backpropagate, size):
                receive(call)
        else:
            recorder.backpropagate(outputs, direction, receive)
        if not all(layer in self.from_observations for layer in due):
            recorder.trace(outputs)  # raises if checkpointing hides layers

    def receive(self, call: LayerCall, restarted: bool) -> Pair | None:
        if (layer := self.recorded.layer_of(call)) is None:
            return None
        group = self.groups[layer.owner]
        self.called.add(layer)
        if restarted:
            for found in (self.from_passes, self.kept, self.passes):
                found.pop(layer, None)
            if self.done.used:
                self.done.restart(layer)
        if not self.from_labels(group):
            self._add(self.from_passes, layer, call, self.recorded.forward_pass(call))
        if group.get("precondition") == "backward":
            return self._precondition(layer, call, group)
        self._keep_call(layer, call, group)
        return None

    def _add(
        self, found: Collected, layer: Layer, call: LayerCall, forward: ForwardPass | None, share: float = 1
    ) -> None:
        group = self.groups[layer.owner]
        found.note(layer, call, lambda: self.recorded.losses(call, forward, group["losses_per_example"]))
        if self.due(layer, group):
            found.setdefault(layer, self._empty(layer, group)).add(call, self.losses(call, forward, group), share)

    def _empty(self, layer: Layer, group: Mapping[str, Any]) -> LayerStatistics:
        """Statistics to which calls are added."""
        diagonal = [side for side, shape in self.shapes(layer, group).items() if len(shape) == 2]
        sharing, keep = group.get("sharing", "expand"), self.keeps_rows(group)
        few = group.get("stats_rows", math.inf)
        return LayerStatistics(layer, self.sides, sharing=sharing, diagonal=diagonal, keep=keep, stats_rows=few)

    def share(self, exchange: Exchange) -> None:
        """What is due of all layers, in the order of the model; a layer that no process has called has nothing."""
        self._find_layers()
        groups = {layer: self.groups[layer.owner] for layer in self.recorded.layers}
        due = {layer: group for layer, group in groups.items() if self.due(layer, group)}
        for labelled, collected in ((True, self.from_observations), (False, self.from_passes)):
            some = {one: self._empty(one, group) for one, group in due.items() if self.from_labels(group) == labelled}
            collected.share(exchange, self.recorded.marks, some)
        if due:
            self.recorded.marks.share(exchange)
        self.done.share(exchange, self.recorded.marks)

    def losses(self, call: LayerCall, forward: ForwardPass | None, group: Mapping[str, Any]) -> float | None:
        """The number of losses of the pass of a call, by which the moment of its inputs is divided."""
        return self.recorded.losses(call, forward, group["losses_per_example"])

    def returned(self, outputs: list[Tensor], arguments: Any) -> None:
        """Called with the outputs of each forward pass of the model, if `reads_outputs` is True."""

    def keeps_rows(self, group: Mapping[str, Any]) -> bool:
        """Whether `merge` needs rows of inputs and errors, and not only their moments."""
        return False

    def _keep_call(self, layer: Layer, call: LayerCall, group: Mapping[str, Any]) -> None:
        """Keeps a call of the first backward pass, if its rows may be cheaper to precondition than the gradient."""
        kept = self.kept.get(layer, [])
        if kept and kept[-1].backward_id == call.backward_id:
            kept.append(call.kept())
        elif layer in self.passes:
            self.kept.pop(layer, None)
        elif self.is_kronecker(group) and self._rows_are_cheaper(layer, call, group) and self.processes == 1:
            self.kept[layer] = [call.kept()]
        self.passes[layer] = call.backward_id

    def _precondition(self, layer: Layer, call: LayerCall, group: Mapping[str, Any]) -> Pair | None:
        """The preconditioned gradients of weight and bias; None for the gradients themselves, as before an update."""
        entry, marks = self.optimizer.state.get(layer.owner, {}), self.recorded.marks
        # A pass with derivatives of gradients adds terms that no layer returns.
        if not self._has_factors(layer, group) or any(
            p in marks.unexplained or p in marks.twice for p in layer.members
        ):
            self.done.add_raw(layer)
            return None
        refresh.cast(entry, self.factors, layer.owner, self.on_cpu)
        precision = self.precision(layer, group)
        inner = self.done.add(layer, call, math.isfinite(group.get("max_norm", math.inf)))
        if isinstance(precision, Kronecker) and self._rows_are_cheaper(layer, call, group):
            found = from_rows(layer, precision, [call], inner)
        else:
            found = from_call(layer, precision, call, inner)
        # Autograd would copy tensors that are not contiguous, and `GradientMarks` could not follow them.
        weight, bias = (None if p is None else dense(found[p]).contiguous() for p in (layer.weight, layer.bias))
        return weight, bias

    def is_kronecker(self, group: Mapping[str, Any]) -> bool:
        """Whether `precision` is a Kronecker product of matrices that are applied to rows."""
        return True

    def _rows_are_cheaper(self, layer: Layer, call: LayerCall, group: Mapping[str, Any]) -> bool:
        """Whether (E L)'(A R) needs fewer multiplications than L G R."""
        shapes = self._shapes(layer, group)
        full = [side for side in self.sides if len(shapes[f"{side}_{self.factor}"]) == 3]  # the rest is diagonal
        return not layer.lookup and rows_are_cheaper(layer, call, full)

    def due(self, layer: Layer, group: Mapping[str, Any]) -> bool:
        """Whether statistics are due in the next step."""
        every, due = self.scheduled.get(layer, (0, False))
        if every != group["stats_every"]:
            every = group["stats_every"]
            entry, interval = self.optimizer.state.get(layer.owner, {}), self.stats_interval(layer, every)
            known = "clock" in entry and refresh.fits(entry, self._shapes(layer, group))
            due = not known or refresh.is_due(entry, refresh.MERGED, refresh.next_step(entry), interval)
            self.scheduled[layer] = every, due
        return due

    def statistics(self, current: list[Layer], settings: Settings) -> dict[Layer, LayerStatistics]:
        """The data to merge in this step, by layer. A layer that never had any is trained by the fallback."""
        recorded, observed = self.recorded, self.from_observations
        labelled = [layer for layer in current if self.from_labels(settings[layer])]
        rest = [layer for layer in current if layer not in labelled and layer.owner not in self.unfrozen]
        rest = [one for one in rest if self.due(one, settings[one]) and one.weight not in recorded.read_elsewhere]
        known = {layer for layer in current if self._has_factors(layer, settings[layer])}
        expected = labelled if not observed and known.isdisjoint(labelled) else []
        if names := recorded.with_nonzero_gradient(expected):
            raise recorded.missing_observation(
                f"observe() was never called for layers {[layer.names[0] for layer in names]}",
                "call observe(outputs), before loss.backward(), on outputs",
            )
        if rest and not self.from_passes and (names := recorded.with_nonzero_gradient(rest)):
            raise recorded.missing_observation(
                f"no inputs were recorded for layers {[layer.names[0] for layer in names]}",
                "run forward and backward passes",
            )
        found = {layer: observed[layer] for layer in observed if layer in labelled}
        found |= {layer: self.from_passes[layer] for layer in rest if layer in self.from_passes}
        if not found:
            return found
        observed.complete(recorded.marks)
        self.from_passes.complete(recorded.marks)
        good = finite(found)
        new = {layer: one for layer, one in found.items() if layer not in known and layer not in good}
        if bad := nonfinite_cause(recorded.layers, new):
            raise self.optimizer.nonfinite_error(f"{bad}: check the batch and the loss, or scale them.")
        return good

    def nonfinite(self, index: int, params: list[Tensor]) -> str | None:
        found = (self.from_observations, self.from_passes) if not index else ()
        bad = {layer: some[layer] for some in found for layer in set(some) - set(finite(some))}
        return nonfinite_cause(self.recorded.layers, bad)

    def merge(self, layer: Layer, entry: Entry, statistics: LayerStatistics, group: Mapping[str, Any]) -> None:
        """Updates the factors; `clock` already counts this merge but has the step of the last one."""
        keep, take = average(group["ema"], int(entry["clock"][refresh.MERGES]))
        for side, moment in statistics.moments().items():
            moment.into(entry[f"{side}_moment"], keep, take)

    # --- the step ---

    def directions(self, groups: Groups, active: list[list[Tensor]]) -> Directions:
        recorded = self.recorded
        self._find_layers()
        self.options.check(self.optimizer, recorded.layers, groups, self.layer_options)
        owners = {p: group for group, params in zip(groups, active) for p in params}
        current = [layer for layer in recorded.layers if any(p in owners for p in layer.members)]
        settings = {layer: next(owners[p] for p in layer.members if p in owners) for layer in current}
        fresh = self.statistics(current, settings)
        elsewhere = recorded.marks.unexplained
        known = [layer for layer in current if layer in fresh or self._has_factors(layer, settings[layer])]
        known = [layer for layer in known if layer.weight not in elsewhere]
        if self.done.used:
            self.done.check(current, recorded.marks)
        lost = {layer for layer in current if layer not in known and layer.owner not in self.unfrozen}
        if lost and not {p for layer in lost for p in layer.members} <= self.optimizer.warned:
            lost = recorded.with_nonzero_gradient(lost)
            recorded.warn_fallback({p for layer in lost for p in layer.members})
        self._refresh(known, fresh, settings)
        return self._directions(known, settings)

    def _find_layers(self) -> None:
        """Finds the layers of this step; those that no pass has called, because they were frozen, are `unfrozen`."""
        before = {one.owner for one in self.recorded.layers}
        self.recorded.update_trainable(in_step=True)
        self.unfrozen |= {one.owner for one in self.recorded.layers} - before
        self.unfrozen -= {one.owner for one in (*self.called, *self.from_passes, *self.from_observations)}

    def _directions(self, known: list[Layer], settings: Settings) -> Directions:
        """The preconditioned gradients d of layers, for each parameter; their norm is bounded by `max_norm`."""
        found: dict[Any, Direction] = {}
        limit = settings[known[0]].get("max_norm", math.inf) if known else math.inf
        marks, inner = self.recorded.marks, InnerProduct(math.isfinite(limit))
        few = [layer for layer in known if layer in self.kept and marks.untouched(layer.members)]
        factor = marks.factor([p for layer in few for p in layer.members]) if few else None
        rest: dict[Layer, Precision] = {}
        for layer in known:
            precision = self.precision(layer, settings[layer])
            if layer in self.done.layers:
                found |= {p: gradient_of(p) for p in layer.members if p.grad is not None}
            elif layer in few and isinstance(precision, Kronecker):
                found |= from_rows(layer, precision, self.kept[layer], inner, factor)
            else:
                rest[layer] = precision
        found |= from_gradients(rest, inner)
        if self.done.layers:
            self.done.join(inner, [layer for layer in known if layer in self.done.layers], marks)
        return limit_norm(found, limit, inner.total)

    def _refresh(self, known: list[Layer], fresh: Mapping[Layer, LayerStatistics], settings: Settings) -> None:
        """Updates averages and inverses where that is due."""
        due: dict[Layer, Tensor | bool] = {}
        order = self.recorded.layers
        for layer in known:
            entry, group = self.optimizer.state[layer.owner], settings[layer]
            self._initialise(layer, entry, group)
            step, every, damping = refresh.next_step(entry), group["update_every"], self.setting(group)
            if layer in fresh:
                entry["clock"][refresh.MERGES] += 1
                self.merge(layer, entry, fresh[layer], group)
                entry["clock"][refresh.MERGED] = step
            due[layer] = refresh.inversion_due(entry, step, every, order.index(layer) * every // len(order), damping)
        if compared := [layer for layer, one in due.items() if isinstance(one, Tensor)]:
            due |= dict(zip(compared, torch.stack([due[layer].cpu() for layer in compared]).tolist()))  # pyright: ignore
        if chosen := [(layer, self.optimizer.state[layer.owner], settings[layer]) for layer, one in due.items() if one]:
            self._invert(chosen, self.processes)

    def _invert(self, chosen: list[tuple[Layer, Entry, Mapping[str, Any]]], processes: int) -> None:
        """Computes the inverses of layers, which processes divide."""
        jobs = [(one, job) for one in chosen for job in self.inversions(*one)]
        results = divided([job for _, job in jobs], processes)
        for one in chosen:
            found = [result for (other, _), result in zip(jobs, results) if other is one]
            self.keep_inverses(*one, {name: value for result in found for name, value in result.items()})
            refresh.note_inversion(one[1], refresh.next_step(one[1]), self.setting(one[2]))

    def setting(self, group: Mapping[str, Any]) -> float:
        """The hyperparameter that inverses depend on: they are computed anew when it changes by more than a tenth."""
        return float(group["damping"])

    def dampings(self, entry: Mapping[str, Tensor], group: Mapping[str, Any]) -> dict[str, float]:
        """What is added to the factor of each side."""
        return split_damping({side: entry[f"{side}_moment"] for side in self.sides}, group)

    def inversions(self, layer: Layer, entry: Entry, group: Mapping[str, Any]) -> list[Job]:
        """The computations that give, from the factors, what `precision` reads; processes divide them."""
        jobs = []
        for side, damping in self.dampings(entry, group).items():
            moment = entry[f"{side}_moment"]
            run = partial(damped_inverse, side, moment, float(damping), layer.names[0], self.warned)
            jobs.append(Job(refresh.cost(moment), {f"{side}_inverse": moment}, run))
        return jobs

    def keep_inverses(self, layer: Layer, entry: Entry, group: Mapping[str, Any], found: Entry) -> None:
        """Stores the results of `inversions`."""
        for name, value in found.items():
            refresh.store(entry, name, value)

    def precision(self, layer: Layer, group: Mapping[str, Any]) -> Precision:
        """The precision of [W b]."""
        entry = self.optimizer.state[layer.owner]
        left, right = (entry.get(f"{side}_inverse") for side in (SIDES if layer.lookup else SIDES[::-1]))
        return Kronecker(left, right, layer.shape)

    # --- state ---

    def _initialise(self, layer: Layer, entry: Entry, group: Mapping[str, Any]) -> None:
        owner, shapes = layer.owner, self._shapes(layer, group)
        kind, kept = self.ready.get(layer, ((), ()))
        if kind == (owner.dtype, owner.device) and all(map(is_, map(entry.get, ("clock", *shapes)), kept)):
            return
        refresh.initialise(entry, shapes, owner, self.on_cpu, lambda zeros: self.initial_factor(zeros, group))
        self.ready[layer] = (owner.dtype, owner.device), [entry[name] for name in ("clock", *shapes)]

    def _shapes(self, layer: Layer, group: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """The shapes of factors by name; the options that they depend on cannot change during a run."""
        if layer not in self.known_shapes:
            self.known_shapes[layer] = self._named(self.shapes(layer, group))
        return self.known_shapes[layer]

    def _named(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        return {f"{side}_{self.factor}": shape for side, shape in shapes.items()}

    def _has_factors(self, layer: Layer, group: Mapping[str, Any]) -> bool:
        """Whether a layer has statistics of the parameters that are trained now."""
        entry = self.optimizer.state.get(layer.owner, {})
        return refresh.has_merged(entry) and refresh.fits(entry, self._shapes(layer, group))

    def initial_factor(self, zeros: Tensor, group: Mapping[str, Any]) -> Tensor:
        return zeros

    def shapes(self, layer: Layer, group: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return refresh.factor_shapes(layer, self.sides, group["max_factor"])

    def check_loaded(self, saved: Mapping[str, Any]) -> None:
        self.recorded.update_trainable()
        for layer in self.recorded.layers:
            entry, group = saved_entry(self.optimizer, saved, layer.owner)
            for name, shape in self._named(self.shapes(layer, group)).items() if entry else ():
                refresh.check_factor(entry, name, shape, layer.names[0], self.optimizer.__class__.__name__)

    def initialise_state(self) -> None:
        for layer in self.recorded.layers:
            entry, group = self.optimizer.state[layer.owner], self.groups[layer.owner]
            self._initialise(layer, entry, group)
            with refresh.unit_factors(entry, self.factors):
                self._invert([(layer, entry, group)], processes=1)
