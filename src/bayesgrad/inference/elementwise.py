"""One site for each value of a node."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from bayesgrad.families import Parameters
from bayesgrad.inference.expectation import Moments
from bayesgrad.inference.factor import Factor, bonnet
from bayesgrad.inference.node import Node


class ElementwiseFactor(Factor):
    """Σ_i log p_i(x_i) for a node whose family has marginals: one site for each value.

    Args:
        node: of a family whose `moments` are means and variances, of one shape.
        expected: takes these and gives E[log p_i] and the expectations of its first two derivatives, elementwise.

    Reference: 002, Eqs. 58 to 60.
    """

    def __init__(
        self, node: Node, expected: Callable[[Tensor, Tensor], Moments], *, scale: float | Tensor = 1.0
    ) -> None:
        super().__init__(node, scale=scale)
        self.expected = expected
        self._seen: tuple[Parameters, Moments] | None = None

    def moments(self) -> Moments:
        """Of the log-likelihood of each value, at the node as it is."""
        (node,) = self.nodes
        if self._seen is None or self._seen[0] is not node.natural:
            self._seen = node.natural, self.expected(*node.moments)
        return self._seen[1]

    def value(self) -> Tensor:
        return self.moments().value.sum()

    def _message(self, node: Node) -> Parameters:
        _, first, second = self.moments()
        return bonnet(node, first, second)
