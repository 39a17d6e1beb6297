"""The solver of generalised linear models against the engine, adaptive quadrature, scikit-learn and statsmodels."""

from __future__ import annotations

import math
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse as sparse
import statsmodels.api as sm
import torch
from numpy.testing import assert_allclose
from scipy import integrate
from scipy.special import expit, ndtr
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.linear_model import ARDRegression, BayesianRidge, LogisticRegression, PoissonRegressor, Ridge
from torch.testing import assert_close

from bayesgrad.families import Gaussian
from bayesgrad.inference import Delta, GaussHermite, LinearPredictorFactor, Node, Prior, run
from bayesgrad.models import GLM
from bayesgrad.models.observations import Logistic, Poisson, Probit, StudentT

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3))
SIGNAL = X @ np.array([1.0, -2.0, 0.5]) + 0.3
LABELS = (SIGNAL + RNG.logistic(size=60) > 0).astype(int)
COUNTS = RNG.poisson(np.exp(SIGNAL / 2))
TARGETS = {
    "gaussian": SIGNAL + RNG.normal(size=60),
    "student-t": SIGNAL + RNG.standard_t(3, size=60),
    "poisson": COUNTS,
    "logistic": LABELS,
    "probit": LABELS,
    "multinomial": LABELS + (X[:, 0] > 1),
}


def expected_log_sigmoid(m: float, s: float) -> list[float]:
    """E[log 1/(1 + e^-f)] and its first two derivatives by m: adaptive quadrature beside the kink."""
    functions = (
        lambda f: -np.log1p(np.exp(-abs(f))),
        lambda f: -np.sign(f) * -expit(-abs(f)),
        lambda f: -expit(f) * expit(-f),
    )
    places = sorted({min(max(p, -40.0), 40.0) for p in (-40, m - 8 * s, m - 2 * s, m, m + 2 * s, m + 8 * s, 0, 40)})
    density = lambda f: math.exp(-(((f - m) / s) ** 2) / 2) / s / math.sqrt(2 * math.pi)  # noqa: E731
    found = [
        sum(
            integrate.quad(lambda f: function(f) * density(f), a, b, epsabs=1e-14)[0]  # noqa: B023
            for a, b in pairwise(places)
        )
        for function in functions
    ]
    below = ndtr(-m / s)
    return [found[0] + m * below - s * s * density(0), found[1] + below, found[2]]


@pytest.mark.parametrize("deviation", [0.01, 0.19, 0.45, 0.85, 1.49, 1.51, 2.0, 10.0, 1e4])
def test_expectations_of_logits_are_right_for_every_variance(deviation: float) -> None:
    """With 32 Gauss-Hermite points the errors were 1e-4 at a deviation of 10, and 0.03 at 10^4."""
    means = torch.tensor([0.0, 0.3 * deviation, -deviation, 3 * deviation, 1.0, -8.0, 20.0], dtype=torch.float64)
    want = torch.tensor([expected_log_sigmoid(m, deviation) for m in means.tolist()], dtype=torch.float64)
    spread = torch.full_like(means, deviation**2)
    found = Logistic().expected(means, spread, torch.ones_like(means), GaussHermite())
    for own, other in zip(found, want.mT):
        assert_close(own, other, rtol=1e-9, atol=2e-9)
    prediction = Logistic().predict(means, spread)
    assert_close(prediction.mean, 1 - want[:, 1], rtol=0, atol=2e-9)
    assert_close(prediction.noise, -want[:, 2], rtol=0, atol=2e-9)


