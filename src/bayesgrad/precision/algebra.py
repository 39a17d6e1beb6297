"""The interface of all precisions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor


class Precision(ABC):
    """A symmetric positive operator P, the inverse of the covariance of some weights.

    An implementation may store the covariance instead; `Scalar`, `Diagonal`, `Pair`, `Kronecker` and `Dense` do,
    because `solve` is then a product. Every operation returns a new object.

    Checked by: tests/algebra/test_precision.py, each operation against `to_dense()`.
    """

    @abstractmethod
    def scale(self, factor: Any) -> Precision:
        """c P: c < 1 forgets old observations."""

    @abstractmethod
    def add(self, increment: Any) -> Precision:
        """P + H: Bayes' rule for an observation of precision H, of the same structure."""

    @abstractmethod
    def propagate(self, retain: Any, noise: Any) -> Precision:
        """(r P^-1 + q I)^-1: the weights shrink and receive noise of variance q."""

    @abstractmethod
    def solve(self, vector: Tensor) -> Tensor:
        """P^-1 v."""

    @abstractmethod
    def sample(self, noise: Tensor) -> Tensor:
        """P^-1/2 z: has covariance P^-1 where z is standard normal."""

    @abstractmethod
    def variance(self) -> Tensor:
        """The diagonal of P^-1, in the shape of the weights."""

    @abstractmethod
    def logdet(self) -> Tensor:
        """log |P|."""

    @abstractmethod
    def to_dense(self) -> Tensor:
        """P as a matrix (n, n)."""
