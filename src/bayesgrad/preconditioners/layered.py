"""Preconditioners with Kronecker factors for each layer: how factors are kept, and the gradient times their inverses.

The gradient of the mean loss is E'A, with a row of inputs A (a one appended for the bias) and a row of errors E for
each example and position. L E'A R can be computed from the gradient, or as (E L)'(A R), which is cheaper if rows are
fewer than outputs. Both agree only if `.grad` was not changed since the backward pass (clipping, unscaling, penalties).
So `layers.rescaling.gradient_factors` first compares E'A with `.grad`, and allows for a common factor.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesgrad import likelihoods
from bayesgrad.checkpoint import saved_entry
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.fisher import check_outputs
from bayesgrad.layers.modules import Layer
from bayesgrad.layers.per_example import matmul
from bayesgrad.layers.rescaling import gradient_factors, gradient_from_calls
from bayesgrad.layers.statistics import LayerStatistics, defer, flush
from bayesgrad.packing import Directions, Product, gradient_of
from bayesgrad.parts import Groups, Host, Needs, Preconditioner, weak
from bayesgrad.precision import Kronecker, Precision
from bayesgrad.precision.linalg import diagonal_inverse, inverse
from bayesgrad.rules.transition import average
from bayesgrad.sources.recorded_layers import RecordedLayers

MERGES, MERGED, INVERTED = range(3)  # entries of `clock`: number of merges, step of the last merge and inversion
LAYER_KEYS = ("spectrum", "damped", "clock", "traces")
SIDES = ("input", "error")
Settings = Mapping[Layer, Mapping[str, Any]]


class LayerPreconditioner(Preconditioner):
    """Base class: keeps moving averages of each layer's second moments, and their inverses.

    The averages are updated every `stats_every` steps and inverted every `update_every` steps. Early in a run the
    averages change fast and training with an old inverse diverges, so they are inverted whenever the number of steps
    has grown by a quarter.

    Statistics come from the backward passes of the loss, or from `observe(outputs)`: a label is sampled for each
    output, and the errors at the layers' outputs are stored until the next step.

    Args:
        fallback: by what parameters outside of known layers are trained, for a warning.
    """

    sides: ClassVar[tuple[str, ...]] = SIDES  # whose second moments are kept
    factor: ClassVar[str] = "moment"  # the name of each side's matrix in the state
    on_cpu = ("clock", "damped", "traces", *(f"{side}_waits" for side in SIDES))

    def __init__(self, fallback: str) -> None:
        self.fallback = fallback

    def from_labels(self, group: Mapping[str, Any]) -> bool:
        """Whether the statistics of a group come from `observe(outputs)`."""
        return False

    def uses(self, layer: Layer) -> bool:
        """Whether this preconditioner supports a layer."""
        return True

    def bind(self, optimizer: Host) -> None:
        super().bind(optimizer)
        labels = [self.from_labels(group) for group in optimizer.param_groups]
        self.needs = Needs(outputs=any(labels))
        self.close()
        self.recorded = RecordedLayers(self.optimizer, self.fallback, annotate_graph=any(labels), only=weak(self.uses))
        self.observed = []
        for layer in () if all(labels) else self.recorded.layers:
            if layer.weight is not None:
                hook = _FirstPass(self.recorded, layer)
                hook.handle = layer.weight.register_post_accumulate_grad_hook(hook)

    def covers(self, p: Tensor) -> bool:
        return any(p is q for layer in self.recorded.layers for q in layer.members)

    # --- statistics ---

    def observe(self, outputs: Any, loss: Any, labels: Any) -> None:
        if not self.needs.outputs:
            return
        check_outputs(outputs)
        optimizer, recorded = self.optimizer, self.recorded
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        if not any(self.due(layer, groups[layer.owner]) for layer in recorded.layers):
            return
        trace = recorded.recorder.trace(outputs)
        labels = optimizer.draw_labels(outputs) if labels is None else labels
        residual = likelihoods.named(optimizer.param_groups[0]["likelihood"]).residual(outputs, labels)
        self.observed.append(trace.backpropagate(residual))
        elsewhere = trace.used_elsewhere()
        recorded.read_elsewhere |= {
            layer.weight for layer in recorded.layers if layer.weight is not None and id(layer.weight) in elsewhere
        }

    def due(self, layer: Layer, group: Mapping[str, Any]) -> bool:
        """Whether statistics are due in the next step."""
        entry = self.optimizer.state.get(layer.owner, {})
        clock = entry.get("clock")
        return clock is None or int(entry.get("step", 0)) + 1 - int(clock[MERGED]) >= group["stats_every"]

    def statistics(
        self, current: list[Layer], settings: Settings, passes: Mapping[Layer, LayerStatistics]
    ) -> dict[Layer, LayerStatistics]:
        """The data to merge in this step, by layer. A layer that never had any is trained by the fallback."""
        recorded, state = self.recorded, self.optimizer.state
        labelled = [layer for layer in current if self.from_labels(settings[layer])]
        rest = [layer for layer in current if layer not in labelled and self.due(layer, settings[layer])]
        observed = recorded.layer_statistics(self.observed) if self.observed else {}
        never = not any("clock" in state.get(layer.owner, {}) for layer in labelled)
        if labelled and never and not observed and (names := recorded.with_nonzero_gradient(labelled)):
            raise recorded.missing_observation(
                f"observe() was never called for layers {[layer.names[0] for layer in names]}",
                "call observe(outputs), before loss.backward(), on outputs",
            )
        if not passes and (names := recorded.with_nonzero_gradient(rest)):
            raise recorded.missing_observation(
                f"no inputs were recorded for layers {[layer.names[0] for layer in names]}",
                "run forward and backward passes",
            )
        found = {layer: observed[layer] for layer in observed if layer in labelled and self.due(layer, settings[layer])}
        return found | {layer: passes[layer] for layer in rest if layer in passes}

    def merge(
        self, layer: Layer, entry: dict[str, Tensor], statistics: LayerStatistics, group: Mapping[str, Any]
    ) -> None:
        """Updates the factors; `clock` already counts this merge but has the step of the last one."""
        keep, take = average(group["ema"], int(entry["clock"][MERGES]))
        moments = statistics.moments(
            self.sides, losses_per_example=group["losses_per_example"], sharing=group.get("sharing", "expand")
        )
        for side, moment in moments.items():
            defer(entry, side, moment, keep, take)

    # --- the step ---

    def directions(self, groups: Groups, active: list[list[Tensor]]) -> Directions:
        recorded, state = self.recorded, self.optimizer.state
        recorded.update_trainable()
        owners = {p: group for group, params in zip(groups, active) for p in params}
        current = [layer for layer in recorded.layers if any(p in owners for p in layer.members)]
        settings = {layer: next(owners[p] for p in layer.members if p in owners) for layer in current}
        passes = recorded.layer_statistics(recorded.backward_passes())
        fresh = self.statistics(current, settings, passes)
        known = [layer for layer in current if layer in fresh or "clock" in state.get(layer.owner, {})]
        known = [layer for layer in known if layer.weight not in recorded.read_elsewhere]
        if lost := set(current) - set(known):
            lost = recorded.with_nonzero_gradient(lost)
            recorded.warn_fallback({p for layer in lost for p in layer.members})
        for layer in known:
            self._refresh(layer, fresh.get(layer), settings[layer])
        return directions([(layer, self.precision(layer, settings[layer]), passes.get(layer)) for layer in known])

    def _refresh(self, layer: Layer, statistics: LayerStatistics | None, group: Mapping[str, Any]) -> None:
        entry = self.optimizer.state[layer.owner]
        self._initialise(layer, entry, group)
        clock, step = entry["clock"], int(entry.get("step", 0)) + 1
        if statistics is not None:
            clock[MERGES] += 1
            self.merge(layer, entry, statistics, group)
            clock[MERGED] = step
        last, setting = int(clock[INVERTED]), self.setting(group)
        due = clock[MERGED] > last and step >= last + min(max(1, last // 4), group["update_every"])
        if not last or due or entry["damped"] != setting:
            entry["damped"] = torch.tensor(setting, dtype=torch.float64)
            for side in self.sides:
                flush(entry, side)
            self.invert(layer, entry, group)
            clock[INVERTED] = step

    def setting(self, group: Mapping[str, Any]) -> float:
        """The hyperparameter that inverses depend on: they are computed anew when it changes."""
        return float(group["damping"])

    def dampings(self, entry: Mapping[str, Tensor], group: Mapping[str, Any]) -> dict[str, float]:
        """The damping of each side."""
        return {"input": group["damping"]}

    def invert(self, layer: Layer, entry: dict[str, Tensor], group: Mapping[str, Any]) -> None:
        """Computes from the factors what `precision` reads."""
        for side, damping in self.dampings(entry, group).items():
            moment = entry[f"{side}_moment"]
            invert = diagonal_inverse if moment.dim() == 2 else inverse
            name = f"the {side} factor of layer {layer.names[0]!r}"
            store(entry, f"{side}_inverse", invert(moment, float(damping), name))

    def precision(self, layer: Layer, group: Mapping[str, Any]) -> Precision:
        """The precision of [W b]."""
        entry = self.optimizer.state[layer.owner]
        sides = entry["input_inverse"], entry.get("error_inverse")
        left, right = sides if layer.lookup else sides[::-1]
        return Kronecker(left, right, layer.shape)

    # --- state ---

    def _initialise(self, layer: Layer, entry: dict[str, Tensor], group: Mapping[str, Any]) -> None:
        like = {"dtype": compute_dtype(layer.owner.dtype), "device": layer.owner.device}
        for side, shape in self._shapes(layer, group).items():
            name = f"{side}_{self.factor}"
            if name in entry and entry[name].shape != shape:
                for key in _factors(entry):
                    del entry[key]  # another part of the layer is trained now, so the old factors do not fit
            if name not in entry:
                entry[name] = self.initial_factor(torch.zeros(shape, **like), group)
            elif entry[name].dtype != like["dtype"]:  # the model was cast
                for key in (key for key in _factors(entry) if key not in self.on_cpu):
                    entry[key] = entry[key].to(**like)
        entry.setdefault("clock", torch.zeros(3, dtype=torch.int64))

    def initial_factor(self, zeros: Tensor, group: Mapping[str, Any]) -> Tensor:
        """The initial value of a factor."""
        return zeros

    def _shapes(self, layer: Layer, group: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        shapes = {}
        for side in self.sides:
            size = layer.sizes[side]
            diagonal = size > group["max_factor"] or (layer.lookup and side == "input")
            shapes[side] = (layer.shape[0], size) if diagonal else (layer.shape[0], size, size)
        return shapes

    def check_loaded(self, saved: Mapping[str, Any]) -> None:
        own = self.optimizer.__class__.__name__
        for layer in self.recorded.layers:
            entry, group = saved_entry(self.optimizer, saved, layer.owner)
            if not entry:
                continue
            for side, shape in self._shapes(layer, group).items():
                kept, name = f"{side}_{self.factor}", layer.names[0]
                moment = entry.get(kept)
                if moment is None:
                    raise ValueError(
                        f"the saved state of layer {name!r} lacks {kept}: it is not a state of {own}, or it is "
                        "truncated."
                    )
                if moment.shape != shape:
                    raise ValueError(
                        f"{kept} of layer {name!r} has shape {tuple(moment.shape)} in the saved state, "
                        f"but the layer needs {shape}: load it into the model it came from."
                    )


def _factors(entry: Mapping[str, Tensor]) -> list[str]:
    """The names of the state tensors that belong to the layer, not to the elements of its parameters."""
    return [key for key in entry if key.startswith(tuple(f"{side}_" for side in SIDES)) or key in LAYER_KEYS]


def store(entry: dict[str, Tensor], name: str, value: Tensor) -> None:
    """Stores a value in the state; copies it into the existing tensor if shape and dtype are the same."""
    if name in entry and entry[name].shape == value.shape and entry[name].dtype == value.dtype:
        entry[name].copy_(value)
    else:
        entry[name] = value


class _FirstPass:
    """A hook that compares a weight's first gradient with the one that follows from the recorded layer calls."""

    def __init__(self, recorded: RecordedLayers, layer: Layer) -> None:
        self.recorded, self.layer = weakref.ref(recorded), layer
        self.handle: Any = None

    def __call__(self, weight: Tensor) -> None:
        recorded, task = self.recorded(), torch._C._current_graph_task_id()
        if recorded is None:
            self.handle.remove()
            return
        recorder = recorded.recorder
        uses = [use for name in self.layer.names for use in recorder.calls.get(name, ()) if use.backward_id == task]
        if not uses or not all(recorder.from_zero_grad.get(name, True) for name in self.layer.names):
            return
        self.handle.remove()
        made, gradient = gradient_from_calls(self.layer, uses), gradient_of(weight).detach()
        # The difference is smaller in half precision, and larger if something else uses the weight.
        if bool((made.to(gradient) - gradient).norm() > 0.1 * gradient.norm()):
            recorded.read_elsewhere.add(weight)


