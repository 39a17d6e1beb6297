"""Gaussian mixtures against scikit-learn, transcriptions, exact evidence, and limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import digamma, gammaln, logsumexp, multigammaln
from sklearn.datasets import load_iris
from sklearn.mixture import BayesianGaussianMixture
from sklearn.mixture import GaussianMixture as Peer
from torch.testing import assert_close

from bayesgrad.families import Categorical, Dirichlet, Gamma, Gaussian, NormalWishart
from bayesgrad.inference import Expected, Node, Prior, elbo, run, step
from bayesgrad.models import GaussianMixture
from bayesgrad.models.covariances import COVARIANCES

X = load_iris().data
KINDS = list(COVARIANCES)
every = pytest.mark.parametrize("kind", KINDS)
SHORT: dict[str, Any] = dict(reg_covar=0, tol=0, random_state=0)


def by_weight(model: Any, name: str) -> np.ndarray:
    """An attribute of scikit-learn's, in our order of components."""
    value = getattr(model, name)
    shared = getattr(model, "covariance_type", "") == "tied" and name[:3] in ("cov", "pre")
    return value if shared else value[np.argsort(-model.weights_, kind="stable")]


def near(found: Any, expected: Any, atol: float, rtol: float = 0) -> None:
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)


def blobs(count: int, apart: float = 6.0) -> np.ndarray:
    """Rows 0, 3, 6, .. from one place, 1, 4, 7, .. from another, and so on."""
    rng = np.random.default_rng(0)
    places = apart * rng.normal(size=(3, 2))
    return places[np.arange(count) % 3] + rng.normal(size=(count, 2))


# --- EM ---


def test_em_on_iris() -> None:
    """The log-likelihood before the 1st, 10th and 100th M-step, from random shares."""
    model = GaussianMixture(3, init_params="random", max_iter=100, **SHORT).fit(X)
    near([model.elbos_[t] for t in (0, 9, 99)], [-379.2357579, -291.1791769, -189.5025724], atol=5e-8)
    assert (np.diff(model.elbos_) > -1e-10).all()
    near(model.elbo_, model.score_samples(X).sum(), atol=1e-10)


@every
@pytest.mark.parametrize("start", ["kmeans", "random"])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_em_is_scikit_learns(kind: str, start: str) -> None:
    options: dict[str, Any] = dict(covariance_type=kind, init_params=start, max_iter=15, **SHORT)
    model, peer = GaussianMixture(3, **options).fit(X), Peer(n_components=3, **options).fit(X)
    for name, digits in (("weights_", 1e-12), ("means_", 1e-12), ("covariances_", 1e-12)):
        near(getattr(model, name), by_weight(peer, name), atol=digits)
    for name in ("precisions_", "precisions_cholesky_"):
        near(getattr(model, name), by_weight(peer, name), atol=0, rtol=1e-9)
    near(model.score_samples(X), peer.score_samples(X), atol=1e-10)
    order = np.argsort(-peer.weights_, kind="stable")
    near(model.predict_proba(X), peer.predict_proba(X)[:, order], atol=1e-10)
    near([model.bic(X), model.aic(X)], [peer.bic(X), peer.aic(X)], atol=1e-9)


def em(rows: np.ndarray, shares: np.ndarray, blur: float, sweeps: int) -> tuple[list[float], np.ndarray]:
    """Plain EM of rows that are N(x, blur I), (n, K) shares first; bounds, and covariances at the end."""
    bounds, covariances = [], np.empty(0)
    for sweep in range(sweeps + 1):
        count = shares.sum(0)
        means = shares.T @ rows / count[:, None]
        residual = rows[:, None] - means
        eye = blur * np.eye(rows.shape[1])
        covariances = np.einsum("nk,nki,nkj->kij", shares, residual, residual) / count[:, None, None] + eye
        logs = np.stack(
            [
                np.log(count[k] / count.sum())
                + stats.multivariate_normal(means[k], covariances[k]).logpdf(rows)
                - blur * np.trace(np.linalg.inv(covariances[k])) / 2
                for k in range(len(count))
            ],
            1,
        )
        bounds.append(logsumexp(logs, axis=1).sum())
        if sweep < sweeps:
            shares = np.exp(logs - logsumexp(logs, axis=1, keepdims=True))
    return bounds, covariances


