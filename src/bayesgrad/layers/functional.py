"""Per-example gradients by torch.func or by single passes, for parameters whose layers are not recorded."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from bayesgrad import shards
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.network import WRAPPED, clean_name, parameters_of, with_full_names
from bayesgrad.layers.observed import classes_last
from bayesgrad.layers.per_example import CHUNK, PerExampleGradients, StoredGradients
from bayesgrad.layers.stateless import functional_call
from bayesgrad.warning import warn

_WARNED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that vmap does not support


def gradients_by_vmap(
    model: nn.Module,
    params: Mapping[str, nn.Parameter],
    inputs: tuple[Tensor, ...],
    directions: Sequence[Tensor],
    outputs: Tensor,
    class_dim: int | None = None,
) -> dict[str, PerExampleGradients]:
    """Per-example gradients of some parameters by torch.func.vmap, in chunks; example by example where vmap fails.

    Args:
        outputs: of the batch, which single examples must reproduce.
        class_dim: the dimension of the model's outputs that is the last one of `outputs` and `directions`.
    """

    constants = with_full_names(
        model, {name: p.detach() for name, p in parameters_of(model).items()}
    )  # without a graph

    def inner(values: dict[str, Tensor], direction: Tensor, *example: Tensor) -> tuple[Tensor, Tensor]:
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}  # the model may change them in place
        given = {**constants, **with_full_names(model, values), **buffers}
        found = functional_call(model, given, tuple(x[None] for x in example))
        output = classes_last(found, class_dim)[0]
        return (output * direction).sum(), output

    values = {name: p.detach() for name, p in params.items()}
    inputs = tuple(x.detach() for x in inputs)
    gradient = grad(inner, has_aux=True)
    try:
        try:
            recurrent = any(isinstance(module, (nn.RNNBase, nn.RNNCellBase)) for module in model.modules())
            parts = None if recurrent else _vectorised(gradient, values, inputs, directions)
        except RuntimeError as error:
            if "randomness" in str(error) or "renorm" in str(error):
                raise
            parts = None  # shapes or branches that depend on data, or an operation that vmap does not know
            warn_of_loop(model, error)
        parts = _one_by_one(gradient, values, inputs, directions) if parts is None else parts
    except RuntimeError as error:
        if "randomness" in str(error):
            raise ValueError(
                f"{next(iter(params))} needs additional passes, in which dropout would differ: call model.eval()."
            ) from error
        if "renorm" in str(error):
            refuse_renorm(model)
        raise
    alone = parts[0][1]
    if (alone - outputs).norm() > math.sqrt(torch.finfo(outputs.dtype).eps) * outputs.norm():
        raise ValueError(
            f"{next(iter(params))} has no per-example gradients: the model's outputs for single examples differ from "
            "those in a batch, so it mixes the examples of a batch."
        )
    return {
        name: StoredGradients(
            p.shape, torch.stack([part[name] for part, _ in parts], 1).flatten(0, 1).to(compute_dtype(p.dtype))
        )
        for name, p in params.items()
    }


def refuse_renorm(model: nn.Module) -> None:
    """Raises if an embedding changes its own weights."""
    for name, module in model.named_modules():
        if (limit := getattr(module, "max_norm", None)) is not None:
            raise ValueError(
                f"{clean_name(name)} has max_norm={limit}, which rescales its rows in place in every forward pass: "
                "set its max_norm to None after training."
            )


def warn_of_loop(model: nn.Module, error: Exception) -> None:
    """Warns once for each model that examples are differentiated one by one, which takes longer."""
    model = getattr(model, WRAPPED, model)
    if model not in _WARNED:
        _WARNED.add(model)
        reason = str(error).strip().split("\n")[0][:100]
        warn(
            "torch.func.vmap does not support this model, so some gradients are computed for one example at a time, "
            f"which is slow ({reason}).",
        )


def _vectorised(
    gradient: Callable[..., tuple[dict[str, Tensor], Tensor]],
    values: dict[str, Tensor],
    inputs: tuple[Tensor, ...],
    directions: Sequence[Tensor],
) -> list[tuple[dict[str, Tensor], Tensor]]:
    """In chunks of examples."""
    size = max(1, CHUNK // max(1, sum(value.numel() for value in values.values())))
    one = vmap(gradient, in_dims=(None, 0, *[0] * len(inputs)), chunk_size=min(size, len(inputs[0])))
    with sdpa_kernel(SDPBackend.MATH):  # vmap does not support the other kernels
        return [one(values, direction, *inputs) for direction in directions]


def _one_by_one(
    gradient: Callable[..., tuple[dict[str, Tensor], Tensor]],
    values: dict[str, Tensor],
    inputs: tuple[Tensor, ...],
    directions: Sequence[Tensor],
) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Without vmap, which does not support recurrent layers. Like vmap, it refuses random operations."""
    before = _random_states(inputs[0].device)
    passes = [[gradient(values, *row) for row in zip(direction, *inputs)] for direction in directions]
    if any(not torch.equal(a, b) for a, b in zip(before, _random_states(inputs[0].device))):
        raise RuntimeError("randomness in a pass of one example")
    return [
        ({name: torch.stack([row[name] for row, _ in rows]) for name in values}, torch.stack([out for _, out in rows]))
        for rows in passes
    ]


def _random_states(device: torch.device) -> list[Tensor]:
    """The states of the generators that a forward pass on this device may use."""
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def gradients_one_by_one(
    outputs: Tensor, params: Sequence[Tensor], directions: Sequence[Tensor], every: Sequence[Tensor]
) -> list[Tensor]:
    """Per-example gradients by one backward pass for each example, (columns, *shape) for each parameter.

    Args:
        params: those to differentiate by.
        every: all that the passes use. Those of which processes have parts are gathered once, since processes may have
            different numbers of examples.
    """
    if not params:
        return []
    rows: list[list[Tensor]] = [[] for _ in params]
    with shards.unreduced(every, keep=True):
        used = list(shards.gathered(params).values())
        for example in range(len(outputs)):
            for direction in directions:
                alone = torch.zeros_like(direction)
                alone[example] = direction[example]
                for row, gradient in zip(rows, torch.autograd.grad(outputs, used, alone, retain_graph=True)):
                    row.append(gradient.to_dense())  # of an embedding with sparse=True, which the step refuses
    return [torch.stack(row) for row in rows]
