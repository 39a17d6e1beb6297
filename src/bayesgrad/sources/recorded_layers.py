"""The layers of a model as an optimizer sees them: what is recorded of them, and which parameters they have."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from bayesgrad import layers, likelihoods
from bayesgrad.layers.call import COMPILED, LayerCall, Pair
from bayesgrad.layers.gradients import GradientMarks
from bayesgrad.layers.hooks import MAX_PASSES
from bayesgrad.layers.layout import ForwardPass
from bayesgrad.layers.modules import Layer
from bayesgrad.layers.recorder import LayerRecorder
from bayesgrad.parts import Host
from bayesgrad.shards import has_nonzero_gradient, is_shard, owner
from bayesgrad.warning import warn


class Found(NamedTuple):
    """The layers of a forward pass, also by the id of their weight."""

    layers: list[Layer]
    by_weight: dict[int, Layer]


class RecordedLayers:
    """Records the inputs of a model's layers and the errors at their outputs, for sources and preconditioners.

    Args:
        optimizer: it was built from the model. To use torch.compile, compile the model after building it.
        fallback: by what parameters outside of known layers are trained, for a warning; None for no warning.
        recorded: predicates of the layers to record.
        by_layer: whether only layers that multiply by a matrix are known; else all that are recorded.
        receiver: a part, whose `receive` is called in backward passes; it does not have to keep itself alive.
        record_arguments: whether to keep the arguments of the model's last call.
        returned: whether to call the receiver's `returned` after forward passes, as in `LayerRecorder`.
        only: whether a layer is used.

    Attributes:
        layers: those that multiply by a matrix, of the latest pass or of a step.
        marks: what happens to the gradients of the parameters, if there is a receiver.
        sharded: whether each process has a part of parameters.
    """

    def __init__(
        self,
        optimizer: Host,
        fallback: str | None,
        recorded: tuple[Callable[[nn.Module], bool], ...] = (layers.is_matrix,),
        *,
        by_layer: bool = True,
        receiver: Any = None,
        record_arguments: bool = False,
        returned: bool = False,
        only: Callable[[Layer], bool] = lambda layer: True,
    ) -> None:
        assert optimizer.model is not None
        self.optimizer, self.model, self.fallback = optimizer, optimizer.model, fallback
        self.by_layer, self.only = by_layer, only
        # A recorder keeps neither this object nor the receiver alive.
        self.receiver = part = None if receiver is None else weakref.proxy(receiver)
        own: RecordedLayers = weakref.proxy(self)
        self.sharded = any(is_shard(p) for group in optimizer.param_groups for p in group["params"])
        self.backward_ids: dict[int, int] = {}  # id of a layer's first parameter -> its latest backward pass
        self.compiled_id = 0  # the latest backward pass in which layers were found
        self.shapes = {p: p.shape for group in optimizer.param_groups for p in group["params"]}
        self.idle: set[Tensor] = set()  # parameters that had no gradient in a step
        self.called: set[int] = set()  # ids of the first parameters of layers with a call since the last step
        self.has_classes: dict[Any, bool] = {None: True}  # by likelihood
        # All layers that were found: what was collected of one is kept while another pass has other layers.
        self.known: dict[tuple, Layer] = {}
        self.of_pass: dict[int, Found] = {}  # those of the latest forward passes, by id
        self.marks = GradientMarks(self.shapes if receiver is not None else ())
        mine = self._mine()
        self.slots = [
            (module, name, p)
            for _, module in layers.known_layers(self.model)
            for name, q in module._parameters.items()
            if id(p := owner(q)) in mine
        ]
        self.trained = self._flags()  # when gradients were last compared with those of layers from the beginning
        self._set_layers(self.trained)
        self.recorder = LayerRecorder(
            self.model,
            {
                name: module
                for name, module in layers.known_layers(self.model)
                if any(is_known(module) for is_known in recorded)
                and any(id(p) in mine for p in layers.own_parameters(module).values())
            },
            None if part is None else lambda call: own._received(call),
            self.marks,
            record_arguments=record_arguments,
            began=(lambda: own._begin_pass()) if by_layer else None,
            returned=(lambda outputs, arguments: part.returned(outputs, arguments)) if part and returned else None,
        )
        self._warn_unmodelled()

    def close(self) -> None:
        self.recorder.close()
        self.marks.close()

    def begin_compiled(self, call: LayerCall) -> None:
        """Finds the layers again in the first call of a pass whose beginning was not noted.

        It is that of a compiled model, or layers were called outside of the model.
        """
        if self.by_layer and call.forward_id not in self.of_pass and call.backward_id != self.compiled_id:
            self.compiled_id = call.backward_id
            self.update_trainable()

    def _begin_pass(self) -> None:
        self.update_trainable()
        self.of_pass[self.recorder.current] = self.found
        if len(self.of_pass) > MAX_PASSES:
            del self.of_pass[next(iter(self.of_pass))]

    def _received(self, call: LayerCall) -> Pair | None:
        self.begin_compiled(call)
        own = [p for p in call.module._parameters.values() if p is not None and p.requires_grad]
        own = list(map(owner, own)) if self.sharded else own
        if not own:  # frozen since the forward pass: autograd adds nothing to their gradients
            return None
        self.marks.follow(own)
        restarted = self.backward_ids.get(id(own[0])) != call.backward_id and self.marks.restarted(own)
        self.backward_ids[id(own[0])] = call.backward_id
        self.called.add(id(own[0]))
        return self.receiver.receive(call, restarted)  # pyright: ignore[reportOptionalMemberAccess]

    def layer_of(self, call: LayerCall) -> Layer | None:
        """The layer of a call, with the parameters that were trained in its forward pass."""
        weight = call.module._parameters.get("weight")
        by_weight = self.of_pass.get(call.forward_id, self.found).by_weight
        return by_weight.get(id(weight)) or (by_weight.get(id(owner(weight))) if self.sharded else None)

    def layers_of(self, outputs: Tensor) -> list[Layer]:
        """The layers of the forward pass of some outputs; if that is not known, those of all latest passes."""
        known = self.recorder.id_of(outputs)
        if known is not None and known in self.of_pass:
            return self.of_pass[known].layers
        every = {id(found): found for found in (self.found, *self.of_pass.values())}
        several = dict.fromkeys(layer for found in every.values() for layer in found.layers)
        return [layer for layer in several if any(p.requires_grad for p in layer.members)]

    def covers(self, p: Tensor) -> bool:
        """Whether a parameter belongs to a layer that multiplies by a matrix, or did so until it was frozen."""
        modules = () if p.requires_grad and self.flags == self._flags() else self.recorder.layers.values()
        known = [*(layer.members for layer in self.layers), *(layers.own_parameters(m).values() for m in modules)]
        return any(p is q for members in known for q in members)

    def forward_pass(self, call: LayerCall) -> ForwardPass | None:
        """The shapes of the forward pass of a call; None if the model returned no tensor with examples.

        Outputs of a likelihood without positions have one loss for each example.
        """
        known = call.forward_id < COMPILED
        found = self.recorder.passes.get(call.forward_id) if known else self.recorder.forward_pass(call.forward_id)
        likelihood: Any = self.optimizer.param_groups[0].get("likelihood")
        if likelihood not in self.has_classes:
            self.has_classes[likelihood] = likelihoods.named(likelihood).has_classes
        return found if found is None or self.has_classes[likelihood] else found._replace(class_dim=None)

    def losses(self, call: LayerCall, forward: ForwardPass | None, per_example: float | None) -> float | None:
        """The losses of a pass, by the option `losses_per_example`; None for one in each row of the layer's input."""
        if forward is not None:
            return forward.losses(per_example)
        return None if per_example is None else per_example * layers.examples_in(call.module, call.input)

    @property
    def read_elsewhere(self) -> set[Tensor]:
        """Parameters that are used outside of their layers."""
        return self.marks.unexplained

    def _mine(self) -> set[int]:
        return {id(p) for group in self.optimizer.param_groups for p in group["params"]}

    def _flags(self) -> list[bool]:
        return [p.requires_grad for group in self.optimizer.param_groups for p in group["params"]]

    def update_trainable(self, in_step: bool = False) -> None:
        """Finds the layers again if `requires_grad` of a parameter has changed.

        Args:
            in_step: whether the gradients of a pass are about to be used. Layers are then those of the pass, and those
                that have a gradient: as in torch.optim, that is trained, whatever was frozen or thawed since.
        """
        flags = trained = self._flags()
        if in_step:
            every = (p for group in self.optimizer.param_groups for p in group["params"])
            flags = [then or p.grad is not None for then, p in zip(self.flags, every)]
        if self.flags != flags and (in_step or not self._replaced()):
            self._set_layers(flags)
            self.marks.follow()
            if self.trained != trained:
                self.trained = trained
                self.marks.check_again()
            self._warn_unmodelled()

    def _replaced(self) -> bool:
        """Whether layers have other parameters than at first: those of functional_call, whose pass finds no layers."""
        return any(owner(module._parameters.get(name)) is not p for module, name, p in self.slots)

    def _set_layers(self, flags: list[bool]) -> None:
        self.flags = flags
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.layers = self._find_layers({id(p) for p, trained in zip(params, flags) if trained})
        by_weight = {id(owner(layer.module._parameters.get("weight"))): layer for layer in self.layers}
        self.found = Found(self.layers, by_weight)

    def _find_layers(self, trained: set[int]) -> list[Layer]:
        """Layers that multiply by a matrix; a weight that modules of different types share is excluded.

        Args:
            trained: the ids of parameters that are trained.
        """
        found: dict[int, list[tuple[str, nn.Module]]] = {}
        for name, module in layers.known_layers(self.model):
            if layers.is_matrix(module):
                found.setdefault(id(owner(module.weight)), []).append((name, module))
        result = []
        biases = Counter(id(owner(uses[0][1]._parameters.get("bias"))) for uses in found.values())
        for uses in found.values():
            names, modules = zip(*uses)
            kinds = {(type(m), layers.groups_of(m), id(owner(m._parameters.get("bias")))) for m in modules}
            own = layers.own_parameters(modules[0])
            weight, bias = (
                p if (p := own.get(k)) is not None and id(p) in trained else None for k in ("weight", "bias")
            )
            # A bias that several layers share belongs to none.
            bias = bias if biases[id(bias)] == 1 and layers.joins_bias(modules[0]) else None
            if len(kinds) == 1 and (weight is not None or bias is not None):
                # A layer that is kept keeps these alive: no other object has their ids.
                key = (names, *map(id, (modules[0], weight, bias)))
                result.append(self.known.setdefault(key, Layer(names, modules[0], weight, bias)))
        return [layer for layer in result if self.only(layer)]

    def _warn_unmodelled(self) -> None:
        """Warns of the parameters outside of known layers."""
        if self.by_layer:
            modelled = {p for layer in self.layers for p in layer.members}
        else:
            modelled = {p for module in self.recorder.layers.values() for p in layers.own_parameters(module).values()}
        every = (p for group in self.optimizer.param_groups for p in group["params"])
        self.warn_fallback({p for p in every if p not in modelled and p.requires_grad})

    def warn_fallback(self, params: set[Tensor]) -> None:
        """Warns once for each parameter that is trained by the fallback."""
        new = params - self.optimizer.warned
        groups = self.optimizer.param_groups
        names = [n for group in groups for n, p in zip(group["param_names"], group["params"]) if p in new]
        if names and self.fallback is not None:
            self.optimizer.warned |= new
            if any(p._backward_hooks for p in new):
                reason = "hooks change their gradients, or they are used elsewhere too"
            elif self.by_layer:
                reason = "its own rule is for matrices of layers, not for normalisation or raw parameters"
            else:
                reason = "its own rule needs gradients of single examples"
            own = self.optimizer.__class__.__name__
            warn(f"{own} trains {', '.join(names)} by {self.fallback}: {reason} (see docs/layers.md).")

    def with_nonzero_gradient(self, some: Iterable[Layer]) -> list[Layer]:
        """Those layers that have a nonzero gradient."""
        given = {layer: [p for p in layer.members if p.grad is not None] for layer in some}
        return [layer for layer, params in given.items() if any(map(has_nonzero_gradient, params))]

    def missing_observation(self, what: str, do: str) -> RuntimeError:
        """The error of a step without recorded passes or observations."""
        own = self.optimizer.__class__.__name__
        return RuntimeError(
            f"{what}: {do} of the model that was given to {own} before step(), and take no step for an empty batch. "
            f"If the model is compiled, build {own} before torch.compile; if layers were replaced or pruned, build a "
            f"new {own}. Passes with other weights than the model's own (functional_call) are not recorded."
        )

    def check_model(self) -> None:
        """Called in each step: raises if a parameter was reshaped, warns once of those that the model no longer has."""
        own = self.optimizer.__class__.__name__
        self.marks.check_values()
        self._exclude_derived()
        for p, shape in self.shapes.items():
            if p.shape != shape:
                raise ValueError(
                    f"{self.optimizer.name_of(p)} has shape {tuple(p.shape)}, but had {tuple(shape)} when {own} was "
                    f"built: build a new {own} after reshaping parameters."
                )
        idle = {p for p in self.shapes if p.grad is None and p.requires_grad} - self.idle
        if idle:
            self.idle |= idle
            there = [owner(p) for p in self.model.parameters()]
            gone = [p for p in self.shapes if p in idle - set(there)]
            if gone and any(map(is_shard, there)) and not any(map(is_shard, self.shapes)):
                raise RuntimeError(
                    f"fully_shard has replaced the parameters that {own} was built for: build {own} after fully_shard."
                )
            if gone:
                names = ", ".join(map(self.optimizer.name_of, gone))
                warn(
                    f"the model no longer has {names}, which {own} was built for: build a new {own} to train what has "
                    "replaced them.",
                )

    def _exclude_derived(self) -> None:
        """Leaves layers to the fallback that compute with other tensors since they were pruned or parametrised."""
        called, self.called = self.called, set()
        odd = [one for one in self.layers if one.owner in self.marks.foreign and not called & set(map(id, one.members))]
        if odd:
            known = {id(module) for _, module in layers.known_layers(self.model) if layers.is_matrix(module)}
            self.marks.exclude(p for layer in odd if id(layer.module) not in known for p in layer.members)

    def in_model_order(self) -> list[Tensor]:
        """The parameters of all groups in the order of the model."""
        mine = self._mine()
        return [p for q in self.model.parameters() if id(p := owner(q)) in mine]
