"""Gaussians with a full, a diagonal and a fixed precision matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal

from bayesgrad.families.definite import cholesky, inverted, is_definite, log_abs_det, log_det_divergence
from bayesgrad.families.digamma import LOG_2PI, relative_excess
from bayesgrad.families.family import Family, Parameters
from bayesgrad.noise import randn

_MINUS_HALF = torch.tensor(-0.5)


class Gaussian(Family):
    r"""N(m, S^-1) over vectors: λ = (S m, -S/2), μ = (m, S^-1 + m m'), T(x) = (x, x x').

    .. math::
        A(\lambda) = \tfrac12 m^T S m - \tfrac12 \log |S| + \tfrac{P}{2} \log 2\pi

    >>> normal = Gaussian()
    >>> natural = normal.of(torch.tensor([1.0]), torch.tensor([[4.0]]))
    >>> [part.tolist() for part in natural], [part.tolist() for part in normal.mean(natural)]
    ([[4.0], [[-2.0]]], [[1.0], [[1.25]]])

    Reference: Khan and Rue 2023, Eq. 9.
    Differs from the paper: Table 2 prints m where S m is meant.
    """

    event_dims = (1, 2)
    domain = ", with a positive definite precision"

    def of(self, mean: Tensor, precision: Tensor) -> Parameters:
        """Natural parameters of N(mean, precision^-1)."""
        return (precision @ mean[..., None])[..., 0], -precision / 2

    def moments(self, natural: Parameters) -> tuple[Tensor, Tensor]:
        """Mean (..., P) and covariance (..., P, P)."""
        covariance = inverted(-2 * natural[1])
        return (covariance @ natural[0][..., None])[..., 0], covariance

    def log_partition(self, natural: Parameters) -> Tensor:
        factor = cholesky(-2 * natural[1])
        white = torch.linalg.solve_triangular(factor, natural[0][..., None], upper=False)[..., 0]
        volume = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return white.square().sum(-1) / 2 - volume + natural[0].shape[-1] / 2 * LOG_2PI

    def mean(self, natural: Parameters) -> Parameters:
        mean, covariance = self.moments(natural)
        return mean, covariance + mean[..., :, None] * mean[..., None, :]

    def entropy(self, natural: Parameters, mean: Parameters | None = None) -> Tensor:
        """P (1 + log 2π)/2 - log |S|/2; A(λ) - ⟨λ, μ⟩ would cancel large numbers where means are far from zero."""
        factor = cholesky(-2 * natural[1])
        size = natural[0].shape[-1]
        return size * (1 + LOG_2PI) / 2 - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def divergence(self, natural: Parameters, other: Parameters) -> Tensor:
        """Σ (e_i - log(1 + e_i))/2 + (m - m_p)'S_p(m - m_p)/2, with e_i the eigenvalues of S^-1 S_p - I."""
        offset = self.moments(natural)[0] - self.moments(other)[0]
        apart = -(offset * (other[1] @ offset[..., None])[..., 0]).sum(-1)
        return apart + log_det_divergence(-2 * other[1], -2 * natural[1]) / 2

    def log_density(self, natural: Parameters, x: Tensor) -> Tensor:
        """log |S|/2 - P log(2π)/2 - (x - m)'S(x - m)/2."""
        factor = cholesky(-2 * natural[1])
        white = ((x - self.moments(natural)[0])[..., None, :] @ factor)[..., 0, :]
        volume = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) - natural[0].shape[-1] / 2 * LOG_2PI
        return volume - white.square().sum(-1) / 2

    def peak(self, natural: Parameters) -> tuple[Tensor, Tensor]:
        """The mean, and the log density there."""
        mean = self.moments(natural)[0]
        return mean, self.log_density(natural, mean)

    def expected_from_peak(
        self, natural: Parameters, peak: tuple[Tensor, Tensor], moments: tuple[Tensor, Tensor]
    ) -> Tensor:
        """E[log p(x)] = log p(m_p) - E[(x - m_p)'S_p(x - m_p)]/2 for p = `natural` with its `peak`, x with `moments`.

        ⟨λ_p, μ⟩ has the squares of means, which would cancel.
        """
        offset = moments[0] - peak[0]
        square = (offset * (natural[1] @ offset[..., None])[..., 0]).sum(-1)
        return peak[1] + square + (natural[1] * moments[1]).sum((-2, -1))

    def natural(self, mean: Parameters) -> Parameters:
        first, second = mean
        covariance = second - first[..., :, None] * first[..., None, :]
        return self.of(first, inverted(covariance))

    def in_domain(self, natural: Parameters) -> Tensor:
        return is_definite(-2 * natural[1]) & torch.isfinite(natural[0]).all(-1)

    def statistics(self, x: Tensor) -> Parameters:
        return x, x[..., :, None] * x[..., None, :]

    def mode(self, natural: Parameters) -> Tensor:
        factor = cholesky(-2 * natural[1])  # the covariance is not needed
        half = torch.linalg.solve_triangular(factor, natural[0][..., None], upper=False)
        return torch.linalg.solve_triangular(factor.mT, half, upper=True)[..., 0]

    def to_distribution(self, natural: Parameters) -> Distribution:
        return MultivariateNormal(*self.moments(natural))

    def sample(self, natural: Parameters, count: int, generator: torch.Generator | None = None) -> Tensor:
        return _gaussian(self.moments(natural)[0], -2 * natural[1], count, generator)

    def retract(self, natural: Parameters, direction: Parameters, rho: float | Tensor) -> Parameters:
        r"""A step along `direction` with a precision that is positive definite for every rho:

        .. math::
            S \leftarrow S + \rho D + \tfrac{\rho^2}{2} D S^{-1} D, \quad D = -2\, d_2

        with the mean of the straight step, m <- m + rho S_new^-1 (d_1 + 2 d_2 m).

        Reference: Lin, Schmidt and Khan, 2020; to first order in rho, Khan and Rue 2023, Eq. 12.
        """
        mean, covariance = self.moments(natural)
        change = -2 * direction[1]
        precision = -2 * natural[1]
        precision = precision + rho * change + rho**2 / 2 * change @ covariance @ change
        precision = (precision + precision.mT) / 2
        push = direction[0] + 2 * (direction[1] @ mean[..., None])[..., 0]
        moved = mean + rho * torch.linalg.solve(precision, push)
        return self.of(moved, precision)


