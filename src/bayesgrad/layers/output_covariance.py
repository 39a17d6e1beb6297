"""The covariance of the outputs of a linearised network, J S J', for weights of covariance S.

A row of the Jacobian J of an example is the gradient of one output. For a layer it is the sum over positions t of
e_ct a_t', with inputs a that all outputs c share. Inputs and errors are rotated such that S is diagonal, with variances
v. An entry of the covariance is then

    sum_oi v_oi M_coi M_doi,  M_c = sum_t e_ct a_t'

which is computed from M, or from products of positions, sum_tso e_cto e_dso K_tso with K_tso = sum_i v_oi a_ti a_si,
whichever takes fewer operations. The latter needs no M. At a single position it costs no more than a forward pass.

Examples and outputs are processed in blocks. In memory are at once the errors of two blocks of outputs at most (BLOCK
elements each, or those of one output of one example), the activations of their examples, a few temporary tensors of
CHUNK elements, and the result: beside the result, less than 8 BLOCK elements (tests/contract/test_memory.py). Nothing
has the size of examples x outputs x weights.

Checked by: tests/equations/test_output_covariance.py, against dense Jacobians by torch.func.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesgrad.belief import Belief, Joint
from bayesgrad.layers.examples import RowLayouts
from bayesgrad.layers.fisher import BatchGradients, directional_gradients, sum_terms
from bayesgrad.layers.network import Network, matching_parameters, requires_grad_only, temporary_weights
from bayesgrad.layers.per_example import (
    CHUNK,
    EmbeddingGradients,
    OuterProducts,
    PerExampleGradients,
    StoredGradients,
    matmul,
    outer_sums,
)
from bayesgrad.precision import LowRank, Rescaled
from bayesgrad.precision.algebra import BilinearForm

BLOCK = 1 << 24  # elements of the errors of one block of outputs
BATCH = 32  # of fewer examples, copies go through the model, for several outputs in one backward pass
Jacobian = Mapping[str, PerExampleGradients]  # rows of Jacobians by parameter: a direction is an output


class OutputCovariance(Protocol):
    """J S J' for some weights that are independent of all others: covariances of several of these add up."""

    def covariance(self, one: Jacobian, other: Jacobian, count: int, joint: bool) -> Tensor:
        """The covariance of two blocks of outputs of each example.

        Args:
            one, other: rows of Jacobians, for the same examples.
            count: the number of examples.
            joint: False for the variances alone, of a block with itself.

        Returns:
            (examples, outputs, outputs), or (examples, outputs).
        """
        ...

    def workspace(self, jacobian: Jacobian, count: int) -> int:
        """The number of elements that it writes for each row, given some rows of so many examples."""
        ...


