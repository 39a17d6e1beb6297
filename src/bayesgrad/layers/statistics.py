"""Second moments of a layer's inputs and errors: the factors of a Kronecker-factored precision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn

from bayesgrad import layers
from bayesgrad.layers.modules import Layer
from bayesgrad.layers.per_example import EmbeddingGradients, OuterProducts
from bayesgrad.layers.recorder import LayerCall

WAIT = 4  # batches of rows that are added to a factor at once


class LayerStatistics:
    r"""What one layer received in some passes: rows of inputs and errors, and the second moments of both.

    .. math::
        A = \frac1{N l} \sum_{j,t} a_{jt} a_{jt}^T, \quad E = \frac1{N T} \sum_{j,t} e_{jt} e_{jt}^T

    An example j is one index of the first dimension of the layer's input, and the examples of a pass are counted once.
    A position t is a place of a convolution, an element of a sequence, or one of several calls of the layer in a pass.
    l is the number of losses of an example (`losses_per_example`). For the bias, a one is appended to each input. The
    input of an Embedding is a one-hot vector, stored as its index. An exact Fisher sums ee' over several directions of
    the model's outputs, which have the same inputs: see `from_gradients`.

    A contains no derivatives: it is the Gram matrix of the least-squares problem of moving a layer's outputs along
    their gradients. A ⊗ E approximates the Fisher information of the layer's weights.

    With `sharing="reduce"`, inputs are averaged and errors summed over positions first: A is the mean of aa', E the
    mean of ee' over examples. Both are exact for one example at one position.

    Args:
        layer: the layer.
        passes: the recorded calls of each pass; the examples of a pass are counted once.

    Reference: Benzing 2021, section 2.2 and Eq. 1-4; Eschenhagen et al., 2023, for expand and reduce.
    Differs from the paper: means instead of sums; E is averaged over positions.
    Checked by: tests/algebra/test_statistics.py, tests/equations/test_foof.py, tests/equations/test_kfac.py, and
    against curvlinops.
    """

    def __init__(self, layer: Layer, passes: Sequence[Sequence[LayerCall]]) -> None:
        self.layer = layer
        self.passes = passes
        self.examples = sum(max(layers.examples_in(use.module, use.input) for use in uses) for uses in passes)

    @classmethod
    def from_gradients(
        cls, layer: Layer, gradients: OuterProducts | EmbeddingGradients, examples: int
    ) -> LayerStatistics:
        """From the per-example gradients of the layer's weight.

        Args:
            gradients: ordered by direction, then by example.
            examples: the number of examples, of which these are the first directions; 0 for further directions of
                examples that were counted before.
        """
        made = cls(layer, ())
        made.examples = examples
        if isinstance(gradients, EmbeddingGradients):
            indices = gradients.indices[:examples].flatten()
            made.__dict__ |= {"indices": indices, "errors": gradients.errors.flatten(0, 1)[None], "rows": len(indices)}
        else:
            features = gradients.inputs[:, :examples].flatten(1, 2)
            made.__dict__ |= {"features": features, "errors": gradients.errors.flatten(1, 2), "rows": features.shape[1]}
        return made

    # --- rows ---

    @property
    def uses(self) -> Iterable[LayerCall]:
        return (use for uses in self.passes for use in uses)

    @cached_property
    def rows(self) -> int:
        """The number of pairs of an example and a position, without forming rows."""
        if isinstance(self.layer.module, layers.CONVOLUTIONS):
            rank = len(self.layer.module.kernel_size)
            return sum(layers.examples_in(use.module, use.error) * use.error.shape[-rank:].numel() for use in self.uses)
        return sum(use.error.numel() // use.error.shape[-1] for use in self.uses)

    @cached_property
    def indices(self) -> Tensor:
        """The indices of an Embedding's inputs, (rows,)."""
        return torch.cat([use.input.flatten() for use in self.uses])

    @cached_property
    def features(self) -> Tensor:
        """The inputs without the column of ones, (groups, rows, in)."""
        if self.layer.weight is None:
            return self.errors[..., :0]
        parts = [layers.inputs_of(use.module, use.input).flatten(1, 2) for use in self.uses]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    @cached_property
    def inputs(self) -> Tensor:
        """A: features, with a column of ones for the bias."""
        return _with_ones(self.features) if self.layer.bias is not None else self.features

    @cached_property
    def errors(self) -> Tensor:
        """E, (groups, rows, out); for an Embedding (1, rows, features)."""
        parts = [self._errors(use) for use in self.uses]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _errors(self, use: LayerCall) -> Tensor:
        if isinstance(use.module, nn.Embedding):
            return layers.lookups_of(use.module, use.input, use.error)[1].flatten(0, 1)[None]
        return layers.errors_of(use.module, use.error).flatten(1, 2)

    def with_errors(self, errors: Tensor) -> LayerStatistics:
        """A copy with other errors, in the shape of `errors`."""
        other = LayerStatistics(self.layer, self.passes)
        other.__dict__ |= {**self.__dict__, "errors": errors}
        return other

    def is_finite(self) -> Tensor:
        """Whether inputs, errors and their squares are finite, as a tensor."""
        rows = [self.errors] if self.layer.lookup else [self.inputs, self.errors]
        return torch.stack([torch.linalg.vector_norm(part) for part in rows]).isfinite().all()

    # --- moments ---

    def moments(
        self, sides: Sequence[str] = ("input", "error"), *, losses_per_example: float = 1, sharing: str = "expand"
    ) -> dict[str, Moment]:
        """A ("input") and E ("error"), as sums that are not formed yet."""
        if sharing == "reduce" and not self.layer.lookup:
            inputs, errors = self._reduced()
            rows, pairs = {"input": inputs, "error": errors}, errors.shape[1]
        else:
            read = {"input": "indices" if self.layer.lookup else "inputs", "error": "errors"}
            rows, pairs = {side: getattr(self, read[side]) for side in sides}, self.rows
        counts = {"input": self.examples * losses_per_example, "error": pairs}
        return {side: Moment(rows[side], counts[side], self.layer.sizes[side]) for side in sides}

    def _reduced(self) -> tuple[Tensor, Tensor]:
        """One row for each example: the mean of inputs and the sum of errors over its positions."""
        inputs, errors = [], []
        for uses in self.passes:
            if len({layers.examples_in(use.module, use.input) for use in uses}) > 1:
                raise ValueError(
                    f"layer {self.layer.names[0]!r} was called with different numbers of examples in one pass: "
                    "sharing='reduce' needs the same number in all calls, use 'expand'."
                )
            a = torch.cat([layers.inputs_of(use.module, use.input) for use in uses], 2).mean(2)
            e = torch.cat([layers.errors_of(use.module, use.error) for use in uses], 2).sum(2)
            a = a if self.layer.weight is not None else a[..., :0]
            inputs.append(_with_ones(a) if self.layer.bias is not None else a)
            errors.append(e)
        return torch.cat(inputs, 1), torch.cat(errors, 1)


