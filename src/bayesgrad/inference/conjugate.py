"""Conjugate factors: log densities that are linear in the sufficient statistics of one node."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bayesgrad.families import Gaussian, Parameters
from bayesgrad.families.gaussian import LOG_2PI
from bayesgrad.inference.factor import Factor, check_design
from bayesgrad.inference.node import Node, check_finite


class Linear(Factor):
    """⟨message, μ⟩ + constant: a conjugate factor in closed form."""

    def __init__(self, node: Node, message: Parameters, constant: float | Tensor = 0.0, *, scale: float = 1.0) -> None:
        super().__init__(node, scale=scale)
        self._coefficients, self.constant = _check_shapes(node, message, "message"), constant

    def value(self) -> Tensor:
        (node,) = self.nodes
        return (node.family.dot(self._coefficients, node.mean) + self.constant).sum()

    def value_at_mean(self) -> Tensor:
        (node,) = self.nodes
        at = node.family.statistics(node.family.mode(node.natural))
        return (node.family.dot(self._coefficients, at) + self.constant).sum()

    def log_density(self, *values: Tensor) -> Tensor:
        family = self.nodes[0].family
        return family.dot(self._coefficients, family.statistics(values[0])) + self.constant

    def _message(self, node: Node) -> Parameters:
        return tuple(part.expand_as(own) for part, own in zip(self._coefficients, node.natural))


class Prior(Factor):
    """The log density of the node's own family at given natural parameters, one per plate or one for all plates."""

    def __init__(self, node: Node, natural: Parameters, *, scale: float | Tensor = 1.0) -> None:
        super().__init__(node, scale=scale)
        self.natural = _check_shapes(node, node.family.check(natural, "prior parameters"), "prior parameters")
        family: Any = node.family
        self._peak = family.peak(self.natural) if hasattr(family, "peak") else None  # of a Gaussian

    def value(self) -> Tensor:
        (node,) = self.nodes
        family: Any = node.family
        if self._peak is not None:
            return family.expected_from_peak(self.natural, self._peak, node.moments).sum()
        return family.expected_log_density(node.natural, self.natural, node.mean).sum()

    def value_at_mean(self) -> Tensor:
        (node,) = self.nodes
        return node.family.log_density(self.natural, node.family.mode(node.natural)).sum()

    def log_density(self, *values: Tensor) -> Tensor:
        return self.nodes[0].family.log_density(self.natural, values[0])

    def _message(self, node: Node) -> Parameters:
        if node.family.constant_base:
            return tuple(part.expand_as(own) for part, own in zip(self.natural, node.natural))
        base = node.family.base_gradient(node.natural)
        return tuple(a + b for a, b in zip(self.natural, base))


def linear_gaussian(node: Node, design: Tensor, targets: Tensor, precision: float | Tensor = 1.0) -> Linear:
    """The factor of y = X θ + Gaussian noise, for a Gaussian node θ.

    Args:
        design: X, (n, P).
        targets: y, (n,).
        precision: of the noise, a number or (n,).
    """
    if not isinstance(node.family, Gaussian):
        raise TypeError(f"linear_gaussian needs a Gaussian node, got {node}: use LinearPredictorFactor.")
    check_design(node, design)
    check_finite(targets=targets)
    weights = torch.as_tensor(precision, dtype=design.dtype, device=design.device)
    weights = weights.reshape(()) if weights.numel() == 1 else weights
    if targets.shape != design.shape[:1] or weights.shape not in ((), targets.shape):
        shapes = ", ".join(str(tuple(part.shape)) for part in (design, targets, weights))
        raise ValueError(f"design must be (n, P), targets (n,) and precision a number or (n,), got {shapes}.")
    if not (weights > 0).all():
        raise ValueError(f"precision must be positive, got {weights.min().item():g}.")
    weights = weights.expand(len(targets))
    weighted = weights[:, None] * design
    first, constant = weighted.mT @ targets, (weights.log() - LOG_2PI).sum() / 2
    constant = constant - (weights * targets.square()).sum() / 2
    return Linear(node, (first, -weighted.mT @ design / 2), constant)


def _check_shapes(node: Node, parameters: Parameters, what: str) -> Parameters:
    """Raises a ValueError for parameters that cannot be expanded to the node's shapes; returns them."""
    try:
        for part, own in zip(parameters, node.natural, strict=True):
            part.expand_as(own)
    except (RuntimeError, ValueError):
        shapes = [[tuple(part.shape) for part in own] for own in (parameters, node.natural)]
        raise ValueError(f"{what} of shapes {shapes[0]} do not match {node}, of shapes {shapes[1]}.") from None
    return parameters
