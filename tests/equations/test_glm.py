"""Generalised linear models against closed forms, scikit-learn, Jaakkola's bound and brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy import integrate, stats
from scipy.special import expit, log_ndtr, loggamma
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from sklearn.linear_model import LogisticRegression, PoissonRegressor, Ridge
from torch.testing import assert_close

from bayesgrad.families import Gaussian
from bayesgrad.inference import (
    Delta,
    GaussHermite,
    LinearPredictorFactor,
    LogDensity,
    MultiLinearPredictorFactor,
    Node,
    Prior,
    QuasiMonteCarlo,
    elbo,
    run,
)
from bayesgrad.models import GLM
from bayesgrad.models.multinomial import Multinomial, MultinomialLogLikelihood
from bayesgrad.models.observations import Logistic, Poisson, Probit, StudentT

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3))
SIGNAL = X @ np.array([1.0, -2.0, 0.5]) + 0.3


def standardised(load) -> tuple[np.ndarray, np.ndarray]:
    rows, y = load(return_X_y=True)
    return (rows - rows.mean(0)) / rows.std(0), y


# --- known answers ---


def test_ridge_regression_and_its_evidence() -> None:
    rows, y = load_diabetes(return_X_y=True)
    y = (y - y.mean()) / y.std()
    model = GLM("gaussian", prior_precision=0.1, fit_intercept=False).fit(rows, y)
    assert_allclose(model.coef_, Ridge(alpha=0.1, fit_intercept=False).fit(rows, y).coef_, rtol=0, atol=4e-13)
    assert_allclose(model.elbo_, -529.0749117867726, rtol=0, atol=1e-9)
    assert_allclose(model.coef_covariance_, np.linalg.inv(rows.T @ rows + 0.1 * np.eye(10)), rtol=1e-11)
    assert model.n_iter_ == 1


def test_newton_and_laplace() -> None:
    rows, y = standardised(load_breast_cancer)
    rows = np.c_[rows, np.ones(len(rows))]
    model = GLM("logistic", expectation="delta", fit_intercept=False).fit(rows, y)
    weights = model.coef_[0]
    objective = np.logaddexp(0, -(2 * y - 1) * (rows @ weights)).sum() + weights @ weights / 2
    assert_allclose([objective, model.elbo_], [37.7782257, -55.6319706], rtol=0, atol=5e-8)
    peer = LogisticRegression(C=1, fit_intercept=False, tol=1e-12, solver="newton-cholesky").fit(rows, y)
    assert_allclose(weights, peer.coef_[0], rtol=0, atol=1e-6)


def test_intercepts_are_free_as_in_scikit_learn() -> None:
    rows, y = standardised(load_breast_cancer)
    model = GLM("logistic", expectation="delta").fit(rows, y)
    peer = LogisticRegression(C=1, tol=1e-12, solver="newton-cholesky").fit(rows, y)
    assert_allclose(model.coef_, peer.coef_, rtol=0, atol=1e-5)
    assert_allclose(model.intercept_, peer.intercept_, rtol=0, atol=1e-5)
    y = rows @ np.ones(rows.shape[1]) + 100
    assert_allclose(GLM().fit(rows, y).intercept_, Ridge(alpha=1.0).fit(rows, y).intercept_, rtol=1e-6)


def test_intercepts_of_large_targets_are_not_shrunk() -> None:
    """Prices of 200,000, noise of 30,000: the intercept is scikit-learn's, and predictions have the mean of targets."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(200, 2))
    y = 200_000 + 50_000 * rows[:, 0] + 30_000 * rng.normal(size=200)
    model = GLM(noise_scale=30_000.0, prior_precision=1e-9).fit(rows, y)
    peer = Ridge(alpha=1e-9 * 30_000**2).fit(rows, y)
    assert_allclose([model.intercept_, *model.coef_], [peer.intercept_, *peer.coef_], rtol=1e-8)
    learned = GLM(noise_scale="learn", prior_precision="learn").fit(rows, y)
    assert_allclose(learned.predict(rows).mean(), y.mean(), rtol=1e-6)
    assert_allclose(learned.noise_scale_, 30_000, rtol=0.2)


