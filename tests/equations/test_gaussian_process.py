"""Gaussian processes against scikit-learn, dense inference with the same engine, closed forms and quadrature."""

from __future__ import annotations

import itertools

import mpmath
import numpy as np
import pytest
import torch
from scipy import integrate, optimize, special, stats
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.exceptions import NotFittedError
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process import kernels as peers
from sklearn.utils.estimator_checks import estimator_checks_generator
from torch import Tensor
from torch.testing import assert_close

from bayesgrad.families import Gaussian
from bayesgrad.inference import (
    Delta,
    ElementwiseFactor,
    GaussHermite,
    LinearPredictorFactor,
    Node,
    Prior,
    run,
    run_to_convergence,
)
from bayesgrad.inference import elbo as bound
from bayesgrad.models import GaussianProcess, kernels, observations
from bayesgrad.models.process import ProcessWithSites

NORMAL = Gaussian()
QUADRATURE = GaussHermite(40, "reparameterised")


def diabetes() -> tuple[np.ndarray, np.ndarray]:
    X, y = load_diabetes(return_X_y=True)
    return X, (y - y.mean()) / y.std()


def breast_cancer(rows: int) -> tuple[np.ndarray, np.ndarray]:
    X, y = load_breast_cancer(return_X_y=True)
    return ((X - X.mean(0)) / X.std(0))[:rows], y[:rows]


def fixed(kernel=None, likelihood="gaussian", **options) -> GaussianProcess:
    return GaussianProcess(kernel, likelihood, optimizer=None, **options)


# --- kernels ---


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (2.0 * kernels.RBF(0.7), 2.0 * peers.RBF(0.7)),
        (kernels.RBF(torch.tensor([0.5, 1.0, 2.0])), peers.RBF([0.5, 1.0, 2.0])),
        (kernels.Matern12(0.7), peers.Matern(0.7, nu=0.5)),
        (kernels.Matern32(0.7), peers.Matern(0.7, nu=1.5)),
        (kernels.Matern52(0.7) + 0.3, peers.Matern(0.7, nu=2.5) + 0.3),
        (kernels.Linear(1.0) * kernels.RBF(1.0) + 0.25, peers.DotProduct(0.0) * peers.RBF(1.0) + 0.25),
    ],
)
def test_kernels_are_scikit_learns(ours: kernels.Kernel, theirs) -> None:
    rows = np.random.default_rng(0).normal(size=(9, 3)) + 5.0
    assert_close(
        ours(torch.as_tensor(rows[:4]), torch.as_tensor(rows)).numpy(), theirs(rows[:4], rows), rtol=1e-11, atol=0
    )
    assert_close(ours.diagonal(torch.as_tensor(rows)).numpy(), theirs.diag(rows), rtol=1e-12, atol=0)


def test_kernels_take_themselves_apart() -> None:
    kernel = 2.0 * kernels.RBF(0.5) + kernels.Linear(3.0)
    numbers = kernel.hyperparameters()
    assert {name: n.item() for name, n in numbers.items()} == {
        "left.left.variance": 2.0,
        "left.right.length": 0.5,
        "right.variance": 3.0,
    }
    assert repr(kernel.with_hyperparameters({**numbers, "right.variance": torch.tensor(7.0)}).detached()).endswith(
        "Linear(variance=7))"
    )
    with pytest.raises(ValueError, match="length of RBF must be positive, got -1"):
        kernels.RBF(-1.0)
    with pytest.raises(ValueError, match="length must be one number or 3"):
        kernels.RBF(torch.ones(2))(torch.ones(1, 3), torch.ones(1, 3))


# --- regression: one step, and the evidence ---


