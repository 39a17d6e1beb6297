"""Conformal intervals and sets: thresholds by hand, and coverage over many calibration sets."""

from __future__ import annotations

import math

import pytest
import torch

from bayesgrad import conformal
from bayesgrad.predictions import Interval


def test_the_factor_is_the_order_statistic_of_the_relative_errors() -> None:
    lower, upper = torch.tensor([0.0, 1.0, -1.0, 2.0]), torch.tensor([2.0, 2.0, 3.0, 3.0])
    targets = torch.tensor([1.5, 1.5, 7.0, 2.75])  # errors 0.5/1, 0/0.5, 6/2, 0.25/0.5
    found = conformal.calibrate_intervals(Interval(lower, upper), targets, level=0.6)
    assert found.factor == sorted([0.5, 0.0, 3.0, 0.5])[math.ceil(5 * 0.6) - 1] == 0.5
    low, high = found(Interval(torch.tensor([0.0]), torch.tensor([4.0])))
    assert (float(low), float(high)) == (1.0, 3.0)


def test_sets_by_a_threshold_take_all_classes_above_a_probability() -> None:
    p = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.2, 0.6, 0.2]], dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 1])  # 1 - p: 0.3, 0.7, 0.2, 0.4
    found = conformal.calibrate_sets(p, labels, level=0.6)
    assert found.threshold == pytest.approx(0.4, abs=1e-15)
    sets = found(torch.tensor([[0.61, 0.35, 0.04], [0.4, 0.3, 0.3]]))
    assert sets.tolist() == [[True, False, False], [False, False, False]]


def _coverage(calibrate: object, trials: int, seed: int, n: int = 99) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor([calibrate(generator, n) for _ in range(trials)], dtype=torch.float64)  # pyright: ignore


def _intervals(generator: torch.Generator, n: int) -> float:
    """The model is wrong about mean and width; the noise has heavy tails."""

    def data(m: int) -> tuple[Interval, torch.Tensor]:
        x = torch.rand(m, generator=generator, dtype=torch.float64)
        y = x + (0.1 + x) * torch.randn(m, generator=generator, dtype=torch.float64) ** 3
        return Interval(0.8 * x - 0.1 - x, 0.8 * x + 0.1 + x), y

    found = conformal.calibrate_intervals(*data(n), level=0.8)
    intervals, y = data(200)
    lower, upper = found(intervals)
    return float(((lower <= y) & (y <= upper)).double().mean())


def _sets(score: str):
    def run(generator: torch.Generator, n: int) -> float:
        def data(m: int) -> tuple[torch.Tensor, torch.Tensor]:
            logits = 2 * torch.randn(m, 5, generator=generator, dtype=torch.float64)
            labels = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
            return (3 * logits).softmax(-1), labels  # overconfident

        found = conformal.calibrate_sets(
            *data(n), level=0.8, score=score, seed=int(torch.randint(99, (), generator=generator))
        )
        p, labels = data(200)
        return float(found(p).gather(1, labels[:, None]).double().mean())

    return run


@pytest.mark.parametrize(
    "run", [_intervals, _sets("threshold"), _sets("adaptive")], ids=["intervals", "threshold", "adaptive"]
)
def test_labels_are_inside_as_often_as_said_whatever_the_model(run: object) -> None:
    """Over calibration sets, coverage has mean k/(n + 1) for scores without ties; n = 99 and level 0.8 give 0.8."""
    found = _coverage(run, 400, 0)
    assert abs(float(found.mean()) - 0.8) < 5 * float(found.std()) / 400**0.5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: conformal.calibrate_intervals(Interval(torch.zeros(3), torch.ones(3)), torch.ones(3, 1)),
            r"\(3,\), got \(3, 1\)\.",
        ),
        (
            lambda: conformal.calibrate_intervals(Interval(torch.zeros(3, 1), torch.ones(3, 1)), torch.ones(3)),
            r"\(3, 1\), got \(3,\): use targets\[:, None\]",
        ),
        (
            lambda: conformal.calibrate_intervals(Interval(torch.zeros(3), torch.zeros(3)), torch.ones(3)),
            "positive width, got 0",
        ),
        (
            lambda: conformal.calibrate_intervals(Interval(torch.zeros(8), torch.ones(8)), torch.ones(8)),
            "at least 9 held-out examples, got 8",
        ),
        (
            lambda: conformal.calibrate_intervals(Interval(torch.zeros(9), torch.ones(9)), torch.full((9,), math.nan)),
            "must be finite",
        ),
        (
            lambda: conformal.calibrate_intervals(Interval(torch.zeros(9), torch.ones(9)), torch.ones(9), 90),
            "between 0 and 1, got 90",
        ),
        (lambda: conformal.calibrate_sets(torch.randn(9, 3), torch.zeros(9).long()), "rows that sum to 1"),
        (lambda: conformal.calibrate_sets(torch.full((9, 2), 0.5), torch.zeros(9)), "whole numbers"),
        (lambda: conformal.calibrate_sets(torch.full((9, 2), 0.5), torch.full((9,), -1)), r"in 0..1, got -1 to -1"),
        (lambda: conformal.calibrate_sets(torch.full((9, 2), 0.5), torch.zeros(9).long(), score="aps"), "got 'aps'"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # pyright: ignore


def test_targets_that_are_arrays_are_refused() -> None:
    with pytest.raises(TypeError, match=r"must be a tensor, got ndarray: use torch.as_tensor\(targets\)"):
        conformal.calibrate_intervals(Interval(torch.zeros(9), torch.ones(9)), torch.ones(9).numpy())  # pyright: ignore
