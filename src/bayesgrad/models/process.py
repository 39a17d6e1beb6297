r"""Posteriors of the values of a Gaussian process: dense, with a site for each value, and with inducing points.

Both are nodes of the inference engine. This module has their linear algebra and the gradient of the bound with respect
to the kernel.

Reference: Khan and Rue 2023, section 5.1, Eqs. 58 to 60; Khan and Lin, 2017; Hensman, Matthews and Ghahramani, 2015.
Checked by: tests/equations/test_gaussian_process.py.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal

from bayesgrad.families import Family, Parameters
from bayesgrad.inference import LinearPredictorFactor, Node
from bayesgrad.inference.expectation import Delta, Expectation, Moments
from bayesgrad.models.hyperparameters import ProcessModel
from bayesgrad.models.kernels import Kernel
from bayesgrad.models.observations import Observation

JITTER = 1e-10
DELTA = Delta()


@dataclass(frozen=True, eq=False)
class WithSites(Family):
    """A Gaussian prior times a Gaussian site for each of some values f: a family with statistics (f, f²), the sites as
    natural parameters, and the prior as base measure."""

    event_dims = (1, 1)
    prior_name: ClassVar[str]
    _cached: list[Any] = field(default_factory=list, repr=False, kw_only=True)

    @abstractmethod
    def _posterior(self, natural: Parameters) -> Any:
        """The posterior given these sites."""

    @abstractmethod
    def moments(self, natural: Parameters) -> tuple[Tensor, Tensor]:
        """Means and variances of the values."""

    def at(self, natural: Parameters) -> Any:
        """The posterior given these sites; the last result is cached."""
        if not (self._cached and all(torch.equal(a, b) for a, b in zip(natural, self._cached[0]))):
            self._cached[:] = [natural, self._posterior(natural)]
        return self._cached[1]

    def mean(self, natural: Parameters) -> Parameters:
        mean, variance = self.moments(natural)
        return mean, variance + mean.square()

    def natural(self, mean: Parameters) -> Parameters:
        raise ValueError(f"the sites of a {self.prior_name} cannot be computed from expectations: use run.")

    def statistics(self, x: Tensor) -> Parameters:
        return x, x.square()

    def to_distribution(self, natural: Parameters) -> Distribution:
        raise ValueError(f"a {self.prior_name} has no torch Distribution: use the samples of its estimator.")

    def sample(self, natural: Parameters, count: int, generator: torch.Generator | None = None) -> Tensor:
        raise ValueError(f"the values of a {self.prior_name} are sampled by its estimator.")


@dataclass(frozen=True, eq=False)
class ProcessWithSites(WithSites):
    r"""N(0, K) times a Gaussian site for each value: q(f) = p(f) exp(λ1'f + λ2'f²) / Z.

    An exponential family with statistics (f, f²), the sites as natural parameters, log Z as its log-partition, and the
    prior as base measure. Its entropy is -KL(q, prior), so a model needs no factor for the prior. With W = -2 λ2,
    s = √|W| and the diagonal matrix J of the signs of W,

    .. math::
        s K s + J = L J L^T, \quad \log Z = \tfrac12 \lambda_1^T m - \log |L|, \quad
        K^{-1} m = s (s K s + J)^{-1} J s^{-1} \lambda_1

    and K is never inverted. Without negative sites L is a Cholesky factor. Else, with negative sites last, it has two:
    that of the positive sites, and that of 1 - s C s for the negative ones, where C is their covariance given the
    positive sites. The second exists if and only if q is a distribution. No difference of two numbers of the size of
    K W K is taken, which would leave no digits where the variance of the kernel is far above that of the noise.

    Args:
        covariance: K, (n, n).
    """

    domain = ", with sites for which the precision is positive definite"
    prior_name = "process"

    covariance: Tensor

    def _posterior(self, natural: Parameters) -> ProcessPosterior | None:
        """The factorisation of q. None if q is not a distribution."""
        return ProcessPosterior.of(self.covariance, natural[0], -2 * natural[1])

    def moments(self, natural: Parameters) -> tuple[Tensor, Tensor]:
        """Means and variances of the values, (n,)."""
        posterior = self._checked(natural)
        return posterior.mean, posterior.variance

    def _checked(self, natural: Parameters) -> ProcessPosterior:
        posterior = self.at(natural)
        if posterior is None:
            raise ValueError("these sites do not define a distribution: some of their precisions are too negative.")
        return posterior

    def log_partition(self, natural: Parameters) -> Tensor:
        posterior = self._checked(natural)
        return (natural[0] @ posterior.mean - posterior.volume) / 2

    def entropy(self, natural: Parameters, mean: Parameters | None = None) -> Tensor:
        """-KL(q, prior), in a form that is accurate for sites with large precisions."""
        posterior = self._checked(natural)
        return (posterior.W @ posterior.variance - posterior.weights @ posterior.mean - posterior.volume) / 2

    def in_domain(self, natural: Parameters) -> Tensor:
        finite = all(bool(torch.isfinite(part).all()) for part in natural)
        return torch.tensor(finite and self.at(natural) is not None)

    def to_distribution(self, natural: Parameters) -> Distribution:
        posterior = self._checked(natural)
        return MultivariateNormal(posterior.mean, self.covariance - posterior.reduction(self.covariance))


@dataclass(eq=False)
class ProcessPosterior:
    """The posterior of a process with sites.

    Args:
        W: precisions of the sites.
        factor: L, in the order of `order`.
        order: indices of the sites, those of negative precision last; None if there are none.
        signs: the diagonal of J, in the order of `order`.
        weights: K^-1 mean, the weights of predictions.
        mean, variance: of the values.
        volume: 2 log|L|.
    """

    W: Tensor
    factor: Tensor
    order: Tensor | None
    signs: Tensor
    weights: Tensor
    mean: Tensor
    volume: Tensor
    prior: Tensor

    @staticmethod
    def of(K: Tensor, first: Tensor, W: Tensor) -> ProcessPosterior | None:
        s, signs, negative = W.abs().sqrt(), torch.ones_like(W), W < 0
        count = int(negative.sum())
        order = negative.to(torch.uint8).argsort(stable=True) if count else None
        signs[len(W) - count :] = -1
        left = (K * s).mul_(s[:, None])
        left = left if order is None else left[order][:, order]
        left.diagonal().add_(signs)
        factor = _signed_cholesky(left, len(W) - count)
        if factor is None:
            return None
        # The effect of a weak site is lambda - s A^-1 s K lambda, because lambda/s is large; that of others, for which
        # this difference cancels, is s A^-1 J lambda/s.
        strong = _strong(W, K)
        weak = torch.where(strong, 0, first)
        right = torch.where(strong, W.sign() * first / torch.where(strong, s, 1), 0) - s * (K @ weak)
        half = torch.linalg.solve_triangular(factor, _ordered(right, order)[:, None], upper=False)
        solved = torch.linalg.solve_triangular(factor.mT, signs[:, None] * half, upper=True)[:, 0]
        weights = weak + s * _restored(solved, order)
        volume = 2 * factor.diagonal().log().sum()
        return ProcessPosterior(W, factor, order, signs, weights, K @ weights, volume, K)

    @cached_property
    def variance(self) -> Tensor:
        prior, strong = self.prior.diagonal(), _strong(self.W, self.prior)
        # (J - diag A^-1)/|W|, except for weak sites, for which the difference would cancel.
        left = self.signs - (self.signs[:, None] * _inverse(self.factor).square()).sum(0)
        found = torch.where(strong, _restored(left, self.order) / torch.where(strong, self.W.abs(), 1), prior)
        if not strong.all():
            found[~strong] -= self.reduction(self.prior[:, ~strong], diagonal=True)
        # Rounding may make the variance of an exactly known value negative.
        return found.maximum(torch.finfo(found.dtype).eps * prior)

    def reduction(self, cross: Tensor, *, diagonal: bool = False) -> Tensor:
        """k'(K + W^-1)^-1 k for columns k of `cross`: the reduction of the prior covariance by the sites."""
        scaled = _ordered(self.W.abs().sqrt()[:, None] * cross, self.order)
        white = torch.linalg.solve_triangular(self.factor, scaled, upper=False)
        signed = white if self.order is None else self.signs[:, None] * white
        return (signed * white).sum(0) if diagonal else white.mT @ signed

    def gradient(self) -> Tensor:
        """The gradient of the bound with respect to K, (K^-1 m m'K^-1 - (K + W^-1)^-1)/2, at the optimal q."""
        s = self.W.abs().sqrt()
        if self.order is None:
            inverse = torch.cholesky_inverse(self.factor)
        else:
            half, back = _inverse(self.factor), self.order.argsort()
            inverse = (half.mT @ (self.signs[:, None] * half))[back][:, back]
        return (self.weights[:, None] * self.weights - s[:, None] * inverse * s) / 2


