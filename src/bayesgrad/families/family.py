"""What every exponential family has: two sets of parameters, the maps between them, and the laws that follow."""

from __future__ import annotations

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
"""Natural parameters, expectation parameters, sufficient statistics or messages: one tensor for each statistic, with
plates in front: a family of vectors and matrices for n independent variables has (n, P) and (n, P, P)."""


@dataclass(frozen=True)
class Family(ABC):
    r"""An exponential family,

    .. math::
        q(x) = h(x) \exp\left(\langle\lambda, T(x)\rangle - A(\lambda)\right), \quad
        \mu = E_q[T(x)] = \nabla A(\lambda)

    with natural parameters λ and expectation parameters μ. Where h is not a constant, `base` and `base_gradient` say
    what it is. Constants of the density are part of A, so that entropies and divergences lack nothing.

    Reference: 002, sections 1.2 and 2, appendix B.
    Checked by: tests/equations/test_families.py, all of them through the same laws.
    """

    events: ClassVar[tuple[int, ...]]  # how many dimensions of each parameter belong to one variable

    @abstractmethod
    def log_partition(self, natural: Parameters) -> Tensor:
        """A(λ), (plates)."""

    @abstractmethod
    def mean(self, natural: Parameters) -> Parameters:
        """μ = ∇A(λ)."""

    @abstractmethod
    def natural(self, mean: Parameters) -> Parameters:
        """λ, the inverse of `mean`."""

    @abstractmethod
    def inside(self, natural: Parameters) -> Tensor:
        """Whether λ is the parameter of a distribution, (plates)."""

    @abstractmethod
    def statistics(self, x: Tensor) -> Parameters:
        """T(x)."""

    @abstractmethod
    def to_distribution(self, natural: Parameters) -> Distribution:
        """The same distribution as torch has it."""

    @abstractmethod
    def sample(self, natural: Parameters, count: int, generator: torch.Generator | None = None) -> Tensor:
        """(count, plates, event)."""

    def has_mode(self, natural: Parameters) -> Tensor:
        """Whether there is one place where the density is greatest, and T is finite there, (plates)."""
        return self.inside(natural)

    def mode(self, natural: Parameters) -> Tensor:
        """Where the density is greatest.

        Raises:
            ValueError: there is no such place.
        """
        raise ValueError(f"{type(self).__name__} has no mode that can be computed: it cannot be a Point.")

    def _require_mode(self, natural: Parameters, condition: str) -> None:
        exists = self.has_mode(natural)
        if not exists.all():
            where = f": not for {int((~exists).sum())} of {exists.numel()}" if exists.dim() else ""
            raise ValueError(f"{type(self).__name__} has a mode only for {condition}{where}.")

    def base(self, natural: Parameters) -> Tensor:
        """E_q[log h(x)], (plates), or one number for all."""
        return natural[0].new_zeros(())

    @property
    def flat(self) -> bool:
        """Whether log h is zero."""
        return type(self).base is Family.base and type(self).base_gradient is Family.base_gradient

    def base_gradient(self, natural: Parameters) -> Parameters:
        """∇_μ E_q[log h(x)]."""
        return tuple(torch.zeros_like(part) for part in natural)

    def log_base(self, x: Tensor) -> Tensor:
        """log h(x)."""
        return torch.zeros_like(self._reduce(self.statistics(x))[0])

    # --- what follows from these ---

    def dot(self, natural: Parameters, mean: Parameters) -> Tensor:
        """⟨λ, μ⟩, (plates)."""
        return reduce(add, self._reduce([a * b for a, b in zip(natural, mean)]))

    def _reduce(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [part.sum(tuple(range(-n, 0))) if n else part for part, n in zip(parts, self.events)]

    def entropy(self, natural: Parameters, mean: Parameters | None = None) -> Tensor:
        """A(λ) - ⟨λ, μ⟩ - E[log h], (plates); with μ where it is known."""
        inner = self.dot(natural, self.mean(natural) if mean is None else mean)
        entropy = self.log_partition(natural) - inner
        return entropy if self.flat else entropy - self.base(natural)

    def entropy_gradient(self, natural: Parameters) -> Parameters:
        """∇_μ H = -λ - ∇_μ E[log h], the natural gradient of the entropy (002, Eq. 64)."""
        if self.flat:
            return tuple(-part for part in natural)
        return tuple(-a - b for a, b in zip(natural, self.base_gradient(natural)))

    def divergence(self, natural: Parameters, other: Parameters) -> Tensor:
        """KL(q, p) = A(λ_p) - A(λ_q) - ⟨λ_p - λ_q, μ_q⟩ for q = `natural`, p = `other`: Bregman's divergence of A."""
        difference = tuple(b - a for a, b in zip(natural, other))
        return self.log_partition(other) - self.log_partition(natural) - self.dot(difference, self.mean(natural))

    def log_density(self, natural: Parameters, x: Tensor) -> Tensor:
        return self.dot(natural, self.statistics(x)) - self.log_partition(natural) + self.log_base(x)

    def plates(self, natural: Parameters) -> torch.Size:
        """The shape of the array of independent variables."""
        shapes = {part.shape[: part.dim() - n] for part, n in zip(natural, self.events)}
        return shapes.pop() if len(shapes) == 1 else torch.broadcast_shapes(*shapes)

    def symmetric(self, parameters: Parameters) -> Parameters:
        """The same, with matrices made symmetric: what a derivative by a symmetric matrix is."""
        return tuple((part + part.mT) / 2 if n == 2 else part for part, n in zip(parameters, self.events))

    def check(self, natural: Parameters, what: str = "natural parameters") -> Parameters:
        """The parameters themselves; numbers and arrays as tensors, in float64.

        Raises:
            TypeError: they are no numbers.
            ValueError: there are not as many as there should be, they do not fit together, or are of no distribution.
        """
        name = type(self).__name__
        if not isinstance(natural, (tuple, list)):
            raise TypeError(f"{what} of {name} are a tuple of {len(self.events)} tensors, got {natural!r}.")
        if len(natural) != len(self.events):
            raise ValueError(f"{name} has {len(self.events)} {what}, got {len(natural)}.")
        natural = tuple(self._tensor(part, what) for part in natural)
        if len({part.dtype for part in natural}) > 1:
            kinds = ", ".join(str(part.dtype) for part in natural)
            raise ValueError(f"{what} of {name} must be of one dtype, got {kinds}: convert them by .double().")
        for part, n in zip(natural, self.events):
            if part.dim() < n:
                raise ValueError(f"{what} of {name} have at least {self.events} dimensions, got {tuple(part.shape)}.")
        if any(not torch.isfinite(part).all() for part in natural):
            raise ValueError(f"{what} of {name} must be finite numbers, got NaN or infinity.")
        try:
            inside = self.inside(natural)
            if inside.all():
                self.log_partition(natural)
        except RuntimeError as error:
            shapes = ", ".join(str(tuple(part.shape)) for part in natural)
            raise ValueError(f"{what} of {name} do not fit together: their shapes are {shapes}.") from error
        even = zip(natural, self.symmetric(natural))
        if not all(
            torch.allclose(a, b, rtol=0, atol=a.abs().max().item() * _rounding(a)) for a, b in even if a.numel()
        ):
            raise ValueError(f"{what} of {name} must have symmetric matrices; they are not.")
        if not inside.all():
            wrong = int((~inside).sum())
            where = f"{wrong} of {inside.numel()} are not" if inside.dim() else "they are not"
            raise ValueError(f"{what} of {name} must be those of a distribution{self._domain()}; {where}.")
        return natural

    def _tensor(self, part: Any, what: str) -> Tensor:
        if not isinstance(part, Tensor):
            try:
                part = torch.as_tensor(part, dtype=torch.float64)
            except (TypeError, ValueError, RuntimeError):
                raise TypeError(f"{what} of {type(self).__name__} must be tensors of numbers, got {part!r}.") from None
        if not part.is_floating_point():
            kind = type(self).__name__
            raise TypeError(f"{what} of {kind} must be floating-point numbers, got {part.dtype}: convert by .double().")
        return part

    def _domain(self) -> str:
        """In words, as an insertion."""
        return ""


def _rounding(part: Tensor) -> float:
    return torch.finfo(part.dtype).eps ** 0.5
