"""The one place where hooks live: each layer's inputs, and the errors that come back to its output.

A forward hook registers a hook on the *output tensor*, which survives in-place activations, and the input is handed
over only when the error arrives: what is never differentiated leaves no trace, and checkpointing, which runs the
forward pass twice, is counted once. Two kinds of passes are told apart:

- `loss.backward()` leaves the layer's uses in `LayerRecorder.uses`, until `clear` or until a gradient is begun anew;
- `trace(outputs).uses(direction)` differentiates whatever direction of the outputs is asked for, down to the outputs of
  the layers and no further. It finds the layers in the graph itself, where the forward hook has left a note.
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

NOTE = "bayesgrad.recorder"


@dataclass(eq=False)
class PendingCall:
    """One call of a layer in a forward pass. The input is let go when a backward pass has taken it."""

    name: str
    turn: int
    input: Tensor | None
    version: int | None  # of an input that is somebody else's and may change; None for what the network computed itself

    def taken(self) -> Tensor:
        """The input; a copy where it may be overwritten later."""
        if self.input is None or self.version is None:
            return self.input  # pyright: ignore[reportReturnType]
        if self.input._version != self.version:
            raise RuntimeError(f"the input of layer {self.name!r} was changed in place before the backward pass.")
        return self.input.clone()


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a layer and the error at its output.

    Args:
        task, turn: tell backward passes and forward passes apart. Calls in one forward pass are about the same
        examples.
    """

    module: nn.Module
    input: Tensor
    error: Tensor
    task: int
    turn: int = 0


class LayerHook:
    """The forward hook of one layer. A copy of the layer gets a hook that does nothing."""

    def __init__(self, recorder: LayerRecorder | None = None, name: str = "") -> None:
        self.recorder = weakref.ref(recorder) if recorder is not None else None
        self.name = name

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        recorder = self.recorder() if self.recorder else None
        if (
            recorder is None
            or not isinstance(output, Tensor)
            or not output.requires_grad
            or not torch.is_grad_enabled()
        ):
            return
        known = module._parameters.get("weight") is not None  # else it has been pruned or reparametrised since
        if known and not torch._C._functorch.is_functorch_wrapped_tensor(output):  # pyright: ignore
            recorder.saw(self.name, args[0] if args else kwargs["input"], output)

    def __reduce__(self) -> tuple:
        return LayerHook, ()

    # torch.compile is to call this, not to trace it; its own decorator for that would load the compiler on import.
    __call__._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]


class PassCounter:
    """Counts the forward passes of a model; as `LayerHook` a copy does nothing."""

    def __init__(self, recorder: LayerRecorder | None = None) -> None:
        self.recorder = weakref.ref(recorder) if recorder is not None else None

    def __call__(self, module: nn.Module, args: tuple) -> None:
        if self.recorder is not None and (recorder := self.recorder()) is not None:
            recorder.turn += 1

    def __reduce__(self) -> tuple:
        return PassCounter, ()

    __call__._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]


class InputHook:
    """Remembers what a model was called with; as `LayerHook` a copy does nothing."""

    def __init__(self, recorder: LayerRecorder | None = None) -> None:
        self.recorder = weakref.ref(recorder) if recorder is not None else None

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        recorder = self.recorder() if self.recorder else None
        if recorder is None or not isinstance(output, Tensor) or not torch.is_grad_enabled():
            return
        if not torch._C._functorch.is_functorch_wrapped_tensor(output):  # pyright: ignore[reportAttributeAccessIssue]
            recorder.called = weakref.ref(output), args, kwargs

    def __reduce__(self) -> tuple:
        return InputHook, ()

    __call__._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]


