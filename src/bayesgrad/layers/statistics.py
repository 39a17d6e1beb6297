"""Second moments of a layer's inputs and errors: the factors of a Kronecker-factored precision."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from bayesgrad import layers
from bayesgrad.distributed import Exchange, Sum
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.call import CallKey, LayerCall, loss_id
from bayesgrad.layers.layout import MIXED
from bayesgrad.layers.modules import Layer
from bayesgrad.layers.moments import Moment, has_finite_square, joined, norm
from bayesgrad.layers.operations import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS
from bayesgrad.layers.pass_losses import PassLosses
from bayesgrad.layers.per_example import CHUNK, EmbeddingGradients, OuterProducts

SIDES = ("input", "error")
ROWS_OF_SIZE, LINES = 4, 16  # with `stats_rows`: rows at least, in sizes of the moment; lines of a convolution
SPLIT = (
    "the loss of one forward pass was differentiated in several backward passes, with another pass of layer {!r} in "
    "between, so that the errors of an example are not known: call backward() once, on the sum of its terms."
)


class LayerStatistics:
    r"""What one layer received in some passes: the second moments of its inputs and errors.

    .. math::
        A = \frac1L \sum_r a_r a_r^T, \quad E = \frac1R \sum_r e_r e_r^T

    A row r is a pair of an example and a position: a place of a convolution, an element of a sequence, or one of
    several calls of the layer in a pass. Rows may be in any order and layout (batch first, sequence first, flattened,
    windows), so L does not depend on them. L is the number of losses of the passes, whose mean is differentiated. It
    follows from the model's outputs: an example is one index of their first dimension, and has one loss, or one for
    each position if the outputs have more than two dimensions (see `layers.layout.ForwardPass`). So outputs (N, T, C)
    and flattened outputs (N T, C) have the same L, A and E. R is the number of rows, but for lookups of padding; if
    only a part of the losses was observed (masked labels, some of the outputs), it is multiplied by that part. For the
    bias, a one is appended to each input. The input of an Embedding is a one-hot vector, stored as its index. An exact
    Fisher sums ee' over several directions of the model's outputs, which have the same inputs: see `from_gradients`.

    A contains no derivatives: it is the Gram matrix of the least-squares problem of moving a layer's outputs along
    their gradients. A ⊗ E approximates the Fisher information of the layer's weights.

    With `sharing="reduce"`, inputs are averaged and errors summed over the positions of an example first: A is the sum
    of aa' over examples, divided by L, and E the mean of ee' over examples. Both are exact for one example at one
    position.

    The moments are summed as calls arrive (`add`). Rows of inputs and errors are not stored, unless `keep` asks for it.
    With `stats_rows`, the moments of a call are formed of every k-th row, or for convolutions of every k-th line: the
    rows of an example at one place of the first dimension. Their number is not divisible by any divisor of k, so that
    all positions of sequences and images, and frames of clips, take part alike. Each row counts as the rows of the call
    over those that were taken: calls of other sizes have another k.

    Args:
        layer: the layer.
        sides: "input" for A, "error" for E.
        sharing: "expand" or "reduce".
        diagonal: the sides of which only the diagonal is formed.
        keep: whether `inputs` and `errors` are used, which need all calls.
        stats_rows: the rows of a call that are enough, but at least four times the size of the moment, and sixteen
            lines of a convolution; `inf` for all. All rows are used if they are stored.

    Reference: Benzing 2021, section 2.2 and Eq. 1-4; Eschenhagen et al., 2023, for expand and reduce.
    Differs from the paper: means instead of sums; E is averaged over positions.
    Checked by: tests/algebra/test_statistics.py, tests/equations/test_foof.py, tests/equations/test_kfac.py, and
    against curvlinops.
    """

    def __init__(
        self,
        layer: Layer,
        sides: Sequence[str] = SIDES,
        *,
        sharing: str = "expand",
        diagonal: Sequence[str] = (),
        keep: bool = False,
        stats_rows: float = math.inf,
    ) -> None:
        self.layer, self.sides, self.diagonal, self.stats_rows = layer, sides, diagonal, stats_rows
        self.reduces = sharing == "reduce" and not layer.lookup
        self.keeps = keep or self.reduces
        self.calls: list[LayerCall] = []
        self.rows = 0  # pairs of an example and a position
        self.observed = 0.0  # those that belong to observed losses
        self._losses: dict[tuple[int, int], float] = {}
        self._others = 0.0  # losses of passes in which the layer was not called
        self._added: set[CallKey] = set()
        self._lost = False  # whether an error came too late to be added to another one
        self._shared = False  # whether moments are those of all processes
        self._moments = {side: self._moment(side, side == "input" and self._has_ones) for side in sides}

    def _moment(self, side: str, ones: bool) -> Moment:
        return Moment(self.layer.sizes[side], ones, side in self.diagonal)

    @property
    def _has_ones(self) -> bool:
        return self.layer.bias is not None and not self.layer.lookup

    @property
    def losses(self) -> float:
        return sum(self._losses.values()) + self._others

    def count_others(self, losses: PassLosses) -> None:
        """Counts the losses of other passes too, unless its own are those of all processes."""
        if not self._shared:
            self._others = losses.beside(set(map(loss_id, self._losses)))

    @classmethod
    def of(
        cls, layer: Layer, calls: Iterable[LayerCall], losses: float | None = None, **options: object
    ) -> LayerStatistics:
        made = cls(layer, **options)  # pyright: ignore[reportArgumentType]
        for call in calls:
            made.add(call, losses)
        return made

    @classmethod
    def from_gradients(
        cls, layer: Layer, gradients: OuterProducts | EmbeddingGradients, examples: int, sides: Sequence[str] = SIDES
    ) -> LayerStatistics:
        """From the per-example gradients of the layer's weight.

        Args:
            gradients: those of several directions of an example are consecutive.
            examples: the number of examples, of which these are the first directions; 0 for further directions of
                examples that were counted before.
            sides: as in the constructor.
        """
        made = cls(layer, sides)
        made._losses[0, 0] = examples
        if isinstance(gradients, EmbeddingGradients):
            inputs, errors = gradients.indices[:examples].flatten(), gradients.errors.flatten(0, 1)[None]
            made.rows = len(inputs) - _padded(layer.module, inputs)
        else:
            inputs, errors = gradients.inputs, gradients.errors
            if layer.transposed:  # the inputs are repeated for each direction
                inputs, errors = errors[:, :: errors.shape[1] // max(1, examples)], inputs
            inputs, errors = inputs[:, :examples].flatten(1, 2), errors.flatten(1, 2)
            made.rows = inputs.shape[1]
        made.observed = made.rows
        for side, rows in zip(SIDES, (inputs, errors)):
            if side in sides:
                made._moments[side].add(rows)
        return made

    def add(self, call: LayerCall, losses: float | None = None, share: float = 1.0) -> None:
        """Adds one call of the layer; the errors of several terms of its loss are summed before they are squared.

        Args:
            losses: of the pass; None for one in each index of the first dimension of the layer's input.
            share: the part of them that was observed.
        """
        if call.key in self._added:
            self._add_error(call)
            return
        if call.key is not None:
            self._added.add(call.key)
        losses = layers.examples_in(call.module, call.input) if losses is None else losses
        self._losses[call.pass_id] = max(self._losses.get(call.pass_id, 0), losses)
        rows = layers.rows_in(call.module, call.error) - _padded(call.module, call.input)
        self.rows, self.observed = self.rows + rows, self.observed + share * rows
        waits = "error" in self.sides and call.key is not None  # another backward pass may follow
        if not self.keeps and self.calls and (not waits or self.calls[-1].pass_id != call.pass_id):
            self._absorb()
        if self.keeps or waits:
            self.calls.append(call.kept())
        else:
            self._add_moments(call)

    def _add_error(self, call: LayerCall) -> None:
        for index, other in enumerate(self.calls):
            if call.key == other.key:
                self.calls[index] = replace(other, error=other.error + call.error)
                return
        self._lost |= "error" in self.sides

    def _absorb(self) -> None:
        """Adds the calls of the latest pass to the moments."""
        calls, self.calls = self.calls, []
        for call in calls:
            self._add_moments(call)

    def _complete(self) -> None:
        """Called when no further pass follows."""
        if self._lost:
            raise ValueError(SPLIT.format(self.layer.names[0]))
        if not self.keeps:
            self._absorb()

    def _add_moments(self, call: LayerCall) -> None:
        if "error" in self.sides:
            some, every, weight = self._part("error", call)
            self._moments["error"].add(_errors(some, every), weight)
        if "input" in self.sides and self.layer.lookup:
            self._moments["input"].add(call.input.flatten(), volatile=call.volatile)
        elif "input" in self.sides:
            call, every, weight = self._part("input", call)
            examples = layers.examples_in(call.module, call.input)
            # The inputs of a convolution are many times its activations, so they are formed in parts.
            size = self.layer.sizes["input"] * layers.rows_in(call.module, call.error) // examples
            batched = call.input if examples == len(call.input) else call.input[None]
            parts = batched.split(max(1, CHUNK // size)) if call.input.dim() > 2 and every == 1 else [call.input]
            for part in parts:
                self._moments["input"].add(self._features(call.module, part, every), weight, call.volatile)

    def _part(self, side: str, call: LayerCall) -> tuple[LayerCall, int, float]:
        """Rows of a call, of which to take every k-th line if it is a convolution; and how many each row counts as."""
        lines, rows = layers.lines_in(call.module, call.error), layers.rows_in(call.module, call.error)
        every = int(rows // max(self.stats_rows, ROWS_OF_SIZE * self.layer.sizes[side]))
        every = max(1, every if lines == rows else min(every, lines // LINES))
        while math.gcd(every, lines) > 1:
            every -= 1  # so that all positions, or frames of clips, take part alike; not fewer rows than promised
        if every == 1:
            return call, 1, 1.0
        weight = lines / -(-lines // every)
        if isinstance(call.module, (*CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS)):
            return call, every, weight
        x = call.input.flatten() if isinstance(call.module, nn.Embedding) else call.input.flatten(0, -2)
        return replace(call, input=x[::every], error=call.error.flatten(0, -2)[::every]), 1, weight

    def _features(self, module: nn.Module, x: Tensor, every: int = 1) -> Tensor:
        """Inputs without the column of ones, (groups, rows, in)."""
        rows = layers.input_rows(module, x, every)
        return rows if self.layer.weight is not None else rows[..., :0]

    # --- kept rows ---

    @cached_property
    def inputs(self) -> Tensor:
        """A: the inputs, with a column of ones for the bias, (groups, rows, in)."""
        rows = joined([self._features(call.module, call.input) for call in self.calls])
        return _with_ones(rows) if self._has_ones else rows

    @cached_property
    def indices(self) -> Tensor:
        """The inputs of an Embedding, (rows,)."""
        return torch.cat([call.input.flatten() for call in self.calls])

    @cached_property
    def errors(self) -> Tensor:
        """E, (groups, rows, out); for an Embedding (1, rows, features)."""
        return joined([_errors(call) for call in self.calls])

    # --- moments ---

    def is_finite(self) -> Tensor:
        """Whether all inputs and errors that are used are finite, and so are their squares, with a margin of 2^20."""
        self._complete()
        if not self.keeps:
            return torch.stack(
                [moment.is_finite().to(self.layer.owner.device) for moment in self._moments.values()]
            ).all()
        rows = [part for side in SIDES for part in self._kept(side)]
        return torch.stack([has_finite_square(norm(part)) for part in rows]).all()

    def _kept(self, side: str) -> list[Tensor]:
        """What is kept of inputs or errors, and may not be finite."""
        if self._shared:
            return [getattr(self, f"{side}s")] if self.keeps and not (self.layer.lookup and side == "input") else []
        return [part for call in self.calls if (part := getattr(call, side)).is_floating_point()]

    def nonfinite_side(self) -> str | None:
        """Whether "inputs" or, if those are finite, "errors" are not finite, or their squares; None if all are."""
        for side in SIDES:
            flags = [norm(part).isfinite() for part in self._kept(side)]
            flags += [self._moments[side].is_finite()] if side in self._moments else []
            if not all(map(bool, flags)):
                return f"{side}s"
        return None

    def share(self, exchange: Exchange) -> None:
        """Adds what other processes have seen: to the moments, or to the rows if `keep` asks for them."""
        groups, owner = self.layer.shape[0], self.layer.owner
        like: dict[str, Any] = {"dtype": compute_dtype(owner.dtype), "device": owner.device}
        if self.keeps and not self.reduces:
            self._share_rows(exchange, like)
        else:
            self._moments = self.moments() if self.rows else self._moments
            for side, moment in self._moments.items():
                moment.count = moment.count if self.rows else self.losses if side == "input" else 0.0
                moment.share(exchange, groups, like)
            self.keeps = False
        self.calls, self._shared = [], True

    def _share_rows(self, exchange: Exchange, like: dict[str, Any]) -> None:
        names = ("indices" if self.layer.lookup else "inputs", "errors")
        for side, name in zip(SIDES, names):
            if self.calls:
                rows = getattr(self, name)
            else:
                rows = torch.zeros(self.layer.shape[0], 0, self.layer.sizes[side], **like)
                rows = rows[0, :, 0].long() if name == "indices" else rows
            rows = rows.to(**like) if rows.is_floating_point() else rows
            receive = partial(self._receive_rows, name, 1 if rows.is_floating_point() else 0)
            exchange.gather(rows, receive)
        exchange.add(Sum(torch.tensor([self.losses, self.observed, self.rows], **like)), self._receive_counts)

    def _receive_rows(self, name: str, dim: int, parts: list[Tensor]) -> None:
        setattr(self, name, torch.cat(parts, dim))

    def _receive_counts(self, found: Sum) -> None:
        losses, self.observed, rows = found.total.tolist()
        self.rows, self._losses, self._others = round(rows), {(0, 0): losses}, 0.0

    @property
    def empty(self) -> bool:
        """Whether no process has seen anything, once it is shared."""
        if self.keeps:
            return not self.rows
        # Processes count the losses of layers that they have not called, which have no errors, and zeros for inputs.
        known = sorted(self._moments.items())
        return not any(m.count if side == "error" else m.total is not None and bool(m.total.any()) for side, m in known)

    def moments(self) -> dict[str, Moment]:
        """A ("input") and E ("error"), as sums that are divided by their counts later."""
        if self._shared:
            return self._moments
        self._complete()
        moments, pairs = self._moments, self.observed
        if self.keeps:
            if self.reduces:
                rows = dict(zip(SIDES, self._reduced()))
                pairs = rows["error"].shape[1] * self.observed / self.rows
            else:
                rows = {"input": self.indices if self.layer.lookup else self.inputs, "error": self.errors}
            moments = {side: self._moment(side, False) for side in self.sides}
            for side, moment in moments.items():
                moment.add(rows[side])  # pyright: ignore[reportArgumentType]
        for side, moment in moments.items():
            moment.count = pairs if side == "error" else self.losses
        return moments

    def _reduced(self) -> tuple[Tensor, Tensor]:
        """One row for each example: the mean of inputs and the sum of errors over its positions."""
        inputs, errors = [], []
        for key in self._losses:
            calls = [call for call in self.calls if call.pass_id == key]
            if len({_examples(call) for call in calls}) > 1 or any(call.layout == MIXED for call in calls):
                raise ValueError(
                    f"layer {self.layer.names[0]!r} was called with rows that do not belong to one example each, or "
                    "with different numbers of examples in one pass: use sharing='expand'."
                )
            a = torch.cat([layers.inputs_of(call.module, call.input, call.layout) for call in calls], 2).mean(2)
            e = torch.cat([layers.errors_of(call.module, call.error, call.layout) for call in calls], 2).sum(2)
            a = a if self.layer.weight is not None else a[..., :0]
            inputs.append(_with_ones(a) if self._has_ones else a)
            errors.append(e)
        return torch.cat(inputs, 1), torch.cat(errors, 1)


def _examples(call: LayerCall) -> int:
    return layers.examples_in(call.module, call.input) if call.layout is None else call.layout.examples


def _padded(module: nn.Module, x: Tensor) -> int:
    """The number of lookups of padding, which have no error."""
    padding = getattr(module, "padding_idx", None)
    return 0 if padding is None else int((x == padding).sum())


def _errors(call: LayerCall, every: int = 1) -> Tensor:
    if isinstance(call.module, nn.Embedding):
        return layers.lookups_of(call.module, call.input, call.error)[1].flatten(0, 1)[None]
    return layers.error_rows(call.module, call.error, every)


def _with_ones(rows: Tensor) -> Tensor:
    """Rows with a one appended to each, for the bias."""
    wider = rows.new_empty(*rows.shape[:-1], rows.shape[-1] + 1)
    wider[..., :-1] = rows
    wider[..., -1] = 1
    return wider
