r"""Beliefs about the values of a Gaussian process: dense, with a site for each value, and through inducing points.

Both are nodes of the engine; what is here is their linear algebra, and the bound's gradient by the kernel.

Reference: Khan and Rue 2023, section 5.1, Eqs. 58 to 60; Khan and Lin, 2017; Hensman, Matthews and Ghahramani, 2015.
Checked by: tests/equations/test_gaussian_process.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal

from bayesgrad.families import Family, Parameters
from bayesgrad.inference import LinearPredictorFactor, Node
from bayesgrad.inference.expectation import Delta, Expectation, Moments
from bayesgrad.models.kernels import Kernel
from bayesgrad.models.observations import Observation

JITTER = 1e-10
DELTA = Delta()


@dataclass(frozen=True, eq=False)
class Sited(Family):
    r"""N(0, K) times a Gaussian site for each value: q(f) = p(f) exp(λ1'f + λ2'f²) / Z.

    A family by itself: statistics (f, f²), sites as its natural parameters, log Z as its log-partition, and the prior
    as the measure that densities are relative to. So its entropy is -KL(q, prior), and a model needs no factor for the
    prior. With W = -2 λ2 and s = √W all is in terms of

    .. math::
        B = I + s K s, \quad \log Z = \tfrac12 \lambda_1^T m - \tfrac12 \log |B|, \quad
        K^{-1} m = \lambda_1 - s B^{-1} s K \lambda_1

    and K is never inverted. Where some W < 0, R R' = K takes the place of s: B = I + R' W R, positive definite as long
    as q is a distribution.

    Args:
        covariance: K, (n, n).
    """

    event_dims = (1, 1)

    covariance: Tensor
    _seen: list[Any] = field(default_factory=list, repr=False)
    _root: list[Tensor] = field(default_factory=list, repr=False)

    def at(self, natural: Parameters) -> Tilted | None:
        """q's factorisation, of the last sites that were asked for from memory; None where q is no distribution."""
        if not (self._seen and all(torch.equal(a, b) for a, b in zip(natural, self._seen[0]))):
            self._seen[:] = [natural, self._factored(*natural)]
        return self._seen[1]

    def _factored(self, first: Tensor, second: Tensor) -> Tilted | None:
        K, W = self.covariance, -2 * second
        if bool((W >= 0).all()):
            return Tilted.of(K, first, W)
        if not self._root:
            factor, info = torch.linalg.cholesky_ex(K)
            if info.any():
                values, vectors = torch.linalg.eigh(K)
                factor = vectors * values.clamp(min=0).sqrt()
            self._root.append(factor)
        return Tilted.of(K, first, W, self._root[0])

    def moments(self, natural: Parameters) -> tuple[Tensor, Tensor]:
        """Means and variances of the values, (n,)."""
        tilted = self._checked(natural)
        return tilted.mean, tilted.variance

    def _checked(self, natural: Parameters) -> Tilted:
        tilted = self.at(natural)
        if tilted is None:
            raise ValueError("these sites leave no distribution: their precisions are too far below zero.")
        return tilted

    def log_partition(self, natural: Parameters) -> Tensor:
        tilted = self._checked(natural)
        return (natural[0] @ tilted.mean - tilted.volume) / 2

    def entropy(self, natural: Parameters, mean: Parameters | None = None) -> Tensor:
        """-KL(q, prior), as it follows from A(λ) - ⟨λ, μ⟩ where sites are sharp."""
        tilted = self._checked(natural)
        return (tilted.W @ tilted.variance - tilted.weights @ tilted.mean - tilted.volume) / 2

    def mean(self, natural: Parameters) -> Parameters:
        mean, variance = self.moments(natural)
        return mean, variance + mean.square()

    def natural(self, mean: Parameters) -> Parameters:
        raise ValueError("the sites of a process are not found from expectations: run the rule instead.")

    def in_domain(self, natural: Parameters) -> Tensor:
        finite = all(bool(torch.isfinite(part).all()) for part in natural)
        return torch.tensor(finite and self.at(natural) is not None)

    def statistics(self, x: Tensor) -> Parameters:
        return x, x.square()

    def to_distribution(self, natural: Parameters) -> Distribution:
        tilted = self._checked(natural)
        return MultivariateNormal(tilted.mean, self.covariance - tilted.reduction(self.covariance))

    def sample(self, natural: Parameters, count: int, generator: torch.Generator | None = None) -> Tensor:
        exact = self.to_distribution(natural)
        noise = torch.randn(count, *exact.mean.shape, dtype=exact.mean.dtype, generator=generator)
        return exact.mean + noise.to(exact.mean) @ exact.scale_tril.mT  # pyright: ignore[reportAttributeAccessIssue]

    def _domain_description(self) -> str:
        return ", with sites that leave the precision positive definite"


