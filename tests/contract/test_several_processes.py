"""Shards, parts of the data and independent processes: the weights of one process, or a refusal in one sentence."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bayesgrad.distributed import independent_processes, joint_processes
from cases import Case, every_case

SCRIPT = Path(__file__).parents[1] / "two_processes.py"
DRAWS, BINARY = {"IVON", "AdaBayes-drawn", "BayesBiNN"}, {"STE", "BayesBiNN"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What each of two processes found; they run once, for the test process that asks first."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "several_processes"
    folder.mkdir(exist_ok=True)
    files = [folder / f"{rank}.pt" for rank in range(2)]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all(file.exists() for file in files):
            (folder / "group").unlink(missing_ok=True)  # left by a run that failed
            command = [sys.executable, "-W", "ignore", str(SCRIPT)]
            workers = [subprocess.Popen([*command, str(rank), str(folder)]) for rank in range(2)]
            try:
                assert [worker.wait(timeout=240) for worker in workers] == [0, 0]
            finally:
                for worker in workers:
                    worker.kill()
    first, second = map(torch.load, files)
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


def test_a_part_of_the_data_is_not_all_data(found: tuple) -> None:
    for results in found:
        assert_same(results["laplace all"], found[0]["alone laplace"])
        assert results["laplace sampler"].startswith("ValueError: laplace needs all data, but the sampler of this")
        assert results["elbo"].startswith("ValueError: elbo needs all data")
        assert not isinstance(results["laplace num_data"], str)
        own, scaled = results["laplace own"], results["laplace num_data"]
        assert all((own[name] >= scaled[name]).all() for name in own)


def test_one_process_is_one() -> None:
    assert joint_processes() == 1
    with independent_processes():
        assert joint_processes() == 1