def output_covariance(
    network: Network, mean: Mapping[str, Tensor], parts: Sequence[OutputCovariance], joint: bool
) -> Tensor:
    """J S J' of each example, (examples, outputs, outputs), or its diagonal (examples, outputs).

    Args:
        network: model and inputs; there is at least one example.
        mean: the weights by name at which the model is linearised. Other parameters are fixed.
        parts: of S.
        joint: whether to compute covariances, or variances alone.
    """
    model = network.model
    parameters = matching_parameters(model, {name: w.shape for name, w in mean.items()}, "posterior")
    estimated = network.estimated_statistics(mean)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in estimated}
    with (
        torch.inference_mode(False),  # in which there are no backward passes
        temporary_weights({**parameters, **buffers}, {**mean, **estimated}),
        requires_grad_only(model, parameters),
    ):
        inputs = tuple(x.clone() if x.is_inference() else x for x in network.inputs)
        probe = tuple(x[:2] for x in inputs)
        with closing(Rows(model, 2).blocks(probe, 0)) as blocks:
            first = next(blocks)
        examples, width = len(first.outputs), first.outputs[0].numel()
        shared, each = _sizes(first.columns, examples, min(2, width))
        each += sum(part.workspace(first.columns, examples) for part in parts)
        count = max(1, CHUNK // (shared + width * each))
        at_once = width if count > 1 else max(1, min(width, BLOCK // each))
        number = len(inputs[0])
        count = min(count, network.chunk or count)
        count = math.ceil(number / math.ceil(number / count))  # equal parts, whose layers are tested once
        batch = min(BATCH, CHUNK // each, network.chunk or BATCH)
        rows = Rows(model, at_once, max(1, min(at_once, batch // count)))
        total: Tensor | None = None
        for start in range(0, number, count):
            part = _covariance(rows, tuple(x[start : start + count] for x in inputs), width, parts, joint)
            total = part.new_empty(number, *part.shape[1:]) if total is None else total
            total[start : start + count] = part
    assert total is not None
    return total


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of Jacobians: the gradients of outputs.

    Args:
        model: at the weights at which it is linearised.
        at_once: the number of outputs of a block.
        copies: of each example, for a backward pass of so many outputs.
        layouts: as in `batch_gradients`.
    """

    model: nn.Module
    at_once: int
    copies: int = 1
    layouts: RowLayouts = field(default_factory=RowLayouts)

    def blocks(self, examples: tuple[Tensor, ...], start: int) -> Generator[BatchGradients, None, None]:
        """The gradients of each block of outputs, from output `start` on."""

        def directions(outputs: Tensor) -> Iterator[Tensor]:
            for k in range(start, outputs[0].numel()):
                direction = torch.zeros_like(outputs)
                direction.view(len(outputs), -1)[:, k] = 1
                yield direction

        return directional_gradients(self.model, examples, directions, self.at_once, self.layouts, copies=self.copies)


def _sizes(jacobian: Jacobian, count: int, outputs: int) -> tuple[int, int]:
    """The number of elements of inputs for each example, and of errors or gradients for each row."""
    shared = sum(own.inputs.numel() for own in jacobian.values() if _shares_inputs(own, count))  # pyright: ignore
    total = sum(t.numel() for own in jacobian.values() for t in own.tensors().values())
    return shared // count, max(1, (total - shared) // (count * outputs))


def _shares_inputs(columns: PerExampleGradients, count: int) -> bool:
    """Whether the outputs of an example have the same inputs; those of a table that is also a head do not."""
    return isinstance(columns, OuterProducts) and columns.inputs.shape[1] == count


def _covariance(
    rows: Rows, examples: tuple[Tensor, ...], width: int, parts: Sequence[OutputCovariance], joint: bool
) -> Tensor:
    """The covariance of some examples, by blocks of outputs. A pair of blocks needs another pass for the second."""
    count, at_once = len(examples[0]), rows.at_once
    found: list[list[Tensor]] = []
    with closing(rows.blocks(examples, 0)) as blocks:
        for start, one in zip(range(0, width, at_once), blocks):
            found.append([_sum(parts, one, one, count, joint)])
            if joint and start + at_once < width:
                with closing(rows.blocks(examples, start + at_once)) as others:
                    found[-1] += [_sum(parts, one, other, count, joint) for other in others]
    if not joint:
        return torch.cat([row[0] for row in found], 1)
    total = found[0][0].new_empty(count, width, width)
    for i, row in enumerate(found):
        for j, block in enumerate(row, i):
            a, b = (slice(k * at_once, (k + 1) * at_once) for k in (i, j))
            total[:, a, b] = block
            if j > i:
                total[:, b, a] = block.mT
    return total


def _sum(
    parts: Sequence[OutputCovariance], one: BatchGradients, other: BatchGradients, count: int, joint: bool
) -> Tensor:
    return sum_terms(part.covariance(one.columns, other.columns, count, joint) for part in parts)


# --- covariances ---


@dataclass(frozen=True, eq=False)
class BlockCovariance:
    """J S J' for the covariance S of one block of weights.

    Args:
        name: of the parameter, unless the belief is joint.
        belief: whose precision is S^-1.
    """

    name: str
    belief: Belief

    @property
    def names(self) -> list[str]:
        return list(self.belief.shapes) if isinstance(self.belief, Joint) else [self.name]

    @cached_property
    def form(self) -> BilinearForm | None:
        return self.belief.precision.bilinear_form()

    def has_factors(self, jacobian: Jacobian, count: int) -> bool:
        """Whether inputs and errors suffice, and no rows need be written."""
        weight, *bias = (jacobian[name] for name in self.names)
        if self.form is None or any(not isinstance(part, StoredGradients) for part in bias) or len(bias) > 1:
            return False
        if isinstance(weight, EmbeddingGradients):
            return not bias and self.form.rows is None
        if isinstance(self.belief, Joint) and self.belief.turned:  # what is written as inputs are errors
            return False
        return _shares_inputs(weight, count)

    def workspace(self, jacobian: Jacobian, count: int) -> int:
        return 0 if self.has_factors(jacobian, count) else self.belief.mean.numel()

    def covariance(self, one: Jacobian, other: Jacobian, count: int, joint: bool) -> Tensor:
        if self.form is None or not self.has_factors(one, count):
            return self._from_rows(one, other, count, joint)
        first, second = ([jacobian[name] for name in self.names] for jacobian in (one, other))
        if isinstance(first[0], EmbeddingGradients):
            return of_lookups(first[0], second[0], self.form, joint)  # pyright: ignore[reportArgumentType]
        sides = Sides.of(first)
        return _of_layers(sides, sides if other is one else Sides.of(second), self.form, joint)

    def _from_rows(self, one: Jacobian, other: Jacobian, count: int, joint: bool) -> Tensor:
        precision, found = self.belief.precision, []
        step = max(1, CHUNK // max(1, self.belief.mean.numel() * (one[self.names[0]].count // count)))
        for start in range(0, count, step):
            chosen = slice(start, min(start + step, count))
            left = self.rows(one, count, chosen)
            right = left if other is one else self.rows(other, count, chosen)
            if isinstance(precision, LowRank | Rescaled):
                solved = torch.stack([precision.solve(row) for row in left.flatten(0, 1)])
            else:
                solved = precision.solve(left.flatten(0, 1))
            found.append(_inner(solved.view(*left.shape[:2], -1), right.reshape(*right.shape[:2], -1), joint))
        return torch.cat(found)

    def rows(self, jacobian: Jacobian, count: int, chosen: slice) -> Tensor:
        """(examples, outputs, *shape of the block)."""
        written = {name: jacobian[name].of_examples(count, chosen).rows() for name in self.names}
        rows = self.belief.join(written) if isinstance(self.belief, Joint) else written[self.name]
        return rows.unflatten(0, (chosen.stop - chosen.start, -1)).to(self.belief.mean)


@dataclass(frozen=True, eq=False)
class Sides:
    """What a layer received.

    Args:
        inputs: (groups, examples, positions, in).
        errors: (groups, examples, outputs, positions, out).
    """

    inputs: Tensor
    errors: Tensor

    @staticmethod
    def of(columns: Sequence[PerExampleGradients]) -> Sides:
        """From the gradients of a weight; a bias is one more column of inputs."""
        weight, *bias = columns
        assert isinstance(weight, OuterProducts)
        a, e = weight.inputs, weight.by_direction()
        if not bias:
            return Sides(a, e)
        sums = weight.errors.squeeze(2) if e.shape[3] == 1 else weight.errors.sum(2)
        slopes = bias[0].rows().reshape(sums.shape[1], len(e), -1).transpose(0, 1)
        if torch.equal(sums, slopes):
            return Sides(F.pad(a, (0, 1), value=1.0), e)
        a = F.pad(a, (0, 1, 0, 1))  # one more position, which is right whatever else reads the bias
        a[..., -1, -1] = 1.0
        return Sides(a, torch.cat([e, slopes.unflatten(1, e.shape[1:3])[:, :, :, None]], 3))

    def rotated(self, rows: Tensor | None, columns: Tensor | None) -> Sides:
        a, e = self.inputs, self.errors
        return Sides(a if columns is None else matmul(a, columns), e if rows is None else matmul(e, rows))

    def part(self, examples: slice) -> Sides:
        return Sides(self.inputs[:, examples], self.errors[:, examples])


def _of_layers(one: Sides, other: Sides, form: BilinearForm, joint: bool) -> Tensor:
    """From inputs and errors, by the algorithm that takes fewer operations for an example and group."""
    groups, count, outputs, positions, fan_out = one.errors.shape
    fan_in, others = one.inputs.shape[-1], other.errors.shape[2] if joint else 1
    rows, columns, variance = form.like(one.errors, (groups, fan_out, fan_in))
    written = outputs * fan_out * fan_in * (positions * (1 + (other is not one or not form.both)) + others)
    pairs = positions**2 * fan_in * (1 if variance is None else fan_out)
    paired = pairs + outputs * fan_out * (positions**2 + others * positions)
    late = written < paired and positions > fan_in and form.both  # then M is smaller than the errors, and is rotated
    first = one.rotated(None if late else rows, columns)
    second = first if other is one else other.rotated(None if late else rows, columns)
    second = second if form.both else other
    same = second is first
    found = []
    if written < paired:
        size = groups * outputs * fan_out * fan_in
    else:
        size = groups * positions * (positions * fan_in + outputs * fan_out)
    step = max(1, CHUNK // size)
    for start in range(0, count, step):
        some = first.part(slice(start, start + step))
        rest = some if same else second.part(slice(start, start + step))
        if written < paired:
            found.append(_by_sums(some, rest, variance, rows if late else None, joint))
        else:
            found.append(_by_positions(some, rest, variance, joint))
    return torch.cat(found).mul_(form.scale)


def _by_sums(one: Sides, other: Sides, variance: Tensor | None, rows: Tensor | None, joint: bool) -> Tensor:
    """From M, for so many rows of it at once as fit into CHUNK elements.

    Args:
        rows: by which M is yet to be multiplied.
    """
    groups, count, outputs, _, fan_out = one.errors.shape
    width = fan_out if rows is not None else max(1, CHUNK // (groups * count * outputs * one.inputs.shape[-1]))
    total: Tensor | None = None
    for start in range(0, fan_out, width):
        some = slice(start, start + width)
        M = _sums(one, some, rows)
        weighted = M if variance is None else M * (variance[:, some] if rows is None else variance.mT)[:, None, None]
        block = _inner(weighted.flatten(3), (M if other is one else _sums(other, some, rows)).flatten(3), joint).sum(0)
        total = block if total is None else total.add_(block)
    assert total is not None
    return total


def _sums(sides: Sides, some: slice, rows: Tensor | None) -> Tensor:
    """M, (groups, examples, outputs, out, in), or its transpose times `rows`."""
    errors = sides.errors[..., some]
    M = outer_sums(errors.flatten(1, 2), sides.inputs).unflatten(1, errors.shape[1:3])
    return M if rows is None else matmul(M.mT, rows)


def _by_positions(one: Sides, other: Sides, variance: Tensor | None, joint: bool) -> Tensor:
    """From products of positions."""
    if variance is None:
        return _through(one.inputs @ other.inputs.mT, one.errors, other.errors, joint)
    groups, count, positions, fan_in = other.inputs.shape
    moved: Tensor | None = None
    step = max(1, CHUNK // (groups * count * positions * (fan_in + one.errors.shape[-1])))
    for a, e in zip(one.inputs.split(step, 2), one.errors.split(step, 3)):
        products = a[:, :, :, None] * other.inputs[:, :, None]  # (groups, examples, positions, positions, in)
        K = matmul(products, variance.mT)
        part = e * K if positions == 1 == len(K[0, 0]) else torch.einsum("gntso,gncto->gncso", K, e)
        moved = part if moved is None else moved.add_(part)
    assert moved is not None
    return _inner(moved.flatten(3), other.errors.flatten(3), joint).sum(0)


def _through(K: Tensor, one: Tensor, other: Tensor, joint: bool) -> Tensor:
    """The sums over positions t and s of K_ts e_t'f_s, for K (groups, examples, positions, positions)."""
    if K.shape[2:] == (1, 1):
        moved = one * K[:, :, None]
    else:
        flat = one.transpose(2, 3).flatten(3)  # (groups, examples, positions, outputs out)
        moved = (K.mT @ flat).unflatten(3, (one.shape[2], -1)).transpose(2, 3)
    return _inner(moved.flatten(3), other.flatten(3), joint).sum(0)


def of_lookups(one: EmbeddingGradients, other: EmbeddingGradients, form: BilinearForm, joint: bool) -> Tensor:
    """Positions with the same row of the table add up before they are multiplied."""
    x, (size, features) = one.indices, one.shape
    _, columns, variance = form.like(one.errors, (1, size, features))
    same = (x[:, :, None] == x[:, None])[None].to(one.errors)
    e, f = (rows.errors.unflatten(0, (len(x), -1))[None] for rows in (one, other))
    if columns is not None:
        e, f = matmul(e, columns), matmul(f, columns) if form.both else f
    if variance is not None:
        e = e * variance[0][x][None, :, None]
    return _through(same, e, f, joint).mul_(form.scale)


def _inner(one: Tensor, other: Tensor, joint: bool) -> Tensor:
    """Inner products of rows (..., outputs, n): all pairs, or each row of one with that of the other."""
    return one @ other.mT if joint else torch.linalg.vecdot(one, other)