def test_blurred_rows_are_a_bound_that_rises() -> None:
    """reg_covar adds to covariances as scikit-learn's does; the bound includes it, and is below the likelihood."""
    shares = np.random.RandomState(0).uniform(size=(len(X), 3))
    bounds, covariances = em(X, shares / shares.sum(1, keepdims=True), 0.05, 12)
    model = GaussianMixture(3, init_params="random", reg_covar=0.05, tol=0, max_iter=12).fit(X)
    near(model.elbos_, bounds, atol=1e-9)
    near(np.sort(np.linalg.det(model.covariances_)), np.sort(np.linalg.det(covariances)), atol=1e-12)
    assert (np.diff(bounds) > 0).all()
    assert model.elbo_ < model.score(X) * len(X)
    assert np.linalg.eigvalsh(model.covariances_).min() >= 0.05


# --- moments ---


def peer_by_vmp(data: np.ndarray | None = None, **options: Any) -> BayesianGaussianMixture:
    given: dict[str, Any] = dict(
        n_components=3, weight_concentration_prior_type="dirichlet_distribution", init_params="random", **SHORT
    )
    return BayesianGaussianMixture(**(given | options)).fit(X if data is None else data)


def rounding(peer: BayesianGaussianMixture, sweeps: int, **options: Any) -> Callable[[str], float]:
    """What rounding changes in a result: as much in each sweep as when data are rounded once."""
    random = np.random.RandomState(0)
    every = [X * (1 + 2**-53 * random.choice([-1, 1], X.shape)) for _ in range(3)]
    others = [peer_by_vmp(data, max_iter=sweeps, **options) for data in every]

    def change(name: str) -> float:
        return sweeps * max(np.abs(by_weight(one, name) - by_weight(peer, name)).max() for one in others)

    return change


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_vmp_on_iris() -> None:
    """25 sweeps from random shares: scikit-learn's moments. The bound rises in each of them."""
    model = GaussianMixture(3, method="vmp", init_params="random", max_iter=25, **SHORT).fit(X)
    peer = peer_by_vmp(weight_concentration_prior=1 / 3, max_iter=25)
    change = rounding(peer, 25, weight_concentration_prior=1 / 3)
    for name in ("means_", "covariances_", "weight_concentration_", "mean_precision_", "degrees_of_freedom_"):
        assert change(name) < 1e-10
        near(getattr(model, name), by_weight(peer, name), atol=change(name))
    for name in ("mean_precision_prior_", "mean_prior_", "degrees_of_freedom_prior_", "covariance_prior_"):
        near(getattr(model, name), getattr(peer, name), atol=1e-14, rtol=1e-14)
    assert model.weight_concentration_prior_ == peer.weight_concentration_prior_ == 1 / 3
    assert (np.diff(model.elbos_) > 0.1).all()
    assert model.elbo_ > -330.2965369  # indicators have moved once more


def explicit(model: GaussianMixture) -> tuple[list[Node], list[Any]]:
    """The same model with a node of indicators, its parts written as functions of expectations."""
    data = torch.as_tensor(X - X.mean(0))
    shares = np.random.RandomState(0).uniform(size=(len(X), 3))
    z = Node(Categorical(), Categorical().of(torch.as_tensor(shares)))
    covariance = torch.as_tensor(np.cov(X.T))
    priors = (
        (torch.full((3,), -2 / 3, dtype=torch.float64),),
        NormalWishart().of(
            torch.zeros(4, dtype=torch.float64),
            torch.tensor(1.0, dtype=torch.float64),
            torch.tensor(4.0, dtype=torch.float64),
            torch.linalg.inv(covariance),
        ),
    )
    weights = Node(Dirichlet(), priors[0])
    components = Node(NormalWishart(), tuple(part.expand(3, *part.shape) for part in priors[1]))

    def joint(z: Any, log_weights: Any, mean: Any) -> torch.Tensor:
        push, square, precision, volume = mean
        inner = torch.einsum("ni,kij,nj->nk", data, precision, data)
        normal = (volume - square - inner - 4 * math.log(2 * math.pi)) / 2 + data @ push.mT
        return (z[0] * (log_weights[0] + normal)).sum()

    factors = [Prior(weights, priors[0]), Prior(components, priors[1]), Expected(joint, z, weights, components)]
    return [z, weights, components], factors


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_bound_of_vmp_is_complete() -> None:
    """With indicators as a node: -330.2965369 after 25 sweeps, and at every sweep scikit-learn's plus the constants
    that it leaves out, the priors' and the Gaussians' normalisers."""
    model = GaussianMixture(3, method="vmp", init_params="random", max_iter=25, **SHORT).fit(X)
    nodes, factors = explicit(model)
    step(nodes[1:], factors, schedule="parallel")
    bounds, between = [], [float(elbo(nodes, factors))]
    for _ in range(25):
        step(nodes[0], factors)
        between.append(float(elbo(nodes, factors)))
        step(nodes[1:], factors, schedule="parallel")
        bounds.append(float(elbo(nodes, factors)))
    near(model.elbos_[:25], between[1:], atol=1e-9)
    near(bounds[-1], -330.2965369, atol=5e-8)
    theirs = np.array(peer_by_vmp(weight_concentration_prior=1 / 3, max_iter=25).lower_bounds_)
    K, P, nu, alpha = 3, 4, 4.0, 1 / 3
    _, volume = np.linalg.slogdet(np.cov(X.T))
    wishart = nu / 2 * volume - nu * P / 2 * np.log(2) - multigammaln(nu / 2, P)
    constant = K * wishart - len(X) * P / 2 * np.log(2 * np.pi) + gammaln(K * alpha) - K * gammaln(alpha)
    shifted = np.array(bounds) - theirs
    near(shifted, np.full(25, shifted[0]), atol=1e-9)
    # Theirs has P (P - 1)/4 log π of neither Wishart normaliser, which cancels, and 1/2 log 2π of no mean, likewise.
    near(shifted[0], constant + K * P * (P - 1) / 4 * np.log(np.pi), atol=1e-9)


