"""Second moments of a layer's inputs and errors: the factors of a Kronecker-factored precision."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

WAIT = 4  # batches of rows that are added to a factor at once


@dataclass(frozen=True, eq=False)
class Moment:
    """weight * Σ r r' over some rows r, in each group; only the diagonal if `into` receives a diagonal.

    Only the lower triangle of the result is valid: use `symmetric` to fill the upper one.

    Args:
        rows: (groups, n, size), or indices (n,) of one-hot rows.
    """

    rows: Tensor
    weight: float

    def into(self, factor: Tensor, keep: float, take: float) -> None:
        """factor <- keep * factor + take * moment, in place and in one pass."""
        take *= self.weight
        if not self.rows.is_floating_point():
            counts = torch.bincount(self.rows, minlength=factor.shape[-1])
            factor.mul_(keep).add_(counts.to(factor), alpha=take)
        elif factor.dim() == 2:
            factor.mul_(keep).add_(self.rows.square().sum(1), alpha=take)
        elif len(factor) == 1:
            rows, matrix = self.rows[0], factor[0]
            for start, end in _strips(len(matrix)):
                strip = matrix[start:end, :end]
                strip.addmm_(rows[:, start:end].T, rows[:, :end], beta=keep, alpha=take)
        else:
            factor.baddbmm_(self.rows.mT, self.rows, beta=keep, alpha=take)


def _strips(size: int) -> list[tuple[int, int]]:
    """Row ranges of a lower triangle. More strips would save operations but use slower, smaller products."""
    count = 1 if size < 512 else 3
    ends = [round(i * size / count) for i in range(count + 1)]
    return list(pairwise(ends))


def symmetric(factor: Tensor) -> Tensor:
    """A factor with its upper triangle filled in; a diagonal is returned unchanged."""
    return factor if factor.dim() == 2 else factor.tril() + factor.tril(-1).mT


def defer(entry: dict[str, Tensor], side: str, moment: Moment, keep: float, take: float) -> None:
    """factor <- keep * factor + take * moment, now, or later if one product with more rows is cheaper.

    Deferred rows are part of the state: `<side>_waiting_0` and so on, and `<side>_waits`, which contains the weight of
    each and, last, the weight of the factor.
    """
    factor, waits = entry[f"{side}_moment"], entry.get(f"{side}_waits")
    rows = moment.rows
    few = factor.dim() == 3 and len(factor) == 1 and rows.is_floating_point() and 4 * rows.shape[1] <= rows.shape[2]
    if not few:
        flush(entry, side)
        moment.into(factor, keep, take)
        return
    old = torch.ones(1, dtype=torch.float64) if waits is None else waits
    entry[f"{side}_waits"] = torch.cat(
        [old[:-1] * keep, torch.tensor([take * moment.weight], dtype=torch.float64), old[-1:] * keep]
    )
    entry[f"{side}_waiting_{len(old) - 1}"] = rows
    if len(old) >= WAIT:
        flush(entry, side)


def flush(entry: dict[str, Tensor], side: str) -> None:
    """Adds all deferred rows to the factor."""
    waits = entry.pop(f"{side}_waits", None)
    if waits is None:
        return
    *weights, keep = waits.tolist()
    rows = [entry.pop(f"{side}_waiting_{k}")[0] * weight**0.5 for k, weight in enumerate(weights)]
    Moment(torch.cat(rows)[None], 1.0).into(entry[f"{side}_moment"], keep, 1.0)


class LayerCurvature(ABC):
    """Computes the second moments of a layer's inputs, and of its errors if `sides` has `error`."""

    sides: tuple[str, ...] = ("input",)

    @abstractmethod
    def read(self, sheet: Any, options: Mapping[str, Any]) -> dict[str, Moment]:
        """The second moment of each side."""


@dataclass(frozen=True)
class InputMoment(LayerCurvature):
    """A = (1/N) Σ_j Σ_t a_jt a_jt': the mean over examples j of the sum over positions t, divided by
    `losses_per_example`.

    It contains no derivatives: it is the Gram matrix of the least-squares problem of moving a layer's outputs along
    their gradients.

    Reference: Benzing 2021, Eq. 1-4.
    Checked by: tests/equations/test_foof.py.
    """

    def read(self, sheet: Any, options: Mapping[str, Any]) -> dict[str, Moment]:
        rows = sheet.indices if sheet.layer.lookup else sheet.inputs
        return {"input": Moment(rows, 1 / (sheet.examples * options["losses_per_example"]))}


@dataclass(frozen=True)
class KroneckerFisher(LayerCurvature):
    """F ≈ A ⊗ E, with A as in `InputMoment` and E the mean of e e' over examples and positions.

    With `sharing="reduce"`, inputs are averaged and errors summed over positions first: A is the mean of aa', E the
    mean of ee' over examples. Both are exact for one example at one position.

    Reference: Benzing 2021, section 2.2 and Eq. 3; Eschenhagen et al., 2023, for expand and reduce.
    Differs from the paper: means instead of sums; E is averaged over positions.
    Checked by: tests/equations/test_kfac.py, and against curvlinops.
    """

    sides = ("input", "error")

    def read(self, sheet: Any, options: Mapping[str, Any]) -> dict[str, Moment]:
        weight = 1 / (sheet.examples * options["losses_per_example"])
        if sheet.layer.lookup:
            errors = sheet.errors
            return {
                "input": Moment(sheet.indices, weight),
                "error": Moment(errors, 1 / errors.shape[1]),
            }
        reduce = options.get("sharing") == "reduce"
        inputs, errors = sheet.reduced() if reduce else (sheet.inputs, sheet.errors)
        return {"input": Moment(inputs, weight), "error": Moment(errors, 1 / errors.shape[1])}
