"""Factors with one independent term for each value of a node."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from bayesgrad.families import Parameters
from bayesgrad.inference.expectation import Moments
from bayesgrad.inference.factor import MomentsFactor, gaussian_message
from bayesgrad.inference.node import Node


class ElementwiseFactor(MomentsFactor):
    """Σ_i log p_i(x_i) for a node whose family has marginals: one term for each value.

    Args:
        node: of a family whose `moments` are means and variances of the same shape.
        expected: maps these to E[log p_i] and the expectations of its first two derivatives, elementwise.

    Reference: Khan and Rue 2023, Eqs. 58 to 60.
    """

    def __init__(
        self, node: Node, expected: Callable[[Tensor, Tensor], Moments], *, scale: float | Tensor = 1.0
    ) -> None:
        super().__init__(node, scale=scale)
        self.expected = expected

    def _expected(self) -> Moments:
        """Expectations of each log-likelihood and its derivatives, for the node's current parameters."""
        return self.expected(*self.nodes[0].moments)

    def _message(self, node: Node) -> Parameters:
        _, first, second = self.moments()
        return gaussian_message(node, first, second)