class LayerRecorder:
    """Collects what the layers of a model show.

    Args:
        model: whose forward passes are counted.
        layers: name -> module, those to listen to.
        keeps: whether backward passes leave their uses.
        notes: whether the graph is annotated for `trace`.
        remembers: whether the arguments of the model's last call are kept, for `arguments`.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        *,
        keeps: bool = True,
        notes: bool = True,
        remembers: bool = False,
    ) -> None:
        self.layers = dict(layers)
        self.keeps, self.notes = keeps, notes
        self.uses: dict[str, list[LayerCall]] = {name: [] for name in self.layers}
        self.quiet = False
        self.turn = 0
        self.begun: dict[str, bool] = {}  # whether the latest pass through a layer began its gradients
        # Before all other hooks, which may replace the output by something that is not the layer's.
        handles = [
            module.register_forward_hook(LayerHook(self, name), with_kwargs=True, prepend=True)
            for name, module in self.layers.items()
        ]
        handles.append(model.register_forward_pre_hook(PassCounter(self)))
        self.called: tuple[Any, tuple, dict] | None = None
        if remembers:
            handles.append(model.register_forward_hook(InputHook(self), with_kwargs=True))
        self.close = weakref.finalize(self, _remove, handles)

    def clear(self) -> None:
        for uses in self.uses.values():
            uses.clear()

    def saw(self, name: str, x: Tensor, output: Tensor) -> None:
        """A layer was called."""
        call = PendingCall(name, self.turn, x.detach(), x._version if x.is_leaf else None)
        if self.notes:
            edge = get_gradient_edge(output)
            notes: dict[str, Any] = edge.node.metadata  # pyright: ignore[reportAssignmentType]
            notes.setdefault(NOTE, {})[id(self), edge.output_nr] = call
        owner = weakref.ref(self)
        output.register_hook(lambda error: None if (recorder := owner()) is None else recorder._came_back(call, error))

    def _came_back(self, call: PendingCall, error: Tensor) -> None:
        if self.quiet or call.input is None:
            return
        if self.keeps:
            self._keep(call, error)
        if not torch._C._autograd._get_current_graph_task_keep_graph():  # pyright: ignore[reportAttributeAccessIssue]
            call.input = None

    def _keep(self, call: PendingCall, error: Tensor) -> None:
        module, task = self.layers[call.name], torch._C._current_graph_task_id()
        trained = [p for p in module.parameters(recurse=False) if p.requires_grad]
        # A pass that asks for the gradients of something else leaves nothing in .grad, and is no evidence.
        if not any(map(_accumulates, trained)) or not call.input.numel():  # pyright: ignore
            return
        uses = self.uses[call.name]
        if not uses or uses[-1].task != task:
            self.begun[call.name] = all(p.grad is None or not bool(p.grad.any()) for p in trained)
            if uses and self.begun[call.name]:
                uses.clear()  # of gradients that nobody made use of
        uses.append(LayerCall(module, call.taken(), error.detach(), task, call.turn))

    def arguments(self, outputs: Tensor) -> tuple[tuple, dict]:
        """What the model was called with when it returned these outputs, in its last forward pass."""
        if self.called is None or self.called[0]() is not outputs:
            raise RuntimeError(
                "these are not the outputs of the model's last forward pass: observe() the very tensor that the model "
                "returned, before it is called again."
            )
        return self.called[1:]

    def trace(self, outputs: Tensor) -> Trace:
        """The layers' calls in the graph of some outputs, by a walk through it."""
        if outputs.grad_fn is None:
            raise RuntimeError(
                "these outputs have no graph: compute them by the model that was given here, with gradients enabled."
            )
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
            for (owner, place), call in node.metadata.get(NOTE, {}).items():
                if owner == id(self):
                    trace.add(call, GradientEdge(node, place))
            for following, _ in node.next_functions:
                if following is None:
                    continue
                if hasattr(following, "variable"):
                    trace.reads[id(following.variable)] += 1
                elif following not in seen:
                    seen.add(following)
                    nodes.append(following)
        return trace


def _accumulates(p: Tensor) -> bool:
    """Whether the pass that is running adds to `p.grad`."""
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(p).node)  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError:  # torch.autograd.grad() never does, and this is how the engine says so
        return False


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


class Trace:
    """The calls that led to some outputs.

    Attributes:
        reads: how often the graph reads each parameter, by id: more often than layers do, where something else does.
    """

    def __init__(self, recorder: LayerRecorder, outputs: Tensor) -> None:
        self.recorder, self.outputs = recorder, outputs
        self.calls: list[PendingCall] = []
        self.edges: list[GradientEdge] = []
        self.reads: Counter[int] = Counter()

    def add(self, call: PendingCall, edge: GradientEdge) -> None:
        if call.input is None:
            raise RuntimeError(
                f"the graph of these outputs has been used up by a backward pass through layer {call.name!r}: "
                "call observe() before loss.backward()."
            )
        self.calls.append(call)
        self.edges.append(edge)

    def uses(self, direction: Tensor) -> list[LayerCall]:
        """The layers' uses, with the errors that a direction of the outputs brings back to them.

        Forms no weight gradients, and leaves the graph and `.grad` as they were.
        """
        if not self.edges:
            return []
        self.recorder.quiet = True
        try:
            errors = torch.autograd.grad(self.outputs, self.edges, direction, retain_graph=True, allow_unused=True)
        finally:
            self.recorder.quiet = False
        return [
            LayerCall(self.recorder.layers[call.name], call.taken(), error, 0, call.turn)
            for call, error in zip(self.calls, errors)
            if error is not None
        ]

    def strangers(self) -> set[int]:
        """The ids of parameters of these layers that something else reads as well, or that are read in another way."""
        counts = Counter(
            id(p) for call in self.calls for p in self.recorder.layers[call.name].parameters(recurse=False)
        )
        return {key for key, count in counts.items() if self.reads.get(key, count) != count}