def test_regression_is_scikit_learns() -> None:
    """100 rows of diabetes, 1 * RBF(0.1), noise variance 0.5: evidence, means and deviations."""
    X, y = diabetes()
    model = fixed(1.0 * kernels.RBF(0.1), observations.Gaussian(0.5**0.5)).fit(X[:100], y[:100])
    peer = GaussianProcessRegressor(1.0 * peers.RBF(0.1), alpha=0.5, optimizer=None).fit(X[:100], y[:100])
    assert_close(model.elbo_, -127.6852613676, rtol=0, atol=1e-9)
    mean, deviation = model.predict(X[100:], return_std=True)
    want, spread = peer.predict(X[100:], return_std=True)
    assert_close(mean, want, rtol=0, atol=3e-10)
    assert_close(deviation, spread, rtol=0, atol=3e-10)
    noisy = model.predict(X[100:], return_std=True, noise=True)[1]
    assert_close(noisy, np.sqrt(spread**2 + 0.5), rtol=0, atol=3e-10)
    assert_close(model.score(X[100:], y[100:]), peer.score(X[100:], y[100:]), rtol=1e-10, atol=0)
    assert_close(model.log_predictive(X[100:103], y[100:103]), stats.norm(want, noisy).logpdf(y[100:])[:3])


def test_regression_chooses_numbers_as_scikit_learn_does() -> None:
    X, y = diabetes()
    X, y = X[:80, :3], y[:80]
    model = GaussianProcess(1.0 * kernels.RBF(0.1), observations.Gaussian(0.7)).fit(X, y)
    peer = GaussianProcessRegressor(1.0 * peers.RBF(0.1) + peers.WhiteKernel(0.49)).fit(X, y)
    assert_close(model.elbo_, peer.log_marginal_likelihood_value_, rtol=0, atol=1e-5)


def test_noise_that_vanishes_is_no_harm() -> None:
    """Targets without noise: the bound climbs to where noise is as small as allowed, and predictions are exact."""
    X = np.linspace(0, 3, 20)[:, None]
    model = GaussianProcess().fit(X, np.sin(X[:, 0]))
    assert model.elbo_ > 60
    assert_close(model.predict(np.array([[1.5]])), np.sin([1.5]), rtol=0, atol=1e-3)


def test_draws_have_the_posteriors_moments() -> None:
    """20,000 functions at three places, within five standard errors."""
    X, y = diabetes()
    model = fixed(1.0 * kernels.RBF(0.1), observations.Gaussian(0.7)).fit(X[:30], y[:30])
    peer = GaussianProcessRegressor(1.0 * peers.RBF(0.1), alpha=0.49, optimizer=None).fit(X[:30], y[:30])
    mean, covariance = peer.predict(X[30:33], return_cov=True)
    draws = model.sample(X[30:33], 20_000)
    assert (np.abs(draws.mean(0) - mean) <= 5 * np.sqrt(covariance.diagonal() / 20_000)).all()
    variances = covariance**2 + np.outer(covariance.diagonal(), covariance.diagonal())
    assert (np.abs(np.cov(draws.T) - covariance) <= 5 * np.sqrt(variances / 20_000)).all()


# --- sites ---


