"""Hessians of the loss at trained weights, for blocks of weights and without the prior.

The posterior of a block has the precision s H + δ I, with its Hessian H, the prior precision δ, and a factor s that
depends on the noise of the data. Prior and noise can therefore be changed, and the evidence can be differentiated by
them, without another pass over the data.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from bayesgrad.belief import Belief, Joint
from bayesgrad.precision import Dense, Diagonal, LowRank, Rescaled, Spectral
from bayesgrad.precision.linalg import inverse
from bayesgrad.precision.low_rank import Directions


class OutputCovariance(Protocol):
    """J P^-1 J' of each example, (examples, outputs, outputs), for the Jacobian J of a model's outputs."""

    def covariance(self, model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Hessian(ABC):
    """The Hessian H of the total loss for one block of weights, or an approximation of it.

    Args:
        shapes: of the block's parameters by name.
    """

    shapes: Mapping[str, torch.Size]
    kinds: ClassVar[dict[str, type[Hessian]]] = {}

    def __init_subclass__(cls) -> None:
        Hessian.kinds[cls.__name__] = cls

    @abstractmethod
    def belief(self, mean: Mapping[str, Tensor], prior: Mapping[str, float], scale: float) -> Belief:
        """N(mean, (scale H + prior)^-1)."""

    @abstractmethod
    def logdet(self, prior: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """log |scale H + prior|, differentiable in both."""

    def output_covariance(self, prior: Mapping[str, float], scale: float) -> OutputCovariance | None:
        """The covariance of linearised outputs, if it can be computed without a dense Jacobian; else None."""
        return None

    def stored(self) -> dict[str, Tensor]:
        """Its tensors by name, for a file; `restored` is the inverse."""
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "shapes"}
        return {key: part for key, part in parts.items() if part is not None}

    @classmethod
    def restored(cls, shapes: Mapping[str, torch.Size], parts: Mapping[str, Tensor]) -> Hessian:
        own = [f.name for f in fields(cls) if f.name != "shapes"]
        return cls(shapes, **{key: parts.get(key) for key in own})  # pyright: ignore[reportCallIssue]

    def _single_prior(self, prior: Mapping[str, Any]) -> Any:
        """The prior precision of a block that must have a single one."""
        values = [prior[name] for name in self.shapes]
        if any(value is not values[0] and value != values[0] for value in values):
            raise ValueError(f"{list(self.shapes)} are one block and need the same prior precision, got {values}.")
        return values[0]

    def _concatenate(self, mean: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        return torch.cat([mean[name].reshape(*shape, -1) for name in self.shapes], -1)


@dataclass(frozen=True, eq=False)
class DiagonalHessian(Hessian):
    """The diagonal for one parameter."""

    values: Tensor

    def belief(self, mean: Mapping[str, Tensor], prior: Mapping[str, float], scale: float) -> Belief:
        ((name, _),) = self.shapes.items()
        return Belief(mean[name], Diagonal(1 / (scale * self.values + prior[name])))

    def logdet(self, prior: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        return (scale * self.values.double() + self._single_prior(prior)).log().sum()


@dataclass(frozen=True, eq=False)
class FactoredHessian(Hessian):
    """E ⊗ A for a matrix [W b], in the eigenbasis of the factors, in which adding the prior is exact.

    Args:
        rows, columns: eigenvectors (groups, out, out) and (groups, in, in), None for the identity.
        spectrum: products of eigenvalues, (groups, out, in).
    """

    rows: Tensor | None
    columns: Tensor | None
    spectrum: Tensor

    def belief(self, mean: Mapping[str, Tensor], prior: Mapping[str, float], scale: float) -> Belief:
        precision = Spectral(self.rows, self.columns, scale * self.spectrum + self._single_prior(prior))
        return Joint(self._concatenate(mean, tuple(self.spectrum.shape[:2])), precision, self.shapes)

    def logdet(self, prior: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        return (scale * self.spectrum.double() + self._single_prior(prior)).log().sum()


@dataclass(frozen=True, eq=False)
class DenseHessian(Hessian):
    """The dense matrix for all parameters, (n, n)."""

    matrix: Tensor

    @cached_property
    def _eigenvalues(self) -> Tensor:
        return torch.linalg.eigvalsh(self.matrix.double()).clamp(min=0)

    def belief(self, mean: Mapping[str, Tensor], prior: Mapping[str, float], scale: float) -> Belief:
        precision = scale * self.matrix
        precision.diagonal().add_(self._prior_diagonal(prior).to(precision))
        covariance = inverse(precision, 0.0, "the posterior precision")
        return Joint(self._concatenate(mean, (1,)), Dense(covariance, (1, len(covariance))), self.shapes)

    def logdet(self, prior: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        if len({id(prior[name]) for name in self.shapes}) == 1:
            return (scale * self._eigenvalues + self._single_prior(prior)).log().sum()
        precision = scale * self.matrix.double() + torch.diag(self._prior_diagonal(prior))
        return 2 * torch.linalg.cholesky(precision).diagonal().log().sum()

    def _prior_diagonal(self, prior: Mapping[str, Any]) -> Tensor:
        like: dict[str, Any] = dict(dtype=torch.float64, device=self.matrix.device)
        sizes = [(name, shape.numel()) for name, shape in self.shapes.items()]
        return torch.cat([torch.as_tensor(prior[name], **like).expand(size) for name, size in sizes])


class NamedDirections(Directions, Protocol):
    """Directions that consist of parts for named parameters."""

    def grams(self) -> Mapping[str, Tensor]: ...

    def weighted_diagonal(self, factor: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class LowRankHessian(Hessian):
    """G G' for the gradients G of a few examples, which need not be stored; vectors are flat, (1, n)."""

    directions: NamedDirections

    @cached_property
    def gram(self) -> Tensor:
        return self.directions.gram()

    @cached_property
    def _eigenvalues(self) -> Tensor:
        return torch.linalg.eigvalsh(self.gram.double()).clamp(min=0)

    @property
    def _size(self) -> int:
        return sum(shape.numel() for shape in self.shapes.values())

    @cached_property
    def _grams(self) -> Mapping[str, Tensor]:
        return self.directions.grams()

    def belief(self, mean: Mapping[str, Tensor], prior: Mapping[str, float], scale: float) -> Belief:
        floors, weights = {prior[name] for name in self.shapes}, self._concatenate(mean, (1,))
        if len(floors) == 1:
            directions = ScaledDirections(self.directions, scale**0.5, lambda: scale * self.gram)
            return Joint(weights, LowRank(floors.pop(), directions, (1, self._size)), self.shapes)
        root = torch.cat([weights.new_full((1, s.numel()), prior[name] ** 0.5) for name, s in self.shapes.items()], 1)

        def square() -> Tensor:
            return torch.stack([scale / prior[name] * gram for name, gram in self._grams.items()]).sum(0)

        inner = LowRank(1.0, ScaledDirections(self.directions, scale**0.5 / root, square), (1, self._size))
        return Joint(weights, Rescaled(inner, root), self.shapes)

    def logdet(self, prior: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        floor = prior[next(iter(self.shapes))]
        if all(prior[name] is floor for name in self.shapes):
            rest = self._size - len(self.gram)  # negative where there are more gradients than weights
            return (scale * self._eigenvalues + floor).log().sum() + rest * floor.log()
        inner = torch.eye(len(self.gram), dtype=torch.float64, device=self.gram.device)
        for name, gram in self._grams.items():
            inner = inner + scale / prior[name] * gram.double()
        volume = 2 * torch.linalg.cholesky(inner).diagonal().log().sum()
        return volume + torch.stack([s.numel() * prior[name].log() for name, s in self.shapes.items()]).sum()


@dataclass(frozen=True, eq=False)
class ScaledDirections:
    """Directions times a number or a vector of one number per weight; the Gram matrix is computed lazily."""

    directions: NamedDirections
    factor: float | Tensor
    square: Callable[[], Tensor]

    def project(self, vector: Tensor) -> Tensor:
        return self.directions.project(self.factor * vector)

    def combine(self, weights: Tensor) -> Tensor:
        return self.directions.combine(weights).mul_(self.factor)

    def gram(self) -> Tensor:
        return self.square()

    def weighted_diagonal(self, factor: Tensor) -> Tensor:
        return self.directions.weighted_diagonal(factor).mul_(self.factor**2)


def check_prior(
    prior_precision: Any, noise_scale: Any, names: Mapping[str, Any], temperature: Any = 1.0
) -> dict[str, float]:
    """The prior precision of each parameter.

    Raises:
        ValueError: a number is not positive and finite, or the names are not those of the parameters.
    """
    if isinstance(prior_precision, Mapping) and set(prior_precision) != set(names):
        odd = sorted(set(prior_precision) ^ set(names))
        raise ValueError(f"prior_precision must have the names of the posterior's parameters; {odd[:3]} do not match.")
    prior = by_name(prior_precision, names, lambda value: value)
    for what, value in [
        *[("prior_precision", value) for value in prior.values()],
        ("noise_scale", noise_scale),
        ("temperature", temperature),
    ]:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ValueError(f"{what} must be a finite positive number, got {value!r}.")
    return {name: float(value) for name, value in prior.items()}


def by_name(prior: Any, names: Mapping[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """A value for each name. A single number becomes one shared object, which `logdet` detects by identity."""
    if isinstance(prior, Mapping):
        return {name: convert(prior[name]) for name in names}
    value = convert(prior)
    return dict.fromkeys(names, value)
