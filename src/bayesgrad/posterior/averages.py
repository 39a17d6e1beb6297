"""Averages of predictions over samples of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bayesgrad.likelihoods import Likelihood
from bayesgrad.predictions import Decomposed, Moments


@dataclass
class Averages:
    """Running mean and variance of link(f) and running mean of the aleatoric uncertainty, over samples of outputs f."""

    reading: Likelihood
    count: int = 0
    mean: Tensor | Any = 0
    squares: Tensor | Any = 0
    aleatoric: Tensor | Any = 0

    def add(self, outputs: Tensor) -> None:
        value = self.reading.link(outputs)
        self.count += 1
        deviation = value - self.mean
        self.mean = self.mean + deviation / self.count
        self.squares = self.squares + deviation * (value - self.mean)
        aleatoric = self.reading.aleatoric(value)
        self.aleatoric = self.aleatoric + (aleatoric - self.aleatoric) / self.count

    def prediction(self) -> Tensor | Moments:
        return self.reading.from_moments(self.mean, self.squares / self.count)

    def decomposed(self) -> Decomposed:
        return self.reading.decompose(self.mean, self.squares / self.count, self.aleatoric)