@pytest.mark.parametrize("observation", [Logistic(), Probit(), Poisson(), StudentT(1.3, 4.0)])
def test_derivatives_are_those_of_autograd(observation) -> None:
    f = torch.linspace(-6, 6, 41, dtype=torch.float64)
    y = torch.arange(41, dtype=torch.float64) % 2
    _, first, second = observation.derivatives(f, y)
    at = f.clone().requires_grad_()
    (slope,) = torch.autograd.grad(observation.log_density(at, y).sum(), at, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), at)
    assert_close(first, slope.detach(), rtol=1e-9, atol=1e-12)
    assert_close(second, bend, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("likelihood", ["gaussian", "student-t", "poisson", "logistic", "probit"])
@pytest.mark.parametrize("expectation", ["quadrature", "delta"])
def test_the_solver_finds_what_the_engine_finds(likelihood: str, expectation: str) -> None:
    model = GLM(likelihood, expectation=expectation, fit_intercept=False, tol=1e-13, max_iter=500)
    model.fit(X, TARGETS[likelihood])
    y, family = torch.as_tensor(TARGETS[likelihood]).double(), Gaussian()
    prior = family.of(torch.zeros(3).double(), torch.eye(3).double())
    node = Node(family, family.of(torch.as_tensor(model.coef_).double().flatten() + 0.1, 30 * torch.eye(3).double()))
    rule = Delta() if expectation == "delta" else GaussHermite(64)
    seen = LinearPredictorFactor(node, torch.as_tensor(X), lambda f: model._observation.log_density(f, y), rule)
    result = run(node, [Prior(node, prior), seen], 500, domain="search", tolerance=1e-15)
    mean, covariance = node.moments
    assert_allclose(model.elbo_, result.elbo, rtol=1e-8)
    assert_allclose(model.coef_.ravel(), mean.numpy(), rtol=0, atol=2e-5)
    assert_allclose(model.coef_covariance_, covariance.numpy(), rtol=0, atol=2e-5)


def test_few_steps_are_enough() -> None:
    """The mean follows the variances within a step: 14 steps were needed without it, and 48 for separable classes."""
    rows, y = load_breast_cancer(return_X_y=True)
    rows = (rows - rows.mean(0)) / rows.std(0)
    separable = X[:40], (SIGNAL[:40] > 0).astype(int)
    for (own, labels), prior, most in (((rows, y), 1.0, 6), (separable, 1e-3, 20)):
        model = GLM("logistic", prior_precision=prior).fit(own, labels)
        limit = GLM("logistic", prior_precision=prior, tol=1e-15, max_iter=500).fit(own, labels)
        assert model.n_iter_ <= most
        assert (np.diff(model.elbos_) > 0).all()
        assert_allclose(model.elbo_, limit.elbo_, rtol=1e-8)
        deviation = np.sqrt(limit.coef_covariance_.diagonal())
        assert (np.abs(model.coef_ - limit.coef_) / deviation).max() < 1e-3
        assert_allclose(model.coef_covariance_.diagonal(), deviation**2, rtol=1e-2)


@pytest.mark.filterwarnings("ignore:not converged")
def test_labels_are_right_where_quadrature_saturates() -> None:
    """Separable classes and a flat prior: the deviation of x'θ is far beyond its mean, whose sign is right."""
    rng = np.random.default_rng(0)
    rows, new = rng.normal(size=(40, 60)), rng.normal(size=(500, 60))
    y = (rows[:, 0] > 0).astype(int)
    for likelihood in ("logistic", "probit"):
        model = GLM(likelihood, prior_precision=1e-10, max_iter=30).fit(rows, y)
        assert (model.predict(rows) == y).all()
        signs = (new @ model.coef_[0] + model.intercept_ > 0).astype(int)
        assert (model.predict(new) == signs).all()
        assert (model.predict_proba(new).argmax(1) == signs).all()


# --- learned priors ---


def test_a_learned_prior_is_that_of_bayesian_ridge() -> None:
    """On diabetes N(0, 1) explains nothing (R² 0.0005); the maximum is BayesianRidge's, without its hyperpriors."""
    rows, y = load_diabetes(return_X_y=True)
    peer = BayesianRidge(alpha_1=0, alpha_2=0, lambda_1=0, lambda_2=0, tol=1e-12, max_iter=1000).fit(rows, y)
    model = GLM(noise_scale="learn", prior_precision="learn", intercept_precision=1e-12, tol=1e-13, max_iter=500)
    model.fit(rows, y)
    assert_allclose(model.prior_precision_, peer.lambda_, rtol=1e-3)
    assert_allclose(model.noise_scale_, peer.alpha_**-0.5, rtol=2e-3)  # the peer's count ignores the intercept
    assert_allclose(model.coef_, peer.coef_, rtol=0, atol=0.5)  # of coefficients up to 500
    assert abs(model.score(rows, y) - peer.score(rows, y)) < 1e-4
    assert (np.diff(model.elbos_) >= 0).all()


def test_learned_precisions_are_where_the_evidence_is_greatest() -> None:
    rows, y = load_breast_cancer(return_X_y=True)
    rows = ((rows - rows.mean(0)) / rows.std(0))[:, :6]
    model = GLM("logistic", prior_precision="learn", tol=1e-12).fit(rows, y)
    near = [
        GLM("logistic", prior_precision=f * model.prior_precision_, tol=1e-12).fit(rows, y).elbo_ for f in (0.9, 1.1)
    ]
    assert model.elbo_ > max(near)
    same = GLM("logistic", prior_precision=model.prior_precision_, tol=1e-12).fit(rows, y)
    assert_allclose(model.elbo_, same.elbo_, rtol=1e-8)


def test_relevance_of_columns() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(200, 12)) * 10.0 ** rng.uniform(-2, 2, 12)
    y = rows[:, :3] @ (np.array([1.0, 2.0, -1.0]) / rows[:, :3].std(0)) + rng.normal(size=200)
    model = GLM(noise_scale="learn", prior_precision="ard", max_iter=500).fit(rows, y)
    peer = ARDRegression(threshold_lambda=1e12).fit(rows, y)
    scale = rows.std(0)
    assert_allclose(model.coef_ * scale, peer.coef_ * scale, rtol=0, atol=0.02)
    assert model.prior_precision_.shape == (12,)
    assert (abs(model.coef_ * scale)[3:] < 0.1).all()
    many = GLM("multinomial", prior_precision="ard", max_iter=500, tol=1e-6).fit(X, TARGETS["multinomial"])
    assert many.prior_precision_.shape == (3,)
    assert many.elbo_ > GLM("multinomial").fit(X, TARGETS["multinomial"]).elbo_


