"""Directions: what a preconditioner puts in place of gradients, as tensors or in cheaper forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesgrad.products import mm


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
        return mm(self.left.T, self.right).view(self.shape)

    def into(self, target: Tensor, keep: float, fresh: float) -> None:
        """target <- keep target + fresh direction, in one pass over it."""
        target.view(self.left.shape[1], -1).addmm_(self.left.T, self.right, beta=keep, alpha=fresh)


@dataclass(frozen=True, eq=False)
class Scaled:
    """The direction factor * values + product, for a factor with one element, which the host does not read."""

    values: Tensor
    factor: Tensor
    product: Product | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def dense(self) -> Tensor:
        found = (self.values * self.factor.to(self.values)).contiguous()
        if self.product is not None:
            self.product.into(found, 1.0, 1.0)
        return found

    def into(self, target: Tensor, keep: float, fresh: float) -> None:
        """As `Product.into`, in two passes."""
        if self.product is not None:
            self.product.into(target, keep, fresh)
        elif keep != 1:
            target.mul_(keep)
        target.addcmul_(self.values, self.factor.to(target), value=fresh)


Direction = Tensor | Product | Scaled
Directions = Mapping[Tensor, Direction]


def subtract(
    direction: Product | Scaled,
    p: Tensor,
    momentum: Tensor | None,
    keep: float,
    fresh: float,
    step_scale: float,
    shrink: float,
) -> None:
    """p <- shrink p - step_scale m, with m the direction or its momentum, m <- keep m + fresh direction."""
    if momentum is None:
        direction.into(p, shrink, -step_scale)
        return
    direction.into(momentum, keep, fresh)
    (p if shrink == 1 else p.mul_(shrink)).add_(momentum, alpha=-step_scale)


def dense(direction: Direction) -> Tensor:
    return direction if isinstance(direction, Tensor) else direction.dense()


def scaled(direction: Direction, factor: Tensor) -> Direction:
    """A direction times a tensor with one element."""
    if isinstance(direction, Product):
        return Product(direction.left * factor.to(direction.left), direction.right, direction.shape)
    if isinstance(direction, Scaled):
        product = None if direction.product is None else scaled(direction.product, factor)
        return Scaled(direction.values, direction.factor * factor.to(direction.factor), product)  # pyright: ignore
    return Scaled(direction, factor)


def square_norm(direction: Direction) -> Tensor:
    """The sum of squares, as a tensor."""
    if isinstance(direction, Product):
        left, right = direction.left, direction.right
        return torch.sum((left @ left.T) * (right @ right.T))
    return torch.linalg.vector_norm(dense(direction)).square()