@dataclass(eq=False)
class Tilted:
    """A process with sites.

    Args:
        W: precisions of the sites.
        factor: B's Cholesky factor.
        rooted: L^-1 R', where W is not positive.
        weights: K^-1 mean, what predictions are made of.
        mean, variance: of the values.
        volume: log|B|.
    """

    W: Tensor
    factor: Tensor
    rooted: Tensor | None
    weights: Tensor
    mean: Tensor
    volume: Tensor
    prior: Tensor

    @staticmethod
    def of(K: Tensor, first: Tensor, W: Tensor, root: Tensor | None = None) -> Tilted | None:
        s = W.sqrt()
        left = (K * s).mul_(s[:, None]) if root is None else root.mT @ (W[:, None] * root)
        left.diagonal().add_(1)
        factor, info = torch.linalg.cholesky_ex(left)
        if info.any():
            return None
        rooted = None
        if root is None:
            if bool((W * K.diagonal() > 1e-10).all()):  # no difference of large numbers where sites are sharp
                weights = s * _solved(factor, first / s)
            else:
                weights = first - s * _solved(factor, s * (K @ first))
            mean = K @ weights
        else:
            rooted = torch.linalg.solve_triangular(factor, root.mT, upper=False)
            mean = rooted.mT @ (rooted @ first)
            weights = first - W * mean
        volume = 2 * factor.diagonal().log().sum()
        return Tilted(W, factor, rooted, weights, mean, volume, K)

    @cached_property
    def variance(self) -> Tensor:
        prior = self.prior.diagonal()
        if self.rooted is not None:
            found = self.rooted.square().sum(0)
        else:
            # (1 - diag B^-1)/W, but for sites that say so little that nothing would be left of the difference.
            some = self.W * prior > 1e-5
            left = 1 - _inverse(self.factor).square().sum(0)
            found = torch.where(some, left / torch.where(some, self.W, 1), prior)
            if not some.all():
                found[~some] -= self._white(self.prior[:, ~some]).square().sum(0)
        # Rounding may leave a value that is known exactly with less than nothing.
        return found.maximum(torch.finfo(found.dtype).eps * prior)

    def _white(self, cross: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor, self.W.sqrt()[:, None] * cross, upper=False)

    def reduction(self, cross: Tensor, *, diagonal: bool = False) -> Tensor:
        """k'(K + W^-1)^-1 k for columns k of `cross`: what the sites take away from the prior's covariance."""
        if self.rooted is None:
            white = self._white(cross)
            return white.square().sum(0) if diagonal else white.mT @ white
        weighted = self.W[:, None] * cross
        inner = self.rooted @ weighted
        if diagonal:
            return (weighted * cross).sum(0) - inner.square().sum(0)
        return cross.mT @ weighted - inner.mT @ inner

    def gradient(self) -> Tensor:
        """Of the bound by K: (K^-1 m m'K^-1 - (K + W^-1)^-1)/2, with q at its optimum."""
        if self.rooted is None:
            s = self.W.sqrt()
            inverse = s[:, None] * torch.cholesky_inverse(self.factor) * s
        else:
            inner = self.rooted * self.W
            inverse = torch.diag(self.W) - inner.mT @ inner
        return (self.weights[:, None] * self.weights - inverse) / 2


def mode(family: Sited, seen: Observation, y: Tensor) -> Parameters:
    """Sites to start with: of a concave likelihood, near the posterior's mode, by a few Newton steps without variances.

    Each is a step of the rule with Delta; the last that raised the joint density counts.
    """
    sites = seen.sites(y)
    if not seen.concave:
        return sites
    best, kept = -torch.inf, sites
    for _ in range(8):
        tilted = family.at(sites)
        if tilted is None:
            break
        value, first, second = seen.expected(tilted.mean, torch.zeros_like(y), y, DELTA)
        height = float(value.sum() - tilted.weights @ tilted.mean / 2)
        if not height > best:
            break
        kept, gain, best = sites, height - best, height
        if gain < 1:
            break
        sites = first - second * tilted.mean, second / 2
    return kept


def _solved(lower: Tensor, right: Tensor) -> Tensor:
    """(L L')^-1 b, for one b several times faster than cholesky_solve."""
    half = torch.linalg.solve_triangular(lower, right[:, None], upper=False)
    return torch.linalg.solve_triangular(lower.mT, half, upper=True)[:, 0]