@pytest.mark.parametrize("likelihood", ["gaussian", "poisson", "student-t", "multinomial"])
@pytest.mark.parametrize("prior", ["learn", "ard"])
def test_columns_of_zeros_are_switched_off(likelihood: str, prior: str) -> None:
    """As of a category that no row has: the model of the other columns, and predictions that are finite."""
    options = dict(prior_precision=prior, tol=1e-11, max_iter=500)
    options |= {"noise_scale": "learn"} if likelihood in ("gaussian", "student-t") else {}
    y = TARGETS[likelihood]
    rows = np.c_[X, np.zeros(60)]
    model, other = GLM(likelihood, **options).fit(rows, y), GLM(likelihood, **options).fit(X, y)
    precisions = np.broadcast_to(model.prior_precision_, 4)
    if prior == "ard":
        assert_allclose(model.elbo_, other.elbo_, rtol=1e-7)
        assert_allclose(model.coef_[..., :3], other.coef_, rtol=0, atol=1e-3)
        assert precisions[3] >= 1e3 * precisions[:3].min()
    assert np.isfinite(precisions).all()
    assert (precisions > 1e-3).all()
    assert (model.coef_[..., 3] == 0).all()
    assert (model.coef_covariance_.diagonal() < 1e3).all()
    unit = np.eye(4)[3:]
    if likelihood != "multinomial":
        assert np.isfinite(model.predict(unit, return_std=True)).all()


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("prior", ["learn", "ard"])
def test_no_column_with_data_leaves_the_prior(prior: str, fit_intercept: bool) -> None:
    """The bound does not depend on precisions: they stay where the search starts, 1 for targets of size 1."""
    y = TARGETS["gaussian"] / TARGETS["gaussian"].std()
    model = GLM(prior_precision=prior, fit_intercept=fit_intercept).fit(np.zeros((60, 2)), y)
    assert_allclose(np.broadcast_to(model.prior_precision_, 2), 1.0, rtol=1e-12)
    assert_allclose(model.coef_covariance_, np.eye(2), rtol=1e-12)


# --- weights, offsets, sparse rows ---


@pytest.mark.parametrize("likelihood", list(TARGETS))
def test_weights_are_repetitions(likelihood: str) -> None:
    weights = np.arange(60) % 3
    times = np.repeat(np.arange(60), weights)
    options = {"noise_scale": "learn"} if likelihood in ("gaussian", "student-t") else {}
    options |= {"tol": 1e-11, "max_iter": 500}
    y = TARGETS[likelihood]
    model, twin = GLM(likelihood, **options).fit(X, y, weights), GLM(likelihood, **options).fit(X[times], y[times])
    assert_allclose(model.elbo_, twin.elbo_, rtol=1e-8)
    assert_allclose(model.coef_, twin.coef_, rtol=0, atol=1e-5)
    assert_allclose(model.coef_covariance_, twin.coef_covariance_, rtol=0, atol=1e-5)
    assert model.score(X, y, sample_weight=weights) == pytest.approx(twin.score(X[times], y[times]), abs=1e-6)