def _strong(W: Tensor, K: Tensor) -> Tensor:
    """Which sites are not weak: for those 1/W is not far above the prior variance."""
    return W.abs() * K.diagonal() > 1e-2


def _ordered(values: Tensor, order: Tensor | None) -> Tensor:
    return values if order is None else values[order]


def _restored(values: Tensor, order: Tensor | None) -> Tensor:
    return values if order is None else torch.empty_like(values).index_copy_(0, order, values)


def _signed_cholesky(matrix: Tensor, positive: int) -> Tensor | None:
    """L with L J L' = matrix, J with 1 for the first `positive` rows and -1 for the others; None if there is none."""
    factor, info = torch.linalg.cholesky_ex(matrix[:positive, :positive])
    if info.any() or positive == len(matrix):
        return None if info.any() else factor
    beside = torch.linalg.solve_triangular(factor, matrix[:positive, positive:], upper=False)
    last, info = torch.linalg.cholesky_ex(beside.mT @ beside - matrix[positive:, positive:])
    if info.any():
        return None
    return torch.cat([torch.cat([factor, torch.zeros_like(beside)], 1), torch.cat([beside.mT, last], 1)])


def mode(family: ProcessWithSites, observation: Observation, y: Tensor) -> Parameters:
    """Initial sites: for a log-concave likelihood near the posterior mode, by a few Newton steps without variances.

    Each is a step of the learning rule with Delta. Returns the last sites that increased the joint density.
    """
    sites = observation.sites(y)
    if not observation.concave:
        return sites
    best, kept = -torch.inf, sites
    for _ in range(8):
        posterior = family.at(sites)
        if posterior is None:
            break
        value, first, second = observation.expected(posterior.mean, torch.zeros_like(y), y, DELTA)
        height = float(value.sum() - posterior.weights @ posterior.mean / 2)
        if not height > best:
            break
        kept, gain, best = sites, height - best, height
        if gain < 1:
            break
        sites = first - second * posterior.mean, second / 2
    return kept


