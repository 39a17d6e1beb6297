"""What keeps steps with inverse matrices stable: bounds of a step, relative and growing damping, finite statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bayesgrad.directions import Directions, dense, scaled, square_norm
from bayesgrad.layers.modules import Layer
from bayesgrad.layers.statistics import LayerStatistics
from bayesgrad.precision.linalg import diagonal_inverse, inverse
from bayesgrad.preconditioners.rows import inner_product
from bayesgrad.shards import gradient_of, summed
from bayesgrad.warning import warn

ATTEMPTS = 20  # how often damping grows tenfold before a matrix is given up


# --- bounds of a step ---


def limit_norm(directions: Directions, limit: float, square: Tensor | None = None) -> Directions:
    """Directions d times min(1, limit/sqrt(d·g)), with the gradients g; the inner product is over all parameters.

    For d = P^-1 g, sqrt(d·g) is the norm of d in the metric P. The factor stays a tensor: nothing is read from the
    device.

    Args:
        directions: by parameter.
        limit: `inf` for no bound.
        square: d·g, if it is known.
    """
    if not directions or math.isinf(limit):
        return directions
    if square is None:
        parts = [inner_product(dense(d), gradient_of(p)) for p, d in directions.items()]
        square = torch.stack([part.to(parts[0]) for part in parts]).sum()
    # Where products of either sign overflow, their sum is NaN, and the step is zero, as for an infinite norm.
    square = square.nan_to_num(nan=math.inf, posinf=math.inf).clamp(min=torch.finfo(square.dtype).tiny)
    factor = (limit * square.rsqrt()).clamp(max=1)
    return {p: scaled(d, factor) for p, d in directions.items()}


def limit_size(directions: Directions, blocks: Iterable[tuple[Sequence[Tensor], float]]) -> Directions:
    """Directions times min(1, limit/r), with r the root mean square of the entries in a block of parameters.

    Args:
        directions: by parameter.
        blocks: parameters, and the limit.
    """
    found = dict(directions)
    some = [([p for p in members if p in found], limit) for members, limit in blocks if math.isfinite(limit)]
    every = [p for params, _ in some for p in params]
    squares = dict(zip(every, summed([square_norm(found[p]) for p in every], every)))
    for params, limit in some:
        if not params:
            continue
        own = [squares[p] for p in params]
        size = (torch.stack([s.to(own[0]) for s in own]).sum() / sum(p.numel() for p in params)).sqrt()
        factor = (limit / size.clamp(min=torch.finfo(size.dtype).tiny)).clamp(max=1)
        found |= {p: scaled(found[p], factor) for p in params}
    return found


# --- damping ---


def mean_eigenvalue(moment: Tensor) -> float:
    """The mean of the eigenvalues of a matrix, or of the entries of a diagonal."""
    diagonal = moment if moment.dim() == 2 else moment.diagonal(dim1=-2, dim2=-1)
    return float(diagonal.mean())


def split_damping(moments: Mapping[str, Tensor], group: Mapping[str, Any]) -> dict[str, float]:
    """What is added to each of one or two factors, so that about `damping` is added to their Kronecker product.

    With λ = `damping`, n factors and m the mean eigenvalue of a factor, this is λ^(1/n) m if `damping_mode` is
    "relative". Else it is λ for one factor, and π√λ and √λ/π for two, with π^2 the ratio of their mean eigenvalues.
    """
    means: dict[str, float] = {side: mean_eigenvalue(moment) for side, moment in moments.items()}
    share: float = float(group["damping"]) ** (1 / len(means))
    if group["damping_mode"] == "relative":
        return {side: share * (means[side] or 1.0) for side in means}  # 1 for a factor without data
    if len(means) == 1 or min(means.values()) <= 0:
        return {side: float(share) for side in means}
    first, second = means
    pi = math.sqrt(means[first] / means[second])
    return {first: pi * share, second: share / pi}


def with_growing_damping(
    invert: Callable[[Tensor, float, str], Tensor], matrix: Tensor, damping: float, name: str, warned: set[str]
) -> tuple[Tensor, float]:
    """invert(matrix, damping, name), with damping multiplied by ten until the matrix is positive; one warning says so.

    Args:
        invert: raises ValueError for a matrix that is singular with this damping.
        matrix: to invert.
        damping: the first to try; 0 never grows.
        name: of the matrix.
        warned: names of matrices that a warning has named.

    Returns:
        The result, and the damping.

    Raises:
        ValueError: the matrix is singular, and damping is 0.
        FloatingPointError: the matrix has entries that are not finite.
    """
    given = damping
    for attempt in range(ATTEMPTS + 1):
        try:
            found = invert(matrix, damping, name)
        except ValueError:
            if not damping or attempt == ATTEMPTS:
                raise
            damping *= 10
        else:
            break
    if damping != given and name not in warned:
        warned.add(name)
        warn(
            f"{name} is singular with damping {given:g} and was inverted with damping {damping:g}: raise damping.",
        )
    return found, damping  # pyright: ignore[reportPossiblyUnboundVariable]


def damped_inverse(side: str, moment: Tensor, damping: float, layer: str, warned: set[str]) -> dict[str, Tensor]:
    """The inverse of the factor of one side of a layer, by its name in the state."""
    invert = diagonal_inverse if moment.dim() == 2 else inverse
    found, _ = with_growing_damping(invert, moment, damping, f"the {side} factor of layer {layer!r}", warned)
    return {f"{side}_inverse": found}


def finite(found: Mapping[Layer, LayerStatistics]) -> dict[Layer, LayerStatistics]:
    """Those statistics that are finite, and whose squares are; the host reads one tensor."""
    flags = [batch.is_finite() for batch in found.values()]
    good = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []
    return {layer: batch for (layer, batch), is_good in zip(found.items(), good) if is_good}


def nonfinite_cause(layers: Sequence[Layer], bad: Mapping[Layer, LayerStatistics]) -> str | None:
    """Which statistics are not finite, in words: the inputs of the first such layer, else the errors of the last.

    Args:
        layers: of the model, in order.
        bad: statistics that are not finite.
    """
    sides = {layer: bad[layer].nonfinite_side() for layer in layers if layer in bad}
    if first := next((layer for layer, side in sides.items() if side == "inputs"), None):
        return f"the inputs of layer {first.names[0]!r}, or their squares, are not finite"
    if last := next((layer for layer, side in reversed(sides.items()) if side == "errors"), None):
        return f"the errors of layer {last.names[0]!r}, or their squares, are not finite"
    return None
