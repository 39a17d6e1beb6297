"""The benchmarks that `bayesgrad bench` runs end with their tables."""

from __future__ import annotations

import math
import re
import statistics
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bayesgrad_lab.benchmarks import elementwise, history, layerwise
from bayesgrad_lab.cli import main
from bayesgrad_lab.training import steps


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks of memory are read from /proc")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("benchmark", "options", "names"),
    [
        (elementwise, ["--seconds", "0", "--rounds", "1"], ["AdaBayes", "AdaBayesFP", "AdaBound", "AMSBound"]),
        (layerwise, ["--warm", "1", "--rounds", "10"], ["FOOF", "FOOF, backward", "KFAC, backward"]),
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


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_is_that_of_this_process_in_mebibytes() -> None:
    before = layerwise._memory("VmRSS")
    block = torch.ones(1 << 26)  # 256 MiB, more than an allocator keeps at hand
    assert layerwise._memory("VmRSS") - before == pytest.approx(256, abs=16)
    assert layerwise._memory("VmHWM") >= layerwise._memory("VmRSS") - 1  # the kernel counts in steps of some pages
    del block


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize("kind", ["pass", "solve"])
def test_a_fisher_solve_is_timed_without_what_was_before(kind: str) -> None:
    """The peak is counted from the start; in a process that had memory to spare it may be less than what was held."""
    start = time.perf_counter()
    seconds, memory = layerwise.fisher(kind, points=200)
    assert 0 < seconds < time.perf_counter() - start
    assert memory < 512  # of 200 points; the passes of other tests are not in it


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["SOAP (pytorch_optimizer)", "SINGD", "SINGD(T=10)", "Muon (torch)"])
def test_other_packages_are_timed_with_steps_that_move_weights(name: str) -> None:
    makers = layerwise.peers()
    if name not in makers:
        pytest.skip(f"{name} is not installed")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    before, made = [p.detach().clone() for p in model.parameters()], makers[name](model)
    batches = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(2)]
    assert len(list(steps(model, made if isinstance(made, list) else [made], batches))) == 2
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters()))


def test_what_became_slower_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    figures = {"AdaBayes": (1.0, 0.01), "FOOF": (1.5, 0.2), "KFAC": (2.0, 0.001)}
    later = {"AdaBayes": (1.1, 0.01), "FOOF": (1.9, 0.2), "KFAC": (2.05, 0.001)}  # beyond noise; within; less than 5 %
    measurements = iter([figures, later, figures])
    monkeypatch.setattr(history, "measured", lambda *_: next(measurements))
    command = ["bench", "--history", str(tmp_path / "history.jsonl"), "--write", str(tmp_path / "page.md")]
    assert [main(command) for _ in range(3)] == [0, 1, 0]
    assert "standard errors and 5%: AdaBayes.\n" in capsys.readouterr().out
    page = (tmp_path / "page.md").read_text()
    assert "Measurements so far: 3. The one before is of" in page
    assert "| AdaBayes | 1.00 ± 0.01 | 1.10 ± 0.01 |" in page
    assert main(["bench", "--rounds", "3"]) == 2
    assert "--rounds must be at least 20, got 3." in capsys.readouterr().err


def test_ratios_have_the_error_of_parts_of_a_run() -> None:
    base = [1.0] * 20
    own = [2.0 + i // 2 for i in range(20)]  # parts: 2, 3, ..., 11
    assert history.ratio(own, base) == pytest.approx((6.5, statistics.stdev(range(10)) / math.sqrt(10)))
