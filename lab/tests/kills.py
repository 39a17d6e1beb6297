"""Kills processes of runs at random moments; prints how many runs ended like the undisturbed one of one process.

Run: python kills.py FOLDER COUNT WORKERS. With one worker, the run is resumed. With two, either of them is killed, and
the other ends the run. One process imports everything and forks for each run, so that a kill hits the training and not
the imports.
"""

from __future__ import annotations

import collections
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import optuna
import torch

torch.set_num_threads(1)  # before anything starts threads, which do not survive a fork

import sklearn.datasets  # noqa: E402, F401
import torchmetrics.functional.classification  # noqa: E402, F401

import bayesgrad.plots  # noqa: E402, F401
from bayesgrad_lab.cli import main  # noqa: E402
from bayesgrad_lab.studies import JOURNAL  # noqa: E402

COMMAND = ["compare", "--optimizers", "adabayes,sgd", "--seeds", "1", "--examples", "400", "--lr-search"]
LONGEST = 300  # seconds of a process, which would wait for ever for a trial that nobody takes up


def run(out: Path, resume: bool) -> int:
    child = os.fork()
    if child == 0:
        signal.alarm(LONGEST)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os._exit(main([*COMMAND, "--epochs", "6", "--out", str(out), *(["--resume"] if resume else [])]))
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
    leftover = {path.name for path in folder.rglob("*.*") if path.suffix in (".lock", ".pt")}
    return {"found": found, "studies": studies(folder), "leftover": leftover - {".lock", f"{JOURNAL}.lock"}}


def studies(folder: Path) -> dict:
    """Study -> the value of each trial that ended; a trial that did not end must have failed, once for each kill."""
    backend = optuna.storages.journal.JournalFileBackend(str(folder / JOURNAL))
    storage, found, states = optuna.storages.JournalStorage(backend), {}, collections.Counter()
    for summary in storage.get_all_studies():
        trials = storage.get_all_trials(summary._study_id)
        states.update(trial.state.name for trial in trials)
        ended = [trial for trial in trials if trial.state.name == "COMPLETE"]
        values = {str(trial.params): trial.value for trial in ended}
        assert len(values) == len(ended), "a point was measured twice"
        found[summary.study_name] = dict(sorted(values.items()))
    assert set(states) <= {"COMPLETE", "FAIL"}, states
    assert states["FAIL"] <= 1, states
    return found


def disturbed(out: Path, workers: int, moment: float, which: int) -> int:
    """One process is killed, another one goes on; returns its status."""
    children = [run(out, False)]
    while workers > 1 and not (out / "compare-digits-mlp" / "config.json").exists():
        time.sleep(0.01)
    children += [run(out, True) for _ in range(workers - 1)]
    time.sleep(moment)
    killed = children.pop(which % workers)
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    _, status = os.waitpid(children.pop() if children else run(out, True), 0)
    return status


def trials(root: Path, count: int, workers: int) -> int:
    start = time.perf_counter()
    _, status = os.waitpid(run(root / "whole", False), 0)
    assert status == 0
    duration = (time.perf_counter() - start) / workers
    expected = numbers(root / "whole")
    assert (len(expected["found"]), len(expected["studies"]), expected["leftover"]) == (13, 4, set())
    draw, same = random.Random(0), 0
    for i in range(count):
        moment = draw.uniform(0.02, 0.95) * duration
        status = disturbed(root / str(i), workers, moment, i)
        found = numbers(root / str(i))
        other = [name for name in expected if found[name] != expected[name]]
        same += status == 0 and not other
        if status or other:
            print(f"kill {i} after {moment:.2f} of {duration:.2f} s: status {status}, {other} differ", file=sys.stderr)
            print(*(found[name] for name in other), sep="\n", file=sys.stderr)
    return same


if __name__ == "__main__":
    print(trials(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
