"""Walks through the autograd graphs of outputs, and refuses those that hide layers or were freed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

CHECKPOINT = "CheckpointFunctionBackward"  # of reentrant activation checkpointing
COMPILED_GRAPH = "CompiledFunctionBackward"  # of torch.compile


def below(nodes: Iterable[Any], is_last: Callable[[Any], bool] = lambda node: False) -> Iterator[Any]:
    """The nodes of an autograd graph from these on, to those where `is_last` is True."""
    left = list(dict.fromkeys(nodes))
    seen = set(left)
    while left:
        node = left.pop()
        yield node
        if is_last(node):
            continue
        following = [one for one, _ in node.next_functions if one is not None and one not in seen]
        seen.update(following)
        left += dict.fromkeys(following)


def explained(error: RuntimeError) -> RuntimeError:
    """The error of a backward pass of observed outputs, in our words where the cause is known."""
    if "donated buffers" in str(error):
        return RuntimeError(
            "the model was compiled in a way that allows only one backward pass: build the optimizer before "
            "torch.compile."
        )
    if "backward through the graph a second time" in str(error):
        return RuntimeError(
            "a backward pass has freed the graph of these outputs: call observe() before loss.backward()."
        )
    return error


def check_graph(outputs: Tensor) -> None:
    """Raises unless gradients can be propagated back from the outputs."""
    if outputs.grad_fn is None:
        raise RuntimeError(
            "the outputs have no autograd graph: compute them with this model and with gradients enabled."
        )


def graph_nodes(outputs: Tensor) -> Iterator[Any]:
    """The nodes of the autograd graph of a tensor, without those that add to the gradients of leaves.

    Raises:
        RuntimeError: a part of the graph is hidden.
    """
    nodes: list[Any] = [] if outputs.grad_fn is None else [outputs.grad_fn]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node.name() == CHECKPOINT:
            raise RuntimeError(
                "reentrant activation checkpointing hides layers from observe(): "
                "pass use_reentrant=False to torch.utils.checkpoint."
            )
        yield node
        for following, _ in node.next_functions:
            if following is not None and not hasattr(following, "variable") and following not in seen:
                seen.add(following)
                nodes.append(following)


def check_visible(outputs: Tensor) -> bool:
    """Raises if a part of the graph is hidden: torch.autograd.grad would take what it contains as unused.

    Returns:
        Whether a part is compiled: torch.autograd.grad gives zeros for what it contains and outputs do not depend on.
    """
    return COMPILED_GRAPH in {node.name() for node in graph_nodes(outputs)}