def test_weighted_modes_are_scikit_learns() -> None:
    weights = RNG.uniform(0.1, 2, size=60)
    model = GLM("logistic", expectation="delta").fit(X, LABELS, sample_weight=weights)
    peer = LogisticRegression(tol=1e-12, solver="newton-cholesky").fit(X, LABELS, weights)
    assert_allclose(model.coef_, peer.coef_, rtol=0, atol=1e-5)
    ridge = Ridge(0.5).fit(X, SIGNAL, weights)
    assert_allclose(GLM(prior_precision=0.5).fit(X, SIGNAL, weights).coef_, ridge.coef_, rtol=1e-5)
    counts = PoissonRegressor(alpha=0.7 / weights.sum(), tol=1e-10, max_iter=1000).fit(X, COUNTS, weights)
    model = GLM("poisson", expectation="delta", prior_precision=0.7).fit(X, COUNTS, weights)
    assert_allclose(model.coef_, counts.coef_, rtol=0, atol=1e-5)


def test_offsets_are_exposures() -> None:
    """Rates of events over unequal times, as statsmodels has them; and offsets of labels and numbers."""
    exposure = RNG.uniform(1, 9, size=60)
    counts = RNG.poisson(exposure * np.exp(SIGNAL / 2))
    peer = sm.GLM(counts, sm.add_constant(X), family=sm.families.Poisson(), offset=np.log(exposure)).fit(tol=1e-12)
    model = GLM("poisson", expectation="delta", prior_precision=1e-9, intercept_precision=1e-9)
    model.fit(X, counts, offset=np.log(exposure))
    assert_allclose(np.r_[model.intercept_, model.coef_], peer.params, rtol=0, atol=1e-6)
    assert_allclose(model.predict(X, offset=np.log(exposure)), exposure * model.predict(X), rtol=1e-10)
    shift = RNG.normal(size=60)
    assert_allclose(GLM().fit(X, SIGNAL, offset=shift).coef_, GLM().fit(X, SIGNAL - shift).coef_, rtol=1e-9)
    peer = sm.GLM(LABELS, sm.add_constant(X), family=sm.families.Binomial(), offset=shift).fit(tol=1e-12)
    model = GLM("logistic", expectation="delta", prior_precision=1e-9).fit(X, LABELS, offset=shift)
    assert_allclose(model.coef_[0], peer.params[1:], rtol=0, atol=1e-4)
    zero, two = np.zeros(60), GLM("multinomial", tol=1e-12, prior_precision=2.0, fit_intercept=False)
    two.fit(X, LABELS, offset=np.c_[zero, shift])
    one = GLM("logistic", tol=1e-12, fit_intercept=False).fit(X, LABELS, offset=shift)
    assert_allclose(two.coef_[1] - two.coef_[0], one.coef_[0], rtol=1e-3)


@pytest.mark.parametrize("likelihood", list(TARGETS))
@pytest.mark.parametrize("kind", [sparse.csr_matrix, sparse.csc_array])
def test_sparse_rows(likelihood: str, kind) -> None:
    rows = np.where(RNG.uniform(size=X.shape) < 0.5, 0, X)
    y = TARGETS[likelihood]
    model, twin = GLM(likelihood).fit(kind(rows), y), GLM(likelihood).fit(rows, y)
    assert_allclose(model.elbo_, twin.elbo_, rtol=1e-10)
    assert_allclose(model.coef_, twin.coef_, rtol=0, atol=1e-8)
    assert_allclose(model.coef_covariance_, twin.coef_covariance_, rtol=0, atol=1e-8)
    assert (model.predict(kind(rows)) == pytest.approx(twin.predict(rows), rel=1e-7)) or likelihood == "logistic"


def test_sparse_rows_stay_sparse() -> None:
    """A hundred thousand rows of 400 columns would take 320 MB."""
    rng = np.random.default_rng(0)
    rows = sparse.random(100_000, 400, 0.002, format="csr", random_state=rng)
    y = (rows @ np.ones(400) + rng.logistic(size=100_000) > 0).astype(int)
    tracemalloc.start()
    model = GLM("logistic", expectation="delta").fit(rows, y)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 80e6
    peer = LogisticRegression(tol=1e-8, solver="newton-cholesky").fit(rows[:, :], y)
    assert_allclose(model.coef_, peer.coef_, rtol=0, atol=1e-4)