def log_evidence(rows: np.ndarray, spread: np.ndarray, kind: str) -> float:
    """log p(X) of one component, m_0 = 0, κ_0 = 1, nu_0 = P: by the ratio of normalisers before and after."""
    n, P = rows.shape
    mean = rows.mean(0)
    scatter = (rows - mean).T @ (rows - mean) + n / (n + 1) * np.outer(mean, mean)
    if kind in ("full", "tied"):
        blocks = [(P, spread, spread + scatter, n)]
    elif kind == "diag":
        blocks = [(1, spread[i, None, None], (spread[i] + scatter[i, i])[None, None], n) for i in range(P)]
    else:
        blocks = [(1, np.full((1, 1), spread), np.full((1, 1), spread + np.trace(scatter)), n * P)]
    total = 0.0
    for d, before, after, count in blocks:
        volumes = np.linalg.slogdet(before)[1] * P / 2 - np.linalg.slogdet(after)[1] * (P + count) / 2
        total += volumes + multigammaln((P + count) / 2, d) - multigammaln(P / 2, d)
    return total - n * P / 2 * np.log(np.pi) - P / 2 * np.log(n + 1)


@every
def test_one_component_gives_the_exact_evidence(kind: str) -> None:
    rows = blobs(30)
    rows -= rows.mean(0) - [0.5, -1.0]
    model = GaussianMixture(1, method="vmp", covariance_type=kind, mean_prior=np.zeros(2), max_iter=2, **SHORT)
    model.fit(rows)
    near(model.elbo_, log_evidence(rows, np.asarray(model.covariance_prior_), kind), atol=1e-9)
    near(model.elbos_[0], model.elbo_, atol=1e-9)


@every
def test_predictions_are_averaged_over_the_belief(kind: str) -> None:
    """log p(x | component) is the change of the log-partition by one more row; draws have this distribution."""
    rows = blobs(60)
    model = GaussianMixture(2, method="vmp", covariance_type=kind).fit(rows)
    covariance, (weights, components) = COVARIANCES[kind], model._nodes
    new = torch.as_tensor(rows[:5]) - model._centre
    before = covariance.family.log_partition(components.natural)
    expected = []
    for row in new:
        for k in range(2):
            sums = torch.zeros(2, covariance.width(2), dtype=torch.float64)
            sums[k] = covariance.features(row[:, None], 0.0)[:, 0]
            after = tuple(a + b for a, b in zip(components.natural, covariance.message(sums, 2)))
            gain = covariance.family.log_partition(after) - before
            alpha = weights.natural[0] + 1
            expected.append(float(gain.sum() - math.log(2 * math.pi) + (alpha[k] / alpha.sum()).log()))
    joint = np.array(expected).reshape(5, 2)
    near(model.score_samples(rows[:5]), logsumexp(joint, axis=1), atol=1e-11)
    near(model.predict_proba(rows[:5]), np.exp(joint - logsumexp(joint, axis=1, keepdims=True)), atol=1e-11)
    assert (model.predict(rows[:5]) == joint.argmax(1)).all()
    drawn, labels = model.sample(40_000)
    near(np.bincount(labels) / 40_000, model.weights_, atol=5 * 0.5 / 200)
    for k in range(2):
        own = drawn[labels == k]
        near(own.mean(0), model.means_[k], atol=5 * own.std() / math.sqrt(len(own)))
    heights = np.histogram(drawn[:, 0], bins=40, range=(-15, 15))[0] / 40_000
    grid = np.linspace(-15, 15, 301)
    points = np.stack(np.meshgrid(grid, np.linspace(-25, 25, 301), indexing="ij"), -1).reshape(-1, 2)
    density = np.exp(model.score_samples(points)).reshape(301, 301).sum(1) * 50 / 300
    cells = [np.interp(np.linspace(a, a + 0.75, 16), grid, density).mean() * 0.75 for a in np.arange(-15, 15, 0.75)]
    near(heights, cells, atol=5 * math.sqrt(max(cells) / 40_000) + 2e-3)


