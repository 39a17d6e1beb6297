"""Predictions for loaders, and what is computed from predictions: intervals, scores of unusual inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from bayesgrad.layers.batches import to_device, with_progress
from bayesgrad.likelihoods import Likelihood
from bayesgrad.predictions import Decomposed, Interval, Moments, NoisyMoments

SCORES = ("epistemic", "entropy", "max_probability")
Prediction = TypeVar("Prediction", Tensor, Moments, NoisyMoments, Decomposed, Interval)


def is_loader(x: Any) -> bool:
    """Whether inputs are several batches: any iterable that is no batch itself, and a list of batches."""
    if isinstance(x, Tensor | tuple | Mapping):
        return False
    return not isinstance(x[0], Tensor) if isinstance(x, list) and x else isinstance(x, Iterable)


def stream(
    loader: Iterable, predict: Callable[[Any], Prediction], device: torch.device, progress: bool | None
) -> Prediction:
    """The predictions for all batches of a loader, one after the other, in one."""
    found = [predict(to_device(_inputs(batch), device)) for batch in with_progress(loader, progress, "predict")]
    if not found:
        raise ValueError("the loader gave no batches: pass one that is not exhausted.")
    return joined(found)


def _inputs(batch: Any) -> Any:
    """The inputs of a batch: the first of a pair (inputs, labels), the only member of a list, or the batch itself."""
    if isinstance(batch, tuple | list):
        if len(batch) not in (1, 2):
            raise TypeError(
                f"a batch of a loader must be inputs, or a pair (inputs, labels), got {len(batch)} parts: put several "
                "arguments of the model into a tuple or a mapping."
            )
        return batch[0]
    return batch


def joined(parts: Sequence[Prediction]) -> Prediction:
    """Predictions for several batches in one."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts))  # pyright: ignore[reportReturnType, reportArgumentType, reportCallIssue]
    return type(first)(*(joined(fields) for fields in zip(*parts)))  # pyright: ignore


def with_noise(prediction: Any, reading: Likelihood) -> Moments:
    """Mean and variance of a new label, from those of a prediction and the noise of the data."""
    if not isinstance(prediction, Moments | NoisyMoments):
        raise ValueError(
            "interval() and predict(noise=True) are for numbers with Gaussian noise, and the likelihood is "
            f"{reading.kind!r}: for a regression pass likelihood=likelihoods.Gaussian(noise_scale), for classes use "
            "predict() or conformal.calibrate_sets."
        )
    noise = prediction.noise if isinstance(prediction, NoisyMoments) else reading.noise_scale**2
    return Moments(prediction.mean, prediction.variance + noise)


def interval_of(label: Moments, level: float) -> Interval:
    """The central interval of a new label with these moments, mean ± z s."""
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level!r}.")
    z = torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)).to(label.mean)
    half = z * label.variance.sqrt()
    return Interval(label.mean - half, label.mean + half)


def score_of(found: Decomposed, reading: Likelihood, score: str) -> Tensor:
    """One number for each example that is larger for more unusual inputs."""
    if score == "epistemic":
        value = found.epistemic
    elif not isinstance(found.prediction, Tensor) or not (reading.has_classes or reading.kind == "bernoulli"):
        raise ValueError(
            f"score={score!r} is for classes, and the likelihood is {reading.kind!r}: use score='epistemic'."
        )
    elif score == "entropy":
        value = found.total
    else:
        p = found.prediction
        value = 1 - (p.amax(-1) if reading.has_classes else torch.maximum(p, 1 - p))
    return value.flatten(1).mean(1) if value.dim() > 1 else value