def laws(family: ProcessWithSites, natural: tuple[Tensor, ...]) -> None:
    """∇A = μ by autograd of an independent transcription, KL and covariance of the dense Gaussian."""
    K = family.covariance
    first, second = (part.clone().requires_grad_() for part in natural)
    precision = torch.linalg.inv(K) - 2 * torch.diag(second)
    value = first @ torch.linalg.solve(precision, first) / 2 - (torch.logdet(precision) + torch.logdet(K)) / 2
    assert_close(family.log_partition(natural), value.detach(), rtol=1e-9, atol=1e-9)
    assert_close(family.mean(natural), torch.autograd.grad(value, (first, second)), rtol=1e-8, atol=1e-9)
    exact, own = family.to_distribution(natural), torch.distributions.MultivariateNormal(torch.zeros(len(K)).to(K), K)
    assert_close(exact.covariance_matrix, torch.linalg.inv(precision).detach(), rtol=1e-8, atol=1e-9)
    assert_close(-family.entropy(natural), torch.distributions.kl_divergence(exact, own), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("lowest", [0.3, 0.0, -0.2])
def test_sites_are_a_family(lowest: float) -> None:
    """With precisions that are all positive, partly zero, and partly negative."""
    x = torch.linspace(0, 2, 5).double()[:, None]
    W = torch.tensor([lowest, 1.0, 2.0, lowest, 1e-7]).double()
    first = torch.tensor([1.0, -1.0, 0.5, 0.2, 0.0]).double()
    laws(ProcessWithSites((1.5 * kernels.Matern32(0.7))(x, x)), (first, -W / 2))


def test_sites_far_above_the_noise_keep_their_digits() -> None:
    """The numbers of a kernel variance of 1e5, noise of 1e-3 and some negative or weak sites, against 60 digits.

    Differences of numbers of the size of K W K made predictive variances wrong by 5 % here, and 0 in some fits.
    """
    rng, size = np.random.default_rng(0), 24
    x, new = (torch.as_tensor(rng.normal(size=(n, 5))) for n in (size, 4))
    kernel = 1e5 * kernels.RBF(16.0)
    K, cross = kernel(x, x), kernel(x, new)
    W = torch.as_tensor(rng.uniform(800, 1100, size))
    W[[3, 7, 11, 12, 15]] = torch.tensor([-0.4, -0.03, -1e-9, 1e-9, 0.0]).double()
    targets = torch.as_tensor(100 * rng.normal(size=5)) @ x.mT + torch.as_tensor(0.03 * rng.normal(size=size))
    first = W * targets
    first[[12, 15]] = torch.tensor([0.4, -0.2]).double()
    found = ProcessWithSites(K).at((first, -W / 2))
    with mpmath.workdps(60):
        prior, site = mpmath.matrix(K.tolist()), mpmath.diag(W.tolist())
        # (K + W^-1)^-1 = W - W Sigma W, with Sigma = (I + K W)^-1 K, exists with W = 0 too
        covariance = mpmath.inverse(mpmath.eye(size) + prior * site) * prior
        mean = covariance * mpmath.matrix(first.tolist())
        weights = mpmath.matrix(first.tolist()) - site * mean
        inverse = site - site * covariance * site
        beside = mpmath.matrix(cross.tolist())
        reduced = beside.T * inverse * beside
        volume = float(mpmath.log(mpmath.det(mpmath.eye(size) + prior * site)))
        known = [np.array(part.tolist(), dtype=float) for part in (covariance, mean, weights, inverse)]
        left = [float(mpmath.mpf(1e5) - reduced[i, i]) for i in range(4)]
        values = np.array((beside.T * weights).tolist(), dtype=float)[:, 0]
    assert_close(found.variance.numpy(), np.diag(known[0]).copy(), rtol=1e-8, atol=0)
    assert_close(found.mean.numpy(), known[1][:, 0], rtol=0, atol=1e-7)
    assert_close((cross.mT @ found.weights).numpy(), values, rtol=0, atol=1e-8)
    assert_close(found.volume.item(), volume, rtol=1e-10, atol=0)
    outer = known[2] * known[2].T
    assert_close(2 * found.gradient().numpy(), outer - known[3], rtol=0, atol=1e-6)
    assert_close((1e5 - found.reduction(cross, diagonal=True)).numpy(), np.array(left), rtol=1e-8, atol=0)
    assert_close(found.reduction(cross).diagonal(), found.reduction(cross, diagonal=True), rtol=1e-14, atol=0)


def test_sites_that_leave_no_distribution_are_outside() -> None:
    family = ProcessWithSites(torch.eye(2).double())
    zero = torch.zeros(2).double()
    assert not family.in_domain((zero, torch.tensor([0.0, 0.6]).double()))
    with pytest.raises(ValueError, match="these sites do not define a distribution"):
        family.moments((zero, torch.tensor([0.0, 0.6]).double()))
    with pytest.raises(ValueError, match="must define a distribution, with sites for which"):
        Node(family, (zero, torch.tensor([0.0, 0.6]).double()))


TARGETS = {
    "logistic": [0, 1, 1, 0, 1, 1, 0, 1],
    "probit": [0, 1, 1, 0, 1, 1, 0, 1],
    "poisson": [0, 3, 1, 0, 7, 2, 2, 11],
    "student-t": [0.1, 0.3, 8.0, 0.2, -0.5, 0.1, -6.0, 0.0],
}


@pytest.mark.parametrize("likelihood", list(TARGETS))
def test_sites_are_the_variational_optimum(likelihood: str) -> None:
    """Bound, means, variances and predictions of a dense Gaussian that the engine fits over all values."""
    X, y = np.linspace(-2, 2, 8)[:, None] ** 3, np.array(TARGETS[likelihood])
    kernel, seen = 1.5 * kernels.Matern32(1.0), observations.get_observation(likelihood)
    model = fixed(kernel, likelihood, expectation=QUADRATURE, tol=1e-14).fit(X, y)
    rows, target = torch.as_tensor(X), torch.as_tensor(y).double()
    K = kernel(rows, rows)
    node = Node(NORMAL, NORMAL.of(torch.zeros(8).double(), torch.linalg.inv(K)))
    eye = torch.eye(8).double()
    factors = [
        Prior(node, node.natural),
        LinearPredictorFactor(node, eye, lambda f: seen.log_density(f, target), QUADRATURE),
    ]
    result = run(node, factors, 1000, rho=0.5, domain="search", tolerance=1e-15)
    assert_close(model.elbo_, result.elbo, rtol=1e-9, atol=0)
    mean, covariance = NORMAL.moments(node.natural)
    found = model.latent(X)
    assert_close(found[0], mean.numpy(), rtol=0, atol=2e-6)
    assert_close(found[1], covariance.diagonal().numpy(), rtol=0, atol=2e-6)
    if likelihood == "student-t":  # the sites of outliers have negative precisions
        assert (model.sites_[1] > 0).any()
    new = torch.tensor([[0.3]]).double()
    gain = torch.linalg.solve(K, kernel(rows, new))[:, 0]
    want = kernel(new, new) - gain @ (K - covariance) @ gain
    assert_close(model.latent(new)[1], want[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("likelihood", list(TARGETS))
def test_one_value_against_quadrature(likelihood: str) -> None:
    """The bound is below the evidence, and no other Gaussian has a higher one."""
    y = {"logistic": 1.0, "probit": 1.0, "poisson": 3.0, "student-t": 4.0}[likelihood]
    seen = observations.get_observation(likelihood)
    K = torch.tensor([[2.0]]).double()
    target = torch.tensor([y]).double()
    node = Node(ProcessWithSites(K), seen.sites(target))
    factor = ElementwiseFactor(node, lambda m, v: seen.expected(m, v, target, GaussHermite(80, "reparameterised")))
    result = run_to_convergence(node, [factor], tolerance=1e-14)

    def log_density(f: float) -> float:
        return seen.log_density(torch.tensor([f]).double(), target).item()

    def evidence(f: float) -> float:
        return np.exp(log_density(f)) * stats.norm.pdf(f, scale=2**0.5)

    exact = np.log(integrate.quad(evidence, -15, 15, epsabs=1e-13)[0])
    assert 0 < exact - result.elbo < 0.1

    def other(m: float, v: float) -> float:
        expected = integrate.quad(lambda f: log_density(f) * stats.norm.pdf(f, m, v**0.5), m - 12, m + 12, epsabs=1e-11)
        return expected[0] - ((v + m**2) / 2 - 1 - np.log(v / 2)) / 2

    m, v = (part.item() for part in node.family.moments(node.natural))  # pyright: ignore
    assert_close(other(m, v), result.elbo, rtol=0, atol=1e-7)
    for step in (1e-2, -1e-2):
        assert other(m + step, v) < result.elbo
        assert other(m, v * (1 + 5 * step)) < result.elbo


def test_delta_is_scikit_learns_laplace() -> None:
    """Evidence and probabilities of classification at given numbers (its integral is of another kind: 1e-2)."""
    X, y = breast_cancer(120)
    model = fixed(1.0 * kernels.RBF(5.0), "logistic", expectation=Delta(), tol=1e-13).fit(X, y)
    peer = GaussianProcessClassifier(1.0 * peers.RBF(5.0), optimizer=None).fit(X, y)
    assert_close(model.elbo_, peer.log_marginal_likelihood_value_, rtol=0, atol=1e-9)
    assert_close(model.predict_proba(X), peer.predict_proba(X), rtol=0, atol=1e-2)
    assert_close(model._belief.mean.numpy(), peer.base_estimator_.f_cached, rtol=0, atol=1e-5)  # pyright: ignore


def test_mixing_takes_fewer_steps_to_the_same_place() -> None:
    X, y = breast_cancer(60)
    rows, target, seen = torch.as_tensor(X), torch.as_tensor(y).double(), observations.Logistic()
    found = []
    for memory in (0, 5):
        node = Node(ProcessWithSites((100.0 * kernels.RBF(5.0))(rows, rows)), seen.sites(target))
        factor = ElementwiseFactor(node, lambda m, v: seen.expected(m, v, target, QUADRATURE))
        found.append(run_to_convergence(node, [factor], memory=memory, tolerance=1e-12))
        assert (np.diff(found[-1].elbos) > -1e-9).all()
        assert_close(bound([node], [factor]).item(), found[-1].elbo)
    assert found[1].steps < found[0].steps
    assert_close(found[0].elbo, found[1].elbo, rtol=1e-9, atol=0)


@pytest.mark.parametrize("likelihood", ["logistic", "student-t", "gaussian"])
def test_numbers_are_where_the_bound_has_no_slope(likelihood: str) -> None:
    """No number moved by 2 % either way gives a higher bound, each with sites of its own."""
    rng = np.random.default_rng(3)
    X = rng.normal(size=(60, 1))
    f = np.sin(2 * X[:, 0])
    y = (f + 0.3 * rng.normal(size=60) > 0).astype(int) if likelihood == "logistic" else f + 0.2 * rng.standard_t(3, 60)
    model = GaussianProcess(1.0 * kernels.RBF(1.0), likelihood).fit(X, y)
    for part in ("kernel_", "likelihood_"):
        value = getattr(model, part)
        for name, number in value.hyperparameters().items():
            for factor in (1.02, 1 / 1.02):
                moved = {"kernel_": model.kernel_, "likelihood_": model.likelihood_}
                moved[part] = value.with_hyperparameters({**value.hyperparameters(), name: number * factor})
                other = fixed(moved["kernel_"], moved["likelihood_"]).fit(X, y)
                assert other.elbo_ < model.elbo_ + 1e-4 * (1 + abs(model.elbo_)) * 0.01


# --- inducing points ---


def test_inducing_regression_is_titsias_bound() -> None:
    """log N(y; 0, Q + s^2 I) - tr(K - Q)/(2 s^2), with Q = K_nm K_mm^-1 K_mn; all rows: the evidence itself."""
    X, y = diabetes()
    X, y, kernel, scale = X[:60, :2], y[:60], 1.0 * kernels.RBF(0.1), 0.7
    model = fixed(kernel, observations.Gaussian(scale), inducing=X[:10]).fit(X, y)
    rows = torch.as_tensor(X)
    cross, inner = kernel(rows[:10], rows), kernel(rows[:10], rows[:10])
    Q = (cross.mT @ torch.linalg.solve(inner, cross)).numpy()
    want = stats.multivariate_normal(np.zeros(60), Q + scale**2 * np.eye(60)).logpdf(y)
    want -= (60 - np.trace(Q)) / (2 * scale**2)
    assert_close(model.elbo_, want, rtol=1e-6, atol=0)
    exact = fixed(kernel, observations.Gaussian(scale)).fit(X, y)
    assert model.elbo_ < exact.elbo_
    close = fixed(kernel, observations.Gaussian(scale), inducing=45).fit(X, y)
    assert_close(close.elbo_, exact.elbo_, rtol=1e-4, atol=0)
    for a, b in zip(close.predict(X[:5] + 0.01, return_std=True), exact.predict(X[:5] + 0.01, return_std=True)):
        assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert_close(close.sample(X[:3], 4000).mean(0), exact.predict(X[:3]), rtol=0, atol=0.05)


def test_inducing_classification_in_batches() -> None:
    """Batches approach the bound of all rows at once, which chooses numbers as a dense process does."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, size=(400, 1))
    y = (np.sin(3 * X[:, 0]) + 0.5 * rng.normal(size=400) > 0).astype(int)
    dense = GaussianProcess(1.0 * kernels.RBF(1.0), "logistic").fit(X, y)
    whole = GaussianProcess(1.0 * kernels.RBF(1.0), "logistic", inducing=20).fit(X, y)
    assert_close(whole.elbo_, dense.elbo_, rtol=2e-3, atol=0)
    options = dict(inducing=20, batch_size=50, max_iter=300, rho=0.05)
    batched = GaussianProcess(dense.kernel_, "logistic", optimizer=None, **options).fit(X, y)
    assert_close(batched.elbo_, dense.elbo_, rtol=0.01, atol=0)
    tuned = GaussianProcess(1.0 * kernels.RBF(1.0), "logistic", learning_rate=0.05, **options).fit(X, y)
    assert_close(tuned.elbo_, dense.elbo_, rtol=0.03, atol=0)


# --- the estimator interface ---


def test_labels_come_back_as_they_were() -> None:
    X, y = breast_cancer(60)
    names = np.array(["no", "yes"])[y]
    model = fixed(1.0 * kernels.RBF(5.0), "probit").fit(X, names)
    assert set(model.predict(X)) <= {"no", "yes"}
    assert model.score(X, names) > 0.9
    proba = model.predict_proba(X)
    assert_close(proba.sum(1), np.ones(60))
    assert_close(np.exp(model.log_predictive(X, names)), proba[np.arange(60), y])
    tensors = fixed(1.0 * kernels.RBF(5.0), "probit").fit(torch.as_tensor(X), torch.as_tensor(y))
    assert isinstance(tensors.predict_proba(torch.as_tensor(X)), Tensor)
    assert_close(tensors.predict_proba(torch.as_tensor(X)).numpy(), proba)
    assert torch.equal(tensors.predict(torch.as_tensor(X)), torch.as_tensor((model.predict(X) == "yes").astype(int)))
    assert model.get_params()["likelihood"] == "probit"
    assert model.set_params(random_state=3).random_state == 3


def test_poisson_predictions_are_lognormal() -> None:
    X, y = np.arange(6.0)[:, None], np.array([1, 2, 2, 5, 4, 9])
    model = fixed(1.0 * kernels.RBF(2.0), "poisson").fit(X, y)
    mean, variance = model.latent(X)
    rate, deviation = model.predict(X, return_std=True)
    assert_close(rate, np.exp(mean + variance / 2), rtol=1e-12, atol=0)
    assert_close(deviation, np.sqrt(np.expm1(variance)) * rate, rtol=1e-12, atol=0)


def test_several_classes_are_one_against_the_rest_each() -> None:
    rng = np.random.default_rng(3)
    X = rng.normal(size=(60, 2))
    labels = np.array(["c", "a", "b"])[np.digitize(X[:, 0] + 0.3 * rng.normal(size=60), [-0.5, 0.5])]
    model = fixed(likelihood="logistic").fit(X, labels)
    each = [fixed(likelihood="logistic").fit(X, (labels == name).astype(int)) for name in ("a", "b", "c")]
    raw = np.stack([own.predict_proba(X)[:, 1] for own in each], 1)
    np.testing.assert_allclose(model.predict_proba(X), raw / raw.sum(1, keepdims=True), rtol=1e-12)
    np.testing.assert_allclose(model.elbo_, sum(own.elbo_ for own in each), rtol=1e-12)
    assert model.score(X, labels) > 0.8
    np.testing.assert_allclose(
        model.log_predictive(X[:4], labels[:4]),
        [np.log(model.predict_proba(X[i : i + 1])[0, "abc".index(labels[i])]) for i in range(4)],
        rtol=1e-12,
    )
    assert model.sample(X[:4], 5).shape == (5, 4, 3)
    np.testing.assert_allclose(model.latent(X)[0][:, 1], each[1].latent(X)[0], rtol=1e-12)
    two = model.fit(X, labels == "a")  # and back to two
    assert two.predict_proba(X[:2]).shape == (2, 2)
    assert two.latent(X)[0].shape == (60,)


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
@pytest.mark.parametrize("options", [{}, {"inducing": 5}, {"likelihood": "logistic"}])
def test_arrays_may_change_after_fit(kind, options: dict) -> None:
    """Predictions are those of the data at the time of `fit`."""
    new = np.array([[1.5], [4.0]])
    X = kind(np.linspace(0, 6, 30)[:, None])
    y = kind(np.arange(30) % 3 if "likelihood" in options else np.sin(np.linspace(0, 6, 30)))
    model = GaussianProcess(optimizer=None, **options).fit(X, y)
    before = model.latent(new)
    X *= 0
    y *= 0
    for found, expected in zip(model.latent(new), before):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("likelihood", ["gaussian", "logistic"])
def test_scikit_learns_checks(likelihood: str) -> None:
    model = GaussianProcess(likelihood=likelihood, optimizer=None, tol=1e-3)
    checks = [(own, check) for own, check in estimator_checks_generator(model)]
    checks = [(own, check) for own, check in checks if check.func.__name__ != "check_array_api_input"]
    for own, check in checks:
        check(own)
    assert len(checks) > 45


@pytest.mark.parametrize(
    ("options", "X", "y", "words"),
    [
        ({}, [[np.nan]], [1.0], "X contains NaN or infinity"),
        ({}, np.zeros((0, 2)), [], r"0 sample\(s\) \(shape=\(0, 2\)\) while a minimum of 1"),
        ({}, [1.0, 2.0], [1.0, 2.0], "Expected 2D array, got 1D array"),
        ({}, [[1.0], [2.0]], [1.0], "inconsistent numbers of samples"),
        ({}, [[1.0]], [np.inf], "Input y contains infinity"),
        (dict(likelihood="logistic"), [[1.0], [2.0]], [1, 1], "y has only one class, 1: at least two"),
        (dict(likelihood="poisson"), [[1.0]], [-2], r"targets must be counts, 0, 1, 2, \.\.\., got -2"),
        (dict(likelihood="cauchy"), [[1.0]], [1.0], "likelihood must be one of 'gaussian'"),
        (dict(kernel=kernels.RBF(torch.ones(3))), [[1.0, 2.0]], [1.0], "length must be one number or 2, .* got 3"),
        (dict(batch_size=3), [[1.0]], [1.0], "batch_size needs inducing points"),
        (dict(inducing=2), [[1.0]], [1.0], "inducing must be between 1 and the number of rows, 1, got 2"),
        (dict(inducing=1, batch_size=4), [[1.0]], [1.0], "batch_size must be an integer from 1 to 1, got 4"),
        (dict(expectation=Delta()), [[1.0]], [1.0], "the Laplace approximation.* needs optimizer=None"),
    ],
)
def test_refusals(options: dict, X, y, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GaussianProcess(**options).fit(np.array(X, dtype=float), np.array(y))


def test_refusals_of_questions() -> None:
    model = fixed(likelihood="logistic")
    with pytest.raises(NotFittedError, match="not fitted yet"):
        model.predict(np.zeros((1, 1)))
    model.fit(np.array([[0.0], [1.0]]), np.array([0, 1]))
    with pytest.raises(ValueError, match="return_std is not available for labels"):
        model.predict(np.zeros((1, 1)), return_std=True)
    with pytest.raises(ValueError, match="X has 2 features, but GaussianProcess is expecting 1"):
        model.predict(np.zeros((1, 2)))
    with pytest.raises(AttributeError, match="has no attribute 'predict_proba'"):
        fixed().predict_proba(np.zeros((1, 1)))
    with pytest.raises(TypeError, match=r"kernel must be a kernel of models\.kernels"):
        GaussianProcess(lambda x, z: x @ z.T).fit(np.zeros((1, 1)), np.zeros(1))  # pyright: ignore


@pytest.mark.parametrize("dof", [0.7, 4.0, 300.0])
@pytest.mark.parametrize("noise", [1e-5, 1e-2, 1.0, 1e3])
def test_the_density_of_outliers_for_every_ratio_of_noise_and_variance(noise: float, dof: float) -> None:
    """E[p(y | f)] for f ~ N(0, 1), by a trapezoid rule that is fine around both peaks; 64 points were wrong by 30 nats
    for a noise far below the deviation of f."""
    seen, errors = observations.StudentT(noise, dof=dof), np.array([0.0, 0.3, 2.0, 6.0])
    peak = errors[:, None] + noise * np.sinh(np.linspace(-20, 20, 200_001))
    grid = np.sort(np.concatenate([peak, np.tile(np.linspace(-12, 12, 100_001), (4, 1))], 1), 1).clip(-12, 12)
    heights = stats.t(dof, scale=noise).pdf(errors[:, None] - grid) * stats.norm.pdf(grid)
    zero, y = torch.zeros(4).double(), torch.as_tensor(errors)
    assert_close(seen.log_predictive(zero, zero + 1, y).numpy(), np.log(np.trapezoid(heights, grid)), rtol=0, atol=1e-6)
    assert_close(
        seen.log_predictive(zero, zero, y).numpy(), stats.t(dof, scale=noise).logpdf(errors), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("y", [0, 1, 10, 1000, 100_000])
def test_the_density_of_counts_for_every_variance_of_the_rate(y: int) -> None:
    """E[Poisson(y | e^f)], by adaptive quadrature around the mode; 64 points of N(mean, variance) were wrong by 16 nats
    for a count of 1000 and a variance of 1, and by 8000 nats for a count of 100000 and a variance of 5."""
    variances, shifts = np.array([1e-6, 1e-2, 0.1, 1.0, 5.0, 20.0, 400.0]), np.array([-3.0, 0.0, 1.0, 6.0])
    v, away = (part.ravel() for part in np.meshgrid(variances, shifts))
    m = np.log(y + 0.5) + away * np.sqrt(v)
    found = observations.Poisson().log_predictive(*map(torch.as_tensor, (m, v, np.full(len(m), float(y)))))

    def exact(m: float, v: float) -> float:
        def height(f: float) -> float:
            return y * f - np.exp(min(f, 700)) - (f - m) ** 2 / (2 * v)

        top = optimize.brentq(
            lambda f: (y - np.exp(f)) * v - (f - m), min(m, np.log(y + 1e-9)) - 1, max(m, np.log(y + 1)) + 1
        )
        width, reach = (1 / v + np.exp(top)) ** -0.5, np.array([-1.0, -0.4, -0.1, -0.03, 0, 0.03, 0.1, 0.4, 1.0])
        edges = np.unique(np.concatenate([reach * 15 * width, reach * 15 * min(v**0.5, 80 / np.exp(top) + 1)]))
        pieces = [
            integrate.quad(lambda t: np.exp(height(top + t) - height(top)), low, high, epsabs=0, epsrel=1e-11)[0]
            for low, high in itertools.pairwise(edges)
        ]
        return height(top) + np.log(sum(pieces)) - special.gammaln(y + 1) - np.log(2 * np.pi * v) / 2

    assert_close(found.numpy(), np.array([exact(*pair) for pair in zip(m, v)]), rtol=1e-9, atol=1e-9)


def test_the_density_of_counts_at_a_known_rate_and_of_missing_counts() -> None:
    rate, y = (
        torch.tensor([-40.0, 0.3, 3.0, 7.0, 1.0]).double(),
        torch.tensor([0.0, 2.0, 15.0, 1200.0, torch.nan]).double(),
    )
    found = observations.Poisson().log_predictive(rate, torch.zeros(5).double(), y)
    assert_close(found[:4].numpy(), stats.poisson.logpmf(y[:4], rate[:4].exp()), rtol=1e-11, atol=1e-12)
    assert found[4].isnan()
