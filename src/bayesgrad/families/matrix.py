"""Distributions over precision matrices, alone, jointly with a mean, and with several means that share one."""

from __future__ import annotations

import math
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, MultivariateNormal
from torch.distributions import Wishart as TorchWishart
from torch.distributions.constraints import Constraint

from bayesgrad.families.definite import (
    cholesky,
    factor_inverse,
    inverted,
    is_definite,
    log_abs_det,
    log_det_divergence,
    times,
)
from bayesgrad.families.digamma import (
    LOG_2PI,
    log_minus_digamma,
    log_minus_digamma_slope,
    log_ratio,
    relative_excess,
    solve_decreasing,
    stirling_divergence,
    stirling_remainder,
)
from bayesgrad.families.family import Family, Parameters, symmetrised
from bayesgrad.families.positive import log_gamma_samples
from bayesgrad.noise import randn

LOG_2 = math.log(2)


class Wishart(Family):
    r"""Positive definite X (P, P) with nu > P - 1 degrees of freedom and scale V:
    λ = ((nu - P - 1)/2, -V^-1/2), μ = (E[log |X|], nu V), T(X) = (log |X|, X).

    .. math::
        A(\lambda) = \tfrac{\nu}{2} \log |2V| + \log\Gamma_P(\tfrac{\nu}{2}), \quad
        E[\log |X|] = \log |2V| + \sum_{i=1}^P \psi(\tfrac{\nu + 1 - i}{2})

    >>> wishart = Wishart()
    >>> natural = wishart.of(torch.tensor(4.0), torch.tensor([[0.25]]))
    >>> natural[0].item(), wishart.mean(natural)[1].item(), wishart.mode(natural).item()
    (1.0, 1.0, 0.5)
    """

    event_dims, direct = (0, 2), True
    domain = ", with a positive definite scale and more than P - 1 degrees of freedom"

    def of(self, degrees: Tensor, scale: Tensor) -> Parameters:
        """Natural parameters for nu = degrees and V = scale."""
        return (degrees - scale.shape[-1] - 1) / 2, -inverted(scale) / 2

    def standard_parameters(self, natural: Parameters) -> tuple[Tensor, Tensor]:
        """Degrees of freedom nu and scale V."""
        P = natural[1].shape[-1]
        return 2 * natural[0] + P + 1, inverted(-2 * natural[1])

    def log_partition(self, natural: Parameters) -> Tensor:
        P = natural[1].shape[-1]
        n = natural[0] + (P + 1) / 2  # nu/2
        pivots = cholesky(-2 * natural[1]).diagonal(dim1=-2, dim2=-1).square()
        return n * ((2 * n[..., None] / pivots).log() - 1).sum(-1) + self._rest(natural[0] + 1, P)

    def _rest(self, half: Tensor, P: int) -> Tensor:
        """log Γ_P(nu/2) without P (log(nu/2) - 1) nu/2, its largest terms; `half` is (nu - P + 1)/2."""
        n, missing, halves = half + (P - 1) / 2, _steps(P, half.dtype, half.device).flip(-1), _halves(half, P)
        terms = (
            n[..., None] * log_ratio(halves, n[..., None], -missing)
            + missing
            - (missing + 0.5) * halves.log()
            + stirling_remainder(halves)
        )
        return terms.sum(-1) + P / 2 * LOG_2PI + P * (P - 1) / 4 * math.log(math.pi)

    def entropy(self, natural: Parameters, mean: Parameters | None = None) -> Tensor:
        """By the remainders of Stirling's formula: large terms would cancel."""
        P, half = natural[1].shape[-1], natural[0] + 1
        n, missing, halves = half + (P - 1) / 2, _steps(P, half.dtype, half.device).flip(-1), _halves(half, P)
        gap, log_halves = log_minus_digamma(halves), halves.log()
        terms = n[..., None] * gap + missing - (missing + 0.5) * log_halves + stirling_remainder(halves)
        constant = P / 2 * LOG_2PI + P * (P - 1) / 4 * math.log(math.pi)
        volume = P * LOG_2 - _log_det(-2 * natural[1]) + (log_halves - gap).sum(-1)  # E[log |X|]
        return terms.sum(-1) + constant + (P + 1) / 2 * volume

    def divergence(self, natural: Parameters, other: Parameters) -> Tensor:
        """nu_p/2 Σ (w_j - 1 - log w_j) with w_j the eigenvalues of E_p[X]^-1 E_q[X], and divergences of nu."""
        P, half, change = natural[1].shape[-1], natural[0] + 1, other[0] - natural[0]
        n, missing, halves = half + (P - 1) / 2, _steps(P, half.dtype, half.device).flip(-1), _halves(half, P)
        other_n = other[0] + (P + 1) / 2
        scales = log_det_divergence(-2 * n[..., None, None] * other[1], -2 * other_n[..., None, None] * natural[1])
        change, wide, other_wide = change[..., None], n[..., None], other_n[..., None]
        other_halves = _halves(other[0] + 1, P)
        unequal = other_wide * log_ratio(other_halves * wide, other_wide * halves, missing * change)
        unequal = unequal - missing * log_ratio(other_halves, halves, change)
        degrees = unequal + stirling_divergence(halves, other_halves, change.expand_as(halves))
        return other_n * scales + degrees.sum(-1)

    def log_density(self, natural: Parameters, x: Tensor) -> Tensor:
        P, n = natural[1].shape[-1], natural[0] + (natural[1].shape[-1] + 1) / 2
        factor = cholesky(-2 * natural[1])
        mode = n[..., None, None] * torch.eye(P, dtype=x.dtype, device=x.device)
        volume = log_abs_det(x)
        pivots = factor.diagonal(dim1=-2, dim2=-1).square()
        log_det = volume - (2 * n[..., None] / pivots).log().sum(-1)
        return (
            -n * log_det_divergence(factor.mT @ x @ factor / 2, mode, log_det)
            - (P + 1) / 2 * volume
            - self._rest(natural[0] + 1, P)
        )

    def mean(self, natural: Parameters) -> Parameters:
        P, factor = natural[1].shape[-1], cholesky(-2 * natural[1])
        expected = torch.digamma(_halves(natural[0] + 1, P))
        volume = (LOG_2 - 2 * factor.diagonal(dim1=-2, dim2=-1).log() + expected).sum(-1)
        return volume, (2 * natural[0] + P + 1)[..., None, None] * factor_inverse(factor)

    def natural(self, mean: Parameters) -> Parameters:
        """By Newton's method for P log(nu/2) - Σ ψ((nu + 1 - i)/2) = log |E[X]| - E[log |X|].

        Raises:
            ValueError: that is not positive, or E[X] is not positive definite.
        """
        P = mean[1].shape[-1]
        target = _log_det(mean[1]) - mean[0]
        if not (target > 0).all():
            raise ValueError(
                f"not the expectations of a {type(self).__name__}: log |E[X]| must be greater than E[log |X|]."
            )
        start = P * (P + 1) / (4 * target.detach())  # exact for large nu

        def spread(half: Tensor) -> tuple[Tensor, Tensor]:
            """As a function of (nu - P + 1)/2, which may be close to zero."""
            halves = _halves(half, P)
            total = halves[..., -1:]  # nu/2
            missing = _halves(torch.zeros_like(half), P).flip(-1)
            value = log_minus_digamma(halves) + torch.log1p(missing / halves)
            slope = log_minus_digamma_slope(halves) - missing / (total * halves)
            return value.sum(-1), slope.sum(-1)

        half = solve_decreasing(spread, target, start)
        inverse = inverted(mean[1])
        return half - 1, -(half + (P - 1) / 2)[..., None, None] * inverse

    def in_domain(self, natural: Parameters) -> Tensor:
        return is_definite(-2 * natural[1]) & (natural[0] > -1) & (natural[0] < math.inf)

    def statistics(self, x: Tensor) -> Parameters:
        return log_abs_det(x), x

    def has_mode(self, natural: Parameters) -> Tensor:
        return self.in_domain(natural) & (natural[0] > 0)

    def mode(self, natural: Parameters) -> Tensor:
        """(nu - P - 1) V."""
        self._check_mode(natural, "more than P + 1 degrees of freedom")
        return 2 * natural[0][..., None, None] * self.standard_parameters(natural)[1]

    def to_distribution(self, natural: Parameters) -> Distribution:
        return TorchWishart(*_same_plates(*self.standard_parameters(natural)))

    def sample(self, natural: Parameters, count: int, generator: torch.Generator | None = None) -> Tensor:
        root = self._root(natural, count, generator)
        return root @ root.mT

    def _root(self, natural: Parameters, count: int, generator: torch.Generator | None) -> Tensor:
        """Lower triangular B with X = B B': the Bartlett decomposition, B = L C with V = L L', C_ii^2 ~ χ²(nu + 1 - i)
        and standard normal numbers below the diagonal."""
        half, scale = _same_plates(natural[0] + 1, self.standard_parameters(natural)[1])
        chi = (log_gamma_samples(_halves(half, scale.shape[-1]).flip(-1), count, generator) + LOG_2) / 2
        below = randn((count, *scale.shape), scale, generator).tril(-1)
        diagonal = chi.exp().clamp(min=torch.finfo(chi.dtype).tiny ** 0.5)
        return cholesky(scale) @ (below + torch.diag_embed(diagonal))


