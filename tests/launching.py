"""Starts the processes of a group once, for the test process that asks first."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parent


def results_of(factory: pytest.TempPathFactory, script: str, size: int, *words: Any) -> list[dict[str, Any]]:
    """What each process of `python script RANK words... FOLDER` saved as FOLDER/RANK.pt.

    Args:
        factory: the fixture tmp_path_factory.
        script: a file of this folder.
        size: the number of processes.
        words: further arguments.
    """
    root = factory.getbasetemp()
    name = "_".join([script.removesuffix(".py"), str(size), *map(str, words)])
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / name
    folder.mkdir(exist_ok=True)
    files = [folder / f"{rank}.pt" for rank in range(size)]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all(file.exists() for file in files):
            (folder / "group").unlink(missing_ok=True)  # left by a run that failed
            command = [sys.executable, "-W", "ignore", str(TESTS / script)]
            given = [[str(rank), *map(str, words), str(folder)] for rank in range(size)]
            workers = [subprocess.Popen([*command, *own]) for own in given]
            end = time.monotonic() + 3600
            try:
                while any(worker.poll() is None for worker in workers) and not any(worker.poll() for worker in workers):
                    assert time.monotonic() < end
                    time.sleep(0.1)
                assert [worker.poll() for worker in workers] == [0] * size  # others would wait for one that failed
            finally:
                for worker in workers:
                    worker.kill()
    return [torch.load(file) for file in files]
