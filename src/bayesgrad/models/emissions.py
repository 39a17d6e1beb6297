"""Emissions of hidden Markov models: Gaussian rows, or symbols."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bayesgrad.families import Parameters
from bayesgrad.models.covariances import Covariance, Diag, Spherical, Tied

CACHE_LIMIT = 1 << 25  # size limit of cached features, in numbers


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


def pseudo_statistics(covariance: Covariance, means: Tensor, covars: Tensor, weight: float) -> Parameters:
    """The statistics of `weight` rows for each state, with means (K, P) and covariances (K, P, P), from 2 P points."""
    P = means.shape[1]
    root = P**0.5 * torch.linalg.cholesky(covars)
    points = means[..., None] + torch.cat([root, -root], -1)  # (K, P, 2 P)
    return covariance.message(torch.stack([weight * covariance.features(own, 0.0).mean(1) for own in points]), P)


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