@pytest.mark.parametrize("likelihood", ["gaussian", "student-t"])
def test_units_of_targets_are_units_of_intercepts(likelihood: str) -> None:
    """Targets in units of 10^-5 have weights times 10^5 and a bound that differs by the densities' factor, 10^-5."""
    rng = np.random.default_rng(1)
    y = 20 + SIGNAL + rng.standard_t(5, size=60)
    model = GLM(likelihood, prior_precision=0.1, tol=1e-12).fit(X, y)
    large = GLM(likelihood, noise_scale=1e5, prior_precision=1e-11, tol=1e-12).fit(X, 1e5 * y)
    assert_allclose(large.coef_, 1e5 * model.coef_, rtol=1e-5)
    assert_allclose(large.intercept_, 1e5 * model.intercept_, rtol=1e-7)
    assert_allclose(large.elbo_, model.elbo_ - 60 * np.log(1e5), rtol=1e-9)


def test_the_prior_of_intercepts_has_the_mean_square_of_targets() -> None:
    """Weighted and less offsets, of a stream that of its first batch; targets below 1 and counts have 1e-6."""
    rng = np.random.default_rng(2)
    weights, offset = rng.uniform(size=60), 50 * rng.normal(size=60)
    given, counts = [weights, offset], rng.poisson(5.0, size=60)
    for model, y, square in (
        (GLM(), 100 * SIGNAL, np.average((100 * SIGNAL - offset) ** 2, weights=weights)),
        (GLM(), 1e-3 * SIGNAL + offset, 1.0),
        (GLM("poisson"), counts, 1.0),
    ):
        shown = given if model.likelihood == "gaussian" else [weights]
        same = GLM(model.likelihood, intercept_precision=1e-6 / square).fit(X, y, *shown)
        assert_allclose(model.fit(X, y, *shown).elbo_, same.elbo_, rtol=1e-12)
        assert model.get_params()["intercept_precision"] is None
    y = 100 * SIGNAL
    stream = GLM().partial_fit(X[:20], y[:20]).partial_fit(X[20:], y[20:])
    whole = GLM(intercept_precision=1e-6 / np.mean(y[:20] ** 2)).fit(X, y)
    assert_allclose(stream.elbo_, whole.elbo_, rtol=1e-9)
    assert_allclose(stream.intercept_, whole.intercept_, rtol=1e-8)


def test_multinomial_at_the_mode() -> None:
    rows, y = standardised(load_iris)
    model = GLM("multinomial", expectation="delta", prior_precision=2.0, tol=1e-13).fit(rows, y)
    peer = LogisticRegression(C=0.5, tol=1e-12, max_iter=1000, solver="newton-cholesky").fit(rows, y)
    assert_allclose(model.coef_, peer.coef_, rtol=0, atol=2e-5)
    assert_allclose(model.intercept_ - model.intercept_.mean(), peer.intercept_ - peer.intercept_.mean(), atol=2e-4)


def test_poisson_at_the_mode() -> None:
    y = RNG.poisson(np.exp(SIGNAL / 2))
    model = GLM("poisson", expectation="delta", prior_precision=0.7).fit(X, y)
    peer = PoissonRegressor(alpha=0.7 / len(X), tol=1e-10, max_iter=1000).fit(X, y)
    assert_allclose(model.coef_, peer.coef_, rtol=0, atol=1e-5)
    assert_allclose(model.intercept_, peer.intercept_, rtol=0, atol=1e-5)


# --- the bound ---


def brute_force(log_likelihood, prior_precision: float = 1.0) -> tuple[float, float]:
    """Log evidence and posterior mean of one weight, by adaptive quadrature."""

    def joint(w: float) -> float:
        return log_likelihood(w) + stats.norm.logpdf(w, scale=prior_precision**-0.5)

    grid = np.linspace(-6, 6, 601)
    values = np.array([joint(w) for w in grid])
    top, peak = values.max(), grid[values.argmax()]
    mass = integrate.quad(lambda w: np.exp(joint(w) - top), peak - 3, peak + 3, epsabs=1e-12)[0]
    first = integrate.quad(lambda w: w * np.exp(joint(w) - top), peak - 3, peak + 3, epsabs=1e-12)[0]
    return np.log(mass) + top, first / mass


