"""Logistic regression beside scikit-learn's newton-cholesky, which finds the mode only.

A part of benchmarks/inference.py: python benchmarks/inference.py --data-dir DIR --only glm.

Default settings, one thread each, CPU time; fits take turns in one process, after three rounds that are not counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.io
from sklearn.datasets import load_breast_cancer, load_digits, make_classification
from sklearn.linear_model import LogisticRegression

from bayesgrad.models import GLM


def tables(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Rows and labels; those of different units are standardised."""

    def standard(X: Any) -> np.ndarray:
        return (X - X.mean(0)) / X.std(0)

    X, y = load_breast_cancer(return_X_y=True)
    found: dict[str, Any] = {"breast cancer": (standard(X), y)}
    held = scipy.io.loadmat(folder / "classification" / "a1a.mat")
    found["a1a"] = np.asarray(held["X"].todense(), dtype=np.float64), (held["y"].ravel() > 0).astype(int)
    german = np.loadtxt(folder / "classification" / "german.data-numeric")
    found["german"] = standard(german[:, :-1]), german[:, -1].astype(int)
    X, y = load_digits(return_X_y=True)
    pair = (y == 3) | (y == 8)
    found["digits, 3 and 8"] = X[pair] / 16, y[pair]
    found["make_classification"] = make_classification(5000, 50, random_state=0)
    return found


def section(rounds: int, folder: str) -> list[str]:
    """Lines of Markdown."""
    titles = ["data", "rows x columns", "scikit-learn, ms", "delta, ms", "quadrature, ms", "delta", "quadrature"]
    lines = [f"| {' | '.join(titles)} |", "|---|---|---|---|---|---|---|"]
    for name, (X, y) in tables(Path(folder)).items():
        fits: list[Callable[[], object]] = [
            lambda: LogisticRegression(solver="newton-cholesky").fit(X, y),  # noqa: B023
            lambda: GLM("logistic", expectation="delta").fit(X, y),  # noqa: B023
            lambda: GLM("logistic").fit(X, y),  # noqa: B023
        ]
        times: list[list[float]] = [[] for _ in fits]
        for turn in range(rounds + 3):
            for fit, own in zip(fits, times):
                start = time.process_time()
                fit()
                if turn >= 3:
                    own.append(1e3 * (time.process_time() - start))
        pairs = [(statistics.mean(own), statistics.median(own)) for own in times]
        cells = [f"{mean:.1f} ({median:.1f})" for mean, median in pairs]
        cells += [f"{own[0] / pairs[0][0]:.2f} ({own[1] / pairs[0][1]:.2f})" for own in pairs[1:]]
        lines.append(f"| {name} | {X.shape[0]} x {X.shape[1]} | " + " | ".join(cells) + " |")
    return [
        "## Logistic regression beside scikit-learn",
        "",
        "`python benchmarks/inference.py --data-dir DIR --only glm`: CPU time, means over rounds, medians in brackets.",
        "`LogisticRegression(solver='newton-cholesky')` computes the mode, `delta` the mode and the covariance, and",
        "`quadrature` the best Gaussian; the last columns are their times relative to scikit-learn's.",
        "",
        *lines,
    ]
