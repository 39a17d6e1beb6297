"""Scores against their definitions, and against predictions whose scores are known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bayesgrad import metrics


def calibrated(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Probabilities of four classes, and labels drawn from them."""
    generator = torch.Generator().manual_seed(seed)
    p = (2 * torch.randn(n, 4, dtype=torch.float64, generator=generator)).softmax(1)
    return p, torch.multinomial(p, 1, generator=generator)[:, 0]


def test_classification_by_hand() -> None:
    p = torch.tensor([[0.7, 0.3], [0.4, 0.6], [0.9, 0.1]], dtype=torch.float64)
    found = metrics.classification(p.log(), torch.tensor([0, 1, 1]))
    assert found["error"] == pytest.approx(1 / 3)
    assert found["nll"] == pytest.approx(-(math.log(0.7) + math.log(0.6) + math.log(0.1)) / 3, rel=1e-12)
    assert found["brier"] == pytest.approx((2 * 0.3**2 + 2 * 0.4**2 + 2 * 0.9**2) / 3, rel=1e-12)
    assert found["ece"] == pytest.approx((0.3 + 0.4 + 0.9) / 3, rel=1e-6)
    assert all(map(math.isnan, metrics.classification(torch.full((3, 2), math.nan), torch.tensor([0, 1, 1])).values()))


def test_predictions_that_do_not_normalise_are_refused() -> None:
    """Probabilities as logarithms would have a negative mean of -log p; logits any."""
    p, labels = calibrated(50)
    for wrong in (p, p.log() + 1, 3 * torch.randn(50, 4, generator=torch.Generator().manual_seed(0))):
        with pytest.raises(ValueError, match=r"that sum to 1, got .*: pass p.log\(\) .*log_softmax"):
            metrics.classification(wrong, labels)
    expected = metrics.classification(p.log(), labels)
    for dtype in (torch.float32, torch.bfloat16):
        rounded = metrics.classification(p.log().to(dtype), labels)
        assert rounded["nll"] == pytest.approx(expected["nll"], rel=0.02)
    certain = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]])
    assert metrics.classification(certain, torch.tensor([0, 1]))["nll"] == 0.0


@pytest.mark.parametrize("score", [metrics.calibration_error, metrics.reliability])
def test_calibration_of_what_are_no_probabilities_is_refused(score: Any) -> None:
    """torchmetrics would take the softmax of anything beyond [0, 1], and NaN for the first class."""
    p, labels = calibrated(50)
    for wrong in (p.log(), 0.9 * p, p - 0.25, 3 * torch.randn(50, 4, generator=torch.Generator().manual_seed(0))):
        with pytest.raises(ValueError, match=r"p must be finite probabilities that sum to 1, got .*logits.softmax"):
            score(wrong, labels)
    for shape in (labels[:1], labels[:, None]):
        with pytest.raises(ValueError, match=r"p must be \(n, classes\) and labels \(n,\), got shapes"):
            score(p, shape)
    assert math.isnan(metrics.calibration_error(math.nan * p, labels))
    assert math.isnan(metrics.coverage(math.nan * labels.double(), 1.0 + labels, labels))
    score(p.bfloat16(), labels)


def test_what_is_calibrated_has_no_calibration_error_and_too_much_confidence_has_the_difference() -> None:
    """ECE of calibrated predictions is of the order of sqrt(bins/n); of certainty, the share that is wrong."""
    p, labels = calibrated(20_000)
    assert metrics.calibration_error(p, labels) < 3 * math.sqrt(metrics.BINS / len(p)) / 2
    sure = torch.nn.functional.one_hot(p.argmax(1), 4).double()
    wrong = (p.argmax(1) != labels).double().mean().item()
    assert metrics.calibration_error(sure, labels) == pytest.approx(wrong, rel=1e-5)


