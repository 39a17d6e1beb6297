"""Chains of hidden states against sums over all of their paths."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bayesgrad.models import markov


class Paths(NamedTuple):
    log_weight: float
    shares: np.ndarray
    pairs: np.ndarray
    best: tuple[int, ...]
    height: float


def all_paths(start: np.ndarray, moves: np.ndarray, seen: np.ndarray) -> Paths:
    """Every path, one by one."""
    K, T = seen.shape
    paths = list(itertools.product(range(K), repeat=T))
    weights = []
    for z in paths:
        weights.append(
            start[z[0]] + sum(moves[a, b] for a, b in itertools.pairwise(z)) + sum(seen[k, t] for t, k in enumerate(z))
        )
    logs = np.array(weights)
    total = np.logaddexp.reduce(logs)
    shares, pairs = np.zeros((K, T)), np.zeros((K, K))
    for z, p in zip(paths, np.exp(logs - total)):
        for t, k in enumerate(z):
            shares[k, t] += p
        for a, b in itertools.pairwise(z):
            pairs[a, b] += p
    return Paths(total, shares, pairs, paths[int(logs.argmax())], logs.max())


def model(seed: int, states: int, length: int, spread: float, zeros: bool) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    A, start = rng.dirichlet(np.full(states, 0.7), size=states), rng.dirichlet(np.ones(states))
    if zeros and states > 1:
        A[0, 1] = A[1, 0] = 0
        start[0] = 0
    with np.errstate(divide="ignore"):
        return np.log(start), np.log(A), -spread * rng.random((states, length))


def packed(seen: np.ndarray, layout: markov.Layout) -> Tensor:
    return torch.as_tensor(seen)[:, layout.rows]


@pytest.mark.parametrize("size", [1, 2, 3, 9])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("spread", [1.0, 40.0, 3000.0])
def test_sums_over_all_paths(spread: float, zeros: bool, size: int) -> None:
    """Sequences of several lengths, cut anywhere; weights beyond what a float can hold; moves that cannot be."""
    lengths = [5, 1, 4, 7]
    start, moves, seen = model(int(spread), 3, sum(lengths), spread, zeros)
    layout = markov.Layout(lengths, size)
    given = torch.as_tensor(start), torch.as_tensor(moves)
    found = markov.smoothed(*given, packed(seen, layout), layout)
    shares = layout.unpacked(found.shares).numpy()
    heights, states = markov.best(*given, packed(seen, layout), layout)
    parts = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    want = [all_paths(start, moves, seen[:, part]) for part in parts]
    assert_close(found.log_weight.numpy(), np.array([w.log_weight for w in want]), rtol=1e-12, atol=1e-12)
    assert_close(shares, np.concatenate([w.shares for w in want], 1), rtol=0, atol=1e-11)
    assert_close(found.pairs.numpy(), sum(w.pairs for w in want), rtol=0, atol=1e-11)
    assert_close(found.first.numpy(), sum(w.shares[:, 0] for w in want), rtol=0, atol=1e-11)
    assert_close(heights.numpy(), np.array([w.height for w in want]), rtol=1e-12, atol=1e-12)
    assert layout.unpacked(states).tolist() == [k for w in want for k in w.best]


@pytest.mark.parametrize("zeros", [False, True])
def test_plain_numbers_and_logarithms_agree(zeros: bool) -> None:
    """Over 3000 steps, with pieces of the usual length, and for weights that sum to less than one."""
    start, moves, seen = (torch.as_tensor(part) for part in model(3, 4, 3000, 30.0, zeros))
    moves = moves - 0.3
    layout = markov.Layout([1700, 1, 900, 399])
    seen = seen[:, layout.rows]
    top = markov._begin_(start, seen, layout)
    plain, odd = markov._plain(moves, seen, top, layout)
    plain = plain._replace(shares=plain.shares.clone())
    logs = markov._logarithmic(moves, seen, top, layout)
    assert odd < 1e-13
    for a, b in zip(plain, logs):
        assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_detours_are_noticed() -> None:
    """States that never change, and data that favour the first, then the second by more, then the first again: plain
    numbers lose the second early, from both ends, and would agree on the wrong answer."""
    eye = torch.eye(2).double().log()
    seen = torch.zeros(2, 300).double()
    seen[1, :100] = seen[1, 200:] = -8.0
    seen[0, 100:200] = -20.0
    found = markov.smoothed(torch.tensor([0.5, 0.5]).double().log(), eye, seen.clone(), markov.Layout([300], 10))
    assert_close(found.log_weight.item(), -1600 - np.log(2), rtol=1e-12, atol=0)
    assert_close(found.shares[1], torch.ones(300).double())
    assert_close(found.pairs, torch.tensor([[0.0, 0.0], [0.0, 299.0]]).double())


def test_a_state_that_must_be_passed_through() -> None:
    """Left to right: the middle state is e^-5000 less likely than the rest wherever it is, and yet certain once."""
    A = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.0, 0.0, 1.0]]).double()
    seen = torch.zeros(3, 50).double()
    seen[1], seen[2, :25], seen[0, 25:] = -5000.0, -9000.0, -9000.0
    layout = markov.Layout([50], 7)
    start = torch.tensor([1.0, 0.0, 0.0]).double().log()
    found = markov.smoothed(start, A.log(), seen[:, layout.rows], layout)
    assert_close(found.shares[1].sum().item(), 1.0)
    assert_close(found.log_weight.item(), -5000 + np.log(0.5**25 + 0.5**26), rtol=1e-12, atol=0)


@pytest.mark.parametrize("size", [2, 100])
def test_an_impossible_sequence_spoils_no_other(size: int) -> None:
    eye, start = torch.eye(2).double().log(), torch.tensor([1.0, 0.0]).double().log()
    seen = torch.zeros(2, 30).double()
    seen[0, 12] = -torch.inf  # of the second sequence, which is then in no state that it can be in
    layout = markov.Layout([10, 10, 10], size)
    found = markov.smoothed(start, eye, seen[:, layout.rows], layout)
    assert found.log_weight.tolist() == [0.0, -torch.inf, 0.0]
    shares = layout.unpacked(found.shares)
    assert_close(shares[0, :10], torch.ones(10).double())
    assert_close(shares[0, 20:], torch.ones(10).double())
    seen[:, 12] = -torch.inf
    found = markov.smoothed(start, torch.full((2, 2), 0.5).double().log(), seen[:, layout.rows], layout)
    assert torch.isneginf(found.log_weight).tolist() == [False, True, False]


def test_layouts_are_permutations() -> None:
    for lengths, size in (([7], 3), ([1, 1, 1], 5), ([100, 3, 41], 10), ([16], 16)):
        layout = markov.Layout(lengths, size)
        assert sorted(layout.rows.tolist()) == list(range(sum(lengths)))
        assert layout.unpacked(layout.rows).tolist() == list(range(sum(lengths)))
        assert sum(layout.widths) == sum(lengths)
        assert len(layout.widths) <= size
