"""Distributions over positive numbers and over probability vectors."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import Beta as TorchBeta
from torch.distributions import Dirichlet as TorchDirichlet
from torch.distributions import Distribution
from torch.distributions import Gamma as TorchGamma

from bayesgrad.families.digamma import (
    LOG_2PI,
    digamma_increase,
    log_minus_digamma,
    log_minus_digamma_slope,
    log_ratio,
    relative_excess,
    solve_decreasing,
    solve_dirichlet,
    stirling_divergence,
    stirling_remainder,
)
from bayesgrad.families.family import Family, Parameters
from bayesgrad.families.gaussian import extremes


class Gamma(Family):
    r"""x > 0 with shape a and rate b: λ = (a - 1, -b), μ = (ψ(a) - log b, a/b), T(x) = (log x, x).

    .. math::
        A(\lambda) = \log\Gamma(a) - a \log b

    >>> gamma = Gamma()
    >>> natural = gamma.of(torch.tensor(3.0), torch.tensor(2.0))
    >>> [part.item() for part in natural], gamma.mean(natural)[1].item(), gamma.mode(natural).item()
    ([2.0, -2.0], 1.5, 1.0)
    """

    event_dims = (0, 0)
    domain = ", with a positive shape and rate"

    def of(self, shape: Tensor, rate: Tensor) -> Parameters:
        return shape - 1, -rate

    def standard_parameters(self, natural: Parameters) -> tuple[Tensor, Tensor]:
        """Shape and rate."""
        return natural[0] + 1, -natural[1]

    def log_partition(self, natural: Parameters) -> Tensor:
        shape, rate = self.standard_parameters(natural)
        return shape * ((shape / rate).log() - 1) + _stirling_rest(shape)

    def entropy(self, natural: Parameters, mean: Parameters | None = None) -> Tensor:
        """log Γ(a) - (a - 1) ψ(a) + a - log b, by the remainders of Stirling's formula: large terms would cancel."""
        shape, rate = self.standard_parameters(natural)
        return _stirling_rest(shape) + shape.log() - rate.log() + natural[0] * log_minus_digamma(shape)

    def divergence(self, natural: Parameters, other: Parameters) -> Tensor:
        """a_p (w - 1 - log w) and a divergence of shapes, with w the ratio of the means a/b and a_p/b_p."""
        (shape, rate), (other_shape, other_rate) = (self.standard_parameters(part) for part in (natural, other))
        means = relative_excess(shape * other_rate, other_shape * rate)
        return other_shape * means + stirling_divergence(shape, other_shape, other[0] - natural[0])

    def log_density(self, natural: Parameters, x: Tensor) -> Tensor:
        shape, rate = self.standard_parameters(natural)
        return -shape * relative_excess(rate * x, shape) - x.log() - _stirling_rest(shape)

    def mean(self, natural: Parameters) -> Parameters:
        shape, rate = self.standard_parameters(natural)
        return torch.digamma(shape) - rate.log(), shape / rate

    def natural(self, mean: Parameters) -> Parameters:
        """By Newton's method for log a - ψ(a) = log E[x] - E[log x].

        Raises:
            ValueError: that is not positive.
        """
        target = mean[1].log() - mean[0]
        if not (target > 0).all():
            raise ValueError("not the expectations of a Gamma: log E[x] must be greater than E[log x].")
        s = target.detach()
        start = (3 - s + ((s - 3).square() + 24 * s).sqrt()) / (12 * s)
        shape = solve_decreasing(lambda a: (log_minus_digamma(a), log_minus_digamma_slope(a)), target, start)
        return self.of(shape, shape / mean[1])

    def in_domain(self, natural: Parameters) -> Tensor:
        return (natural[0] > -1) & (natural[1] < 0) & torch.isfinite(natural[0] + natural[1])

    def statistics(self, x: Tensor) -> Parameters:
        return x.log(), x

    def has_mode(self, natural: Parameters) -> Tensor:
        return self.in_domain(natural) & (natural[0] > 0)

    def mode(self, natural: Parameters) -> Tensor:
        """(a - 1)/b."""
        self._check_mode(natural, "shapes above 1")
        return -natural[0] / natural[1]

    def to_distribution(self, natural: Parameters) -> Distribution:
        return TorchGamma(*self.standard_parameters(natural))

    def sample(self, natural: Parameters, count: int, generator: torch.Generator | None = None) -> Tensor:
        shape, rate = torch.broadcast_tensors(*self.standard_parameters(natural))
        return replace_zeros((log_gamma_samples(shape, count, generator) - rate.log()).exp())


