"""Documents as counts of words, and their factor in latent Dirichlet allocation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_matrix, issparse
from torch import Tensor

from bayesgrad.families import Dirichlet, Parameters
from bayesgrad.inference import LatentVariableFactor, Node

CHUNK = 1 << 19  # size of an array that is processed repeatedly: it should fit into the cache
DENSE = 0.2  # fraction of nonzero counts above which dense arrays are used
EVERY = 3  # iterations between checks of convergence
RAMP = 3  # with `ramp_up`, evaluation n uses at most RAMP * n iterations
ROUNDS = (24, 48, 96, 192, 384)  # iterations after which the remaining documents are put into new chunks
TINY = torch.finfo(torch.float64).tiny
LOWEST = -350.0  # of logarithms: the product of two weights does not underflow


@dataclass(frozen=True)
class Counts:
    """Counts of words in documents, as a sparse matrix.

    Args:
        matrix: (D, V), without stored zeros and with sorted indices.
        device: of the computations.
    """

    matrix: csr_matrix
    device: torch.device | None = None

    @classmethod
    def read(cls, X: Any) -> Counts:
        """From a dense array or tensor, or a sparse matrix of SciPy or torch; not validated."""
        device = X.device if isinstance(X, Tensor) else None
        if isinstance(X, Tensor):
            X = X.detach().cpu().to_sparse_coo().coalesce()
            X = csr_matrix((X.values().numpy(), X.indices().numpy()), shape=tuple(X.shape))
        matrix = csr_matrix(X, dtype=np.float64, copy=issparse(X))
        matrix.sum_duplicates()
        matrix.eliminate_zeros()
        return cls(matrix, device)

    def __len__(self) -> int:
        return int(self.matrix.shape[0])  # pyright: ignore[reportOptionalSubscript]

    def __getitem__(self, rows: Any) -> Counts:
        return Counts(self.matrix[rows], self.device)

    @property
    def words(self) -> float:
        """The number of words in all documents."""
        return float(self.matrix.data.sum())


class DocumentsFactor(LatentVariableFactor):
    r"""Documents whose words come from topics β_k, each document with its own proportions θ_d ~ Dirichlet(alpha):

    .. math::
        \sum_d \max_{\gamma, \phi}\; \sum_w n_{dw} \sum_k \phi_{dwk} \left(E[\log\theta_{dk}] + E[\log\beta_{kw}]
        - \log\phi_{dwk}\right) - KL(\mathrm{Dir}(\gamma_d), \mathrm{Dir}(\alpha))

    over the concentrations gamma of the proportions and the topic probabilities φ of words, by coordinate ascent. Each
    evaluation begins at the same initial values: continuing from the last result needs fewer iterations but ends in
    worse maxima. So does convergence within documents while topics are still vague: the first evaluations use few
    iterations (`ramp_up`). A document keeps its last proportions if they give a higher bound than the new ones, so that
    the bound never decreases. Words count in order: there are no multinomial coefficients.

    Documents are sorted by length and processed in chunks, padded arrays that fit into the cache; documents that have
    not converged are put into new chunks. After some iterations, every third is followed by an extrapolation.

    Args:
        topics: a node of K Dirichlet plates over V words.
        prior: alpha.
        start: initial gamma, (D, K).
        max_iter: maximum number of iterations.
        tolerance: stop when the mean change of gamma_d is below this; 0 never stops, and does not extrapolate.
        ramp_up: whether evaluation n uses at most 3n iterations.

    Attributes:
        shares: gamma of the last evaluation, (D, K).
        bounds: of each document, (D,).

    Reference: Khan and Rue 2023, section 5.3; Blei, Ng and Jordan, 2003; Hoffman, Blei and Bach, 2010.
    Checked by: tests/equations/test_latent_dirichlet.py.
    """

    def __init__(
        self,
        topics: Node,
        counts: Counts,
        prior: float,
        start: Tensor,
        *,
        max_iter: int = 100,
        tolerance: float = 1e-3,
        ramp_up: bool = False,
        scale: float = 1.0,
    ) -> None:
        super().__init__(topics, scale=scale)
        self.prior, self.max_iter, self.tolerance = prior, max_iter, tolerance
        self.ramp_up, self.evaluations = ramp_up, 0
        self.start = start.to(topics.natural[0])
        self.shares, self.known = torch.empty_like(self.start), False
        self.bounds = self.start.new_zeros(len(start))
        matrix, device = counts.matrix, self.start.device
        present, places = np.unique(matrix.indices, return_inverse=True)
        self.size = int(topics.natural[0].shape[-1])
        self.present = torch.as_tensor(present, dtype=torch.int64, device=device)
        self.dense = matrix.nnz >= DENSE * len(present) * len(start)
        if self.dense:
            self.counts = torch.as_tensor(matrix[:, present].toarray(), device=device)  # (D, W)
        else:
            # One additional word with count zero fills the padding.
            self.places = torch.as_tensor(np.append(places, 0), device=device)
            self.counts = torch.as_tensor(np.append(matrix.data, 0.0), device=device)
        self.begins = torch.as_tensor(matrix.indptr[:-1].astype(np.int64), device=device)
        self.lengths = torch.as_tensor(np.diff(matrix.indptr).astype(np.int64), device=device)
        self.order = self.lengths.argsort(stable=True)

    def evaluate(self) -> tuple[Tensor, Mapping[Node, Parameters]]:
        (topics,) = self.nodes
        table, heights = self._table()
        gamma, sums = self.start.clone(), torch.zeros_like(table)
        rows, begin, max_iter = self.order, 0, self.max_iter
        self.evaluations += 1
        if self.ramp_up and self.tolerance:
            max_iter = min(max_iter, RAMP * self.evaluations)
        for end in [*[end for end in ROUNDS if end < max_iter and self.tolerance], max_iter]:
            span = range(begin + 1, end + 1)
            rows = torch.cat([self._iterate_chunk(table, gamma, part, span, max_iter) for part in self._chunks(rows)])
            if not len(rows):
                break
            begin = end
        for part in self._chunks(self.order):
            self._finish(table, heights, gamma[part], part, sums)
        self.known = True
        found = sums.mul_(table).mT
        if len(self.present) < self.size:
            found = torch.zeros_like(topics.natural[0]).index_copy_(1, self.present, found)
        return self.bounds.sum(), {topics: (found,)}

    def _iterate_chunk(self, table: Tensor, all_gamma: Tensor, rows: Tensor, iterations: range, last: int) -> Tensor:
        """Iterates on a chunk of documents and returns the rows of those that have not converged."""
        words, counts = self._padded(rows)  # (D, L), (D, 1, L)
        near = _table_rows(table, words)
        gamma = before = all_gamma[rows]
        moving = torch.ones_like(rows, dtype=torch.bool)
        for iteration in iterations:
            # The mixture of topics for each word; the scales of θ and of each word's β cancel in the ratio.
            weights = _weights(gamma)
            ratios = counts / (weights[:, None] @ near.mT)
            older, before, gamma = before, gamma, (weights * (ratios @ near)[:, 0]).add_(self.prior)
            if iteration % EVERY or not self.tolerance:
                continue
            change = gamma - before
            converged = moving & (change.abs().mean(1) < self.tolerance)
            moving = moving & ~converged
            done, left = converged.nonzero()[:, 0], moving.nonzero()[:, 0]
            if len(done):
                all_gamma[rows[done]] = gamma[done]
                if not len(left):
                    return left
            if 2 * EVERY <= iteration < last:
                gamma = _extrapolated(gamma, change, before - older).clamp_(min=self.prior)
            if len(left) < 0.75 * len(rows):
                rows, counts, gamma, before, moving = (part[left] for part in (rows, counts, gamma, before, moving))
                if words is not None:
                    near = near.index_select(0, left)
        all_gamma[rows[moving]] = gamma[moving]
        return rows[moving]

    def _finish(self, table: Tensor, heights: Tensor, gamma: Tensor, rows: Tensor, sums: Tensor) -> None:
        """Adds Σ_d n φ, without the factor from the table, to the sums, and stores the proportions and bounds."""
        words, counts = self._padded(rows)
        near, counts = _table_rows(table, words), counts[:, 0]
        heights = heights if words is None else heights[words]
        weights, mixed, bounds = self._mixtures_and_bounds(gamma, near, counts, heights)
        if self.known:
            old = self.shares[rows]
            found = self._mixtures_and_bounds(old, near, counts, heights)
            better = found[2] > bounds
            gamma = torch.where(better[:, None], old, gamma)
            weights, mixed = (torch.where(better[:, None], a, b) for a, b in zip(found[:2], (weights, mixed)))
            bounds = torch.maximum(found[2], bounds)
        self.shares[rows], self.bounds[rows] = gamma, bounds
        ratios = counts / mixed  # (D, L)
        if words is None:
            sums.addmm_(ratios.mT, weights)
        else:
            spread = ratios[..., None] * weights[:, None]
            sums.index_add_(0, words.view(-1), spread.view(-1, weights.shape[1]))

    def _mixtures_and_bounds(
        self, gamma: Tensor, near: Tensor, counts: Tensor, heights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weights (D, K) of topics, the mixture of topics for each word, (D, L), and the bounds, (D,)."""
        weights = _weights(gamma)
        mixed = (weights[:, None] @ near.mT)[:, 0]
        K, total = gamma.shape[1], gamma.sum(1)
        explained = (counts * (mixed.log() + heights)).sum(1)
        constant = math.lgamma(K * self.prior) - K * math.lgamma(self.prior)
        cross = ((self.prior - gamma) * torch.digamma(gamma)).sum(1) + torch.lgamma(gamma).sum(1)
        scale = torch.digamma(total) * (counts.sum(1) + K * self.prior - total)
        return weights, mixed, explained + cross + constant - torch.lgamma(total) - scale

    def _table(self) -> tuple[Tensor, Tensor]:
        """exp E[log β] of the words that occur, (W, K), each divided by its maximum; and the log of that, (W,)."""
        (topics,) = self.nodes
        if len(self.present) == self.size or not isinstance(topics.family, Dirichlet):
            logs = topics.mean[0].index_select(1, self.present)
        else:
            alpha = topics.natural[0] + 1
            logs = torch.digamma(alpha.index_select(1, self.present)) - torch.digamma(alpha.sum(1, keepdim=True))
        heights = logs.amax(0)
        return (logs - heights).clamp_(min=LOWEST).exp_().mT.contiguous(), heights

    def _chunks(self, rows: Tensor) -> Iterator[Tensor]:
        """Rows, sorted by length, in chunks."""
        if self.dense:
            yield from rows.split(max(1, CHUNK // self.counts.shape[1]))
            return
        lengths, begin = self.lengths[rows].cpu().numpy(), 0
        while begin < len(rows):
            ahead = lengths[begin : begin + max(1, CHUNK // int(max(1, lengths[begin]) * self.shares.shape[1]))]
            sizes = ahead * np.arange(1, len(ahead) + 1) * self.shares.shape[1]
            end = begin + max(1, int(np.searchsorted(sizes, CHUNK, side="right")))
            yield rows[begin:end]
            begin = end

    def _padded(self, rows: Tensor) -> tuple[Tensor | None, Tensor]:
        """The indices of each document's words in the table, (D, L), and their counts, (D, 1, L)."""
        if self.dense:
            return None, self.counts[rows][:, None]
        lengths = self.lengths[rows]
        column = torch.arange(max(1, int(lengths.max())), device=rows.device)
        empty = len(self.counts) - 1
        taken = torch.where(column < lengths[:, None], self.begins[rows][:, None] + column, empty)
        return self.places[taken], self.counts[taken][:, None]


def _table_rows(table: Tensor, words: Tensor | None) -> Tensor:
    """The table's rows for each document, (D, L, K); the table itself, (W, K), for dense counts."""
    return table if words is None else torch.nn.functional.embedding(words, table)


def _weights(gamma: Tensor) -> Tensor:
    """exp ψ(gamma): proportions up to a factor, without zeros."""
    return torch.digamma(gamma).clamp_(min=LOWEST).exp_()


def _extrapolated(point: Tensor, change: Tensor, earlier: Tensor) -> Tensor:
    """The limit of points whose changes shrink by a constant ratio (Aitken extrapolation)."""
    ratio = (change * earlier).sum(1, keepdim=True) / earlier.square().sum(1, keepdim=True).clamp_(min=TINY)
    ratio = ratio.clamp_(0.0, 0.95)
    return point + ratio / (1 - ratio) * change
