"""Runs of the examples in which a process is killed: a sentence that names it, and the numbers of a run without it."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
KILLS = int(os.environ.get("SOAK_KILLS", "20"))
WAIT = 900.0  # seconds, far more than any of this takes on an idle machine


def environment(**more: object) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **{k: str(v) for k, v in more.items()}}


def until(what: Callable[[], object], process: subprocess.Popen) -> None:
    """Waits for something, or for the end of the process."""
    end = time.monotonic() + WAIT
    while not what() and process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.02)


def by_hand(folder: Path, kill: int) -> tuple[str, int]:
    """Two processes of which one is killed after a few steps: what the other writes, and its exit code."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [
        sys.executable,
        str(EXAMPLES / "ddp.py"),
        "--folder",
        str(folder),
        "--steps",
        "1000000",
        "--save-every",
        "1",
    ]
    group = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    files = [folder / f"{rank}.log" for rank in range(2)]
    workers = []
    try:
        for rank, file in enumerate(files):
            with file.open("w") as log:
                where = environment(RANK=rank, **group)
                workers.append(subprocess.Popen(command, env=where, stdout=log, stderr=subprocess.STDOUT))
        until(lambda: "step 3" in files[0].read_text(), workers[0])
        workers[kill].kill()
        code = workers[1 - kill].wait(timeout=WAIT)
    finally:
        for worker in workers:
            worker.kill()
    return files[1 - kill].read_text(), code


def test_a_process_that_was_killed_is_named(tmp_path: Path) -> None:
    words, code = by_hand(tmp_path, kill=1)
    sentence = "RuntimeError: process 1 of 2 was lost: it was killed, or does not answer; start all processes again"
    assert sentence in words.strip().splitlines()[-1], words
    assert code


@pytest.mark.slow
def test_the_process_with_the_store_is_lost(tmp_path: Path) -> None:
    words, code = by_hand(tmp_path, kill=0)
    last = words.strip().splitlines()[-1]
    assert "process 0 of 2 was lost" in last or "the store of the process group does not answer" in last, words
    assert code


def run(example: str, folder: Path, processes: int, *words: str, kill: random.Random | None = None) -> str:
    """What an example writes; with `kill`, one of its processes is killed at a random moment."""
    folder.mkdir(exist_ok=True)
    command = [*TORCHRUN, "--nproc-per-node", str(processes), "--max-restarts", "2", str(EXAMPLES / f"{example}.py")]
    log = folder / "log"
    with log.open("a") as file:
        job = subprocess.Popen(
            [*command, "--folder", str(folder), *words], env=environment(), stdout=file, stderr=subprocess.STDOUT
        )
    try:
        if kill is not None:
            place = kill.randrange(6)
            until(lambda: f"step {10 * place}:" in log.read_text() if place else children(job.pid), job)
            time.sleep(kill.uniform(0, 0.5 if place else 8))
            rank = kill.randrange(processes)
            alive = children(job.pid) if job.poll() is None else []
            if len(alive) < processes:  # the run was over before that moment
                job.wait()
                return run(example, folder / "again", processes, *words, kill=kill)
            os.kill(alive[rank], signal.SIGKILL)
        assert job.wait(timeout=WAIT) == 0, log.read_text()
    finally:
        job.kill()
    words_of_all = log.read_text()
    if kill is not None:
        assert re.search(rf"exitcode: -9\) local_rank: {rank} ", words_of_all), words_of_all
    return words_of_all


def children(pid: int) -> list[int]:
    """The processes that a process has started, oldest first."""
    found = (Path(f"/proc/{pid}/task") / task / "children" for task in os.listdir(f"/proc/{pid}/task"))
    return sorted(int(child) for file in found for child in file.read_text().split())


def weights(words: str) -> str:
    """The checksum of the weights at the end."""
    return words.strip().splitlines()[-1].removeprefix("done: weights ")


def test_an_example_runs_in_one_process_and_goes_on(tmp_path: Path) -> None:
    found = []
    for folder, steps in (("whole", "4"), ("parts", "2"), ("parts", "4")):
        where = ["--folder", str(tmp_path / folder), "--steps", steps, "--save-every", "2"]
        command = [sys.executable, str(EXAMPLES / "ddp.py"), *where]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        assert f"step {steps}: loss" in done.stdout, done.stderr
        found.append(weights(done.stdout))
    assert found[0] == found[2] != found[1]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.parametrize("example", ["ddp", "fsdp"])
def test_a_run_with_a_killed_process_ends_as_one_without(example: str, tmp_path: Path) -> None:
    expected = weights(run(example, tmp_path / "whole", 2))
    assert weights(run(example, tmp_path / "killed", 2, kill=random.Random(example))) == expected


@pytest.mark.soak
@pytest.mark.parametrize("example", ["ddp", "fsdp"])
def test_runs_with_killed_processes_end_as_one_without(example: str, tmp_path: Path) -> None:
    expected = weights(run(example, tmp_path / "whole", 2))
    for seed in range(KILLS // 2):
        found = run(example, tmp_path / str(seed), 2, kill=random.Random(f"{example} {seed}"))
        assert weights(found) == expected, seed


@pytest.mark.slow
@pytest.mark.parametrize("words", [("ddp",), ("ddp", "--optimizer", "KFAC"), ("fsdp",)], ids=" ".join)
def test_a_run_goes_on_with_another_number_of_processes(words: tuple[str, ...], tmp_path: Path) -> None:
    example, *options = *words, "--double"
    run(example, tmp_path / "whole", 2, "--steps", "20", *options)
    run(example, tmp_path / "parts", 2, "--steps", "10", *options)
    run(example, tmp_path / "parts", 3, "--steps", "20", *options)
    found, expected = (saved(example, tmp_path / name) for name in ("parts", "whole"))
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-12)


def saved(example: str, folder: Path) -> dict[str, torch.Tensor]:
    file = folder / "checkpoint.pt"
    if example == "fsdp":
        dcp_to_torch_save(folder / "step-20", file)
    return torch.load(file)["model"]
