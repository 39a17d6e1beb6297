"""Rows that a few hidden numbers explain, as factors: what factor analysis is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.linalg import solve_triangular

from bayesgrad.families import Parameters, Point
from bayesgrad.families.gaussian import LOG_2PI
from bayesgrad.inference import Factor, LatentVariableFactor, Node


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of numbers some of which may be missing.

    Args:
        values: (n, D), zero where nothing was observed.
        observed: (n, D), one and zero; None where all of it is there.
    """

    values: Tensor
    observed: Tensor | None = None

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: np.ndarray) -> Rows:
        return Rows(self.values[rows], None if self.observed is None else self.observed[rows])

    def left(self, scores: Tensor, loadings: Tensor) -> Tensor:
        """What scores [z 1] leave of what was observed, (n, D)."""
        found = self.values - scores @ loadings.mT
        return found if self.observed is None else self.observed * found

    @cached_property
    def patterns(self) -> tuple[Tensor, Tensor]:
        """Which columns are observed together, (U, D), each pattern once, and the pattern of each row, (n,)."""
        if self.observed is None:
            return torch.ones_like(self.values[:1]), self.values.new_zeros(len(self), dtype=torch.long)
        return torch.unique(self.observed, dim=0, return_inverse=True)


@dataclass(frozen=True, eq=False)
class Loadings:
    """Expectations of the parameters of x = W z + m + e: of each row w of [W m] and each precision of the noise.

    Args:
        first: E[w], (D, K + 1).
        covariance: of w, (D, K + 1, K + 1); of points zero.
        log_precision, precision: E[log τ] and E[τ], (D,).
    """

    first: Tensor
    covariance: Tensor
    log_precision: Tensor
    precision: Tensor

    @cached_property
    def second(self) -> Tensor:
        """E[w w'], (D, K + 1, K + 1)."""
        return self.covariance + self.first[:, :, None] * self.first[:, None, :]

    @staticmethod
    def of(loadings: Node, noise: Node) -> Loadings:
        known = isinstance(loadings.family, Point)
        first, covariance = (loadings.mean[0], torch.zeros_like(loadings.mean[1])) if known else loadings.moments
        return Loadings(first, covariance, *[part.expand(len(first)) for part in noise.mean])

    @staticmethod
    def at(loadings: Tensor, precision: Tensor) -> Loadings:
        """Parameters that are known: [W m] and τ."""
        covariance = torch.zeros_like(loadings[:, :, None] * loadings[:, None, :])
        return Loadings(loadings, covariance, precision.log(), precision)


def infer(rows: Rows, known: Loadings) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    r"""The best q(z_n) = N(A b_n, A) of each row, where A is the same for rows with the same columns observed.

    .. math::
        A^{-1} = I + \sum_{d \in o} E[\tau_d] E[w_d w_d^T], \quad
        b_n = \sum_{d \in o} E[\tau_d] (x_{nd} E[w_d] - E[w_d m_d])

    Returns:
        the means of z (n, K), the covariances A (U, K, K), the patterns (U, D), each row's pattern (n,), and what each
        row adds to the bound (n,).
    """
    patterns, place = rows.patterns
    K = known.first.shape[1] - 1
    weighted = known.precision[:, None, None] * known.second
    summed = (patterns @ weighted.flatten(1)).view(-1, K + 1, K + 1)
    factor = torch.linalg.cholesky(torch.eye(K).to(weighted) + summed[:, :K, :K])
    covariance = torch.cholesky_inverse(factor)
    push = rows.values @ (known.precision[:, None] * known.first[:, :K]) - summed[place, :K, K]
    if len(patterns) == 1:
        half = solve_triangular(factor[0], push.mT, upper=False)
        means = solve_triangular(factor[0].mT, half, upper=True).mT
    else:
        lower = factor[place]
        half = solve_triangular(lower, push[..., None], upper=False)
        means = solve_triangular(lower.mT, half, upper=True)[..., 0]
    # What is left of x, squared, and no difference of squares: those are large where little is left. What the scores'
    # own covariance adds to it is what their prior takes: tr(A^-1 A) = K.
    unsure = (patterns @ (known.precision[:, None, None] * known.covariance).flatten(1)).view_as(summed)
    constant = patterns @ (known.log_precision - LOG_2PI) / 2 - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    extended = torch.cat([means, torch.ones_like(means[:, :1])], 1)
    left = rows.left(extended, known.first).square() @ known.precision
    left = left + means.square().sum(1) + ((unsure[place] @ extended[..., None])[..., 0] * extended).sum(1)
    return means, covariance, patterns, place, constant[place] - left / 2


