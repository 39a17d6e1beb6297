"""Kronecker factors of layers as differentiable functions of the weights.

They equal the means of `layers.statistics.LayerStatistics`, which forms them from recorded inputs and errors. Recorded
tensors have no derivative by the weights, and hooks of autograd do not run under the transforms of `torch.func` that
corrections need. So this file runs the model inside of the transform and reads its layers there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from bayesgrad.layers.modules import Layer, errors_of, inputs_of
from bayesgrad.layers.operations import prepare
from bayesgrad.layers.stateless import functional_call
from bayesgrad.samplers.correction import Batch


def factors(batches: Sequence[Batch], layers: Sequence[Layer], weights: Tensor) -> list[Tensor]:
    """A, (groups, in, in), and E, (groups, out, out), of each layer: means over examples, and positions for E."""
    shared = [layer.names for layer in layers if len(layer.names) > 1]
    if shared:
        raise ValueError(
            f"layers {', '.join(map(repr, shared[0]))} have the same weight: corrections of metric='kronecker' "
            "support one layer with one call for each weight. Use metric='fisher' or 'diagonal', or correction=None."
        )
    total = sum(batch.count for batch in batches)
    made = [[batch.count / total * side for side in _factors(batch, layers, weights)] for batch in batches]
    return [torch.stack(sides).sum(0) for sides in zip(*made)]


def _factors(batch: Batch, layers: Sequence[Layer], weights: Tensor) -> list[Tensor]:
    """Of one batch.

    Errors are derivatives of each output of the network by an offset of the layers' outputs. In this form no labels
    need be sampled for the Fisher.
    """
    with torch.no_grad():
        shapes = _run(batch, layers, batch.weights(weights.detach()), {})[1]

    def outputs(added: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        found, seen = _run(batch, layers, batch.weights(weights), added)
        return found, {name: x for name, (x, _) in seen.items()}

    zeros = {name: torch.zeros_like(out) for name, (_, out) in shapes.items()}
    found, pull, inputs = vjp(outputs, zeros, has_aux=True)  # pyright: ignore[reportAssignmentType]
    width = found[0].numel()
    basis = torch.eye(width, dtype=found.dtype, device=found.device)[:, None].expand(-1, len(found), -1)
    basis = basis.reshape(width, *found.shape)
    (back,) = vmap(pull)(basis)  # the derivatives of each output by the offsets
    result = []
    for layer in layers:
        name, module = layer.names[0], layer.module
        a = inputs_of(module, inputs[name]).flatten(1, 2)  # (groups, rows, in)
        if layer.weight is None:
            a = a[..., :0]
        if layer.bias is not None:
            a = torch.cat([a, torch.ones_like(a[..., :1]) if a.shape[-1] else a.new_ones(*a.shape[:-1], 1)], -1)
        e = vmap(lambda error, module=module: errors_of(module, error))(back[name])
        groups, count, positions, fan_out = e.shape[1:]  # e is (outputs, groups, N, positions, out)
        if count != len(found):
            raise ValueError(
                f"the first dimension of layer {name!r} has {count} entries for {len(found)} examples: corrections of "
                "metric='kronecker' support layers whose first dimension is that of examples."
            )
        by_output = e.permute(2, 0, 1, 3, 4).reshape(count, width, -1)
        curved = vmap(lambda v: batch.hessian(found, v.reshape(found.shape)).reshape(v.shape), -1, -1)(by_output)
        e, curved = (x.reshape(count, width, groups, positions, fan_out) for x in (by_output, curved))
        E = torch.einsum("nkgpa,nkgpb->gab", e, curved) / (batch.count * positions)
        result += [a.mT @ a / count, E]
    return result


def _run(
    batch: Batch, layers: Sequence[Layer], weights: dict[str, Tensor], added: dict[str, Tensor]
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """The outputs, and input and output of each layer; `added` has offsets of the layers' outputs."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(name: str) -> Any:
        def note(module: Any, args: tuple, kwargs: dict, output: Tensor) -> Tensor:
            if name in seen:
                raise ValueError(f"layer {name!r} is called twice: corrections of metric='kronecker' support one call.")
            seen[name] = (prepare(module, args[0] if args else kwargs["input"]), output)
            return output + added[name] if name in added else output

        return note

    handles = [
        layer.module.register_forward_hook(hook(layer.names[0]), with_kwargs=True, prepend=True) for layer in layers
    ]
    try:
        return functional_call(batch.model, weights, batch.args, batch.kwargs), seen
    finally:
        for handle in handles:
            handle.remove()
