r"""Covariance functions of Gaussian processes.

A kernel is an immutable object with positive hyperparameters, and a function of two sets of rows, (n, d) and (m, d),
that returns (n, m). Kernels add and multiply, with one another and with numbers: `2.0 * RBF(0.5) + Linear()`. A length
may be one number, or one per column (automatic relevance determination). `Function` makes a kernel from any callable,
for example a GPyTorch kernel.

>>> (2.0 * RBF(1.0))(torch.zeros(1, 1), torch.tensor([[0.0], [1.0]]))
tensor([[2.0000, 1.2131]])

Checked by: tests/equations/test_gaussian_process.py, against scikit-learn's.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bayesgrad.models.tunable import Number, Tunable, like


@dataclass(frozen=True, eq=False, repr=False)
class Kernel(Tunable):
    """A covariance function k(x, z)."""

    @abstractmethod
    def __call__(self, x: Tensor, z: Tensor) -> Tensor:
        """k of all pairs of rows, (n, m)."""

    @abstractmethod
    def diagonal(self, x: Tensor) -> Tensor:
        """k(x, x) of each row, (n,)."""

    def __add__(self, other: Kernel | float) -> Kernel:
        return Sum(self, _kernel(other))

    def __radd__(self, other: float) -> Kernel:
        return Sum(_kernel(other), self)

    def __mul__(self, other: Kernel | float) -> Kernel:
        return Product(self, _kernel(other))

    def __rmul__(self, other: float) -> Kernel:
        return Product(_kernel(other), self)


@dataclass(frozen=True, eq=False, repr=False)
class Constant(Kernel):
    """A constant covariance."""

    hyperparameter_names = ("variance",)
    variance: Number = 1.0

    def __call__(self, x: Tensor, z: Tensor) -> Tensor:
        return like(self.variance, x).expand(len(x), len(z))

    def diagonal(self, x: Tensor) -> Tensor:
        return like(self.variance, x).expand(len(x))


@dataclass(frozen=True, eq=False, repr=False)
class _Stationary(Kernel):
    """A function of r² = |(x - z)/length|²."""

    hyperparameter_names = ("length",)
    length: Number = 1.0

    def __call__(self, x: Tensor, z: Tensor) -> Tensor:
        length = like(self.length, x)
        if length.dim() and len(length) != x.shape[1]:
            raise ValueError(f"length must be one number or {x.shape[1]}, one per column, got {len(length)}.")
        x, z = x / length, z / length
        # Centring reduces the cancellation below.
        centre = x.detach().mean(0)
        x, z = x - centre, z - centre
        square = x.square().sum(1)[:, None] + z.square().sum(1) - 2 * x @ z.mT
        return self._of(square.clamp(min=0))

    def diagonal(self, x: Tensor) -> Tensor:
        return torch.ones_like(x[:, 0])

    @abstractmethod
    def _of(self, square: Tensor) -> Tensor: ...


class RBF(_Stationary):
    """exp(-r²/2): very smooth functions."""

    def _of(self, square: Tensor) -> Tensor:
        return (-square / 2).exp()


class Matern12(_Stationary):
    """exp(-r): continuous functions, rough like an Ornstein-Uhlenbeck process."""

    def _of(self, square: Tensor) -> Tensor:
        return (-_root(square)).exp()


class Matern32(_Stationary):
    """(1 + √3 r) exp(-√3 r): functions with one derivative."""

    def _of(self, square: Tensor) -> Tensor:
        r = math.sqrt(3) * _root(square)
        return (1 + r) * (-r).exp()


class Matern52(_Stationary):
    """(1 + √5 r + 5 r²/3) exp(-√5 r): functions with two derivatives."""

    def _of(self, square: Tensor) -> Tensor:
        r = math.sqrt(5) * _root(square)
        return (1 + r + 5 / 3 * square) * (-r).exp()


@dataclass(frozen=True, eq=False, repr=False)
class Linear(Kernel):
    """variance x'z: linear functions through the origin; add a Constant for an intercept.

    Args:
        variance: of the weights, a number or one per column.
    """

    hyperparameter_names = ("variance",)
    variance: Number = 1.0

    def __call__(self, x: Tensor, z: Tensor) -> Tensor:
        return (x * like(self.variance, x)) @ z.mT

    def diagonal(self, x: Tensor) -> Tensor:
        return (x.square() * like(self.variance, x)).sum(1)


@dataclass(frozen=True, eq=False, repr=False)
class _Pair(Kernel):
    """Two kernels, combined elementwise."""

    hyperparameter_names = ("left", "right")
    combine: ClassVar[Callable[[Tensor, Tensor], Tensor]]
    left: Kernel
    right: Kernel

    def __call__(self, x: Tensor, z: Tensor) -> Tensor:
        return self.combine(self.left(x, z), self.right(x, z))

    def diagonal(self, x: Tensor) -> Tensor:
        return self.combine(self.left.diagonal(x), self.right.diagonal(x))


class Sum(_Pair):
    """The sum of two kernels: the covariance of a sum of independent functions."""

    combine = torch.add


class Product(_Pair):
    """The product of two kernels."""

    combine = torch.mul


@dataclass(frozen=True, eq=False, repr=False)
class Function(Kernel):
    """A kernel from any function of two sets of rows; it has no hyperparameters.

    >>> Function(lambda x, z: (1 + x @ z.T) ** 2)(torch.ones(1, 2), torch.ones(1, 2))
    tensor([[9.]])
    """

    function: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, x: Tensor, z: Tensor) -> Tensor:
        return torch.as_tensor(self.function(x, z)).to(x)

    def diagonal(self, x: Tensor) -> Tensor:
        return torch.cat([self(row, row)[0] for row in x.split(1)])


def _kernel(value: Kernel | float) -> Kernel:
    return value if isinstance(value, Kernel) else Constant(float(value))


def _root(square: Tensor) -> Tensor:
    """√, with a derivative of 0 at 0, where the true derivative is infinite."""
    near = square <= 0
    return torch.where(near, 0, torch.where(near, 1, square).sqrt())
