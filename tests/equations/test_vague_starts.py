"""State-space models whose first state is hardly known, or not at all, against statsmodels and 60 digits."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import torch
from sklearn.base import clone
from statsmodels.datasets import co2
from statsmodels.tsa.statespace.initialization import Initialization
from statsmodels.tsa.statespace.mlemodel import MLEModel
from torch.testing import assert_close

from bayesgrad.models import LinearStateSpace

Parts = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def seasonal(seasons: int = 12, noise: float = 0.05) -> Parts:
    """A local linear trend and a season that sums to about zero: D = seasons + 1."""
    size = seasons + 1
    F, H = np.zeros((size, size)), np.zeros((1, size))
    F[0, :2] = F[1, 1] = 1
    F[2, 2:] = -1
    F[range(3, size), range(2, size - 1)] = 1
    H[0, [0, 2]] = 1
    Q = np.diag(np.r_[0.01, 0.02, 0.01, np.zeros(size - 3)] ** 2)
    return F, Q, H, np.array([[noise**2]])


def series(length: int, seed: int = 0) -> np.ndarray:
    t = np.arange(length)
    return (10 + 0.1 * t + np.sin(t * np.pi / 6) + 0.05 * np.random.default_rng(seed).normal(size=length))[:, None]


def carbon() -> np.ndarray:
    """Monthly means at Mauna Loa, with gaps: (526, 1)."""
    data = co2.load_pandas().data["co2"]
    return data.groupby([data.index.year, data.index.month]).mean().to_numpy()[:, None]


def peer(parts: Parts, y: np.ndarray, covariance: np.ndarray | None, diffuse: np.ndarray | None = None) -> MLEModel:
    """statsmodels' model; matrices that vary have time first."""
    size = parts[0].shape[-1]
    model = MLEModel(y, k_states=size)
    names = ("transition", "state_cov", "design", "obs_cov")
    for name, part in zip(names, parts):
        model[name] = np.moveaxis(part, 0, -1) if part.ndim == 3 else part
    model["selection"] = np.eye(size)
    start = Initialization(size)
    if diffuse is None:
        start.set(None, "known", constant=np.zeros(size), stationary_cov=covariance)
    else:
        for k, free in enumerate(diffuse):
            options = {} if free else dict(constant=[0.0], stationary_cov=covariance[k : k + 1, k : k + 1])
            start.set(k, "diffuse" if free else "known", **options)
    model.ssm.initialization = start
    return model


def many_digits(parts: Parts, y: np.ndarray, variance: float) -> tuple[float, list[np.ndarray], list[np.ndarray]]:
    """The log-likelihood, the filtered moments of the last state and the smoothed ones of all, in 60 digits."""
    with mpmath.workdps(60):
        F, Q, H, R = (np.array(part, dtype=object) * mpmath.mpf(1) for part in parts)
        size, total, past = len(F), mpmath.mpf(0), []
        mean, P = np.array([mpmath.mpf(0)] * size), np.eye(size, dtype=object) * mpmath.mpf(variance)
        for row in y[:, 0]:
            if np.isnan(row):
                past.append((mean, P, None, None, F))
            else:
                spread, error = (H @ P @ H.T + R)[0, 0], mpmath.mpf(row) - (H @ mean)[0]
                total -= (mpmath.log(2 * mpmath.pi * spread) + error**2 / spread) / 2
                gain = (P @ H.T)[:, 0] / spread
                past.append((mean, P, error, spread, F - np.outer(F @ gain, H[0])))
                mean, P = mean + gain * error, P - np.outer(gain, gain) * spread
            last = mean, P
            mean, P = F @ mean, F @ P @ F.T + Q
        r, N, smooth = mean * 0, P * 0, []
        for mean, P, error, spread, L in reversed(past):  # Durbin and Koopman, 2012, Eqs. 4.44 and 4.45
            r, N = L.T @ r, L.T @ N @ L
            if error is not None:
                r, N = r + H[0] * (error / spread), N + np.outer(H[0], H[0]) / spread
            smooth.append((mean + P @ r, P - P @ N @ P))
        numbers = [np.array(part, dtype=float) for part in last]
        return float(total), numbers, [np.array(part, dtype=float) for part in zip(*smooth[::-1])]


