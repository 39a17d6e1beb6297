"""Shards, parts of the data and independent processes: the weights of one process, or a refusal in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bayesgrad.distributed import independent_processes, joint_processes
from cases import Case, every_case
from launching import results_of

DRAWS, BINARY = {"IVON", "AdaBayes-drawn", "BayesBiNN"}, {"STE", "BayesBiNN"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    first, second = results_of(tmp_path_factory, "two_processes.py", 2)
    return first, second


def assert_same(found: Any, expected: Any) -> None:
    assert not isinstance(found, str), found
    assert not isinstance(expected, str), expected
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name].reshape(-1), expected[name].reshape(-1), rtol=1e-10, atol=1e-12)


@every_case
def test_independent_processes_train_models_of_their_own(case: Case, found: tuple) -> None:
    for results in found:
        assert_same(results[f"own {case.name}"], found[0][f"alone {case.name}"])


@pytest.mark.parametrize("name", ["AdaBayes", "AdaBayesFP", "AdaBound", "KalmanMomentum", *sorted(DRAWS | BINARY)])
def test_shards_are_right_or_refused(name: str, found: tuple) -> None:
    own = name.partition("-")[0]
    for results in found:
        for kind in ("fsdp1", "fsdp1 original"):
            if name in DRAWS:
                assert results[f"{kind} {name}"].startswith(f"RuntimeError: {own} draws weights and needs all of them")
            else:
                assert_same(results[f"{kind} {name}"], found[0][f"alone {name}"])
        if name in DRAWS | BINARY:
            assert results[f"zero {name}"].startswith(f"RuntimeError: {own} changes weights outside of step() and")
        else:
            assert_same(results[f"zero {name}"], found[0][f"alone {name}"])


def test_one_process_is_one() -> None:
    assert joint_processes() == 1
    with independent_processes():
        assert joint_processes() == 1
