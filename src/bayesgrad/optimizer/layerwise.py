"""Filters that look at a model's layers: what each of them saw and what came back to it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayesgrad import likelihoods
from bayesgrad.block.layer import Layer, LayerBatch
from bayesgrad.curvature import Curvature, SquaredGradient, layers
from bayesgrad.curvature.recorder import LayerCall, LayerRecorder
from bayesgrad.optimizer.base import BeliefOptimizer, Parts
from bayesgrad.optimizer.constraints import COUNT, FRACTION, WHOLE, WHOLE_NUMBER, one_of
from bayesgrad.posterior.network import parameters_of, unwrap
from bayesgrad.rule import NaturalGradient
from bayesgrad.transition import MovingAverage, Static, Transition


class LayerwiseOptimizer(BeliefOptimizer):
    """A filter over the layers of a model, in an unchanged training loop.

    Parameters are known by their names in the model. Those of layers that the rule models get a direction from
    `preconditioned_layers`; all others take the fallback, the step of a group whose `preconditioned` is False.

    Args:
        model: whose forward pass will be run; compile it later, if at all.
        params: parameters, named parameters or groups of the model; None for all.
        defaults: hyper-parameters.
    """

    rule = NaturalGradient(heavy_ball=True)
    transition = Static()
    by_layer: ClassVar[bool] = True  # a matrix for each layer; otherwise one belief about all that is recorded
    recorded: ClassVar[tuple[Callable[[nn.Module], bool], ...]] = (layers.is_matrix,)  # the kinds of layers
    listens: ClassVar[bool] = True  # to backward passes
    observes: ClassVar[bool] = False  # through observe()
    rest: ClassVar[tuple[Curvature | None, Transition]] = (
        SquaredGradient(),
        MovingAverage(),
    )  # of what is not modelled
    fallback: ClassVar[str] = "a diagonal of squared gradients with the same damping"  # the same in words
    accepts = {
        **BeliefOptimizer.accepts,
        "ema": FRACTION,
        "update_every": WHOLE,
        "stats_every": WHOLE,
        "max_factor": COUNT,
        "losses_per_example": COUNT,
        "likelihood": one_of("categorical", "bernoulli", "gaussian"),
        "seed": WHOLE_NUMBER,
    }

    def __init__(self, model: nn.Module, params: Any, defaults: dict[str, Any]) -> None:
        self.model = model_of(self, model)
        self._check_model()
        super().__init__(named_groups(self.model, params), defaults)
        self._bind()
        self._warn_of(set(self._unmodelled()))

    def _check_model(self) -> None:
        """Raises where the rule cannot look at this model at all."""

    def _bind(self) -> None:
        """Looks for layers and listens to them."""
        if "recorder" in self.__dict__:
            self.recorder.close()
        mine = {id(p) for group in self.param_groups for p in group["params"]}
        self.layers = self._find_layers(mine)
        heard = {name: module for name, module in self.model.named_modules() if self._is_recorded(module, mine)}
        self.recorder = LayerRecorder(
            self.model,
            heard,
            record_backward=self.listens,
            annotate_graph=self.observes,
            record_arguments=self.remembers,
        )
        self._observed: list[Any] = []
        self._marked: list[tuple[int, int]] = []
        self._strangers: set[Tensor] = set()  # weights that something other than their layers reads
        self._trained = self._flags()
        self._warned: set[Tensor] = self.__dict__.get("_warned", set())

    @property
    def remembers(self) -> bool:
        """Whether the inputs of observed outputs are asked for."""
        return False

    def _flags(self) -> list[bool]:
        return [p.requires_grad for group in self.param_groups for p in group["params"]]

    def _follow_thawing(self) -> None:
        """Looks for layers anew where some were frozen or thawed."""
        if self._trained != self._flags():
            self._trained = self._flags()
            self.layers = self._find_layers({id(p) for group in self.param_groups for p in group["params"]})
            self._warn_of(set(self._unmodelled()))

    def _is_recorded(self, module: nn.Module, mine: set[int]) -> bool:
        known = any(is_known(module) for is_known in self.recorded)
        return known and any(id(p) in mine for p in layers.own_parameters(module).values())

    def _find_layers(self, mine: set[int]) -> list[Layer]:
        """Layers that multiply by a matrix; one that is shared must mean the same everywhere."""
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
            bias = bias if biases[id(bias)] == 1 else None  # one that several layers share belongs to none
            if len(kinds) == 1 and (weight is not None or bias is not None):
                result.append(Layer(names, modules[0], weight, bias))
        return result

    def _unmodelled(self) -> list[Tensor]:
        """The parameters that are known from the start to take the fallback."""
        if self.by_layer:
            modelled = {p for layer in self.layers for p in layer.members}
        else:
            modelled = {p for module in self.recorder.layers.values() for p in module.parameters(recurse=False)}
        return [p for group in self.param_groups for p in group["params"] if p not in modelled and p.requires_grad]

    def _warn_of(self, params: set[Tensor]) -> None:
        """Names those parameters that take the fallback, once each."""
        new = params - self._warned
        self._warned |= new
        names = [n for group in self.param_groups for n, p in zip(group["param_names"], group["params"]) if p in new]
        if names:
            warnings.warn(
                f"{type(self).__name__} has no model of {', '.join(names)}: they are trained by {self.fallback}.",
                UserWarning,
                stacklevel=4,
            )

    # --- evidence ---

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim; forgets the passes whose gradients these were.

        What was observed is kept, unless gradients have come since and no step was taken: it was of a skipped step.
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

    def sheets(self, uses: Sequence[Sequence[LayerCall]]) -> dict[Layer, LayerBatch]:
        """The evidence for each layer in some passes; layers without any are left out."""
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
        """What came back since the gradients were begun, pass by pass."""
        passes: dict[tuple[int, int], list[LayerCall]] = {}
        for uses in self.recorder.calls.values():
            for use in uses:
                passes.setdefault((use.backward_id, use.forward_id), []).append(use)
        return list(passes.values())

    def draw(self, outputs: Tensor) -> Tensor:
        """Labels from the model's own predictions."""
        group = self.param_groups[0]
        group["draws"] += 1
        return likelihoods.draw(likelihoods.named(group["likelihood"]), outputs, group["seed"], group["draws"] - 1)

    def touched(self, layers: Iterable[Layer]) -> list[Layer]:
        """Those that have a gradient other than zero."""
        return [layer for layer in layers if any(bool(p.grad.any()) for p in layer.members if p.grad is not None)]

    def missing_observation(self, what: str, do: str) -> RuntimeError:
        """The error of a step that nothing was shown for."""
        own = type(self).__name__
        return RuntimeError(
            f"{what}: {do} of the model that was given to {own} before step(); "
            f"if the model is compiled, build {own} before torch.compile, if layers were replaced or pruned, "
            f"build it anew."
        )

    def step(self, closure: Any = None) -> Any:
        """As `BeliefOptimizer.step`; the passes since the last one are used up."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            size = torch.distributed.get_world_size()
            if size > 1:
                raise RuntimeError(
                    f"{type(self).__name__} is not made for {size} processes yet: each would see only its own layers' "
                    "inputs. Train in one process."
                )
        loss = super().step(closure)
        self.recorder.clear()
        return loss

    def parts(self, group: Mapping[str, Any]) -> Parts:
        return (
            Parts(None, self.transition, self.rule)
            if group.get("preconditioned", True)
            else Parts(*self.rest, self.rule)
        )

    def dynamics(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        return {"decay": group["ema"], "step": step}

    def scalars(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        """A direction that is solved has had its damping."""
        return super().scalars({**group, "damping": 0.0} if group.get("preconditioned") else group, step)

    # --- copies and checkpoints ---

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters of the model."""
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
        """Restores a run bit for bit, by the names of parameters, or raises and changes nothing."""
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
            raise ValueError(f"the saved state is of other parameters than this {type(self).__name__}'s{where}.")
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

    # --- the network as a whole ---

    def _in_model_order(self) -> list[Tensor]:
        """The parameters in the order of the model, whatever groups they are in."""
        mine = {p for group in self.param_groups for p in group["params"]}
        return [p for p in self.model.parameters() if p in mine]

    def _steps_taken(self) -> int:
        return max((int(entry["step"]) for entry in self.state.values() if "step" in entry), default=0)


def _plain(name: str) -> str:
    """A parameter's name without what wrappers put before it."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def model_of(optimizer: BeliefOptimizer, model: Any) -> nn.Module:
    """The model that an optimizer was given, without what is wrapped around it."""
    if not isinstance(model, nn.Module):
        name = type(optimizer).__name__
        raise TypeError(
            f"{name} takes the model, not its parameters: {name}(model, params=...), got {type(model).__name__}."
        )
    return unwrap(model)


def named_groups(model: nn.Module, params: Any) -> list[dict[str, Any]]:
    """Groups of (name, parameter) pairs of a model, whatever was given; None is all of them."""
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
                raise ValueError(f"a parameter of shape {tuple(p.shape)} in params= is not in the model.")
        named.append({**group, "params": [(names[id(p)], p) for p in members]})
    return named
