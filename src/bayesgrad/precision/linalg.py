"""Inverses of symmetric positive matrices by Cholesky, with a second attempt in float64."""

from __future__ import annotations

import torch
from torch import Tensor

QUINTIC = 3.4445, -4.7750, 2.0315  # coefficients of a x + b x^3 + c x^5, which takes small numbers near one fast


def cholesky(matrix: Tensor, damping: float, name: str) -> Tensor:
    """The lower Cholesky factor of matrix + damping I, for (..., n, n).

    Args:
        name: of the matrix, for the error.

    Raises:
        ValueError: the matrix is not positive, even in float64.
        FloatingPointError: the matrix has entries that are not finite.
    """
    return _factor(matrix, damping, name).to(matrix.dtype)


def inverse(matrix: Tensor, damping: float, name: str) -> Tensor:
    """(matrix + damping I)^-1, for (..., n, n); raises as `cholesky` does."""
    found = torch.cholesky_inverse(_factor(matrix, damping, name))
    return found.mT.contiguous().to(matrix.dtype)  # columns one after the other: products would be rounded otherwise


def _factor(matrix: Tensor, damping: float, name: str) -> Tensor:
    """The Cholesky factor in the dtype of the matrix, or, if there is none, in float64."""
    for dtype in dict.fromkeys((matrix.dtype, torch.float64)):
        damped = matrix.to(dtype, copy=True)
        damped.diagonal(dim1=-2, dim2=-1).add_(damping)
        factor, info = torch.linalg.cholesky_ex(damped)
        if not bool(info.any()) and bool(torch.isfinite(factor.diagonal(dim1=-2, dim2=-1)).all()):
            return factor
    raise not_invertible(matrix.tril(), damping, name)


def inverse_factor(factor: Tensor) -> Tensor:
    """L^-1 of a Cholesky factor L: (L L')^-1 = L^-T L^-1."""
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    return torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)


def diagonal_inverse(diagonal: Tensor, damping: float, name: str) -> Tensor:
    """1/(diagonal + damping), for a matrix that is stored as its diagonal."""
    damped = diagonal + damping
    if not bool((damped > 0).all() & torch.isfinite(damped).all()):
        raise not_invertible(diagonal, damping, name)
    return 1 / damped


def eigenvalues(matrix: Tensor) -> tuple[Tensor, Tensor | None]:
    """Eigenvalues (..., n), clamped at zero, and eigenvectors of a symmetric matrix; a diagonal has None for them."""
    if matrix.dim() == 2:
        return matrix, None
    for dtype in dict.fromkeys((matrix.dtype, torch.float64)):
        try:
            values, vectors = torch.linalg.eigh(matrix.to(dtype))
        except torch.linalg.LinAlgError:  # it may converge in float64
            if dtype == torch.float64:
                raise
            continue
        # LAPACK can return NaN for a finite matrix with many equal eigenvalues, without an error.
        if dtype == torch.float64 or bool(torch.isfinite(vectors).all()):
            return values.to(matrix).clamp(min=0), vectors.to(matrix)
    raise AssertionError  # the last dtype returns or raises


def orthogonalised(matrix: Tensor, rounds: int = 5) -> Tensor:
    """About the nearest matrix with orthonormal rows or columns, (..., m, n): U V' for a matrix U S V'.

    Singular values of at least 1/400 of the Frobenius norm become 0.68 to 1.21, by the quintic Newton-Schulz iteration
    of Muon, which takes products alone. A matrix of zeros remains one.

    Reference: Jordan et al., 2024.
    Checked by: tests/algebra/test_linalg.py.
    """
    a, b, c = QUINTIC
    x = matrix.mT if matrix.shape[-2] > matrix.shape[-1] else matrix
    tiny = torch.finfo(x.dtype).tiny
    x = x / x.abs().amax((-2, -1), keepdim=True).clamp(min=tiny)  # the square of the norm may not be representable
    x = x / x.square().sum((-2, -1), keepdim=True).sqrt().clamp(min=tiny)
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if matrix.shape[-2] > matrix.shape[-1] else x


def not_invertible(matrix: Tensor, damping: float, name: str) -> Exception:
    """The exception to raise for a matrix without an inverse."""
    if bool(torch.isfinite(matrix).all()):
        return ValueError(f"{name} is singular with damping {damping:g}: raise damping.")
    return FloatingPointError(f"{name} is not finite: check the batch and the loss, scale the inputs, or lower lr.")
