"""Passes of a model with other tensors in the place of its own, which leave the model as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def functional_call(
    model: nn.Module, values: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Any:
    """`torch.func.functional_call`, with which a module that is used under two names keeps its parameters.

    torch replaces a tensor once for each of its names and restores it in the same order, so that a module with two
    names would keep the value of the first replacement. Here it is replaced once for each module that has it.

    Args:
        values: tensors by the name of a parameter or buffer; they replace it under its other names too.
    """
    tensors = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    named = {name: tensor for some in tensors for name, tensor in some}
    new = {id(named[name]): value for name, value in values.items()}
    places: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if id(tensor) in new:
                places[f"{prefix}.{name}" if prefix else name] = new[id(tensor)]
    return torch.func.functional_call(model, places, args, dict(kwargs or {}), tie_weights=False)


@contextmanager
def copied_buffers(model: nn.Module) -> Iterator[None]:
    """Within the context the buffers are copies, so that forward passes, which may change them, leave the model's own.

    They are replaced, not restored by value: a graph may still need those that the forward pass used.
    """
    own = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    copies = {id(b): b.clone() for _, buffers in own for b in buffers.values() if b is not None}  # shared ones stay so
    try:
        for module, buffers in own:
            module._buffers.update({name: copies.get(id(buffer)) for name, buffer in buffers.items()})
        yield
    finally:
        for module, buffers in own:
            module._buffers.clear()
            module._buffers.update(buffers)
