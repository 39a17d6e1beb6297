"""Records the inputs of layers and the gradients at their outputs, from which per-example gradients are computed.

For a Linear layer, the gradient of example j's loss with respect to the weight is the outer product of two vectors: the
derivative of the loss with respect to the layer's output, here called the *error* e_j, and the layer's input a_j.
Autograd forms only the sum of these products over the batch. (The errors are those of the loss that is differentiated:
for a mean over B examples each contains the factor 1/B.) `LayerRecorder` stores the pairs (a_j, e_j), so that squares,
inner products and Kronecker factors of per-example gradients can be computed without forming the gradients themselves.
How a layer's pair becomes gradients of its parameters is in `layers.modules`; this module only collects pairs.

    >>> model = nn.Sequential(nn.Linear(3, 2))
    >>> recorder = LayerRecorder(model, {"0": model[0]})
    >>> x = torch.ones(5, 3)
    >>> model(x).sum().backward()
    >>> (call,) = recorder.calls["0"]
    >>> call.input.shape, call.error.shape  # five examples
    (torch.Size([5, 3]), torch.Size([5, 2]))
    >>> bool(torch.equal(call.error.T @ call.input, model[0].weight.grad))
    True
    >>> recorder.close()

**Forward pass.** A forward hook on each layer creates a `PendingCall` with the input, and registers a hook on the
*output tensor*. (A backward hook on the module would fail if the next operation changes the output in place.) If the
output is never differentiated, the pending call is freed with the graph.

**Backward pass.** There are two ways to obtain errors.

1. `loss.backward()`: the hook on the output tensor receives the error and appends a `LayerCall` to
   `LayerRecorder.calls[name]`. With activation checkpointing, the forward pass runs twice but only one of them is
   differentiated, so each call is recorded once. `torch.autograd.grad`, which leaves `.grad` unchanged, records
   nothing.
2. `recorder.trace(outputs).backpropagate(grad_outputs)`: computes the errors of another loss, given by its derivative
   with respect to the outputs, for example with sampled labels, without touching `.grad` or freeing the graph.
   Optimizers and samplers call this in `observe(outputs)`, which users call between the forward pass and
   `loss.backward()`. `trace` walks through the autograd graph of `outputs`. It finds the layers because the forward
   hook wrote the `PendingCall` into the metadata of the graph node that made the layer's output. `backpropagate` then
   calls `torch.autograd.grad` with the outputs of these layers as its inputs, so no weight gradients are computed.

Three other files of this package register hooks of their own: `samplers.factors` (layer outputs inside `torch.func`),
`optimizer.factored` (accumulated gradients) and `optimizer.unit_dropout` (gradients of masked weights).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

METADATA_KEY = "bayesgrad.recorder"


@dataclass(eq=False)
class PendingCall:
    """One call of a layer in a forward pass, before its error is known.

    Args:
        name: of the layer.
        forward_id: the number of the model's forward pass.
        input: detached; None after a backward pass that freed the graph.
        version: `input._version` at the time of the call if the input is a leaf (usually the data, which the caller may
            overwrite in place); None for a tensor with a grad_fn, which is stored without a copy or a check.
    """

    name: str
    forward_id: int
    input: Tensor | None
    version: int | None

    def take_input(self) -> Tensor:
        """The input; a copy of a leaf tensor, which may be overwritten later."""
        if self.input is None or self.version is None:
            return self.input  # pyright: ignore[reportReturnType]
        if self.input._version != self.version:
            raise RuntimeError(f"the input of layer {self.name!r} was changed in place before the backward pass.")
        return self.input.clone()


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a layer: its input, and the derivative of the loss with respect to its output.

    Args:
        module: the layer.
        input: as the layer received it.
        error: the derivative with respect to the output, in the output's shape.
        backward_id: identifies the backward pass; always 0 for calls from `Trace.backpropagate`.
        forward_id: identifies the forward pass. Calls with the same one have the same examples.
    """

    module: nn.Module
    input: Tensor
    error: Tensor
    backward_id: int
    forward_id: int = 0


class Hook:
    """A hook of a recorder. A copy of the module that has it (deepcopy, pickle) gets a hook that does nothing."""

    def __init__(self, recorder: LayerRecorder | None = None, name: str = "") -> None:
        self.recorder = weakref.ref(recorder) if recorder is not None else lambda: None
        self.name = name

    def __reduce__(self) -> tuple:
        return type(self), ()

    def __init_subclass__(cls) -> None:
        # torch.compile must call this function and not trace it. torch's own decorator would import the compiler.
        vars(cls)["__call__"]._torchdynamo_disable = True