def _with_ones(rows: Tensor) -> Tensor:
    """Rows with a one appended to each, for the bias."""
    wider = rows.new_empty(*rows.shape[:-1], rows.shape[-1] + 1)
    wider[..., :-1] = rows
    wider[..., -1] = 1
    return wider


@dataclass(frozen=True, eq=False)
class Moment:
    """Σ r r' / count over some rows r, in each group.

    Args:
        rows: (groups, n, size), or indices (n,) of one-hot rows.
        count: what the sum is divided by.
        size: of one-hot rows.
    """

    rows: Tensor
    count: float
    size: int = 0

    @property
    def weight(self) -> float:
        return 1 / self.count

    def mean(self) -> Tensor:
        """The moment as a matrix (groups, size, size), with both triangles."""
        return self.weight * self.rows.mT @ self.rows

    def sum(self) -> Tensor:
        """Σ r r', (groups, size, size), with both triangles; of one-hot rows the diagonal (1, size), as integers."""
        if self.rows.is_floating_point():
            return self.rows.mT @ self.rows
        return torch.bincount(self.rows, minlength=self.size)[None]

    def into(self, factor: Tensor, keep: float, take: float) -> None:
        """factor <- keep * factor + take * moment, in place and in one pass; only the diagonal if that is one.

        Only the lower triangle of the result is valid: use `symmetric` to fill the upper one.
        """
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
