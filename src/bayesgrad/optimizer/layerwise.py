"""Optimizers that record the inputs of a model's layers and the errors at their outputs."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayesgrad import layers, likelihoods
from bayesgrad.curvature import Curvature, SquaredGradient
from bayesgrad.layers.layer import Layer
from bayesgrad.layers.network import parameters_of, unwrap
from bayesgrad.layers.recorder import LayerCall, LayerRecorder
from bayesgrad.layers.statistics import LayerStatistics as LayerBatch
from bayesgrad.optimizer.base import BeliefOptimizer, Parts
from bayesgrad.optimizer.constraints import COUNT, FRACTION, INTEGER, POSITIVE_INTEGER, one_of
from bayesgrad.rule import NaturalGradient
from bayesgrad.transition import MovingAverage, Static, Transition


class LayerwiseOptimizer(BeliefOptimizer):
    """Base class of optimizers that take the model, and use the inputs and errors of its layers.

    `directions` returns the preconditioned gradients of parameters in known layers. All other parameters are trained
    by the fallback, an elementwise update with `fallback_parts`. Parameters are identified by their names in the model.

    Args:
        model: the network. To use torch.compile, compile the model after building the optimizer.
        params: parameters, named parameters or param groups of the model; None for all.
        defaults: hyperparameters.
    """

    rule = NaturalGradient(heavy_ball=True)
    transition = Static()
    by_layer: ClassVar[bool] = True  # a precision matrix for each layer; if False, one for all recorded layers
    recorded: ClassVar[tuple[Callable[[nn.Module], bool], ...]] = (
        layers.is_matrix,
    )  # predicates of the layers to record
    records_backward: ClassVar[bool] = True  # whether inputs and errors are recorded in backward passes
    observes: ClassVar[bool] = False  # whether observe() is used
    fallback_parts: ClassVar[tuple[Curvature | None, Transition]] = (
        SquaredGradient(),
        MovingAverage(),
    )  # curvature and transition of parameters outside of known layers
    fallback_name: ClassVar[str] = "a diagonal of squared gradients with the same damping"  # for the warning
    accepts = {
        **BeliefOptimizer.accepts,
        "ema": FRACTION,
        "update_every": POSITIVE_INTEGER,
        "stats_every": POSITIVE_INTEGER,
        "max_factor": COUNT,
        "losses_per_example": COUNT,
        "likelihood": one_of("categorical", "bernoulli", "gaussian"),
        "seed": INTEGER,
    }

    def __init__(self, model: nn.Module, params: Any, defaults: dict[str, Any]) -> None:
        self.model = model_of(self, model)
        self._check_model()
        super().__init__(named_groups(self.model, params), defaults)
        self._bind()
        self._warn_fallback(set(self._unmodelled()))

    def _check_model(self) -> None:
        """Raises if the optimizer does not support this model."""

    def _bind(self) -> None:
        """Finds the layers of the model and starts to record them."""
        if "recorder" in self.__dict__:
            self.recorder.close()
        mine = {id(p) for group in self.param_groups for p in group["params"]}
        self.layers = self._find_layers(mine)
        recorded = {name: module for name, module in self.model.named_modules() if self._is_recorded(module, mine)}
        self.recorder = LayerRecorder(
            self.model,
            recorded,
            record_backward=self.records_backward,
            annotate_graph=self.observes,
            record_arguments=self.remembers,
        )
        self._observed: list[Any] = []
        self._marked: list[tuple[int, int]] = []
        self._read_elsewhere: set[Tensor] = set()  # weights that are used outside of their layers
        self._trained = self._flags()
        self._warned: set[Tensor] = self.__dict__.get("_warned", set())

    @property
    def remembers(self) -> bool:
        """Whether the recorder keeps the arguments of the model's last call."""
        return False

    def _flags(self) -> list[bool]:
        return [p.requires_grad for group in self.param_groups for p in group["params"]]

    def _update_trainable(self) -> None:
        """Finds the layers again if `requires_grad` of a parameter has changed."""
        if self._trained != self._flags():
            self._trained = self._flags()
            self.layers = self._find_layers({id(p) for group in self.param_groups for p in group["params"]})
            self._warn_fallback(set(self._unmodelled()))

    def _is_recorded(self, module: nn.Module, mine: set[int]) -> bool:
        known = any(is_known(module) for is_known in self.recorded)
        return known and any(id(p) in mine for p in layers.own_parameters(module).values())

    def _find_layers(self, mine: set[int]) -> list[Layer]:
        """Layers that multiply by a matrix; a weight that modules of different types share is excluded."""
        found: dict[int, list[tuple[str, nn.Module]]] = {}
        for name, module in self.model.named_modules():
            if layers.is_matrix(module):
                found.setdefault(id(module.weight), []).append((name, module))
        result = []
        biases = Counter(id(uses[0][1]._parameters.get("bias")) for uses in found.values())
        for uses in found.values():
            names, modules = zip(*uses)
            kinds = {(type(m), layers.groups_of(m), id(m._parameters.get("bias"))) for m in modules}
            own = layers.own_parameters(modules[0])
            weight, bias = (
                p if (p := own.get(k)) is not None and id(p) in mine and p.requires_grad else None
                for k in ("weight", "bias")
            )
            bias = bias if biases[id(bias)] == 1 else None  # a bias that several layers share belongs to none
            if len(kinds) == 1 and (weight is not None or bias is not None):
                result.append(Layer(names, modules[0], weight, bias))
        return result

    def _unmodelled(self) -> list[Tensor]:
        """The parameters outside of known layers."""
        if self.by_layer:
            modelled = {p for layer in self.layers for p in layer.members}
        else:
            modelled = {p for module in self.recorder.layers.values() for p in module.parameters(recurse=False)}
        return [p for group in self.param_groups for p in group["params"] if p not in modelled and p.requires_grad]

    def _warn_fallback(self, params: set[Tensor]) -> None:
        """Warns once for each parameter that is trained by the fallback."""
        new = params - self._warned
        self._warned |= new
        names = [n for group in self.param_groups for n, p in zip(group["param_names"], group["params"]) if p in new]
        if names:
            warnings.warn(
                f"{type(self).__name__} does not support {', '.join(names)}: they are trained by {self.fallback_name}.",
                UserWarning,
                stacklevel=4,
            )

    # --- evidence ---

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim; discards the recorded passes.

        Observations are kept, unless gradients were computed since: they then belong to a step that was not taken.
        """
        if self._observed and self._marked != self._mark():
            self._observed = []
        super().zero_grad(set_to_none)
        self.recorder.clear()

    def _skips(self, active: list[list[Tensor]]) -> bool:
        skips = super()._skips(active)
        if skips:
            self._observed = []
            self.recorder.clear()
        return skips

    def layer_batches(self, uses: Sequence[Sequence[LayerCall]]) -> dict[Layer, LayerBatch]:
        """The inputs and errors of each layer in these passes; layers without calls are omitted."""
        by_weight = {id(layer.module._parameters.get("weight")): layer for layer in self.layers}
        found: dict[Layer, list[list[LayerCall]]] = {}
        for one_pass in uses:
            here: dict[Layer, list[LayerCall]] = {}
            for use in one_pass:
                layer = by_weight.get(id(use.module._parameters.get("weight")))
                if layer is not None:
                    here.setdefault(layer, []).append(use)
            for layer, own in here.items():
                found.setdefault(layer, []).append(own)
        return {layer: LayerBatch(layer, passes) for layer, passes in found.items()}

    def backward_passes(self) -> list[list[LayerCall]]:
        """The calls recorded since `zero_grad()`, as a list for each backward pass."""
        passes: dict[tuple[int, int], list[LayerCall]] = {}
        for uses in self.recorder.calls.values():
            for use in uses:
                passes.setdefault((use.backward_id, use.forward_id), []).append(use)
        return list(passes.values())

    def draw(self, outputs: Tensor) -> Tensor:
        """Labels sampled from the model's predictions."""
        group = self.param_groups[0]
        group["draws"] += 1
        return likelihoods.draw(likelihoods.named(group["likelihood"]), outputs, group["seed"], group["draws"] - 1)

    def with_nonzero_gradient(self, layers: Iterable[Layer]) -> list[Layer]:
        """Those layers that have a nonzero gradient."""
        return [layer for layer in layers if any(bool(p.grad.any()) for p in layer.members if p.grad is not None)]

    def missing_observation(self, what: str, do: str) -> RuntimeError:
        """The error of a step without recorded passes or observations."""
        own = type(self).__name__
        return RuntimeError(
            f"{what}: {do} of the model that was given to {own} before step(). "
            f"If the model is compiled, build {own} before torch.compile; if layers were replaced or pruned, build a "
            f"new {own}."
        )

    def step(self, closure: Any = None) -> Any:
        """As `BeliefOptimizer.step`; then discards the recorded passes."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            size = torch.distributed.get_world_size()
            if size > 1:
                raise RuntimeError(
                    f"{type(self).__name__} supports one process, got {size}: each would record only the inputs of its "
                    "own batch. Train in one process."
                )
        loss = super().step(closure)
        self.recorder.clear()
        return loss

    def parts(self, group: Mapping[str, Any]) -> Parts:
        return (
            Parts(None, self.transition, self.rule)
            if group.get("preconditioned", True)
            else Parts(*self.fallback_parts, self.rule)
        )

    def dynamics(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        return {"decay": group["ema"], "step": step}

    def scalars(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        """Preconditioned gradients are already damped."""
        return super().scalars({**group, "damping": 0.0} if group.get("preconditioned") else group, step)

    # --- copies and checkpoints ---

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group of the model's parameters."""
        (group,) = named_groups(self.model, [param_group])
        super().add_param_group(group)
        self.param_groups[-1].setdefault("draws", 0)
        if "recorder" in self.__dict__:
            self._bind()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "model": self.model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a run bit for bit, matching parameters by name; raises without changes if the state does not fit."""
        super().load_state_dict(self._in_my_order(state_dict))
        self._observed.clear()

    def _in_my_order(self, saved: Any) -> Any:
        """The saved state with parameters in the order of this optimizer's groups."""
        groups = saved.get("param_groups") if isinstance(saved, dict) else None
        if not isinstance(groups, list) or not all(isinstance(g, Mapping) for g in groups):
            return saved
        mine = [group["param_names"] for group in self.param_groups]
        given = [[_plain(name) for name in group.get("param_names", ())] for group in groups]
        if [sorted(names) for names in mine] != [sorted(names) for names in given]:
            odd = sorted({n for names in mine for n in names} ^ {n for names in given for n in names})
            where = f"; see {', '.join(odd[:3])}" if odd else ""
            raise ValueError(
                f"the saved state must have the parameters of this {type(self).__name__}, but they differ{where}."
            )
        ordered = []
        for group, names, own in zip(groups, given, mine):
            keys = dict(zip(names, group["params"]))
            ordered.append({**group, "params": [keys[name] for name in own], "param_names": list(own)})
        return {**saved, "param_groups": ordered}

    def _is_partial(self, entry: Mapping[str, Tensor]) -> bool:
        return "step" not in entry

    def _slots_of(self, p: Tensor, group: Mapping[str, Any]) -> tuple[str, ...]:
        covered = not self.by_layer or any(p is q for layer in self.layers for q in layer.members)
        return self.slots({**group, "preconditioned": covered})

    # --- the whole network ---

    def _in_model_order(self) -> list[Tensor]:
        """The parameters of all groups in the order of the model."""
        mine = {p for group in self.param_groups for p in group["params"]}
        return [p for p in self.model.parameters() if p in mine]

    def _steps_taken(self) -> int:
        return max((int(entry["step"]) for entry in self.state.values() if "step" in entry), default=0)


