"""Results over seeds: means, standard errors, paired differences, and how they are written."""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Value = tuple[float, float]  # a mean and its standard error


def mean_and_error(values: Sequence[float]) -> Value:
    """Both nan where any value is not finite: a method that diverged for one seed has no mean."""
    if not all(map(math.isfinite, values)):
        return math.nan, math.nan
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def less(values: Sequence[float], others: Sequence[float]) -> Value:
    """Mean and standard error of paired differences."""
    return mean_and_error([a - b for a, b in zip(values, others)])


def shown(value: Value, form: str = ".3f", factor: float = 1, error_form: str = "", offset: float = 0) -> str:
    """A mean ± its standard error, where there is one; "diverged" where there is no mean."""
    mean, error = value
    if not math.isfinite(mean):
        return "diverged"
    spread = f" ± {abs(factor) * error:{error_form or form.lstrip('+')}}" if math.isfinite(error) else ""
    mean = offset + factor * mean if offset else factor * mean  # which may be -0
    return f"{mean:{form}}{spread}"


def margin(value: Value, errors: float = 2) -> float:
    """Two standard errors; zero where none is known, from one seed."""
    return errors * value[1] if math.isfinite(value[1]) else 0.0


def sign(value: Value, errors: float = 2) -> int:
    """-1 or 1 where a difference is more than two standard errors from zero."""
    mean, reach = value[0], margin(value, errors)
    return int(mean > reach) - int(mean < -reach)


def outcome(held: Sequence[bool]) -> str:
    """How much of a claim holds, in the words that a verdict begins with."""
    return "Holds" if all(held) else "Holds in part" if any(held) else "Does not hold"


@dataclass(frozen=True)
class Results:
    """What was recorded for one method, or one way to predict: a run for each seed.

    Args:
        title: for tables and legends.
        runs: what each seed has left.
        score: (run, name) -> a value, for names of scores.
        settings: hyper-parameters that were chosen.
        tried: the score of each setting that a search tried; see `search`.
        edges: in words, which of those chosen are at the edge of the search.
        of: what else the results belong to, for whoever looks for them.
    """

    title: str
    runs: Sequence[Any]
    score: Callable[[Any, str], float] = operator.getitem
    settings: Mapping[str, float] = field(default_factory=dict)
    tried: Mapping[tuple[float, ...], float] = field(default_factory=dict)
    edges: tuple[str, ...] = ()
    of: Any = None

    @property
    def lr(self) -> float:
        return self.settings["lr"]

    def values(self, name: str) -> list[float]:
        """A score for each seed."""
        return [self.score(run, name) for run in self.runs]

    def mean(self, name: str) -> Value:
        """Mean and standard error over seeds."""
        return mean_and_error(self.values(name))

    def less(self, other: Results, name: str) -> Value:
        """Mean and standard error, over paired seeds, of this score less the other's."""
        return less(self.values(name), other.values(name))


def attempts(results: Mapping[str, Results], form: str = ".3f", factor: float = 1) -> dict[str, Any]:
    """A table for a report: what the search of each method tried, each setting with its score."""
    rows = [
        [title, *(f"{', '.join(f'{v:g}' for v in key)}: {factor * score:{form}}" for key, score in one.tried.items())]
        for title, one in results.items()
    ]
    return {"columns": ["method", *map(str, range(1, max(map(len, rows))))], "rows": rows}
