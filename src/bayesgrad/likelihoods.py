"""What a network's outputs say of the data: from outputs to probabilities, and averages of those.

A likelihood is named by a string wherever one is asked for: `"categorical"` (logits over classes in the last
dimension), `"bernoulli"` (one logit for each label) or `"gaussian"` (the outputs are means).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor


class Moments(NamedTuple):
    """A predicted mean and how far beliefs about the weights spread around it (noise excluded)."""

    mean: Tensor
    variance: Tensor


class Likelihood(ABC):
    """How outputs f of a network are read."""

    @abstractmethod
    def link(self, outputs: Tensor) -> Tensor:
        """What is averaged over weights: probabilities, or the outputs themselves."""

    @abstractmethod
    def averaged(self, mean: Tensor, variance: Tensor) -> Tensor | Moments:
        """The prediction, given mean and variance of link(f) over weights."""

    @abstractmethod
    def expected(self, mean: Tensor, variance: Tensor) -> Tensor | Moments:
        """The prediction for Gaussian outputs f with independent marginals N(mean, variance)."""


class Categorical(Likelihood):
    """Softmax over the last dimension; Gaussian logits by MacKay's probit approximation."""

    def link(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(-1)

    def averaged(self, mean: Tensor, variance: Tensor) -> Tensor:
        return mean

    def expected(self, mean: Tensor, variance: Tensor) -> Tensor:
        return (mean / (1 + math.pi / 8 * variance).sqrt()).softmax(-1)


class Bernoulli(Categorical):
    """A logistic probability for each output."""

    def link(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def expected(self, mean: Tensor, variance: Tensor) -> Tensor:
        return (mean / (1 + math.pi / 8 * variance).sqrt()).sigmoid()


class Gaussian(Likelihood):
    """Outputs are means of real-valued targets."""

    def link(self, outputs: Tensor) -> Tensor:
        return outputs

    def averaged(self, mean: Tensor, variance: Tensor) -> Moments:
        return Moments(mean, variance)

    def expected(self, mean: Tensor, variance: Tensor) -> Moments:
        return Moments(mean, variance)


_BY_NAME = {"categorical": Categorical(), "bernoulli": Bernoulli(), "gaussian": Gaussian()}


def named(likelihood: str) -> Likelihood:
    """The likelihood of that name."""
    if likelihood not in _BY_NAME:
        raise ValueError(f"likelihood must be one of {', '.join(map(repr, _BY_NAME))}, got {likelihood!r}.")
    return _BY_NAME[likelihood]
