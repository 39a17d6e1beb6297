"""The time of a step of every optimizer that is timed, beside torch.optim's, with earlier measurements.

Run: bayesgrad bench [--history docs/results/benchmarks.jsonl] [--write docs/results/benchmarks.md]

Optimizers take turns in one process. A figure is the mean, over parts of the run, of the ratio of mean times, with its
standard error. With a history, the measurement is added to it and compared with the last one on such a machine: what
became slower by more than NOISE standard errors and by more than LEAST is named, and the exit code is 1. Keep the
machine idle while it runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import bayesgrad
from bayesgrad_lab.benchmarks import elementwise, layerwise, page

PARTS = 10  # of a run
NOISE, LEAST = 3.0, 0.05
Figures = Mapping[str, tuple[float, float]]


def ratio(own: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """The ratio of two means, over parts of a run that both have taken turns in, and its standard error."""
    bounds = [round(i * len(own) / PARTS) for i in range(PARTS + 1)]
    parts = [statistics.mean(own[a:b]) / statistics.mean(base[a:b]) for a, b in pairwise(bounds)]
    return statistics.mean(parts), statistics.stdev(parts) / math.sqrt(PARTS)


def measured(rounds: int, warm: int, seconds: float) -> Figures:
    found: dict[str, tuple[float, float]] = {}
    for case, shapes in elementwise.CASES.items():
        times = elementwise.times_of(elementwise.optimizers_for(shapes), seconds, rounds)
        base = times.pop("torch AdamW(fused=True)")
        found |= {f"{name}, {case}, beside AdamW": ratio(own, base) for name, own in times.items()}
    times = layerwise.measure(layerwise.OURS, warm, rounds)
    base = times.pop("SGD(fused=True)")
    return found | {f"{name}, a perceptron, beside SGD": ratio(own, base) for name, own in times.items()}


def slower(now: Figures, before: Figures) -> list[str]:
    """Names of what takes longer than before, beyond noise."""
    both = {name: (now[name], before[name]) for name in now if name in before}
    return [
        name
        for name, ((new, error), (old, old_error)) in both.items()
        if new - old > max(NOISE * math.hypot(error, old_error), LEAST * old)
    ]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def lines(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The page: the last measurement beside the one before it on such a machine."""
    last = entries[-1]
    earlier = next((e for e in reversed(entries[:-1]) if e["machine"] == last["machine"]), None)
    before: Figures = earlier["figures"] if earlier else {}
    named = slower(last["figures"], before)
    found = [
        "# Step times",
        "",
        f"`bayesgrad bench`, {last['date']}, bayesgrad {last['bayesgrad']}, {last['machine']}. Ratios to fused "
        "optimizers of torch, ± standard error over ten parts of the run; smaller is faster.",
        f"Measurements so far: {len(entries)}."
        + (f" The one before is of {earlier['date']}, bayesgrad {earlier['bayesgrad']}." if earlier else ""),
        f"Slower than before, by more than {NOISE:g} standard errors and {LEAST:.0%}: {'; '.join(named) or 'none'}.",
        "",
        "| step of | ratio | before |",
        "|---|---|---|",
    ]
    for name, (mean, error) in last["figures"].items():
        old = f"{before[name][0]:.2f} ± {before[name][1]:.2f}" if name in before else "-"
        found.append(f"| {name} | {mean:.2f} ± {error:.2f} | {old} |")
    return found


def run(arguments: argparse.Namespace) -> int:
    if arguments.rounds < 2 * PARTS:
        raise ValueError(f"--rounds must be at least {2 * PARTS}, got {arguments.rounds}.")
    entries = read(arguments.history) if arguments.history else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figures = measured(arguments.rounds, arguments.warm, arguments.seconds)
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    machine = f"{page.setting()}, {_processor()}"
    entries.append({"date": date, "bayesgrad": bayesgrad.__version__, "machine": machine, "figures": figures})
    page.publish(lines(entries), arguments.write)
    if arguments.history:
        with arguments.history.open("a") as file:
            file.write(json.dumps(entries[-1]) + "\n")
    earlier = [e for e in entries[:-1] if e["machine"] == machine]
    return int(bool(earlier and slower(figures, earlier[-1]["figures"])))


def _processor() -> str:
    """What processors are called where Linux says so; figures of different ones are not compared."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2] for line in info.read_text().splitlines() if line.startswith("model name")]
    return " ".join(names[0].split()) if info.exists() and names else f"{torch.get_num_threads()} cores"