class LayerHook(Hook):
    """The forward hook of one layer."""

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: Any = None) -> None:
        recorder = self.recorder()  # a hook that is removed during a pass is called without kwargs
        if (
            recorder is None
            or not isinstance(output, Tensor)
            or not output.requires_grad
            or not torch.is_grad_enabled()
        ):
            return
        has_weight = module._parameters.get("weight") is not None  # else it was pruned or parametrised later
        if has_weight and not torch._C._functorch.is_functorch_wrapped_tensor(output):  # pyright: ignore
            recorder.record_forward(self.name, args[0] if args else kwargs["input"], output)


class PassCounter(Hook):
    """Counts the forward passes of a model."""

    def __call__(self, module: nn.Module, args: tuple) -> None:
        if (recorder := self.recorder()) is not None:
            recorder.forward_count += 1


class InputHook(Hook):
    """Stores the arguments of the model's last call."""

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: Any = None) -> None:
        recorder = self.recorder()
        if recorder is None or not isinstance(output, Tensor) or not torch.is_grad_enabled():
            return
        if not torch._C._functorch.is_functorch_wrapped_tensor(output):  # pyright: ignore[reportAttributeAccessIssue]
            recorder.last_call = weakref.ref(output), args, kwargs


def check_graph(outputs: Tensor) -> None:
    """Raises unless gradients can be propagated back from the outputs."""
    if outputs.grad_fn is None:
        raise RuntimeError(
            "the outputs have no autograd graph: compute them with this model and with gradients enabled."
        )


class LayerRecorder:
    """Records inputs and errors of some layers of a model; see the module docstring.

    Args:
        model: whose forward passes are counted.
        layers: name -> module to record.
        record_backward: whether `loss.backward()` appends to `calls`.
        annotate_graph: whether to mark the layers in the autograd graph; if False, `trace` finds no layers.
        record_arguments: whether to keep the arguments of the model's last call, which `arguments` needs.

    Attributes:
        calls: name -> the calls recorded by backward passes, until `clear`. The calls of a layer are also discarded
            when a new backward pass reaches it and its `.grad` is None or zero: `zero_grad()` was called, so they
            belong to gradients that no longer exist.
        from_zero_grad: name -> whether the layer's gradients were None or zero when its latest backward pass began.
        close: removes all hooks; called when the recorder is garbage collected.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        *,
        record_backward: bool = True,
        annotate_graph: bool = True,
        record_arguments: bool = False,
    ) -> None:
        self.layers = dict(layers)
        self.record_backward, self.annotate_graph = record_backward, annotate_graph
        self.calls: dict[str, list[LayerCall]] = {name: [] for name in self.layers}
        self.paused = False
        self.forward_count = 0
        self.from_zero_grad: dict[str, bool] = {}
        # Before all other hooks, which may replace the output by another tensor.
        handles = [
            module.register_forward_hook(LayerHook(self, name), with_kwargs=True, prepend=True)
            for name, module in self.layers.items()
        ]
        handles.append(model.register_forward_pre_hook(PassCounter(self)))
        self.last_call: tuple[Any, tuple, dict] | None = None
        if record_arguments:
            handles.append(model.register_forward_hook(InputHook(self), with_kwargs=True))
        self.close = weakref.finalize(self, _remove, handles)

    def clear(self) -> None:
        """Forgets all recorded calls."""
        for calls in self.calls.values():
            calls.clear()

    def record_forward(self, name: str, x: Tensor, output: Tensor) -> None:
        """Prepares for the backward pass of a layer that was called with `x` and returned `output`."""
        call = PendingCall(name, self.forward_count, x.detach(), x._version if x.is_leaf else None)
        if self.annotate_graph:
            edge = get_gradient_edge(output)
            metadata: dict[str, Any] = edge.node.metadata  # pyright: ignore[reportAssignmentType]
            metadata.setdefault(METADATA_KEY, {})[id(self), edge.output_nr] = call
        owner = weakref.ref(self)
        output.register_hook(lambda error: None if (recorder := owner()) is None else recorder._receive(call, error))

    def _receive(self, call: PendingCall, error: Tensor) -> None:
        """Called by autograd with the derivative with respect to a layer's output."""
        if self.paused or call.input is None:
            return
        if self.record_backward:
            self._store(call, error)
        if not torch._C._autograd._get_current_graph_task_keep_graph():  # pyright: ignore[reportAttributeAccessIssue]
            call.input = None

    def _store(self, call: PendingCall, error: Tensor) -> None:
        module, backward_id = self.layers[call.name], torch._C._current_graph_task_id()
        trained = [p for p in module.parameters(recurse=False) if p.requires_grad]
        # torch.autograd.grad() by other tensors adds nothing to .grad and must not be recorded.
        if not any(map(_accumulates, trained)) or not call.input.numel():  # pyright: ignore
            return
        calls = self.calls[call.name]
        if not calls or calls[-1].backward_id != backward_id:
            self.from_zero_grad[call.name] = all(p.grad is None or not bool(p.grad.any()) for p in trained)
            if calls and self.from_zero_grad[call.name]:
                calls.clear()  # they belong to gradients that were discarded
        calls.append(LayerCall(module, call.take_input(), error.detach(), backward_id, call.forward_id))

    def arguments(self, outputs: Tensor) -> tuple[tuple, dict]:
        """The arguments of the model's last call, which must have returned exactly these outputs."""
        if self.last_call is None or self.last_call[0]() is not outputs:
            raise RuntimeError(
                "observe() must receive the tensor that the model's last forward pass returned: call observe(outputs) "
                "with that very tensor, before the model is called again."
            )
        return self.last_call[1:]

    def trace(self, outputs: Tensor) -> Trace:
        """Finds the calls of the layers in the autograd graph of some outputs."""
        check_graph(outputs)
        trace = Trace(self, outputs)
        nodes: list[Any] = [outputs.grad_fn]
        seen = {outputs.grad_fn}
        while nodes:
            node = nodes.pop()
            if node.name() == "CheckpointFunctionBackward":
                raise RuntimeError(
                    "reentrant activation checkpointing hides layers from observe(): "
                    "pass use_reentrant=False to torch.utils.checkpoint."
                )
            for (owner, index), call in node.metadata.get(METADATA_KEY, {}).items():
                if owner == id(self):
                    trace.add(call, GradientEdge(node, index))
            for following, _ in node.next_functions:
                if following is None:
                    continue
                if hasattr(following, "variable"):
                    trace.read_counts[id(following.variable)] += 1
                elif following not in seen:
                    seen.add(following)
                    nodes.append(following)
        return trace


