"""Whether statistics every ten steps train as well as statistics in every step.

Run: python benchmarks/stats_every.py --out runs/stats-every.jsonl [--write docs/results/stats-every.md]

FOOF, KFAC and KroneckerFilterFP with default settings, except `stats_every`, on three tasks of stable_defaults.py, for
five seeds. Both settings see the same network and the same batches. The score of a run is the mean of its last 20
training losses, after a number of steps that is fixed for each task. Fixed before the first run: every ten steps is as
good as every step if the 95 % interval of the mean difference of log scores has its upper end below 0.05, worse if its
lower end is above 0.05, and not resolved otherwise.

Finished runs are appended to `--out`, one line of JSON each, and are not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from functools import partial
from pathlib import Path

import torch
from stable_defaults import OPTIMIZERS, TASKS, finished, required, take_step

from bayesgrad_lab import datasets, networks
from bayesgrad_lab.benchmarks import page

STEPS = {"cnn": 200, "autoencoder": 60, "gpt": 60}
LAST, MARGIN, QUANTILE = 20, 0.05, 2.776  # losses of a score; of a log score; Student's t with 4 degrees of freedom
RULES = ("FOOF", "KFAC", "KroneckerFilterFP")


def run(task_name: str, rule: str, every: int, seed: int, data_dir: str | None) -> dict:
    task = TASKS[task_name]
    data = datasets.load(task.data, data_dir)
    x, y = task.prepare(data.train_x, data.train_y)
    with networks.seeded(seed):
        model = task.build(data.classes)
    optimizer = partial(OPTIMIZERS[rule], stats_every=every)(model, **required(task, rule))
    batches, losses, start = task.batches(x, y, seed), [], time.process_time()
    for _ in range(STEPS[task_name]):
        losses.append(take_step(optimizer, model, task, *next(batches)))
    score = statistics.fmean(losses[-LAST:])
    seconds = time.process_time() - start
    return {"task": task_name, "rule": rule, "every": every, "seed": seed, "score": score, "seconds": seconds}


def table(runs: list[dict]) -> list[str]:
    lines = [
        "# Statistics every ten steps",
        "",
        f"`python benchmarks/stats_every.py`, {page.setting()}. Training losses of runs with default settings and "
        "statistics every step or every ten steps: means over seeds, and the mean difference of their logarithms with "
        f"its 95 % interval. As good: the interval ends below {MARGIN}. The script says how this is measured.",
        "",
        "| task (steps) | optimizer | every step | every ten steps | log ratio | verdict | processor time |",
        "|---|---|---|---|---|---|---|",
    ]
    for task in STEPS:
        for rule in RULES:
            found = {(r["every"], r["seed"]): r for r in runs if r["task"] == task and r["rule"] == rule}
            seeds = sorted(seed for every, seed in found if every == 1 and (10, seed) in found)
            if len(seeds) < 5:
                continue
            ones, tens = ([found[every, seed] for seed in seeds] for every in (1, 10))
            ratios = [math.log(b["score"] / a["score"]) for a, b in zip(ones, tens)]
            mean, half = statistics.fmean(ratios), QUANTILE * statistics.stdev(ratios) / math.sqrt(len(ratios))
            verdict = "as good" if mean + half < MARGIN else "worse" if mean - half > MARGIN else "not resolved"
            cost = sum(r["seconds"] for r in tens) / sum(r["seconds"] for r in ones)
            scores = " | ".join(f"{statistics.fmean(r['score'] for r in group):.4g}" for group in (ones, tens))
            lines.append(
                f"| {task} ({STEPS[task]}) | {rule} | {scores} | {mean:+.3f} ± {half:.3f} | {verdict} | {cost:.2f} |"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, to which finished runs are appended")
    parser.add_argument("--data-dir", help="where data files are; else $BAYESGRAD_DATA")
    parser.add_argument("--write", type=Path, help="a Markdown file to write the table to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    runs = finished(arguments.out)
    present = {(r["task"], r["rule"], r["every"], r["seed"]) for r in runs}
    for seed in range(5):
        for task in STEPS:
            for rule in RULES:
                for every in (1, 10):
                    if (task, rule, every, seed) in present:
                        continue
                    runs.append(run(task, rule, every, seed, arguments.data_dir))
                    with arguments.out.open("a") as file:
                        file.write(json.dumps(runs[-1]) + "\n")
                    print(f"{task} {rule} every {every}, seed {seed}: {runs[-1]['score']:.4g}", flush=True)
    page.publish(table(runs), arguments.write)


if __name__ == "__main__":
    main()