class NormalWishart(Family):
    r"""The mean m and the precision Λ of Gaussian observations: N(m | m0, (κ Λ)^-1) W(Λ | nu, V).

    .. math::
        T &= (\Lambda m,\ m^T \Lambda m,\ \Lambda,\ \log |\Lambda|) \\
        \lambda &= (\kappa m_0,\ -\tfrac{\kappa}{2},\ -\tfrac12 (V^{-1} + \kappa m_0 m_0^T),\ \tfrac{\nu - P}{2}) \\
        \mu &= (\nu V m_0,\ \tfrac{P}{\kappa} + \nu m_0^T V m_0,\ \nu V,\ E[\log |\Lambda|])

    An observation y adds (y, -1/2, -y y'/2, 1/2). A value x of the pair is one tensor of P rows, [m Λ],
    (..., P, P + 1): see `pack` and `unpack`.

    Checked by: also tests/equations/test_conjugate.py, the evidence of Gaussian data against a t distribution.
    """

    event_dims, direct = (1, 0, 2, 0), True
    domain = ", with a positive confidence, a positive definite scale and more than P - 1 degrees of freedom"
    min_degrees: ClassVar[str] = "P"  # a mode needs more degrees of freedom than this

    def of(self, location: Tensor, confidence: Tensor, degrees: Tensor, scale: Tensor) -> Parameters:
        """Natural parameters for m0, κ, nu and V."""
        inverse = inverted(scale)
        square = confidence[..., None, None] * _outer(location)
        P = location.shape[-1]
        return confidence[..., None] * location, -confidence / 2, -(inverse + square) / 2, (degrees - P) / 2

    def standard_parameters(self, natural: Parameters) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Location m0, confidence κ (the number of observations that m0 counts as), degrees of freedom nu, scale V."""
        location, confidence, wishart = self.parts(natural)
        return location, confidence, *Wishart().standard_parameters(wishart)

    def parts(self, natural: Parameters) -> tuple[Tensor, Tensor, Parameters]:
        """Location, confidence, and the natural parameters of the Wishart distribution of the precision."""
        confidence = -2 * natural[1]
        location = natural[0] / (weight := confidence[..., None])
        root = location * weight.sqrt()
        square = torch.addcmul(natural[2], root[..., :, None], root[..., None, :], value=0.5)
        return location, confidence, (natural[3] - 0.5, square)

    def pack(self, mean: Tensor, precision: Tensor) -> Tensor:
        """[m Λ]."""
        return torch.cat([mean[..., None], precision], -1)

    def unpack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """m (..., P) and Λ (..., P, P)."""
        return x[..., 0], x[..., 1:]

    def log_partition(self, natural: Parameters) -> Tensor:
        location, confidence, wishart = self._rows(natural)
        return Wishart().log_partition(wishart) + location.shape[-1] / 2 * (LOG_2PI - confidence.log()).sum(-1)

    def mean(self, natural: Parameters) -> Parameters:
        location, confidence, wishart = self.parts(natural)
        volume, precision = Wishart().mean(wishart)
        push = self._push(location, precision)
        return push, location.shape[-1] / confidence + (location * push).sum(-1), precision, volume

    def _push(self, mean: Tensor, precision: Tensor) -> Tensor:
        return times(precision, mean)

    def _rows(self, natural: Parameters) -> tuple[Tensor, Tensor, Parameters]:
        """`parts`, with locations (..., J, P) and confidences (..., J) also for one mean, J = 1."""
        location, confidence, wishart = self.parts(natural)
        return location[..., None, :], confidence[..., None], wishart

    def entropy(self, natural: Parameters, mean: Parameters | None = None) -> Tensor:
        """That of the precision, and the expected entropy of the means given the precision."""
        location, confidence, wishart = self._rows(natural)
        J, P = location.shape[-2:]
        means = P * (1 + LOG_2PI - confidence.log()).sum(-1) - J * Wishart().mean(wishart)[0]
        return Wishart().entropy(wishart) + means / 2

    def divergence(self, natural: Parameters, other: Parameters) -> Tensor:
        """That of the precisions, and the expected divergence of the means given the precision."""
        (location, confidence, wishart), (center, other_confidence, other_wishart) = map(self._rows, (natural, other))
        offset, P = location - center, location.shape[-1]
        apart = other_confidence * (offset * (offset @ Wishart().mean(wishart)[1])).sum(-1)
        means = P * relative_excess(other_confidence, confidence) + apart
        return Wishart().divergence(wishart, other_wishart) + means.sum(-1) / 2

    def log_density(self, natural: Parameters, x: Tensor) -> Tensor:
        location, confidence, wishart = self._rows(natural)
        J, P = location.shape[-2:]
        mean, precision = TiedNormalWishart().unpack(x)
        offset = mean - location
        means = P * (confidence.log() - LOG_2PI) - confidence * (offset * (offset @ precision)).sum(-1)
        volume = log_abs_det(precision)
        return Wishart().log_density(wishart, precision) + (means.sum(-1) + J * volume) / 2

    def natural(self, mean: Parameters) -> Parameters:
        """See `Wishart.natural`."""
        push, square, precision, volume = mean
        location = torch.cholesky_solve(push[..., None], cholesky(precision))[..., 0]
        rest = square - (location * push).sum(-1)
        if not (rest > 0).all():
            raise ValueError(
                "not the expectations of a NormalWishart: E[m'Λm] must be greater than E[Λm]' E[Λ]^-1 E[Λm]."
            )
        confidence = location.shape[-1] / rest
        degrees, inverse = Wishart().natural((volume, precision))
        spread = inverse - confidence[..., None, None] * _outer(location) / 2
        return confidence[..., None] * location, -confidence / 2, spread, degrees + 0.5

    def in_domain(self, natural: Parameters) -> Tensor:
        # If the confidence is not positive or a location is not finite, the scale is NaN and therefore not valid.
        return (natural[1] < 0) & Wishart().in_domain(self.parts(natural)[2])

    def statistics(self, x: Tensor) -> Parameters:
        return self._statistics(*self.unpack(x))

    def statistics_at_mode(self, natural: Parameters) -> Parameters:
        return self._statistics(*self._mode(natural))

    def _statistics(self, mean: Tensor, precision: Tensor) -> Parameters:
        push = self._push(mean, precision)
        return push, (mean * push).sum(-1), precision, log_abs_det(precision)

    def has_mode(self, natural: Parameters) -> Tensor:
        return self.in_domain(natural) & (natural[3] > 0)

    def mode(self, natural: Parameters) -> Tensor:
        return self.pack(*self._mode(natural))

    def _mode(self, natural: Parameters) -> tuple[Tensor, Tensor]:
        """m0 and (nu - P) V; for J means, (nu - P - 1 + J) V."""
        if not (natural[3] > 0).all():  # other violations raise in the Cholesky factorisation
            self._check_mode(natural, f"more than {self.min_degrees} degrees of freedom")
        location, _, (_, square) = self.parts(natural)
        return location, 2 * natural[3][..., None, None] * inverted(-2 * square)

    def to_distribution(self, natural: Parameters) -> Distribution:
        location, confidence, *wishart = self.standard_parameters(natural)
        return _NormalWishart(location[..., None, :], confidence[..., None], *wishart)

    def sample(self, natural: Parameters, count: int, generator: torch.Generator | None = None) -> Tensor:
        location, confidence, wishart = self._rows(natural)
        root = Wishart()._root(wishart, count, generator)
        noise = randn((*root.shape[:-2], *location.shape[-2:]), root, generator) / confidence.sqrt()[..., None]
        mean = location + torch.linalg.solve_triangular(root.mT, noise.mT, upper=True).mT
        return TiedNormalWishart().pack(mean, root @ root.mT)


class TiedNormalWishart(NormalWishart):
    r"""J means m_j and the precision Λ that they share: Π_j N(m_j | m_j0, (κ_j Λ)^-1) W(Λ | nu, V).

    .. math::
        T &= (\Lambda m_j,\ m_j^T \Lambda m_j,\ \Lambda,\ \log |\Lambda|) \\
        \lambda &= (\kappa_j m_{j0},\ -\tfrac{\kappa_j}{2},\ -\tfrac12 (V^{-1} + \textstyle\sum_j \kappa_j m_{j0}
        m_{j0}^T),\ \tfrac{\nu - P - 1 + J}{2})

    An observation y of group j adds (y, -1/2) at position j and (-y y'/2, 1/2). With J = 1 this is `NormalWishart`;
    groups of one dimension, P = 1, are the coordinates of a vector with equal variances. A value x is one tensor of
    P rows, [m_1 .. m_J Λ], (..., P, J + P): see `pack` and `unpack`.

    Checked by: tests/equations/test_families.py, tests/equations/test_point.py.
    """

    event_dims = (2, 1, 2, 0)
    domain = ", with positive confidences, a positive definite scale and more than P - 1 degrees of freedom"
    min_degrees = "P + 1 - J"

    def of(self, location: Tensor, confidence: Tensor, degrees: Tensor, scale: Tensor) -> Parameters:
        """Natural parameters for m0 (..., J, P), κ (..., J), nu and V."""
        first = confidence[..., None] * location
        inverse = inverted(scale)
        J, P = location.shape[-2:]
        return first, -confidence / 2, -(inverse + first.mT @ location) / 2, (degrees - P - 1 + J) / 2

    def parts(self, natural: Parameters) -> tuple[Tensor, Tensor, Parameters]:
        """Locations, confidences, and the natural parameters of the Wishart distribution of the precision."""
        confidence = -2 * natural[1]
        location = natural[0] / confidence[..., None]
        return location, confidence, (natural[3] - confidence.shape[-1] / 2, natural[2] + natural[0].mT @ location / 2)

    def _rows(self, natural: Parameters) -> tuple[Tensor, Tensor, Parameters]:
        return self.parts(natural)

    def pack(self, mean: Tensor, precision: Tensor) -> Tensor:
        """[m_1 .. m_J Λ]."""
        return torch.cat([mean.mT, precision], -1)

    def unpack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """m (..., J, P) and Λ (..., P, P)."""
        J = x.shape[-1] - x.shape[-2]
        return x[..., :J].mT, x[..., J:]

    def _push(self, mean: Tensor, precision: Tensor) -> Tensor:
        return mean @ precision

    def natural(self, mean: Parameters) -> Parameters:
        """See `Wishart.natural`."""
        push, square, precision, volume = mean
        location = torch.cholesky_solve(push.mT, cholesky(precision)).mT
        rest = square - (location * push).sum(-1)
        if not (rest > 0).all():
            raise ValueError(
                "not the expectations of a TiedNormalWishart: E[m'Λm] must be greater than E[Λm]' E[Λ]^-1 E[Λm]."
            )
        confidence = location.shape[-1] / rest
        first = confidence[..., None] * location
        degrees, inverse = Wishart().natural((volume, precision))
        return first, -confidence / 2, inverse - first.mT @ location / 2, degrees + confidence.shape[-1] / 2

    def in_domain(self, natural: Parameters) -> Tensor:
        confident = ((natural[1] < 0) & (natural[1] > -math.inf)).all(-1)
        return confident & Wishart().in_domain(self.parts(natural)[2])

    def to_distribution(self, natural: Parameters) -> Distribution:
        return _NormalWishart(*self.standard_parameters(natural))

    def symmetric(self, parameters: Parameters) -> Parameters:
        """The parameters with symmetrised matrices; the locations (J, P) are not a symmetric matrix."""
        first, second, third, fourth = parameters
        return first, second, symmetrised(third), fourth


class _NormalWishart(Distribution):
    """The torch Distribution of [m_1 .. m_J Λ]: a Wishart distribution of Λ, and a normal one of each m_j given Λ."""

    @property
    def arg_constraints(self) -> dict[str, Constraint]:
        return {}

    def __init__(self, location: Tensor, confidence: Tensor, degrees: Tensor, scale: Tensor) -> None:
        self.location, self.confidence = location, confidence
        self.precision = TorchWishart(*_same_plates(degrees, scale))
        J, P = location.shape[-2:]
        super().__init__(self.precision.batch_shape, torch.Size((P, P + J)), validate_args=False)

    def _conditional(self, precision: Tensor) -> Distribution:
        matrices = self.confidence[..., None, None] * precision[..., None, :, :]
        return Independent(MultivariateNormal(self.location, precision_matrix=matrices), 1)

    def sample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = torch.Size()) -> Tensor:  # noqa: B008
        precision = self.precision.sample(torch.Size(sample_shape))
        return TiedNormalWishart().pack(self._conditional(precision).sample(), precision)

    def log_prob(self, value: Tensor) -> Tensor:
        mean, precision = TiedNormalWishart().unpack(value)
        return self.precision.log_prob(precision) + self._conditional(precision).log_prob(mean)

    def entropy(self) -> Tensor:
        J, P = self.location.shape[-2:]
        volume = Wishart().mean(Wishart().of(self.precision.df, self.precision.covariance_matrix))[0]
        return self.precision.entropy() + (P * (LOG_2PI + 1 - self.confidence.log()).sum(-1) - J * volume) / 2


def _halves(half: Tensor, size: int) -> Tensor:
    """(nu + 1 - i)/2 for i = P..1, (..., P). `half` is the first of them: (nu - P + 1)/2 = λ_1 + 1."""
    return half[..., None] + _steps(size, half.dtype, half.device)


@cache
def _steps(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(size, dtype=dtype, device=device) / 2


def _log_det(matrix: Tensor) -> Tensor:
    return 2 * cholesky(matrix).diagonal(dim1=-2, dim2=-1).log().sum(-1)


def _outer(vector: Tensor) -> Tensor:
    return vector[..., :, None] * vector[..., None, :]


def _same_plates(degrees: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    plates = torch.broadcast_shapes(degrees.shape, scale.shape[:-2])
    return degrees.expand(plates), scale.expand(*plates, *scale.shape[-2:])
