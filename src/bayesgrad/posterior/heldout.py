r"""The log-density of held-out labels, for many priors at the cost of a few linearised predictions.

The variance of an output under the linearised network is a sum over blocks of weights with one prior precision δ each,

.. math::
    \frac{T}{s} F\left(\frac{\delta}{s}\right), \quad F(r) = \sum_k \frac{w_k}{h_k + r}

with the eigenvalues h of the block's Hessian, the squares w of the output's gradient in its eigenbasis, temperature T
and a power s of the noise. As a function of log r, F has no singularity within π of the real line, whatever the
eigenvalues. Between the NEAR nearest values of a table with steps of STEP, Lagrange's interpolation therefore has a
relative error below 1e-9. One pass over the examples fills the table for r within a factor of exp(REACH) of its centre.

Checked by: tests/equations/test_tuning.py, against predictions with each prior.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bayesgrad.belief import Belief
from bayesgrad.layers.batches import ProgressLine
from bayesgrad.layers.fisher import sum_terms
from bayesgrad.layers.network import Network
from bayesgrad.layers.output_covariance import BlockCovariance, Jacobian, Sides, of_lookups, output_covariance
from bayesgrad.layers.per_example import CHUNK, EmbeddingGradients, matmul, outer_sums
from bayesgrad.likelihoods import Likelihood
from bayesgrad.structures.structure import Structure

STEP, NEAR, REACH = 0.25, 16, 8.0
NUMBERS = 1 << 27  # of a table, and of the variances of weights that it is computed from, in memory at most
EXAMPLES = 64  # between two updates of the progress line
OFFSETS = [STEP * k - REACH - STEP * NEAR / 2 for k in range(round(2 * REACH / STEP) + NEAR + 1)]  # of log r in a table


@dataclass(frozen=True, eq=False)
class BlockTable:
    """The variances of outputs for precisions of one block of weights that have the same eigenvectors.

    Args:
        block: with any of these precisions.
        variances: of weights in the eigenbasis, (precisions, *shape of the block).
    """

    block: BlockCovariance
    variances: Tensor

    def values(self, jacobian: Jacobian, count: int) -> Tensor:
        """(examples, outputs, precisions)."""
        form, columns = self.block.form, [jacobian[name] for name in self.block.names]
        assert form is not None
        if not self.block.has_factors(jacobian, count):
            written = self.block.rows(jacobian, count, slice(0, count))  # (examples, outputs, *shape)
            written = written if form.rows is None else form.rows.mT @ written
            written = written if form.columns is None else written @ form.columns
            return written.square().flatten(2) @ self.variances.flatten(1).T.to(written)
        if isinstance(table := columns[0], EmbeddingGradients):
            each = (replace(form, variance=variance, scale=1.0) for variance in self.variances)
            return torch.stack([of_lookups(table, table, one, joint=False) for one in each], -1)
        sides = Sides.of(columns)
        groups, _, outputs, positions, fan_out = sides.errors.shape
        fan_in = sides.inputs.shape[-1]
        rows, basis, _ = form.like(sides.errors, (groups, fan_out, fan_in))
        sides = sides.rotated(rows, basis)
        variances = self.variances.to(sides.errors).reshape(-1, groups, fan_out, fan_in).transpose(0, 1)
        size = groups * fan_out * (len(self.variances) if positions == 1 else outputs * fan_in)
        step = max(1, CHUNK // size)
        parts = (sides.part(slice(start, start + step)) for start in range(0, count, step))
        return torch.cat([(_at_one_position if positions == 1 else _at_several)(part, variances) for part in parts])


def _at_one_position(sides: Sides, variances: Tensor) -> Tensor:
    """From squares of inputs, which all outputs share; variances are (groups, precisions, out, in)."""
    inputs, errors = sides.inputs[:, :, 0].square(), sides.errors[:, :, :, 0].square()
    spread = matmul(inputs, variances.flatten(1, 2).mT).unflatten(2, variances.shape[1:3])
    return (errors @ spread.mT).sum(0)


def _at_several(sides: Sides, variances: Tensor) -> Tensor:
    """From squares of gradients."""
    M = outer_sums(sides.errors.flatten(1, 2), sides.inputs)  # (groups, examples outputs, out, in)
    return matmul(M.square().flatten(2), variances.flatten(2).mT).unflatten(1, sides.errors.shape[1:3]).sum(0)


@dataclass(frozen=True, eq=False)
class GridCovariance:
    """F of each group of blocks, as an `OutputCovariance`: variances are (examples, outputs, groups, precisions)."""

    groups: Sequence[Sequence[BlockTable]]

    def covariance(self, one: Jacobian, other: Jacobian, count: int, joint: bool) -> Tensor:
        assert one is other
        assert not joint
        return torch.stack([sum_terms(block.values(one, count) for block in blocks) for blocks in self.groups], 2)

    def workspace(self, jacobian: Jacobian, count: int) -> int:
        written = [block.block.workspace(jacobian, count) for blocks in self.groups for block in blocks]
        return len(self.groups) * len(OFFSETS) + sum(written)


class VarianceTable:
    """Outputs of held-out inputs and their variances, for one prior precision of each group of blocks.

    Args:
        groups: the Hessians of each group, with beliefs of any precision.
        batches: for each batch model and inputs, and labels.
        mean: the weights at which the model is linearised.
        progress: see `ProgressLine`.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[tuple[Structure, Belief]]],
        batches: Sequence[tuple[Network, Tensor]],
        mean: Mapping[str, Tensor],
        progress: bool | None,
    ) -> None:
        self.groups, self.batches, self.mean, self.progress = groups, batches, mean, progress
        self.outputs = [network(mean) for network, _ in batches]
        self.centres: list[float] = []
        self.tables: list[Tensor] = []

    def fits(self) -> bool:
        """Whether variances of all blocks can be tabulated, within NUMBERS."""
        weights = sum(hessian.size for blocks in self.groups for hessian, _ in blocks)
        numbers = max(weights, len(self.groups) * sum(outputs.numel() for outputs in self.outputs))
        if numbers * len(OFFSETS) > NUMBERS:
            return False
        return all(_block_table(*block, [1.0, 2.0]) is not None for blocks in self.groups for block in blocks)

    def log_density(self, reading: Likelihood, ratios: Sequence[float], factor: float) -> tuple[float, int]:
        """The log-density of all labels, and the number of examples.

        Args:
            ratios: δ/s of each group.
            factor: T/s.
        """
        if not self.centres or any(abs(math.log(r / c)) > REACH for r, c in zip(ratios, self.centres)):
            self._fill(ratios)
        total = 0.0
        for outputs, table, (_, labels) in zip(self.outputs, self.tables, self.batches):
            F = sum_terms(_at(table[:, :, g], c, r) for g, (c, r) in enumerate(zip(self.centres, ratios)))
            variance = (factor * F).to(outputs).view_as(outputs).clamp(min=0)
            total += float(reading.log_density(outputs, variance, labels).double().sum())
        return total, sum(map(len, self.outputs))

    def _fill(self, ratios: Sequence[float]) -> None:
        blocks = [
            [_block_table(*block, [ratio * math.exp(offset) for offset in OFFSETS]) for block in group]
            for group, ratio in zip(self.groups, ratios)
        ]
        part = GridCovariance([[block for block in group if block is not None] for group in blocks])
        line, done, self.tables = ProgressLine(self.progress, sum(map(len, self.outputs))), 0, []
        for network, _ in self.batches:
            found = []
            for inputs in zip(*(x.split(EXAMPLES) for x in network.inputs)):
                found.append(output_covariance(replace(network, inputs=inputs), self.mean, [part], joint=False))
                done += len(inputs[0])
                line.update(done, None)
            self.tables.append(torch.cat(found))
        line.close()
        self.centres = list(ratios)