x, one = X[:, 0], SIGNAL + RNG.normal(size=60)
CASES = {
    "logistic": ((one > 0).astype(int), lambda z, y: -np.logaddexp(0, -(2 * y - 1) * z)),
    "probit": ((one > 0).astype(int), lambda z, y: log_ndtr((2 * y - 1) * z)),
    "poisson": (RNG.poisson(np.exp(x / 2)), lambda z, y: y * z - np.exp(z) - loggamma(y + 1)),
    "student-t": (x + RNG.standard_t(3, size=60), lambda z, y: stats.t.logpdf(y - z, 4)),
}


@pytest.mark.parametrize("likelihood", list(CASES))
def test_bounds_are_complete_and_tight(likelihood: str) -> None:
    """Below the log evidence, by no more than the skew of sixty observations' posterior costs."""
    y, density = CASES[likelihood]
    model = GLM(likelihood, fit_intercept=False).fit(x[:, None], y)
    evidence, mean = brute_force(lambda w: density(w * x, y).sum())
    assert -0.01 < model.elbo_ - evidence < 1e-9
    deviation = np.sqrt(model.coef_covariance_[0, 0])
    assert abs(model.coef_.item() - mean) < 0.01 * deviation


def jaakkola(rows: np.ndarray, y: np.ndarray) -> float:
    """The best of Jaakkola and Jordan's bounds on the evidence, prior N(0, I): their EM for ξ."""
    xi = np.ones(len(y))
    for _ in range(500):
        curvature = np.tanh(xi / 2) / (4 * xi)
        precision = np.eye(rows.shape[1]) + 2 * (rows.T * curvature) @ rows
        covariance = np.linalg.inv(precision)
        mean = covariance @ (rows.T @ (y - 0.5))
        xi = np.sqrt(((rows @ covariance) * rows).sum(1) + (rows @ mean) ** 2)
    constant = (np.log(expit(xi)) - xi / 2 + curvature * xi**2).sum()
    return constant + mean @ precision @ mean / 2 + np.linalg.slogdet(covariance)[1] / 2


def test_the_bound_is_tighter_than_jaakkolas() -> None:
    for load in (load_breast_cancer, None):
        rows, y = standardised(load) if load else (X, (SIGNAL > 0).astype(int))
        ours, theirs = GLM("logistic", fit_intercept=False).fit(rows, y).elbo_, jaakkola(rows, y)
        assert 0.01 < ours - theirs < 20


def test_quadrature_and_draws_agree() -> None:
    y = (one > 0).astype(int)
    exact, drawn = (GLM("logistic", expectation=e).fit(X, y) for e in ("quadrature", "mc"))
    deviation = np.sqrt(exact.coef_covariance_.diagonal())
    assert_allclose(drawn.coef_ / deviation, exact.coef_ / deviation, atol=0.05)
    assert_allclose(drawn.elbo_, exact.elbo_, atol=0.1)


def test_quadratures_hessian_is_the_derivative_of_its_value() -> None:
    """By central differences in the variance, where 8 points are far too few for the function."""
    rule, mean, variance = (
        GaussHermite(8, "reparameterised"),
        torch.tensor([0.3]).double(),
        torch.tensor([90.0]).double(),
    )
    value = lambda v: rule.scalar(torch.nn.functional.logsigmoid, mean, v).value  # noqa: E731
    slope = (value(variance + 1e-3) - value(variance - 1e-3)) / 2e-3
    assert_close(rule.scalar(torch.nn.functional.logsigmoid, mean, variance).second / 2, slope, rtol=1e-6, atol=0)


# --- several outputs ---


def test_two_classes_are_logistic_with_twice_the_variance() -> None:
    """z = f_1 - f_0 has prior variance 2."""
    cancer = standardised(load_breast_cancer)  # deviations of 9 in z, for which 32 points are too few
    for rows, y in ((X, (one > 0).astype(int)), cancer):
        both = GLM("multinomial", fit_intercept=False, tol=1e-13).fit(rows, y)
        single = GLM("logistic", prior_precision=0.5, fit_intercept=False, tol=1e-13).fit(rows, y)
        assert_allclose(both.elbo_, single.elbo_, rtol=1e-11)
        assert_allclose(both.coef_[1] - both.coef_[0], single.coef_[0], rtol=1e-5, atol=1e-7)
        assert_allclose(both.predict_proba(rows), single.predict_proba(rows), atol=1e-7)


