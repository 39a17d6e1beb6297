"""The multinomial likelihood of labels given linear predictors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bayesgrad.inference.expectation import Expectation, GaussHermite, Moments, QuasiMonteCarlo, times_root
from bayesgrad.models.observations import QUADRATURE, CallableLikelihood, Logistic
from bayesgrad.models.quadrature import midpoint

GRID = 5.0  # largest deviation of two numbers for which predictions use a grid
PAIRS, SAMPLES = 32, 4096  # of predictions: pairs of points on each side of the grid, points elsewhere
BLOCK = 1 << 21  # numbers that a prediction evaluates at a time


def quadrature(size: int) -> Expectation:
    """Gauss-Hermite points for one number, a grid of 20 x 20 for two, 256 fixed points for more."""
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

    def expected(self, z: Tensor, variance: Tensor, y: Tensor, expectation: Expectation) -> Moments:
        """E[log p(y | z)] under N(z, variance), (n,), and the expectations of its gradient and Hessian by z.

        Of two classes the difference of the logits is f = sqrt(2) z, whose density is a logistic one.
        """
        if self.classes == 2 and isinstance(expectation, GaussHermite):
            first = (y == 0).to(z)
            moments = Logistic().expected(math.sqrt(2) * z[:, 0], 2 * variance[:, 0, 0], first, expectation)
            return Moments(moments.value, math.sqrt(2) * moments.first[:, None], 2 * moments.second[:, None, None])
        return expectation.rows(MultinomialLogLikelihood(self, y), z, _root(variance))

    def information(self, z: Tensor) -> Tensor:
        # For equal probabilities: B'(I/C - 11'/C^2)B = I/C.
        return torch.full_like(z[..., 0], 1 / self.classes)

    def mean(self, z: Tensor, variance: Tensor) -> Tensor:
        """(n, C), for contrasts z (n, C-1) with covariances `variance` (n, C-1, C-1).

        Errors of probabilities, measured: 1e-8 for two classes; for three 1e-6 where deviations are at most 5; else
        0.01, and 0.0005 where they are at most 1.
        """
        if self.classes == 2:
            first = Logistic().predict(math.sqrt(2) * z[:, 0], 2 * variance[:, 0, 0]).mean
            return torch.stack([first, 1 - first], 1)
        root, found = _root(variance), z.new_empty(len(z), self.classes)
        wide = variance.diagonal(dim1=1, dim2=2).amax(1) > (GRID**2 if self.classes == 3 else -1)
        rules = [(wide, _samples(z)), (~wide, _grid(z))]
        for mask, (noise, weights) in rules[: 2 if self.classes == 3 else 1]:
            for rows in mask.nonzero()[:, 0].split(max(1, BLOCK // (len(noise) * self.classes))):
                at = z[rows] + times_root(root[rows], noise[:, None].expand(-1, len(rows), -1))
                found[rows] = torch.einsum("s,snc->nc", weights, (at @ self.basis(z).mT).softmax(-1))
        return found


def _root(variance: Tensor) -> Tensor:
    """The lower Cholesky factor of covariances, which may be zero, as of the predictors of a row of zeros."""
    eye = torch.eye(variance.shape[-1], dtype=variance.dtype, device=variance.device)
    return torch.linalg.cholesky(variance + torch.finfo(variance.dtype).tiny ** 0.5 * eye)


def _samples(like: Tensor) -> tuple[Tensor, Tensor]:
    """Standard noise (points, size) for numbers (n, size), and weights."""
    size = like.shape[1]
    noise, _, weights = QuasiMonteCarlo(max(SAMPLES, 4 * size)).points(0 * like[:1], torch.eye(size).to(like)[None])
    return noise[:, 0], weights


def _grid(like: Tensor) -> tuple[Tensor, Tensor]:
    """The same for two numbers, of the midpoint rule."""
    nodes, half = (torch.as_tensor(part).to(like) for part in midpoint(PAIRS))
    nodes, half = torch.cat([nodes, -nodes]), torch.cat([half, half])
    return torch.cartesian_prod(nodes, nodes), torch.outer(half, half).flatten()


class MultinomialLogLikelihood(CallableLikelihood):
    """log p(y | z) as a function of z, with derivatives in closed form."""

    def derivatives(self, at: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.observation.derivatives(self.y, at, weights)
