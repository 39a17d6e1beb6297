"""Directions: what a preconditioner puts in place of gradients, as tensors or in cheaper forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Product:
    """A direction left.T @ right as its two factors, left (rows, out) and right (rows, in)."""

    left: Tensor
    right: Tensor
    shape: torch.Size

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    def dense(self) -> Tensor:
        return (self.left.T @ self.right).view(self.shape)

    def into(self, target: Tensor, keep: float, fresh: float) -> None:
        """target <- keep target + fresh direction, in one pass over it."""
        target.view(self.left.shape[1], -1).addmm_(self.left.T, self.right, beta=keep, alpha=fresh)

    def subtract_from(
        self, p: Tensor, momentum: Tensor | None, keep: float, fresh: float, step_scale: float, shrink: float
    ) -> None:
        """p <- shrink p - step_scale m, with m the direction or its momentum, m <- keep m + fresh direction."""
        if momentum is None:
            self.into(p, shrink, -step_scale)
            return
        self.into(momentum, keep, fresh)
        (p if shrink == 1 else p.mul_(shrink)).add_(momentum, alpha=-step_scale)


@dataclass(frozen=True, eq=False)
class Scaled:
    """A direction times a tensor with one element, which the host does not read."""

    values: Tensor
    factor: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def dense(self) -> Tensor:
        return self.values * self.factor.to(self.values)

    def subtract_from(
        self, p: Tensor, momentum: Tensor | None, keep: float, fresh: float, step_scale: float, shrink: float
    ) -> None:
        """As `Product.subtract_from`."""
        p = p if shrink == 1 else p.mul_(shrink)
        if momentum is None:
            p.addcmul_(self.values, self.factor.to(p), value=-step_scale)
            return
        momentum.mul_(keep).addcmul_(self.values, self.factor.to(momentum), value=fresh)
        p.add_(momentum, alpha=-step_scale)


Direction = Tensor | Product | Scaled
Directions = Mapping[Tensor, Direction]


def dense(direction: Direction) -> Tensor:
    return direction if isinstance(direction, Tensor) else direction.dense()


def scaled(direction: Direction, factor: Tensor) -> Direction:
    """A direction times a tensor with one element."""
    if isinstance(direction, Product):
        return Product(direction.left * factor.to(direction.left), direction.right, direction.shape)
    return Scaled(dense(direction), factor)


def square_norm(direction: Direction) -> Tensor:
    """The sum of squares, as a tensor."""
    if isinstance(direction, Product):
        left, right = direction.left, direction.right
        return torch.sum((left @ left.T) * (right @ right.T))
    return torch.linalg.vector_norm(dense(direction)).square()
