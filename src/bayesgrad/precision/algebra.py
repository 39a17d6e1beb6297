"""The interface of all precisions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class BilinearForm:
    r"""v'P^-1 w of two weight matrices, as a sum over entries of rotated matrices.

    .. math:: v^T P^{-1} w = c \sum_{oi} s_{oi} (Q^T V R)_{oi} (Q^T W R)_{oi}

    Args:
        rows: Q, (out, out), with a leading dimension of groups if the weights have one; None for the identity.
        columns: R, (in, in), likewise.
        variance: s, in the shape of the weights; None for ones.
        scale: c.
        both: whether W is rotated as V is; else it stays as it is.
    """

    rows: Tensor | None = None
    columns: Tensor | None = None
    variance: Tensor | None = None
    scale: Tensor | float = 1.0
    both: bool = True

    def like(self, other: Tensor, shape: tuple[int, int, int]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Q, R and s for weights (groups, out, in), in the dtype and on the device of another tensor."""
        groups, fan_out, fan_in = shape
        wanted = ((groups, fan_out, fan_out), (groups, fan_in, fan_in), shape)
        parts = [
            None if part is None else part.to(other).reshape(own)
            for part, own in zip((self.rows, self.columns, self.variance), wanted)
        ]
        return parts[0], parts[1], parts[2]


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

    def multiply(self, vector: Tensor) -> Tensor:
        """P v; where `solve` accepts leading dimensions, so does this."""
        matrix = self.to_dense()
        return (vector.reshape(-1, len(matrix)).to(matrix) @ matrix).reshape(vector.shape)

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

    def bilinear_form(self) -> BilinearForm | None:
        """v'P^-1 w in a basis in which it is a sum over entries; None if there is no such basis for a weight matrix."""
        return None
