"""Several means that share one precision matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, MultivariateNormal

from bayesgrad.families.family import Parameters
from bayesgrad.families.gaussian import LOG_2PI, _cholesky, _normal
from bayesgrad.families.matrix import NormalWishart, Wishart, _NormalWishart


@dataclass(frozen=True)
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
        inverse = torch.cholesky_inverse(_cholesky(scale))
        J, P = location.shape[-2:]
        return first, -confidence / 2, -(inverse + first.mT @ location) / 2, (degrees - P - 1 + J) / 2

    def parts(self, natural: Parameters) -> tuple[Tensor, Tensor, Parameters]:
        """Locations, confidences, and the natural parameters of the Wishart distribution of the precision."""
        confidence = -2 * natural[1]
        location = natural[0] / confidence[..., None]
        return location, confidence, (natural[3] - confidence.shape[-1] / 2, natural[2] + natural[0].mT @ location / 2)

    def pack(self, mean: Tensor, precision: Tensor) -> Tensor:
        """[m_1 .. m_J Λ]."""
        return torch.cat([mean.mT, precision], -1)

    def unpack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """m (..., J, P) and Λ (..., P, P)."""
        J = x.shape[-1] - x.shape[-2]
        return x[..., :J].mT, x[..., J:]

    def log_partition(self, natural: Parameters) -> Tensor:
        location, confidence, wishart = self.parts(natural)
        return Wishart().log_partition(wishart) + location.shape[-1] / 2 * (LOG_2PI - confidence.log()).sum(-1)

    def mean(self, natural: Parameters) -> Parameters:
        location, confidence, wishart = self.parts(natural)
        volume, precision = Wishart().mean(wishart)
        push = location @ precision
        return push, location.shape[-1] / confidence + (location * push).sum(-1), precision, volume

    def natural(self, mean: Parameters) -> Parameters:
        """See `Wishart.natural`."""
        push, square, precision, volume = mean
        location = torch.cholesky_solve(push.mT, _cholesky(precision)).mT
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

    def statistics(self, x: Tensor) -> Parameters:
        mean, precision = self.unpack(x)
        push = mean @ precision
        return push, (mean * push).sum(-1), precision, torch.linalg.slogdet(precision)[1]

    def to_distribution(self, natural: Parameters) -> Distribution:
        return _TiedNormalWishart(*self.standard_parameters(natural))

    def sample(self, natural: Parameters, count: int, generator: torch.Generator | None = None) -> Tensor:
        location, confidence, wishart = self.parts(natural)
        root = Wishart()._root(wishart, count, generator)
        noise = _normal((count, *location.shape), root, generator) / confidence.sqrt()[..., None]
        mean = location + torch.linalg.solve_triangular(root.mT, noise.mT, upper=True).mT
        return self.pack(mean, root @ root.mT)

    def symmetric(self, parameters: Parameters) -> Parameters:
        """The parameters with symmetrised matrices; the locations (J, P) are not a symmetric matrix."""
        first, second, third, fourth = parameters
        return first, second, (third + third.mT) / 2, fourth


class _TiedNormalWishart(_NormalWishart):
    """The distribution of [m_1 .. m_J Λ]: a Wishart distribution, and normal distributions of all m_j given Λ."""

    family = TiedNormalWishart()

    def _means(self) -> int:
        return self.location.shape[-2]

    def _conditional(self, precision: Tensor) -> Distribution:
        matrices = self.confidence[..., None, None] * precision[..., None, :, :]
        return Independent(MultivariateNormal(self.location, precision_matrix=matrices), 1)

    def entropy(self) -> Tensor:
        J, P = self.location.shape[-2:]
        volume = Wishart().mean(Wishart().of(self.precision.df, self.precision.covariance_matrix))[0]
        return self.precision.entropy() + (P * (LOG_2PI + 1 - self.confidence.log()).sum(-1) - J * volume) / 2