def _inverse(lower: Tensor, out: Tensor | None = None) -> Tensor:
    """The inverse of a triangular matrix, by recursive halving: matrix products are faster than solving for I."""
    size, half = len(lower), len(lower) // 2
    found = torch.zeros_like(lower) if out is None else out
    if size <= 64:
        return found.copy_(torch.linalg.solve_triangular(lower, torch.eye(size).to(lower), upper=False))
    left, upper = lower[half:, :half], _inverse(lower[:half, :half], found[:half, :half])
    _inverse(lower[half:, half:], found[half:, half:])
    inner, cut = lower.new_empty(size - half, half), half // 2  # a quarter of each triangular matrix is zero
    torch.mm(left, upper[:, :cut], out=inner[:, :cut])
    torch.mm(left[:, cut:], upper[cut:, cut:], out=inner[:, cut:])
    cut = (size - half) // 2
    torch.mm(found[half : half + cut, half : half + cut], inner[:cut], out=found[half : half + cut, :half])
    torch.mm(found[half + cut :, half:], inner, out=found[half + cut :, :half])
    found[half:, :half].neg_()
    return found


class InducingPointFactor(LinearPredictorFactor):
    r"""Σ_i log p(y_i | f_i), where f depends on its values at M inducing points: u = L v with v ~ N(0, I).

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
        model: ProcessModel,
        x: Tensor,
        y: Tensor,
        points: Tensor,
        expectation: Expectation,
        *,
        scale: float = 1.0,
    ) -> None:
        (design, self.rest), observation = features(model.kernel, x, points), model.likelihood
        super().__init__(node, design.detach(), lambda f: observation.log_density(f, y), expectation, scale=scale)
        self.differentiable_design, self.observation, self.y = design, observation, y

    def predictor_moments(self) -> tuple[Tensor, Tensor]:
        mean, variance = super().predictor_moments()
        return mean, variance + self.rest.detach()

    @torch.no_grad()
    def _expected(self) -> Moments:
        return self.observation.expected(*self.predictor_moments(), self.y, self.expectation)

    def differentiable(self) -> Tensor:
        """The factor's value, differentiable by the kernel's hyperparameters, for the current posterior of v."""
        (node,) = self.nodes
        mean, covariance = node.family.moments(node.natural)  # pyright: ignore[reportAttributeAccessIssue]
        at = self.differentiable_design @ mean
        variance = ((self.differentiable_design @ covariance) * self.differentiable_design).sum(1) + self.rest
        return self.scale * expected_value(self.observation, at, variance, self.y, self.expectation)


def features(kernel: Kernel, x: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """φ, (n, M), and k(x, x) - |φ|², (n,)."""
    inner = kernel(points, points)
    inner = inner + JITTER * inner.diagonal().mean() * torch.eye(len(points)).to(x)
    factor, info = torch.linalg.cholesky_ex(inner)
    if info.any():
        raise ValueError("inducing points are too close for this kernel: use fewer, or others.")
    design = torch.linalg.solve_triangular(factor, kernel(points, x), upper=False).mT
    return design, (kernel.diagonal(x) - design.square().sum(1)).clamp(min=0)


def expected_value(
    observation: Observation, mean: Tensor, variance: Tensor, y: Tensor, expectation: Expectation
) -> Tensor:
    """Σ E[log p(y | f)], differentiable by the marginals (Bonnet and Price) and by the hyperparameters of p(y | f)."""
    with torch.no_grad():
        value, first, second = observation.expected(mean, variance, y, expectation)
    moved = first * (mean - mean.detach()) + second / 2 * (variance - variance.detach())
    total = (value + moved).sum()
    if any(number.requires_grad for number in observation.hyperparameters().values()):
        at, _, weights = expectation.points(mean.detach()[:, None], variance.detach().sqrt()[:, None, None])
        own = (weights[:, None] * observation.log_density(at[..., 0], y)).sum()
        total = total + own - own.detach()
    return total


def pivots(kernel: Kernel, pool: Tensor, count: int) -> list[int]:
    """Indices of at most `count` rows by pivoted Cholesky: each is the row with the largest remaining variance."""
    with torch.no_grad():
        rest, columns, chosen = kernel.diagonal(pool).clone(), pool.new_zeros(len(pool), count), []
        for k in range(count):
            pick = int(rest.argmax())
            if not rest[pick] > 1e-8 * rest.new_ones(()) * kernel.diagonal(pool[pick, None])[0]:
                break  # the remaining rows are determined by these
            column = kernel(pool, pool[pick, None])[:, 0] - columns[:, :k] @ columns[pick, :k]
            columns[:, k] = column / rest[pick].sqrt()
            rest = rest - columns[:, k].square()
            chosen.append(pick)
    return chosen
