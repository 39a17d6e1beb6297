"""Documents as counts of words, and the factor that they are of their topics."""

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

CHUNK = 1 << 19  # numbers of one array that is gone through again and again: it should stay in the cache
DENSE = 0.2  # the part of counts that are not zero from which on they are treated as if none was
EVERY = 3  # turns after which documents are looked at
RAMP = 3  # turns that the first look takes, of which the n-th takes n times as many
ROUNDS = (24, 48, 96, 192, 384)  # turns after which those that are left make up new chunks
TINY = torch.finfo(torch.float64).tiny
LOWEST = -350.0  # of logarithms: the product of two weights is still no zero


@dataclass(frozen=True)
class Counts:
    """How often each word is in each document: rows that are kept sparse.

    Args:
        matrix: (D, V), with no zeros stored and the words of a document in order.
        device: where they are computed with.
    """

    matrix: csr_matrix
    device: torch.device | None = None

    @classmethod
    def read(cls, X: Any) -> Counts:
        """From a dense array or tensor, scipy's sparse matrices, or torch's; not yet checked."""
        device = X.device if isinstance(X, Tensor) else None
        if isinstance(X, Tensor):
            X = X.detach().cpu()
            if X.layout != torch.strided:
                X = X.to_sparse_coo().coalesce()
                X = csr_matrix((X.values().numpy(), X.indices().numpy()), shape=tuple(X.shape))
            else:
                X = X.numpy()
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
        """How many there are in all documents."""
        return float(self.matrix.data.sum())