@pytest.mark.parametrize("expectation", ["quadrature", "delta", "mc"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_rows_of_zeros_tell_nothing_of_classes(count: int, expectation: str) -> None:
    """Without an intercept an empty document has equal probabilities, by which the bound changes."""
    y = np.arange(60) % count
    options = dict(expectation=expectation, fit_intercept=False, tol=1e-13)
    model = GLM("multinomial", **options).fit(np.r_[X, np.zeros((1, 3))], np.r_[y, 0])
    assert_allclose(model.predict_proba(np.zeros((2, 3))), 1 / count, rtol=1e-12)
    if expectation != "mc":  # whose noise depends on the number of rows
        other = GLM("multinomial", **options).fit(X, y)
        assert_allclose(model.elbo_, other.elbo_ - np.log(count), rtol=1e-11)
        assert_allclose(model.coef_, other.coef_, rtol=0, atol=1e-6)


def test_classes_are_exchangeable() -> None:
    """Contrasts are a basis, not a choice: classes by other names have the same posterior."""
    rows, y = standardised(load_iris)
    names = np.array([2, 0, 1])
    model, other = (GLM("multinomial", tol=1e-12).fit(rows, labels) for labels in (y, names[y]))
    assert_allclose(other.elbo_, model.elbo_, rtol=1e-5)
    assert_allclose(other.coef_[names], model.coef_, atol=1e-3)


def test_multinomial_covariance_is_of_all_weights() -> None:
    """Where the data are uninformative it is the prior; samples have the stated covariance."""
    rows, y = standardised(load_iris)
    strong = GLM("multinomial", prior_precision=np.array([1e9, 1e9, 2e9, 3e9]), fit_intercept=False).fit(rows, y)
    assert_allclose(strong.coef_covariance_.diagonal(), np.tile([1e-9, 1e-9, 5e-10, 1e-9 / 3], 3), rtol=1e-4)
    model = GLM("multinomial").fit(rows, y)
    coef, intercept = model.sample_posterior(20_000, random_state=1)
    assert intercept.shape == (20_000, 3)
    drawn = coef.reshape(len(coef), -1)
    error = np.abs(np.cov(drawn.T) - model.coef_covariance_)
    deviation = np.sqrt(model.coef_covariance_.diagonal())
    assert (error < 5 * np.outer(deviation, deviation) * np.sqrt(2 / 20_000)).all()
    assert (np.abs(drawn.mean(0) - model.coef_.ravel()) < 5 * deviation / np.sqrt(20_000)).all()


@pytest.mark.parametrize("rule", [Delta(), GaussHermite(12)])
def test_several_outputs_are_a_log_density(rule) -> None:
    rows, y = torch.as_tensor(X[:4, :1]), torch.tensor([0.0, 2.0, 1.0, 0.0]).double()
    family, softmax = Gaussian(), Multinomial(3)
    spread = torch.tensor([[2.0, 0.3], [0.3, 1.0]]).double()
    node = Node(family, family.of(torch.tensor([0.4, -0.7]).double(), spread))
    many = MultiLinearPredictorFactor(node, rows, MultinomialLogLikelihood(softmax, y), rule)
    slow = MultiLinearPredictorFactor(node, rows, lambda z: softmax.log_density(z, y), rule)
    whole = LogDensity(node, lambda theta: softmax.log_density(rows * theta, y).sum(), rule)
    for other, precision in ((slow, 1e-12), (whole, 1e-5)):
        assert_close(many.value(), other.value(), rtol=precision, atol=0)
        for a, b in zip(many.message(node), other.message(node)):
            assert_close(a, b, rtol=precision, atol=precision)


def test_quasi_random_points() -> None:
    """Exact for cubics; of a softmax of five classes within 1e-3 of 2^16 points."""
    mean, root = torch.tensor([[0.5, -1.0, 0.2]]).double(), torch.randn(1, 3, 3).double().tril() * 0 + torch.eye(3)
    at, _, weights = QuasiMonteCarlo(64).points(mean, root.double())
    assert_close((weights[:, None] * at[:, 0]).sum(0), mean[0], rtol=1e-12, atol=1e-14)
    assert_close((weights * at[:, 0, 0] ** 2 * at[:, 0, 1]).sum(), torch.tensor(-1.25).double(), rtol=1e-12, atol=0)
    softmax, labels = Multinomial(5), torch.tensor([3.0]).double()
    mean, root = torch.tensor([[0.5, -1.0, 0.2, 2.0]]).double(), 1.5 * torch.eye(4)[None].double()
    few, many = (QuasiMonteCarlo(n).rows(MultinomialLogLikelihood(softmax, labels), mean, root) for n in (256, 1 << 16))
    for a, b in zip(few, many):
        assert_close(a, b, rtol=0, atol=5e-3)


# --- noise that is learned, streams, predictions ---


def test_learned_noise_is_where_the_evidence_is_greatest() -> None:
    rows, y = load_diabetes(return_X_y=True)
    y = (y - y.mean()) / y.std()
    model = GLM("gaussian", fit_intercept=False, noise_scale="learn", tol=1e-14, max_iter=500).fit(rows, y)

    def evidence(scale: float) -> float:
        return stats.multivariate_normal(None, rows @ rows.T + scale**2 * np.eye(len(y))).logpdf(y)

    best = evidence(model.noise_scale_)
    assert_allclose(model.elbo_, best, rtol=1e-9)
    assert best > max(evidence(0.99 * model.noise_scale_), evidence(1.01 * model.noise_scale_))


def test_robust_regression_ignores_outliers() -> None:
    """A fifth of the targets are far away; the weights stay within four deviations of the truth, ridge's do not."""
    rng = np.random.default_rng(1)
    rows, truth = rng.normal(size=(200, 3)), np.array([1.0, -2.0, 3.0])
    y = rows @ truth + 4 + 0.3 * rng.normal(size=200)
    y[:40] += 50 * rng.normal(size=40) + 30
    model = GLM("student-t", noise_scale="learn", dof="learn").fit(rows, y)
    deviation = np.sqrt(model.coef_covariance_.diagonal())
    assert (np.abs(model.coef_ - truth) < 4 * deviation).all()
    assert (deviation < 0.05).all()
    assert 0.1 < model.noise_scale_ < 0.4
    assert model.dof_ < 1.5
    assert np.abs(Ridge().fit(rows, y).coef_ - truth).max() > 0.5


def test_streamed_gaussian_batches_are_the_whole() -> None:
    options = dict(noise_scale=0.5, intercept_precision=1e-6)  # by default it depends on the first batch
    whole, parts = GLM(**options).fit(X, SIGNAL), GLM(**options)
    for rows, y in zip(np.split(X, 6), np.split(SIGNAL, 6)):
        parts.partial_fit(rows, y)
    assert_allclose(parts.coef_, whole.coef_, rtol=1e-9)
    assert_allclose(parts.coef_covariance_, whole.coef_covariance_, rtol=1e-8, atol=1e-12)
    assert_allclose(parts.elbo_, whole.elbo_, rtol=1e-8)


@pytest.mark.parametrize("likelihood", ["logistic", "poisson", "multinomial"])
def test_streamed_batches_are_nearly_the_whole(likelihood: str) -> None:
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(1200, 2))
    signal = rows @ np.array([0.8, -0.5])
    y = rng.poisson(np.exp(signal)) if likelihood == "poisson" else (signal + rng.logistic(size=1200) > 0).astype(int)
    if likelihood == "multinomial":
        y = y + (rows[:, 0] > 1)
    whole, parts = GLM(likelihood).fit(rows, y), GLM(likelihood)
    for batch, targets in zip(np.split(rows, 8), np.split(y, 8)):
        options = {} if likelihood == "poisson" else dict(classes=np.unique(y))
        parts.partial_fit(batch, targets, **options)
    deviation = np.sqrt(whole.coef_covariance_.diagonal()).reshape(whole.coef_.shape)
    assert (np.abs(parts.coef_ - whole.coef_) < 0.2 * deviation).all()
    assert_allclose(parts.elbo_, whole.elbo_, atol=1.0)


def test_predictions_average_over_the_belief() -> None:
    """Against draws of weights, within five standard errors."""
    y = RNG.poisson(np.exp(SIGNAL / 2))
    labels = (one > 0).astype(int) + (one > 1)
    for model in (
        GLM("poisson").fit(X[:20], y[:20]),
        GLM("logistic").fit(X[:20], labels[:20] > 0),
        GLM("probit").fit(X[:20], labels[:20] > 0),
        GLM("multinomial").fit(X, labels),
    ):
        coef, intercept = model.sample_posterior(4000, random_state=3)
        if model.likelihood == "poisson":
            drawn = np.exp(coef @ X[:5].T + intercept[:, None])
            found = model.predict(X[:5])
        elif model.likelihood == "multinomial":
            drawn = torch.as_tensor(coef @ X[:5].T + intercept[..., None]).softmax(1)[:, 1].numpy()
            found = model.predict_proba(X[:5])[:, 1]
        else:
            link = expit if model.likelihood == "logistic" else stats.norm.cdf
            drawn = link(coef[:, 0] @ X[:5].T + intercept)
            found = model.predict_proba(X[:5])[:, 1]
        assert (np.abs(drawn.mean(0) - found) < 5 * drawn.std(0) / np.sqrt(4000)).all()


def test_deviations_of_predictions() -> None:
    model = GLM(noise_scale=0.7).fit(X, SIGNAL)
    mean, deviation = model.predict(X[:2], return_std=True)
    design = np.c_[X, np.ones(60)]
    covariance = np.linalg.inv(design.T @ design / 0.49 + np.diag([1, 1, 1, 1e-6]))
    assert_allclose(deviation**2, 0.49 + ((design[:2] @ covariance) * design[:2]).sum(1), rtol=1e-9)
    assert_allclose(mean, X[:2] @ model.coef_ + model.intercept_, rtol=1e-12)
    heavy = GLM("student-t", dof=3.0).fit(X, SIGNAL)
    assert (heavy.predict(X[:2], return_std=True)[1] > np.sqrt(3)).all()
    assert np.isinf(GLM("student-t", dof=2.0).fit(X, SIGNAL).predict(X[:2], return_std=True)[1]).all()


def test_densities_far_out() -> None:
    """log Φ and its derivative at -40 and at -1e4, where Φ is 0 in float64."""
    z, y = torch.tensor([-40.0, -1e4]).double().requires_grad_(), torch.ones(2).double()
    value = Probit().log_density(z, y)
    assert_close(value.detach(), torch.as_tensor(log_ndtr(z.detach().numpy())), rtol=1e-13, atol=0)
    (slope,) = torch.autograd.grad(value.sum(), z)
    assert_close(slope, torch.tensor([40.02496886, 1e4 + 1e-4]).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("observation", [Logistic(), Probit(), Poisson(), StudentT(1.3, 4.0)])
def test_information_is_fishers(observation) -> None:
    """The mean of squared scores over targets, summed or integrated."""
    z = torch.tensor([0.4]).double()
    if isinstance(observation, StudentT):
        y = torch.linspace(-400, 400, 800_001, dtype=torch.float64)
        step = (y[1] - y[0]).item()
    else:
        y, step = torch.arange(60 if isinstance(observation, Poisson) else 2, dtype=torch.float64), 1.0
    at = z.expand(len(y)).clone().requires_grad_()
    density = observation.log_density(at, y)
    (score,) = torch.autograd.grad(density.sum(), at)
    found = (density.detach().exp() * score.square()).sum() * step
    assert_close(observation.information(z).item(), found.item(), rtol=1e-6, atol=0)


def test_a_search_with_delta_goes_by_the_joint_density() -> None:
    """Newton's steps overshoot for counts from a poor start; halved ones find the mode."""
    rows, y = torch.as_tensor(3 * X), torch.as_tensor(RNG.poisson(np.exp(SIGNAL))).double()
    family = Gaussian()
    prior = family.of(torch.zeros(3).double(), torch.eye(3).double())
    node = Node(family, family.of(torch.full((3,), -2.0).double(), torch.eye(3).double()))
    factors = [Prior(node, prior), LinearPredictorFactor(node, rows, lambda z: Poisson().log_density(z, y), Delta())]
    heights = []
    for _ in range(60):
        run(node, factors, steps=1, tolerance=0, domain="search")
        mean = node.moments[0]
        heights.append((Poisson().log_density(rows @ mean, y).sum() - mean.square().sum() / 2).item())
    assert (np.diff(heights) > -1e-9 * abs(heights[-1])).all()
    mean, precision = node.moments[0], torch.eye(3) + rows.mT @ ((rows @ node.moments[0]).exp()[:, None] * rows)
    gradient = rows.mT @ (y - (rows @ mean).exp()) - mean
    assert gradient.abs().max() < 1e-6
    volume = torch.linalg.slogdet(precision)[1] / 2
    assert_close(elbo([node], factors).item(), heights[-1] - volume.item(), rtol=1e-9, atol=0)  # Laplace's evidence
