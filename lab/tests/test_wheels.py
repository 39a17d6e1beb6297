"""The command line from wheels, outside of a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, ROOT, ROOT / "lab"], check=True)
    wheels = sorted(folder.glob("*.whl"))
    assert [wheel.name.split("-")[0] for wheel in wheels] == ["bayesgrad", "bayesgrad_lab"]
    subprocess.run([*pip, "install", "--no-deps", "--target", folder / "site", *wheels], check=True)
    return folder / "site"


@pytest.mark.slow
def test_commands_from_wheels(site: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, site / "bin" / "bayesgrad", *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(site)},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = subprocess.run(
        [sys.executable, "-c", "import bayesgrad, bayesgrad_lab; print(bayesgrad.__file__, bayesgrad_lab.__file__)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
    ).stdout.split()
    assert all(Path(file).is_relative_to(site) for file in where)
    assert "bayesgrad 0." in run("--version")
    assert "uci-regression" in run("list")
    assert "report.html" in run("run", "smith2018-fig1", "--scale", "smoke", "--seeds", "1", "--quiet")
    quick = ("--epochs", "1", "--seeds", "1", "--examples", "100", "--optimizers", "sgd,adabayes")
    assert "report.html" in run("compare", *quick)
    assert "report.html" in run("report", "runs/compare-digits-mlp")
    assert "--help" in run("bench", "--help")