class DiagonalGaussian(Family):
    """Independent N(m_i, 1/s_i): λ = (s m, -s/2), μ = (m, 1/s + m^2), with the last dimension as the event."""

    event_dims = (1, 1)
    domain = ", with positive precisions"

    def of(self, mean: Tensor, precision: Tensor) -> Parameters:
        """Natural parameters of N(mean, 1/precision)."""
        return precision * mean, -precision / 2

    def moments(self, natural: Parameters) -> tuple[Tensor, Tensor]:
        """Mean and variance, (..., P) each."""
        variance = torch.div(_MINUS_HALF, natural[1])  # a number instead of the tensor would take two passes
        return variance * natural[0], variance

    def log_partition(self, natural: Parameters) -> Tensor:
        mean, variance = self.moments(natural)
        return ((mean * natural[0] + variance.log() + LOG_2PI) / 2).sum(-1)

    def mean(self, natural: Parameters) -> Parameters:
        mean, variance = self.moments(natural)
        return mean, variance + mean.square()

    def entropy(self, natural: Parameters, mean: Parameters | None = None) -> Tensor:
        """Σ (1 + log 2π - log s_i)/2; see `Gaussian.entropy`."""
        return natural[1].shape[-1] / 2 * (1 + LOG_2PI) - (-2 * natural[1]).log_().sum(-1) / 2

    def divergence(self, natural: Parameters, other: Parameters) -> Tensor:
        """See `Gaussian.divergence`."""
        offset = self.moments(natural)[0] - self.moments(other)[0]
        return (relative_excess(other[1], natural[1]) / 2 - other[1] * offset.square()).sum(-1)

    def log_density(self, natural: Parameters, x: Tensor) -> Tensor:
        offset = x - self.moments(natural)[0]
        return (((-2 * natural[1]).log() - LOG_2PI) / 2 + natural[1] * offset.square()).sum(-1)

    peak = Gaussian.peak

    def expected_from_peak(
        self, natural: Parameters, peak: tuple[Tensor, Tensor], moments: tuple[Tensor, Tensor]
    ) -> Tensor:
        """See `Gaussian.expected_from_peak`."""
        offset = moments[0] - peak[0]
        square = torch.addcmul(moments[1], offset, offset)
        return peak[1] + torch.linalg.vecdot(*torch.broadcast_tensors(natural[1], square))

    def natural(self, mean: Parameters) -> Parameters:
        """
        Raises:
            ValueError: a variance is not positive.
        """
        first, second = mean
        variance = second - first.square()
        if not (variance > 0).all():
            raise ValueError("not the expectations of a DiagonalGaussian: E[x^2] must be greater than E[x]^2.")
        return self.of(first, 1 / variance)

    def in_domain(self, natural: Parameters) -> Tensor:
        low, high = extremes(natural[1])
        return _all_finite(natural[0]) & (low > -torch.inf) & (high < 0)

    def statistics(self, x: Tensor) -> Parameters:
        return x, x.square()

    def mode(self, natural: Parameters) -> Tensor:
        return self.moments(natural)[0]

    def to_distribution(self, natural: Parameters) -> Distribution:
        mean, variance = self.moments(natural)
        return Independent(Normal(mean, variance.sqrt()), 1)

    def sample(self, natural: Parameters, count: int, generator: torch.Generator | None = None) -> Tensor:
        mean, variance = self.moments(natural)
        return mean + variance.sqrt() * randn((count, *mean.shape), mean, generator)

    def retract(self, natural: Parameters, direction: Parameters, rho: float | Tensor) -> Parameters:
        """s <- s (1 + x + x^2/2) with x = rho D/s, at least s/2; see `Gaussian.retract`."""
        mean, variance = self.moments(natural)
        x = rho * -2 * direction[1] * variance
        precision = (1 + x + x.square() / 2) / variance
        return self.of(mean + rho * (direction[0] + 2 * direction[1] * mean) / precision, precision)


