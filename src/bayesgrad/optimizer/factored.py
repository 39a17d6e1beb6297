"""Optimizers with a Kronecker-factored precision for each layer, which is updated every few steps."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesgrad.block import Directions, gradient_of
from bayesgrad.block.layer import directions
from bayesgrad.curvature.gradients import average
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.layer import Layer
from bayesgrad.layers.probe import gradient_from_calls
from bayesgrad.layers.statistics import LayerCurvature, defer, flush
from bayesgrad.layers.statistics import LayerStatistics as LayerBatch
from bayesgrad.optimizer.base import ON_CPU
from bayesgrad.optimizer.layerwise import LayerwiseOptimizer
from bayesgrad.precision import Kronecker, Precision
from bayesgrad.precision.linalg import diagonal_inverse, inverse

MERGES, MERGED, INVERTED = range(
    3
)  # indices of `clock`: number of merges, step of the last merge, of the last inversion
LAYER_KEYS = ("spectrum", "damped", "clock", "traces")


class FactoredOptimizer(LayerwiseOptimizer):
    """Base class of optimizers that keep moving averages of each layer's second moments, and their inverses.

    The averages are updated every `stats_every` steps and inverted every `update_every` steps. Early in a run the
    averages change fast and training with an old inverse diverges, so they are inverted whenever the number of steps
    has grown by a quarter.
    """

    layer_curvature: ClassVar[LayerCurvature]
    factor: ClassVar[str] = "moment"  # the name of each side's matrix in the state

    def _bind(self) -> None:
        super()._bind()
        for layer in self.layers if self.checks_gradient() else ():
            if layer.weight is not None:
                hook = _FirstPass(self, layer)
                hook.handle = layer.weight.register_post_accumulate_grad_hook(hook)

    def checks_gradient(self) -> bool:
        """Whether statistics come from backward passes, which must then account for the gradient."""
        return False

    def directions(self, groups: list[dict[str, Any]], active: list[list[Tensor]]) -> Directions:
        self._update_trainable()
        owners = {p: group for group, params in zip(groups, active) for p in params}
        current = [layer for layer in self.layers if any(p in owners for p in layer.members)]
        settings = {layer: next(owners[p] for p in layer.members if p in owners) for layer in current}
        passes = self.layer_batches(self.backward_passes())
        fresh = self.statistics(current, settings, passes)
        known = [layer for layer in current if layer in fresh or "clock" in self.state.get(layer.owner, {})]
        known = [layer for layer in known if layer.weight not in self._read_elsewhere]
        self._warn_fallback(
            {p for layer in self.with_nonzero_gradient(set(current) - set(known)) for p in layer.members}
        )
        for layer in known:
            self._refresh(layer, fresh.get(layer), settings[layer])
        return directions([(layer, self.precision(layer, settings[layer]), passes.get(layer)) for layer in known])

    @abstractmethod
    def statistics(
        self, current: list[Layer], settings: Mapping[Layer, Mapping[str, Any]], passes: Mapping[Layer, LayerBatch]
    ) -> Mapping[Layer, LayerBatch]:
        """The data to merge in this step, by layer. A layer that never had any is trained by the fallback."""

    def due(self, layer: Layer, group: Mapping[str, Any]) -> bool:
        """Whether statistics are due in the next step."""
        entry = self.state.get(layer.owner, {})
        clock = entry.get("clock")
        return clock is None or int(entry.get("step", 0)) + 1 - int(clock[MERGED]) >= group["stats_every"]

    def _refresh(self, layer: Layer, batch: LayerBatch | None, group: Mapping[str, Any]) -> None:
        entry = self.state[layer.owner]
        self._initialise_factors(layer, group)
        clock, step = entry["clock"], int(entry.get("step", 0)) + 1
        if batch is not None:
            clock[MERGES] += 1
            self.merge(layer, entry, batch, group)
            clock[MERGED] = step
        last, setting = int(clock[INVERTED]), self.setting(group)
        due = clock[MERGED] > last and step >= last + min(max(1, last // 4), group["update_every"])
        if not last or due or entry["damped"] != setting:
            entry["damped"] = torch.tensor(setting, dtype=torch.float64)
            for side in self.layer_curvature.sides:
                flush(entry, side)
            self.invert(layer, entry, group)
            clock[INVERTED] = step

    def merge(self, layer: Layer, entry: dict[str, Tensor], batch: LayerBatch, group: Mapping[str, Any]) -> None:
        """Updates the factors; `clock` already counts this merge but has the step of the last one."""
        keep, take = average(group["ema"], int(entry["clock"][MERGES]))
        for side, moment in self.layer_curvature.read(batch, group).items():
            defer(entry, side, moment, keep, take)

    def setting(self, group: Mapping[str, Any]) -> float:
        """The hyperparameter that inverses depend on: they are computed anew when it changes."""
        return float(group["damping"])

    def _initialise_factors(self, layer: Layer, group: Mapping[str, Any]) -> None:
        entry = self.state[layer.owner]
        like = {"dtype": compute_dtype(layer.owner.dtype), "device": layer.owner.device}
        for side, shape in self._factor_shapes(layer, group).items():
            name = f"{side}_{self.factor}"
            if name in entry and entry[name].shape != shape:
                for key in _factors(entry):
                    del entry[key]  # another part of the layer is trained now, so the old factors do not fit
            if name not in entry:
                entry[name] = self.initial_factor(torch.zeros(shape, **like), group)
            elif entry[name].dtype != like["dtype"]:  # the model was cast
                for key in (key for key in _factors(entry) if key not in ON_CPU):
                    entry[key] = entry[key].to(**like)
        entry.setdefault("clock", torch.zeros(3, dtype=torch.int64))

    def initial_factor(self, zeros: Tensor, group: Mapping[str, Any]) -> Tensor:
        """The initial value of a factor."""
        return zeros

    def _factor_shapes(self, layer: Layer, group: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        groups, fan_out, fan_in = layer.shape
        sizes = {"input": fan_out, "error": fan_in} if layer.lookup else {"input": fan_in, "error": fan_out}
        shapes = {}
        for side in self.layer_curvature.sides:
            diagonal = sizes[side] > group["max_factor"] or (layer.lookup and side == "input")
            shapes[side] = (groups, sizes[side]) if diagonal else (groups, sizes[side], sizes[side])
        return shapes

    def dampings(self, layer: Layer, entry: Mapping[str, Tensor], group: Mapping[str, Any]) -> dict[str, float]:
        """The damping of each side."""
        return {"input": group["damping"]}

    def invert(self, layer: Layer, entry: dict[str, Tensor], group: Mapping[str, Any]) -> None:
        for side, damping in self.dampings(layer, entry, group).items():
            moment = entry[f"{side}_moment"]
            invert = diagonal_inverse if moment.dim() == 2 else inverse
            name = f"the {side} factor of layer {layer.names[0]!r}"
            store(entry, f"{side}_inverse", invert(moment, float(damping), name))

    def precision(self, layer: Layer, group: Mapping[str, Any]) -> Precision:
        entry = self.state[layer.owner]
        sides = entry["input_inverse"], entry.get("error_inverse")
        left, right = sides if layer.lookup else sides[::-1]
        return Kronecker(left, right, layer.shape)

    def _check_loaded(self, saved: Mapping[str, Any]) -> None:
        super()._check_loaded(saved)
        keys = {
            p: (key, group) for group in saved["param_groups"] for p, key in zip(self._mine(group), group["params"])
        }
        for layer in self.layers:
            if layer.owner not in keys or not saved["state"].get(keys[layer.owner][0]):
                continue
            key, group = keys[layer.owner]
            entry, name = saved["state"][key], layer.names[0]
            for side, shape in self._factor_shapes(layer, group).items():
                kept = f"{side}_{self.factor}"
                moment = entry.get(kept)
                if moment is None:
                    raise ValueError(
                        f"the saved state of layer {name!r} lacks {kept}: it is not a state of {type(self).__name__}, "
                        "or it is truncated."
                    )
                if moment.shape != shape:
                    raise ValueError(
                        f"{kept} of layer {name!r} has shape {tuple(moment.shape)} in the saved state, "
                        f"but the layer needs {shape}: load it into the model it came from."
                    )

    def _mine(self, saved_group: Mapping[str, Any]) -> list[Tensor]:
        """The parameters of this optimizer with the names of a saved group."""
        named = {n: p for group in self.param_groups for n, p in zip(group["param_names"], group["params"])}
        return [named[name] for name in saved_group["param_names"]]


def _factors(entry: Mapping[str, Tensor]) -> list[str]:
    """The names of the state tensors that belong to the layer, not to the elements of its parameters."""
    return [key for key in entry if key.startswith(("input_", "error_")) or key in LAYER_KEYS]


def store(entry: dict[str, Tensor], name: str, value: Tensor) -> None:
    """Stores a value in the state; copies it into the existing tensor if shape and dtype are the same."""
    if name in entry and entry[name].shape == value.shape and entry[name].dtype == value.dtype:
        entry[name].copy_(value)
    else:
        entry[name] = value


class _FirstPass:
    """A hook that compares a weight's first gradient with the one that follows from the recorded layer calls."""

    def __init__(self, optimizer: FactoredOptimizer, layer: Layer) -> None:
        self.optimizer, self.layer = weakref.ref(optimizer), layer
        self.handle: Any = None

    def __call__(self, weight: Tensor) -> None:
        optimizer, task = self.optimizer(), torch._C._current_graph_task_id()
        if optimizer is None:
            self.handle.remove()
            return
        recorder = optimizer.recorder
        uses = [use for name in self.layer.names for use in recorder.calls.get(name, ()) if use.backward_id == task]
        if not uses or not all(recorder.from_zero_grad.get(name, True) for name in self.layer.names):
            return
        self.handle.remove()
        made, gradient = gradient_from_calls(self.layer, uses), gradient_of(weight).detach()
        # The difference is smaller in half precision, and larger if something else uses the weight.
        if bool((made.to(gradient) - gradient).norm() > 0.1 * gradient.norm()):
            optimizer._read_elsewhere.add(weight)
