"""`bayesgrad demo`: four things that the library is for, measured in about two minutes and shown on one page."""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesgrad_lab import demo_stories, race
from bayesgrad_lab.context import Context, Trial
from bayesgrad_lab.demo_runs import RACERS, SIZES, measured
from bayesgrad_lab.demo_stories import TITLES
from bayesgrad_lab.report import NO_VERDICT, Report
from bayesgrad_lab.results import Results
from bayesgrad_lab.studies import SEARCH_SEED, best, edges, grid

VERSION = 1  # of what is measured: runs of another version are not resumed
PROCESSES = 2
NAMES = {"adamw": ("lr", "weight_decay"), "ivon": ("lr", "hess_init")}
GRIDS = {
    "adamw": grid((3e-3, 1e-2, 3e-2, 1e-1), (0.1, 0.3, 1.0)),
    "ivon": grid((0.5, 1.0, 2.0, 4.0), (0.03, 0.1, 0.3)),
}


def run(context: Context) -> Report:
    """Searches and all that needs none first, then finals with the chosen settings; a report of four stories."""
    smoke, seeds = context.scale == "smoke", range(context.seeds)
    settings = {("classifier", one): _named(one)[: 2 if smoke else None] for one in GRIDS}
    points = {one: SIZES[context.scale].race.points(entrant) for one, entrant in RACERS.items()}
    settings |= {("race", one): some for one, some in points.items()}
    trials = [Trial("search", *key, one, SEARCH_SEED) for key, some in settings.items() for one in some]
    single = {key: [Trial("final", *key, {}, seed) for seed in seeds] for key in ONCE}
    with _Pool(context) as pool:
        pool.measure("demo: searches, bands and samples", [*trials, *(one for some in single.values() for one in some)])
        chosen = {key: _chosen(context, key, some) for key, some in settings.items()}
        finals = {key: [Trial("final", *key, one.settings, seed) for seed in seeds] for key, one in chosen.items()}
        pool.measure("demo: finals", [one for some in finals.values() for one in some])
    every = {key: [measured(context, one) for one in some] for key, some in {**single, **finals}.items()}
    report = Report("bayesgrad in four measurements")
    report.verdict = NO_VERDICT if smoke else ""
    report.stories = [story(every, chosen) for story in demo_stories.STORIES]
    report.settings["protocol"] = (
        f"one thread in each of {PROCESSES} processes; settings are searched on validation data with one seed apart, "
        "as many for AdamW as for ours; test data are used once, for the final runs; differences are called better or "
        "worse where a paired 95 % t interval over seeds excludes zero"
    )
    return report


ONCE = (("band", ""), ("samples", "langevin"), ("samples", "nuts"))  # what needs no search


def _named(method: str) -> list[dict[str, float]]:
    return [dict(zip(NAMES[method], values)) for values in GRIDS[method]]


# --- running ---


class _Pool:
    """Two processes of one thread each, which measure trials that the run's folder does not have."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.pool = ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn"), _begin)

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: Any) -> None:
        self.pool.shutdown(cancel_futures=True)

    def measure(self, title: str, trials: Sequence[Trial]) -> None:
        context, whole = self.context, Trial(title, "", "")
        if context.expect:
            context.expect(whole, len(trials), 1)
        left = [trial for trial in trials if not (context.folder / "trials" / f"{trial.key}.pt").exists()]
        work = [self.pool.submit(_measured, context.folder, context.scale, trial) for trial in left]
        for done, future in enumerate(as_completed(work), len(trials) - len(left)):
            for words in future.result():
                context.warn(words)
            if context.progress:
                context.progress(whole, done, 1, math.nan, math.nan, math.nan)


def _begin() -> None:
    """In each process of the pool, which ends when the process that started it is killed."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    if parent:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _measured(folder: Path, scale: str, trial: Trial) -> list[str]:
    """Measures a trial in a process of the pool; returns what a final run warned of."""
    said: list[str] = []
    measured(Context(folder, scale, say=said.append), trial)
    return said if trial.purpose == "final" and trial.task != "race" else []


def _chosen(context: Context, key: tuple[str, str], settings: Sequence[Mapping[str, float]]) -> Results:
    """The setting with the lowest validation loss."""
    task, method = key
    runs = [measured(context, Trial("search", task, method, one, SEARCH_SEED)) for one in settings]
    losses = [_validation(one) for one in runs]
    tried = {tuple(one.values()): loss for one, loss in zip(settings, losses)}
    setting = dict(zip(settings[0], best(tried)))
    words = ", ".join(f"{name} {value:.3g}" for name, value in setting.items())
    at_edge = [name for i, name in enumerate(setting) if i in edges(tried, tuple(setting.values()), 3)]
    note = f" ({' and '.join(at_edge)} at the edge of the search)" if at_edge and task == "classifier" else ""
    context.say(f"{task}, {TITLES[method]}: {words}{note}, best of {len(tried)} by validation loss, {min(losses):.4g}")
    return Results(TITLES[method], runs, settings=setting, tried=tried, edges=tuple(at_edge))


def _validation(run: Mapping[str, Tensor]) -> float:
    loss = race.at(run["curve"], math.inf) if "curve" in run else demo_stories.scores(run)["nll"]
    return loss if math.isfinite(loss) else math.inf
