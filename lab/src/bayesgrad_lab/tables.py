"""Small tables and series for the estimators of `bayesgrad.models`: 56 with two classes, 20 regressions, time series.

Files are read from a folder that the user names: a1a, australian_scale and breast_cancer_scale as MATLAB files, german
as german.data-numeric, in its folder `classification`. Everything else comes with scikit-learn and statsmodels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from bayesgrad_lab.datasets import Files

Pair = tuple[np.ndarray, np.ndarray]
HELD = 0.3  # part of the rows that is held out
MATLAB = ("a1a", "australian_scale", "breast_cancer_scale")


@dataclass(frozen=True)
class Table:
    """Training and test rows; columns that are constant in the training part are left out.

    Args:
        train_y, test_y: (n,): labels, numbers or counts.
    """

    name: str
    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray

    def standardised(self, *, targets: bool) -> Table:
        """Columns, and on request targets, with mean 0 and deviation 1 over the training part."""
        centre, unit = self.train_x.mean(0), self.train_x.std(0)
        train_x, test_x = ((x - centre) / unit for x in (self.train_x, self.test_x))
        mean, deviation = (self.train_y.mean(), self.train_y.std()) if targets else (0, 1)
        train_y, test_y = ((y - mean) / deviation if targets else y for y in (self.train_y, self.test_y))
        return Table(self.name, train_x, train_y, test_x, test_y)

    def capped(self, rows: int) -> Table:
        """At most this many rows of the training part: the first, whose order is random."""
        return of_parts(self.name, (self.train_x[:rows], self.train_y[:rows]), (self.test_x, self.test_y))


def of_parts(name: str, train: Pair, test: Pair) -> Table:
    varies = train[0].std(0) > 1e-12 * np.abs(train[0]).max(0)
    return Table(name, train[0][:, varies], train[1], test[0][:, varies], test[1])


def split(name: str, X: np.ndarray, y: np.ndarray, *, classes: bool = False) -> Table:
    """A random 30 % of the rows held out; of each class, for labels."""
    rng, held = np.random.default_rng(0), np.zeros(len(y), dtype=bool)
    groups = [np.flatnonzero(y == label) for label in np.unique(y)] if classes else [np.arange(len(y))]
    for group in groups:
        held[rng.permutation(group)[: round(HELD * len(group))]] = True
    train, test = rng.permutation(np.flatnonzero(~held)), np.flatnonzero(held)
    return of_parts(name, (X[train], y[train]), (X[test], y[test]))


def binary(data_dir: str | None = None) -> dict[str, Callable[[], Table]]:
    """56 sets with labels 0 and 1, not scaled.

    Raises:
        FileNotFoundError: on a call, of a file that is not there.
    """
    from sklearn import datasets

    found: dict[str, Callable[[], Table]] = {name: lambda name=name: _matlab(name, data_dir) for name in MATLAB}
    found["german"] = lambda: _german(data_dir)
    cancer = tuple(map(np.asarray, datasets.load_breast_cancer(return_X_y=True)))
    found["breast_cancer"] = lambda: split("breast_cancer", *cancer, classes=True)
    for name, classes in (("digits", 10), ("iris", 3), ("wine", 3)):
        for pair in combinations(range(classes), 2):
            found[f"{name} {pair[0]}-{pair[1]}"] = lambda name=name, pair=pair: _two(name, pair)
    return found


def _two(name: str, pair: tuple[int, int]) -> Table:
    from sklearn import datasets

    X, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    kept = np.isin(y, pair)
    return split(f"{name} {pair[0]}-{pair[1]}", X[kept], (y[kept] == pair[1]).astype(int), classes=True)


def _matlab(name: str, data_dir: str | None) -> Table:
    from scipy.io import loadmat
    from scipy.sparse import issparse

    given: Any = loadmat(Files("classification", data_dir, False).need(f"{name}.mat"))
    parts = {key: np.asarray(v.todense() if issparse(v) else v) for key, v in given.items() if key[0] != "_"}
    X, y = parts["X"].astype(float), (parts["y"].ravel() == parts["y"].max()).astype(int)
    if "X_te" not in parts:
        return split(name, X, y, classes=True)
    test = parts["X_te"].astype(float)
    X = np.pad(X, ((0, 0), (0, test.shape[1] - X.shape[1])))  # columns that are zero in all training rows
    return of_parts(name, (X, y), (test, (parts["y_te"].ravel() == parts["y_te"].max()).astype(int)))


def _german(data_dir: str | None) -> Table:
    values = np.loadtxt(Files("classification", data_dir, False).need("german.data-numeric"))
    return split("german", values[:, :-1], (values[:, -1] == values[:, -1].max()).astype(int), classes=True)


def regressions() -> dict[str, Pair]:
    """20 small regressions, of scikit-learn and invented: smooth, rough, without noise, with little else."""
    from sklearn import datasets

    rng = np.random.default_rng(0)
    X, y = datasets.load_diabetes(return_X_y=True)
    found = {"diabetes": (X[:100], y[:100]), "more diabetes": (X[300:380], y[300:380])}
    for name, n, noise, seed in (
        ("friedman1", 80, 0.1, 0), ("friedman1", 70, 1.0, 1), ("friedman2", 60, 0.0, 2), ("friedman2", 60, 100.0, 3),
        ("friedman3", 60, 0.0, 4), ("friedman3", 60, 0.3, 5),
    ):  # fmt: skip
        found[f"{name} {noise}"] = getattr(datasets, f"make_{name}")(n, noise=noise, random_state=seed)
    for columns, noise in ((5, 0.1), (5, 10.0), (12, 1.0)):
        found[f"linear {columns} {noise}"] = datasets.make_regression(60, columns, noise=noise, random_state=1)
    found["sparse"] = datasets.make_sparse_uncorrelated(80, random_state=0)
    for noise in (0.01, 0.1, 0.5):
        x = rng.uniform(0, 6, (50, 1))
        found[f"sine {noise}"] = x, np.sin(2 * x[:, 0]) + noise * rng.normal(size=50)
    for noise in (0.01, 0.2):
        x = rng.uniform(-1, 1, (60, 1))
        found[f"step {noise}"] = x, np.sign(x[:, 0]) + noise * rng.normal(size=60)
    x = rng.normal(size=(40, 3))
    found["noise"] = x, rng.normal(size=40)
    x = np.linspace(0, 1, 30)[:, None]
    found["line"] = x, 3 * x[:, 0] + 0.05 * rng.normal(size=30)
    x = rng.uniform(0, 10, (80, 1))
    found["chirp"] = x, np.sin(x[:, 0] ** 1.5) + 0.05 * rng.normal(size=80)
    return found


def series() -> dict[str, np.ndarray]:
    """Time series of statsmodels, (T,), in order; they are not scaled."""
    from statsmodels import datasets

    def data(name: str) -> Any:
        return getattr(datasets, name).load_pandas().data

    macro, danish = data("macrodata"), data("danish_data")
    found = {
        "nile": data("nile")["volume"],
        "sunspots": data("sunspots")["SUNACTIVITY"],
        "co2": data("co2")["co2"].dropna()[::4],
        "el nino": data("elnino").drop(columns="YEAR").to_numpy().ravel(),
        "copper": data("copper")["WORLDCONSUMPTION"],
        "danish money": danish["lrm"],
        "danish bonds": danish["ibo"],
        "german inflation": data("interest_inflation")["Dp"],
    }
    for name in ("realgdp", "realinv", "cpi", "tbilrate", "unemp", "infl"):
        found[f"macro {name}"] = macro[name]
    return {name: np.asarray(values, dtype=float) for name, values in found.items()}
