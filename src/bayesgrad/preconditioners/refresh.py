"""When the averages of a layer are updated and inverted, and what the state of a layer has for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.modules import Layer
from bayesgrad.layers.statistics import SIDES

MOMENT_CHANGE = 0.2  # the relative change of a moment from which its inverse is computed anew
LARGE, FEWER = 512, 16  # inputs of a layer, and how many times fewer outputs it has, for `stats_interval`
DAMPING_CHANGE = 0.1  # likewise of the damping; smaller changes are left for the next inversion
# Entries of `clock`: number of merges; steps of the last merge, inversion and comparison with the moments at inversion;
# step of the first gradient that was squared; steps in which only parameters beside the first of the layer moved.
MERGES, MERGED, INVERTED, COMPARED, SQUARED, BESIDE = range(6)
SQUARES = "squares"  # of gradients, averaged, in the basis in which a layer is preconditioned
AVERAGE = "gradient_average"  # of a layer
LAYER_KEYS = ("spectrum", "damped", "clock", "traces", SQUARES, AVERAGE)


def has_merged(entry: Mapping[str, Tensor]) -> bool:
    """Whether the state of a layer has statistics of a batch."""
    return "clock" in entry and _at(entry, MERGES) > 0


def next_step(entry: Mapping[str, Tensor]) -> int:
    """The number of the next step of a layer; `entry` is the state of its first parameter."""
    return 1 + int(entry.get("step", 0)) + (_at(entry, BESIDE) if "clock" in entry else 0)


def _at(entry: Mapping[str, Tensor], what: int) -> int:
    """An entry of the clock."""
    return entry["clock"].tolist()[what]  # which is faster than to index the tensor


def count_beside(layers: Iterable[Layer], state: Mapping[Tensor, dict[str, Tensor]]) -> None:
    """Called after a step: counts it for layers of which another parameter than the first had a gradient."""
    for layer in layers:
        if layer.owner.grad is None and "clock" in state.get(layer.owner, {}):
            state[layer.owner]["clock"][BESIDE] += any(p.grad is not None for p in layer.members)


def new_clock() -> Tensor:
    return torch.zeros(6, dtype=torch.int64)


def early_interval(last: int) -> int:
    """How many steps after step `last` statistics are updated early in a run: at steps 1, 2, 3, 5, 8, 13 and so on.

    Activations can change a hundredfold between steps 4 and 6. With inverses of step 3 in step 5, the loss jumps up,
    and some runs do not recover.
    """
    return max(1, (3 * last + 2) // 5)


def stats_interval(layer: Layer, every: int) -> int:
    """How many steps apart the statistics of a layer are updated.

    Those of a layer with many inputs and few outputs would cost more than its gradient: they are updated a quarter as
    often, unless they are wanted in every step.
    """
    inputs, outputs = layer.sizes["input"], layer.sizes["error"]
    return 4 * every if every > 1 and inputs >= LARGE and inputs >= FEWER * outputs else every


def is_due(entry: Mapping[str, Tensor], what: int, step: int, every: int, offset: int = 0) -> bool:
    """Whether something that the clock counts is due in a step: after `every` steps; early, by `early_interval`.

    Early means that the last update was before step `every`. With an offset, later updates are at the steps that are
    `offset` modulo `every`.
    """
    last = _at(entry, what)
    if last < every:
        return step >= last + early_interval(last)
    return step >= last + every or (step > last and (step - offset) % every == 0)


def inversion_due(entry: Mapping[str, Tensor], step: int, every: int, offset: int, damping: float) -> bool | Tensor:
    """Whether the moments of a layer are to be inverted in a step; a tensor, if their change decides.

    Args:
        entry: the state of the layer.
        step: its number.
        every: the largest number of steps between inversions; after every tenth of them, moments are compared. Before
            step `every`, they are compared whenever they are updated, and inverted if the number of steps has doubled.
        offset: the first step of later inversions, so that not all layers are inverted in one step.
        damping: to be used.
    """
    _, merged, last, compared, *_ = entry["clock"].tolist()
    used = float(entry["damped"]) if last else 0.0
    if not last or abs(damping - used) > DAMPING_CHANGE * used:
        return True
    if merged <= last:
        return False
    early = last < every
    if step >= (2 * last if last >= 3 else 1) if early else is_due(entry, INVERTED, step, every, offset):
        return True
    wait = min(early_interval(last), every / 10) if early else every / 10
    if step < max(last, compared) + wait or merged <= compared or not (changes := moment_changes(entry)):
        return False
    entry["clock"][COMPARED] = step
    return torch.stack(changes).max() > MOMENT_CHANGE


def moment_changes(entry: Mapping[str, Tensor]) -> list[Tensor]:
    """The relative change of each moment of a layer since the last inversion, that of its diagonal."""
    changes = []
    for side, now in _diagonals(entry).items():
        if (then := entry.get(f"{side}_diagonal")) is not None:
            changes.append((now - then).abs().sum() / then.sum().clamp(min=torch.finfo(then.dtype).tiny))
    return changes


def cost(moment: Tensor) -> float:
    """What the inverse or eigenvectors of a moment cost: the size cubed in each group; of a diagonal, the size."""
    return float(moment.numel() * (moment.shape[-1] if moment.dim() == 3 else 1))


def note_inversion(entry: dict[str, Tensor], step: int, damping: float) -> None:
    """Called after the moments of a layer were inverted in a step."""
    entry["damped"] = torch.tensor(damping, dtype=torch.float64)
    for side, diagonal in _diagonals(entry).items():
        store(entry, f"{side}_diagonal", diagonal.clone())
    entry["clock"][INVERTED] = step


def _diagonals(entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The diagonal of each moment."""
    moments = {side: moment for side in SIDES if (moment := entry.get(f"{side}_moment")) is not None}
    return {side: m if m.dim() == 2 else m.diagonal(dim1=1, dim2=2) for side, m in moments.items()}


