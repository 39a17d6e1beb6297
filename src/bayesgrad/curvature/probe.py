"""Whether a gradient is still what inputs and errors make it, but for a common factor.

Clipping by norm and unscaling multiply a gradient; clipping by value and penalties do more. Either way nobody tells. A
random projection does: a change to any row of a matrix changes its product with a random vector, by more than the
tolerance unless the change is as small as rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

ROWS = 16  # of a gradient that seems untouched, to be compared
SLACK = 8  # roundings that a sum is allowed


@dataclass(frozen=True, eq=False)
class Projection:
    """A gradient, and what it should be in proportion to, as some random vector sees them.

    Args:
        seen, made: (k,) of the gradient and of the rows that should explain it.
        sizes: (2 m,) norms of inputs and errors, in turns: the sum of their products bounds what rounding can do, in
            units of `eps`.
        eps: of the coarsest dtype that had a part in it.
        ones: rows that have a one beside the inputs.
    """

    seen: Tensor
    made: Tensor
    sizes: Tensor
    eps: float
    ones: int = 0


def rows_to_compare(gradients: Sequence[Tensor], fan_out: int) -> slice:
    """The rows to compare: all, or a few where the gradients are as a backward pass left them.

    Whoever writes into a gradient in the usual ways leaves a trace; what leaves none (unscaling) is done to all rows.
    """
    untouched = all(gradient._version == 0 for gradient in gradients)
    return slice(None, None, max(1, fan_out // ROWS) if untouched else 1)


@lru_cache(maxsize=64)
def random_column(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(size, 1), always the same for a size; products with a column are faster than with a vector."""
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, dtype=torch.float64, generator=generator).to(device, dtype)[:, None]


def fit_factors(projections: Sequence[Projection]) -> list[tuple[float, float]]:
    """The c of seen = c made that fits best, and the largest deviation in units of the tolerance, for each.

    All are read at once: on an accelerator that is one synchronisation.
    """
    return [_fit([one]) for one in _read(projections)]


def common_factor(projections: Sequence[Projection]) -> float | None:
    """The same c for all, None where there is none."""
    factor, excess = _fit(_read(projections))
    return factor if excess <= 1 else None


Samples = tuple[np.ndarray, np.ndarray, float]


def _read(projections: Sequence[Projection]) -> list[Samples]:
    if not projections:
        return []
    parts = [part for one in projections for part in (one.seen, one.made, one.sizes)]
    home = parts[0].device
    kind = torch.float64 if any(part.dtype == torch.float64 for part in parts) else parts[0].dtype
    flat = torch.cat([part.to(home, kind) for part in parts]).cpu().double().numpy()
    ends = list(accumulate(part.numel() for part in parts))
    pieces = [flat[start:end] for start, end in zip([0, *ends], ends)]
    seen, made, sizes = (pieces[i::3] for i in range(3))
    bounds = [
        SLACK * one.eps * float((np.sqrt(n[::2] ** 2 + one.ones) * n[1::2]).sum()) for n, one in zip(sizes, projections)
    ]
    return list(zip(seen, made, bounds))


def _fit(numbers: Sequence[Samples]) -> tuple[float, float]:
    with np.errstate(all="ignore"):  # what is not finite fits nothing
        return _least_squares(numbers)


def _least_squares(numbers: Sequence[Samples]) -> tuple[float, float]:
    square = sum(float(made @ made) for _, made, _ in numbers)
    factor = sum(float(seen @ made) for seen, made, _ in numbers) / square if square else 1.0
    worst = 0.0
    for seen, made, bound in numbers:
        deviation = float(np.abs(seen - factor * made).max(initial=0.0))
        allowed = abs(factor) * bound
        excess = deviation / allowed if allowed else (np.inf if deviation else 0.0)
        worst = max(worst, excess) if np.isfinite(excess) else np.inf
    return factor, worst
