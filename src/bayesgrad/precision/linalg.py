"""Inverses of symmetric positive matrices by Cholesky, with a second attempt in float64."""

from __future__ import annotations

import torch
from torch import Tensor

SMALL = 64  # rows up to which LAPACK is used


def cholesky(matrix: Tensor, damping: float, name: str) -> Tensor:
    """The lower Cholesky factor of matrix + damping I, for (..., n, n).

    Args:
        name: of the matrix, for the error.

    Raises:
        ValueError: the matrix is not positive, even in float64.
        FloatingPointError: the matrix has entries that are not finite.
    """
    for dtype in dict.fromkeys((matrix.dtype, torch.float64)):
        damped = matrix.to(dtype, copy=True)
        damped.diagonal(dim1=-2, dim2=-1).add_(damping)
        factor, info = torch.linalg.cholesky_ex(damped)
        if not bool(info.any()) and bool(torch.isfinite(factor.diagonal(dim1=-2, dim2=-1)).all()):
            return factor.to(matrix.dtype)
    raise not_invertible(matrix.tril(), damping, name)


def inverse(matrix: Tensor, damping: float, name: str) -> Tensor:
    """(matrix + damping I)^-1."""
    for dtype in dict.fromkeys((matrix.dtype, torch.float64)):
        damped = matrix.to(dtype, copy=True)
        damped.diagonal(dim1=-2, dim2=-1).add_(damping)
        root = inverse_root(damped)
        if bool(torch.isfinite(root.diagonal(dim1=-2, dim2=-1)).all()):
            return _gram(root).to(matrix.dtype)
    raise not_invertible(matrix.tril(), damping, name)


def inverse_root(matrix: Tensor) -> Tensor:
    """L^-1, for the Cholesky factor L of a matrix of which only the lower triangle is read; nan if it is not positive.

    Halves are combined by matrix products, which are several times faster on CPUs than LAPACK's functions.
    """
    size = matrix.shape[-1]
    if size <= SMALL:
        factor, info = torch.linalg.cholesky_ex(matrix)
        factor = torch.where((info == 0)[..., None, None], factor, torch.nan)
        return inverse_factor(factor)
    half = size // 2
    first = inverse_root(matrix[..., :half, :half])
    below = matrix[..., half:, :half] @ first.mT
    rest = inverse_root(matrix[..., half:, half:] - below @ below.mT)
    root = torch.zeros_like(matrix)
    root[..., :half, :half] = first
    root[..., half:, half:] = rest
    root[..., half:, :half] = rest @ (below @ first).neg_()
    return root


def _gram(root: Tensor) -> Tensor:
    """T'T of a lower triangular T."""
    size = root.shape[-1]
    if size <= SMALL:
        return root.mT @ root
    half = size // 2
    first, below, rest = root[..., :half, :half], root[..., half:, :half], root[..., half:, half:]
    product = torch.empty_like(root)
    product[..., half:, :half] = rest.mT @ below
    product[..., :half, half:] = product[..., half:, :half].mT
    product[..., :half, :half] = _gram(first) + below.mT @ below
    product[..., half:, half:] = _gram(rest)
    return product


def inverse_factor(factor: Tensor) -> Tensor:
    """L^-1 of a Cholesky factor L: (L L')^-1 = L^-T L^-1. Much faster on CPUs than torch.cholesky_inverse."""
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


def not_invertible(matrix: Tensor, damping: float, name: str) -> Exception:
    """The exception to raise for a matrix without an inverse."""
    if bool(torch.isfinite(matrix).all()):
        return ValueError(f"{name} is singular with damping {damping:g}: raise damping.")
    return FloatingPointError(f"{name} is not finite: check the batch and the loss, scale the inputs, or lower lr.")
