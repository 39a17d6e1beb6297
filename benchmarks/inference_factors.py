"""Factor analysis beside scikit-learn's.

Run: python benchmarks/inference_factors.py [--rounds 3]
"""

from __future__ import annotations

import os
import resource
import statistics
import time
import warnings
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.decomposition import FactorAnalysis as Peer

from bayesgrad.models import FactorAnalysis
from bayesgrad_lab.benchmarks import page

TOL = 1e-5  # of the log-likelihood of a row, for both; scikit-learn's tol is of the sum over rows


def cpu(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def rows(n: int, D: int, K: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, K)) @ rng.normal(size=(K, D)) + rng.normal(size=(n, D)) * rng.uniform(0.3, 1.5, D)


def digits() -> np.ndarray:
    """Without pixels that hardly vary, whose noise would go to zero."""
    X = np.asarray(load_digits(return_X_y=True)[0])
    return X[:, X.std(0) > 0.5]


def fits(rounds: int) -> list[str]:
    cases = {
        "digits, 10 factors": (digits(), 10),
        "10^5 x 10, 3 factors": (rows(100_000, 10, 3), 3),
        "2000 x 200, 10 factors": (rows(2000, 200, 10), 10),
        "300 x 1000, 5 factors": (rows(300, 1000, 5), 5),
    }
    lines = []
    for name, (X, K) in cases.items():
        found: dict[str, tuple[int, float]] = {}

        def ours(X: np.ndarray = X, K: int = K, found: dict = found) -> None:
            model = FactorAnalysis(K, tol=TOL).fit(X)
            found["ours"] = model.n_iter_, model.score(X)

        def theirs(X: np.ndarray = X, K: int = K, found: dict = found) -> None:
            model = Peer(K, tol=TOL * len(X)).fit(X)
            found["theirs"] = model.n_iter_, model.score(X)

        ours()
        times = [(cpu(ours), cpu(theirs)) for _ in range(rounds)]
        a, b = (statistics.median(part) for part in zip(*times))
        (sweeps, score), (steps, other) = found["ours"], found["theirs"]
        lines.append(
            f"| {name} | {1e3 * a:.0f} ({sweeps}) | {1e3 * b:.0f} ({steps}) | {a / b:.2f} | {score:.4f} | {other:.4f} |"
        )
    return lines


def holes(rounds: int) -> str:
    X = rows(2000, 20, 3)
    X[np.random.default_rng(1).uniform(size=X.shape) < 0.1] = np.nan
    whole = np.where(np.isnan(X), 0.0, X)
    settings: dict[str, Any] = {"max_iter": 20, "tol": 0}
    FactorAnalysis(3, **settings).fit(X)
    times = [
        (cpu(lambda: FactorAnalysis(3, **settings).fit(X)), cpu(lambda: FactorAnalysis(3, **settings).fit(whole)))
        for _ in range(rounds)
    ]
    a, b = (statistics.median(part) / 20 for part in zip(*times))
    return (
        f"With a tenth of 2000 x 20 values missing ({len(np.unique(np.isnan(X), axis=0))} patterns), a sweep takes "
        f"{1e3 * a:.1f} ms, without gaps {1e3 * b:.1f} ms."
    )


def stream() -> str:
    """Memory over a million rows in batches of 5000."""
    model, seconds, early = FactorAnalysis(3), 0.0, 0
    for count in range(200):
        batch = rows(5000, 20, 3, seed=0) + np.random.default_rng(count).normal(size=(5000, 1))
        seconds += cpu(lambda: model.partial_fit(batch))  # noqa: B023
        if count == 9:
            early = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - early) / 1024
    return (
        f"A million rows of 20 columns through `partial_fit`, 5000 at a time: {seconds:.1f} s, and the peak of "
        f"memory grew by {grown:.0f} MiB after the tenth batch."
    )


def section(rounds: int) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        streamed = stream()  # before anything else has raised the peak of memory
        table = fits(rounds)
        gaps = holes(rounds)
    return [
        "## Factor analysis",
        "",
        "Maximum likelihood beside scikit-learn's `FactorAnalysis` (randomised SVD, its default), both until a row's "
        f"log-likelihood changes by less than {TOL:g}; CPU milliseconds of one thread, with the number of sweeps or "
        "steps. Its steps use all rows, ours use X'X, unless there are twice as many columns as rows.",
        "",
        "| data | ours (sweeps) | scikit-learn (steps) | ratio | ours, log-likelihood of a row | scikit-learn's |",
        "|---|---|---|---|---|---|",
        *table,
        "",
        gaps,
        streamed,
        "",
    ]


def main() -> None:
    arguments = page.options(__doc__, rounds=3).parse_args()
    page.publish(section(arguments.rounds), arguments.write)


if __name__ == "__main__":
    main()
