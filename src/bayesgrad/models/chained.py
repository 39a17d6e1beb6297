"""Sequences whose latent states form a Markov chain: their input, their emissions (rows or symbols), their factor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.utils.validation import _num_samples
from torch import Tensor

from bayesgrad.families import Parameters, Point
from bayesgrad.inference import LatentVariableFactor, Node
from bayesgrad.models import markov
from bayesgrad.models.checks import as_numpy, like
from bayesgrad.models.covariances import Covariance, Diag, Spherical, Tied
from bayesgrad.warning import warn

CACHE_LIMIT = 1 << 25  # size limit of cached features, in numbers
DEGENERATE = 1e-6  # a variance in a state, relative to that of columns in the state where they vary most
LOG_TINY = math.log(torch.finfo(torch.float64).tiny)


class SequenceInput(NamedTuple):
    """X as passed by the user, and the lengths of its sequences."""

    X: Any
    lengths: Any = None

    def is_list(self, dims: int) -> bool:
        """Whether X is a list of arrays or tensors, each a sequence with at least this number of dimensions.

        Nested lists are the rows of one sequence, as for NumPy and scikit-learn.
        """
        listed = isinstance(self.X, (list, tuple)) and len(self.X) > 0
        return listed and all(isinstance(item, (np.ndarray, Tensor)) and item.ndim >= dims for item in self.X)

    def concatenated(self, dims: int) -> tuple[Any, list[int] | None]:
        """All rows, and the lengths of the sequences if X is a list.

        Raises:
            ValueError: there is no sequence, an empty one, or one with a different number of columns.
        """
        if isinstance(self.X, (list, tuple)) and not self.X:
            raise ValueError("X is empty: pass a list of sequences, or rows.")
        if not self.is_list(dims):
            X = as_numpy(self.X)
            if isinstance(X, (list, tuple)) and any(np.ndim(as_numpy(item)) >= 2 for item in X):
                raise ValueError(
                    "X is a nested list of sequences: pass their rows as one array with the lengths of the sequences, "
                    "or a list of arrays."
                )
            return (np.asarray(X)[:, None] if dims == 1 and np.ndim(X) == 1 else X), None
        if self.lengths is not None:
            raise ValueError("a list of sequences cannot be combined with lengths: pass one array, or no lengths.")
        parts = [np.asarray(as_numpy(part), dtype=np.float64) for part in self.X]
        parts = [part[:, None] if part.ndim == 1 else part for part in parts]
        for place, part in enumerate(parts):
            if not len(part):
                raise ValueError(f"sequence {place} is empty: remove it.")
            if part.shape[1:] != parts[0].shape[1:]:
                raise ValueError(f"sequence {place} has shape {part.shape}, but sequence 0 has {parts[0].shape}.")
        return np.concatenate(parts), [len(part) for part in parts]

    def split(self, rows: int) -> list[int]:
        """The lengths of the sequences in this number of rows.

        Raises:
            ValueError: they are not positive integers, or do not sum to the number of rows.
        """
        if self.lengths is None:
            return [rows]
        lengths = np.atleast_1d(np.asarray(as_numpy(self.lengths)))
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or not (lengths > 0).all():
            raise ValueError(f"lengths must be positive integers, got {self.lengths!r}.")
        if lengths.sum() != rows:
            raise ValueError(f"lengths must sum to the number of rows of X, {rows}, got {lengths.sum()}.")
        return lengths.tolist()

    def first(self, dims: int) -> Any:
        """The first sequence of a list, or X."""
        return self.X[0] if self.is_list(dims) else self.X

    def like(self, values: Tensor, lengths: Sequence[int], dims: int) -> Any:
        """Converts one value per row of X to the type of X: a list, an array or a tensor."""
        kind = like(self.first(dims))
        found = [kind(part) for part in (torch.split(values, list(lengths)) if self.is_list(dims) else (values,))]
        return found if self.is_list(dims) else found[0]


class Rows:
    """Gaussian rows, represented by the features whose sums are the sufficient statistics: see `Covariance`.

    Args:
        rows: (N, P), in the order of the layout; rows of NaN are missing.
        covariance: the covariance type.
    """

    def __init__(self, rows: Tensor, covariance: Covariance) -> None:
        self.rows, self.covariance = rows, covariance
        self._whole: Tensor | None = None

    def logs(self, mean: Parameters, out: Tensor) -> Tensor:
        """E[log p(x | k)], (K, N); 0 for missing rows."""
        coefficients = self.covariance.coefficients(mean)
        for part, features in self._features():
            torch.mm(coefficients, features, out=out[:, part])
        return out

    def message(self, shares: Tensor) -> Parameters:
        """The statistics of rows, weighted by the state probabilities `shares` (K, N)."""
        sums = [shares[:, part] @ features.mT for part, features in self._features()]
        return self.covariance.message(torch.stack(sums).sum(0), self.rows.shape[1])

    def _features(self) -> Iterator[tuple[slice, Tensor]]:
        """Features in parts that fit into memory, cached if all of them do; zero for missing rows."""
        N, width = len(self.rows), self.covariance.width(self.rows.shape[1])
        if width * N <= CACHE_LIMIT:
            if self._whole is None:
                self._whole = self._read(self.rows)
            yield slice(None), self._whole
            return
        for begin in range(0, N, size := max(1, CACHE_LIMIT // (8 * width))):
            yield slice(begin, begin + size), self._read(self.rows[begin : begin + size])

    def _read(self, rows: Tensor) -> Tensor:
        return self.covariance.features(rows.mT, 0.0).masked_fill_(rows[:, 0].isnan(), 0)


def pseudo_statistics(covariance: Covariance, means: Tensor, covars: Tensor, weight: float | Tensor) -> Parameters:
    """The statistics of `weight` rows for each state, or of one number for each, with means (K, P) and covariances
    (K, P, P), from 2 P points."""
    P = means.shape[1]
    root = P**0.5 * torch.linalg.cholesky(covars)
    points = means[..., None] + torch.cat([root, -root], -1)  # (K, P, 2 P)
    sums = torch.stack([covariance.features(own, 0.0).mean(1) for own in points])
    return covariance.message(
        torch.as_tensor(weight, dtype=sums.dtype, device=sums.device).expand(len(sums))[:, None] * sums, P
    )


def to_covariance_type(covariance: Covariance, matrix: Tensor) -> Tensor:
    """The part of a covariance matrix that one state has for this covariance type."""
    if isinstance(covariance, Spherical):
        return matrix.diagonal().mean()
    return matrix.diagonal() if isinstance(covariance, Diag) else matrix


def to_full_matrices(covariance: Covariance, covars: Tensor, states: int, size: int) -> Tensor:
    """Covariances in scikit-learn's shapes, as matrices (K, P, P)."""
    if isinstance(covariance, Spherical):
        covars = covars[:, None].expand(states, size)
    if isinstance(covariance, (Diag, Spherical)):
        return torch.diag_embed(covars)
    return covars.expand(states, size, size) if isinstance(covariance, Tied) else covars


