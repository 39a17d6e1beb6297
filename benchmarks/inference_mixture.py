"""Gaussian mixtures beside scikit-learn's.

Run: python benchmarks/inference_mixture.py [--rounds 5]

CPU seconds of one thread, so that other work on the machine does not count; medians over rounds in which the
competitors take turns. The time of a sweep is what more of them take: the start is not counted.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from sklearn.datasets import load_iris
from sklearn.mixture import BayesianGaussianMixture
from sklearn.mixture import GaussianMixture as Peer

from bayesgrad.models import GaussianMixture
from bayesgrad_lab.benchmarks import page

SHARED: dict[str, Any] = dict(init_params="random", random_state=0, reg_covar=0, tol=0)


def blobs(rng: np.random.Generator, places: np.ndarray, count: int) -> np.ndarray:
    return places[rng.integers(len(places), size=count)] + rng.normal(size=(count, places.shape[1]))


def ours(method: str, components: int, kind: str) -> Callable[[int], Any]:
    return lambda sweeps: GaussianMixture(components, method=method, covariance_type=kind, max_iter=sweeps, **SHARED)


def theirs(method: str, components: int, kind: str) -> Callable[[int], Any]:
    given: dict[str, Any] = dict(n_components=components, covariance_type=kind, **SHARED)
    if method == "em":
        return lambda sweeps: Peer(max_iter=sweeps, **given)
    prior: dict[str, Any] = dict(weight_concentration_prior_type="dirichlet_distribution")
    return lambda sweeps: BayesianGaussianMixture(max_iter=sweeps, **prior, **given)


def sweep(make: Callable[[int], Any], rows: np.ndarray, few: int, many: int) -> float:
    """CPU seconds of one more sweep."""
    spent = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sweeps in (few, many):
            model, start = make(sweeps), time.process_time()
            model.fit(rows)
            spent.append(time.process_time() - start)
    return (spent[1] - spent[0]) / (many - few)


def many_columns(rounds: int, iterations: int = 21, components: int = 10) -> list[str]:
    """Rows of the table: CPU milliseconds of a fit with diagonal covariances, of 200 columns."""
    lines = []
    for count in (2000, 10_000):
        rng = np.random.default_rng(0)
        rows = blobs(rng, rng.normal(size=(components, 200)), count)
        spent: tuple[list[float], list[float]] = [], []
        for number in range(rounds + 1):
            for times, side in zip(spent, (ours, theirs)):
                model, start = side("em", components, "diag")(iterations), time.process_time()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    model.fit(rows)
                if number:  # the first is to warm up
                    times.append(1e3 * (time.process_time() - start))
        (own, other), (mean, peer) = (list(map(average, spent)) for average in (statistics.median, statistics.mean))
        lines.append(f"| {count:,} x 200 | {own:.1f} | {other:.1f} | {own / other:.2f} ({mean / peer:.2f}) |")
    return lines


def resident() -> int:
    """MiB that the process holds now; where that is not known, the most it ever held."""
    table = Path("/proc/self/statm")
    if table.exists():
        return int(table.read_text().split()[1]) * resource.getpagesize() >> 20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def stream(method: str, total: int = 1_000_000, batch: int = 5000) -> list[str]:
    """Rows of the table: memory and the error of means on the way through a million rows."""
    rng = np.random.default_rng(0)
    places = 4 * rng.normal(size=(5, 10))
    model = GaussianMixture(5, method=method, total_samples=total, init_params="kmeans")
    lines, start, batches = [], time.process_time(), total // batch
    for number in range(1, batches + 1):
        model.partial_fit(blobs(rng, places, batch))
        if number in (1, batches // 20, batches // 4, batches):
            gaps = np.abs(model.means_[:, None] - places).max(-1).min(0).max()
            cells = [f"{number * batch:,}", str(resident()), f"{time.process_time() - start:.1f}", f"{gaps:.3f}"]
            lines.append(f"| partial_fit, {method} | " + " | ".join(cells) + " |")
    return lines


def section(rounds: int) -> list[str]:
    """Markdown of the tables."""
    torch.set_num_threads(1)
    streamed = [*stream("em"), *stream("svi")]
    rng = np.random.default_rng(0)
    iris, wide = np.asarray(load_iris(return_X_y=True)[0]), blobs(rng, 3 * rng.normal(size=(10, 10)), 100_000)
    tasks = [("iris, 150 x 4", iris, 3, kind, method, 10, 110) for method in ("vmp", "em") for kind in ("full",)]
    for kind in ("full", "tied", "diag", "spherical"):
        tasks += [("100,000 x 10", wide, 10, kind, method, 1, 4) for method in ("vmp", "em")]
    spent: dict[int, tuple[list[float], list[float]]] = {place: ([], []) for place in range(len(tasks))}
    for number in range(rounds + 1):
        print(f"  mixtures, round {number}/{rounds}", file=sys.stderr, flush=True)
        for place, (_, rows, components, kind, method, few, many) in enumerate(tasks):
            pair = [sweep(side(method, components, kind), rows, few, many) for side in (ours, theirs)]
            if number:  # the first is to warm up
                for times, value in zip(spent[place], pair):
                    times.append(value)
    lines = [
        "| data | K | method | covariances | ours, ms a sweep | scikit-learn, ms | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for place, (name, _, components, kind, method, _, _) in enumerate(tasks):
        own, other = (1e3 * statistics.median(times) for times in spent[place])
        lines.append(f"| {name} | {components} | {method} | {kind} | {own:.2f} | {other:.2f} | {own / other:.2f} |")
    return [
        "## Gaussian mixtures",
        "",
        f"CPU time of one sweep, bound included, medians of {rounds} rounds measured in turns, one thread",
        "each; scikit-learn's are `GaussianMixture` and `BayesianGaussianMixture` with a Dirichlet prior. The same",
        "random start; no tolerance.",
        "",
        *lines,
        "",
        "Many columns: EM with diagonal covariances and 10 components from the same random start, 21 iterations with",
        "reading and start; medians of 30 rounds in turns, with ratios of means in brackets.",
        "",
        "| rows x columns | ours, ms a fit | scikit-learn, ms | ratio |",
        "|---|---|---|---|",
        *many_columns(30),
        "",
        "A stream of a million rows of ten columns from five components, in batches of 5000:",
        "",
        "| | rows | memory, MiB | CPU seconds | largest error of a mean |",
        "|---|---|---|---|---|",
        *streamed,
    ]


def main() -> None:
    arguments = page.options(__doc__, rounds=5).parse_args()
    page.publish(section(arguments.rounds), arguments.write)


if __name__ == "__main__":
    main()