# --- directions ---


def directions(blocks: Sequence[tuple[Layer, Precision, LayerStatistics | None]]) -> dict[Tensor, Tensor | Product]:
    """The preconditioned gradients of layers, for each parameter.

    Args:
        blocks: layers with their precisions, and the inputs and errors of the backward passes, if recorded.
    """
    few = [
        (layer, batch)
        for layer, precision, batch in blocks
        if isinstance(precision, Kronecker) and batch is not None and _is_cheaper(layer, precision, batch)
    ]
    factors = gradient_factors(few) if few else {}
    found: dict[Tensor, Tensor | Product] = {}
    for layer, precision, batch in blocks:
        if layer in factors and isinstance(precision, Kronecker) and batch is not None:
            found |= _from_rows(layer, precision, batch, factors[layer])
        else:
            found |= layer.split(precision.solve(layer.matrix()))
    return found


def _is_cheaper(layer: Layer, precision: Kronecker, batch: LayerStatistics) -> bool:
    """Whether (E L)'(A R) needs fewer multiplications than L G R."""
    if layer.lookup or any(p.grad is None for p in layer.members):
        return False
    _, fan_out, fan_in = layer.shape
    per_row = fan_in * fan_out
    whole = 0
    for factor, size in ((precision.left, fan_out), (precision.right, fan_in)):
        if factor is not None and factor.dim() == 3:
            per_row += size * size
            whole += fan_in * fan_out * size
    return batch.rows * per_row < whole