def test_normal_gamma_mean_field() -> None:
    """y = N(mu, 1/tau) with independent moments of both, as BayesPy has it."""
    y = torch.tensor([1, 2, 4, 3, 7, 5, 6, 2.5, 3.5, 4.5], dtype=torch.float64)
    small = torch.tensor(1e-2, dtype=torch.float64)
    mean = Node(Gaussian(), Gaussian().of(torch.zeros(1, dtype=torch.float64), small.view(1, 1)))
    precision = Node(Gamma(), Gamma().of(small, small))
    priors = [Prior(node, node.natural) for node in (mean, precision)]

    def joint(mu: Any, tau: Any) -> torch.Tensor:
        square = y.square().sum() - 2 * y.sum() * mu[0][0] + len(y) * mu[1][0, 0]
        return (len(y) * (tau[0] - math.log(2 * math.pi)) - tau[1] * square) / 2

    factors = [*priors, Expected(joint, mean, precision)]
    result = run([mean, precision], factors, 200, tolerance=1e-15)
    near(
        [result.elbo, mean.mean[0].item(), precision.mean[1].item()],
        [-27.2456174792, 3.83701063, 0.29539615],
        atol=6e-9,
    )
    assert (np.diff(result.elbos) > -1e-12).all()


def test_vmp_goes_to_em_with_weak_priors() -> None:
    """With more rows the priors matter less: covariances and means within O(1/n) of EM's."""
    gaps = []
    for count in (600, 6000):
        rows = blobs(count)
        likeliest, posterior = (GaussianMixture(3, method=m, tol=1e-9).fit(rows) for m in ("em", "vmp"))
        order = [np.abs(posterior.means_ - mean).sum(1).argmin() for mean in likeliest.means_]
        gaps.append(np.abs(posterior.covariances_[order] - likeliest.covariances_).max() * count)
    assert gaps[1] < 1.5 * gaps[0]


# --- numbers, order, streams ---


@every
@pytest.mark.parametrize("method", ["em", "vmp"])
def test_data_far_from_zero_lose_no_digits(kind: str, method: str) -> None:
    """Shifted by powers of two, so that the data are the same to the last bit but for the rounding of X itself."""
    rows = np.round(blobs(90) * 2**12) / 2**12
    near_zero, far = (
        GaussianMixture(3, method=method, covariance_type=kind).fit(rows + shift) for shift in (0.0, 2.0**30)
    )
    near(far.elbo_, near_zero.elbo_, atol=1e-6)
    near(far.covariances_, near_zero.covariances_, atol=1e-8)
    near(far.means_ - 2.0**30, near_zero.means_, atol=1e-6)


@every
def test_components_too_far_apart_for_float64_are_told(kind: str) -> None:
    """At 1e4 deviations eight digits are left; at 1e7 fewer than four, and a warning."""
    rows = np.random.default_rng(0).normal(size=(200, 2))
    for far in (1e4, 1e7):
        rows[100:, 0] += far
        apart = GaussianMixture(2, covariance_type=kind, reg_covar=0)
        if far < 1e6:
            apart.fit(rows)
        else:
            with pytest.warns(UserWarning, match="fewer than four digits of its covariance are accurate"):
                apart.fit(rows)
        peer = Peer(n_components=2, covariance_type="full", reg_covar=0, random_state=0).fit(rows)
        if kind == "full" and far < 1e6:
            near(np.sort(np.linalg.det(apart.covariances_)), np.sort(np.linalg.det(peer.covariances_)), atol=1e-6)
        rows[100:, 0] -= far