def _plain(name: str) -> str:
    """A parameter's name without the prefixes of torch.compile and DataParallel."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def model_of(optimizer: BeliefOptimizer, model: Any) -> nn.Module:
    """The given model without wrappers; raises TypeError if it is not a module."""
    if not isinstance(model, nn.Module):
        name = type(optimizer).__name__
        raise TypeError(
            f"{name} takes the model, not its parameters, got {type(model).__name__}: use {name}(model, params=...)."
        )
    return unwrap(model)


def named_groups(model: nn.Module, params: Any) -> list[dict[str, Any]]:
    """Param groups of (name, parameter) pairs, from parameters, named parameters or groups; None for all."""
    names = {id(p): name for name, p in parameters_of(model).items()}
    given: list[Any] = list(parameters_of(model).values()) if params is None else list(params)
    if not given:
        raise ValueError("optimizer got an empty parameter list")
    groups = given if isinstance(given[0], dict) else [{"params": given}]
    named = []
    for group in groups:
        some = group["params"]
        members: list[Any] = [some] if isinstance(some, Tensor) else list(some)
        members = [p[1] if isinstance(p, tuple) else p for p in members]
        for p in members:
            if id(p) not in names:
                raise ValueError(
                    f"params must be parameters of the model, got one of shape {tuple(p.shape)} that is not."
                )
        named.append({**group, "params": [(names[id(p)], p) for p in members]})
    return named
