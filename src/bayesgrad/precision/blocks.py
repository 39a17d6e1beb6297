"""Independent blocks of weights, each with a dense precision matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesgrad.precision.algebra import Precision
from bayesgrad.precision.linalg import cholesky, inverse_factor


@dataclass(frozen=True, eq=False)
class Blocks(Precision):
    """P = L L' for each of m blocks of k weights, stored as the lower triangles L (m, k, k).

    >>> belief = Blocks.of(torch.diag(torch.tensor([1.0, 4.0])))
    >>> belief.solve(torch.tensor([1.0, 2.0])), belief.sample(torch.tensor([1.0, 2.0]))
    (tensor([1.0000, 0.5000]), tensor([1., 1.]))

    Args:
        factor: L.
        shape: of the weights; m k elements, ordered by block.
    """

    factor: Tensor
    shape: tuple[int, ...]

    @staticmethod
    def of(
        matrix: Tensor, damping: float = 0.0, name: str = "the precision", shape: tuple[int, ...] | None = None
    ) -> Blocks:
        """P = matrix + damping I, for (k, k) or (m, k, k); `shape` is (m k,) by default.

        Raises:
            ValueError, FloatingPointError: P is not positive, or not finite; the message uses `name`.
        """
        factor = cholesky(matrix.reshape(-1, *matrix.shape[-2:]), damping, name)
        return Blocks(factor, (factor.shape[:2].numel(),) if shape is None else shape)

    def _with(self, matrix: Tensor, damping: Any = 0.0) -> Blocks:
        return Blocks.of(matrix, damping, shape=self.shape)

    def _columns(self, vector: Tensor) -> Tensor:
        return vector.reshape(*self.factor.shape[:2], 1)

    def _matrices(self) -> Tensor:
        return self.factor @ self.factor.mT

    def scale(self, factor: Any) -> Blocks:
        return Blocks(self.factor * factor**0.5, self.shape)

    def add(self, increment: Any) -> Blocks:
        """P + c I for a number c, P + H for H of the same structure."""
        if isinstance(increment, Blocks):
            return self._with(self._matrices() + increment._matrices())
        return self._with(self._matrices(), increment)

    def propagate(self, retain: Any, noise: Any) -> Blocks:
        eye = torch.eye(self.factor.shape[-1], dtype=self.factor.dtype, device=self.factor.device)
        return self._with(torch.linalg.inv(retain * torch.cholesky_inverse(self.factor) + noise * eye))

    def solve(self, vector: Tensor) -> Tensor:
        return torch.cholesky_solve(self._columns(vector), self.factor).reshape(vector.shape)

    def sample(self, noise: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor.mT, self._columns(noise), upper=True).reshape(noise.shape)

    def variance(self) -> Tensor:
        return inverse_factor(self.factor).square().sum(-2).reshape(self.shape)

    def logdet(self) -> Tensor:
        return 2 * self.factor.diagonal(dim1=-2, dim2=-1).log().sum()

    def to_dense(self) -> Tensor:
        return torch.block_diag(*self._matrices())
