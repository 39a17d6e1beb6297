"""The rows of linear predictors x'θ, dense or sparse, with the four products that a posterior over θ needs."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import scipy.sparse as sparse
import torch
from torch import Tensor

from bayesgrad.models.checks import as_finite

CHUNK = 1 << 17  # numbers of a product that are formed at a time: they fit into the cache


def weighted_gram(rows: Tensor, weights: Tensor) -> Tensor:
    """X' diag(w) X, (P, P); for positive weights on a CPU by NumPy, which computes one triangle of A'A, torch both."""
    if not rows.is_cpu or not (weights.numpy() >= 0).all():
        return rows.mT @ (weights[:, None] * rows)
    with np.errstate(all="ignore"):  # as torch: infinite numbers are refused later
        scaled = np.sqrt(weights.numpy())[:, None] * rows.numpy()
        return torch.from_numpy(scaled.T @ scaled)


def _quadratic(rows: Tensor, matrix: Tensor) -> Tensor:
    """x_i' M x_i, (n,); on a CPU by NumPy, whose products of small matrices take less time than torch's."""
    if not rows.is_cpu:
        return (rows @ matrix).mul_(rows).sum(1)
    own = rows.numpy()
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.einsum("ij,ij->i", own @ matrix.numpy(), own))


class DenseDesign:
    """A matrix X, (n, P), as a tensor.

    Args:
        rows: without the intercept.
        intercept: whether to add a last column of ones.
    """

    def __init__(self, rows: Tensor, *, intercept: bool) -> None:
        self.rows = torch.cat([rows, torch.ones_like(rows[:, :1])], 1) if intercept else rows
        self.shape, self.device = self.rows.shape, rows.device
        size = max(256, CHUNK // self.shape[1])
        places = [slice(start, start + size) for start in range(0, max(1, self.shape[0]), size)]
        self._parts = [(place, self.rows[place]) for place in places]

    def predict(self, theta: Tensor) -> Tensor:
        """X θ, (n, K) or (n,), for θ (P, K) or (P,)."""
        return self.rows @ theta

    def pull(self, errors: Tensor) -> Tensor:
        """X' u, (P, K) or (P,), for u (n, K) or (n,)."""
        return self.rows.mT @ errors

    def gram(self, weights: Tensor) -> Tensor:
        """X' diag(w) X, (P, P)."""
        return reduce(Tensor.add_, (weighted_gram(part, weights[place]) for place, part in self._parts))

    def quadratic(self, matrix: Tensor) -> Tensor:
        """x_i' M x_i, (n,)."""
        return torch.cat([_quadratic(part, matrix) for _, part in self._parts])

    def split(self, size: int) -> list[DenseDesign]:
        return [DenseDesign(part, intercept=False) for part in self.rows.split(size)]


class SparseDesign:
    """A matrix X, (n, P), in SciPy's compressed rows; products with P x P matrices are dense, X never is.

    See `DenseDesign`.
    """

    device = torch.device("cpu")

    def __init__(self, rows: Any, *, intercept: bool) -> None:
        ones = sparse.csr_matrix(np.ones((rows.shape[0], 1)))
        self.rows: Any = sparse.csr_matrix(sparse.hstack([rows, ones]) if intercept else rows)
        self.shape = self.rows.shape

    def predict(self, theta: Tensor) -> Tensor:
        return torch.as_tensor(self.rows @ theta.numpy())

    def pull(self, errors: Tensor) -> Tensor:
        return torch.as_tensor(self.rows.T @ errors.numpy())

    def gram(self, weights: Tensor) -> Tensor:
        return torch.as_tensor((self.rows.T @ self.rows.multiply(weights.numpy()[:, None]).tocsr()).toarray())

    def quadratic(self, matrix: Tensor) -> Tensor:
        size = max(1, CHUNK // self.shape[1])
        parts = [self.rows[start : start + size] for start in range(0, self.shape[0], size)]
        found = [np.asarray(part.multiply(part @ matrix.numpy()).sum(1)).ravel() for part in parts]
        return torch.as_tensor(np.concatenate(found))

    def split(self, size: int) -> list[SparseDesign]:
        starts = range(0, self.shape[0], size)
        return [SparseDesign(self.rows[start : start + size], intercept=False) for start in starts]


Design = DenseDesign | SparseDesign


def as_design(X: Any, given: Any, *, intercept: bool) -> Design:
    """Validated rows as a design.

    Args:
        X: an array or a sparse matrix.
        given: X as it was passed by the user.

    Raises:
        ValueError: they contain NaN or infinity.
    """
    if not sparse.issparse(X):
        return DenseDesign(as_finite(X, given), intercept=intercept)
    if not np.isfinite(X.data).all():
        wrong = len(np.unique(X.tocoo().row[~np.isfinite(X.tocoo().data)]))
        raise ValueError(f"X contains NaN or infinity in {wrong} of {X.shape[0]} rows: remove or impute them first.")
    return SparseDesign(X, intercept=intercept)
