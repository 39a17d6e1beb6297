"""Precisions of a weight matrix with a covariance of rows and a covariance of columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesgrad.precision.algebra import BilinearForm, Precision
from bayesgrad.products import mm


@dataclass(frozen=True, eq=False)
class Kronecker(Precision):
    """P = (L ⊗ R)^-1 for weights W (out, in), stored as the covariances L of rows and R of columns.

    A factor is a matrix, the vector of its diagonal, or None for the identity. All may have a leading dimension of
    groups, as W then has. solve(V) = L V R. `add` of a number and `propagate` return a `Spectral`.

    >>> belief = Kronecker(None, torch.diag(torch.tensor([1.0, 4.0])), (1, 2))
    >>> belief.solve(torch.ones(1, 2))
    tensor([[1., 4.]])

    Args:
        left: L, (out, out), (out,) or None.
        right: R, (in, in), (in,) or None.
        shape: of W.
    """

    left: Tensor | None
    right: Tensor | None
    shape: tuple[int, ...]

    def _factor(self, side: Tensor | None, size: int) -> Tensor:
        """A factor as a matrix."""
        if side is None:
            other = self.left if self.right is None else self.right
            like = other if other is not None else torch.ones(())
            return torch.eye(size, dtype=like.dtype, device=like.device).expand(*self.shape[:-2], size, size)
        return torch.diag_embed(side) if self._is_diagonal(side) else side

    def matrices(self) -> tuple[Tensor, Tensor]:
        """L and R as matrices."""
        return self._factor(self.left, self.shape[-2]), self._factor(self.right, self.shape[-1])

    def spectral(self) -> Spectral:
        """The same precision in its eigenbasis, in which adding multiples of the identity is exact."""
        (left, rows), (right, columns) = (torch.linalg.eigh(factor) for factor in self.matrices())
        return Spectral(rows, columns, 1 / (left[..., :, None] * right[..., None, :]))

    def scale(self, factor: Any) -> Kronecker:
        if self.right is None:
            return Kronecker(self._factor(self.left, self.shape[-2]) / factor, None, self.shape)
        return Kronecker(self.left, self.right / factor, self.shape)

    def add(self, increment: Any) -> Precision:
        """P + c I for a number c; P + H for a `Kronecker` H that shares a factor with P."""
        if not isinstance(increment, Kronecker):
            return self.spectral().add(increment)
        for shared, (a, b) in (("left", (self.right, increment.right)), ("right", (self.left, increment.left))):
            if getattr(self, shared) is not getattr(increment, shared) or a is None or b is None:
                continue
            if self._is_diagonal(a) and self._is_diagonal(b):
                total = 1 / (1 / a + 1 / b)
            else:
                a, b = (torch.diag_embed(f) if self._is_diagonal(f) else f for f in (a, b))
                total = torch.linalg.inv(torch.linalg.inv(a) + torch.linalg.inv(b))
            left, right = (self.left, total) if shared == "left" else (total, self.right)
            return Kronecker(left, right, self.shape)
        raise ValueError("two Kronecker products must share a factor to be added: add a number instead.")

    def propagate(self, retain: Any, noise: Any) -> Precision:
        return self.spectral().propagate(retain, noise)

    def solve(self, vector: Tensor) -> Tensor:
        return self._times(vector, self.left, self.right)

    def multiply(self, vector: Tensor) -> Tensor:
        left, right = (
            f if f is None else 1 / f if self._is_diagonal(f) else torch.linalg.inv(f) for f in (self.left, self.right)
        )
        return self._times(vector, left, right)

    def _times(self, vector: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
        """left @ vector @ right; both may be diagonals or the identity."""
        if right is not None:
            vector = vector * right[..., None, :] if self._is_diagonal(right) else mm(vector, right)
        if left is not None:
            vector = left[..., :, None] * vector if self._is_diagonal(left) else mm(left, vector)
        return vector

    def _is_diagonal(self, factor: Tensor) -> bool:
        return factor.dim() < len(self.shape)

    def sample(self, noise: Tensor) -> Tensor:
        left, right = (
            f if f is None else f.sqrt() if self._is_diagonal(f) else torch.linalg.cholesky(f)
            for f in (self.left, self.right)
        )
        return self._times(noise, left, right if right is None or self._is_diagonal(right) else right.mT)

    def variance(self) -> Tensor:
        left, right = (factor.diagonal(dim1=-2, dim2=-1) for factor in self.matrices())
        return left[..., :, None] * right[..., None, :]

    def logdet(self) -> Tensor:
        left, right = (torch.linalg.slogdet(factor)[1].sum() for factor in self.matrices())
        return -(self.shape[-1] * left + self.shape[-2] * right)

    def to_dense(self) -> Tensor:
        left, right = (torch.linalg.inv(factor) for factor in self.matrices())
        return block_kron(left, right)

    def bilinear_form(self) -> BilinearForm:
        """L V R, without roots of the factors; diagonals are variances."""
        factors, variance = [], None
        for side, dim in ((self.left, -1), (self.right, -2)):
            diagonal = side is not None and self._is_diagonal(side)
            if side is not None and diagonal:
                spread = side.unsqueeze(dim).expand(self.shape)
                variance = spread if variance is None else variance * spread
            factors.append(None if diagonal else side)
        return BilinearForm(factors[0], factors[1], variance, both=False)


@dataclass(frozen=True, eq=False)
class Spectral(Precision):
    """P = (Q ⊗ S) diag(p) (Q ⊗ S)' for weights W (out, in): any spectrum in the eigenbasis of a Kronecker product.

    Args:
        rows: Q, (out, out), orthogonal; None for the identity.
        columns: S, (in, in), orthogonal; None for the identity.
        spectrum: p, (out, in), positive.
    """

    rows: Tensor | None
    columns: Tensor | None
    spectrum: Tensor

    def into(self, vector: Tensor) -> Tensor:
        """A matrix in the eigenbasis: Q' V S."""
        vector = vector if self.rows is None else mm(self.rows.mT, vector)
        return vector if self.columns is None else mm(vector, self.columns)

    def out(self, vector: Tensor) -> Tensor:
        """A matrix out of the eigenbasis: Q V S'."""
        vector = vector if self.rows is None else mm(self.rows, vector)
        return vector if self.columns is None else mm(vector, self.columns.mT)

    def scale(self, factor: Any) -> Spectral:
        return Spectral(self.rows, self.columns, factor * self.spectrum)

    def add(self, increment: Any) -> Spectral:
        """P + c I for a number c, or P + H for H in the same basis, given by its spectrum."""
        return Spectral(self.rows, self.columns, self.spectrum + increment)

    def propagate(self, retain: Any, noise: Any) -> Spectral:
        return Spectral(self.rows, self.columns, 1 / (retain / self.spectrum + noise))

    def solve(self, vector: Tensor) -> Tensor:
        return self.out(self.into(vector) / self.spectrum)

    def multiply(self, vector: Tensor) -> Tensor:
        return self.out(self.into(vector) * self.spectrum)

    def sample(self, noise: Tensor) -> Tensor:
        """The symmetric root: noise in the eigenbasis would depend on signs, and on the basis of a null space."""
        return self.out(self.into(noise) / self.spectrum.sqrt())

    def variance(self) -> Tensor:
        rows, columns = (None if basis is None else basis.square() for basis in (self.rows, self.columns))
        return Spectral(rows, columns, self.spectrum).out(1 / self.spectrum)

    def logdet(self) -> Tensor:
        return self.spectrum.log().sum()

    def to_dense(self) -> Tensor:
        sizes = self.spectrum.shape[-2:]
        eyes = (torch.eye(n).to(self.spectrum).expand(*self.spectrum.shape[:-2], n, n) for n in sizes)
        left, right = (eye if basis is None else basis for basis, eye in zip((self.rows, self.columns), eyes))
        basis = block_kron(left, right)
        return basis @ torch.diag(self.spectrum.flatten()) @ basis.T

    def bilinear_form(self) -> BilinearForm:
        return BilinearForm(self.rows, self.columns, 1 / self.spectrum)


def block_kron(left: Tensor, right: Tensor) -> Tensor:
    """The matrix of L ⊗ R, block-diagonal in groups."""
    if left.dim() == 2:
        return torch.kron(left.contiguous(), right.contiguous())
    return torch.block_diag(*[torch.kron(a.contiguous(), b.contiguous()) for a, b in zip(left, right)])