@pytest.mark.parametrize("kind", ["full", "diag", "spherical"])
@pytest.mark.parametrize("seed", range(4))
def test_a_row_too_far_off_is_told(kind: str, seed: int) -> None:
    """It makes up a component, and nothing is left of the digits of its covariance, which is reg_covar: also where the
    latter seems wide along the line to that row, and is not across it."""
    rows = np.random.default_rng(seed).normal(size=(100, 2))
    rows[0] = 1e6
    with pytest.warns(UserWarning, match="digits of its covariance are accurate: remove outliers"):
        GaussianMixture(2, covariance_type=kind, max_iter=20, tol=0).fit(rows)
    rows[0] = 1e2
    near(GaussianMixture(2, covariance_type=kind).fit(rows).covariances_[1].max(), 1e-6, atol=1e-10)


@pytest.mark.parametrize("method", ["em", "vmp"])
def test_units_do_not_matter(method: str) -> None:
    """PerExampleGradients in other units: the same shares, and a bound that moves by n log |A|."""
    rows, scale = blobs(90), np.array([1e6, 1e-6])
    shares = dict(method=method, reg_covar=0, init_params="random")
    first, second = GaussianMixture(3, **shares).fit(rows), GaussianMixture(3, **shares).fit(rows * scale + scale)
    near(second.weights_, first.weights_, atol=1e-9)
    near(second.means_ / scale - 1, first.means_, atol=1e-8)
    near(second.elbo_, first.elbo_, atol=1e-7)


@pytest.mark.parametrize("method", ["vmp", "svi"])
def test_components_are_sorted_by_weight_after_a_fit_only(method: str) -> None:
    rows = np.concatenate([blobs(60), blobs(300)[::3]])
    model = GaussianMixture(3, method=method, batch_size=80, tol=1e-3, decay=0.6, random_state=1).fit(rows)
    assert (np.diff(model.weights_) <= 0).all()
    before = model.means_.copy()
    lightest = rows[model.predict(rows) == 2]
    for _ in range(100):
        model.partial_fit(lightest)
    assert model.weights_[2] > model.weights_[1]
    near(model.means_[2], before[2], atol=0.5)


def test_a_component_that_nobody_wants() -> None:
    """EM: keeps its shape with no weight, whatever happens to the others. VMP: goes back to the prior."""
    rows = np.repeat(blobs(3), 40, 0) + np.random.default_rng(0).normal(size=(120, 2))
    posterior = GaussianMixture(6, method="vmp", weight_concentration_prior=1e-3, tol=1e-9, max_iter=3000).fit(rows)
    near(posterior.weights_[3:], 0, atol=1e-4)
    near(posterior.means_[-1], rows.mean(0), atol=1e-3)
    near(posterior.degrees_of_freedom_[-1], 2, atol=1e-3)
    few = np.array([[0.0], [0.0], [0.0], [1.0]])
    with pytest.warns(match="distinct clusters"):
        model = GaussianMixture(3).fit(few)
    assert np.isfinite(model.means_).all()
    near(np.sort(model.covariances_.ravel())[:2], 1e-6, atol=1e-9)
    assert model.predict(few)[0] != model.predict(few)[3]


@pytest.mark.parametrize("method", ["em", "vmp", "svi"])
def test_streams_come_to_what_sweeps_come_to(method: str) -> None:
    """30 batches of one distribution: means and covariances within five standard errors of those of all rows."""
    rows = np.random.default_rng(0).permutation(blobs(6000))
    whole = GaussianMixture(3, method="em" if method == "em" else "vmp", tol=1e-8).fit(rows)
    stream = GaussianMixture(3, method=method, total_samples=6000, random_state=1)
    for batch in np.array_split(rows, 30):
        stream.partial_fit(batch)
    assert stream.n_iter_ == len(stream.elbos_) == 30
    order = [np.abs(stream.means_ - mean).sum(1).argmin() for mean in whole.means_]
    near(stream.means_[order], whole.means_, atol=5 / math.sqrt(2000))
    near(stream.covariances_[order], whole.covariances_, atol=5 * math.sqrt(2 / 2000))
    near(stream.elbo_ / 6000, whole.elbo_ / 6000, atol=0.2)
    if method == "svi":
        passes = GaussianMixture(3, method="svi", batch_size=200, tol=1e-4).fit(rows)
        assert whole.elbo_ - 6000 * 1e-3 < passes.elbo_ <= whole.elbo_ + 1e-6


