"""Positive definite matrices of a family's parameters: factors, inverses and determinants.

A family of independent numbers has plates of 1 x 1 matrices, which LAPACK would factorise one at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

INDEFINITE = "a precision, covariance or scale is not positive definite: the parameters do not define a distribution."


def cholesky_ex(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """As `torch.linalg.cholesky_ex`: the factor, and a number for each matrix that is not 0 if there is none."""
    if matrix.shape[-1] == 1:
        return matrix.sqrt(), (~(matrix > 0))[..., 0, 0].int()
    factor, info = torch.linalg.cholesky_ex(matrix)
    return factor, info


def cholesky(matrix: Tensor) -> Tensor:
    factor, info = cholesky_ex(matrix)
    if info.any():
        raise ValueError(INDEFINITE)
    return factor


def inverted(matrix: Tensor) -> Tensor:
    """The inverse of a positive definite matrix.

    Raises:
        ValueError: it is not positive definite.
    """
    if matrix.shape[-1] > 1:
        return factor_inverse(cholesky(matrix))
    if not (matrix > 0).all():
        raise ValueError(INDEFINITE)
    return matrix.reciprocal()


def factor_inverse(factor: Tensor) -> Tensor:
    """As `torch.cholesky_inverse`: the inverse of L L' for a factor L."""
    return factor.square().reciprocal() if factor.shape[-1] == 1 else torch.cholesky_inverse(factor)


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    """M v, for plates of both."""
    return matrix[..., 0] * vector if matrix.shape[-1] == 1 else (matrix @ vector[..., None])[..., 0]


def log_abs_det(matrix: Tensor) -> Tensor:
    """log |det M|, one number for each matrix."""
    return matrix[..., 0, 0].abs().log() if matrix.shape[-1] == 1 else torch.linalg.slogdet(matrix)[1]


def is_definite(matrix: Tensor) -> Tensor:
    """Whether a symmetric matrix is finite and positive definite, one boolean per plate."""
    # The factorisation of a numerically singular matrix may succeed, so its pivots are checked too. The inverse of a
    # subnormal number is infinite.
    limits = torch.finfo(matrix.dtype)
    if matrix.shape[-1] == 1:
        return ((matrix > limits.tiny) & (matrix < torch.inf))[..., 0, 0]
    factor, info = cholesky_ex(matrix)
    pivots = factor.diagonal(dim1=-2, dim2=-1).square()
    least = (limits.eps * matrix.diagonal(dim1=-2, dim2=-1)).clamp_min(limits.tiny)
    return (info == 0) & (pivots > least).all(-1)


def log_det_divergence(matrix: Tensor, base: Tensor, log_det: Tensor | None = None) -> Tensor:
    """tr(B^-1 M) - P - log |B^-1 M| for positive definite M = `matrix` and B = `base`, not negative.

    If M is close to B, from the eigenvalues of B^-1 M - I, which keep the digits of a small divergence. `log_det` is
    log |B^-1 M|, if it is known; M may be singular then.
    """
    factor = cholesky(base)
    half = torch.linalg.solve_triangular(factor, matrix - base, upper=False)
    change = torch.linalg.solve_triangular(factor, half.mT, upper=False)
    if log_det is None:
        log_det = 2 * (cholesky(matrix).diagonal(dim1=-2, dim2=-1) / factor.diagonal(dim1=-2, dim2=-1)).log().sum(-1)
    far = change.diagonal(dim1=-2, dim2=-1).sum(-1) - log_det
    close = change.square().sum((-2, -1)) < 0.25
    e = torch.linalg.eigvalsh(torch.where(close[..., None, None], change, torch.zeros_like(change)))
    return torch.where(close, (e - torch.log1p(e)).sum(-1), far)
