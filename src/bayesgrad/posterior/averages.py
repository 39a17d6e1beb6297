"""Averages of predictions over samples of the weights, and the options of predictions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from bayesgrad.layers.batches import Inputs
from bayesgrad.likelihoods import Bernoulli, Likelihood
from bayesgrad.predictions import Decomposed, Moments, NoisyMoments

FAR = 0.2  # the share of predictions that samples may change
ENOUGH, SEVERAL = 20, 8  # predictions and samples from which the share is known
LINKS = ("probit", "mc")
RUNNING = "running"  # `statistics=` of models whose running statistics fit
REMEDY = "pass training inputs, or a loader, to predict(..., statistics=), or 'running' to keep them"
Statistics = Inputs | Iterable | str | None  # from which those of BatchNorm are estimated


class Options(TypedDict, total=False):
    """Further arguments of `predict`."""

    link: str | None
    model: nn.Module | None
    seed: int | None
    statistics: Statistics
    chunk: int | None
    progress: bool | None


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

    def prediction(self) -> Tensor | Moments | NoisyMoments:
        return self.reading.from_moments(self.mean, self.squares / self.count)

    def decomposed(self) -> Decomposed:
        return self.reading.decompose(self.mean, self.squares / self.count, self.aleatoric)

    def change(self, outputs: Tensor) -> float:
        """The share of the predictions for these outputs, those of the mean weights, that the average changes.

        For classes it is the share of labels that differ. For other predictions it is the sum of squared differences
        over the sum of squared deviations from the mean prediction: 1 - R^2. It is 0 for fewer than ENOUGH predictions
        or SEVERAL samples.
        """
        value, average = self.reading.link(outputs), self.mean
        if self.count < SEVERAL or value.shape[: value.dim() - self.reading.has_classes].numel() < ENOUGH:
            return 0.0
        if self.reading.has_classes or isinstance(self.reading, Bernoulli):
            labels = [p.argmax(-1) if self.reading.has_classes else p > 0.5 for p in (value, average)]
            return float((labels[0] != labels[1]).double().mean())
        spread = (value - value.mean(0)).square().double().sum()
        change = (value - average).square().double().sum()
        return float(torch.where(spread > 0, change / spread, 0.0))


def check_link(link: str | None, reading: Likelihood, decompose: bool) -> None:
    """Raises if a linearised prediction cannot be made in this way."""
    if link is not None and link not in LINKS:
        raise ValueError(f"link must be None, 'probit' or 'mc', got {link!r}.")
    if link == "probit" and not reading.closed_form and (decompose or reading.needs_samples):
        raise ValueError("link='probit' cannot decompose uncertainty: use link=None or 'mc' with decompose=True.")
