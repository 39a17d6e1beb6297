"""Choosing settings on what is not tested on: a grid, one seed apart, and the edge of the grid named."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from bayesgrad_lab.context import Context

SEARCH_SEED = 1000  # finals count from 0
Setting = tuple[float, ...]


def grid(*values: Sequence[float]) -> list[Setting]:
    """All combinations, of lr and a second hyper-parameter, say."""
    return list(itertools.product(*values))


def search(
    settings: Iterable[Setting],
    score: Callable[[Setting, int], float],
    seed: int = SEARCH_SEED,
    confirm: Sequence[int] = (),
) -> dict[Setting, float]:
    """The score of each setting, the lower the better; one that is not finite counts as infinite.

    Args:
        score: of a setting and a seed.
        confirm: further seeds. In the order of the first score, settings are scored with these as well, until the
            lowest mean is below what is left, and these means alone are returned: what went well by luck, close to
            divergence, is not chosen.
    """

    def finite(value: float) -> float:
        return value if math.isfinite(value) else math.inf

    tried = {setting: finite(score(setting, seed)) for setting in settings}
    if not confirm:
        return tried
    means: dict[Setting, float] = {}
    for setting in sorted(tried, key=tried.__getitem__):
        if means and min(means.values()) <= tried[setting]:
            break
        means[setting] = statistics.mean([tried[setting], *(score(setting, more) for more in confirm)])
    return means


def best(tried: Mapping[Setting, float]) -> Setting:
    """The setting with the lowest score, the first of equal ones."""
    return min(tried, key=tried.__getitem__)


def chosen(
    context: Context,
    title: str,
    names: Iterable[str],
    settings: Iterable[Setting],
    score: Callable[[Setting, int], float],
) -> tuple[Setting, dict[Setting, float]]:
    """The best setting and the score of each; which of the values chosen are at the edge of their grid is said."""
    tried = search(settings, score)
    setting = best(tried)
    words = [f"{name} {value:g}" for name, value in zip(names, setting)]
    at_edge = [words[i] for i in edges(tried, setting, 3)]
    if at_edge:
        context.say(f"{title}: {' and '.join(at_edge)} at the edge of the search")
    return setting, tried


def edges(settings: Iterable[Setting], chosen: Setting, least: int = 2) -> dict[int, str]:
    """Which values of the chosen setting are the lowest or highest tried, where there are `least` to choose from."""
    found = {}
    for i, (value, tried) in enumerate(zip(chosen, zip(*settings))):
        if len(set(tried)) >= least and value in (min(tried), max(tried)):
            found[i] = "lowest" if value == min(tried) else "highest"
    return found
