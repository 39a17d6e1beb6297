"""Inverses of symmetric positive matrices by Cholesky, with a second attempt in float64, and polar factors."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesgrad.products import mm

# Coefficients of a x + b x^3 + c x^5, of which each is closest to one on the interval that the one before leaves of
# [0.01, 1], in the largest distance: 0.73 to 1.27 in the end.
QUINTICS = (8.0934, -23.6204, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526)


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
        return matrix.clone(), None  # which its owner may update in place
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


def polar_factor(gram: Tensor) -> Tensor:
    """Q with Q X about U V', the nearest matrix with orthonormal rows, for X = U S V' (..., m, n) and gram = X X'.

    Singular values of at least 0.01 (s_1^8 + s_2^8 + ...)^(1/8) become 0.73 to 1.27, by three odd polynomials of X of
    degree five, which need gram alone. It may also be similar to X X', as P M'M is for X = P^(1/2) M', and Q is then
    similar to the one of X X'. Zeros remain zeros, and the size of X does not matter.

    Reference: Amsel et al., 2025, for the polynomials; Jordan et al., 2024.
    Checked by: tests/algebra/test_linalg.py.
    """
    tiny = torch.finfo(gram.dtype).tiny
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp(min=tiny)
    gram = gram / trace  # a power of it may not be representable
    square = mm(gram, gram)
    size = (square * square.mT).sum((-2, -1), keepdim=True).clamp(min=tiny) ** 0.25
    gram, square = gram / size, square / size.square()
    found = None
    for a, b, c in QUINTICS:
        own = b * gram + c * square
        own.diagonal(dim1=-2, dim2=-1).add_(a)
        if found is None:
            found = own / trace.sqrt() / size.sqrt()
        else:
            found = mm(own, found)
        if (a, b, c) != QUINTICS[-1]:
            gram = mm(own, mm(own, gram))
            square = mm(gram, gram)
    assert found is not None
    return found


def not_invertible(matrix: Tensor, damping: float, name: str) -> Exception:
    """The exception to raise for a matrix without an inverse."""
    if bool(torch.isfinite(matrix).all()):
        return ValueError(f"{name} is singular with damping {damping:g}: raise damping.")
    return FloatingPointError(f"{name} is not finite: check the batch and the loss, scale the inputs, or lower lr.")