def _block_table(hessian: Structure, belief: Belief, ratios: Sequence[float]) -> BlockTable | None:
    """For the precisions H + r; None if they have no common eigenvectors that are known."""
    priors = [dict.fromkeys(hessian.shapes, ratio) for ratio in ratios]
    block = hessian.output_covariance(belief, priors[0], 1.0)
    if not isinstance(block, BlockCovariance) or block.form is None:
        return None
    variances: list[Tensor] = []
    for prior in priors:
        form = hessian.precision(prior, 1.0).bilinear_form()
        if form is None or form.variance is None or not form.both:
            return None
        if form.rows is not block.form.rows or form.columns is not block.form.columns:
            return None
        variances.append(form.variance * form.scale)
    return BlockTable(block, torch.stack(variances))


def _at(table: Tensor, centre: float, ratio: float) -> Tensor:
    """F(r) from values (examples, outputs, precisions) around a centre."""
    place = (math.log(ratio / centre) - OFFSETS[0]) / STEP
    first = min(max(math.floor(place) - NEAR // 2 + 1, 0), len(OFFSETS) - NEAR)
    t = place - first
    weights = [math.prod((t - j) / (k - j) for j in range(NEAR) if j != k) for k in range(NEAR)]
    return table[..., first : first + NEAR] @ table.new_tensor(weights)
