"""The benchmarks that `bayesgrad bench` runs end with their tables."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bayesgrad_lab.benchmarks import elementwise, layerwise
from bayesgrad_lab.cli import main


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks of memory are read from /proc")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("benchmark", "options", "names"),
    [
        (elementwise, ["--seconds", "0", "--rounds", "1"], ["AdaBayes", "AdaBayesFP", "AdaBound", "AMSBound"]),
        (layerwise, ["--warm", "1", "--rounds", "10"], ["FOOF", "KFAC", "NaturalGradient"]),
    ],
)
def test_a_benchmark_prints_and_writes_its_table(
    benchmark: ModuleType, options: list[str], names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(sys, "argv", ["bench", *options, "--write", str(page)])
    benchmark.main()
    assert page.read_text() == capsys.readouterr().out
    for name in names:
        (ratio, *_) = re.findall(rf"^\| {name} \| ([0-9.]+) ", page.read_text(), re.MULTILINE)
        assert float(ratio) > 0


def test_bench_runs_both_and_fails_where_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess:
        commands.append(command)
        return subprocess.CompletedProcess(command, len(commands) - 1)

    monkeypatch.setattr(subprocess, "run", run)
    assert main(["bench"]) == 1
    assert [command[-1] for command in commands] == [elementwise.__name__, layerwise.__name__]
