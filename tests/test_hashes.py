"""One fast part of the golden hashes; `make hashes` compares all of them."""

from __future__ import annotations

import pytest

import hashes

RUNS = [run for run in hashes.runs() if (run.network, run.dtype) == ("tied", "float64")]


@pytest.fixture(scope="module")
def record() -> dict[str, list[str]]:
    known, differs = hashes.recorded()
    if differs:
        pytest.skip(f"bits are comparable only where the record was made: {differs}")
    return known


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.case)
def test_weights_and_state_are_as_recorded(run: hashes.Run, record: dict[str, list[str]]) -> None:
    assert hashes.carry_out(run) == record[run.key]


def test_the_record_is_of_these_runs() -> None:
    known, _ = hashes.recorded()
    assert list(known) == [run.key for run in hashes.runs()]
