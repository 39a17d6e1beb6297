"""Factor analysis against NumPy written from the equations, closed forms, scikit-learn, and nodes for the scores."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from scipy.special import digamma, gammaln
from scipy.stats import multivariate_normal
from sklearn.decomposition import FactorAnalysis as Peer
from sklearn.exceptions import ConvergenceWarning
from torch.testing import assert_close

from bayesgrad.families import Gamma, Gaussian, Point
from bayesgrad.inference import Expected, Node, elbo, message, step
from bayesgrad.models import FactorAnalysis
from bayesgrad.models.factors import RelevancePrior, Rows, ScoresFactor

LOG_2PI = np.log(2 * np.pi)


def data(n: int = 80, D: int = 6, K: int = 2, seed: int = 0, holes: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, K)) @ rng.normal(size=(K, D)) + rng.normal(size=(n, D)) * rng.uniform(0.4, 1.2, D)
    X += 10 * rng.normal(size=D)
    return np.where(rng.uniform(size=X.shape) < holes, np.nan, X)


def log_likelihood(X: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> float:
    """The log density of the observed part of each row, by marginals of one Gaussian."""
    total = 0.0
    for x in X:
        seen = ~np.isnan(x)
        total += multivariate_normal(mean[seen], covariance[np.ix_(seen, seen)]).logpdf(x[seen]) if seen.any() else 0
    return total


# --- EM ---


def expected(X: np.ndarray, W: np.ndarray, m: np.ndarray, psi: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E[z z'] for each row extended by a one, and E[z]; row by row, from its observed part."""
    K = W.shape[1]
    firsts, seconds = [], []
    for x in X:
        o = ~np.isnan(x)
        A = np.linalg.inv(np.eye(K) + W[o].T @ (W[o] / psi[o, None]))
        z = A @ W[o].T @ ((x[o] - m[o]) / psi[o])
        extended = np.append(z, 1.0)
        second = np.outer(extended, extended)
        second[:K, :K] += A
        firsts.append(extended)
        seconds.append(second)
    return np.array(firsts), np.array(seconds)


def em_sweep(X, W, m, psi, isotropic):
    """Scores, then [W m]; scores again, then the noise."""
    D = X.shape[1]
    first, second = expected(X, W, m, psi)
    joint = np.empty((D, W.shape[1] + 1))
    for d in range(D):
        o = ~np.isnan(X[:, d])
        joint[d] = np.linalg.solve(second[o].sum(0), first[o].T @ X[o, d])
    W, m = joint[:, :-1], joint[:, -1]
    first, second = expected(X, W, m, psi)
    squares, counts = np.empty(D), (~np.isnan(X)).sum(0)
    for d in range(D):
        o = ~np.isnan(X[:, d])
        squares[d] = (X[o, d] ** 2 - 2 * X[o, d] * (first[o] @ joint[d])).sum() + joint[d] @ second[o].sum(0) @ joint[d]
    psi = np.full(D, squares.sum() / counts.sum()) if isotropic else squares / counts
    return W, m, psi


@pytest.mark.parametrize("holes", [0.0, 0.3])
@pytest.mark.parametrize("noise", ["diagonal", "isotropic"])
def test_sweeps_of_em(noise: str, holes: float) -> None:
    X = data(holes=holes)
    options = {"noise": noise, "init": "random", "tol": 0}
    one, five = (FactorAnalysis(2, max_iter=steps, **options).fit(X) for steps in (1, 5))
    W, m, psi = one.components_.T, one.mean_, np.broadcast_to(one.noise_variance_, (6,))
    for _ in range(4):
        W, m, psi = em_sweep(X, W, m, psi, noise == "isotropic")
    covariance = W @ W.T + np.diag(psi)
    np.testing.assert_allclose(five.get_covariance(), covariance, rtol=1e-8)
    np.testing.assert_allclose(five.mean_, m, rtol=1e-9)
    assert five.elbo_ == pytest.approx(log_likelihood(X, m, covariance), rel=1e-9)
    assert five.score(X) == pytest.approx(five.elbo_ / 80, rel=1e-9)
    first, _ = expected(X, five.components_.T, five.mean_, np.broadcast_to(five.noise_variance_, (6,)))
    np.testing.assert_allclose(five.transform(X), first[:, :-1], rtol=1e-8, atol=1e-10)


