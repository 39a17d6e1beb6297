"""Experiments at smoke scale: each runs once, in the process that asks first; each test gets a copy of its folder."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from bayesgrad_lab.cli import main


@dataclass(frozen=True)
class Smoke:
    """A run of the command line: its exit code, what it printed, and a copy of the folder it left."""

    code: int
    said: str
    folder: Path


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Smoke]:
    """Runs the experiment of this name with two seeds, unless it has been run before."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # that of all processes of this run
    out = root / "smoke"

    def run(name: str) -> Smoke:
        out.mkdir(exist_ok=True)
        whole, outcome = out / f"{name}-smoke", out / f"{name}.json"
        with (out / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not outcome.exists():
                shutil.rmtree(whole, ignore_errors=True)  # left by a run that failed
                said = io.StringIO()
                with contextlib.redirect_stdout(said):
                    code = main(["run", name, "--scale", "smoke", "--seeds", "2", "--out", str(out)])
                outcome.write_text(json.dumps({"code": code, "said": said.getvalue()}))
        copy = tmp_path_factory.mktemp("copy") / whole.name
        return Smoke(**json.loads(outcome.read_text()), folder=shutil.copytree(whole, copy))

    return run
