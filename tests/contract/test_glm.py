"""GLM: scikit-learn's estimator checks, NumPy and torch inputs, streams, invalid inputs."""

from __future__ import annotations

import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from scipy.special import expit, softmax
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.utils.estimator_checks import estimator_checks_generator
from torch.testing import assert_close

from bayesgrad.models import GLM
from bayesgrad.models.glm import LIKELIHOODS

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3))
TARGETS = {
    "gaussian": X[:, 0] + RNG.normal(size=40),
    "student-t": X[:, 0] + RNG.normal(size=40),
    "poisson": RNG.poisson(np.exp(X[:, 0])),
    "logistic": np.where(X[:, 0] + RNG.normal(size=40) > 0, "yes", "no"),
    "probit": (X[:, 0] + RNG.normal(size=40) > 0).astype(int),
    "multinomial": np.digitize(X[:, 0] + RNG.normal(size=40), [-0.5, 0.5]),
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("likelihood", list(LIKELIHOODS))
def test_scikit_learns_checks(likelihood: str) -> None:
    """All of them; the one for other packages' arrays is skipped by scikit-learn where SciPy is not set up for it."""
    model = GLM(likelihood, expectation="quadrature" if likelihood == "logistic" else "delta")
    names = []
    for estimator, check in estimator_checks_generator(model):
        name = check.func.__name__
        if name != "check_array_api_input":
            check(estimator)
            names.append(name)
    assert len(names) > 45


@pytest.mark.parametrize("likelihood", list(LIKELIHOODS))
def test_tensors_in_tensors_out(likelihood: str) -> None:
    y = TARGETS[likelihood]
    labels = torch.as_tensor(y) if y.dtype.kind != "U" else y
    model, twin = GLM(likelihood).fit(X, y), GLM(likelihood).fit(torch.as_tensor(X), labels)
    names = ["coef_", "coef_covariance_"] + (["intercept_"] if hasattr(model, "classes_") else [])
    for name in names:
        assert isinstance(getattr(model, name), np.ndarray)
        assert_close(getattr(twin, name), torch.as_tensor(getattr(model, name)), rtol=0, atol=0)
    assert model.elbo_ == twin.elbo_
    found, other = model.predict(X[:4]), twin.predict(torch.as_tensor(X[:4]))
    assert isinstance(found, np.ndarray)
    if y.dtype.kind == "U":
        assert found.tolist() == other.tolist()
    else:
        assert_close(other, torch.as_tensor(found), rtol=0, atol=0)
    assert isinstance(model.sample_posterior(2)[0], np.ndarray)
    assert isinstance(twin.sample_posterior(2)[0], torch.Tensor)
    if hasattr(model, "classes_"):
        assert isinstance(twin.predict_proba(torch.as_tensor(X[:4])), torch.Tensor)
        assert isinstance(twin.predict_proba(X[:4]), np.ndarray)
    else:
        assert not hasattr(model, "predict_proba")
    assert model.score(X, y) == twin.score(torch.as_tensor(X), labels)


def test_a_stream_is_not_kept() -> None:
    model, sizes = GLM("poisson"), []
    for _ in range(4):
        rows = RNG.normal(size=(30, 3))
        model.partial_fit(rows, RNG.poisson(1.0, size=30))
        sizes.append(len(pickle.dumps(model)))
    alive = weakref.ref(rows)
    del rows
    gc.collect()
    assert alive() is None
    assert max(sizes) - min(sizes) < 64


def test_draws_are_a_function_of_their_seed() -> None:
    model = GLM().fit(X, TARGETS["gaussian"])
    assert np.array_equal(model.sample_posterior(3)[0], model.sample_posterior(3)[0])
    assert not np.array_equal(model.sample_posterior(3)[0], model.sample_posterior(3, random_state=1)[0])
    drawn = [GLM("probit", expectation="mc", random_state=s).fit(X, TARGETS["probit"]).elbo_ for s in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_too_few_steps_warn() -> None:
    with pytest.warns(ConvergenceWarning, match="not converged after max_iter=2 steps: the bound still changes by"):
        model = GLM("logistic", max_iter=2).fit(X, TARGETS["logistic"])
    assert model.n_iter_ == 2


HOLED = np.where(np.arange(120).reshape(40, 3) == 7, np.nan, X)
REFUSED = [
    (GLM(), HOLED, "gaussian", "X contains NaN or infinity in 1 of 40 rows"),
    (GLM(), X[:0], TARGETS["gaussian"][:0], r"0 sample\(s\)"),
    (GLM(), X, np.full(40, np.nan), "Input y contains NaN"),
    (GLM("logistic"), X, np.ones(40), "y has only one class"),
    (GLM("multinomial"), X, np.zeros(40, dtype=int), "y has only one class"),
    (GLM("probit"), X, "multinomial", "Only binary classification is supported.*use likelihood='multinomial' for 3"),
    (GLM("poisson"), X, TARGETS["poisson"] - 1, "y must be non-negative counts, got -1"),
    (GLM(prior_precision=0.0), X, "gaussian", "prior_precision must be positive, got 0"),
    (GLM(prior_precision=[1.0, -2.0, 1.0]), X, "gaussian", "prior_precision must be positive, got -2"),
    (GLM(prior_precision=np.ones(2)), X, "gaussian", r"prior_precision must be a number, \(3,\) or \(3, 3\)"),
    (GLM(prior_precision=-np.eye(3)), X, "gaussian", "symmetric positive definite"),
    (GLM(prior_precision=np.nan), X, "gaussian", "prior_precision contains NaN"),
    (GLM(noise_scale=0.0), X, "gaussian", "noise_scale must be a positive number, got 0.0"),
    (GLM("student-t", dof=-1), X, "gaussian", "dof must be a positive number, got -1"),
    (GLM(intercept_precision=0), X, "gaussian", "intercept_precision must be a positive number, got 0"),
    (GLM("cauchy"), X, "gaussian", "likelihood must be one of 'gaussian'"),
    (GLM("logistic", expectation="exact"), X, "logistic", "expectation must be one of 'quadrature'"),
    (GLM("logistic", rho=1.5), X, "logistic", r"rho must be in \(0, 1\], got 1.5"),
]


@pytest.mark.parametrize(("model", "rows", "y", "message"), REFUSED, ids=[row[3][:40] for row in REFUSED])
def test_refusals(model: GLM, rows: np.ndarray, y, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        model.fit(rows, TARGETS[y] if isinstance(y, str) else y)
    assert str(refused.value).count("\n") == 0
    assert not hasattr(model, "coef_")


def test_refusals_of_streams_and_predictions() -> None:
    with pytest.raises(ValueError, match="first call of partial_fit needs classes"):
        GLM("logistic").partial_fit(X, TARGETS["logistic"])
    model = GLM("probit").partial_fit(X[:9], TARGETS["probit"][:9], classes=[0, 1])
    with pytest.raises(ValueError, match=r"the label 2, which is not in classes, \[0, 1\]"):
        model.partial_fit(X, TARGETS["multinomial"])
    with pytest.raises(ValueError, match="partial_fit cannot learn prior_precision, noise_scale or dof"):
        GLM("student-t", dof="learn").partial_fit(X, TARGETS["student-t"])
    with pytest.raises(NotFittedError):
        GLM().predict(X)
    with pytest.raises(ValueError, match="X contains NaN or infinity in 1 of 40 rows"):
        model.predict(HOLED)
    with pytest.raises(ValueError, match="n_samples must be a positive integer, got 0"):
        model.sample_posterior(0)


# --- settings, streams and failures ---


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prior_precision": "a"}, "prior_precision must be a numeric array, got 'a'"),
        ({"prior_precision": [[1.0], [1.0, 2.0]]}, "prior_precision must be a numeric array"),
        ({"rho": "fast"}, r"rho must be in \(0, 1\], got 'fast'"),
        ({"max_iter": 0}, "max_iter must be a positive integer, got 0"),
        ({"tol": "a"}, "tol must be a non-negative number, got 'a'"),
        ({"likelihood": ["poisson"]}, r"likelihood must be one of .* got \['poisson'\]"),
        ({"random_state": None}, "random_state must be an integer, got None"),
        ({"noise_scale": "learn"}, "noise_scale cannot be learned because X explains y without noise"),
    ],
)
def test_settings_that_cannot_be(settings: dict, words: str) -> None:
    X = np.random.default_rng(0).normal(size=(20, 2))
    with pytest.raises(ValueError, match=words):
        GLM(**settings).fit(X, X[:, 0])


def test_a_fit_that_fails_leaves_what_was_known() -> None:
    """Targets that cannot be, of another likelihood and another number of columns."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(20, 3)), rng.normal(size=20)
    model = GLM("student-t").fit(X, y)
    before = model.predict(X)
    with pytest.raises(ValueError, match="non-negative counts"):
        model.set_params(likelihood="poisson").fit(X[:, :2], y)
    np.testing.assert_array_equal(model.set_params(likelihood="student-t").predict(X), before)


@pytest.mark.parametrize("change", [{"likelihood": "poisson"}, {"fit_intercept": False}])
def test_streams_keep_their_structure(change: dict) -> None:
    X = np.random.default_rng(0).normal(size=(20, 3))
    model = GLM().partial_fit(X, np.ones(20)).set_params(**change)
    with pytest.raises(ValueError, match=f"{next(iter(change))} was .* in the first call"):
        model.partial_fit(X, np.ones(20))


def test_batches_may_differ_in_their_noise() -> None:
    """As weighted least squares has it; also after a fit that learned it."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 2))
    y = X[:, 0] + rng.normal(size=40)
    model = GLM(fit_intercept=False, noise_scale=0.5).partial_fit(X[:20], y[:20])
    model.set_params(noise_scale=2.0).partial_fit(X[20:], y[20:])
    weights = np.repeat([4.0, 0.25], 20)
    expected = np.linalg.solve(np.eye(2) + X.T @ (weights[:, None] * X), X.T @ (weights * y))
    np.testing.assert_allclose(model.coef_, expected, rtol=1e-12)
    assert model.noise_scale_ == 2.0
    learned = GLM(noise_scale="learn").fit(X, y)
    assert learned.set_params(noise_scale=3.0).partial_fit(X, y).noise_scale_ == 3.0


# --- known parameters ---


@pytest.mark.parametrize("likelihood", list(LIKELIHOODS))
def test_models_of_known_parameters_predict_as_the_fitted_ones(likelihood: str) -> None:
    """Without an intercept all moments are attributes, so that the whole posterior is known."""
    fitted = GLM(likelihood, fit_intercept=False).fit(X, TARGETS[likelihood])
    classes = getattr(fitted, "classes_", None)
    known = GLM.from_parameters(
        fitted.coef_, likelihood=likelihood, coef_covariance=fitted.coef_covariance_, classes=classes
    )
    np.testing.assert_allclose(known.coef_, fitted.coef_ - (fitted.coef_.mean(0) if likelihood == "multinomial" else 0))
    np.testing.assert_allclose(known.coef_covariance_, fitted.coef_covariance_, rtol=1e-9, atol=1e-12)
    assert (known.predict(X) == fitted.predict(X)).all() if classes is not None else True
    if classes is not None:
        np.testing.assert_allclose(known.predict_proba(X), fitted.predict_proba(X), atol=1e-12)
    else:
        np.testing.assert_allclose(known.predict(X, return_std=True), fitted.predict(X, return_std=True), rtol=1e-9)
    new = np.random.default_rng(1).normal(size=(10, 3))
    for model in (known, fitted):
        model.partial_fit(new, TARGETS[likelihood][:10])
    np.testing.assert_allclose(known.coef_, fitted.coef_, atol=1e-5)
    assert known.sample_posterior(2)[0].shape == (2, *known.coef_.shape)


def test_known_parameters_without_variances() -> None:
    model = GLM.from_parameters([2.0, -1.0, 0.5], 0.3, likelihood="poisson")
    np.testing.assert_allclose(model.predict(X), np.exp(X @ [2.0, -1.0, 0.5] + 0.3), rtol=1e-8)
    labels = GLM.from_parameters([[1.0, 0, 0]], [0.1], likelihood="logistic", classes=["no", "yes"])
    assert (labels.predict(X) == np.where(X[:, 0] > -0.1, "yes", "no")).all()
    np.testing.assert_allclose(labels.predict_proba(X)[:, 1], 1 / (1 + np.exp(-X[:, 0] - 0.1)), rtol=1e-8)


@pytest.mark.parametrize(
    ("coef", "options", "words"),
    [
        ([[1.0], [2.0]], dict(likelihood="logistic"), "coef must have 1 rows for likelihood='logistic', got 2"),
        ([1.0, np.nan], {}, "coef must be finite numbers"),
        ([1.0], dict(coef_covariance=[[-1.0]]), "coef_covariance must be positive semi-definite"),
        ([1.0], dict(coef_covariance=[[0.0]]), "coef_covariance must be a symmetric positive definite"),
        ([1.0], dict(intercept_variance=1.0), "intercept_variance needs an intercept"),
        ([1.0], dict(intercept=0.0, intercept_variance=0.0), "intercept_variance must be positive, got 0"),
        ([1.0], dict(intercept=[0.0, 1.0]), "intercept must be 1 finite numbers"),
        (np.eye(3), dict(likelihood="multinomial", classes=[1, 2]), "coef must have 2 rows"),
    ],
)
def test_known_parameters_that_cannot_be(coef, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GLM.from_parameters(coef, **options)


# --- labels ---


def test_labels_of_several_classes_are_those_of_the_mean_scores() -> None:
    """Scores with deviations far beyond their means: averaged probabilities are equal to the errors of a quadrature."""
    rng = np.random.default_rng(0)
    for count in (3, 5):
        coef = rng.normal(size=(count, 4))
        for scale in (1.0, 1e4, 1e8):
            covariance = (1e3 * scale) ** 2 * np.eye(4 * count)
            known = GLM.from_parameters(scale * coef, likelihood="multinomial", coef_covariance=covariance)
            rows = rng.normal(size=(200, 4))
            assert (known.predict(rows) == (rows @ coef.T).argmax(1)).all()
            offset = np.zeros((200, count))
            offset[:, 1] = 1e6 * scale
            assert (known.predict(rows, offset=offset) == 1).all()


@pytest.mark.parametrize(("count", "error"), [(2, 1e-8), (3, 0.01), (10, 0.01)])
@pytest.mark.parametrize("deviation", [0.5, 20.0, 1e6])
def test_probabilities_of_classes_for_every_variance_of_the_scores(count: int, error: float, deviation: float) -> None:
    """Beside 200,000 draws of the scores; two classes beside the midpoint rule for the difference of their scores."""
    rng = np.random.default_rng(1)
    rows, coef = rng.normal(size=(5, 3)), deviation * rng.normal(size=(count, 3))
    covariance = deviation**2 * np.eye(3 * count)
    found = GLM.from_parameters(coef, likelihood="multinomial", coef_covariance=covariance).predict_proba(rows)
    scores, own = rows @ coef.T, deviation * np.linalg.norm(rows, axis=1)
    if count == 2:
        z = np.linspace(-8.5, 8.5, 500_001)
        weights = np.exp(-(z**2) / 2) / np.exp(-(z**2) / 2).sum()
        gap, spread = scores[:, 1] - scores[:, 0], np.sqrt(2) * own
        right = np.array([weights @ expit(m + s * z) for m, s in zip(gap, spread)])
        np.testing.assert_allclose(found[:, 1], right, rtol=0, atol=max(error, 1e-5 * (deviation > 1e3)))
        return
    noise = rng.normal(size=(200_000, count))
    right = np.stack([softmax(m + s * noise, axis=1).mean(0) for m, s in zip(scores, own)])
    np.testing.assert_allclose(found, right, rtol=0, atol=error if deviation > 1 else 0.003)
