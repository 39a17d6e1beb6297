"""Continual learning in small: tasks, what is kept of them, and the report."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from bayesgrad import EWC
from bayesgrad_lab import continual, datasets
from bayesgrad_lab.continual import METHODS, Memory, Stream, run
from bayesgrad_lab.results import Results

from .conftest import at_smoke_scale as context

BY_KEY = {method.kind: method for method in METHODS}


@pytest.fixture(scope="module")
def streams() -> dict[str, Stream]:
    data = datasets.load("digits").part(120)
    return {kind: Stream(kind, data, 3, (8,), 1, 30, 10) for kind in ("permuted", "split")}


@pytest.mark.parametrize("experiment", ["continual-mnist"])
def test_the_experiment_reports_and_a_second_run_measures_nothing(experiment: str, second_run) -> None:
    again = second_run(experiment, slice(None, None, 2))
    assert all("the same for diagonals" in words for words in again.settings.values())


def test_tasks(streams: dict[str, Stream]) -> None:
    """Permutations move pixels, differ by task and seed, and treat training and test images alike; splits are pairs."""
    stream = streams["permuted"]
    plain, one = stream.data.train_x.flatten(1), stream.part(1, 0)
    assert_close(one.train_x.sort(1).values, plain.sort(1).values)
    assert not torch.equal(one.train_x, stream.part(2, 0).train_x)
    assert not torch.equal(one.train_x, stream.part(1, 1).train_x)
    data = stream.data
    alike = replace(stream, data=replace(data, test_x=data.train_x, test_y=data.train_y)).part(1, 0)
    assert torch.equal(alike.test_x, alike.train_x)
    pair = streams["split"].part(2, 0)
    assert len(pair.train_x) == int(((data.train_y == 4) | (data.train_y == 5)).sum())
    assert set(pair.train_y.tolist()) == {0, 1}


@pytest.mark.parametrize("kind", ["permuted", "split"])
@pytest.mark.parametrize("key", BY_KEY)
def test_runs_are_functions_of_their_seed(key: str, kind: str, streams: dict[str, Stream], tmp_path: Path) -> None:
    state = torch.get_rng_state()
    method = BY_KEY[key]
    found = [run(context(tmp_path / str(i)), streams[kind], method, 1.0, seed) for i, seed in enumerate((1, 1, 2))]
    assert torch.equal(torch.get_rng_state(), state)
    accuracy = found[0]["accuracy"]
    assert torch.equal(accuracy.isnan(), torch.ones(3, 3).triu(1).bool())
    assert torch.equal(accuracy.tril(), found[1]["accuracy"].tril())
    assert not torch.equal(accuracy.tril(), found[2]["accuracy"].tril())
    assert (found[0]["kept"] > 0) == (key != "none")


def test_a_firm_memory_holds_earlier_tasks_where_they_were(streams: dict[str, Stream], tmp_path: Path) -> None:
    """All of a Hessian, times a large number: outputs for the examples it is made of cannot move."""
    stream = replace(streams["split"], epochs=8)
    lost = []
    for key, strength in (("none", 1.0), ("ewc-kron", 1e4)):
        accuracy = run(context(tmp_path), stream, replace(BY_KEY[key], lrs=(0.03,)), strength, 0)["accuracy"]
        lost.append((accuracy.diagonal() - accuracy[-1])[:-1].mean().item())
    assert lost[1] < min(0.02, lost[0])


def test_numbers_kept(streams: dict[str, Stream]) -> None:
    """A diagonal: as many as weights, once; Kronecker factors: for each task; a diagonal's room: no more than that."""
    stream = streams["permuted"]
    weights, moments = stream.weights, (65**2 + 8**2) + (9**2 + 10**2)
    assert weights == 65 * 8 + 9 * 10
    data = stream.part(0, 0)
    expected = {"ewc-diag": 2 * weights, "ewc-input": weights + 65**2 + 9**2, "ewc-kron": weights + 2 * moments}
    for key in (*expected, "ewc-subsampled-same"):
        memory, model = Memory(stream, BY_KEY[key], 1.0, 0), stream.model(0)
        memory.keep(model, None, data, "cpu")
        once = memory.size()
        memory.keep(model, None, data, "cpu")
        assert isinstance(memory.ewc, EWC)
        if key in expected:
            assert memory.size() == expected[key]
        else:
            assert 0.7 * weights < once - weights <= weights


def test_scores_by_hand() -> None:
    matrix = torch.tensor([[0.9, math.nan], [0.6, 0.8]])
    one, two = (
        Results("some", [{"accuracy": matrix + shift * torch.tensor([[0.0, 0.0], [1.0, 0.0]])}], continual.score)
        for shift in (0.0, 0.2)
    )
    found: dict[str, Any] = {name: one.values(name)[0] for name in ("end", "learned", "lost")}
    assert found == pytest.approx({"end": 0.7, "learned": 0.85, "lost": 0.3})
    assert two.less(one, "lost")[0] == pytest.approx(-0.2)
    assert continual.path(one) == [pytest.approx([90.0, 70.0])]
