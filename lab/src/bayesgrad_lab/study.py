"""Comparisons by one protocol: learning rates chosen on held-out training data, then finals over seeds."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from bayesgrad_lab.dataset import Dataset
from bayesgrad_lab.methods import method
from bayesgrad_lab.report import Estimate
from bayesgrad_lab.runner import History, Progress, Trial, read_tensors, train, write_tensors

SCALES = ("smoke", "laptop", "paper")
mean_and_error = Estimate.of


@dataclass(frozen=True)
class Context:
    """Where and how an experiment runs.

    Args:
        folder: the run's own.
        say: prints a line for people.
        progress: shows a trial as it goes.
        expect: called with the epochs of a trial and the steps of each.
        warned: what optimizers have warned of, which is said once.
    """

    folder: Path
    scale: str = "laptop"
    seeds: int = 3
    data_dir: str | None = None
    download: bool = False
    device: str = "cpu"
    say: Callable[[str], None] = print
    progress: Progress | None = None
    expect: Callable[[Trial, int, int], None] | None = None
    warned: set[str] = field(default_factory=set)

    def run(self, trial: Trial, data: Dataset) -> History:
        if self.expect:
            self.expect(trial, trial.epochs, -(-len(data.train_x) // trial.batch_size))
        with self.hearing():
            return train(trial, data, self.folder, self.device, self.progress)

    @contextlib.contextmanager
    def hearing(self) -> Iterator[None]:
        """Says what is warned of inside, each thing once in a run."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", category=UserWarning)
            yield
        for words in dict.fromkeys(str(warning.message) for warning in caught):
            if words not in self.warned:
                self.warned.add(words)
                self.say(words)

    def once(self, key: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """What `compute` returns, from the run's folder where an earlier, interrupted run has left it."""
        path = self.folder / "trials" / f"{key}.pt"
        value = read_tensors(path) if path.exists() else None
        if value is None:
            value = compute()
            write_tensors(path, value)
        return value


@dataclass(frozen=True)
class Search:
    """A budget for choosing lr, the same for every method: factors of its usual lr, epochs, and training examples."""

    factors: tuple[float, ...]
    epochs: int
    examples: int | None

    def words(self) -> str:
        amount = "80 % of the training examples" if self.examples is None else f"{self.examples:,} training examples"
        count = f"{len(self.factors)} learning rates each"
        epochs = f"{self.epochs} epoch{'s' * (self.epochs > 1)}"
        return f"{count}, {epochs} of {amount} at a constant rate, chosen by validation NLL"


@dataclass(frozen=True)
class Finals:
    """What became of one method: the lr that was chosen and a history for each seed."""

    lr: float
    histories: list[History]
    tried: dict[float, float]

    def mean(self, score: str) -> tuple[float, float]:
        """Mean and standard error over seeds of a final score (or of a cost)."""
        return mean_and_error([self.value(history, score) for history in self.histories])

    @staticmethod
    def value(history: History, score: str) -> float:
        if score == "steps/s":
            return history.cost["steps"] / max(history.cost["seconds"], 1e-9)
        if score == "memory":
            return history.cost["memory"] / 2**20
        if score.startswith("best "):
            return min(row[score.removeprefix("best ")] for row in history.rows)
        return history.final[score]


def compare(
    context: Context, data: Dataset, methods: Sequence[str], base: Trial, search: Search | None
) -> dict[str, Finals]:
    """Each method on one network and data set: its lr searched for or as usual, then `context.seeds` finals.

    Args:
        base: what all trials share; its method, lr and seed are replaced.
    """
    base = replace(base, data=data.name)
    held_out = data.validation().part(search.examples) if search else None
    if search:
        context.say(f"search on {base.network}: {search.words()}")
    results = {}
    for name in methods:
        usual = method(name).lr
        tried: dict[float, float] = {}
        for factor in search.factors if search else ():
            trial = replace(base, method=name, lr=usual * factor, seed=0, purpose="search")
            trial = replace(trial, epochs=search.epochs, milestones=()) if search else trial
            nll = context.run(trial, held_out).final["nll"] if held_out else math.nan
            tried[trial.lr] = nll if math.isfinite(nll) else math.inf
        lr = min(tried, key=tried.__getitem__) if tried else usual
        if tried and not math.isfinite(tried[lr]):
            context.say(f"{name}: every learning rate of the search diverged; continuing with {lr:.2g}")
        elif len(tried) > 1 and lr in (min(tried), max(tried)):
            context.say(f"{name}: the best learning rate, {lr:.2g}, is at the edge of the search")
        finals = [context.run(replace(base, method=name, lr=lr, seed=seed), data) for seed in range(context.seeds)]
        results[name] = Finals(lr, finals, tried)
    return results


def table(results: dict[str, Finals], scores: dict[str, str]) -> dict[str, Any]:
    """A table for a report: a row for each method, mean ± standard error for each score (key -> column title)."""
    rows = []
    for name, finals in results.items():
        cells = [method(name).title, f"{finals.lr:.2g}"]
        for score in scores:
            mean, error = finals.mean(score)
            factor, digits = SHOWN.get(score.removeprefix("best "), (1, 3))
            text = f"{factor * mean:.{digits}f}" if math.isfinite(mean) else "diverged"
            cells.append(f"{text} ± {factor * error:.{digits}f}" if math.isfinite(error) else text)
        rows.append(cells)
    return {"columns": ["optimizer", "lr", *scores.values()], "rows": rows}


SHOWN = {"error": (100, 2), "ece": (100, 2), "steps/s": (1, 0), "memory": (1, 0)}  # factor and decimals in tables
SCORES = {
    "error": "error %",
    "nll": "NLL",
    "ece": "ECE %",
    "brier": "Brier",
    "steps/s": "steps/s",
    "memory": "MiB",  # the peak of the whole process
}
