"""The factors of factor analysis: rows explained by a few latent scores."""

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

NONE = torch.zeros(1, 1, 1)  # the covariance of known loadings


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of numbers, some of which may be missing.

    Args:
        values: (n, D), zero for missing numbers.
        observed: (n, D), ones and zeros; None if nothing is missing.
    """

    values: Tensor
    observed: Tensor | None = None

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: np.ndarray) -> Rows:
        return Rows(self.values[rows], None if self.observed is None else self.observed[rows])

    def left(self, scores: Tensor, loadings: Tensor) -> Tensor:
        """Residuals of the observed numbers given scores [z 1], (n, D)."""
        found = self.values - scores @ loadings.mT
        return found if self.observed is None else self.observed * found

    @cached_property
    def patterns(self) -> tuple[Tensor, Tensor]:
        """The distinct sets of observed columns, (U, D), and the index of each row's set, (n,)."""
        if self.observed is None:
            return torch.ones_like(self.values[:1]), self.values.new_zeros(len(self), dtype=torch.long)
        return torch.unique(self.observed, dim=0, return_inverse=True)


@dataclass(frozen=True, eq=False)
class Loadings:
    """Expectations of the parameters of x = W z + m + e: of each row w of [W m] and each precision of the noise.

    Args:
        first: E[w], (D, K + 1).
        covariance: of w, (D, K + 1, K + 1); for points zero, (1, 1, 1).
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
        first, covariance = (loadings.mean[0], NONE.to(loadings.mean[0])) if known else loadings.moments
        return Loadings(first, covariance, *[part.expand(len(first)) for part in noise.mean])

    @staticmethod
    def at(loadings: Tensor, precision: Tensor) -> Loadings:
        """Known parameters [W m] and τ."""
        return Loadings(loadings, NONE.to(loadings), precision.log(), precision)


def infer(rows: Rows, known: Loadings) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    r"""The optimal q(z_n) = N(A b_n, A) of each row; A is the same for rows with the same observed columns.

    .. math::
        A^{-1} = I + \sum_{d \in o} E[\tau_d] E[w_d w_d^T], \quad
        b_n = \sum_{d \in o} E[\tau_d] (x_{nd} E[w_d] - E[w_d m_d])

    Returns:
        the means of z (n, K), the covariances A (U, K, K), the patterns (U, D), each row's pattern (n,), and each row's
        contribution to the bound (n,).
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
    # Squared residuals rather than a difference of squares, which would cancel. The contribution of the scores'
    # covariance and that of their prior are together tr(A^-1 A) = K.
    spread = known.precision[:, None, None] * known.covariance.expand_as(weighted)
    unsure = (patterns @ spread.flatten(1)).view_as(summed)
    constant = patterns @ (known.log_precision - LOG_2PI) / 2 - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    extended = torch.cat([means, torch.ones_like(means[:, :1])], 1)
    left = rows.left(extended, known.first).square() @ known.precision
    left = left + means.square().sum(1) + ((unsure[place] @ extended[..., None])[..., 0] * extended).sum(1)
    return means, covariance, patterns, place, constant[place] - left / 2


