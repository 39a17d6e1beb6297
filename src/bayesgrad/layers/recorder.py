"""Records what layers receive: their inputs, and the derivatives of the loss with respect to their outputs.

For a Linear layer, the gradient of example j's loss with respect to the weight is the outer product of two vectors: the
derivative of the loss with respect to the layer's output, here called the *error* e_j, and the layer's input a_j.
Autograd forms only the sum of these products over the batch. (The errors are those of the loss that is differentiated:
for a mean over B examples each contains the factor 1/B.) A `LayerRecorder` passes the pairs (a_j, e_j) to a function
of its owner, so that squares, inner products and Kronecker factors of per-example gradients can be computed without
forming the gradients themselves. How a layer's pair becomes gradients of its parameters is in `layers.modules`.

    >>> model = nn.Sequential(nn.Linear(3, 2))
    >>> calls = []
    >>> recorder = LayerRecorder(model, {"0": model[0]}, calls.append)
    >>> model(torch.ones(5, 3)).sum().backward()
    >>> (call,) = calls
    >>> call.input.shape, call.error.shape  # five examples
    (torch.Size([5, 3]), torch.Size([5, 2]))
    >>> bool(torch.equal(call.error.T @ call.input, model[0].weight.grad))
    True
    >>> recorder.close()

**How.** The `forward` of each recorded module, of this instance alone, is replaced by a method that calls
`RecordedLayer`, an autograd function. It runs the operation of the layer, and its backward sees input and error
together. Nothing is stored beside what autograd stores. The layer may be followed by operations in place, run under
autocast, be checkpointed, or be called several times. A recurrent layer, and attention, are recorded as the linear
layers that they consist of (`layers.composite`). In a compiled model (`torch.compile(model, fullgraph=True)`) the
part of the backward that calls recorders is an operator of its own, `bayesgrad::parameter_gradients`, which is not
traced. Unless the hooks of the model are in the same graph, as those of nn.Sequential are, they run eagerly, and
compiled layers find the pass that they are called in by a number (`PassNumber`).

**When.** `loss.backward()` records the layers to whose parameters it adds gradients. `torch.autograd.grad`, which adds
none, records nothing. `LayerRecorder.backpropagate(outputs, direction)` gives the errors of another loss, for example
with sampled labels, without weight gradients, and leaves the graph and `.grad` as they were. Optimizers and samplers
call it in `observe(outputs)`. Under the transforms of `torch.func`, and without gradients, layers run as if not
recorded.

Hooks of the model are in `layers.hooks`. One other file registers hooks: `samplers.factors` (layer outputs inside
`torch.func`).
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch._functorch.config
import torch.compiler.config
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bayesgrad.layers.call import (
    COMPILED,
    SITE,
    SITES,
    LayerCall,
    Pair,
    RecordedLayer,
    Site,
    forward,
    without_hooks,
)
from bayesgrad.layers.class_dimension import layer_dim
from bayesgrad.layers.composite import forward as composite_forward
from bayesgrad.layers.composite import owners, parts_of
from bayesgrad.layers.gradients import GradientMarks
from bayesgrad.layers.graph import CHECKPOINT, below, check_graph, explained, graph_nodes
from bayesgrad.layers.hooks import MAX_DIMS, MAX_PASSES, InputHook, OutputHook, PassCounter, PassNumber
from bayesgrad.layers.layout import ForwardPass
from bayesgrad.layers.operations import CONVOLUTION, LINEAR, TRANSPOSED_LINEAR
from bayesgrad.shards import FSDP, gathered, owner, unreduced

MAX_NUMBERS = 4 * MAX_PASSES  # states of eager recorders that compiled layers may have been called in


class LayerRecorder:
    """Records inputs and errors of some layers of a model; see the module docstring.

    Args:
        model: whose forward passes are counted.
        layers: name -> module to record.
        receive: called with each call of a layer in a backward pass that adds to the gradients of its parameters. It
            may return the gradients of weight and bias that autograd shall use instead of their own.
        marks: what follows the gradients of the parameters.
        record_arguments: whether to keep the arguments of the model's last call, which `arguments` needs.
        began: called at the beginning of a forward pass with gradients. It is not called for a compiled model.
        returned: called with the outputs of a forward pass that have a graph, and with the shapes of its arguments. It
            is not called for a compiled model.

    Attributes:
        inside: whether the model is being called.
        hidden: whether it has called a layer without gradients, as reentrant activation checkpointing does.
        capture: what receives calls instead, during `backpropagate`.
        captures: minus the number of its calls.
        counter: a number of each forward pass of the model, and of each time between two of them.
        numbers: its value -> `forward_id` at that time; it has no forward passes of the model in one compiled graph.
        close: restores the modules; called when the recorder is garbage collected.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        receive: Callable[[LayerCall], Pair | None] | None = None,
        marks: GradientMarks | None = None,
        *,
        record_arguments: bool = False,
        began: Callable[[], None] | None = None,
        returned: Callable[[list[Tensor], Any], None] | None = None,
    ) -> None:
        _allow_two_passes()
        self.layers, self.receive, self.marks = dict(layers), receive, marks
        self.capture: Callable[[LayerCall], Any] | None = None
        self.captures = 0
        self.began, self.returned = began, returned
        self.forward_count = self.begun = 0  # passes, and the latest of the model
        self.inside = self.hidden = False
        self.recomputed: int | None = None  # the pass whose layers the backward pass is recomputing, if that is known
        self.current = 0  # the id of the latest forward pass
        self.passes: dict[int, ForwardPass] = {}
        self.outputs: dict[int, Callable[[], Tensor | None]] = {}  # of these passes, while they exist
        self.backward_id = -1  # the latest backward pass
        # Its number, for compiled layers that a checkpoint runs again in it; and the forward pass that it began with.
        self.repeated = -1, 0
        self.counter = PassNumber()
        self.numbers: dict[int, int] = {}
        # Of the latest passes of a compiled model: their numbers, and the shapes of their outputs.
        self.sizes = torch.zeros(1 + MAX_DIMS, MAX_PASSES, dtype=torch.int64)
        self.last_call: tuple[Any, tuple, dict] | None = None
        handles = [model.register_forward_pre_hook(PassCounter(self))]
        handles.append(model.register_forward_hook(OutputHook(self), with_kwargs=True))
        if record_arguments:
            handles.append(model.register_forward_hook(InputHook(self), with_kwargs=True))
        added = []
        for name, layer in self.layers.items():
            for module, run in ((layer, forward), *[(one, composite_forward) for one in owners(layer)]):
                if (site := module.__dict__.get(SITE)) is None or site.module() is not module:
                    site = Site(module)
                    SITES[site.handle] = site
                    module.__dict__.update({SITE: site, "forward": MethodType(run, module)})
                elif int(site.counter) > int(self.counter):  # all recorders have the same numbers of passes
                    self.counter.value.fill_(int(site.counter))
                site.parts = parts_of(module)
                site.counter = self.counter
                entry = (weakref.ref(self), name)
                site.recorders.append(entry)
                added.append((site, entry))
        self.close = weakref.finalize(self, _remove, handles, added)

    @property
    def forward_id(self) -> int:
        """Identifies the forward pass that a layer is called in; another one if it is called outside of the model."""
        if self.inside:
            return self.begun
        return -1 - self.forward_count if self.recomputed is None else self.recomputed

    def begin_pass(self) -> None:
        self.forward_count += 1
        self.begun = self.forward_count
        self.inside, self.hidden, self.recomputed = True, False, None
        self.current = self._id_of_layers()
        self._note_number()
        if self.began is not None and torch.is_grad_enabled():
            self.began()

    def _id_of_layers(self) -> int:
        """The forward pass that a layer is called in now: another recorder may count the passes."""
        sites = (module.__dict__.get(SITE) for module in self.layers.values())
        site = next((site for site in sites if site is not None), None)
        return self.forward_id if site is None else site.forward_id()

    def _note_number(self) -> None:
        """Gives layers that are compiled by themselves a number of the forward pass that they are called in now."""
        if self.counter.advance():
            self.numbers[int(self.counter)] = self._id_of_layers()
            if len(self.numbers) > MAX_NUMBERS:
                del self.numbers[next(iter(self.numbers))]

    def end_pass(self, args: tuple, kwargs: dict, output: Any) -> None:
        self.inside = False
        if self.hidden and torch.is_grad_enabled():
            self._note_recomputation(output)
        self._note_number()
        outputs = _output_tensors(output) if torch.is_grad_enabled() else []
        if not outputs:
            return
        given = [value.shape for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        alone = not has_examples(outputs[0])
        shapes = [torch.Size((1, *shape)) if alone else shape for shape in (outputs[0].shape, *given[:1])]
        self.passes[self.current] = ForwardPass(*shapes, class_dim=1 if alone else _class_dim(outputs[0]))  # pyright: ignore
        if len(self.passes) > MAX_PASSES:
            del self.passes[next(iter(self.passes))]
        self.outputs = {one: kept for one, kept in self.outputs.items() if kept() is not None and one in self.passes}
        self.outputs[self.current] = weakref.ref(outputs[0])
        if self.returned is not None and self.capture is None and not alone:  # else recomputed for `backpropagate`
            self.returned(outputs, tuple(given))

    def _note_recomputation(self, output: Any) -> None:
        """Lets reentrant checkpoints say which pass they recompute: another one may have followed."""
        own, number = weakref.ref(self), self.begun

        def note(value: int | None, *_: Any) -> None:
            if (recorder := own()) is not None:
                recorder.recomputed = value
                recorder._note_number()

        some = [t.grad_fn for t in tree_leaves(output) if isinstance(t, Tensor) and t.grad_fn is not None]
        for node in below(some):
            if node.name() == CHECKPOINT:
                node.register_prehook(partial(note, number))
                node.register_hook(partial(note, None))
        self.recomputed = None if some else number  # the tensors of some objects are not found

    def called(self) -> set[str]:
        """The names of the layers that the latest forward pass has called, with a parameter that is trained."""
        sites = ((name, module.__dict__.get(SITE)) for name, module in self.layers.items())
        return {name for name, site in sites if site is not None and site.called == self.current}

    def forward_pass(self, forward_id: int) -> ForwardPass | None:
        """The shapes of a forward pass; None if the model did not return a tensor with examples."""
        if forward_id < COMPILED:
            return self.passes.get(forward_id)
        number = forward_id - COMPILED
        noted, *sizes = self.sizes[:, number % MAX_PASSES].tolist()
        shape = torch.Size(size for size in sizes if size and noted == number)
        return ForwardPass(shape, class_dim=-1 if len(shape) < 4 else 1) if shape else None

    def id_of(self, outputs: Tensor) -> int | None:
        """The latest forward pass that returned these outputs, or a tensor that they are a view of; None for none."""
        for forward_id, kept in reversed(self.outputs.items()):
            known = kept()
            if known is not None and known.untyped_storage()._cdata == outputs.untyped_storage()._cdata:
                return forward_id
        return None

    def ids_of(self, outputs: Tensor) -> set[int]:
        """The forward passes that some outputs were computed in: several if they were concatenated.

        Of outputs whose passes are not known, as those of compiled models, it is the latest one.
        """
        if (known := self.id_of(outputs)) is not None:
            return {known}
        own = {site.handle for m in self.layers.values() if (site := m.__dict__.get(SITE)) is not None}
        given = [] if outputs.grad_fn is None else [outputs.grad_fn]
        # Not below a layer: its input may have been computed in an earlier pass.
        last = below(given, lambda node: getattr(node, "handle", -1) in own)
        return {node.forward_id for node in last if getattr(node, "handle", -1) in own} - {0} or {self.current}

    def pass_of(self, outputs: Tensor) -> ForwardPass | None:
        """The shapes of the forward pass that returned these outputs, or a tensor that they are a view of."""
        known = self.id_of(outputs)
        return None if known is None else self.passes.get(known)

    def note_class_dim(self, outputs: Tensor, class_dim: int) -> None:
        """Called with the dimension of classes of these outputs, of which the shape alone does not tell it."""
        forward_id = self.id_of(outputs)
        known = None if forward_id is None else self.passes.get(forward_id)
        if forward_id is not None and known is not None and known.outputs == outputs.shape:
            self.passes[forward_id] = known._replace(class_dim=class_dim)

    def received(self, call: LayerCall) -> Pair | None:
        if (
            call.backward_id != self.backward_id
        ):  # what is called from now on, perhaps not by the model, is another pass
            self.backward_id = call.backward_id
            self.forward_count += 1
            if not self.inside:
                self._note_number()
                self.repeated = int(self.counter), call.forward_id
        return None if self.receive is None else self.receive(call)

    def arguments(self, outputs: Tensor) -> tuple[tuple, dict]:
        """The arguments of the model's last call, which must have returned exactly these outputs."""
        if self.last_call is None or self.last_call[0]() is not outputs:
            raise RuntimeError(
                "observe() must receive the tensor that the model's last forward pass returned: call observe(outputs) "
                "with that very tensor, before the model is called again."
            )
        return self.last_call[1:]

    def backpropagate(
        self, outputs: Tensor, direction: Tensor, receive: Callable[[LayerCall], Any] | None = None
    ) -> list[LayerCall]:
        """The layer calls, with the errors of the loss (direction * outputs).sum().

        Computes no weight gradients. Leaves the graph and `.grad` unchanged.

        Args:
            outputs: of the model, with their graph.
            direction: as `grad_outputs` of torch.autograd.grad: the derivative of some loss by the outputs.
            receive: called with each call as its error arrives; the result is then empty.
        """
        check_graph(outputs)
        calls: list[LayerCall] = []
        self.captures -= 1
        params = [p for m in self.layers.values() for p in m._parameters.values() if p is not None and p.requires_grad]
        context: AbstractContextManager = nullcontext()
        if FSDP in sys.modules or any(type(p) is not nn.Parameter for p in params):
            own = {owner(p): None for p in params}
            params, context = list(gathered(own).values()), unreduced(own)
        if not (params := list(dict.fromkeys(params))):
            return calls
        self.capture = calls.append if receive is None else receive
        try:
            # Layers return no gradients now: hooks would be called with None.
            with without_hooks(params), context:
                torch.autograd.grad(outputs, params, direction, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            raise explained(error) from error
        finally:
            self.capture = None
        return calls

    def trace(self, outputs: Tensor) -> Trace:
        """Finds out which parameters the autograd graph of some outputs reads."""
        check_graph(outputs)
        trace = Trace(self, outputs)
        sites = {site.handle: site for m in self.layers.values() if (site := m.__dict__.get(SITE)) is not None}
        own = {id(owner(p)) for m in self.layers.values() for p in m._parameters.values() if p is not None}
        for node in graph_nodes(outputs):
            site = sites.get(getattr(node, "handle", -1))
            recorded = site is not None and site.nodes_of(node) is not None
            closed = node.name() == f"{RecordedLayer.__name__}Backward" and node.handle not in SITES
            for following, _ in node.next_functions:
                if hasattr(following, "variable"):
                    key = id(owner(following.variable))
                    if closed and key in own:
                        raise RuntimeError(
                            "these outputs were computed before the state of the optimizer was loaded, or by another "
                            "optimizer that is gone: run the forward pass again."
                        )
                    trace.read_counts[key] += 1
                    trace.recorded_counts[key] += recorded
        return trace


def _output_tensors(output: Any) -> list[Tensor]:
    """The tensors with a graph that a model returned for the same examples; the first has the predictions."""
    output = getattr(output, "logits", output)
    several = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else (output,)
    )
    found = [t for t in several if isinstance(t, Tensor) and t.dim() and t.numel() and t.grad_fn is not None]
    if any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in found):  # pyright: ignore
        return []
    return [t for t in found if len(t) == len(found[0])]


