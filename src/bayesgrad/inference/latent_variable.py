"""Factors with hidden variables of their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bayesgrad.families import Parameters
from bayesgrad.inference.factor import Factor
from bayesgrad.inference.node import Node


class LatentVariableFactor(Factor):
    r"""The bound on a log density whose hidden variables z have been brought to their best, given the nodes:

    .. math::
        \max_{q(z)}\; E_{q(z)\, q(\theta)}[\log p(x, z \mid \theta)] + H(q(z))

    A local node that always moves with rho = 1, just before the others look, need not exist: the derivative of a
    maximum is that of what is maximised, held at the maximum. So messages are expected statistics under q(z), one look
    at the data gives them all, and data are streamed by making such a factor for each batch, with scale N/B. With nodes
    `Point` a step is one of EM, elsewhere a sweep of variational message passing; in either case `schedule="parallel"`
    sends all messages of one look.

    Reference: 002, sections 5.2 and 5.3; Hoffman et al., 2013, for local and global variables.
    Checked by: tests/equations/test_collapsed.py.
    """

    def __init__(self, *nodes: Node, scale: float | Tensor = 1.0) -> None:
        super().__init__(*nodes, scale=scale)
        self._seen: tuple[list[Parameters], Tensor, Mapping[Node, Parameters]] | None = None

    @abstractmethod
    def look(self) -> tuple[Tensor, Mapping[Node, Parameters]]:
        """The bound, and the message to each node, at the nodes as they are."""

    def looked(self) -> tuple[Tensor, Mapping[Node, Parameters]]:
        """`look`, once for as long as no node moves."""
        now = [node.natural for node in self.nodes]
        if self._seen is None or any(a is not b for a, b in zip(self._seen[0], now)):
            with torch.no_grad():
                self._seen = now, *self.look()
        return self._seen[1:]

    def value(self) -> Tensor:
        return self.looked()[0]

    def _message(self, node: Node) -> Parameters:
        return next(found for own, found in self.looked()[1].items() if own is node)


class Chunked(LatentVariableFactor):
    """The sum of collapsed factors over chunks of the data, that fit into memory one by one.

    Args:
        chunks: factors of the same nodes.
    """

    def __init__(self, chunks: Sequence[LatentVariableFactor], *, scale: float | Tensor = 1.0) -> None:
        if not chunks:
            raise ValueError("there must be at least one chunk of data.")
        super().__init__(*chunks[0].nodes, scale=scale)
        self.chunks = chunks

    def look(self) -> tuple[Tensor, Mapping[Node, Parameters]]:
        total, sums = self.chunks[0].look()
        for chunk in self.chunks[1:]:
            value, messages = chunk.look()
            total = total + value
            sums = {node: tuple(a + b for a, b in zip(own, messages[node])) for node, own in sums.items()}
        return total, sums
