"""The command line, the code of the README and examples from wheels, outside of a checkout."""

from __future__ import annotations

import os
import re
import shutil
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


def python(site: Path, folder: Path, *arguments: object) -> str:
    """What Python prints in a folder outside of a checkout."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_code_of_the_readme_and_examples_from_wheels(site: Path, tmp_path: Path) -> None:
    names = "import bayesgrad, bayesgrad_lab; print(bayesgrad.__file__, bayesgrad_lab.__file__)"
    assert all(Path(file).is_relative_to(site) for file in python(site, tmp_path, "-c", names).split())
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "snippets.py").write_text("\n".join(snippets))
    assert python(site, tmp_path, "snippets.py")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for example in ("ignite_digits.py", "skorch_digits.py"):
        assert "accuracy" in python(site, tmp_path, tmp_path / "examples" / example, "--small")


@pytest.mark.slow
def test_commands_from_wheels(site: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        return python(site, tmp_path, site / "bin" / "bayesgrad", *arguments)

    assert "bayesgrad 0." in run("--version")
    assert "uci-regression" in run("list")
    assert "report.html" in run("run", "smith2018-fig1", "--scale", "smoke", "--seeds", "1", "--quiet")
    quick = ("--epochs", "1", "--seeds", "1", "--examples", "100", "--optimizers", "sgd,adabayes")
    assert "report.html" in run("compare", *quick)
    assert "report.html" in run("report", "runs/compare-digits-mlp")
    assert "--help" in run("bench", "--help")
