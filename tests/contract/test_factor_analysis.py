"""FactorAnalysis: scikit-learn's estimator checks, NumPy and torch inputs, streams, invalid inputs."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.utils.estimator_checks import estimator_checks_generator
from torch.testing import assert_close

from bayesgrad.models import FactorAnalysis

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 2)) @ RNG.normal(size=(2, 5)) + RNG.normal(size=(60, 5)) / 2 + 3
HOLED = np.where(RNG.uniform(size=X.shape) < 0.2, np.nan, X)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("settings", [{}, {"method": "vb", "noise": "isotropic"}])
def test_scikit_learns_checks(settings: dict) -> None:
    names = []
    for estimator, check in estimator_checks_generator(FactorAnalysis(max_iter=10, tol=0, **settings)):
        name = check.func.__name__
        if name != "check_array_api_input":
            check(estimator)
            names.append(name)
    assert len(names) > 40


@pytest.mark.parametrize("method", ["em", "vb"])
@pytest.mark.parametrize("noise", ["diagonal", "isotropic"])
def test_tensors_in_tensors_out(method: str, noise: str) -> None:
    settings = {"method": method, "noise": noise, "max_iter": 3, "tol": 0}
    model = FactorAnalysis(2, **settings).fit(HOLED)
    twin = FactorAnalysis(2, **settings).fit(torch.as_tensor(HOLED))
    names = ["components_", "mean_"] + ["relevance_"] * (method == "vb") + ["noise_variance_"] * (noise == "diagonal")
    for name in names:
        assert isinstance(getattr(model, name), np.ndarray)
        assert_close(getattr(twin, name), torch.as_tensor(getattr(model, name)), rtol=0, atol=0)
    for name in ("transform", "score_samples"):
        found, other = getattr(model, name)(HOLED), getattr(twin, name)(torch.as_tensor(HOLED))
        assert isinstance(found, np.ndarray)
        assert_close(other, torch.as_tensor(found), rtol=0, atol=0)
    for name in ("get_covariance", "get_precision", "sample"):
        found, other = getattr(model, name)(), getattr(twin, name)()
        assert isinstance(found, np.ndarray)
        assert_close(other, torch.as_tensor(found), rtol=0, atol=0)
    scores = model.transform(X)
    assert isinstance(model.inverse_transform(scores), np.ndarray)
    assert isinstance(model.inverse_transform(torch.as_tensor(scores)), torch.Tensor)
    assert model.get_feature_names_out().tolist() == ["factoranalysis0", "factoranalysis1"]


def test_a_pickle_goes_on_where_it_was() -> None:
    model = FactorAnalysis(2).partial_fit(X[:30])
    twin = pickle.loads(pickle.dumps(model))
    assert np.array_equal(model.partial_fit(X[30:]).components_, twin.partial_fit(X[30:]).components_)


@pytest.mark.parametrize("holes", [False, True])
def test_a_stream_is_not_kept(holes: bool) -> None:
    model, sizes = FactorAnalysis(2), []
    for _ in range(4):
        batch = RNG.normal(size=(200, 5))
        batch[0, 0] = np.nan if holes else 0.0
        model.partial_fit(batch)
        sizes.append(len(pickle.dumps(model)))
    assert max(sizes) - min(sizes) < 128


def test_the_best_of_several_starts_is_kept() -> None:
    settings = {"init": "random", "max_iter": 2, "tol": 0}
    random = np.random.RandomState(0)
    alone = [FactorAnalysis(2, random_state=random, **settings).fit(X).elbo_ for _ in range(3)]
    assert len(set(alone)) == 3
    assert FactorAnalysis(2, n_init=3, **settings).fit(X).elbo_ == max(alone)


def test_too_few_sweeps_warn() -> None:
    with pytest.warns(ConvergenceWarning, match="not converged after max_iter=2 iterations"):
        model = FactorAnalysis(2, max_iter=2).fit(X)
    assert model.n_iter_ == 2
    assert not model.converged_


def test_columns_without_variance_and_columns_explained_in_full() -> None:
    """The noise of neither is negative or NaN, and the density stays finite; EM warns that it is degenerate."""
    rows = np.column_stack([X[:, 0], 2 * X[:, 0], np.ones(60), X[:, 1]])
    for method in ("em", "vb"):
        model = FactorAnalysis(1, method=method, tol=1e-4)
        if method == "em":
            with pytest.warns(UserWarning, match=r"explain 3 columns but for noise_floor=0.005 .* \(columns 0, 1, 2\)"):
                model.fit(rows)
        else:
            model.fit(rows)
        assert np.isfinite(model.elbo_)
        assert (model.noise_variance_ > 0).all()
        assert model.mean_[2] == pytest.approx(1)


REFUSED = [
    ({"n_components": 6}, X, "n_components must be at most the number of columns, 5, got 6"),
    ({"n_components": 4}, X[:4], "n_components must be less than the number of rows, 4, got 4"),
    ({"n_components": 0}, X, "n_components must be a positive integer, got 0"),
    ({}, X[:0], r"0 sample\(s\)"),
    ({}, np.where(X[7, 1] == X, np.inf, X), "X contains infinity in 1 of 60 rows"),
    ({}, np.where(np.arange(5) == 3, np.nan, X), "column 3 of X contains only NaN"),
    ({"method": "map"}, X, "method must be one of 'em', 'vb', got 'map'"),
    ({"noise": "full"}, X, "noise must be one of 'diagonal', 'isotropic', got 'full'"),
    ({"init": "svd"}, X, "init must be one of 'pca', 'random', got 'svd'"),
    ({"noise_prior": (1.0, 0.0)}, X, r"noise_prior must be a positive shape and rate, got \(1.0, 0.0\)"),
    ({"noise_floor": 0.0}, X, "noise_floor must be a number between 0 and 1, or None, got 0.0"),
    ({"noise_floor": "small"}, X, "noise_floor must be a number between 0 and 1, or None, got 'small'"),
    ({"mean_precision": -1.0}, X, "mean_precision must be a positive number, got -1.0"),
    ({"mean_precision": None}, X, "mean_precision must be a positive number, got None"),
    ({"relevance_prior": (1.0, np.nan)}, X, r"relevance_prior must be a positive shape and rate, got \(1.0, nan\)"),
    ({"relevance_prior": "weak"}, X, "relevance_prior must be a numeric array, got 'weak'"),
    ({"max_iter": 0}, X, "max_iter must be a positive integer, got 0"),
    ({"decay": 0.5}, X, r"decay must be in \(0.5, 1\]"),
]


@pytest.mark.parametrize(("settings", "rows", "words"), REFUSED, ids=[words[:40] for *_, words in REFUSED])
def test_what_is_refused(settings: dict, rows: np.ndarray, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FactorAnalysis(**settings).fit(rows)


def test_what_is_refused_later() -> None:
    model = FactorAnalysis(2)
    with pytest.raises(NotFittedError):
        model.transform(X)
    model.fit(X)
    with pytest.raises(ValueError, match="5 features"):
        model.transform(X[:, :4])
    with pytest.raises(ValueError, match="Z must have 2 columns, the number of components"):
        model.inverse_transform(X)
    with pytest.raises(ValueError, match="n_samples must be a positive integer, got 0"):
        model.sample(0)


def test_models_of_known_parameters() -> None:
    """The density is that of the parameters; components may be rotated."""
    rng = np.random.default_rng(0)
    W, mean, noise = rng.normal(size=(2, 5)), rng.normal(size=5), rng.uniform(0.5, 2.0, size=5)
    for own in (noise, 0.7):
        model = FactorAnalysis.from_parameters(W, mean, own)
        covariance = W.T @ W + np.diag(np.broadcast_to(own, 5))
        rows = rng.normal(size=(6, 5))
        np.testing.assert_allclose(model.get_covariance(), covariance, rtol=1e-10)
        np.testing.assert_allclose(model.score_samples(rows), multivariate_normal(mean, covariance).logpdf(rows))
        scores = model.transform(rows)
        np.testing.assert_allclose(
            model.inverse_transform(scores), mean + (rows - mean) @ np.linalg.solve(covariance, W.T) @ W, rtol=1e-9
        )
        assert model.sample(3).shape == (3, 5)
        model.partial_fit(rng.normal(size=(20, 5)))
    with pytest.raises(ValueError, match="from_parameters needs method='em', got 'vb'"):
        FactorAnalysis.from_parameters(W, mean, noise, method="vb")
    with pytest.raises(ValueError, match=r"got \(2, 5\), \(4,\), \(5,\)"):
        FactorAnalysis.from_parameters(W, mean[:4], noise)
    with pytest.raises(ValueError, match="noise_variance positive"):
        FactorAnalysis.from_parameters(W, mean, -noise)