class Dirichlet(Family):
    r"""K positive numbers that sum to one, with concentrations alpha:
    λ = alpha - 1, μ_k = ψ(alpha_k) - ψ(Σ alpha), T(x) = log x.

    .. math::
        A(\lambda) = \sum_k \log\Gamma(\alpha_k) - \log\Gamma\left(\sum_k \alpha_k\right)

    Counts of outcomes add to λ. Samples and modes that underflow to zero are replaced by the smallest positive number,
    so that T is finite.

    >>> shares = Dirichlet()
    >>> shares.mode(shares.of(torch.tensor([2.0, 4.0]))).tolist()
    [0.25, 0.75]
    """

    event_dims = (1,)
    direct = True
    domain = ", with positive concentrations"

    def of(self, concentration: Tensor) -> Parameters:
        return (concentration - 1,)

    def standard_parameters(self, natural: Parameters) -> tuple[Tensor]:
        """The concentrations alpha."""
        return (natural[0] + 1,)

    def log_partition(self, natural: Parameters) -> Tensor:
        alpha = natural[0] + 1
        total = alpha.sum(-1, keepdim=True)
        others = _sum_of_others(alpha)
        return (alpha * log_ratio(alpha, total, -others)).sum(-1) + self._rest(alpha)

    def _rest(self, alpha: Tensor) -> Tensor:
        """A without its largest terms: the sum of `_stirling_rest` over alpha, minus that of their sum."""
        return _stirling_rest(alpha).sum(-1) - _stirling_rest(alpha.sum(-1))

    def entropy(self, natural: Parameters, mean: Parameters | None = None) -> Tensor:
        """By the remainders of Stirling's formula: large terms would cancel."""
        alpha = natural[0] + 1
        total = alpha.sum(-1)
        own = _stirling_rest(alpha) + alpha.log() + natural[0] * log_minus_digamma(alpha)
        K = alpha.shape[-1]
        return own.sum(-1) - _stirling_rest(total) - K * total.log() - natural[0].sum(-1) * log_minus_digamma(total)

    def divergence(self, natural: Parameters, other: Parameters) -> Tensor:
        """Σ alpha_p times the divergence of the mean shares, and divergences of concentrations and of their sums."""
        alpha, other_alpha, change = natural[0] + 1, other[0] + 1, other[0] - natural[0]
        total, other_total = alpha.sum(-1, keepdim=True), other_alpha.sum(-1, keepdim=True)
        shares = (other_alpha * relative_excess(alpha / total, other_alpha / other_total)).sum(-1)
        sums = stirling_divergence(total, other_total, change.sum(-1, keepdim=True))[..., 0]
        return shares + stirling_divergence(alpha, other_alpha, change).sum(-1) - sums

    def log_density(self, natural: Parameters, x: Tensor) -> Tensor:
        alpha = natural[0] + 1
        ratio = x * alpha.sum(-1, keepdim=True) / alpha
        return (alpha * ratio.log() - x.log()).sum(-1) - self._rest(alpha)

    def mean(self, natural: Parameters) -> Parameters:
        alpha = natural[0] + 1
        return (torch.digamma(alpha) - torch.digamma(alpha.sum(-1, keepdim=True)),)

    def natural(self, mean: Parameters) -> Parameters:
        """By Newton's method, see `digamma.solve_dirichlet`.

        Raises:
            ValueError: these are not the expectations of a Dirichlet distribution.
        """
        if not ((mean[0] < 0).all(-1) & (mean[0].logsumexp(-1) < 0)).all():
            raise ValueError("not the expectations of a Dirichlet: the sum of exp E[log x_k] must be less than 1.")
        return self.of(solve_dirichlet(mean[0]))

    def in_domain(self, natural: Parameters) -> Tensor:
        return ((natural[0] > -1) & (natural[0] < math.inf)).all(-1)

    def statistics(self, x: Tensor) -> Parameters:
        return (x.log(),)

    def has_mode(self, natural: Parameters) -> Tensor:
        low, high = extremes(natural[0])
        return (low >= 0) & (high > 0) & (high < math.inf)

    def mode(self, natural: Parameters) -> Tensor:
        """(alpha - 1)/Σ(alpha - 1)."""
        self._check_mode(natural, "concentrations of 1 and more, not all of them 1")
        return replace_zeros(natural[0] / natural[0].sum(-1, keepdim=True))

    def to_distribution(self, natural: Parameters) -> Distribution:
        return TorchDirichlet(natural[0] + 1)

    def sample(self, natural: Parameters, count: int, generator: torch.Generator | None = None) -> Tensor:
        return replace_zeros(log_gamma_samples(natural[0] + 1, count, generator).softmax(-1))


