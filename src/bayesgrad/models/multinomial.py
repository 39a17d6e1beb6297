"""The multinomial likelihood of labels given linear predictors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bayesgrad.inference.expectation import Expectation, GaussHermite, QuasiMonteCarlo
from bayesgrad.models.observations import QUADRATURE, CallableLikelihood


def quadrature(size: int) -> Expectation:
    """32 Gauss-Hermite points for one number, a grid of 20 x 20 for two, 256 fixed points for more."""
    if size == 1:
        return QUADRATURE
    return GaussHermite(20) if size == 2 else QuasiMonteCarlo(max(256, 4 * size))


@dataclass(frozen=True)
class Multinomial:
    """P(y = c) = softmax(B z)_c, y in {0, ..., C-1}, for C - 1 contrasts z and an orthonormal B whose columns sum to 0.

    Softmax is invariant to a constant added to all logits. With independent priors of equal precision for the weights
    of the C logits, the C - 1 contrasts z = B'f have the same priors, and the common constant keeps its prior.

    Args:
        classes: C.
    """

    classifies: ClassVar[bool] = True
    concave: ClassVar[bool] = True
    conjugate: ClassVar[bool] = False
    least_squares: ClassVar[bool] = False
    classes: int = 3

    def basis(self, like: Tensor) -> Tensor:
        """B, (C, C-1): the Helmert contrasts."""
        rows = torch.arange(self.classes, dtype=like.dtype, device=like.device)[:, None]
        columns = torch.arange(1, self.classes, dtype=like.dtype, device=like.device)
        contrasts = (rows < columns).to(like) - (rows == columns).to(like) * columns
        return contrasts / (columns * (columns + 1)).sqrt()

    def log_density(self, z: Tensor, y: Tensor) -> Tensor:
        logits = (z @ self.basis(z).mT).log_softmax(-1)
        return logits.gather(-1, y.long()[..., None].expand(*logits.shape[:-1], 1))[..., 0]

    def derivatives(self, y: Tensor, at: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """log p, its gradient and its Hessian, -B'(diag(p) - pp')B, averaged over points (s, n, C-1)."""
        basis = self.basis(at)
        log_p = (at @ basis.mT).log_softmax(-1)
        p, labels = log_p.exp(), y.long()[:, None]
        mean = torch.einsum("s,snc->nc", weights, p)
        pairs = torch.einsum("snc,snd->ncd", weights[:, None, None] * p, p)
        value = torch.einsum("s,snc->nc", weights, log_p).gather(1, labels)[:, 0]
        first = torch.zeros_like(mean).scatter_(1, labels, 1.0) - mean
        return value, first @ basis, basis.mT @ (pairs - torch.diag_embed(mean)) @ basis

    def information(self, z: Tensor) -> Tensor:
        # For equal probabilities: B'(I/C - 11'/C^2)B = I/C.
        return torch.full_like(z[..., 0], 1 / self.classes)

    def mean(self, z: Tensor, variance: Tensor) -> Tensor:
        """(n, C), for contrasts z (n, C-1) with covariances `variance` (n, C-1, C-1)."""
        at, _, weights = quadrature(self.classes - 1).points(z, torch.linalg.cholesky(variance))
        return torch.einsum("s,snc->nc", weights, (at @ self.basis(z).mT).softmax(-1))


class MultinomialLogLikelihood(CallableLikelihood):
    """log p(y | z) as a function of z, with derivatives in closed form."""

    def derivatives(self, at: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.observation.derivatives(self.y, at, weights)
