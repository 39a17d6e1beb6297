"""Chains against dense joint Gaussians, filterpy, the engine itself and quadrature."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from filterpy.kalman import KalmanFilter
from scipy import integrate, stats
from torch import Tensor
from torch.testing import assert_close

from bayesgrad.families import Gaussian
from bayesgrad.inference import GaussHermite, LinearPredictorFactor, Node, Prior, linear_gaussian, run, step
from bayesgrad.inference import elbo as bound
from bayesgrad.models import LinearStateSpace, kalman, observations

NORMAL = Gaussian()
F, Q = np.array([[1.0, 0.1], [0.0, 1.0]]), np.diag([0.01, 0.02])
H, R = np.array([[1.0, 0.0]]), np.array([[0.25]])


def oracle(**options) -> LinearStateSpace:
    return LinearStateSpace(F, Q, H, R, **options)


def random_model(seed: int = 0, size: int = 3, parts: int = 2) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    noise = [rng.normal(size=(n, n)) for n in (size, parts, size)]
    Q, R, P = (a @ a.T / len(a) + 0.1 * np.eye(len(a)) for a in noise)
    F = rng.normal(size=(size, size))
    return 0.9 * F / np.abs(np.linalg.eigvals(F)).max(), Q, rng.normal(size=(parts, size)), R, rng.normal(size=size), P


def joint(F, Q, m, P, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of all states at once, (T D) and (T D, T D), from x = sum of F^k noise."""
    size = len(F)
    powers = [np.linalg.matrix_power(F, k) for k in range(length)]
    root = np.zeros((length * size, length * size))
    for t in range(length):
        for s in range(t + 1):
            root[t * size : (t + 1) * size, s * size : (s + 1) * size] = powers[t - s]
    noise = np.kron(np.eye(length), Q)
    noise[:size, :size] = P
    return np.concatenate([power @ m for power in powers]), root @ noise @ root.T


