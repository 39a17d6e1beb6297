"""The benchmarks that `bayesgrad bench` runs end with their tables."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

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


@pytest.mark.skipif(sys.platform != "linux", reason="peaks of memory are read from /proc")
@pytest.mark.parametrize("kind", ["pass", "solve"])
def test_memory_and_time_of_a_fisher_solve_are_positive(kind: str) -> None:
    seconds, memory = layerwise.fisher(kind, points=200)
    assert seconds > 0
    assert memory > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["SOAP (pytorch_optimizer)", "SINGD", "SINGD(T=10)", "Muon (torch)"])
def test_other_packages_are_timed_with_steps_that_move_weights(name: str) -> None:
    makers = layerwise.peers()
    if name not in makers:
        pytest.skip(f"{name} is not installed")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    before, optimizer = [p.detach().clone() for p in model.parameters()], makers[name](model)
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 3, (8,))).backward()
        optimizer.step()
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters()))


def test_bench_runs_both_and_fails_where_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess:
        commands.append(command)
        return subprocess.CompletedProcess(command, len(commands) - 1)

    monkeypatch.setattr(subprocess, "run", run)
    assert main(["bench"]) == 1
    assert [command[-1] for command in commands] == [elementwise.__name__, layerwise.__name__]