def warn_if_degenerate(covars: Tensor) -> None:
    """Warns of a state whose observations lie in a subspace, so that its density is arbitrarily high or low elsewhere.

    Args:
        covars: (K, P, P).
    """
    scale = covars.diagonal(dim1=1, dim2=2).amax(0).sqrt()
    least = torch.linalg.eigvalsh(covars / (scale[:, None] * scale))[:, 0]
    if bool((least < DEGENERATE).any()):
        state = int(least.argmin())
        warn(
            f"in some direction, state {state} has {float(least[state].clamp(min=0).sqrt()):.1g} times the standard "
            "deviation of columns in other states, so that new rows may have a very low likelihood: pass a greater "
            "covars_prior (by default 0.01 times the variances of X), or leave out columns that others determine."
        )


class Symbols:
    """Symbols of K states, each with a Dirichlet posterior of their probabilities.

    Args:
        symbols: (N,), in the order of the layout; the value `count` marks missing ones.
        count: number of symbols, V.
    """

    def __init__(self, symbols: Tensor, count: int) -> None:
        self.symbols, self.count = symbols, count

    def logs(self, mean: Parameters, out: Tensor) -> Tensor:
        """E[log p(x | k)], (K, N); 0 for missing symbols."""
        for row, own in zip(torch.nn.functional.pad(mean[0], (0, 1)), out):
            torch.index_select(row, 0, self.symbols, out=own)
        return out

    def message(self, shares: Tensor) -> Parameters:
        """The expected number of times that each state emits each symbol, (K, V)."""
        counts = [torch.bincount(self.symbols, row, minlength=self.count + 1) for row in shares]
        return (torch.stack(counts)[:, : self.count],)


