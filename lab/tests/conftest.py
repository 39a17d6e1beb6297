"""Experiments at smoke scale: each runs once, and every test that looks at it reads the folder it has left."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from bayesgrad_lab.cli import main


@dataclass(frozen=True)
class Smoke:
    """A run of the command line: its exit code, what it printed, and the folder it left."""

    code: int
    said: str
    folder: Path


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Smoke]:
    """Runs the experiment of this name with two seeds, unless it has been run before."""
    out = tmp_path_factory.mktemp("smoke")

    @cache
    def run(name: str) -> Smoke:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = main(["run", name, "--scale", "smoke", "--seeds", "2", "--out", str(out)])
        return Smoke(code, said.getvalue(), out / f"{name}-smoke")

    return run


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one experiment go to one process, which has run it; its name is their parameter `experiment`."""
    for item in items:
        if "smoke" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group(f"smoke-{item.callspec.params['experiment']}"))  # pyright: ignore