class ScoresFactor(LatentVariableFactor):
    r"""x_n = W z_n + m + e_n with z_n ~ N(0, I) and e_nd ~ N(0, 1/τ_d), maximised over the scores z_n.

    If nothing is missing, only the triangular factor R of [1 X] = Q R is needed: an evaluation costs D²K for any
    number of rows (nDK if there are fewer rows than columns). Missing numbers are left out of the density: a batch of
    K x K systems, one for each pattern of observed columns.

    Args:
        rows: the data.
        loadings: rows of [W m], plates (D,), Gaussian.
        noise: precisions τ, plates (D,), or () if all columns share one, Gamma.
        floor: smallest variance of the noise, a number or (D,): messages to τ are those of residuals no smaller, so
            that a step with rho = 1 has the largest bound of all τ <= 1/floor.

    Reference: Rubin and Thayer, 1982, for EM; Bishop, 1999, for the expectations over W and τ.
    Checked by: tests/equations/test_factor_analysis.py.
    """

    def __init__(
        self, rows: Rows, loadings: Node, noise: Node, scale: float | Tensor = 1.0, floor: float | Tensor = 0.0
    ) -> None:
        super().__init__(loadings, noise, scale=scale)
        self.rows, self.floor = rows, floor
        if rows.observed is None:
            # X and a column of ones, up to a rotation of rows, which does not matter: at most D + 1 rows.
            X = torch.cat([torch.ones_like(rows.values[:, :1]), rows.values], 1)
            self.turned = torch.linalg.qr(X, mode="r")[1] if len(X) > X.shape[1] else X

    def evaluate(self) -> tuple[Tensor, Mapping[Node, Parameters]]:
        loadings, noise = self.nodes
        known = Loadings.of(loadings, noise)
        value, crossed, moments, residual, counts = (self._whole if self.rows.observed is None else self._parts)(known)
        tau = known.precision
        left, least = residual + (known.covariance * moments).sum((1, 2)), self.floor * counts
        if not noise.natural[0].dim():
            left, least, counts = left.sum(), least.sum(), counts.sum()
        half = counts / 2, -torch.maximum(left, least) / 2
        row = tau[:, None] * crossed, tau[:, None, None] * (moments / -2)
        return value, {loadings: row, noise: half}

    def _whole(self, known: Loadings) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The bound, Σ x [z 1]' (D, K + 1), Σ E[[z 1][z 1]'] (K + 1, K + 1), squared residuals at E[w], and n."""
        n, (D, width) = len(self.rows), known.first.shape
        K, tau, (ones, X) = width - 1, known.precision, (self.turned[:, :1], self.turned[:, 1:])
        summed = (tau[:, None, None] * known.covariance).sum(0) + (tau[:, None] * known.first).mT @ known.first
        factor = torch.linalg.cholesky(torch.eye(K).to(summed) + summed[:K, :K])
        # A = L'^-1 L^-1, one factor at a time: A b loses precision if columns have different units.
        B = solve_triangular(factor, (tau[:, None] * known.first[:, :K]).mT, upper=False).mT  # (D, K)
        shift = solve_triangular(factor, summed[:K, K:], upper=False)[:, 0]
        other = solve_triangular(factor.mT, torch.eye(K).to(summed), upper=True)
        z = (X @ B - ones * shift) @ other.mT
        extended = torch.cat([z, ones], 1)
        moments, counts = extended.mT @ extended, tau.new_full((D,), n)
        residual = (X - extended @ known.first.mT).square().sum(0)
        left = residual + (known.covariance * moments).sum((1, 2))
        volume = (known.log_precision.sum() - D * LOG_2PI) / 2 - factor.diagonal().log().sum()
        value = n * volume - ((tau * left).sum() + z.square().sum()) / 2  # tr(A^-1 A) = K: see `infer`
        moments[:K, :K] += n * (other @ other.mT)
        residual = residual + n * (known.first[:, :K] @ other).square().sum(1)
        return value, X.mT @ extended, moments, residual, counts

    def _parts(self, known: Loadings) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The same over the observed numbers of each column; moments are (D, K + 1, K + 1)."""
        z, A, patterns, place, values = infer(self.rows, known)
        extended = torch.cat([z, torch.ones_like(z[:, :1])], 1)
        U, width = len(patterns), extended.shape[1]
        outer = (extended[:, :, None] * extended[:, None, :]).flatten(1)
        sums = z.new_zeros(U, width * width).index_add_(0, place, outer).view(U, width, width)
        counts = torch.bincount(place, minlength=U).to(z)
        spread = counts[:, None, None] * A
        sums[:, :-1, :-1] += spread
        moments = (patterns.mT @ sums.flatten(1)).view(-1, width, width)
        unsure = (patterns.mT @ spread.flatten(1)).view(-1, width - 1, width - 1)
        W, seen = known.first[:, :-1], patterns.mT @ counts
        residual = self.rows.left(extended, known.first).square().sum(0) + ((unsure @ W[..., None])[..., 0] * W).sum(1)
        return values.sum(), self.rows.values.mT @ extended, moments, residual, seen


class RelevancePrior(Factor):
    r"""W_dk ~ N(0, 1/alpha_k) and m_d ~ N(m0_d, 1/β): alpha switches off columns that explain nothing.

    Args:
        loadings: rows of [W m].
        relevance: alpha, plates (K,), Gamma.
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
    """Rows minus `centre`, on the device of `given`, and the centre; None uses the mean of each column.

    Raises:
        ValueError: a number is infinite, or, without a centre, a column has no numbers.
    """
    infinite = np.isinf(X).any(1).sum()
    if infinite:
        raise ValueError(
            f"X contains infinity in {infinite} of {len(X)} rows: remove them, or use NaN for missing numbers."
        )
    X = np.require(X, requirements="W")  # torch warns about read-only arrays
    values = torch.as_tensor(X, device=given.device if isinstance(given, Tensor) else None)
    missing = torch.isnan(values)
    holed = bool(missing.any())
    if centre is None:
        empty = torch.nonzero(missing.all(0))
        if len(empty):
            raise ValueError(f"column {empty[0].item()} of X contains only NaN: remove it.")
        centre = values.nanmean(0)
    values = values - centre
    if not holed:
        return Rows(values), centre
    return Rows(torch.where(missing, 0.0, values), (~missing).to(values)), centre