class Scores(LatentVariableFactor):
    r"""x_n = W z_n + m + e_n with z_n ~ N(0, I) and e_nd ~ N(0, 1/τ_d), the scores z_n at their best.

    Where nothing is missing, all that is needed of the data is the triangle R of [1 X] = Q R: a look costs D²K
    whatever the number of rows (nDK where there are fewer rows than columns). Missing
    numbers are left out of the density, exactly: a batch of K x K systems, one for each pattern of what is observed.

    Args:
        rows: of the data.
        loadings: rows of [W m], plates (D,), of a Gaussian.
        noise: precisions τ, plates (D,), or () where all columns share one, of a Gamma.
        floor: a variance that every x has about what was observed, one or (D,): noise does not vanish in columns that
            are explained in full.

    Reference: Rubin and Thayer, 1982, for EM; Bishop, 1999, for the expectations over W and τ.
    Checked by: tests/equations/test_factor_analysis.py.
    """

    def __init__(
        self, rows: Rows, loadings: Node, noise: Node, scale: float | Tensor = 1.0, floor: float | Tensor = 0.0
    ) -> None:
        super().__init__(loadings, noise, scale=scale)
        self.rows, self.floor = rows, floor
        if rows.observed is None:
            # X and a column of ones, up to a rotation of rows that nothing depends on: at most D + 1 of them.
            X = torch.cat([torch.ones_like(rows.values[:, :1]), rows.values], 1)
            self.turned = torch.linalg.qr(X, mode="r")[1] if len(X) > X.shape[1] else X

    def evaluate(self) -> tuple[Tensor, Mapping[Node, Parameters]]:
        loadings, noise = self.nodes
        known = Loadings.of(loadings, noise)
        value, crossed, moments, residual, counts = (self._whole if self.rows.observed is None else self._parts)(known)
        tau = known.precision
        residual = residual + (known.covariance * moments).sum((1, 2)) + self.floor * counts
        half = counts / 2, -residual / 2
        if not noise.natural[0].dim():
            half = half[0].sum(), half[1].sum()
        row = tau[:, None] * crossed, tau[:, None, None] * (moments / -2)
        return value, {loadings: row, noise: half}

    def _whole(self, known: Loadings) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The bound, Σ x [z 1]' (D, K + 1), Σ E[[z 1][z 1]'] (K + 1, K + 1), what is left of Σ x² at E[w], and n."""
        n, (D, width) = len(self.rows), known.first.shape
        K, tau, (ones, X) = width - 1, known.precision, (self.turned[:, :1], self.turned[:, 1:])
        summed = torch.einsum("d,dij->ij", tau, known.second)
        factor = torch.linalg.cholesky(torch.eye(K).to(summed) + summed[:K, :K])
        # A = L'^-1 L^-1, and one half of it at a time: A b by itself loses digits where columns have different units.
        B = solve_triangular(factor, (tau[:, None] * known.first[:, :K]).mT, upper=False).mT  # (D, K)
        shift = solve_triangular(factor, summed[:K, K:], upper=False)[:, 0]
        other = solve_triangular(factor.mT, torch.eye(K).to(summed), upper=True)
        z = (X @ B - ones * shift) @ other.mT
        extended = torch.cat([z, ones], 1)
        moments, counts = extended.mT @ extended, tau.new_full((D,), n)
        residual = (X - extended @ known.first.mT).square().sum(0)
        left = residual + (known.covariance * moments).sum((1, 2)) + self.floor * counts
        volume = (known.log_precision.sum() - D * LOG_2PI) / 2 - factor.diagonal().log().sum()
        value = n * volume - ((tau * left).sum() + z.square().sum()) / 2  # tr(A^-1 A) = K: see `infer`
        moments[:K, :K] += n * (other @ other.mT)
        residual = residual + n * (known.first[:, :K] @ other).square().sum(1)
        return value, X.mT @ extended, moments, residual, counts

    def _parts(self, known: Loadings) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The same over what is observed of each column; moments are (D, K + 1, K + 1)."""
        z, A, patterns, place, values = infer(self.rows, known)
        extended = torch.cat([z, torch.ones_like(z[:, :1])], 1)
        U, width = len(patterns), extended.shape[1]
        sums = z.new_zeros(U, width * width).index_add_(0, place, _outer(extended).flatten(1)).view(U, width, width)
        counts = torch.bincount(place, minlength=U).to(z)
        spread = counts[:, None, None] * A
        sums[:, :-1, :-1] += spread
        moments = (patterns.mT @ sums.flatten(1)).view(-1, width, width)
        unsure = (patterns.mT @ spread.flatten(1)).view(-1, width - 1, width - 1)
        W, seen = known.first[:, :-1], patterns.mT @ counts
        residual = self.rows.left(extended, known.first).square().sum(0) + ((unsure @ W[..., None])[..., 0] * W).sum(1)
        value = values.sum() - (self.floor * seen * known.precision).sum() / 2
        return value, self.rows.values.mT @ extended, moments, residual, seen


