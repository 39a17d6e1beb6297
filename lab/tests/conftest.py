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
from typing import Any

import pytest

from bayesgrad_lab import context, training
from bayesgrad_lab.cli import main
from bayesgrad_lab.context import Context
from bayesgrad_lab.experiments import EXPERIMENTS
from bayesgrad_lab.report import Report, load


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


def at_smoke_scale(path: Path, **changes: Any) -> Context:
    """An experiment's context in a folder, silent, with two seeds."""
    (path / "trials").mkdir(parents=True, exist_ok=True)
    return Context(path, "smoke", **{"seeds": 2, "say": lambda words: None, **changes})


@pytest.fixture
def second_run(smoke, monkeypatch) -> Callable[..., Report]:
    """Checks the report of an experiment, and that a second run measures nothing and says the same; returns it.

    Args:
        whole: of the report's tables, those whose rows are as long as their columns.
    """

    def run(name: str, whole: slice = slice(None)) -> Report:
        folder = smoke(name).folder
        report = load(folder)
        assert report.claim
        assert report.tables
        assert report.figures
        assert all(len(row) == len(table["columns"]) for table in report.tables[whole] for row in table["rows"])
        assert all((folder / figure["file"]).exists() for figure in report.figures)
        assert any(key.startswith("protocol") for key in report.settings)
        before = {path.name: path.stat().st_mtime_ns for path in (folder / "trials").iterdir()}
        assert before

        def measured(*_: Any) -> None:
            raise AssertionError("measured again")

        monkeypatch.setattr(context, "write_tensors", measured)
        monkeypatch.setattr(training, "write_tensors", measured)
        again = EXPERIMENTS[name].run(at_smoke_scale(folder))
        assert {path.name: path.stat().st_mtime_ns for path in (folder / "trials").iterdir()} == before
        assert again.tables == report.tables
        assert again.verdict.startswith(("Holds", "Does not hold"))
        return again

    return run