@contextmanager
def unit_factors(entry: dict[str, Tensor], names: Iterable[str]) -> Iterator[None]:
    """A context in which the factors of a layer are unit matrices; afterwards they, and the clock, are as at first."""
    initial = {name: entry[name] for name in names}
    entry |= {name: torch.ones_like(f) if f.dim() == 2 else _unit(f) for name, f in initial.items()}
    yield
    entry |= {**initial, "clock": new_clock()}


def _unit(matrices: Tensor) -> Tensor:
    return torch.eye(matrices.shape[-1]).to(matrices).expand_as(matrices).clone()


def factor_shapes(layer: Layer, sides: Iterable[str], largest: int) -> dict[str, tuple[int, ...]]:
    """The shape of the factor of each side; it is diagonal from a size on, and for the inputs of an embedding."""
    shapes = {}
    for side in sides:
        size = layer.sizes[side]
        diagonal = size > largest or (layer.lookup and side == "input")
        shapes[side] = (layer.shape[0], size) if diagonal else (layer.shape[0], size, size)
    return shapes


def is_layer_tensor(name: str) -> bool:
    """Whether a state tensor of this name belongs to the layer, not to the elements of its parameters."""
    return name.startswith(tuple(f"{side}_" for side in SIDES)) or name in LAYER_KEYS


def fits(entry: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the factors are those of the parameters that are trained now, if there are any."""
    return all(entry[name].shape == shape for name, shape in shapes.items() if name in entry)


def drop_unfit(entry: dict[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Deletes the state of a layer of which another part is trained now."""
    if not fits(entry, shapes):
        for key in filter(is_layer_tensor, list(entry)):
            del entry[key]


def initialise(
    entry: dict[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    p: Tensor,
    on_cpu: Collection[str],
    initial: Callable[[Tensor], Tensor],
) -> None:
    """Creates the factors of a layer that are missing, from tensors of zeros, and casts those of another dtype."""
    drop_unfit(entry, shapes)
    for name in (name for name in shapes if name not in entry):
        entry[name] = initial(torch.zeros(shapes[name], dtype=compute_dtype(p.dtype), device=p.device))
    cast(entry, shapes, p, on_cpu)
    entry.setdefault("clock", new_clock())


def cast(entry: dict[str, Tensor], factors: Iterable[str], p: Tensor, on_cpu: Collection[str]) -> None:
    """Casts the state of a layer if the parameter that owns it was cast, but for what stays on the CPU."""
    dtype = compute_dtype(p.dtype)
    if any(entry[name].dtype != dtype for name in factors):
        for key in (key for key in filter(is_layer_tensor, entry) if key not in on_cpu):
            entry[key] = entry[key].to(p.device, dtype)


def check_factor(entry: Mapping[str, Tensor], kept: str, shape: tuple[int, ...], layer: str, own: str) -> None:
    """Raises ValueError if the saved state of a layer lacks a factor, or has it in another shape."""
    if (moment := entry.get(kept)) is None:
        raise ValueError(
            f"the saved state of layer {layer!r} lacks {kept}: it is not a state of {own}, or it is truncated."
        )
    if moment.shape != shape:
        raise ValueError(
            f"{kept} of layer {layer!r} has shape {tuple(moment.shape)} in the saved state, but the layer needs "
            f"{shape}: load it into the model it came from."
        )


def store(entry: dict[str, Tensor], name: str, value: Tensor) -> None:
    """Stores a value in the state; copies it into the existing tensor if shape and dtype are the same."""
    if name in entry and entry[name].shape == value.shape and entry[name].dtype == value.dtype:
        entry[name].copy_(value)
    else:
        entry[name] = value
