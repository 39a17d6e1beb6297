"""The base class of exponential families: two sets of parameters, the maps between them, entropy and divergence."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution

Parameters = tuple[Tensor, ...]
"""Natural parameters, expectation parameters, sufficient statistics or messages: one tensor per statistic. Leading
dimensions are plates: n independent Gaussian vectors have (n, P) and (n, P, P)."""


@dataclass(frozen=True)
class Family(ABC):
    r"""An exponential family,

    .. math::
        q(x) = h(x) \exp\left(\langle\lambda, T(x)\rangle - A(\lambda)\right), \quad
        \mu = E_q[T(x)] = \nabla A(\lambda)

    with natural parameters λ and expectation parameters μ. Families whose base measure h is not constant override
    `expected_log_base`, `base_gradient` and `log_base`. A includes all constants
    of the density, so entropies are complete.

    Every family has a method `of`, which computes natural parameters from the usual ones (the mean and precision of a
    Gaussian, for example). `mean` and `natural` convert between λ and μ.

    Reference: Khan and Rue 2023, sections 1.2 and 2, appendix B.
    Checked by: tests/equations/test_families.py, the same tests for all families.
    """

    event_dims: ClassVar[tuple[int, ...]]  # number of event dimensions of each parameter
    domain: ClassVar[str] = ""  # the conditions on the parameters, for error messages
    direct: ClassVar[bool] = False  # whether `expected_log_density` is computed from its definition
    minus_infinity: ClassVar[bool] = False  # whether -inf is a valid parameter, as for logits

    @abstractmethod
    def log_partition(self, natural: Parameters) -> Tensor:
        """A(λ), one value per plate."""

    @abstractmethod
    def mean(self, natural: Parameters) -> Parameters:
        """μ = ∇A(λ)."""

    @abstractmethod
    def natural(self, mean: Parameters) -> Parameters:
        """λ for given μ, the inverse of `mean`."""

    @abstractmethod
    def in_domain(self, natural: Parameters) -> Tensor:
        """Whether λ is a valid natural parameter, one boolean per plate."""

    @abstractmethod
    def statistics(self, x: Tensor) -> Parameters:
        """T(x)."""

    @abstractmethod
    def to_distribution(self, natural: Parameters) -> Distribution:
        """The same distribution as a torch Distribution."""

    @abstractmethod
    def sample(self, natural: Parameters, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Samples (count, plates, event)."""

    def has_mode(self, natural: Parameters) -> Tensor:
        """Whether the density has a unique maximum at which T is finite, one boolean per plate."""
        return self.in_domain(natural)

    def mode(self, natural: Parameters) -> Tensor:
        """The maximum of the density.

        Raises:
            ValueError: there is none.
        """
        raise ValueError(f"{type(self).__name__} has no mode that can be computed, so Point does not support it.")

    def statistics_at_mode(self, natural: Parameters) -> Parameters:
        """T at the maximum of the density."""
        return self.statistics(self.mode(natural))

    def _check_mode(self, natural: Parameters, condition: str) -> None:
        exists = self.has_mode(natural)
        if not exists.all():
            where = f", got {int((~exists).sum())} of {exists.numel()} without" if exists.dim() else ""
            raise ValueError(f"the mode of {type(self).__name__} needs {condition}{where}.")

    def expected_log_base(self, natural: Parameters) -> Tensor:
        """E_q[log h(x)], one value per plate, or one for all."""
        return natural[0].new_zeros(())

    @property
    def constant_base(self) -> bool:
        """Whether the base measure is constant, log h = 0."""
        own = type(self)
        return own.expected_log_base is Family.expected_log_base and own.base_gradient is Family.base_gradient

    def base_gradient(self, natural: Parameters) -> Parameters:
        """∇_μ E_q[log h(x)]."""
        return tuple(torch.zeros_like(part) for part in natural)

    def log_base(self, x: Tensor) -> Tensor:
        """log h(x)."""
        return torch.zeros_like(self._reduce(self.statistics(x))[0])

    # --- derived from these ---

    def dot(self, natural: Parameters, mean: Parameters) -> Tensor:
        """⟨λ, μ⟩, one value per plate."""
        return reduce(add, self._reduce([a * b for a, b in zip(natural, mean)]))

    def _reduce(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [part.sum(tuple(range(-n, 0))) if n else part for part, n in zip(parts, self.event_dims)]

    def entropy(self, natural: Parameters, mean: Parameters | None = None) -> Tensor:
        """A(λ) - ⟨λ, μ⟩ - E[log h], one value per plate. Pass `mean` if it is already computed."""
        inner = self.dot(natural, self.mean(natural) if mean is None else mean)
        entropy = self.log_partition(natural) - inner
        return entropy if self.constant_base else entropy - self.expected_log_base(natural)

    def entropy_gradient(self, natural: Parameters) -> Parameters:
        """∇_μ H = -λ - ∇_μ E[log h], the natural gradient of the entropy (Khan and Rue 2023, Eq. 64)."""
        if self.constant_base:
            return tuple(-part for part in natural)
        return tuple(-a - b for a, b in zip(natural, self.base_gradient(natural)))

    def full_step(self, natural: Parameters, messages: Parameters) -> Parameters:
        """λ + Σ messages + ∇_μ H, which is Σ messages - ∇_μ E[log h]: the λ of a step with rho = 1."""
        if self.constant_base:
            return messages
        return tuple(a - b for a, b in zip(messages, self.base_gradient(natural)))

    def part_step(self, natural: Parameters, target: Parameters, rho: float | Tensor) -> Parameters:
        """λ + rho (λ' - λ) for λ' = `target`; rho is a number, or a tensor with one number for each plate."""
        if not isinstance(rho, Tensor):
            if rho == 1 and all(_alike(a, b) for a, b in zip(natural, target)):
                return target
            return tuple(torch.lerp(a, b, rho) for a, b in zip(natural, target))
        sizes = [rho[(...,) + (None,) * n] for n in self.event_dims]
        return tuple(torch.lerp(a, b, size) for a, b, size in zip(natural, target, sizes))

    def divergence(self, natural: Parameters, other: Parameters) -> Tensor:
        """KL(q, p) = A(λ_p) - A(λ_q) - ⟨λ_p - λ_q, μ_q⟩ for q = `natural`, p = `other`: the Bregman divergence of A."""
        difference = tuple(b - a for a, b in zip(natural, other))
        return self.log_partition(other) - self.log_partition(natural) - self.dot(difference, self.mean(natural))

    def expected_log_density(self, natural: Parameters, other: Parameters, mean: Parameters | None = None) -> Tensor:
        """E_q[log p] = ⟨λ_p, μ_q⟩ - A(λ_p) + E_q[log h] for q = `natural`, p = `other`; `mean` as in `entropy`.

        Where large terms may cancel it is -H(q) - KL(q, p), unless that takes many times as long (`direct`).
        """
        if not self.direct:
            return -(self.entropy(natural, mean) + self.divergence(natural, other))
        inner = self.dot(other, self.mean(natural) if mean is None else mean) - self.log_partition(other)
        return inner if self.constant_base else inner + self.expected_log_base(natural)

    def log_density(self, natural: Parameters, x: Tensor) -> Tensor:
        return self.dot(natural, self.statistics(x)) - self.log_partition(natural) + self.log_base(x)

    def plates(self, natural: Parameters) -> torch.Size:
        """The batch shape: the shape of the array of independent variables."""
        shapes = {part.shape[: part.dim() - n] for part, n in zip(natural, self.event_dims)}
        return shapes.pop() if len(shapes) == 1 else torch.broadcast_shapes(*shapes)

    def symmetric(self, parameters: Parameters) -> Parameters:
        """The parameters with symmetrised matrices: derivatives with respect to a symmetric matrix are symmetric."""
        return tuple(symmetrised(part) if n == 2 else part for part, n in zip(parameters, self.event_dims))

    def check(self, natural: Parameters, what: str = "natural parameters") -> Parameters:
        """Validates parameters and returns them as tensors; numbers and arrays become float64.

        Raises:
            TypeError: they are not numbers.
            ValueError: their number, shapes or values are not valid.
        """
        name = type(self).__name__
        if not isinstance(natural, (tuple, list)):
            raise TypeError(f"{what} of {name} must be a tuple of {len(self.event_dims)} tensors, got {natural!r}.")
        if len(natural) != len(self.event_dims):
            raise ValueError(f"{name} has {len(self.event_dims)} {what}, got {len(natural)}.")
        natural = tuple(self._tensor(part, what) for part in natural)
        if len({part.dtype for part in natural}) > 1:
            kinds = ", ".join(str(part.dtype) for part in natural)
            raise ValueError(f"{what} of {name} must have the same dtype, got {kinds}: convert them with .double().")
        for part, n in zip(natural, self.event_dims):
            if part.dim() < n:
                raise ValueError(
                    f"{what} of {name} need {self.event_dims} dimensions or more, got {tuple(part.shape)}."
                )
        if not all(self._finite(part) for part in natural):
            raise ValueError(f"{what} of {name} must be finite, got NaN or infinity.")
        try:
            in_domain = self.in_domain(natural)
            if in_domain.all():
                self.log_partition(natural)
        except RuntimeError as error:
            shapes = ", ".join(str(tuple(part.shape)) for part in natural)
            raise ValueError(f"{what} of {name} must have matching shapes, got {shapes}.") from error
        even = zip(natural, self.symmetric(natural))
        rounding = torch.finfo(natural[0].dtype).eps ** 0.5
        pairs = [(a, b) for a, b in even if a is not b and a.numel()]
        if not all(torch.allclose(a, b, rtol=0, atol=a.abs().max().item() * rounding) for a, b in pairs):
            raise ValueError(f"{what} of {name} must have symmetric matrices, got asymmetric ones.")
        if not in_domain.all():
            wrong = int((~in_domain).sum())
            where = f"{wrong} of {in_domain.numel()} are not valid" if in_domain.dim() else "they are not valid"
            raise ValueError(f"{what} of {name} must define a distribution{self.domain}; {where}.")
        return natural

    def _finite(self, part: Tensor) -> bool:
        if not part.numel():
            return True
        low, high = (float(value) for value in torch.aminmax(part.detach()))  # both are NaN if a number is
        return high < math.inf and (low > -math.inf or self.minus_infinity)

    def _tensor(self, part: Any, what: str) -> Tensor:
        if not isinstance(part, Tensor):
            try:
                part = torch.as_tensor(part, dtype=torch.float64)
            except (TypeError, ValueError, RuntimeError):
                raise TypeError(f"{what} of {type(self).__name__} must be tensors of numbers, got {part!r}.") from None
        if not part.is_floating_point():
            kind = type(self).__name__
            raise TypeError(f"{what} of {kind} must be floating-point, got {part.dtype}: convert them with .double().")
        return part


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def symmetrised(matrix: Tensor) -> Tensor:
    """(M + M')/2."""
    return matrix if matrix.shape[-1] == 1 else (matrix + matrix.mT) / 2
