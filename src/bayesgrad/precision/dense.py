"""A dense covariance of all weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bayesgrad.precision.algebra import Precision
from bayesgrad.precision.linalg import cholesky
from bayesgrad.precision.low_rank import Matrix

STRIP = 64  # rows that are symmetrised at once
ROUNDING = 10  # times the rounding of the largest eigenvalue: a covariance with a more negative one is wrong


@dataclass(frozen=True, eq=False)
class Dense(Precision):
    """P = S^-1, stored as the covariance S (n, n), which may be singular; every operation leaves it symmetric.

    >>> belief = Dense(torch.eye(2), (2,))
    >>> belief.add(Matrix(torch.tensor([[1.0], [0.0]]))).variance()
    tensor([0.5000, 1.0000])

    `add` subtracts covariances, so the precision of a direction may exceed the old one by at most a factor of about
    1e13 in float64, and 1e6 in float32.

    Reference: Aitchison 2018, Eq. 3 and 7, for any number of directions.

    Args:
        covariance: S.
        shape: of the weights; n elements.
    """

    covariance: Tensor
    shape: tuple[int, ...]

    def _with(self, covariance: Tensor) -> Dense:
        return Dense(_symmetrised_(covariance), self.shape)

    def scale(self, factor: Any) -> Dense:
        return Dense(self.covariance / factor, self.shape)

    def add(self, increment: Any) -> Dense:
        """P + U U' for directions U, P + c I for a number c.

        By Woodbury's identity, S - S U (I + U'SU)^-1 U'S = S - W'W with W = L^-1 U'S and L L' = I + U'SU. If
        there are more directions than weights, U is first replaced by a square one with the same product U U'.
        """
        S = self.covariance
        if isinstance(increment, Matrix):
            U = increment.columns.reshape(len(S), -1)  # (n, k)
            if U.shape[1] > len(S):
                U = torch.linalg.qr(U.mT, mode="r").R.mT
        else:
            U = increment**0.5 * torch.eye(len(S), dtype=S.dtype, device=S.device)
        V = U.mT @ S  # (k, n)
        gram = V @ U
        gram.diagonal().add_(1)
        factor, info = torch.linalg.cholesky_ex(gram)
        W = torch.linalg.solve_triangular(factor, V, upper=False)
        posterior = torch.addmm(S, W.mT, W, alpha=-1)
        if bool(info) or not bool((posterior.diagonal() >= 0).all()):
            raise FloatingPointError(
                f"a covariance in {S.dtype} became negative: an observation has {float(gram.diagonal().max()):g} times "
                "the precision of the belief. Nothing was changed: scale the observations or the covariance down."
            )
        return self._with(posterior)

    def propagate(self, retain: Any, noise: Any) -> Dense:
        """(R^1/2 P^-1 R^1/2 + Q)^-1 for diagonal R and Q: numbers, or one for each weight."""
        root = torch.as_tensor(retain, dtype=self.covariance.dtype, device=self.covariance.device).sqrt()
        root = root.flatten().expand(len(self.covariance))
        spread = torch.outer(root, root).mul_(self.covariance)  # exactly symmetric, as both factors are
        added = torch.as_tensor(noise, dtype=spread.dtype, device=spread.device).flatten()
        spread.diagonal().add_(added)
        return Dense(spread, self.shape)

    def transform(self, A: Tensor, Q: Tensor) -> Dense:
        """((I - A) P^-1 (I - A)' + Q)^-1: a linear transition of the weights with Gaussian noise."""
        F = torch.eye(len(A), dtype=A.dtype, device=A.device) - A
        return self._with(F @ self.covariance @ F.mT + Q)

    def solve(self, vector: Tensor) -> Tensor:
        ahead = vector.shape[: vector.dim() - len(self.shape)]
        return (vector.reshape(*ahead, -1) @ self.covariance).view(vector.shape)

    def sample(self, noise: Tensor) -> Tensor:
        return (noise.reshape(-1, len(self._root)) @ self._root.mT).view(noise.shape)

    @cached_property
    def _root(self) -> Tensor:
        try:
            return cholesky(self.covariance, 0.0, "the covariance")
        except ValueError:  # it is singular, or its smallest eigenvalues were rounded to negative ones
            values, vectors = torch.linalg.eigh(self.covariance.double())
            if bool(values[0] < -ROUNDING * torch.finfo(self.covariance.dtype).eps * len(values) * values[-1]):
                raise
            return (vectors * values.clamp(min=0).sqrt()).to(self.covariance)

    def variance(self) -> Tensor:
        return self.covariance.diagonal().reshape(self.shape)

    def logdet(self) -> Tensor:
        return -torch.linalg.slogdet(self.covariance)[1]

    def to_dense(self) -> Tensor:
        return torch.linalg.inv(self.covariance)


def _symmetrised_(matrix: Tensor) -> Tensor:
    """The mean of a matrix and its transpose, in place; in strips, which fit into the cache."""
    for start in range(0, len(matrix), STRIP):
        across, down = matrix[start : start + STRIP, start:], matrix[start:, start : start + STRIP]
        mean = (across + down.mT).mul_(0.5)
        across.copy_(mean)
        down.copy_(mean.mT)
    return matrix