def _accumulates(p: Tensor) -> bool:
    """Whether the running backward pass adds to `p.grad`."""
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(p).node)  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError:  # raised inside torch.autograd.grad(), which never adds to .grad
        return False


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


class Trace:
    """The layer calls in the autograd graph of some outputs.

    Attributes:
        pending: the calls, in the order in which the graph was searched.
        edges: the place of each call's output in the graph.
        read_counts: id of a parameter -> how many operations of the graph read it.
    """

    def __init__(self, recorder: LayerRecorder, outputs: Tensor) -> None:
        self.recorder, self.outputs = recorder, outputs
        self.pending: list[PendingCall] = []
        self.edges: list[GradientEdge] = []
        self.read_counts: Counter[int] = Counter()

    def add(self, call: PendingCall, edge: GradientEdge) -> None:
        if call.input is None:
            raise RuntimeError(
                f"a backward pass through layer {call.name!r} has freed the graph of these outputs: "
                "call observe() before loss.backward()."
            )
        self.pending.append(call)
        self.edges.append(edge)

    def backpropagate(self, grad_outputs: Tensor) -> list[LayerCall]:
        """The layer calls, with the errors of the loss (grad_outputs * outputs).sum().

        Computes no weight gradients. Leaves the graph and `.grad` unchanged.

        Args:
            grad_outputs: as in torch.autograd.grad: the derivative of some loss with respect to the outputs, in their
                shape.
        """
        if not self.edges:
            return []
        self.recorder.paused = True
        try:
            errors = torch.autograd.grad(self.outputs, self.edges, grad_outputs, retain_graph=True, allow_unused=True)
        finally:
            self.recorder.paused = False
        return [
            LayerCall(self.recorder.layers[call.name], call.take_input(), error, 0, call.forward_id)
            for call, error in zip(self.pending, errors)
            if error is not None
        ]

    def used_elsewhere(self) -> set[int]:
        """The ids of parameters of these layers that other operations of the graph read as well."""
        counts = Counter(
            id(p) for call in self.pending for p in self.recorder.layers[call.name].parameters(recurse=False)
        )
        return {key for key, count in counts.items() if self.read_counts.get(key, count) != count}