def test_reliability_bins_hold_every_example_and_give_the_calibration_error() -> None:
    p, labels = calibrated(3_000)
    bins = metrics.reliability(p, labels)
    assert bins.number.sum() == len(p)
    some = bins.number > 0
    inside = torch.arange(1, metrics.BINS + 1).double()[some] / metrics.BINS
    assert bool(((bins.confidence[some] <= inside) & (bins.confidence[some] > inside - 1 / metrics.BINS)).all())
    gaps = (bins.confidence - bins.accuracy).abs()[some]
    assert (gaps * bins.number[some]).sum().item() / len(p) == pytest.approx(metrics.calibration_error(p, labels), 1e-6)
    edge = metrics.reliability(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([0, 1]), bins=2)
    assert_close(edge.accuracy, torch.tensor([1.0, 0.0]).double())


def test_entropy_and_auroc_by_hand() -> None:
    """Of six pairs the outside value is higher in four and equal in one; far beyond what a sigmoid can tell apart."""
    assert_close(metrics.entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]])), torch.tensor([math.log(2), 0.0]))
    for offset in (0.0, -500.0, 500.0):
        inside, outside = torch.tensor([1.0, 2.0]) + offset, torch.tensor([2.0, 3.0, 1.5]) + offset
        assert metrics.auroc(inside, outside) == pytest.approx(4.5 / 6)
    assert metrics.auroc(torch.ones(3), torch.ones(2)) == pytest.approx(0.5)
    assert math.isnan(metrics.auroc(torch.tensor([math.nan]), torch.ones(2)))


def test_auroc_is_scikit_learn_s() -> None:
    from sklearn.metrics import roc_auc_score

    values = torch.randn(500, generator=torch.Generator().manual_seed(0)).mul(4).round().double()  # with many ties
    expected = roc_auc_score([0] * 200 + [1] * 300, values.numpy())
    assert metrics.auroc(values[:200], values[200:]) == pytest.approx(expected, rel=1e-6)


def test_gaussian_predictions_against_torch_distributions() -> None:
    mean, variance, y = (torch.rand(3, 50, 1, dtype=torch.float64) + 0.1).unbind()
    expected = -torch.distributions.Normal(mean, variance.sqrt()).log_prob(y)
    assert_close(metrics.gaussian_nll(mean, variance, y), expected, rtol=1e-12, atol=1e-12)
    found = metrics.regression(mean, variance, y)
    assert found["nll"] == pytest.approx(expected.mean().item(), rel=1e-12)
    assert found["rmse"] == pytest.approx((mean - y).square().mean().sqrt().item(), rel=1e-12)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.99])
def test_intervals_hold_what_they_should(level: float) -> None:
    """Of the quantiles (i - 1/2)/n of a Gaussian, the central interval holds exactly a share of `level`."""
    n = 2_000
    y = 3 + 2 * torch.special.ndtri((torch.arange(n).double() + 0.5) / n)
    mean, variance = torch.full_like(y, 3.0), torch.full_like(y, 4.0)
    assert metrics.coverage(mean, variance, y, level) == pytest.approx(level, abs=1 / n)
    assert metrics.coverage(mean, variance / 4, y, level) < level


def test_variances_of_outputs_in_place_of_targets_are_warned_of() -> None:
    """Errors have the deviation 2.9 or 3.1 times the predicted one: medians of 1.96 and 2.09 deviations."""
    errors = torch.special.ndtri((torch.arange(1001).double() + 0.5) / 1001)
    ones = torch.ones_like(errors)
    metrics.regression(0 * errors, ones, 2.9 * errors)  # warnings are errors
    metrics.regression(0 * ones[:19], ones[:19], 9 * ones[:19])
    with pytest.warns(
        UserWarning, match=r"larger than 2\.1 predicted .* as in posterior\.predict\(x, noise=True\)"
    ) as told:
        metrics.regression(0 * errors, ones, 3.1 * errors)
    assert told[0].filename == __file__


def test_shapes_that_would_be_broadcast_and_numbers_that_mean_nothing_are_refused() -> None:
    y = torch.ones(4)
    with pytest.raises(ValueError, match=r"the same shape, got \(4, 1\), \(4, 1\), \(4,\)"):
        metrics.coverage(y[:, None], y[:, None], y)
    with pytest.raises(ValueError, match="add the variance of the noise"):
        metrics.gaussian_nll(y, 0 * y, y)
    with pytest.raises(ValueError, match=r"level must be between 0 and 1, got 1\.5"):
        metrics.coverage(y, y, y, 1.5)