def posterior(F, Q, H, R, m, P, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """By conditioning the dense joint on what was observed; rows that are NaN are left out one by one."""
    length = len(y)
    mean, covariance = joint(F, Q, m, P, length)
    kept = ~np.isnan(y).ravel()
    seen = np.kron(np.eye(length), H)[kept]
    total = seen @ covariance @ seen.T + np.kron(np.eye(length), R)[np.ix_(kept, kept)]
    error = y.ravel()[kept] - seen @ mean
    gain = np.linalg.solve(total, seen @ covariance).T
    evidence = stats.multivariate_normal(np.zeros(len(total)), total).logpdf(error) if kept.any() else 0.0
    return mean + gain @ error, covariance - gain @ seen @ covariance, float(evidence)


def blocks(covariance: np.ndarray, length: int) -> np.ndarray:
    size = len(covariance) // length
    return np.stack([covariance[t * size : (t + 1) * size, t * size : (t + 1) * size] for t in range(length)])


def test_filter_and_smoother_are_filterpys() -> None:
    """The figures of a car on a line: means, covariances, log-likelihood."""
    y = np.random.default_rng(0).normal(size=(100, 1)).cumsum(0) * 0.3
    peer = KalmanFilter(2, 1)
    peer.F, peer.Q, peer.H, peer.R, peer.x, peer.P = F, Q, H, R, np.zeros(2), np.eye(2)
    means, covariances, evidence = [], [], 0.0
    for row in y:
        peer.update(row)
        evidence += peer.log_likelihood
        means.append(peer.x.copy())
        covariances.append(peer.P.copy())
        peer.predict()
    found = oracle().filter(y)
    assert_close(found.log_likelihood.item(), evidence, rtol=1e-12, atol=0)
    assert_close(found.mean, np.array(means), rtol=0, atol=1e-12)
    assert_close(found.covariance, np.array(covariances), rtol=0, atol=1e-12)
    smooth, spread, _, _ = peer.rts_smoother(np.array(means), np.array(covariances))
    found = oracle().smooth(y)
    assert_close(found.mean, smooth, rtol=0, atol=1e-12)
    assert_close(found.covariance, spread, rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("gaps", [False, True])
def test_smoother_is_the_dense_posterior(length: int, gaps: bool) -> None:
    """Also where some parts of some rows are missing, and for several sequences with gaps of their own."""
    F, Q, H, R, m, P = random_model()
    y = np.random.default_rng(1).normal(size=(2, length, 2))
    if gaps:
        y[0, length // 2, 0] = y[1, -1] = np.nan
    model = LinearStateSpace(F, Q, H, R, initial_mean=m, initial_covariance=P)
    states = model.smooth(y)
    filtered = model.filter(y)
    for k in range(2):
        mean, covariance, evidence = posterior(F, Q, H, R, m, P, y[k])
        assert_close(states.mean[k].ravel(), mean, rtol=0, atol=1e-10)
        assert_close(states.covariance[k], blocks(covariance, length), rtol=0, atol=1e-10)
        assert_close(float(states.log_likelihood[k]), evidence, rtol=1e-11, atol=1e-11)
        for t in range(length):
            mean, covariance, _ = posterior(F, Q, H, R, m, P, y[k, : t + 1])
            assert_close(filtered.mean[k, t], mean[-3:], rtol=0, atol=1e-10)
            assert_close(filtered.covariance[k, t], covariance[-3:, -3:], rtol=0, atol=1e-10)


def test_smoother_is_one_step_of_the_rule_on_the_joint() -> None:
    """From any start, with the chain as the prior (Khan and Rue 2023, section 5.1); the bound is the log-likelihood."""
    F, Q, H, R, m, P = random_model(2)
    y = np.random.default_rng(3).normal(size=(6, 2))
    mean, covariance = (torch.as_tensor(part) for part in joint(F, Q, m, P, 6))
    node = Node(NORMAL, NORMAL.of(torch.ones(18).double(), 7 * torch.eye(18).double()))
    white = np.linalg.inv(np.linalg.cholesky(R))  # rows with unit noise
    design = torch.as_tensor(np.kron(np.eye(6), white @ H))
    target = torch.as_tensor((y @ white.T).ravel())
    factors = [Prior(node, NORMAL.of(mean, torch.linalg.inv(covariance))), linear_gaussian(node, design, target)]
    step(node, factors)
    states = LinearStateSpace(F, Q, H, R, initial_mean=m, initial_covariance=P).smooth(torch.as_tensor(y))
    assert_close(states.mean.ravel(), node.mean[0], rtol=0, atol=1e-10)
    volume = np.log(np.linalg.det(white)) * 6
    assert_close(states.log_likelihood, bound([node], factors) + volume, rtol=1e-11, atol=0)


def test_singular_noise_and_certain_starts() -> None:
    """A trend without noise of its own, from a known place: Q and P have no inverse."""
    F, Q = np.array([[1.0, 1.0], [0.0, 1.0]]), np.diag([0.0, 0.3])
    H, R, P = np.array([[1.0, 0.0]]), np.array([[0.5]]), np.diag([0.0, 1.0])
    y = np.random.default_rng(0).normal(size=(9, 1))
    states = LinearStateSpace(F, Q, H, R, initial_covariance=P).smooth(y)
    mean, covariance, evidence = posterior(F, Q, H, R, np.zeros(2), P, y)
    assert_close(states.mean.ravel(), mean, rtol=0, atol=1e-10)
    assert_close(states.covariance, blocks(covariance, 9), rtol=0, atol=1e-10)
    assert_close(float(states.log_likelihood), evidence, rtol=1e-11, atol=0)


def test_drawn_paths_have_the_posteriors_moments() -> None:
    """Over 20,000 draws of a path with a gap, within five standard errors, also between times."""
    F, Q, H, R, m, P = random_model(4, size=2, parts=1)
    y = np.array([[0.5], [np.nan], [-1.0], [2.0]])
    model = LinearStateSpace(F, Q, H, R, initial_mean=m, initial_covariance=P)
    draws = model.sample(y, 20_000, random_state=1).reshape(20_000, -1)
    mean, covariance, _ = posterior(F, Q, H, R, m, P, y)
    assert (np.abs(draws.mean(0) - mean) <= 5 * np.sqrt(covariance.diagonal() / 20_000)).all()
    found = np.cov(draws.T)
    variances = covariance**2 + np.outer(covariance.diagonal(), covariance.diagonal())
    assert (np.abs(found - covariance) <= 5 * np.sqrt(variances / 20_000)).all()
    again = model.sample(y, 20_000, random_state=1).reshape(20_000, -1)
    assert np.array_equal(draws, again)


def test_simulated_observations_have_the_models_moments() -> None:
    F, Q, H, R, m, P = random_model(5, size=2, parts=1)
    _, y = LinearStateSpace(F, Q, H, R, initial_mean=m, initial_covariance=P).simulate(3, 20_000)
    mean, covariance = joint(F, Q, m, P, 3)
    seen = np.kron(np.eye(3), H)
    want = seen @ covariance @ seen.T + R[0, 0] * np.eye(3)
    rows = y[..., 0].numpy()
    assert (np.abs(rows.mean(0) - seen @ mean) <= 5 * np.sqrt(want.diagonal() / 20_000)).all()
    variances = want**2 + np.outer(want.diagonal(), want.diagonal())
    assert (np.abs(np.cov(rows.T) - want) <= 5 * np.sqrt(variances / 20_000)).all()


def test_noises_of_states_and_observations_are_independent() -> None:
    """Also between seeds: 10 white noises, of states and of observations of five seeds, have no correlation."""
    zero, one = [[0.0]], [[1.0]]
    runs = [LinearStateSpace(zero, one, zero, one).simulate(2000, random_state=seed) for seed in range(5)]
    found = np.corrcoef(np.concatenate([part[0, :, 0].numpy()[None] for run in runs for part in run]))
    assert np.abs(found - np.eye(10)).max() < 5 / np.sqrt(2000)


def test_forecasts_are_what_missing_rows_would_be() -> None:
    F, Q, H, R, m, P = random_model(6)
    y = np.random.default_rng(2).normal(size=(5, 2))
    model = LinearStateSpace(F, Q, H, R, initial_mean=m, initial_covariance=P)
    found = model.forecast(y, 3)
    states = model.smooth(np.concatenate([y, np.full((3, 2), np.nan)]))
    assert_close(found.mean, states.mean[5:] @ H.T, rtol=0, atol=1e-11)
    assert_close(found.covariance, H @ states.covariance[5:] @ H.T + R, rtol=0, atol=1e-11)


def test_sequences_of_any_lengths_are_as_if_alone() -> None:
    rows = [np.random.default_rng(k).normal(size=(n, 1)) for k, n in enumerate((7, 3, 12))]
    together, model = oracle().smooth(rows), oracle()
    for k, row in enumerate(rows):
        alone = model.smooth(row)
        assert_close(together.mean[k], alone.mean, rtol=0, atol=1e-12)
        assert_close(together.covariance[k], alone.covariance, rtol=0, atol=1e-12)
        assert_close(together.log_likelihood[k], float(alone.log_likelihood), rtol=1e-12, atol=0)
    assert_close(model.score(rows), together.log_likelihood.sum() / 22, rtol=1e-12, atol=0)
    assert isinstance(model.smooth(torch.as_tensor(rows[0])).mean, Tensor)
    assert model.sample(rows, 2)[1].shape == (2, 3, 2)


def test_log_likelihood_has_derivatives() -> None:
    y = torch.randn(40, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noise = torch.tensor([[0.3]], dtype=torch.float64, requires_grad=True)
    value = LinearStateSpace(F, Q, H, noise).log_likelihood(y)
    (slope,) = torch.autograd.grad(value, noise)
    ends = [oracle_likelihood(y, 0.3 + h) for h in (1e-5, -1e-5)]
    assert_close(slope.item(), (ends[0] - ends[1]) / 2e-5, rtol=1e-6, atol=0)


def oracle_likelihood(y: Tensor, noise: float) -> float:
    return float(LinearStateSpace(F, Q, H, [[noise]]).log_likelihood(y))


# --- observations that are not Gaussian ---

DATA = {
    "poisson": np.array([2.0, 0, 5, np.nan, 1, 3, 8]),
    "logistic": np.array([0.0, 1, 1, 0, np.nan, 1, 1]),
    "probit": np.array([0.0, 1, 1, 0, np.nan, 1, 1]),
    "student-t": np.array([0.1, 0.4, 9.0, np.nan, 0.2, -0.3, 0.1]),
}


@pytest.mark.parametrize("likelihood", list(DATA))
def test_sites_are_the_variational_optimum(likelihood: str) -> None:
    """Means, covariances and bound of the engine's run with a dense Gaussian over all states."""
    y, seen = DATA[likelihood], observations.get_observation(likelihood)
    quadrature = GaussHermite(40, "reparameterised")
    options = dict(likelihood=likelihood, expectation=quadrature, tol=1e-14)
    states = LinearStateSpace(F, Q * 5, H, **options).smooth(y)
    mean, covariance = (torch.as_tensor(part) for part in joint(F, Q * 5, np.zeros(2), np.eye(2), len(y)))
    kept = torch.as_tensor(~np.isnan(y))
    design, target = torch.as_tensor(np.kron(np.eye(len(y)), H))[kept], torch.as_tensor(y)[kept]
    node = Node(NORMAL, NORMAL.of(mean, torch.linalg.inv(covariance)))
    factors = [
        Prior(node, node.natural),
        LinearPredictorFactor(node, design, lambda f: seen.log_density(f, target), quadrature),
    ]
    result = run(node, factors, 500, rho=0.5, domain="search", tolerance=1e-15)
    assert_close(float(states.log_likelihood), result.elbo, rtol=1e-10, atol=0)
    dense = NORMAL.moments(node.natural)
    assert_close(states.mean.ravel(), dense[0].numpy(), rtol=0, atol=1e-6)
    assert_close(states.covariance, blocks(dense[1].numpy(), len(y)), rtol=0, atol=1e-6)


def test_one_count_against_quadrature() -> None:
    """The bound is below the evidence of a single Poisson count, and close; the posterior's mean as well."""
    model = LinearStateSpace([[1.0]], [[1.0]], [[1.0]], likelihood="poisson")
    states = model.smooth(np.array([4.0]))

    def density(x: float) -> float:
        return stats.norm.pdf(x) * stats.poisson.pmf(4, np.exp(x))

    evidence = integrate.quad(density, -10, 10, epsabs=1e-13)[0]
    mean = integrate.quad(lambda x: x * density(x), -10, 10, epsabs=1e-13)[0] / evidence
    gap = np.log(evidence) - float(states.log_likelihood)
    assert 0 < gap < 0.02
    assert abs(states.mean[0, 0] - mean) < 0.02
    # The best Gaussian N(m, v) satisfies m = y - e^(m + v/2) and 1/v = 1 + e^(m + v/2).
    m, v = states.mean[0, 0], states.covariance[0, 0, 0]
    assert_close((m, 1 / v), (4 - np.exp(m + v / 2), 1 + np.exp(m + v / 2)), rtol=1e-6, atol=0)


def test_forecast_of_counts() -> None:
    model = LinearStateSpace([[0.9]], [[0.1]], [[1.0]], likelihood="poisson")
    y = np.array([4.0, 2.0, 5.0])
    states, found = model.smooth(y), model.forecast(y, 1)
    m, v = 0.9 * states.mean[-1, 0], 0.81 * states.covariance[-1, 0, 0] + 0.1
    rate = np.exp(m + v / 2)
    assert_close(found.mean[0, 0], rate, rtol=1e-10, atol=0)
    assert_close(found.covariance[0, 0, 0], rate + rate**2 * np.expm1(v), rtol=1e-10, atol=0)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_few_times_with_several_columns_of_counts(length: int) -> None:
    """Three independent states, each with counts of its own, are as if alone, also at fewer times than columns."""
    one, eye = [[1.0]], np.eye(3)
    y = np.random.default_rng(0).poisson(4.0, size=(length, 3)).astype(float)
    options = dict(likelihood="poisson", tol=1e-15)
    found = LinearStateSpace(0.8 * eye, eye, eye, **options).smooth(y)
    alone = [LinearStateSpace([[0.8]], one, one, **options).smooth(y[:, [k]]) for k in range(3)]
    assert_close(found.mean, np.concatenate([part.mean for part in alone], 1), rtol=0, atol=1e-6)
    spread = np.concatenate([part.covariance[..., 0] for part in alone], 1)
    assert_close(found.covariance, spread[..., None] * eye, rtol=0, atol=1e-6)
    assert_close(float(found.log_likelihood), sum(float(part.log_likelihood) for part in alone), rtol=1e-8, atol=0)
    varying = LinearStateSpace(0.8 * eye, eye, np.stack([eye] * 5), **options).smooth(y)  # longer than y
    assert_close(varying.mean, found.mean, rtol=0, atol=1e-8)


@pytest.mark.parametrize("sequences", [1, 4])
def test_drawn_paths_of_counts_follow_a_chain_that_varies(sequences: int) -> None:
    """Over 20,000 draws the smoothed moments, within five standard errors; one sequence, and as many as times."""
    F, Q = np.array([0.0, 1.0, 0.3, 0.9, 5.0])[:, None, None], np.array([0.3, 0.1, 0.9, 0.2, 7.0])[:, None, None]
    y = np.random.default_rng(0).poisson(3.0, size=(sequences, 4, 1)).astype(float)
    y[:, 2:] = np.nan  # these states depend on the chain alone
    y = y[0] if sequences == 1 else y
    model = LinearStateSpace(F, Q, [[1.0]], likelihood="poisson")
    draws, states = model.sample(y, 20_000)[..., 0], model.smooth(y)
    variance = states.covariance[..., 0, 0]
    assert (np.abs(draws.mean(0) - states.mean[..., 0]) <= 5 * np.sqrt(variance / 20_000)).all()
    assert (np.abs(draws.var(0) - variance) <= 5 * variance * np.sqrt(2 / 20_000)).all()


def test_improper_sites_are_outside() -> None:
    """A precision of -3 on a state with prior precision 1 leaves nothing; -0.5 leaves a half."""
    from bayesgrad.models.state_space import ChainWithSites

    one = torch.ones(1, 1).double()
    family = ChainWithSites(kalman.Chain(one, one, torch.zeros(1).double(), one), one, 1)
    zero = torch.zeros(1, 1).double()
    assert not family.in_domain((zero, 1.5 * one)).any()
    assert family.in_domain((zero, 0.25 * one)).all()
    assert_close(family.moments((zero, 0.25 * one))[1], 2 * one)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(transition=np.ones((2, 3))), "transition must be square"),
        (dict(observation=np.ones((1, 3))), "observation must have 2 columns"),
        (
            dict(process_covariance=-np.eye(2)),
            "process_covariance must be positive semi-definite, .* eigenvalue of -1",
        ),
        (dict(observation_covariance=[[0.0]]), "observation_covariance must be positive definite"),
        (
            dict(observation_covariance=np.eye(2)),
            r"observation_covariance must be a symmetric matrix of shape \(1, 1\)",
        ),
        (dict(observation_covariance=None), "needs observation_covariance, got None"),
        (dict(likelihood="poisson"), "observation_covariance needs likelihood='gaussian'"),
        (dict(initial_mean=[1.0]), "initial_mean must be 2 finite numbers"),
        (dict(likelihood="cauchy", observation_covariance=None), "likelihood must be one of"),
        (dict(likelihood="cauchy"), "likelihood must be one of .* got 'cauchy'"),
        (dict(initial_mean="far"), "initial_mean must be a numeric array, got 'far'"),
        (dict(transition=[[1.0], [0.0, 1.0]]), "transition must be a numeric array"),
        (dict(max_iter=0), "max_iter must be a positive integer, got 0"),
        (dict(tol=None), "tol must be a non-negative number, got None"),
    ],
)
def test_refusals_of_models(change: dict, words: str) -> None:
    given = dict(transition=F, process_covariance=Q, observation=H, observation_covariance=R)
    with pytest.raises(ValueError, match=words):
        LinearStateSpace(**{**given, **change})


def test_refusals_of_data() -> None:
    counts = LinearStateSpace(F, Q, H, likelihood="poisson")
    with pytest.raises(ValueError, match=r"targets must be counts, 0, 1, 2, \.\.\., got -1"):
        counts.smooth(np.array([1.0, -1.0]))
    with pytest.raises(ValueError, match="filter supports only Gaussian observations"):
        counts.filter(np.array([1.0]))
    with pytest.raises(ValueError, match=r"0 sample\(s\) \(shape=\(0, 1\)\)"):
        oracle().smooth(np.zeros((0, 1)))
    with pytest.raises(ValueError, match=r"1 columns, got shape \(4, 2\)"):
        oracle().smooth(np.zeros((4, 2)))
    with pytest.raises(ValueError, match=r"y must be a numeric array, got 'abc'"):
        oracle().smooth("abc")
    with pytest.raises(ValueError, match="random_state must be an integer, got None"):
        oracle().sample(np.zeros(3), random_state=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="steps must be a positive integer, got inf"):
        oracle().forecast(np.zeros(3), np.inf)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="y contains infinity"):
        oracle().smooth(np.array([1.0, np.inf]))
    with pytest.raises(ValueError, match="targets must be 0 or 1, got 2"):
        LinearStateSpace(F, Q, H, likelihood="logistic").smooth(np.array([0.0, 2.0]))