class Beta(Family):
    """0 < x < 1 with a and b: λ = (a - 1, b - 1), T(x) = (log x, log(1 - x)). The Dirichlet of x and 1 - x."""

    event_dims = (0, 0)
    domain = ", with positive a and b"

    def of(self, a: Tensor, b: Tensor) -> Parameters:
        return a - 1, b - 1

    def standard_parameters(self, natural: Parameters) -> tuple[Tensor, Tensor]:
        """a and b."""
        return natural[0] + 1, natural[1] + 1

    def _pair(self, parameters: Parameters) -> Parameters:
        return (torch.stack(torch.broadcast_tensors(*parameters), -1),)

    def log_partition(self, natural: Parameters) -> Tensor:
        return Dirichlet().log_partition(self._pair(natural))

    def entropy(self, natural: Parameters, mean: Parameters | None = None) -> Tensor:
        return Dirichlet().entropy(self._pair(natural))

    def divergence(self, natural: Parameters, other: Parameters) -> Tensor:
        return Dirichlet().divergence(self._pair(natural), self._pair(other))

    def log_density(self, natural: Parameters, x: Tensor) -> Tensor:
        alpha = self._pair(natural)[0] + 1
        share = alpha / alpha.sum(-1, keepdim=True)
        offset = x - share[..., 0]
        both = torch.stack([x, 1 - x], -1), share, torch.stack([offset, -offset], -1)
        largest = -(alpha * relative_excess(*both)).sum(-1)  # terms that are linear in the offset cancel
        return largest - x.log() - torch.log1p(-x) - Dirichlet()._rest(alpha)

    def mean(self, natural: Parameters) -> Parameters:
        """ψ(a) - ψ(a + b) and ψ(b) - ψ(a + b), also if one of them is tiny."""
        a, b = torch.broadcast_tensors(*self.standard_parameters(natural))
        return -digamma_increase(a, b), -digamma_increase(b, a)

    def natural(self, mean: Parameters) -> Parameters:
        """See `Dirichlet.natural`."""
        return Dirichlet().natural(self._pair(mean))[0].unbind(-1)

    def in_domain(self, natural: Parameters) -> Tensor:
        return Dirichlet().in_domain(self._pair(natural))

    def statistics(self, x: Tensor) -> Parameters:
        return x.log(), torch.log1p(-x)

    def has_mode(self, natural: Parameters) -> Tensor:
        return Dirichlet().has_mode(self._pair(natural))

    def mode(self, natural: Parameters) -> Tensor:
        """(a - 1)/(a + b - 2)."""
        self._check_mode(natural, "a and b of 1 and more, not both 1")
        return self._below_one(Dirichlet().mode(self._pair(natural))[..., 0])

    def to_distribution(self, natural: Parameters) -> Distribution:
        return TorchBeta(*self.standard_parameters(natural))

    def sample(self, natural: Parameters, count: int, generator: torch.Generator | None = None) -> Tensor:
        return self._below_one(Dirichlet().sample(self._pair(natural), count, generator)[..., 0])

    def _below_one(self, x: Tensor) -> Tensor:
        return x.clamp(max=1 - torch.finfo(x.dtype).eps / 2)


def _stirling_rest(x: Tensor) -> Tensor:
    """log Γ(x) - x log x + x, which is small beside log Γ(x) for large x."""
    return stirling_remainder(x) + (LOG_2PI - x.log()) / 2


def _sum_of_others(x: Tensor) -> Tensor:
    """Σ_j x_j - x_k without the cancellation, (..., K)."""
    before = x.cumsum(-1).roll(1, -1).index_fill(-1, x.new_zeros(1, dtype=torch.long), 0.0)
    after = x.flip(-1).cumsum(-1).roll(1, -1).index_fill(-1, x.new_zeros(1, dtype=torch.long), 0.0).flip(-1)
    return before + after


def log_gamma_samples(shape: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """log x of x ~ Gamma(shape, 1), (count, *shape): as log y + log(u)/a with y ~ Gamma(a + 1, 1), which does not
    underflow where x would. Drawn on the CPU, so that a seed gives the same numbers on every device."""
    shape_cpu = shape.detach().cpu().expand(count, *shape.shape)
    above = torch._standard_gamma(shape_cpu + 1, generator=generator)
    uniform = torch.rand(shape_cpu.shape, dtype=shape.dtype, generator=generator)
    return (above.log() + torch.log1p(-uniform) / shape_cpu).to(shape.device)


def replace_zeros(x: Tensor) -> Tensor:
    """Replaces zeros by the smallest positive number, whose logarithm is finite."""
    return x.clamp(min=torch.finfo(x.dtype).tiny)