@pytest.mark.filterwarnings("ignore:the factors explain . columns but for noise_floor")
@pytest.mark.parametrize("holes", [0.0, 0.3])
@pytest.mark.parametrize("noise", ["diagonal", "isotropic"])
def test_noise_has_a_floor(noise: str, holes: float) -> None:
    """M-steps over noise of at least the floor: the larger of floor and residuals. The bound is the likelihood."""
    X = data(holes=holes)
    share = 0.2 if noise == "diagonal" else 0.4
    options = {"noise": noise, "init": "random", "tol": 0, "noise_floor": share}
    one, five, many = (FactorAnalysis(2, max_iter=steps, **options).fit(X) for steps in (1, 5, 50))
    W, m, psi = one.components_.T, one.mean_, np.broadcast_to(one.noise_variance_, (6,))
    floor = share * np.nanvar(X, 0)
    floor = np.full(6, floor.mean()) if noise == "isotropic" else floor
    for _ in range(4):
        W, m, psi = em_sweep(X, W, m, psi, noise == "isotropic")
        psi = np.maximum(psi, floor)
    covariance = W @ W.T + np.diag(psi)
    np.testing.assert_allclose(five.get_covariance(), covariance, rtol=1e-8)
    assert five.elbo_ == pytest.approx(log_likelihood(X, m, covariance), rel=1e-9)
    assert np.diff(many.elbos_).min() > 0
    reached = np.isclose(np.broadcast_to(many.noise_variance_, (6,)), floor, rtol=1e-12)
    assert reached.any()
    assert noise == "isotropic" or not reached.all()


def test_by_default_rows_apart_from_the_training_rows_keep_a_density() -> None:
    """Two columns are copies in the training rows, and new rows differ by a deviation: their noise is 0.005."""
    X = np.random.default_rng(0).normal(size=(200, 4))
    X[:, 1] = X[:, 0]
    for K in (1, None):
        with pytest.warns(UserWarning, match=r"explain 2 columns but for noise_floor=0.005 .* \(columns 0, 1\)"):
            model = FactorAnalysis(K).fit(X)
        least = 0.005 * X.var(0)
        np.testing.assert_allclose(model.noise_variance_[:2], least[:2], rtol=1e-12)
        assert (model.noise_variance_ >= (1 - 1e-12) * least).all()
        centre = model.mean_[None]
        apart = centre + np.array([0, 1.0, 0, 0])
        assert model.score(apart) > model.score(centre) - 1 / (2 * least[1])
    rest = FactorAnalysis(1, noise_floor=1e-12)
    with pytest.warns(UserWarning, match="but for noise_floor=1e-12"):
        assert rest.fit(X).score(apart) < -1e6


def test_the_maximum_is_scikit_learns() -> None:
    X = data(n=300, D=8, K=2)
    model = FactorAnalysis(2, tol=1e-13, max_iter=5000).fit(X)
    peer = Peer(2, tol=1e-13, max_iter=10000, svd_method="lapack").fit(X)
    assert model.score(X) == pytest.approx(peer.score(X), abs=1e-10)
    for name in ("components_", "noise_variance_", "mean_"):
        found, other = getattr(model, name), getattr(peer, name)
        np.testing.assert_allclose(abs(found), abs(other), atol=1e-4)
    np.testing.assert_allclose(model.score_samples(X), peer.score_samples(X), atol=1e-4)
    np.testing.assert_allclose(abs(model.transform(X)), abs(peer.transform(X)), atol=1e-4)
    np.testing.assert_allclose(model.get_precision() @ model.get_covariance(), np.eye(8), atol=1e-12)