def _outer(rows: Tensor) -> Tensor:
    return rows[:, :, None] * rows[:, None, :]


class Relevance(Factor):
    r"""W_dk ~ N(0, 1/alpha_k), and m_d ~ N(m0_d, 1/β): columns that explain nothing are switched off by their alpha.

    Args:
        loadings: rows of [W m].
        relevance: alpha, plates (K,), of a Gamma.
        mean: m0, (D,).
        mean_precision: β.

    Reference: Bishop, 1999, Bayesian PCA.
    """

    def __init__(self, loadings: Node, relevance: Node, mean: Tensor, mean_precision: float) -> None:
        super().__init__(loadings, relevance)
        self.mean, self.mean_precision = mean, mean_precision

    def _squares(self) -> tuple[Tensor, Tensor]:
        """Σ_d E[W_dk²], (K,), and Σ_d E[(m_d - m0_d)²]."""
        first, second = self.nodes[0].mean
        squares = second.diagonal(dim1=1, dim2=2).sum(0)
        return squares[:-1], squares[-1] - (self.mean * (2 * first[:, -1] - self.mean)).sum()

    def value(self) -> Tensor:
        log_alpha, alpha = self.nodes[1].mean
        squares, spread = self._squares()
        D, beta = len(self.mean), self.mean.new_tensor(self.mean_precision)
        volume = D * (log_alpha.sum() + beta.log() - (len(alpha) + 1) * LOG_2PI)
        return (volume - (alpha * squares).sum() - beta * spread) / 2

    def _message(self, node: Node) -> Parameters:
        if node is self.nodes[1]:
            squares = self._squares()[0]
            return torch.full_like(squares, len(self.mean) / 2), -squares / 2
        alpha = self.nodes[1].mean[1]
        first = torch.zeros_like(node.natural[0])
        first[:, -1] = self.mean_precision * self.mean
        precisions = torch.cat([alpha, alpha.new_tensor([self.mean_precision])])
        return first, torch.diag(precisions / -2).expand_as(node.natural[1])


def as_rows(X: Any, given: Any, centre: Tensor | None) -> tuple[Rows, Tensor]:
    """Rows less `centre`, on the device of what was given; without one, less the mean of each column, and that mean.

    Raises:
        ValueError: a number is infinite, or, where there is no centre yet, a column has none at all.
    """
    infinite = np.isinf(X).any(1).sum()
    if infinite:
        raise ValueError(
            f"X holds infinity in {infinite} of {len(X)} rows: remove them, or give NaN for what is missing."
        )
    X = np.require(X, requirements="W")  # torch warns of arrays that cannot be written to
    values = torch.as_tensor(X, device=given.device if isinstance(given, Tensor) else None)
    missing = torch.isnan(values)
    holed = bool(missing.any())
    if centre is None:
        empty = torch.nonzero(missing.all(0))
        if len(empty):
            raise ValueError(f"column {empty[0].item()} of X holds no number at all, only NaN: remove it.")
        centre = values.nanmean(0)
    values = values - centre
    if not holed:
        return Rows(values), centre
    return Rows(torch.where(missing, 0.0, values), (~missing).to(values)), centre
