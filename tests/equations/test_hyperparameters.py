"""The search for hyperparameters of Gaussian processes against scikit-learn's, on sets where searches go astray."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn import datasets
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process import kernels as peers
from sklearn.preprocessing import StandardScaler

from bayesgrad.models import GaussianProcess
from bayesgrad.models.hyperparameters import ProcessModel, maximise
from bayesgrad.models.kernels import RBF
from bayesgrad.models.observations import Gaussian, get_observation
from bayesgrad_lab.tables import regressions

RANGE, SQUARES = (1e-5, 1e5), (1e-10, 1e10)
Data = tuple[np.ndarray, np.ndarray]


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore:.*reached the end of the range")
@pytest.mark.parametrize("name", regressions())
def test_evidence_is_not_below_scikit_learns(name: str) -> None:
    """With a length for each column, the same ranges and the same start: at most 0.01 below."""
    X, y = regressions()[name]
    X, y = StandardScaler().fit_transform(X), (y - y.mean()) / y.std()
    lengths = np.ones(X.shape[1])
    kernel = peers.ConstantKernel(1.0, RANGE) * peers.RBF(lengths, RANGE) + peers.WhiteKernel(
        Gaussian().scale ** 2, SQUARES
    )
    other = GaussianProcessRegressor(kernel, alpha=0.0).fit(X, y)
    model = GaussianProcess(1.0 * RBF(torch.as_tensor(lengths))).fit(X, y)
    assert model.elbo_ >= other.log_marginal_likelihood_value_ - 0.01


def classifications() -> dict[str, Data]:
    rng = np.random.default_rng(0)
    iris, wine = datasets.load_iris(return_X_y=True), datasets.load_wine(return_X_y=True)
    cancer = datasets.load_breast_cancer(return_X_y=True)
    found = {
        "blobs": datasets.make_blobs(21, centers=2, random_state=0),
        "cancer": (cancer[0][:100], cancer[1][:100]),
        "iris, apart": (iris[0][:100:2], iris[1][:100:2]),
        "iris, mixed": (iris[0][50::2], iris[1][50::2]),
        "wine": (wine[0][:130], wine[1][:130]),
        "moons": datasets.make_moons(60, noise=0.1, random_state=0),
        "noisy moons": datasets.make_moons(60, noise=0.4, random_state=0),
        "circles": datasets.make_circles(60, noise=0.1, factor=0.5, random_state=0),
        "five columns": datasets.make_classification(70, 5, random_state=0),
        "twenty columns": datasets.make_classification(60, 20, random_state=1),
        "far apart": datasets.make_blobs(40, centers=2, random_state=3),
        "no pattern": (rng.normal(size=(50, 2)), rng.integers(2, size=50)),
    }
    return {name: (StandardScaler().fit_transform(X), y) for name, (X, y) in found.items()}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore:.*reached the end of the range")
@pytest.mark.parametrize("name", classifications())
def test_classification_at_the_best_hyperparameters(name: str) -> None:
    """The bound is finite, below the evidence (which Laplace's method estimates) and not below that at scikit-learn's
    hyperparameters, which belong to the logistic function."""
    X, y = classifications()[name]
    other = GaussianProcessClassifier(peers.ConstantKernel(1.0, RANGE) * peers.RBF(1.0, RANGE)).fit(X, y)
    constant, rbf = other.kernel_.k1, other.kernel_.k2  # pyright: ignore
    kernel = float(constant.constant_value) * RBF(float(rbf.length_scale))
    at = GaussianProcess(kernel, "logistic", optimizer=None).fit(X, y)
    for likelihood in ("logistic", "probit"):
        model = GaussianProcess(likelihood=likelihood).fit(X, y)
        numbers = [float(number) for number in model.kernel_.hyperparameters().values()]
        assert all(1e-5 <= number <= 1e5 + 1e-9 for number in numbers)
        assert -len(y) * math.log(2) - 1e-3 <= model.elbo_ < 0
        assert np.isfinite(model.predict_proba(X)).all()
        if likelihood == "logistic":
            assert model.elbo_ >= at.elbo_ - 1e-3


def test_more_than_two_classes_that_are_far_apart() -> None:
    """Blobs at the scale they were made in, whose search ended with hyperparameters that are NaN."""
    X, y = datasets.make_blobs(21, random_state=0)
    model = GaussianProcess(likelihood="logistic").fit(X, y)
    assert math.isfinite(model.elbo_)
    assert model.score(X, y) == 1.0
    assert all(math.isfinite(float(n)) for kernel in model.kernel_ for n in kernel.hyperparameters().values())


def test_probit_on_all_rows_of_breast_cancer() -> None:
    """Standardised, 569 rows: the search ended with hyperparameters that are NaN."""
    X, y = datasets.load_breast_cancer(return_X_y=True)
    model = GaussianProcess(likelihood="probit").fit(X := StandardScaler().fit_transform(X), y)
    assert all(1e-5 <= float(number) <= 1e5 for number in model.kernel_.hyperparameters().values())
    assert -65 < model.elbo_ < 0
    assert model.score(X, y) > 0.98


@pytest.mark.parametrize("name", ["friedman1 1.0", "linear 5 10.0", "sine 0.1", "step 0.2", "noise"])
def test_outliers_at_the_best_hyperparameters(name: str) -> None:
    """Student's t: the bound is finite, and not below the one at the hyperparameters of Gaussian noise."""
    X, y = regressions()[name]
    X, y = StandardScaler().fit_transform(X), (y - y.mean()) / y.std()
    y[::9] += 3.0
    other = GaussianProcess().fit(X, y)
    seen = get_observation("student-t").with_hyperparameters({"scale": torch.tensor(float(other.likelihood_.scale))})
    start = GaussianProcess(other.kernel_, seen, optimizer=None).fit(X, y).elbo_
    model = GaussianProcess(other.kernel_, seen).fit(X, y)
    assert math.isfinite(model.elbo_)
    assert model.elbo_ >= start - 1e-6


def wall(value: float):
    """(log length - 3)² to the left of 2, and nothing that can be computed to the right of it."""
    visits: list[float] = []

    def loss(model: ProcessModel) -> torch.Tensor:
        (length,) = model.kernel.hyperparameters().values()
        visits.append(float(length.detach().log()))
        if visits[-1] > 2:
            if math.isnan(value):
                raise ValueError("no bound")
            return length * value
        return (length.log() - 3).square()

    return loss, visits


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_best_hyperparameters_are_kept(value: float) -> None:
    """Where the bound fails or is infinite, the search turns back, and ends with the best point that it saw."""
    loss, visits = wall(value)
    options = dict(max_eval=40, restarts=0, random_state=0)
    model = ProcessModel(RBF(1.0), get_observation("logistic"))
    found, kept = maximise(model, loss, lambda: visits[-1], torch.device("cpu"), **options)  # pyright: ignore
    (length,) = found.kernel.hyperparameters().values()
    best = max(visit for visit in visits if visit <= 2)
    assert max(visits) > 2
    assert 1 < best <= 2
    assert kept == best
    assert abs(float(length.log()) - best) < 1e-12


def test_restarts_find_a_lower_minimum() -> None:
    """Two valleys in the logarithm of a length: at -3, where the start leads, with a loss of 1, and at 3, of 0."""

    def loss(model: ProcessModel) -> torch.Tensor:
        (length,) = model.kernel.hyperparameters().values()
        at = length.log()
        return torch.minimum(1 + (at + 3).square(), (at - 3).square())

    model, ends = ProcessModel(RBF(0.5), get_observation("logistic")), []
    for restarts in (0, 4):
        options = dict(max_eval=40, restarts=restarts, random_state=0)
        found, _ = maximise(model, loss, lambda: 0, torch.device("cpu"), **options)  # pyright: ignore
        ends.append(float(next(iter(found.kernel.hyperparameters().values())).log()))
    np.testing.assert_allclose(ends, [-3.0, 3.0], atol=1e-4)
    with pytest.raises(ValueError, match="n_restarts_optimizer must be a non-negative number, got -1"):
        GaussianProcess(n_restarts_optimizer=-1).fit(np.zeros((3, 1)), np.arange(3.0))


def test_a_bound_that_is_never_finite() -> None:
    model = ProcessModel(RBF(1.0), get_observation("logistic"))
    options = dict(max_eval=5, restarts=0, random_state=0)
    with pytest.raises(ValueError, match="the bound is not finite for any hyperparameters that were tried"):
        maximise(
            model, lambda own: next(iter(own.hyperparameters().values())) * math.nan, lambda: 0, torch.device("cpu"),
            **options,  # pyright: ignore
        )  # fmt: skip
