"""The one place where hooks live: each layer's inputs, and the errors that come back to its output.

A forward hook registers a hook on the *output tensor*, which survives in-place activations, and the input is handed
over only when the error arrives: what is never differentiated leaves no trace, and checkpointing, which runs the
forward pass twice, is counted once. Two kinds of passes are told apart:

- `loss.backward()` leaves the layer's uses in `Tap.uses`, until `clear` or until a gradient is begun anew;
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

NOTE = "bayesgrad.tap"


@dataclass(eq=False)
class Call:
    """One call of a layer in a forward pass. The input is let go when a backward pass has taken it."""

    name: str
    input: Tensor | None


@dataclass(frozen=True, eq=False)
class Use:
    """One call of a layer and the error at its output.

    Args:
        task: tells backward passes apart.
    """

    module: nn.Module
    input: Tensor
    error: Tensor
    task: int


class Hook:
    """The forward hook of one layer. A copy of the layer gets a hook that does nothing."""

    def __init__(self, tap: Tap | None = None, name: str = "") -> None:
        self.tap = weakref.ref(tap) if tap is not None else None
        self.name = name

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        tap = self.tap() if self.tap else None
        if tap is not None and isinstance(output, Tensor) and output.requires_grad and torch.is_grad_enabled():
            tap.saw(self.name, args[0] if args else kwargs["input"], output)

    def __reduce__(self) -> tuple:
        return Hook, ()

    # torch.compile is to call this, not to trace it; its own decorator for that would load the compiler on import.
    __call__._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]


class Tap:
    """Collects what the layers of a model show.

    Args:
        layers: name -> module, those to listen to.
        keeps: whether backward passes leave their uses.
        notes: whether the graph is annotated for `trace`.
    """

    def __init__(self, layers: Mapping[str, nn.Module], *, keeps: bool = True, notes: bool = True) -> None:
        self.layers = dict(layers)
        self.keeps, self.notes = keeps, notes
        self.uses: dict[str, list[Use]] = {name: [] for name in self.layers}
        self.quiet = False
        self._handles = [
            module.register_forward_hook(Hook(self, name), with_kwargs=True) for name, module in self.layers.items()
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def clear(self) -> None:
        for uses in self.uses.values():
            uses.clear()

    def saw(self, name: str, x: Tensor, output: Tensor) -> None:
        """A layer was called."""
        call = Call(name, x.detach())
        if self.notes:
            edge = get_gradient_edge(output)
            notes: dict[str, Any] = edge.node.metadata  # pyright: ignore[reportAssignmentType]
            notes.setdefault(NOTE, {})[id(self), edge.output_nr] = call
        owner = weakref.ref(self)
        output.register_hook(lambda error: None if (tap := owner()) is None else tap._came_back(call, error))

    def _came_back(self, call: Call, error: Tensor) -> None:
        if self.quiet or call.input is None:
            return
        if self.keeps:
            self._keep(call, error)
        if not torch._C._autograd._get_current_graph_task_keep_graph():  # pyright: ignore[reportAttributeAccessIssue]
            call.input = None

    def _keep(self, call: Call, error: Tensor) -> None:
        module, task = self.layers[call.name], torch._C._current_graph_task_id()
        uses = self.uses[call.name]
        if uses and uses[-1].task != task and all(p.grad is None for p in module.parameters(recurse=False)):
            uses.clear()  # of gradients that nobody made use of
        uses.append(Use(module, call.input, error.detach(), task))  # pyright: ignore[reportArgumentType]

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


class Trace:
    """The calls that led to some outputs.

    Attributes:
        reads: how often the graph reads each parameter, by id: more often than layers do, where something else does.
    """

    def __init__(self, tap: Tap, outputs: Tensor) -> None:
        self.tap, self.outputs = tap, outputs
        self.calls: list[Call] = []
        self.edges: list[GradientEdge] = []
        self.reads: Counter[int] = Counter()

    def add(self, call: Call, edge: GradientEdge) -> None:
        if call.input is None:
            raise RuntimeError(
                f"the graph of these outputs has been used up by a backward pass through layer {call.name!r}: "
                "call observe() before loss.backward()."
            )
        self.calls.append(call)
        self.edges.append(edge)

    def uses(self, direction: Tensor) -> list[Use]:
        """The layers' uses, with the errors that a direction of the outputs brings back to them.

        Forms no weight gradients, and leaves the graph and `.grad` as they were.
        """
        if not self.edges:
            return []
        self.tap.quiet = True
        try:
            errors = torch.autograd.grad(self.outputs, self.edges, direction, retain_graph=True, allow_unused=True)
        finally:
            self.tap.quiet = False
        return [
            Use(self.tap.layers[call.name], call.input, error, 0)
            for call, error in zip(self.calls, errors)
            if call.input is not None and error is not None
        ]