def test_a_step_of_one_is_a_sweep() -> None:
    """partial_fit with rho = 1 is the batch M-step: offset 0 gives rho_1 = 1."""
    rows = blobs(90)
    once = GaussianMixture(3, method="vmp", max_iter=1, tol=0).fit(rows)
    stream = GaussianMixture(3, method="vmp", offset=0.0).partial_fit(rows)
    order = np.argsort(-stream.weights_, kind="stable")
    near(stream.covariances_[order], once.covariances_, atol=1e-12)
    near(stream.elbo_, once.elbos_[0], atol=1e-10)


@pytest.mark.parametrize("method", ["em", "vmp"])
@pytest.mark.parametrize("start", ["kmeans", "k-means++", "random", "random_from_data"])
def test_starts_find_blobs(method: str, start: str) -> None:
    model = GaussianMixture(3, method=method, init_params=start, n_init=4, random_state=2).fit(blobs(60, apart=30.0))
    groups = model.predict(blobs(60, apart=30.0)).reshape(20, 3)
    assert (groups == groups[0]).all()
    assert len(set(groups[0])) >= (2 if start == "random" else 3)  # shares of all alike leave slowly


def test_shares_of_the_transcribed_t_density() -> None:
    """One component in closed form: St with nu + 1 - P degrees of freedom."""
    rows = blobs(40)
    model = GaussianMixture(1, method="vmp").fit(rows)
    free = model.degrees_of_freedom_[0] - 1
    shape = model.covariances_[0] * model.degrees_of_freedom_[0] * (1 + 1 / model.mean_precision_[0]) / free
    near(model.score_samples(rows), stats.multivariate_t(model.means_[0], shape, free).logpdf(rows), atol=1e-11)
    expected = digamma(model.weight_concentration_) - digamma(model.weight_concentration_.sum())
    assert_close(model._nodes[0].mean[0].numpy(), expected)


PRECISIONS = {
    "full": np.stack([2 * np.eye(3)] * 3),
    "tied": np.eye(3) / 2,
    "diag": np.ones((3, 3)),
    "spherical": np.ones(3),
}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("kind", list(PRECISIONS))
def test_initial_values_and_known_parameters_are_scikit_learns(kind: str) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(300, 3)) + 3 * rng.normal(size=(3, 3))[rng.integers(3, size=300)] + 10
    given = dict(weights_init=[0.5, 0.3, 0.2], means_init=rows[:3], precisions_init=PRECISIONS[kind])
    settings = dict(covariance_type=kind, reg_covar=0, max_iter=3, tol=0, **given)
    peer, model = Peer(3, **settings).fit(rows), GaussianMixture(3, **settings).fit(rows)
    order = np.argsort(-peer.weights_)
    np.testing.assert_allclose(model.weights_, peer.weights_[order], rtol=1e-10)
    np.testing.assert_allclose(model.means_, peer.means_[order], rtol=1e-10)
    known = GaussianMixture.from_parameters(peer.weights_, peer.means_, peer.covariances_, covariance_type=kind)
    np.testing.assert_allclose(known.score_samples(rows), peer.score_samples(rows), rtol=1e-10)
    np.testing.assert_allclose(known.predict_proba(rows), peer.predict_proba(rows), rtol=0, atol=1e-10)
    known.partial_fit(rows)
    for name, value in (("means_init", rows[:2]), ("weights_init", [1, 1, 1]), ("precisions_init", -PRECISIONS[kind])):
        with pytest.raises(ValueError, match=f"{name} must be"):
            GaussianMixture(3, **settings | {name: value}).fit(rows)


def test_wide_rows_have_the_same_sums() -> None:
    """Second moments of many columns come from matrices, in the start and in each step, not from their products."""
    rng = np.random.default_rng(0)
    rows, shares = torch.as_tensor(rng.normal(size=(50, 7))), torch.as_tensor(rng.uniform(size=(2, 50)))
    for kind in (COVARIANCES["full"], COVARIANCES["tied"]):
        found = kind.sums(rows, shares, 0.3)
        assert_close(found, shares @ kind.features(rows.mT, 0.3).mT, rtol=1e-12, atol=1e-12)