class Documents(LatentVariableFactor):
    r"""Documents whose words were drawn from topics β_k, each document with shares θ_d ~ Dirichlet(alpha) of its own:

    .. math::
        \sum_d \max_{\gamma, \phi}\; \sum_w n_{dw} \sum_k \phi_{dwk} \left(E[\log\theta_{dk}] + E[\log\beta_{kw}]
        - \log\phi_{dwk}\right) - KL(\mathrm{Dir}(\gamma_d), \mathrm{Dir}(\alpha))

    over the shares' concentrations gamma and the topics φ of words, which are brought to their best in turns. They are
    so from the same start in each look: going on from the last one saves turns, and ends in worse maxima. So does
    going on until documents settle while topics are still vague: sweeps take few turns at first (`rising`). A document
    for which that gives less than its shares of the last look would keeps the latter, so that sweeps never lower the
    bound, wherever a search ends. Words count in their order: there are no multinomial coefficients.

    Documents are sorted by length and gone through in chunks, arrays with few empty places that fit into the cache;
    what is left of chunks makes up new ones. After some turns, every third is followed by a jump to where they seem to
    lead.

    Args:
        topics: a node of K Dirichlet plates over V words.
        prior: alpha.
        start: gamma before the turns, (D, K).
        turns: at most.
        tolerance: a mean change of gamma_d that ends the turns of a document; 0 takes all, and no jumps.
        rising: whether the n-th look takes 3n turns at most.

    Attributes:
        shares: gamma of the last look, (D, K).
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
        turns: int = 100,
        tolerance: float = 1e-3,
        rising: bool = False,
        scale: float = 1.0,
    ) -> None:
        super().__init__(topics, scale=scale)
        self.prior, self.turns, self.tolerance = prior, turns, tolerance
        self.rising, self.looks = rising, 0
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
            # One more word that counts nothing stands for all empty places.
            self.places = torch.as_tensor(np.append(places, 0), device=device)
            self.counts = torch.as_tensor(np.append(matrix.data, 0.0), device=device)
        self.begins = torch.as_tensor(matrix.indptr[:-1].astype(np.int64), device=device)
        self.lengths = torch.as_tensor(np.diff(matrix.indptr).astype(np.int64), device=device)
        self.order = self.lengths.argsort(stable=True)

    def evaluate(self) -> tuple[Tensor, Mapping[Node, Parameters]]:
        (topics,) = self.nodes
        table, heights = self._table()
        gamma, sums = self.start.clone(), torch.zeros_like(table)
        rows, begin, turns = self.order, 0, self.turns
        self.looks += 1
        if self.rising and self.tolerance:
            turns = min(turns, RAMP * self.looks)
        for end in [*[end for end in ROUNDS if end < turns and self.tolerance], turns]:
            rows = torch.cat(
                [self._turns(table, gamma, part, range(begin + 1, end + 1), turns) for part in self._chunks(rows)]
            )
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

    def _turns(self, table: Tensor, all_gamma: Tensor, rows: Tensor, turns: range, last: int) -> Tensor:
        """Takes turns with a chunk of documents, and gives the rows of those that have not settled."""
        words, counts = self._padded(rows)  # (D, L), (D, 1, L)
        near = _near(table, words)
        gamma = before = all_gamma[rows]
        moving = torch.ones_like(rows, dtype=torch.bool)
        for turn in turns:
            # Of each word, what all topics say of it; the scales of θ and of each word's β cancel in the ratio.
            weights = _weights(gamma)
            ratios = counts / (weights[:, None] @ near.mT)
            older, before, gamma = before, gamma, (weights * (ratios @ near)[:, 0]).add_(self.prior)
            if turn % EVERY or not self.tolerance:
                continue
            change = gamma - before
            settled = moving & (change.abs().mean(1) < self.tolerance)
            moving = moving & ~settled
            done, left = settled.nonzero()[:, 0], moving.nonzero()[:, 0]
            if len(done):
                all_gamma[rows[done]] = gamma[done]
                if not len(left):
                    return left
            if 2 * EVERY <= turn < last:
                gamma = _ahead(gamma, change, before - older).clamp_(min=self.prior)
            if len(left) < 0.75 * len(rows):
                rows, counts, gamma, before, moving = (part[left] for part in (rows, counts, gamma, before, moving))
                if words is not None:
                    near = near.index_select(0, left)
        all_gamma[rows[moving]] = gamma[moving]
        return rows[moving]

    def _finish(self, table: Tensor, heights: Tensor, gamma: Tensor, rows: Tensor, sums: Tensor) -> None:
        """Adds Σ_d n φ to the sums, but for the table's factor, and notes the documents' shares and bounds."""
        words, counts = self._padded(rows)
        near, counts = _near(table, words), counts[:, 0]
        heights = heights if words is None else heights[words]
        weights, mixed, bounds = self._judge(gamma, near, counts, heights)
        if self.known:
            old = self.shares[rows]
            found = self._judge(old, near, counts, heights)
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

    def _judge(self, gamma: Tensor, near: Tensor, counts: Tensor, heights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights (D, K) of topics, what all of them say of each word, (D, L), and the bounds, (D,)."""
        weights = _weights(gamma)
        mixed = (weights[:, None] @ near.mT)[:, 0]
        K, total = gamma.shape[1], gamma.sum(1)
        explained = (counts * (mixed.log() + heights)).sum(1)
        constant = math.lgamma(K * self.prior) - K * math.lgamma(self.prior)
        cross = ((self.prior - gamma) * torch.digamma(gamma)).sum(1) + torch.lgamma(gamma).sum(1)
        scale = torch.digamma(total) * (counts.sum(1) + K * self.prior - total)
        return weights, mixed, explained + cross + constant - torch.lgamma(total) - scale

    def _table(self) -> tuple[Tensor, Tensor]:
        """exp E[log β] of the words at hand, (W, K), each divided by its greatest; and the latter's logarithm, (W,)."""
        (topics,) = self.nodes
        if len(self.present) == self.size or not isinstance(topics.family, Dirichlet):
            logs = topics.mean[0].index_select(1, self.present)
        else:
            alpha = topics.natural[0] + 1
            logs = torch.digamma(alpha.index_select(1, self.present)) - torch.digamma(alpha.sum(1, keepdim=True))
        heights = logs.amax(0)
        return (logs - heights).clamp_(min=LOWEST).exp_().mT.contiguous(), heights

    def _chunks(self, rows: Tensor) -> Iterator[Tensor]:
        """Rows, sorted by length, in parts."""
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
        """Of each document its words' places in the table, (D, L), and their counts, (D, 1, L)."""
        if self.dense:
            return None, self.counts[rows][:, None]
        lengths = self.lengths[rows]
        column = torch.arange(max(1, int(lengths.max())), device=rows.device)
        empty = len(self.counts) - 1
        taken = torch.where(column < lengths[:, None], self.begins[rows][:, None] + column, empty)
        return self.places[taken], self.counts[taken][:, None]


def _near(table: Tensor, words: Tensor | None) -> Tensor:
    """The table's rows of each document, (D, L, K); the table itself, (W, K), where all documents take all words."""
    return table if words is None else torch.nn.functional.embedding(words, table)


def _weights(gamma: Tensor) -> Tensor:
    """exp ψ(gamma): shares up to a factor, no zeros."""
    return torch.digamma(gamma).clamp_(min=LOWEST).exp_()


def _ahead(point: Tensor, change: Tensor, earlier: Tensor) -> Tensor:
    """Where points go whose changes shrink by the same ratio from turn to turn (Aitken's extrapolation)."""
    ratio = (change * earlier).sum(1, keepdim=True) / earlier.square().sum(1, keepdim=True).clamp_(min=TINY)
    ratio = ratio.clamp_(0.0, 0.95)
    return point + ratio / (1 - ratio) * change