def _from_rows(
    layer: Layer, precision: Kronecker, batch: LayerStatistics, factor: float
) -> dict[Tensor, Tensor | Product]:
    inputs, errors = _inputs_times(batch, precision.right), _times(batch.errors, precision.left)
    size = inputs.shape[-1] - (layer.bias is not None)
    found: dict[Tensor, Tensor | Product] = {}
    if layer.weight is not None:
        right = inputs[..., :size]
        if len(inputs) == 1:
            found[layer.weight] = Product(errors[0], right[0], factor, layer.weight.shape)
        else:
            found[layer.weight] = torch.bmm(errors.mT, right).mul_(factor).view(layer.weight.shape)
    if layer.bias is not None:
        found[layer.bias] = matmul(errors.mT, inputs[..., size:]).mul_(factor).view(layer.bias.shape)
    return found


def _inputs_times(batch: LayerStatistics, factor: Tensor | None) -> Tensor:
    """A times a factor, without forming the column of ones where possible."""
    if batch.layer.bias is None or factor is None or factor.dim() == 2 or "inputs" in batch.__dict__:
        return _times(batch.inputs, factor)
    rows = batch.features
    if len(factor) > 1:
        return torch.baddbmm(factor[:, -1:], rows, factor[:, :-1])
    return torch.addmm(factor[0, -1:], rows[0], factor[0, :-1])[None]


def _times(rows: Tensor, factor: Tensor | None) -> Tensor:
    if factor is None:
        return rows
    return matmul(rows, factor) if factor.dim() == 3 else rows * factor[:, None]
