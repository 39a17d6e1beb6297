"""Point estimates as an exponential family: all expectations at the mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions.constraints import Constraint

from bayesgrad.families.family import Family, Parameters


@dataclass(frozen=True)
class Point(Family):
    r"""The delta method: natural parameters of a family, and all expectations taken at its mode x*.

    .. math::
        \mu = T(x_*), \quad x_* = \arg\max_x \langle\lambda, T(x)\rangle + \log h(x), \quad
        A(\lambda) = \max_x \langle\lambda, T(x)\rangle + \log h(x)

    This is the limit of q^(1/τ) for τ -> 0, with A and H in units of 1/τ. As for other families, ∇A = T(x*). The
    entropy is 0, but its gradient ∇_μ H = -λ - ∇_μ E[log h] is that of the family, because it does not depend on τ.
    The step

    .. math::
        \lambda \leftarrow \lambda + \rho \left(\textstyle\sum \text{messages} + \nabla_\mu H\right)

    with rho = 1 sets λ to the sum of the messages, and x* maximises the expected log joint density: this is the M-step
    of EM, or of MAP-EM if one of the messages is that of a prior. The messages must be linear in the statistics of the
    family. A flat prior is λ = 0; only the sum of the prior and the data must be in the domain.

    λ still contains the precision: Point(Gaussian()) uses the mean and converges to the Laplace approximation.

    >>> from bayesgrad.families import Dirichlet
    >>> shares, counts = Point(Dirichlet()), (torch.tensor([3.0, 1.0]),)
    >>> shares.mean(counts)[0].exp().tolist()
    [0.75, 0.25]

    Reference: Khan and Rue 2023, section 5.2 and appendix C.
    Differs from the paper: no difference, but q is not a Dirac delta, whose entropy is -inf (appendix C.1).
    Checked by: tests/equations/test_point.py.
    """

    domain = " that has a mode"
    direct = True
    family: Family

    @property
    def event_dims(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.family.event_dims

    def log_partition(self, natural: Parameters) -> Tensor:
        inner = self.family.dot(natural, self.mean(natural))
        return inner if self.constant_base else inner + self.expected_log_base(natural)

    def mean(self, natural: Parameters) -> Parameters:
        return self.family.statistics_at_mode(natural)

    def natural(self, mean: Parameters) -> Parameters:
        """
        Raises:
            ValueError: always, because many natural parameters have the same mode.
        """
        raise ValueError("Point cannot compute natural parameters from T(mode): store the natural parameters instead.")

    def in_domain(self, natural: Parameters) -> Tensor:
        """Whether there is a mode."""
        return self.family.has_mode(natural)

    def statistics(self, x: Tensor) -> Parameters:
        return self.family.statistics(x)

    def mode(self, natural: Parameters) -> Tensor:
        return self.family.mode(natural)

    def expected_log_base(self, natural: Parameters) -> Tensor:
        return self.family.log_base(self.family.mode(natural))

    @property
    def constant_base(self) -> bool:
        return self.family.constant_base

    def base_gradient(self, natural: Parameters) -> Parameters:
        return self.family.base_gradient(natural)

    def log_base(self, x: Tensor) -> Tensor:
        return self.family.log_base(x)

    def symmetric(self, parameters: Parameters) -> Parameters:
        return self.family.symmetric(parameters)

    def entropy(self, natural: Parameters, mean: Parameters | None = None) -> Tensor:
        """0 for each plate."""
        return natural[0].new_zeros(self.plates(natural))

    def to_distribution(self, natural: Parameters) -> Distribution:
        """A distribution with all mass at the mode."""
        x = self.family.mode(natural)
        return _Delta(x, x.dim() - len(self.plates(natural)))

    def sample(self, natural: Parameters, count: int, generator: torch.Generator | None = None) -> Tensor:
        """The mode, `count` times."""
        x = self.family.mode(natural)
        return x.expand(count, *x.shape)

    def retract(self, natural: Parameters, direction: Parameters, rho: float | Tensor) -> Parameters:
        """The family's own retraction, or a straight step if it has none."""
        family: Any = self.family
        if hasattr(family, "retract"):
            return family.retract(natural, direction, rho)
        return tuple(a + rho * b for a, b in zip(natural, direction))


class _Delta(Distribution):
    """A distribution with all mass at one point, as a torch Distribution."""

    @property
    def arg_constraints(self) -> dict[str, Constraint]:
        return {}

    def __init__(self, place: Tensor, event_dims: int) -> None:
        self.place = place
        split = place.dim() - event_dims
        super().__init__(place.shape[:split], place.shape[split:], validate_args=False)

    @property
    def mean(self) -> Tensor:
        return self.place

    @property
    def mode(self) -> Tensor:
        return self.place

    @property
    def variance(self) -> Tensor:
        return torch.zeros_like(self.place)

    def sample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = torch.Size()) -> Tensor:  # noqa: B008
        return self.place.expand(*sample_shape, *self.place.shape)

    def log_prob(self, value: Tensor) -> Tensor:
        same = value == self.place
        for _ in self.event_shape:
            same = same.all(-1)
        return torch.where(same, 0.0, -torch.inf).to(self.place)

    def entropy(self) -> Tensor:
        return self.place.new_zeros(self.batch_shape)
