"""Processes in space and time with settings and data that cannot be, and data frames."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.base import clone

from bayesgrad.models import GaussianProcess, LinearStateSpace

X = np.random.default_rng(0).normal(size=(15, 2))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_iter": "a"}, "max_iter must be a positive integer, got 'a'"),
        ({"max_eval": 0}, "max_eval must be a positive integer, got 0"),
        ({"tol": "a"}, "tol must be a non-negative number, got 'a'"),
        ({"random_state": None}, "random_state must be an integer, got None"),
        ({"expectation": "delta"}, r"expectation must be GaussHermite\(\), Delta\(\) or None, got 'delta'"),
        ({"inducing": "a"}, "inducing must be a numeric array, got"),
        ({"inducing": np.full((2, 2), np.nan)}, "inducing must be a matrix of finite numbers"),
    ],
)
def test_settings_of_a_gaussian_process(settings: dict, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        GaussianProcess(**settings).fit(X, X[:, 0])


def test_a_fit_that_fails_leaves_what_was_known() -> None:
    model = GaussianProcess(optimizer=None).fit(X, X[:, 0])
    before = model.predict(X)
    with pytest.raises(ValueError, match="batch_size needs inducing points"):
        model.set_params(batch_size=3).fit(X[:10, :1], X[:10, 0])
    np.testing.assert_array_equal(model.predict(X), before)


def test_numbers_at_the_end_of_their_range_are_told() -> None:
    """Targets of a million, whose noise is beyond the search range."""
    y = 1e6 * np.random.default_rng(1).normal(size=15)
    with pytest.warns(UserWarning, match="likelihood.scale reached the end of the range, 1e5"):
        GaussianProcess().fit(X, y)


def test_frames_and_lists_are_sequences() -> None:
    pandas = pytest.importorskip("pandas")
    model = LinearStateSpace([[1.0]], [[0.5]], [[1.0]], [[1.0]])
    y = np.array([0.0, 1.0, np.nan, 3.0])
    expected = model.smooth(y).mean
    dated = pandas.Series(y, index=pandas.date_range("2020", periods=4))
    for same in (pandas.DataFrame({"y": y}), dated, [0.0, 1.0, None, 3.0], list(y)):
        np.testing.assert_array_equal(model.smooth(same).mean, expected)
    assert model.smooth(list(np.arange(3))).mean.shape == (3, 1)


@pytest.mark.parametrize(
    ("y", "words"), [(["a", "b"], "y must be a numeric array"), (None, "y must have one row per time")]
)
def test_sequences_that_cannot_be(y: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LinearStateSpace([[1.0]], [[0.5]], [[1.0]], [[1.0]]).smooth(y)


def test_a_clone_starts_from_the_given_matrices() -> None:
    """Parameters are kept as they were given; what EM learns stays with the estimator that learned it."""
    model, y = LinearStateSpace([[1.0]], [[0.5]], [[1.0]], [[1.0]], tol=1e-8), np.arange(9.0)
    before = model.log_likelihood(y)
    model.fit(y, learn="all", max_iter=5, tol=0)
    assert model.get_params()["transition"] == [[1.0]]
    assert clone(model).get_params() == model.get_params()
    assert clone(model).log_likelihood(y) == before < model.log_likelihood(y)
    same = LinearStateSpace([[1.0]], [[0.5]], [[1.0]], [[2.0]]).log_likelihood(y)
    assert model.set_params(observation_covariance=[[2.0]]).log_likelihood(y) == same
    with pytest.raises(ValueError, match="transition must be square"):
        model.set_params(transition=[[1.0, 0.0]])
    assert model.transition == [[1.0]]
    assert model.log_likelihood(y) == same


def test_matrices_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"transition must be a numeric array, got 'a'"):
        LinearStateSpace("a", [[0.5]], [[1.0]], [[1.0]])
    with pytest.raises(ValueError, match=r"initial_mean must be a numeric array, got 'a'"):
        LinearStateSpace([[1.0]], [[0.5]], [[1.0]], [[1.0]], initial_mean="a")
    with pytest.raises(TypeError, match="expectation must be GaussHermite"):
        LinearStateSpace([[1.0]], [[0.5]], [[1.0]], likelihood="poisson", expectation="a")  # pyright: ignore
