"""Scores of predicted probabilities and of Gaussian predictions, with torchmetrics, which is imported when needed."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesgrad.warning import warn

BINS = 15
WIDE, SEVERAL = 2.0, 20  # the median error in predicted deviations, and the number of errors, to warn from
NORMALISED = 0.01  # the largest deviation of a log of summed probabilities from 0; half precision rounds by less


def classification(logs: Tensor, labels: Tensor) -> dict[str, float]:
    """Error, mean negative log-likelihood, calibration error and Brier score; NaN if predictions are not finite.

    Args:
        logs: (n, classes), logarithms of predicted probabilities.
        labels: (n,).

    Raises:
        ValueError: rows of exp(logs) do not sum to 1, as for probabilities and logits.

    Checked by: tests/equations/test_metrics.py.
    """
    p = logs.exp()
    if not bool(torch.isfinite(p).all()):
        return dict.fromkeys(("error", "nll", "ece", "brier"), math.nan)
    if bool(((total := logs.double().logsumexp(-1)).abs() > NORMALISED).any()):
        raise ValueError(
            "logs must be logarithms of probabilities that sum to 1, got sums of exp(logs) up to "
            f"{total.exp().max():.3g} and down to {total.exp().min():.3g}: pass p.log() for probabilities p, or "
            "logits.log_softmax(-1)."
        )
    classes = logs.shape[-1]
    return {
        "error": 1 - _package().multiclass_accuracy(p, labels, classes, average="micro").item(),
        "nll": F.nll_loss(logs.double(), labels).item(),
        "ece": calibration_error(p, labels),
        "brier": (p - F.one_hot(labels, classes)).square().sum(1).double().mean().item(),
    }


def calibration_error(p: Tensor, labels: Tensor, bins: int = BINS) -> float:
    """The expected calibration error: |accuracy - confidence|, averaged over bins of the most probable class's p.

    NaN if probabilities are not finite.

    Raises:
        ValueError: rows of p do not sum to 1.
    """
    if not bool(torch.isfinite(p).all()):
        return math.nan
    _check_probabilities(p, labels)
    return _package().multiclass_calibration_error(p, labels, p.shape[-1], n_bins=bins).item()


class Reliability(NamedTuple):
    """Bins of confidence: mean confidence and accuracy (NaN in empty bins), and the number of examples."""

    confidence: Tensor
    accuracy: Tensor
    number: Tensor


def reliability(p: Tensor, labels: Tensor, bins: int = BINS) -> Reliability:
    """The accuracy of the most probable class in bins of its probability, of equal width and open on the left.

    Raises:
        ValueError: rows of p do not sum to 1.
    """
    _check_probabilities(p, labels)
    confidence, named = p.double().max(-1)
    right = (named == labels).double()
    place = (confidence * bins).ceil().long().clamp(1, bins) - 1
    count, sure, hits = (
        torch.zeros(bins, dtype=torch.float64, device=p.device).index_add_(0, place, values)
        for values in (torch.ones_like(confidence), confidence, right)
    )
    return Reliability(sure / count, hits / count, count)


def entropy(p: Tensor) -> Tensor:
    """The entropy of each predicted distribution (..., classes), in nats."""
    return torch.special.entr(p).sum(-1)


def auroc(inside: Tensor, outside: Tensor) -> float:
    """The probability that an outside example has the higher value, for example uncertainty; ties count half.

    The order counts: swapped arguments give 1 - AUROC. Keywords make it plain:

        >>> auroc(inside=torch.tensor([0.1, 0.3]), outside=torch.tensor([0.2, 0.9]))
        0.75

    Args:
        inside: values of examples like the training data, such as those of `posterior.ood_score`.
        outside: values of examples unlike them, which should be higher: 1 if all of them are, 0.5 for no difference.

    Returns:
        A number in [0, 1]; nan if a value is not finite.
    """
    values = torch.cat([inside.flatten(), outside.flatten()])
    if not bool(torch.isfinite(values).all()):
        return math.nan
    ranks = values.unique(return_inverse=True)[1].double()  # of values beyond [0, 1], torchmetrics takes the sigmoid
    labels = torch.cat([torch.zeros(inside.numel()), torch.ones(outside.numel())]).long()
    return _package().binary_auroc(ranks / ranks.max().clamp(min=1), labels).item()


def regression(mean: Tensor, variance: Tensor, targets: Tensor, level: float = 0.9) -> dict[str, float]:
    """Root mean squared error, mean negative log-likelihood of N(mean, variance), and coverage of intervals.

    `regression(*posterior.predict(x, noise=True), targets)` are the scores of a posterior. Without `noise=True`,
    variances are those of the network's outputs alone. A warning says if half of the errors are larger than two of the
    predicted standard deviations, which is likely to have this reason.

    Args:
        variance: of the targets: the variance of the outputs plus that of the noise.
        level: of the central intervals.

    Checked by: tests/equations/test_metrics.py.
    """
    found = {
        "rmse": (mean - targets).double().square().mean().sqrt().item(),
        "nll": gaussian_nll(mean, variance, targets).mean().item(),
        "coverage": coverage(mean, variance, targets, level),
    }
    middle = ((mean - targets) / variance.sqrt()).double().abs().median()  # NaN if one is
    if targets.numel() >= SEVERAL and bool(middle > WIDE):
        warn(
            f"half of the errors are larger than {middle:.2g} predicted standard deviations, and 0.67 is expected: "
            "variance must be that of the targets, with the noise of the data, as in posterior.predict(x, noise=True)."
        )
    return found


def gaussian_nll(mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
    """-log N(target; mean, variance) of each target, constants included, in float64."""
    mean, variance, targets = _fitting(mean, variance, targets)
    return F.gaussian_nll_loss(mean, targets, variance, full=True, eps=0.0, reduction="none")


def coverage(mean: Tensor, variance: Tensor, targets: Tensor, level: float = 0.9) -> float:
    """The fraction of targets inside the central interval of probability `level`."""
    mean, variance, targets = _fitting(mean, variance, targets)
    error = (targets - mean).abs()
    return ((error <= half_width(variance, level)).double() + 0 * error).mean().item()  # NaN if an error is


def half_width(variance: Tensor, level: float = 0.9) -> Tensor:
    """Half the width of the central interval of N(mean, variance) with probability `level`."""
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level!r}.")
    return torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)).to(variance) * variance.sqrt()


def _check_probabilities(p: Tensor, labels: Tensor) -> None:
    """Raises for anything else than probabilities (n, classes) and labels (n,): logits would give numbers too."""
    if p.dim() != 2 or labels.shape != p.shape[:1]:
        raise ValueError(
            f"p must be (n, classes) and labels (n,), got shapes {tuple(p.shape)} and {tuple(labels.shape)}."
        )
    low, off = p.amin(), (p.double().sum(-1) - 1).abs().amax()
    if not bool((low >= 0) & (off <= NORMALISED)):
        raise ValueError(
            f"p must be finite probabilities that sum to 1, got numbers down to {low:.3g} and sums that differ from 1 "
            f"by up to {off:.3g}: pass logits.softmax(-1)."
        )


def _fitting(mean: Tensor, variance: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All in float64; raises if shapes differ, since (n,) and (n, 1) would broadcast to (n, n)."""
    if not mean.shape == variance.shape == targets.shape:
        shapes = ", ".join(str(tuple(t.shape)) for t in (mean, variance, targets))
        raise ValueError(f"mean, variance and targets must have the same shape, got {shapes}.")
    if not bool((variance > 0).all()):
        raise ValueError(f"variances must be positive, got {variance.min():g}: add the variance of the noise.")
    return mean.double(), variance.double(), targets.double()


def _package() -> Any:
    try:
        from torchmetrics.functional import classification as package
    except ImportError as error:
        raise ImportError("scores of predictions need torchmetrics: pip install torchmetrics.") from error
    return package