@pytest.mark.parametrize(
    ("seasons", "length", "variance"), [(4, 80, 1.0), (4, 80, 1e4), (4, 80, 1e7), (4, 80, 1e12), (12, 30, 1e7)]
)
def test_a_vague_start_costs_no_digits(seasons: int, length: int, variance: float) -> None:
    """Trend and seasons, noise 0.05, P = p I; the longer series needs several blocks of time."""
    y, parts = series(length), seasonal(seasons)
    y[[3, 7]] = np.nan
    total, last, smooth = many_digits(parts, y, variance)
    model = LinearStateSpace(*parts, initial_covariance=variance * np.eye(seasons + 1))
    assert_close(float(model.log_likelihood(y)), total, rtol=1e-11, atol=0)
    found, states = model.filter(y), model.smooth(y)
    np.testing.assert_allclose(found.mean[-1], last[0], rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.covariance[-1], last[1], rtol=0, atol=1e-13)
    np.testing.assert_allclose(states.mean, smooth[0], rtol=0, atol=1e-9)
    np.testing.assert_allclose(states.covariance, smooth[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("variance", [1e6, 1e7, None])
def test_carbon_dioxide_is_statsmodels(variance: float | None) -> None:
    """Log-likelihood, filtered and smoothed states, and forecasts, of 526 months with gaps."""
    y, parts = carbon(), seasonal(noise=0.3)
    assert np.isnan(y).sum() == 5
    if variance is None:
        model = LinearStateSpace(*parts, diffuse=True)
        start = None, np.ones(13, dtype=bool)
    else:
        model = LinearStateSpace(*parts, initial_covariance=variance * np.eye(13))
        start = variance * np.eye(13), None
    found, states, ahead = model.filter(y), model.smooth(y), model.forecast(y, 24)
    expected = peer(parts, y, *start).ssm.smooth()
    # statsmodels computes with covariances of the size of P, whose rounding is about 1e-16 P: its smoothed covariances
    # of the first two years have no digits.
    rtol, atol = (1e-9, 1e-9) if variance is None else (1e-14 * variance, 1e-14 * variance)
    first = 0 if variance is None else 26
    assert_close(float(found.log_likelihood), float(expected.llf), rtol=rtol, atol=0)
    np.testing.assert_allclose(found.mean[20:], expected.filtered_state.T[20:], rtol=rtol, atol=atol)
    np.testing.assert_allclose(
        found.covariance[20:], np.moveaxis(expected.filtered_state_cov, -1, 0)[20:], rtol=0, atol=atol
    )
    np.testing.assert_allclose(states.mean, expected.smoothed_state.T, rtol=rtol, atol=atol)
    covariances = np.moveaxis(expected.smoothed_state_cov, -1, 0)
    np.testing.assert_allclose(states.covariance[first:], covariances[first:], rtol=0, atol=atol)
    longer = np.concatenate([y, np.full((24, 1), np.nan)])
    future = peer(parts, longer, *start).ssm.filter()
    np.testing.assert_allclose(ahead.mean, future.forecasts.T[-24:], rtol=rtol, atol=atol)
    np.testing.assert_allclose(ahead.covariance[:, 0, 0], future.forecasts_error_cov[0, 0, -24:], rtol=rtol, atol=atol)


def varying(length: int, seed: int = 0) -> Parts:
    """Matrices (length, ...) for three states and two observed numbers."""
    rng = np.random.default_rng(seed)
    F = 0.9 * np.linalg.qr(rng.normal(size=(length, 3, 3)))[0]
    roots = rng.normal(size=(length, 3, 3)), rng.normal(size=(length, 2, 2))
    Q, R = (root @ np.swapaxes(root, 1, 2) / 3 + 0.1 * np.eye(root.shape[-1]) for root in roots)
    return F, Q, rng.normal(size=(length, 2, 3)), R


@pytest.mark.filterwarnings("ignore:The univariate filtering approach")
@pytest.mark.parametrize("diffuse", [None, (True, False, True), (True, True, True)])
@pytest.mark.parametrize("length", [9, 150])
def test_matrices_that_vary_are_statsmodels(length: int, diffuse: tuple[bool, ...] | None) -> None:
    """All four vary with time, some numbers and rows are missing, and some states may be diffuse."""
    parts, rng = varying(length + 4), np.random.default_rng(1)
    y = rng.normal(size=(length, 2))
    y[4, 0] = y[6] = np.nan
    y[4:][rng.random((length - 4, 2)) < 0.1] = np.nan
    marks = None if diffuse is None else np.array(diffuse)
    covariance = np.diag([2.0, 0.5, 1.0])
    model = LinearStateSpace(*parts, initial_covariance=covariance, diffuse=diffuse or False)
    other = peer(tuple(part[:length] for part in parts), y, covariance, marks).ssm.smooth()  # pyright: ignore
    found, states = model.filter(y), model.smooth(y)
    assert_close(float(states.log_likelihood), float(other.llf), rtol=1e-11, atol=0)
    begin = 0 if diffuse is None else 4
    np.testing.assert_allclose(found.mean[begin:], other.filtered_state.T[begin:], rtol=1e-9, atol=1e-10)
    covariances = np.moveaxis(other.filtered_state_cov, -1, 0)
    np.testing.assert_allclose(found.covariance[begin:], covariances[begin:], rtol=1e-9, atol=1e-10)
    # statsmodels' smoother is wrong at the first time if one row does not determine all states; see the next test.
    begin = 1 if diffuse and all(diffuse) else 0
    np.testing.assert_allclose(states.mean[begin:], other.smoothed_state.T[begin:], rtol=1e-9, atol=1e-10)
    covariances = np.moveaxis(other.smoothed_state_cov, -1, 0)
    np.testing.assert_allclose(states.covariance[begin:], covariances[begin:], rtol=1e-9, atol=1e-10)
    later = peer(parts, np.concatenate([y, np.full((4, 2), np.nan)]), covariance, marks).ssm.filter()
    ahead = model.forecast(y, 4)
    np.testing.assert_allclose(ahead.mean, later.forecasts.T[-4:], rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(
        ahead.covariance, np.moveaxis(later.forecasts_error_cov, -1, 0)[-4:], rtol=1e-9, atol=1e-10
    )


def test_diffuse_states_are_the_limit_of_vague_ones() -> None:
    """Where rows are missing in part, and noise is correlated."""
    parts, y = varying(9), np.random.default_rng(1).normal(size=(9, 2))
    y[1, 0] = y[3] = np.nan
    limit = LinearStateSpace(*parts, diffuse=True).smooth(y)
    vague = LinearStateSpace(*parts, initial_covariance=1e10 * np.eye(3)).smooth(y)
    np.testing.assert_allclose(limit.mean, vague.mean, rtol=0, atol=1e-9)
    np.testing.assert_allclose(limit.covariance, vague.covariance, rtol=0, atol=1e-8)
    assert_close(float(limit.log_likelihood), float(vague.log_likelihood) + 1.5 * np.log(1e10), rtol=1e-9, atol=0)


def test_diffuse_states_that_are_seen_late() -> None:
    """Nothing is observed for the first 90 of 160 times, which is more than a block."""
    parts, y = seasonal(4), series(160)
    y[:90] = np.nan
    model = LinearStateSpace(*parts, diffuse=True)
    other = peer(parts, y, None, np.ones(5, dtype=bool)).ssm.smooth()
    states, found = model.smooth(y), model.filter(y)
    assert_close(float(states.log_likelihood), float(other.llf), rtol=1e-10, atol=0)
    np.testing.assert_allclose(found.mean[100:], other.filtered_state.T[100:], rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(states.mean[90:], other.smoothed_state.T[90:], rtol=1e-8, atol=1e-8)


def test_what_is_not_determined_is_infinite() -> None:
    """Of a level and a slope, the first observation determines the level, and the second one both."""
    F, Q, H, R = np.array([[1.0, 1.0], [0.0, 1.0]]), np.zeros((2, 2)), np.array([[1.0, 0.0]]), np.eye(1)
    model = LinearStateSpace(F, Q, H, R, diffuse=True)
    found = model.filter(np.array([2.0, 5.0]))
    np.testing.assert_array_equal(found.covariance[0], [[1.0, 0.0], [0.0, np.inf]])
    np.testing.assert_allclose(found.covariance[1], [[1.0, 1.0], [1.0, 2.0]], rtol=1e-14)
    np.testing.assert_allclose(found.mean, [[2.0, 0.0], [5.0, 3.0]], rtol=1e-13, atol=1e-14)
    # p(y) κ -> (2π)^-1 |J|^-1/2, for J the information [1, 0]'[1, 0] + [1, 1]'[1, 1] with determinant 1.
    assert_close(float(found.log_likelihood), -np.log(2 * np.pi), rtol=1e-13, atol=0)
    alone = model.smooth(np.array([2.0]))
    np.testing.assert_array_equal(alone.covariance[0], [[1.0, 0.0], [0.0, np.inf]])
    with pytest.raises(ValueError, match="forecast needs observations that determine all diffuse states"):
        model.forecast(np.array([2.0]), 1)
    with pytest.raises(ValueError, match="sample needs observations that determine all diffuse states"):
        model.sample(np.array([2.0]))
    with pytest.raises(ValueError, match="simulate needs an initial state with a finite covariance"):
        model.simulate(3)


@pytest.mark.parametrize("start", [dict(diffuse=True), dict(initial_covariance=1e9 * np.eye(2))])
def test_paths_from_a_vague_start(start: dict) -> None:
    """20,000 draws, within five standard errors of the smoothed moments."""
    parts = np.array([[1.0, 1.0], [0.0, 1.0]]), np.diag([0.2, 0.1]), np.array([[1.0, 0.0]]), np.array([[0.5]])
    y = 1e3 + np.random.default_rng(0).normal(size=(6, 1))
    model = LinearStateSpace(*parts, **start)
    draws, states = model.sample(y, 20_000, random_state=1), model.smooth(y)
    variances = states.covariance[:, range(2), range(2)]
    assert (np.abs(draws.mean(0) - states.mean) <= 5 * np.sqrt(variances / 20_000)).all()
    assert (np.abs(draws.var(0) - variances) <= 5 * variances * np.sqrt(2 / 20_000)).all()


def test_learning_keeps_its_digits_from_a_vague_start() -> None:
    """The M-step of a noise is the derivative of the log-likelihood by it, for p of 1e8 as for 1."""
    parts, y = seasonal(4), 300 + series(120)
    for variance in (1.0, 1e8):
        model = LinearStateSpace(*parts, initial_mean=[310.0, 0, 0, 0, 0], initial_covariance=variance * np.eye(5))
        R = torch.tensor(parts[3], requires_grad=True)
        value = model.set_params(observation_covariance=R).log_likelihood(torch.as_tensor(y))
        (slope,) = torch.autograd.grad(value, R)
        before = parts[3][0, 0]
        model.set_params(observation_covariance=parts[3])
        model.fit(y, learn=["observation_covariance"], max_iter=1, tol=0)
        # d log p / dR = n/2 (R_new - R)/R²
        moved = model.observation_covariance_[0, 0] - before
        assert_close(float(slope), 60 * moved / before**2, rtol=1e-8, atol=0)
        model.set_params(observation_covariance=parts[3])
        model.fit(y, learn=["process_covariance", "observation_covariance"], max_iter=20, tol=0)
        assert (np.diff(model.elbos_) > 0).all()


def test_derivatives_from_a_certain_start() -> None:
    """By F, Q and R, with a singular P, over several blocks."""
    y = torch.as_tensor(series(150))
    F, Q, H, R = (torch.as_tensor(part) for part in seasonal(2))
    start = torch.diag(torch.tensor([100.0, 0.0, 1.0], dtype=torch.float64))

    def value(F: torch.Tensor, Q: torch.Tensor, R: torch.Tensor) -> torch.Tensor:
        return LinearStateSpace(F, Q @ Q.mT, H, R @ R, initial_covariance=start).log_likelihood(y)

    given = [part.clone().requires_grad_() for part in (F, Q.sqrt(), R.sqrt())]
    assert torch.autograd.gradcheck(value, given, eps=1e-7, rtol=1e-4, atol=1e-2)


def test_settings_of_diffuse_states() -> None:
    parts = seasonal(2)
    model = LinearStateSpace(*parts, diffuse=[True, True, False])
    assert clone(model).get_params()["diffuse"] == [True, True, False]
    y = series(20)
    assert model.set_params(diffuse=True).log_likelihood(y) == LinearStateSpace(*parts, diffuse=True).log_likelihood(y)
    with pytest.raises(ValueError, match="diffuse must be True, False or a list of 3 booleans, got 1"):
        LinearStateSpace(*parts, diffuse=1)
    with pytest.raises(ValueError, match="diffuse needs likelihood='gaussian', got 'poisson'"):
        LinearStateSpace(*parts[:3], likelihood="poisson", diffuse=True)
    with pytest.raises(ValueError, match="got 'initial_covariance'"):
        model.fit(y, learn=["initial_covariance"])
    short = LinearStateSpace(*(part[:5] for part in varying(20)))  # pyright: ignore
    with pytest.raises(ValueError, match="transition has 5 entries, but y needs 4 times and 2 steps ahead"):
        short.forecast(np.zeros((4, 2)), 2)
    with pytest.raises(ValueError, match="transition has 5 entries, but y needs 6 times: add entries"):
        short.smooth(np.zeros((6, 2)))
    with pytest.raises(ValueError, match="where matrices vary with time, got 'transition'"):
        short.fit(np.zeros((4, 2)), learn=["transition"])
