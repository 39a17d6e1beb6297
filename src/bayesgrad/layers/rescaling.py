"""Tests whether a gradient still equals the product of recorded inputs and errors, up to a common factor.

Between `backward()` and `step()`, clipping by norm and unscaling multiply a gradient by a number; clipping by value and
penalties change it in other ways. None of them is announced to the optimizer, but a random projection detects them: a
change of any row of a matrix changes its product with a random vector by more than the tolerance, unless the change is
as small as rounding.

The gradient of the mean loss by the matrix [W b] of a layer is E'A, with a row of inputs A (a one appended for the
bias) and a row of errors E for each example and position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from bayesgrad import layers
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.modules import Layer
from bayesgrad.layers.per_example import OuterProducts, PerExampleGradients, floating_tensor, matmul
from bayesgrad.layers.recorder import LayerCall
from bayesgrad.layers.statistics import LayerStatistics

ROWS = 16  # rows to compare if a gradient seems unchanged
SLACK = 8  # tolerance in units of the rounding error


@dataclass(frozen=True, eq=False)
class Projection:
    """Random projections of a gradient and of the product of inputs and errors, to which it should be proportional.

    Args:
        seen, made: (k,), the projections of the gradient and of the product.
        sizes: (2 m,), norms of inputs and errors, alternating: the sum of their products bounds the rounding error, in
            units of `eps`.
        eps: of the least precise dtype involved.
        ones: the number of rows whose inputs are extended by a one, for the bias.
    """

    seen: Tensor
    made: Tensor
    sizes: Tensor
    eps: float
    ones: int = 0


def rows_to_compare(gradients: Sequence[Tensor], fan_out: int) -> slice:
    """The rows to compare: all, or a few if the gradients have not been changed in place since the backward pass.

    In-place changes increment the version counter; unscaling does not, but it changes all rows.
    """
    untouched = all(gradient._version == 0 for gradient in gradients)
    return slice(None, None, max(1, fan_out // ROWS) if untouched else 1)


@lru_cache(maxsize=64)
def random_column(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A random (size, 1) matrix, the same for each size; products with it are faster than with a vector."""
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, dtype=torch.float64, generator=generator).to(device, dtype)[:, None]


def fit_factors(projections: Sequence[Projection]) -> list[tuple[float, float]]:
    """For each projection the c of the best fit seen = c made, and the largest deviation in units of the tolerance.

    All tensors are copied to the CPU at once, with one synchronisation.
    """
    return [_fit([one]) for one in _read(projections)]


def common_factor(projections: Sequence[Projection]) -> float | None:
    """The common c of all projections; None if they do not have one."""
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
    with np.errstate(all="ignore"):  # values that are not finite fit no factor
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


# --- layers ---


def gradient_from_calls(layer: Layer, uses: Sequence[LayerCall]) -> Tensor:
    """The gradient of the weight that follows from these calls."""
    total = torch.zeros(layer.owner.shape, dtype=compute_dtype(layer.owner.dtype), device=layer.owner.device)
    for use in uses:
        for p, columns in layers.per_example_gradients(use.module, use.input, use.error):
            if p is layer.owner:
                total += columns.combine(torch.ones(columns.count).to(total))
    return total


def gradient_factors(blocks: Sequence[tuple[Layer, LayerStatistics]]) -> dict[Layer, float]:
    """c for each layer whose gradient is c E'A up to rounding; other layers are omitted."""
    found = {layer: projection for layer, batch in blocks if (projection := _projection(layer, batch)) is not None}
    return {layer: factor for layer, (factor, excess) in zip(found, fit_factors(list(found.values()))) if excess <= 1}


def estimated_factor(layer: Layer, batch: LayerStatistics) -> float:
    """The c for which c E'A is closest to the gradient (the effect of unscaling and clipping); 1 if unknown."""
    if layer.lookup:
        made = gradient_from_calls(layer, list(batch.uses)).flatten()
        seen = layer.owner.grad.to(made).flatten()  # pyright: ignore[reportOptionalMemberAccess]
        projection = Projection(seen, made, made.new_ones(2), torch.finfo(made.dtype).eps)
    elif any(p.grad is None for p in layer.members) or (projection := _projection(layer, batch)) is None:
        return 1.0
    ((factor, _),) = fit_factors([projection])
    return factor if math.isfinite(factor) else 1.0


def _projection(layer: Layer, batch: LayerStatistics) -> Projection | None:
    features, errors = batch.features, batch.errors
    gradients = [p.grad for p in layer.members if p.grad is not None]
    if features.dtype != errors.dtype or any(gradient.dtype != features.dtype for gradient in gradients):
        return None
    groups, fan_out, fan_in = layer.shape
    size = fan_in - (layer.bias is not None)
    probe = random_column(fan_in, features.dtype, features.device)
    some = rows_to_compare(gradients, fan_out)
    rows = features @ probe[:size]
    seen = probe.new_zeros(())
    if layer.weight is not None:
        seen = (gradients[0].reshape(groups, fan_out, size)[:, some].reshape(-1, size) @ probe[:size])[:, 0]
    if layer.bias is not None:
        rows += probe[size:]
        seen = torch.addcmul(seen, gradients[-1].view(groups, fan_out)[:, some].reshape(-1), probe[size])
    made = matmul(errors[..., some].mT, rows).flatten()
    sizes = torch.stack(torch._foreach_norm([features, errors]))
    return Projection(seen, made, sizes, torch.finfo(made.dtype).eps, 0 if layer.bias is None else features.shape[1])


def per_example_projection(passes: Sequence[PerExampleGradients], gradient: Tensor) -> Projection:
    """Random projections of `gradient` and of the sum of per-example gradients, to which it should be proportional."""
    if all(isinstance(columns, OuterProducts) for columns in passes):
        outers = [columns for columns in passes if isinstance(columns, OuterProducts)]
        groups, _, _, fan_out = outers[0].errors.shape
        matrix = gradient.reshape(groups, fan_out, -1).to(outers[0].inputs.dtype)
        some = rows_to_compare([gradient], fan_out)
        probe = random_column(matrix.shape[-1], matrix.dtype, matrix.device)
        seen = (matrix[:, some] @ probe).flatten()
        parts = [(own.inputs.flatten(1, 2), own.errors.flatten(1, 2)) for own in outers]
        made = torch.stack([matmul(e[..., some].mT, a @ probe).flatten() for a, e in parts]).sum(0)
        norms = torch._foreach_norm([rows for pair in parts for rows in pair])
    else:
        sums = [columns.combine(torch.ones(columns.count).to(floating_tensor(columns))) for columns in passes]
        made = torch.stack(sums).sum(0).flatten()
        seen = gradient.flatten().to(made.dtype)
        own = [t for columns in passes for t in columns.tensors().values() if t.is_floating_point()]
        total = made.abs().max() + torch.stack(torch._foreach_norm(own)).sum()
        norms = [total, torch.ones_like(total)]
    eps = max(torch.finfo(dtype).eps for dtype in (made.dtype, gradient.dtype))
    return Projection(seen, made, torch.stack(list(norms)), eps)
