"""Where and how an experiment runs, and what its trials are called."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from bayesgrad_lab import datasets
from bayesgrad_lab.dataset import Dataset
from bayesgrad_lab.store import held, read_tensors, write_tensors

if TYPE_CHECKING:
    from bayesgrad_lab.training import Step


@dataclass(frozen=True)
class Trial:
    """One training run, by everything that its numbers depend on inside of a run's folder.

    Args:
        purpose: "search" or "final".
        task: the key of what is trained; see `Task.key`.
        method: the kind of method; "" where there is one only.
        settings: hyper-parameters by name.
        seed: of the weights and of the order of examples; None where the task has one of its own.
    """

    purpose: str
    task: str
    method: str
    settings: Mapping[str, float] = field(default_factory=dict)
    seed: int | None = None

    @property
    def key(self) -> str:
        """The name of its files."""
        numbers = [f"{name}{value:g}" for name, value in self.settings.items()]
        seed = [] if self.seed is None else [f"seed{self.seed}"]
        return "-".join(filter(None, [self.purpose, self.task, self.method, *numbers, *seed]))


Progress = Callable[[Trial, int, int, float, float, float], None]  # trial, epoch, step, loss, error, steps/s


@dataclass(frozen=True)
class Context:
    """Where and how an experiment runs.

    Args:
        folder: the run's own.
        say: prints a line for people.
        progress: shows a trial as it goes.
        expect: called with the epochs of a trial and the steps of each.
        warned: what optimizers have warned of, which is said once.
        storage: of the trials of searches, where it is not a file in the folder; see `Study`.
        pruner: that gives up trials of a search, by name.
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
    storage: str = ""
    pruner: str = ""

    @property
    def clock(self) -> Callable[[], float]:
        """Of processor time on a CPU, so that other processes do not count."""
        return time.process_time if self.device == "cpu" else time.perf_counter

    def load(self, name: str, examples: int | None = None) -> Dataset:
        """The data set of that name, with so many training examples."""
        return datasets.load(name, self.data_dir, self.download).part(examples)

    def warn(self, words: str) -> None:
        """Says something once in a run."""
        if words not in self.warned:
            self.warned.add(words)
            self.say(words)

    @contextlib.contextmanager
    def hearing(self) -> Iterator[None]:
        """Says what is warned of inside, each thing once in a run."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", category=UserWarning)
            warnings.filterwarnings("ignore", ".* that are not finite", RuntimeWarning)  # trials that diverge say so
            yield
        for warning in caught:
            self.warn(str(warning.message))

    def once(self, key: str | Trial, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """What `compute` returns, from the run's folder where an earlier, interrupted run has left it."""
        path = self.folder / "trials" / f"{key.key if isinstance(key, Trial) else key}.pt"
        value = read_tensors(path) if path.exists() else None
        if value is not None:
            return value
        with held(path):
            value = read_tensors(path) if path.exists() else None  # another process may have made it meanwhile
            if value is None:
                with self.hearing():
                    value = compute()
                write_tensors(path, value)
        return value

    def watch(self, trial: Trial, steps: Iterator[Step], epochs: int, each: int, done: int = 0) -> Iterator[Step]:
        """The same steps, with progress shown.

        Args:
            each: steps of an epoch.
            done: steps before the first of these.
        """
        if self.expect:
            self.expect(trial, epochs, each)
        for step in steps:
            yield step
            epoch, at = divmod(done + step.number, each)
            if self.progress and not step.lost and (at % 10 == 9 or at + 1 == each):
                rate = 1 / step.seconds if step.seconds else math.nan
                self.progress(trial, epoch, at + 1, step.loss, step.error, rate)