class Sequences(NamedTuple):
    """Validated data: the layout of rows, and their observations."""

    layout: markov.Layout
    emissions: Rows | Symbols

    def __len__(self) -> int:
        return len(self.layout.lengths)


class MarkovChainFactor(LatentVariableFactor):
    """log Σ_z exp E[log p(x, z | π, A, emissions)], with q(z) a chain: the forward-backward algorithm.

    Args:
        initial: node of π, a Dirichlet of K.
        transitions: node of the rows of A, K Dirichlets of K.
        emission: node of the emission parameters.
    """

    def __init__(
        self, initial: Node, transitions: Node, emission: Node, data: Sequences, *, scale: float = 1.0
    ) -> None:
        super().__init__(initial, transitions, emission, scale=scale)
        self.data = data

    def logs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Expected log π, log A and log p(x | k), (K, N)."""
        initial, transitions, emission = self.nodes
        given = (log_shares(emission),) if isinstance(self.data.emissions, Symbols) else emission.mean
        out = self.data.layout.buffer("emissions", len(transitions.natural[0]))
        return log_shares(initial), log_shares(transitions), self.data.emissions.logs(given, out)

    def evaluate(self) -> tuple[Tensor, Mapping[Node, Parameters]]:
        initial, transitions, emission = self.nodes
        found = markov.smoothed(*self.logs(), self.data.layout)
        check_possible(found.log_weight)
        messages = (found.first,), (found.pairs,), self.data.emissions.message(found.shares)
        return found.log_weight.sum(), dict(zip((initial, transitions, emission), messages))


def drawn(shares: Tensor, uniform: Tensor) -> Tensor:
    """Samples of outcomes with probabilities (..., K), from uniform numbers in [0, 1), (..., n)."""
    steps = shares.cumsum(-1)
    return torch.searchsorted(steps / steps[..., -1:], uniform.contiguous(), right=True)


def log_shares(node: Node) -> Tensor:
    """E[log x] of probabilities; -inf for a mode of zero, which Dirichlet replaces by the smallest positive number."""
    (logs,) = node.mean
    return torch.where(logs <= LOG_TINY + 1e-6, -math.inf, logs) if isinstance(node.family, Point) else logs


def check_possible(log_weight: Tensor) -> None:
    wrong = torch.isneginf(log_weight).nonzero()
    if len(wrong):
        raise ValueError(
            f"sequence {int(wrong[0])} has probability 0: it needs a start, a transition or a symbol of probability 0. "
            "Use small positive probabilities, or method='vb'."
        )


def check_ignored_y(X: Any, y: Any, dims: int) -> None:
    """Raises a ValueError for lengths that are passed as y, with the rows of arrays, data frames or nested lists."""
    if SequenceInput(X).is_list(dims) or np.ndim(y) != 1:
        return
    if len(y) != (rows := _num_samples(X)):
        raise ValueError(f"y is ignored, but has {len(y)} entries for {rows} rows: pass lengths by keyword.")
