"""The factor of sequences whose latent states form a Markov chain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from bayesgrad.families import Parameters, Point
from bayesgrad.inference import LatentVariableFactor, Node
from bayesgrad.models import markov
from bayesgrad.models.emissions import Rows, Symbols

LOG_TINY = math.log(torch.finfo(torch.float64).tiny)


class Sequences(NamedTuple):
    """Validated data: the layout of rows, and their observations."""

    layout: markov.Layout
    emissions: Rows | Symbols

    def __len__(self) -> int:
        return len(self.layout.lengths)


class MarkovChainFactor(LatentVariableFactor):
    """log Σ_z exp E[log p(x, z | π, A, emissions)], with q(z) a chain: the forward-backward algorithm.

    Args:
        initial: node of π, a Dirichlet of K.
        transitions: node of the rows of A, K Dirichlets of K.
        emission: node of the emission parameters.
    """

    def __init__(
        self, initial: Node, transitions: Node, emission: Node, data: Sequences, *, scale: float = 1.0
    ) -> None:
        super().__init__(initial, transitions, emission, scale=scale)
        self.data = data

    def logs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Expected log π, log A and log p(x | k), (K, N)."""
        initial, transitions, emission = self.nodes
        given = (log_shares(emission),) if isinstance(self.data.emissions, Symbols) else emission.mean
        out = self.data.layout.buffer("emissions", len(transitions.natural[0]))
        return log_shares(initial), log_shares(transitions), self.data.emissions.logs(given, out)

    def evaluate(self) -> tuple[Tensor, Mapping[Node, Parameters]]:
        initial, transitions, emission = self.nodes
        found = markov.smoothed(*self.logs(), self.data.layout)
        check_possible(found.log_weight)
        messages = (found.first,), (found.pairs,), self.data.emissions.message(found.shares)
        return found.log_weight.sum(), dict(zip((initial, transitions, emission), messages))


def log_shares(node: Node) -> Tensor:
    """E[log x] of probabilities; -inf for a mode of zero, which Dirichlet replaces by the smallest positive number."""
    (logs,) = node.mean
    return torch.where(logs <= LOG_TINY + 1e-6, -math.inf, logs) if isinstance(node.family, Point) else logs


def check_possible(log_weight: Tensor) -> None:
    wrong = torch.isneginf(log_weight).nonzero()
    if len(wrong):
        raise ValueError(
            f"sequence {int(wrong[0])} has probability 0: it needs a start, a transition or a symbol of probability 0. "
            "Use small positive probabilities, or method='vb'."
        )