@pytest.mark.parametrize("missing", [0.0, 0.4])
def test_small_noise_costs_no_digits(missing: float) -> None:
    """R of 1e-4 beside Q of 1e4 and a first state that is hardly known: Kalman's recursion, step by step."""
    rng = np.random.default_rng(0)
    F, Q, H, R, m, P = random_model(1, size=4, parts=3)
    Q, R, P = 1e4 * Q, 1e-4 * R, 1e6 * P
    y = rng.normal(size=(60, 3))
    y[rng.uniform(size=y.shape) < missing] = np.nan
    mean, covariance, total, means = m, P, 0.0, []
    for t, row in enumerate(y):
        if t:
            mean, covariance = F @ mean, F @ covariance @ F.T + Q
        known = ~np.isnan(row)
        if known.any():
            seen, noise = H[known], R[np.ix_(known, known)]
            spread, error = seen @ covariance @ seen.T + noise, row[known] - seen @ mean
            total += stats.multivariate_normal(np.zeros(len(error)), spread).logpdf(error)
            gain = np.linalg.solve(spread, seen @ covariance).T
            rest = np.eye(4) - gain @ seen
            mean, covariance = mean + gain @ error, rest @ covariance @ rest.T + gain @ noise @ gain.T
        means.append(mean)
    found = LinearStateSpace(F, Q, H, R, initial_mean=m, initial_covariance=P).filter(y)
    np.testing.assert_allclose(found.log_likelihood, total, rtol=1e-12)
    np.testing.assert_allclose(found.mean, means, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.covariance[-1], covariance, rtol=1e-9, atol=1e-9)