def has_examples(outputs: Tensor) -> bool:
    """Whether the first dimension can be that of examples: not if a layer returned them for one input."""
    kind, *settings = getattr(outputs.grad_fn, "op", (None,))
    positions = len(settings[0]) if kind == CONVOLUTION else 0
    least: dict[Any, int] = {LINEAR: 1, TRANSPOSED_LINEAR: 1, CONVOLUTION: 1 + positions}
    return outputs.dim() > least.get(kind, 0)


def check_outputs(outputs: Any) -> None:
    """Raises unless the outputs are a tensor whose first dimension is that of examples."""
    if not isinstance(outputs, Tensor):
        raise TypeError(f"outputs must be one tensor, got {type(outputs).__name__}: wrap the model to return one.")
    if outputs.dim() == 0:
        raise ValueError("outputs must have a dimension of examples, got a single number: pass outputs, not a loss.")
    if not has_examples(outputs):
        raise ValueError("outputs must have a dimension of examples, got those of one example: use inputs[None].")


def _class_dim(outputs: Tensor) -> int:
    """The dimension that one loss is about: where the last layer has its features, else 1 for images and the last."""
    found = layer_dim(outputs) if outputs.dim() > 2 else None
    return found if found is not None else 1 if outputs.dim() > 3 else -1