def test_isotropic_noise_has_a_closed_form() -> None:
    """Tipping and Bishop: the noise is the mean of the eigenvalues left out; from a random start EM ends there."""
    X, K = data(n=200, D=7, K=3), 3
    values, vectors = np.linalg.eigh(np.cov(X.T, bias=True))
    values, vectors = values[::-1], vectors[:, ::-1]
    noise = values[K:].mean()
    covariance = vectors[:, :K] @ np.diag(values[:K] - noise) @ vectors[:, :K].T + noise * np.eye(7)
    best = log_likelihood(X, X.mean(0), covariance)
    for init, sweeps in (("pca", 1), ("random", 500)):
        model = FactorAnalysis(K, noise="isotropic", init=init, tol=1e-13, max_iter=2000).fit(X)
        assert model.n_iter_ <= sweeps
        assert model.elbo_ == pytest.approx(best, rel=1e-10)
        assert model.noise_variance_ == pytest.approx(noise, rel=1e-6)
        np.testing.assert_allclose(model.get_covariance(), covariance, rtol=1e-5, atol=1e-6)


def test_more_columns_than_rows() -> None:
    """The same look from the rows as from rotations of them, and from rows that might have had gaps."""
    X = torch.as_tensor(data(n=20, D=50, K=2))
    X = X - X.mean(0)
    model = FactorAnalysis(2, max_iter=1, tol=0).fit(X)
    wide, tall = ScoresFactor(Rows(X), *model._nodes), ScoresFactor(Rows(X), *model._nodes)
    assert len(wide.turned) == 20
    tall.turned = (
        torch.linalg.qr(torch.randn(20, 20, generator=torch.Generator().manual_seed(0)).to(X))[0] @ wide.turned
    )
    holed = ScoresFactor(Rows(X, torch.ones_like(X)), *model._nodes)
    for other in (tall, holed):
        assert_close(wide.value(), other.value(), rtol=1e-12, atol=0)
        for node in model._nodes:
            assert_close(wide.message(node), other.message(node), rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:the factors explain 3 columns but for noise_floor")  # copies of two rows
@pytest.mark.parametrize("noise", ["diagonal", "isotropic"])
@pytest.mark.parametrize("method", ["em", "vb"])
@pytest.mark.parametrize("rows", ["outlier", "copies", "units", "gaps"])
def test_bounds_rise_where_little_is_left_of_large_numbers(rows: str, method: str, noise: str) -> None:
    """Residuals are squared as they are: as differences of squares, bounds of such data fell by up to 0.1."""
    X = np.random.default_rng(0).normal(size=(60, 3))
    given = {
        "outlier": np.r_[X, 1e6 * np.ones((1, 3))],
        "copies": np.repeat(X[:2], 10, 0),
        "units": X * [1.0, 1e3, 1e5],
        "gaps": np.where(np.arange(180).reshape(60, 3) % 7 == 0, np.nan, X * [1.0, 1e3, 1e5]),
    }[rows]
    model = FactorAnalysis(1 if rows == "copies" else 2, method=method, noise=noise, tol=0, max_iter=50).fit(given)
    assert np.diff(model.elbos_).min() >= -1e-11 * abs(model.elbo_)


def test_units_of_columns_do_not_matter() -> None:
    """Scaled columns have scaled loadings and noise, after as many sweeps, and the density changes by the volume."""
    X, units = data(holes=0.1), np.logspace(-4, 4, 6)
    model, scaled = (FactorAnalysis(2, tol=0, max_iter=20).fit(rows) for rows in (X, X * units))
    np.testing.assert_allclose(scaled.components_, model.components_ * units, rtol=1e-6)
    np.testing.assert_allclose(scaled.noise_variance_, model.noise_variance_ * units**2, rtol=1e-6)
    volume = (np.log(units) * (~np.isnan(X)).sum(0)).sum()
    assert scaled.elbo_ == pytest.approx(model.elbo_ - volume, rel=1e-9)


# --- moments ---


def vb_bound(X, q, prior, isotropic):
    """The bound of mean-field factor analysis, term by term and row by row.

    q: means (D, K + 1) and covariances (D, K + 1, K + 1) of rows of [W m], shape and rate of the noise (D,) and of the
    relevances (K,). Scores are optimal.
    """
    M, C, a, b, shape, rate = q
    D, K = X.shape[1], M.shape[1] - 1
    second = C + M[:, :, None] * M[:, None, :]
    tau, log_tau = a / b, digamma(a) - np.log(b)
    alpha, log_alpha = shape / rate, digamma(shape) - np.log(rate)
    total = 0.0
    for x in X:
        o = ~np.isnan(x)
        A = np.linalg.inv(np.eye(K) + np.einsum("d,dij->ij", tau[o], second[o][:, :K, :K]))
        z = A @ ((tau * x)[o] @ M[o, :K] - tau[o] @ second[o][:, :K, K])
        zz = np.zeros((K + 1, K + 1))
        zz[:K, :K] = A + np.outer(z, z)
        zz[:K, K] = zz[K, :K] = z
        zz[K, K] = 1
        for d in np.flatnonzero(o):
            error = x[d] ** 2 - 2 * x[d] * M[d] @ np.append(z, 1) + (second[d] * zz).sum()
            total += (log_tau[d] - LOG_2PI - tau[d] * error) / 2
        total += (K + np.linalg.slogdet(A)[1] - np.trace(A) - z @ z) / 2  # -KL(q(z), N(0, I))
    beta, noise_prior, relevance_prior = prior
    for d in range(D):
        precision = np.append(alpha, beta)
        expected = (log_alpha.sum() + np.log(beta) - (K + 1) * LOG_2PI - (precision * np.diag(second[d])).sum()) / 2
        total += expected + ((K + 1) * (1 + LOG_2PI) + np.linalg.slogdet(C[d])[1]) / 2
    count = slice(0, 1) if isotropic else slice(None)
    for q_shape, q_rate, (s, r) in ((a[count], b[count], noise_prior), (shape, rate, relevance_prior)):
        log_x, x = digamma(q_shape) - np.log(q_rate), q_shape / q_rate
        total += (s * np.log(r) - gammaln(s) + (s - 1) * log_x - r * x).sum()
        total += (q_shape - np.log(q_rate) + gammaln(q_shape) + (1 - q_shape) * digamma(q_shape)).sum()
    return total


@pytest.mark.parametrize("holes", [0.0, 0.3])
@pytest.mark.parametrize("noise", ["diagonal", "isotropic"])
def test_the_bound_of_beliefs_is_complete(noise: str, holes: float) -> None:
    X = data(n=30, D=4, holes=holes)
    priors = {"mean_precision": 0.01, "noise_prior": (0.5, 0.3), "relevance_prior": (0.7, 0.2)}
    model = FactorAnalysis(3, method="vb", noise=noise, max_iter=4, tol=0, **priors).fit(X)
    loadings, precision, relevance = model._nodes
    mean, covariance = (part.numpy() for part in loadings.moments)
    a, b = (np.broadcast_to(part.numpy(), (4,)) for part in Gamma().standard_parameters(precision.natural))
    shape, rate = (part.numpy() for part in Gamma().standard_parameters(relevance.natural))
    prior = priors["mean_precision"], priors["noise_prior"], priors["relevance_prior"]
    bound = vb_bound(X - np.nanmean(X, 0), (mean, covariance, a, b, shape, rate), prior, noise == "isotropic")
    assert model.elbo_ == pytest.approx(bound, rel=1e-11)


@pytest.mark.parametrize("seed", range(8))
def test_the_bound_never_falls(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, D, K = rng.integers(15, 60), rng.integers(3, 8), rng.integers(1, 3)
    X = data(n, D, K, seed, holes=rng.choice([0.0, 0.4]))
    init = rng.choice(["pca", "random"])
    for method in ("em", "vb"):
        for noise in ("diagonal", "isotropic"):
            model = FactorAnalysis(int(K), method=method, noise=noise, init=init, tol=0, max_iter=30, random_state=seed)
            assert np.diff(model.fit(X).elbos_).min() > -1e-10 * abs(model.elbo_)


@pytest.mark.parametrize("n", [400, 1600])
def test_columns_that_explain_nothing_are_switched_off(n: int) -> None:
    """What is left is maximum likelihood, but for priors: of order 1/n, sampling errors being of order 1/sqrt(n)."""
    X = data(n=n, D=8, K=2, seed=3)
    model = FactorAnalysis(5, method="vb", tol=1e-8, max_iter=3000).fit(X)
    sizes = np.linalg.norm(model.components_, axis=1)
    assert (sizes[:2] > 1).all()
    assert (sizes[2:] < 1e-3).all()
    assert (model.relevance_[2:] > 100).all()
    best = FactorAnalysis(2, tol=1e-10, max_iter=3000).fit(X).get_covariance()
    error = np.sqrt((np.outer(best.diagonal(), best.diagonal()) + best**2) / n)  # of a covariance from n rows
    assert (np.abs(model.get_covariance() - best) < 4 / n**0.5 * error).all()


def test_turning_columns_between_sweeps_saves_sweeps_and_changes_no_optimum() -> None:
    X = data(n=100, D=5, K=2, seed=1)
    turned = FactorAnalysis(2, method="vb", init="random", tol=1e-7, max_iter=20_000).fit(X)

    class Plain(FactorAnalysis):
        def _after_iteration(self, nodes) -> None:
            pass

    plain = Plain(2, method="vb", init="random", tol=1e-7, max_iter=20_000).fit(X)
    assert turned.elbo_ >= plain.elbo_ - 1e-6
    assert plain.elbo_ == pytest.approx(turned.elbo_, abs=1e-3)
    assert turned.n_iter_ < plain.n_iter_ / 3


# --- the same with nodes for the scores ---


@pytest.mark.parametrize("point", [True, False])
def test_nodes_for_scores_say_the_same(point: bool) -> None:
    """A local node that has moved with rho = 1 gives the bound and the messages of the latent-variable factor."""
    X = torch.as_tensor(data(n=12, D=4))
    X = X - X.mean(0)
    model = FactorAnalysis(2, method="em" if point else "vb", max_iter=2, tol=0).fit(X)
    loadings, noise, *others = model._nodes
    scores = Node(Gaussian(), Gaussian().of(torch.zeros_like(X[:, :2]), torch.eye(2).double().expand(12, 2, 2)))

    def joint(z, w, tau):
        one = torch.ones_like(z[0][:, :1])
        first = torch.cat([z[0], one], 1)
        corner = torch.cat([torch.cat([z[1], z[0][:, :, None]], 2), first[:, None, :]], 1)
        error = X.square() - 2 * X * (first @ w[0].mT) + torch.einsum("nij,dij->nd", corner, w[1])
        prior = -(z[1].diagonal(dim1=1, dim2=2) + LOG_2PI).sum() / 2
        return (tau[0] - LOG_2PI - tau[1] * error).sum() / 2 + prior

    explicit = Expected(joint, scores, loadings, noise)
    collapsed = ScoresFactor(Rows(X), loadings, noise)
    step(scores, [explicit])
    shared = model._priors(model._nodes)
    own = elbo([scores, *model._nodes], [explicit, *shared])
    assert_close(own, elbo(model._nodes, [collapsed, *shared]), rtol=1e-12, atol=0)
    for node in (loadings, noise):
        assert_close(message(node, [explicit]), message(node, [collapsed]), rtol=1e-10, atol=1e-10)
    assert len(others) == (0 if point else 1)


def test_messages_of_relevances_are_derivatives() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 3, dtype=torch.float64, generator=generator)
    loadings = Node(Gaussian(), Gaussian().of(rows, 2 * torch.eye(3).double().expand(5, 3, 3)))
    relevance = Node(Gamma(), Gamma().of(torch.tensor([2.0, 3.0]).double(), torch.tensor([1.0, 0.5]).double()))
    mean = torch.randn(5, dtype=torch.float64, generator=generator)
    closed = RelevancePrior(loadings, relevance, mean, 0.3)

    def prior(w, alpha):
        weights = (alpha[0] - LOG_2PI - alpha[1] * w[1].diagonal(dim1=1, dim2=2)[:, :-1]).sum() / 2
        spread = w[1][:, -1, -1] - 2 * mean * w[0][:, -1] + mean.square()
        return weights + (np.log(0.3) - LOG_2PI - 0.3 * spread).sum() / 2

    other = Expected(prior, loadings, relevance)
    assert_close(closed.value(), other.value())
    for node in (loadings, relevance):
        assert_close(closed.message(node), other.message(node))


# --- streams ---


@pytest.mark.parametrize("method", ["em", "vb"])
def test_a_batch_of_all_rows_with_a_whole_step_is_a_sweep(method: str) -> None:
    X = data(holes=0.1)
    streamed = FactorAnalysis(2, method=method, offset=0.0).partial_fit(X)
    swept = FactorAnalysis(2, method=method, max_iter=1, tol=0)
    swept._after_iteration = lambda nodes: None
    swept.fit(X)
    np.testing.assert_allclose(streamed.get_covariance(), swept.get_covariance(), rtol=1e-10)
    assert streamed.elbo_ == pytest.approx(swept.elbos_[0], rel=1e-12)


@pytest.mark.parametrize(("method", "holes"), [("em", 0.0), ("em", 0.2), ("vb", 0.0)])
def test_streams_end_near_what_all_rows_say(method: str, holes: float) -> None:
    X = data(n=1000, D=6, K=2, seed=5, holes=holes)
    best = FactorAnalysis(2, method=method, tol=1e-6, max_iter=2000).fit(X)
    model = FactorAnalysis(2, method=method, init="random", total_samples=1000)
    before = model.partial_fit(X[:100]).score(X)
    for _ in range(8):
        for batch in np.split(X, 10):
            model.partial_fit(batch)
    assert best.score(X) - before > 0.5
    assert best.score(X) - model.score(X) < 0.1 * (best.score(X) - before)


def test_draws_have_the_models_moments() -> None:
    model = FactorAnalysis(2).fit(data())
    drawn = model.sample(50_000)
    covariance = model.get_covariance()
    deviations = np.sqrt(np.diag(covariance) / 50_000)
    assert (abs(drawn.mean(0) - model.mean_) < 5 * deviations).all()
    spread = np.sqrt((covariance**2 + np.outer(np.diag(covariance), np.diag(covariance))) / 50_000)
    assert (abs(np.cov(drawn.T) - covariance) < 5 * spread).all()


def test_what_is_missing_is_filled_by_its_expectation() -> None:
    """E[x_missing | x_observed] of the joint Gaussian."""
    X = data(holes=0.3)
    model = FactorAnalysis(2, tol=1e-4).fit(X)
    filled, covariance = model.inverse_transform(model.transform(X)), model.get_covariance()
    for x, guess in zip(X, filled):
        o = ~np.isnan(x)
        gain = covariance[np.ix_(~o, o)] @ np.linalg.inv(covariance[np.ix_(o, o)])
        np.testing.assert_allclose(guess[~o], model.mean_[~o] + gain @ (x - model.mean_)[o], rtol=1e-8)
    with pytest.warns(ConvergenceWarning):
        FactorAnalysis(2, max_iter=1).fit(X)
    assert isinstance(model._nodes[0].family, Point)


@pytest.mark.parametrize("method", ["em", "vb"])
@pytest.mark.parametrize("noise", ["diagonal", "isotropic"])
def test_fewer_rows_than_columns(method: str, noise: str) -> None:
    """By default the number of components is the rank of the centred rows."""
    rows = np.random.default_rng(0).normal(size=(6, 9))
    model = FactorAnalysis(method=method, noise=noise, max_iter=30, tol=0)
    with pytest.warns(UserWarning, match="explain 9 columns but for") if method == "em" else nullcontext():
        found = model.fit(rows)
    assert found.components_.shape == (5, 9)
    assert np.isfinite(found.score_samples(rows)).all()


def test_beliefs_do_not_depend_on_the_origin() -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(100, 2)) @ rng.normal(size=(2, 5)) + 0.5 * rng.normal(size=(100, 5))
    one, far = (FactorAnalysis(3, method="vb", tol=1e-9, max_iter=2000).fit(rows + place) for place in (0.0, 1e7))
    np.testing.assert_allclose(far.elbo_, one.elbo_, rtol=0, atol=1e-4)
    np.testing.assert_allclose(far.mean_ - 1e7, one.mean_, rtol=0, atol=1e-6)


def test_units_that_differ_cost_no_digits() -> None:
    """Noise of 1e-5 beside a column of 300: the likelihood never falls, and is that of the density."""
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(200, 2)) @ rng.normal(size=(2, 5)) + 0.5 * rng.normal(size=(200, 5))
    rows = rows * [300, 1, 0.3, 0.01, 0.01]
    found = FactorAnalysis(3, noise="isotropic", init="random", tol=1e-9, max_iter=300).fit(rows)
    assert np.diff(found.elbos_).min() > -1e-4
    np.testing.assert_allclose(found.elbo_, 200 * found.score(rows), rtol=1e-3)
