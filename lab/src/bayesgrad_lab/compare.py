"""Comparisons by one protocol: learning rates chosen on held-out training data, then finals over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bayesgrad_lab.context import Context
from bayesgrad_lab.methods import Method, method
from bayesgrad_lab.results import Results, shown
from bayesgrad_lab.studies import Report, Setting, best, each, edges, search
from bayesgrad_lab.task import Task
from bayesgrad_lab.training import History, train

SHOWN = {"error": (100, 2), "ece": (100, 2), "steps/s": (1, 0), "memory": (1, 0)}  # factor and decimals in tables
AXES = {"error": ("error (%)", 100), "nll": ("loss (nats)", 1), "train_loss": ("loss (nats)", 1)}  # label and factor
AXES |= {"train_error": AXES["error"]}
SCORES = {
    "error": "error %",
    "nll": "NLL",
    "ece": "ECE %",
    "brier": "Brier",
    "steps/s": "steps/s",
    "memory": "MiB",  # the peak of the whole process
}


@dataclass(frozen=True)
class Budget:
    """Of choosing lr, the same for every method: factors of its usual lr, epochs, and training examples."""

    factors: tuple[float, ...]
    epochs: int
    examples: int | None

    def words(self) -> str:
        amount = "80 % of the training examples" if self.examples is None else f"{self.examples:,} training examples"
        count = f"{len(self.factors)} learning rates each"
        epochs = f"{self.epochs} epoch{'s' * (self.epochs > 1)}"
        return f"{count}, {epochs} of {amount} at a constant rate, chosen by validation NLL"


def compare(context: Context, task: Task, methods: Sequence[str], budget: Budget | None) -> dict[str, Results]:
    """Each method on one task: its lr searched for or as usual, then `context.seeds` finals."""
    short = task
    if budget:
        held = task.data.validation().part(budget.examples)
        short = replace(task, data=held, epochs=budget.epochs, milestones=())
        context.say(f"search on {task.network}: {budget.words()}")
    results = {}
    for name in methods:
        kind, tried = method(name), {}
        (lr,), study = kind.lrs, f"{task.key}-{name}"

        def validation(setting: Setting, seed: int, report: Report, kind: Method = kind) -> float:
            return train(context, short, kind, setting[0], seed, "search", report).final["nll"]

        def final(seed: int, kind: Method = kind) -> History:
            return train(context, task, kind, lr, seed)  # noqa: B023

        if budget:
            tried = search(context, study, ["lr"], [(lr * factor,) for factor in budget.factors], validation, seed=0)
            (lr,) = best(tried)
            if not math.isfinite(tried[lr,]):
                context.say(f"{name}: every learning rate of the search diverged; continuing with {lr:.2g}")
            elif edges(tried, (lr,)):
                context.say(f"{name}: the best learning rate, {lr:.2g}, is at the edge of the search")
        runs = each(context, study, {"lr": lr}, range(context.seeds), final, lambda one: one.final["nll"])
        results[name] = Results(kind.title, runs, History.score, {"lr": lr}, tried)
    return results


def table(results: dict[str, Results], scores: dict[str, str]) -> dict[str, Any]:
    """A table for a report: a row for each method, mean ± standard error for each score (key -> column title)."""
    rows = []
    for one in results.values():
        cells = [one.title, f"{one.lr:.2g}"]
        for score in scores:
            factor, digits = SHOWN.get(score.removeprefix("best "), (1, 3))
            cells.append(shown(one.mean(score), f".{digits}f", factor))
        rows.append(cells)
    return {"columns": ["optimizer", "lr", *scores.values()], "rows": rows}


def curves(
    results: dict[str, Results], names: dict[str, str]
) -> tuple[dict[str, dict[str, list[list[float]]]], str, list[str]]:
    """Learning curves for `figures.curves`: panels of columns of the history (title -> column), and their labels."""
    panels = {
        title: {
            one.title: [[AXES[name][1] * row[name] for row in run.rows] for run in one.runs] for one in results.values()
        }
        for title, name in names.items()
    }
    return panels, "epoch", [AXES[name][0] for name in names.values()]