def _allow_two_passes() -> None:
    """Lets compiled backward passes run twice, for `backpropagate` and for the loss: else they overwrite their inputs.

    The key of torch's cache of compiled graphs does not contain this setting (2.13), so it gets a mark of its own.
    """
    if torch._functorch.config.donated_buffer:
        torch._functorch.config.donated_buffer = False
        torch.compiler.config.cache_key_tag += "two-passes"


def _remove(handles: list[Any], added: list[tuple[Site, Any]]) -> None:
    for handle in handles:
        handle.remove()
    for site, entry in added:
        site.recorders.remove(entry)
        alive = [recorder for ref, _ in site.recorders if (recorder := ref()) is not None]
        site.counter = alive[-1].counter if alive else site.counter  # that of this one counts no more passes
        module = site.module()
        if not site.recorders and module is not None and module.__dict__.get(SITE) is site:
            del module.__dict__[SITE], module.__dict__["forward"]


class Trace:
    """The parameters that the autograd graph of some outputs reads.

    Attributes:
        read_counts: id of a parameter -> how many operations of the graph read it.
        recorded_counts: the same for the operations of recorded layers.
    """

    def __init__(self, recorder: LayerRecorder, outputs: Tensor) -> None:
        self.recorder, self.outputs = recorder, outputs
        self.read_counts: Counter[int] = Counter()
        self.recorded_counts: Counter[int] = Counter()

    def backpropagate(self, direction: Tensor) -> list[LayerCall]:
        return self.recorder.backpropagate(self.outputs, direction)

    def used_elsewhere(self) -> set[int]:
        """The ids of parameters of these layers that other operations of the graph read as well."""
        return {key for key, number in self.recorded_counts.items() if 0 < number != self.read_counts[key]}
