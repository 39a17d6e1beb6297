"""Paper 002's Table 1: each algorithm out of the engine is the algorithm."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from bayesgrad.experiments import khan2023_deep as deep
from bayesgrad.experiments import khan2023_table1 as table
from bayesgrad.experiments.khan2023_rows import difference

PRINTED = [
    "Gradient descent",
    "Newton's method",
    "Multimodal optimization",
    "SGD",
    "RMSprop/Adam",
    "Dropout",
    "STE",
    "Online Gauss-Newton (OGN)",
    "Variational OGN",
    "BayesBiNN",
    "Conjugate Bayes",
    "Laplace's method",
    "Expectation-Maximization",
    "Stochastic variational inference (SVI)",
    "Variational message passing (VMP)",
    "Non-conjugate VMP",
    "Non-conjugate variational inference",
]


def test_no_row_is_left_out() -> None:
    assert [row.algorithm for row in table.ROWS] == PRINTED


@pytest.mark.parametrize("row", table.ROWS, ids=PRINTED)
def test_the_engine_gives_the_algorithms_numbers(row: table.Row) -> None:
    ours, theirs = row.ours(), row.theirs()
    assert ours.shape == theirs.shape
    assert torch.isfinite(theirs).all()
    assert difference(ours, theirs) < row.tolerance <= 1e-5


@pytest.mark.parametrize("row", [row for row in table.ROWS if row.part == "Deep learning"], ids=lambda r: r.algorithm)
def test_paths_go_somewhere(row: table.Row) -> None:
    """Weights that stay where they were would agree with anything."""
    path = row.theirs()
    assert len(path) == deep.STEPS
    assert (path[-1] - path[0]).abs().max() > 0.1


RUNGS = table.ladder()


@pytest.mark.parametrize("rung", RUNGS[1:], ids=[f"{dropped}: {name}" for dropped, name, *_ in RUNGS[1:]])
def test_one_approximation_at_a_time(rung: table.Rung) -> None:
    assert table.rung_difference(rung) < 1e-9


def test_neighbouring_rungs_differ() -> None:
    """Each approximation is one: the next rule does something else."""
    ends = [ours()[-1][:2] for _, _, ours, _ in RUNGS]
    for before, after in pairwise(ends):
        assert (before - after).abs().max() > 1e-3


def test_adabayes_for_a_wide_prior_is_the_engines_adam() -> None:
    torch.testing.assert_close(deep.adabayes_limit(), deep.adaptive(0.05, 0.9, 0.99, 0.0), rtol=1e-9, atol=1e-9)


def test_responsibilities_vanish_with_the_width_of_the_spike() -> None:
    wide, narrow, point = (deep.responsibility(precision) for precision in (1.0, 10.0, 100.0))
    assert wide > 0.1
    assert 1e-5 < narrow < 1e-3
    assert point < 1e-12


def test_signs_without_noise_are_straight_through() -> None:
    gaps = [table.signs(*pair) for pair in table.TO_SIGNS]
    assert gaps[0] > 0.1
    assert gaps[-1] < 1e-10
