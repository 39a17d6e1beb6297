"""GaussianMixture: scikit-learn's estimator checks, NumPy and torch inputs, invalid inputs."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils.estimator_checks import estimator_checks_generator
from torch.testing import assert_close

from bayesgrad.models import GaussianMixture
from bayesgrad.models.checks import near_mean
from bayesgrad.models.covariances import COVARIANCES
from bayesgrad.models.gaussian_mixture import METHODS

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3)) + 4 * RNG.normal(size=(2, 3))[np.arange(60) % 2]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("method", "kind"), [("em", "full"), ("em", "tied"), ("vmp", "full"), ("vmp", "spherical"), ("svi", "diag")]
)
def test_scikit_learns_checks(method: str, kind: str) -> None:
    """All of them; the one for other packages' arrays is skipped by scikit-learn where SciPy is not set up for it."""
    names = []
    for estimator, check in estimator_checks_generator(GaussianMixture(method=method, covariance_type=kind)):
        name = check.func.__name__
        if name != "check_array_api_input":
            check(estimator)
            names.append(name)
    assert len(names) >= 40


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", list(COVARIANCES))
def test_tensors_in_tensors_out(method: str, kind: str) -> None:
    model = GaussianMixture(2, method=method, covariance_type=kind, tol=1e-3, batch_size=20)
    twin = clone(model).fit(torch.as_tensor(X))
    model.fit(X)
    shapes = {"full": (2, 3, 3), "tied": (3, 3), "diag": (2, 3), "spherical": (2,)}
    assert model.covariances_.shape == model.precisions_.shape == model.precisions_cholesky_.shape == shapes[kind]
    names = [name for name in vars(model) if name.endswith("_") and isinstance(getattr(model, name), np.ndarray)]
    assert len(names) == (5 if method == "em" else 10)
    for name in names:
        assert_close(getattr(twin, name), torch.as_tensor(getattr(model, name)), rtol=0, atol=0)
    assert model.elbo_ == twin.elbo_
    for verb in ("predict", "predict_proba", "score_samples"):
        found, other = getattr(model, verb)(X[:4]), getattr(twin, verb)(torch.as_tensor(X[:4]))
        assert isinstance(found, np.ndarray)
        assert_close(other, torch.as_tensor(found), rtol=0, atol=0)
    assert model.score(X) == twin.score(torch.as_tensor(X))
    np.testing.assert_allclose(model.score(X), model.score_samples(X).mean(), rtol=1e-14)
    assert model.predict_proba(X).shape == (60, 2)
    (drawn, labels), (others, other_labels) = model.sample(7), twin.sample(7)
    assert drawn.shape == (7, 3)
    assert labels.shape == (7,)
    assert_close(others, torch.as_tensor(drawn), rtol=0, atol=0)
    assert_close(other_labels, torch.as_tensor(labels), rtol=0, atol=0)
    assert hasattr(model, "bic") == hasattr(model, "aic") == (method == "em")
    assert np.array_equal(clone(model).fit_predict(X), model.predict(X))


def test_predictions_are_those_of_the_published_parameters() -> None:
    from scipy.stats import multivariate_normal

    model = GaussianMixture(2).fit(X)
    densities = [multivariate_normal(m, c).pdf(X) for m, c in zip(model.means_, model.covariances_)]
    joint = model.weights_ * np.stack(densities, 1)
    np.testing.assert_allclose(model.score_samples(X), np.log(joint.sum(1)), atol=1e-11)
    np.testing.assert_allclose(model.predict_proba(X), joint / joint.sum(1, keepdims=True), atol=1e-11)
    n, expected = 50_000, np.cov(X.T, bias=True) + 1e-6 * np.eye(3)  # reg_covar
    drawn, labels = GaussianMixture(1).fit(X).sample(n)
    assert not labels.any()
    error = np.sqrt((np.outer(expected.diagonal(), expected.diagonal()) + expected**2) / n)  # of a Wishart matrix
    assert (np.abs(np.cov(drawn.T) - expected) < 5 * error).all()
    assert (np.abs(drawn.mean(0) - X.mean(0)) < 5 * np.sqrt(expected.diagonal() / n)).all()


