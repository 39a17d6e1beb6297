"""Split conformal prediction: intervals and sets of classes that contain the label as often as they say.

A threshold is computed on labelled examples that were not trained on. If these and new examples are exchangeable, the
probability that a new label is inside is at least `level`, and less than `level` + 1/(n + 1) for n examples without
ties, whatever the model predicts. The probability is over both, not for each input.

    >>> held = Interval(torch.zeros(99), torch.ones(99))
    >>> calibrated = calibrate_intervals(held, torch.linspace(0.5, 1.5, 99), level=0.9)
    >>> lower, upper = calibrated(Interval(torch.zeros(1), torch.ones(1)))
    >>> [round(float(end), 2) for end in (lower, upper)]
    [-0.41, 1.41]

Reference: Vovk et al., 2005; Lei et al., 2018, for intervals of local width; Sadinle et al., 2019, and Romano et al.,
2020, for the two kinds of sets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesgrad.noise import generator_of
from bayesgrad.predictions import Interval

SETS = ("threshold", "adaptive")


@dataclass(frozen=True)
class ConformalIntervals:
    """Multiplies the widths of intervals by a factor, around their centres.

    Args:
        factor: of the widths.
        level: the probability of the label to be inside.
    """

    factor: float
    level: float

    def __call__(self, intervals: Interval) -> Interval:
        """The calibrated intervals."""
        centre, half = _centre(intervals)
        return Interval(centre - self.factor * half, centre + self.factor * half)


@dataclass(frozen=True)
class ConformalSets:
    """Which classes are in the set of each example.

    Args:
        threshold: the largest score of a class that is in the set.
        level: the probability of the label to be in it.
        score: `"threshold"` or `"adaptive"`.
        seed: of the random ties of `"adaptive"`.
    """

    threshold: float
    level: float
    score: str = "threshold"
    seed: int = 0

    def __call__(self, probabilities: Tensor) -> Tensor:
        """(examples, classes), True for the classes in the set."""
        return _scores(_checked(probabilities), self.score, self.seed, 1) <= self.threshold


def calibrate_intervals(intervals: Interval, targets: Tensor, level: float = 0.9) -> ConformalIntervals:
    """The factor of interval widths with which they contain a new target with probability `level`.

    Args:
        intervals: for held-out inputs, such as `posterior.interval(loader)`, of any level.
        targets: of these inputs, in the shape of the intervals. Each is one example.
        level: the wanted probability.

    Checked by: tests/equations/test_conformal.py.
    """
    centre, half = _centre(intervals)
    if not isinstance(targets, Tensor):
        raise TypeError(f"targets must be a tensor, got {type(targets).__name__}: use torch.as_tensor(targets).")
    if targets.shape != centre.shape:
        remedy = ": use targets[:, None]" if targets[..., None].shape == centre.shape else ""
        raise ValueError(
            f"targets must have the shape of the intervals, {tuple(centre.shape)}, got {tuple(targets.shape)}{remedy}."
        )
    return ConformalIntervals(_quantile((targets.to(centre) - centre).abs() / half, level), level)


def calibrate_sets(
    probabilities: Tensor, labels: Tensor, level: float = 0.9, *, score: str = "threshold", seed: int = 0
) -> ConformalSets:
    """The threshold with which sets of classes contain a new label with probability `level`.

    Args:
        probabilities: (n, classes), predicted for held-out inputs, such as `posterior.predict(loader)`.
        labels: (n,).
        level: the wanted probability.
        score: `"threshold"` takes all classes with a probability above a number: the smallest sets on average, which
            may be empty. `"adaptive"` takes the most probable classes up to a sum of probabilities: larger sets, that
            are more even over easy and hard inputs.
        seed: of the random ties of `"adaptive"`.

    Checked by: tests/equations/test_conformal.py.
    """
    if score not in SETS:
        raise ValueError(f"score must be 'threshold' or 'adaptive', got {score!r}.")
    p = _checked(probabilities)
    if labels.shape != p.shape[:1] or labels.is_floating_point():
        raise ValueError(
            f"labels must be whole numbers of shape ({len(p)},), got {labels.dtype} {tuple(labels.shape)}."
        )
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < p.shape[1]:
        raise ValueError(
            f"labels must be in 0..{p.shape[1] - 1}, got {int(labels.min())} to {int(labels.max())}: leave out "
            "examples without a label."
        )
    own = _scores(p, score, seed, 0).gather(1, labels.to(p.device).long()[:, None])[:, 0]
    return ConformalSets(_quantile(own, level), level, score, seed)


def _centre(intervals: Interval) -> tuple[Tensor, Tensor]:
    lower, upper = (end.double() for end in intervals)
    half = (upper - lower) / 2
    if not bool((half > 0).all()):
        raise ValueError(f"intervals must have a positive width, got {2 * half.min():g}: add the noise of the data.")
    return (lower + upper) / 2, half


def _checked(p: Tensor) -> Tensor:
    p = p.double()
    if p.dim() != 2 or not bool(((p >= 0).all()) & ((p.sum(-1) - 1).abs() < 0.01).all()):
        raise ValueError(
            f"probabilities must be (n, classes) with rows that sum to 1, got shape {tuple(p.shape)}: pass "
            "logits.softmax(-1)."
        )
    return p


def _scores(p: Tensor, score: str, seed: int, draw: int) -> Tensor:
    """The score of each class, (n, classes); larger for those that fit less."""
    if score == "threshold":
        return 1 - p
    order = p.argsort(-1, descending=True)
    ranked = p.gather(-1, order)
    u = torch.rand(len(p), 1, dtype=p.dtype, generator=generator_of(seed, draw)).to(p.device)
    before = ranked.cumsum(-1) - ranked * u  # the class itself counts in part, which makes coverage exact
    return torch.empty_like(p).scatter_(-1, order, before)


def _quantile(scores: Tensor, level: float) -> float:
    """The score of rank ceil((n + 1) level): a new score counts as the largest."""
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level!r}.")
    scores = scores.flatten()
    rank = math.ceil((len(scores) + 1) * level - 1e-9)
    if rank > len(scores):
        needed = math.ceil(level / (1 - level) - 1e-9)
        raise ValueError(f"level={level} needs at least {needed} held-out examples, got {len(scores)}.")
    if not bool(torch.isfinite(scores).all()):
        raise ValueError("predictions and labels of held-out examples must be finite.")
    return float(scores.kthvalue(rank).values)
