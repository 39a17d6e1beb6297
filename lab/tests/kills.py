"""Kills runs at random moments and resumes them; prints how many ended like the undisturbed one.

Run: python kills.py FOLDER COUNT. One process imports everything and forks for each run, so that a kill hits the
training and not the imports.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

torch.set_num_threads(1)  # before anything starts threads, which do not survive a fork

import sklearn.datasets  # noqa: E402, F401
import torchmetrics.functional.classification  # noqa: E402, F401

import bayesgrad.plots  # noqa: E402, F401
from bayesgrad_lab.cli import main  # noqa: E402


def run(out: Path, resume: bool) -> int:
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        arguments = ["compare", "--optimizers", "adabayes,sgd", "--epochs", "6", "--seeds", "1", "--examples", "400"]
        os._exit(main([*arguments, "--out", str(out), *(["--resume"] if resume else [])]))
    return child


def numbers(out: Path) -> dict:
    """All that must be reproduced: every trial's curves and scores, and the report's table but for time and memory."""
    folder = out / "compare-digits-mlp"
    found = {}
    for path in sorted((folder / "trials").glob("*.json")):
        trial = json.loads(path.read_text())
        found[path.name] = (trial["rows"], trial["final"])
    table = json.loads((folder / "report.json").read_text())["tables"][0]
    found["table"] = [row[:6] for row in table["rows"]]
    leftover = [path.name for path in folder.rglob("*") if "partial" in path.name]
    return {"found": found, "checkpoints": len(list((folder / "trials").glob("*.pt"))), "leftover": len(leftover)}


def trials(root: Path, count: int) -> int:
    start = time.perf_counter()
    _, status = os.waitpid(run(root / "whole", False), 0)
    assert status == 0
    duration = time.perf_counter() - start
    expected = numbers(root / "whole")
    assert len(expected["found"]) == 3
    draw, same = random.Random(0), 0
    for i in range(count):
        out = root / str(i)
        child = run(out, False)
        time.sleep(draw.uniform(0.02, 0.95) * duration)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        _, status = os.waitpid(run(out, True), 0)
        found = numbers(out)
        found["leftover"] = 0  # a file that was being written when the kill came may stay behind, unread
        same += status == 0 and found == {**expected, "leftover": 0}
    return same


if __name__ == "__main__":
    print(trials(Path(sys.argv[1]), int(sys.argv[2])))