@dataclass(frozen=True, eq=False)
class FixedGaussian(Family):
    r"""N(m, S^-1) with a fixed precision S, where only the mean is learnt: λ = S m, μ = m.

    Its base measure log h(x) = -x'Sx/2 + constant depends on x, therefore ∇_μ H = 0 instead of -λ: a step adds rho
    times the messages to λ. With S = I this is gradient descent.

    Args:
        precision: S, (P, P); (P,) for a diagonal matrix; or a number s for S = s I.

    Reference: Khan and Rue 2023, section 1.3.1.
    """

    event_dims = (1,)

    precision: Tensor | float = 1.0

    def __post_init__(self) -> None:
        known = isinstance(self.precision, (int, float, Tensor))
        given = torch.as_tensor(self.precision if known else torch.nan).detach()
        if given.dim() == 2 and given.shape[0] == given.shape[1]:
            even = torch.allclose(given, given.mT, rtol=1e-5, atol=1e-8 * given.abs().max().item())
            right = even and bool(is_definite(given))
        else:
            right = given.dim() < 2 and bool(((given > 0) & (given < torch.inf)).all())
        if not right:
            raise ValueError(
                f"precision must be a positive number, a positive vector or a positive definite matrix, got "
                f"{given.tolist() if known else self.precision!r}."
            )

    def of(self, mean: Tensor) -> Parameters:
        """Natural parameters of N(mean, S^-1)."""
        return (self._times(mean),)

    def _times(self, vector: Tensor) -> Tensor:
        precision = torch.as_tensor(self.precision, dtype=vector.dtype, device=vector.device)
        return (precision @ vector[..., None])[..., 0] if precision.dim() == 2 else precision * vector

    def _solve(self, vector: Tensor) -> Tensor:
        precision = torch.as_tensor(self.precision, dtype=vector.dtype, device=vector.device)
        if precision.dim() < 2:
            return vector / precision
        return torch.cholesky_solve(vector[..., None], cholesky(precision))[..., 0]

    def moments(self, natural: Parameters) -> tuple[Tensor, Tensor]:
        """Mean (..., P) and covariance (..., P, P); variances (..., P) if S is a number or diagonal."""
        mean = self._solve(natural[0])
        precision = torch.as_tensor(self.precision, dtype=mean.dtype, device=mean.device)
        if precision.dim() < 2:
            return mean, (1 / precision).expand_as(mean)
        return mean, inverted(precision).expand(*mean.shape, mean.shape[-1])

    def log_partition(self, natural: Parameters) -> Tensor:
        return (natural[0] * self._solve(natural[0])).sum(-1) / 2

    def mean(self, natural: Parameters) -> Parameters:
        return (self._solve(natural[0]),)

    def natural(self, mean: Parameters) -> Parameters:
        return self.of(mean[0])

    def in_domain(self, natural: Parameters) -> Tensor:
        return _all_finite(natural[0])

    def statistics(self, x: Tensor) -> Parameters:
        return (x,)

    def mode(self, natural: Parameters) -> Tensor:
        return self._solve(natural[0])

    def _constant(self, like: Tensor) -> Tensor:
        precision = torch.as_tensor(self.precision, dtype=like.dtype, device=like.device)
        matrix = precision.dim() == 2
        volume = log_abs_det(precision) if matrix else precision.log().expand(like.shape[-1:]).sum()
        return (volume - like.shape[-1] * LOG_2PI) / 2

    def entropy(self, natural: Parameters, mean: Parameters | None = None) -> Tensor:
        """See `Gaussian.entropy`."""
        return (natural[0].shape[-1] / 2 - self._constant(natural[0])).expand(natural[0].shape[:-1])

    def divergence(self, natural: Parameters, other: Parameters) -> Tensor:
        """(m - m_p)'S(m - m_p)/2."""
        offset = self._solve(natural[0]) - self._solve(other[0])
        return (offset * self._times(offset)).sum(-1) / 2

    def log_density(self, natural: Parameters, x: Tensor) -> Tensor:
        return self.log_base(x - self._solve(natural[0]))

    peak = Gaussian.peak

    def expected_from_peak(
        self, natural: Parameters, peak: tuple[Tensor, Tensor], moments: tuple[Tensor, Tensor]
    ) -> Tensor:
        """See `Gaussian.expected_from_peak`."""
        offset = moments[0] - peak[0]
        return peak[1] - ((offset * self._times(offset)).sum(-1) + offset.shape[-1]) / 2

    def expected_log_base(self, natural: Parameters) -> Tensor:
        mean = self._solve(natural[0])
        return self._constant(mean) - ((mean * natural[0]).sum(-1) + mean.shape[-1]) / 2

    def base_gradient(self, natural: Parameters) -> Parameters:
        return (-natural[0],)

    def entropy_gradient(self, natural: Parameters) -> Parameters:
        """0: the entropy does not depend on the mean."""
        return (natural[0].new_zeros(()).expand_as(natural[0]),)

    def log_base(self, x: Tensor) -> Tensor:
        return self._constant(x) - (x * self._times(x)).sum(-1) / 2

    def to_distribution(self, natural: Parameters) -> Distribution:
        mean, spread = self.moments(natural)
        if spread.shape == mean.shape:
            return Independent(Normal(mean, spread.sqrt()), 1)
        return MultivariateNormal(mean, spread)

    def sample(self, natural: Parameters, count: int, generator: torch.Generator | None = None) -> Tensor:
        mean = self._solve(natural[0])
        precision = torch.as_tensor(self.precision, dtype=mean.dtype, device=mean.device)
        if precision.dim() < 2:
            return mean + randn((count, *mean.shape), mean, generator) / precision.sqrt()
        return _gaussian(mean, precision, count, generator)


def extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest number of the last dimension; torch is faster without one."""
    low, high = torch.aminmax(x) if x.dim() == 1 else torch.aminmax(x, dim=-1)
    return low, high


def _all_finite(x: Tensor) -> Tensor:
    """Whether all numbers of the last dimension are finite, in one pass and without a tensor of their size."""
    low, high = extremes(x)
    return (low > -torch.inf) & (high < torch.inf)


def _gaussian(mean: Tensor, precision: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """Samples of N(mean, S^-1). S = L L': L'^-1 z has covariance S^-1."""
    noise = randn((count, *mean.shape), mean, generator)
    return mean + torch.linalg.solve_triangular(cholesky(precision).mT, noise[..., None], upper=True)[..., 0]