def _inverse(lower: Tensor) -> Tensor:
    """Of a triangular matrix, by halves: products are several times faster than solving for the identity."""
    found = torch.zeros_like(lower)
    _invert(lower, found)
    return found


def _invert(lower: Tensor, found: Tensor) -> None:
    size = len(lower)
    if size <= 64:
        found.copy_(torch.linalg.solve_triangular(lower, torch.eye(size).to(lower), upper=False))
        return
    half = size // 2
    _invert(lower[:half, :half], found[:half, :half])
    _invert(lower[half:, half:], found[half:, half:])
    inner = lower.new_empty(size - half, half)
    _times_lower(lower[half:, :half], found[:half, :half], inner)
    cut = (size - half) // 2  # the upper right quarter of what stands on the left is zero
    torch.mm(found[half : half + cut, half : half + cut], inner[:cut], out=found[half : half + cut, :half])
    torch.mm(found[half + cut :, half:], inner, out=found[half + cut :, :half])
    found[half:, :half].neg_()


def _times_lower(left: Tensor, lower: Tensor, out: Tensor) -> None:
    """left @ lower without the quarter of zeros."""
    cut = len(lower) // 2
    torch.mm(left, lower[:, :cut], out=out[:, :cut])
    torch.mm(left[:, cut:], lower[cut:, cut:], out=out[:, cut:])


class Induced(LinearPredictorFactor):
    r"""Σ_i log p(y_i | f_i), where f is known through its values at M inducing points: u = L v with v ~ N(0, I).

    .. math::
        f_i \mid v \sim N(\phi_i^T v,\; k_{ii} - |\phi_i|^2), \quad \phi_i = L^{-1} k(Z, x_i), \quad L L^T = k(Z, Z)

    Args:
        node: v, a Gaussian.
        x: rows (n, d).
        y: targets (n,).
        points: Z, (M, d).
    """

    def __init__(
        self,
        node: Node,
        kernel: Kernel,
        seen: Observation,
        x: Tensor,
        y: Tensor,
        points: Tensor,
        expectation: Expectation,
        *,
        scale: float = 1.0,
    ) -> None:
        design, self.rest = features(kernel, x, points)
        super().__init__(node, design.detach(), lambda f: seen.log_density(f, y), expectation, scale=scale)
        self.live, self.seen, self.y = design, seen, y

    def predictor_moments(self) -> tuple[Tensor, Tensor]:
        mean, variance = super().predictor_moments()
        return mean, variance + self.rest.detach()

    def moments(self) -> Moments:
        natural = self.nodes[0].natural
        if self._seen is None or self._seen[0] is not natural:
            with torch.no_grad():
                marginals = self.predictor_moments()
                self._seen = natural, self.seen.expected(*marginals, self.y, self.expectation)
        return self._seen[1]

    def differentiable(self) -> Tensor:
        """The factor's value as a function of the kernel's numbers, at the belief about v as it is."""
        (node,) = self.nodes
        mean, covariance = node.family.moments(node.natural)  # pyright: ignore[reportAttributeAccessIssue]
        at = self.live @ mean
        variance = ((self.live @ covariance) * self.live).sum(1) + self.rest
        return self.scale * expected_value(self.seen, at, variance, self.y, self.expectation)


def features(kernel: Kernel, x: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """φ, (n, M), and k(x, x) - |φ|², (n,)."""
    inner = kernel(points, points)
    inner = inner + JITTER * inner.diagonal().mean() * torch.eye(len(points)).to(x)
    factor, info = torch.linalg.cholesky_ex(inner)
    if info.any():
        raise ValueError("inducing points are too close for this kernel: take fewer, or others.")
    design = torch.linalg.solve_triangular(factor, kernel(points, x), upper=False).mT
    return design, (kernel.diagonal(x) - design.square().sum(1)).clamp(min=0)


def expected_value(seen: Observation, mean: Tensor, variance: Tensor, y: Tensor, expectation: Expectation) -> Tensor:
    """Σ E[log p(y | f)], differentiable by the marginals (Bonnet and Price) and by the observation's own numbers."""
    with torch.no_grad():
        value, first, second = seen.expected(mean, variance, y, expectation)
    moved = first * (mean - mean.detach()) + second / 2 * (variance - variance.detach())
    total = (value + moved).sum()
    if any(number.requires_grad for number in seen.numbers().values()):
        at, _, weights = expectation.points(mean.detach()[:, None], variance.detach().sqrt()[:, None, None])
        own = (weights[:, None] * seen.log_density(at[..., 0], y)).sum()
        total = total + own - own.detach()
    return total