HOLED = np.where(np.arange(180).reshape(60, 3) == 7, np.nan, X)
REFUSED: list[tuple[dict[str, Any], np.ndarray, str]] = [
    ({}, HOLED, "X contains NaN or infinity in 1 of 60 rows: remove or impute"),
    ({}, X[:0], r"0 sample\(s\)"),
    ({}, X[:1], r"1 sample\(s\)"),
    (dict(n_components=61), X, "n_components=61 is larger than the number of rows, n_samples=60: use fewer"),
    (dict(n_components=0), X, "n_components must be a positive integer, got 0"),
    (dict(n_components=2.0), X, "n_components must be a positive integer, got 2.0"),
    (dict(method="gibbs"), X, "method must be one of 'em', 'vmp', 'svi', got 'gibbs'"),
    (dict(covariance_type="round"), X, "covariance_type must be one of 'full', 'tied', 'diag', 'spherical', got"),
    (dict(init_params="best"), X, "init_params must be one of 'kmeans'"),
    (dict(reg_covar=-1.0), X, "reg_covar must be a non-negative number, got -1.0"),
    (dict(reg_covar=np.nan), X, "reg_covar must be a non-negative number, got nan"),
    (dict(reg_covar="small"), X, "reg_covar must be a non-negative number, got 'small'"),
    (dict(covariance_type=np.ones(2)), X, "covariance_type must be one of 'full', .* got array"),
    (dict(method="vmp", mean_precision_prior=np.ones(3)), X, "mean_precision_prior must be a number greater than 0"),
    (dict(method="vmp", mean_prior="mean"), X, "mean_prior must be a numeric array, got 'mean'"),
    (dict(method="vmp", covariance_prior=[1, [2]]), X, r"covariance_prior must be a numeric array, got \[1, \[2\]\]"),
    (dict(mean_precision_prior=1.0), X, "method='em' has no priors, but mean_precision_prior was set: use"),
    (dict(method="vmp", weight_concentration_prior=0.0), X, "weight_concentration_prior must be a number greater"),
    (dict(method="vmp", mean_precision_prior=-1), X, "mean_precision_prior must be a number greater than 0, got -1"),
    (dict(method="vmp", degrees_of_freedom_prior=2), X, "degrees_of_freedom_prior must be a number greater than 2"),
    (dict(method="vmp", mean_prior=np.zeros(2)), X, r"mean_prior must be 3 finite numbers, .* got shape \(2,\)"),
    (dict(method="vmp", covariance_prior=np.eye(2)), X, r"covariance_prior must have shape \(3, 3\), got \(2, 2\)"),
    (dict(method="vmp", covariance_prior=-np.eye(3)), X, "covariance_prior must be positive"),
    (dict(method="vmp", covariance_type="diag", covariance_prior=np.zeros(3)), X, "covariance_prior must be positive"),
    (dict(method="vmp", reg_covar=0), X * [1, 1, 0], "the covariance of X is singular: set covariance_prior, or"),
    (dict(reg_covar=0), X * [1, 1, 0], "the covariance of X is singular: use a larger reg_covar than 0"),
    (dict(reg_covar=0, covariance_type="diag"), X * [1, 1, 0], "the covariance of X is singular"),
]


@pytest.mark.parametrize(("settings", "rows", "message"), REFUSED, ids=[row[2][:40] for row in REFUSED])
def test_refusals(settings: dict[str, Any], rows: np.ndarray, message: str) -> None:
    for verb in ("fit", "partial_fit"):
        model = GaussianMixture(**settings)
        with pytest.raises(ValueError, match=message) as refused:
            getattr(model, verb)(rows)
        assert str(refused.value).count("\n") == 0
        assert not hasattr(model, "means_")


def test_refusals_of_streams_and_predictions() -> None:
    with pytest.raises(ValueError, match=r"use fewer components, or a larger \(first\) batch"):
        GaussianMixture(5).partial_fit(X[:3])
    model = GaussianMixture(2).partial_fit(X[:9]).partial_fit(X[:1])
    with pytest.raises(ValueError, match="X has 2 features, but GaussianMixture is expecting 3"):
        model.partial_fit(X[:, :2])
    with pytest.raises(ValueError, match="X contains NaN or infinity in 1 of 60 rows"):
        model.predict(HOLED)
    with pytest.raises(ValueError, match="n_samples must be a positive integer, got 0"):
        model.sample(0)
    for verb in ("predict", "predict_proba", "score_samples", "score"):
        with pytest.raises(NotFittedError):
            getattr(GaussianMixture(), verb)(X)
    with pytest.raises(NotFittedError):
        GaussianMixture().sample()


def test_fewer_rows_than_columns() -> None:
    """Blurred enough to have a covariance, whichever the method."""
    wide = RNG.normal(size=(6, 20))
    for method in METHODS:
        model = GaussianMixture(2, method=method, tol=1e-2).fit(wide)
        assert np.linalg.eigvalsh(model.covariances_).min() > 0
        assert np.isfinite(model.score(wide))


@pytest.mark.parametrize("far", [-50.0, 1e3, 2.0**40])
def test_rows_are_centred_without_rounding(far: float) -> None:
    """In rational numbers: a fit then has the digits of one in exact arithmetic."""
    rows = torch.as_tensor(np.random.default_rng(0).normal(size=(50, 3)) * [1e-3, 1.0, 5.0] + far)
    rows[:, 1] = far + 0.1  # a constant
    centre = near_mean(rows)
    assert ((centre - rows.mean(0)).abs() <= rows.std(0) / 256 + 1e-15 * abs(far)).all()
    for row, moved in zip(rows.tolist(), (rows - centre).tolist()):
        assert all(Fraction(a) - Fraction(c) == Fraction(b) for a, b, c in zip(row, moved, centre.tolist()))


@pytest.mark.parametrize("method", ["em", "vmp"])
def test_features_are_computed_once(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a few rows are shared by all starts and sweeps."""
    kind, calls = type(COVARIANCES["diag"]), []
    fill = kind.fill
    monkeypatch.setattr(
        kind, "fill", lambda self, squares, *rest: (calls.append(len(squares)), fill(self, squares, *rest))
    )
    settings: dict[str, Any] = dict(method=method, covariance_type="diag", n_init=2, max_iter=3, tol=0)
    GaussianMixture(2, **settings).fit(X)
    assert calls == [3]
