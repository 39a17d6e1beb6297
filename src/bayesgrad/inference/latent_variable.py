"""Factors with latent variables of their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bayesgrad.families import Parameters
from bayesgrad.inference.factor import Factor
from bayesgrad.inference.node import Node


class LatentVariableFactor(Factor):
    r"""The bound on a log density, maximised over the distribution q(z) of latent variables z, given the nodes θ:

    .. math::
        \max_{q(z)}\; E_{q(z)\, q(\theta)}[\log p(x, z \mid \theta)] + H(q(z))

    This replaces a local node for z that would always be updated with rho = 1 before the other nodes. The derivative
    of the maximum is the derivative of the objective at the maximiser, so the messages are expected statistics under
    q(z), and one pass over the data computes all of them. To stream data, create one such factor per batch, with
    scale N/B. With `Point` nodes a step is one iteration of EM; otherwise it is one iteration of variational message
    passing. With `schedule="parallel"` all messages come from the same pass.

    Reference: Khan and Rue 2023, sections 5.2 and 5.3; Hoffman et al., 2013, for local and global variables.
    Checked by: tests/equations/test_latent_variable.py.
    """

    def __init__(self, *nodes: Node, scale: float | Tensor = 1.0) -> None:
        super().__init__(*nodes, scale=scale)
        self._cached: tuple[list[Parameters], Tensor, Mapping[Node, Parameters]] | None = None

    @abstractmethod
    def evaluate(self) -> tuple[Tensor, Mapping[Node, Parameters]]:
        """The bound and the message to each node, for the nodes' current parameters."""

    def evaluate_cached(self) -> tuple[Tensor, Mapping[Node, Parameters]]:
        """`evaluate`, recomputed only after a node has changed."""
        now = [node.natural for node in self.nodes]
        if self._cached is None or any(a is not b for a, b in zip(self._cached[0], now)):
            with torch.no_grad():
                self._cached = now, *self.evaluate()
        return self._cached[1:]

    def value(self) -> Tensor:
        return self.evaluate_cached()[0]

    def _message(self, node: Node) -> Parameters:
        return next(found for own, found in self.evaluate_cached()[1].items() if own is node)


class Chunked(LatentVariableFactor):
    """The sum of latent-variable factors over chunks of the data, evaluated one chunk at a time to limit memory.

    Args:
        chunks: factors of the same nodes.
    """

    def __init__(self, chunks: Sequence[LatentVariableFactor], *, scale: float | Tensor = 1.0) -> None:
        if not chunks:
            raise ValueError("chunks must contain at least one factor, got none.")
        super().__init__(*chunks[0].nodes, scale=scale)
        self.chunks = chunks

    def evaluate(self) -> tuple[Tensor, Mapping[Node, Parameters]]:
        total, sums = self.chunks[0].evaluate()
        for chunk in self.chunks[1:]:
            value, messages = chunk.evaluate()
            total = total + value
            sums = {node: tuple(a + b for a, b in zip(own, messages[node])) for node, own in sums.items()}
        return total, sums
