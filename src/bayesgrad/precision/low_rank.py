"""A multiple of the identity plus a matrix of low rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from bayesgrad.precision.algebra import Precision
from bayesgrad.precision.linalg import cholesky

Vector = Any  # a tensor, or tensors by name


class Directions(Protocol):
    """A matrix G, given by products with it."""

    def project(self, vector: Vector) -> Tensor: ...
    def combine(self, weights: Tensor) -> Vector: ...
    def gram(self) -> Tensor: ...


@runtime_checkable
class HasWeightedDiagonal(Protocol):
    """Directions with an efficient diagonal of G (L L')^-1 G', for a lower triangular L."""

    def weighted_diagonal(self, factor: Tensor) -> Vector: ...


@dataclass(frozen=True, eq=False)
class Matrix:
    """A stored matrix G, (*shape, k).

    >>> Matrix(torch.eye(3)[:, :1]).project(torch.tensor([5.0, 1.0, 1.0]))
    tensor([5.])
    """

    columns: Tensor

    def project(self, vector: Tensor) -> Tensor:
        return vector.flatten() @ self.columns.flatten(0, -2)

    def combine(self, weights: Tensor) -> Tensor:
        return self.columns @ weights

    def gram(self) -> Tensor:
        flat = self.columns.flatten(0, -2)
        return flat.T @ flat


@dataclass(frozen=True, eq=False)
class CombinedDirections:
    """The columns of several products G R, for matrices R (k, m)."""

    parts: tuple[tuple[Directions, Tensor], ...]

    def project(self, vector: Vector) -> Tensor:
        return torch.cat([mix.T @ directions.project(vector) for directions, mix in self.parts])

    def combine(self, weights: Tensor) -> Vector:
        pieces = weights.split([mix.shape[1] for _, mix in self.parts])
        total = None
        for (directions, mix), piece in zip(self.parts, pieces):
            product = directions.combine(mix @ piece)
            total = product if total is None else _sum(1, total, product)
        return total

    def gram(self) -> Tensor:
        if len(self.parts) == 1:
            ((directions, mix),) = self.parts
            return mix.T @ directions.gram() @ mix
        eye = torch.eye(sum(mix.shape[1] for _, mix in self.parts)).to(self.parts[0][1])
        return torch.stack([self.project(self.combine(unit)) for unit in eye])


@dataclass(frozen=True, eq=False)
class LowRank(Precision):
    """P = c I + G G', for a G with few columns, which need not be stored.

    P^-1 v = (v - G (c I + G'G)^-1 G'v)/c. Vectors are tensors or mappings name -> tensor, as `directions` requires.

    >>> belief = LowRank(1.0, Matrix(torch.eye(2)[:, :1]), (2,))
    >>> belief.solve(torch.ones(2))
    tensor([0.5000, 1.0000])

    Reference: Benzing 2021, Eq. 18.

    Args:
        floor: c, positive.
        directions: G.
        shape: of the weights.
    """

    floor: float
    directions: Directions
    shape: tuple[int, ...] = ()

    @cached_property
    def gram(self) -> Tensor:
        return self.directions.gram()

    @cached_property
    def _factor(self) -> Tensor:
        return cholesky(self.gram, self.floor, "the Gram matrix of the gradients")

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self.gram)
        return values.clamp(min=0), vectors

    def scale(self, factor: Any) -> LowRank:
        mix = torch.eye(len(self.gram)).to(self.gram) * factor**0.5
        return LowRank(factor * self.floor, CombinedDirections(((self.directions, mix),)), self.shape)

    def add(self, increment: Any) -> LowRank:
        """P + c I for a number, P + H H' for directions H."""
        if isinstance(increment, (int, float)):
            return LowRank(self.floor + increment, self.directions, self.shape)
        eyes = [torch.eye(len(d.gram())).to(self.gram) for d in (self.directions, increment)]
        parts = tuple(zip((self.directions, increment), eyes))
        return LowRank(self.floor, CombinedDirections(parts), self.shape)

    def propagate(self, retain: Any, noise: Any) -> LowRank:
        values, vectors = self._spectrum
        low = retain + noise * self.floor
        gain = retain / ((retain + noise * (self.floor + values)) * low)
        return LowRank(self.floor / low, CombinedDirections(((self.directions, vectors * gain.sqrt()),)), self.shape)

    def solve(self, vector: Vector) -> Vector:
        weights = torch.cholesky_solve(self.directions.project(vector)[:, None], self._factor)[:, 0]
        return _sum(1 / self.floor, vector, self.directions.combine(-weights / self.floor))

    def multiply(self, vector: Vector) -> Vector:
        """P v."""
        return _sum(self.floor, vector, self.directions.combine(self.directions.project(vector)))

    def sample(self, noise: Vector) -> Vector:
        """By the symmetric root: (1 + x)^-1/2 - 1 = -x/(r (1 + r)) with r = (1 + x)^1/2, without a division by x."""
        values, vectors = self._spectrum
        root = (1 + values / self.floor).sqrt()
        weights = vectors @ (vectors.T @ self.directions.project(noise) / (root * (1 + root)))
        return _scaled(self.floor**-0.5, _sum(1, noise, self.directions.combine(-weights / self.floor)))

    def draw(self, noise: Vector, coefficient_noise: Tensor) -> Vector:
        """A sample from the Cholesky factor of the Gram matrix.

        It is c^-1/2 (y - V U^-1 (V'y + z)), V = c^-1/2 G, U = I + V'V.

        Args:
            noise: y, standard normal, in the shape of the weights.
            coefficient_noise: z, (k,), standard normal and independent of y.

        Reference: Benzing 2021, Eq. 6-9.
        Checked by: tests/equations/test_laplace.py, by the algebra of its covariance.
        """
        root = self.floor**0.5
        right = self.directions.project(noise) + root * coefficient_noise  # U = (c I + G'G)/c
        weights = torch.cholesky_solve(right[:, None], self._factor)[:, 0]
        return _map(lambda t: t.div_(root), _sum(1, noise, self.directions.combine(-weights)))

    def variance(self) -> Vector:
        """Takes k^2 n operations for k directions and n weights, k/2 times as many as a sample."""
        if isinstance(self.directions, HasWeightedDiagonal):
            return _map(lambda t: (1 - t) / self.floor, self.directions.weighted_diagonal(self._factor))
        total = None
        for column in torch.linalg.inv(self._factor):  # (c I + G'G)^-1 = L'^-1 L^-1
            square = _map(torch.square, self.directions.combine(column))
            total = square if total is None else _sum(1, total, square)
        return _map(lambda t: (1 - t) / self.floor, total)

    def logdet(self) -> Tensor:
        values, _ = self._spectrum
        rest = torch.Size(self.shape).numel() - len(values)
        return (self.floor + values).log().sum() + rest * math.log(self.floor)

    def to_dense(self) -> Tensor:
        eye = torch.eye(len(self.gram)).to(self.gram)
        columns = torch.stack([self.directions.combine(unit).flatten() for unit in eye], 1)
        return self.floor * torch.eye(len(columns)).to(columns) + columns @ columns.T


@dataclass(frozen=True, eq=False)
class Rescaled(Precision):
    """P = R (c I + G G') R for a diagonal R: a low-rank precision with a prior precision for each weight.

    >>> Rescaled(LowRank(1.0, Matrix(torch.eye(2)[:, :1]), (2,)), torch.tensor([1.0, 2.0])).variance()
    tensor([0.5000, 0.2500])

    Args:
        inner: c I + G G'.
        root: R, positive, in the shape of the weights.
    """

    inner: LowRank
    root: Tensor

    @property
    def gram(self) -> Tensor:
        return self.inner.gram

    def scale(self, factor: Any) -> Rescaled:
        return Rescaled(self.inner.scale(factor), self.root)

    def add(self, increment: Any) -> Rescaled:
        raise ValueError("a Rescaled precision does not support add(): add to its inner LowRank instead.")

    def propagate(self, retain: Any, noise: Any) -> Rescaled:
        raise ValueError("a Rescaled precision does not support propagate(): use Dense.")

    def solve(self, vector: Tensor) -> Tensor:
        return self.inner.solve(vector / self.root) / self.root

    def multiply(self, vector: Tensor) -> Tensor:
        return self.inner.multiply(vector * self.root) * self.root

    def sample(self, noise: Tensor) -> Tensor:
        return self.inner.sample(noise) / self.root

    def draw(self, noise: Tensor, coefficient_noise: Tensor) -> Tensor:
        return self.inner.draw(noise, coefficient_noise).div_(self.root)

    def variance(self) -> Tensor:
        return self.inner.variance() / self.root.square()

    def logdet(self) -> Tensor:
        return self.inner.logdet() + 2 * self.root.log().sum()

    def to_dense(self) -> Tensor:
        return self.root.flatten()[:, None] * self.inner.to_dense() * self.root.flatten()


def _map(function, vector: Vector) -> Vector:
    return {k: function(v) for k, v in vector.items()} if isinstance(vector, Mapping) else function(vector)


def _scaled(factor: float, vector: Vector) -> Vector:
    return _map(lambda t: factor * t, vector)


def _sum(factor: float, vector: Vector, other: Vector) -> Vector:
    """factor * vector + other, which is overwritten."""
    if isinstance(vector, Mapping):
        return {name: _sum(factor, value, other[name]) for name, value in vector.items()}
    return other.add_(vector, alpha=factor)
