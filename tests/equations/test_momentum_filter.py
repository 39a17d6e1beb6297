"""KalmanMomentum against the 2x2 matrix filter, its Riccati equation, and limits in which it is another optimizer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.linalg import solve_discrete_are

from bayesgrad.optim import KalmanMomentum
from bayesgrad.precision import Pair
from bayesgrad.rules import OrnsteinUhlenbeckPair

INF = float("inf")


class MatrixFilter:
    """The filter of one weight and its momentum with 2x2 matrices: Aitchison 2018, Eq. 15-18."""

    def __init__(self, x: float, eta: float, eta_p: float, eta_w: float, sigma: float, start: float) -> None:
        self.c = 1 - (eta**2 + eta_w**2) / (2 * sigma**2)
        self.move = np.array([[self.c, eta], [0, 1 - eta_p]])
        self.noise = np.diag([eta_w**2, eta_p**2])
        cross = eta * (1 - eta_p) / (2 - eta_p)
        self.cov = np.array([[start, cross], [cross, eta_p / (2 - eta_p)]])
        self.prior_mean = np.array([x, 0.0])
        self.mean = self.prior_mean

    def step(self, gradient: float, square: float | None = None, shrink: float = 1.0) -> None:
        """Takes the gradient of the summed loss at the prior mean."""
        prior = self.move @ self.cov @ self.move.T + self.noise
        e = np.array([gradient if square is None else math.sqrt(square), 0.0])
        self.cov = prior - np.outer(prior @ e, prior @ e) / (1 + e @ prior @ e)
        self.mean = self.prior_mean - self.cov @ np.array([gradient, 0.0])
        self.prior_mean = self.move @ (self.mean * [shrink, 1.0])


def covariance(optimizer: KalmanMomentum, p: torch.Tensor, index: int = 0) -> np.ndarray:
    ww, wp, pp = (float(optimizer.state[p][slot].flatten()[index]) for slot in OrnsteinUhlenbeckPair.slots)
    return np.array([[ww, wp], [wp, pp]])


def weight(*values: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))


@pytest.mark.parametrize(("sigma", "eta_w"), [(0.5, 0.0), (0.5, 0.003), (INF, 0.003), (INF, 0.0)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_equals_the_matrix_filter(sigma: float, eta_w: float, decay: float) -> None:
    eta, eta_p, count = 0.01, 0.1, 7
    p = weight(0.3, -1.0)
    optimizer = KalmanMomentum(
        [p],
        lr=eta,
        batch_size=count,
        momentum_decay=eta_p,
        weight_noise=eta_w,
        prior_std=sigma,
        weight_decay=decay,
    )
    start = 0.1 / count if math.isinf(sigma) else sigma**2
    oracles = [MatrixFilter(x, eta, eta_p, eta_w, sigma, start) for x in p.tolist()]
    rng = np.random.default_rng(0)
    for _ in range(300):
        gradient = rng.normal(size=2) * [1, 100]
        p.grad = torch.tensor(gradient)
        optimizer.step()
        for oracle, g in zip(oracles, gradient):
            oracle.step(count * g, shrink=1 - eta * decay)
    for i, oracle in enumerate(oracles):
        assert p[i].item() == pytest.approx(oracle.prior_mean[0], rel=1e-12)
        np.testing.assert_allclose(covariance(optimizer, p, i), oracle.cov, rtol=1e-12)
        assert float(optimizer.state[p]["momentum"][i]) == pytest.approx(oracle.mean[1], rel=1e-12)
    with optimizer.mode(training=False):
        np.testing.assert_allclose(p.detach().numpy(), [oracle.mean[0] for oracle in oracles], rtol=1e-12)
    model = torch.nn.Module()
    model.p = p
    np.testing.assert_allclose(
        optimizer.posterior(model).variance()["p"].numpy(), [oracle.cov[0, 0] for oracle in oracles], rtol=1e-12
    )


def test_plain_decay_acts_after_the_gradient_was_taken() -> None:
    eta, eta_p, decay = 0.01, 0.1, 0.5
    ahead, after = weight(1.0), weight(1.0)
    options = dict(lr=eta, batch_size=1, momentum_decay=eta_p, weight_decay=decay)
    first, second = (KalmanMomentum([p], nesterov_decay=n, **options) for p, n in ((ahead, True), (after, False)))
    for g in (1.0, -2.0, 0.5):
        for p, optimizer in ((ahead, first), (after, second)):
            before, momentum = p.item(), optimizer.state[p].get("momentum", torch.zeros(1)).item()
            p.grad = torch.tensor([g], dtype=torch.float64)
            optimizer.step()
            cov = covariance(optimizer, p)
            momentum = (1 - eta_p) * momentum - cov[0, 1] * g
            shrink = 1 - eta * decay
            expected = shrink * (before - cov[0, 0] * g) if p is ahead else shrink * before - cov[0, 0] * g
            assert p.item() == pytest.approx(expected + eta * momentum, rel=1e-13)
    assert ahead.item() != after.item()


def riccati(eta: float, eta_p: float, s: float, eta_w: float = 0.0) -> np.ndarray:
    """The posterior covariance of the stationary filter."""
    move, e = np.array([[1, eta], [0, 1 - eta_p]]), np.array([[math.sqrt(s)], [0.0]])
    prior = solve_discrete_are(move.T, e, np.diag([eta_w**2, eta_p**2]), np.eye(1))
    return prior - prior @ e @ e.T @ prior / (1 + (e.T @ prior @ e).item())


def closed_form(eta: float, eta_p: float, s: float) -> tuple[float, float, float]:
    """The corrected equations."""
    rms = math.sqrt(s)
    r = eta_p / (eta * rms)
    phi = math.sqrt(1 + r / 2) - math.sqrt(r / 2)
    wp, ww = eta_p / rms * phi**2, math.sqrt(2 * eta * eta_p) / s**0.75 * phi
    return ww, wp, wp * (eta_p + s * ww) / eta


def stationary(eta: float, eta_p: float, rms: float, **options: float) -> np.ndarray:
    """The covariance of the optimizer after many steps with gradients of constant magnitude."""
    p = weight(0.0)
    optimizer = KalmanMomentum([p], lr=eta, batch_size=1, momentum_decay=eta_p, fused=False, **options)
    p.grad = torch.full((1,), rms, dtype=torch.float64)
    for i in range(math.ceil(20 / min(eta * rms, eta_p))):
        p.grad.mul_(-1 if i else 1)
        optimizer.step()
    return covariance(optimizer, p)


@pytest.mark.parametrize(
    ("eta", "eta_p", "rms", "eta_w"),
    [(1e-2, 0.1, 1.0, 0.0), (1e-2, 0.1, 100.0, 0.0), (1e-2, 0.02, 1e3, 0.0), (0.1, 0.3, 10.0, 0.05)],
)
def test_reaches_the_riccati_solution(eta: float, eta_p: float, rms: float, eta_w: float) -> None:
    found = stationary(eta, eta_p, rms, weight_noise=eta_w)
    np.testing.assert_allclose(found, riccati(eta, eta_p, rms**2, eta_w), rtol=1e-9)


@pytest.mark.parametrize("rms", [1e-1, 1.0, 1e1, 1e2])
@pytest.mark.parametrize("eta_p", [1e-3, 1e-2])
def test_closed_form_holds_to_two_per_cent_where_steps_are_small(eta_p: float, rms: float) -> None:
    eta = 1e-3
    ww, wp, pp = closed_form(eta, eta_p, rms**2)
    assert rms**2 * ww <= 0.03 or rms == 1e2
    exact = riccati(eta, eta_p, rms**2)
    tolerance = 0.02 if rms**2 * ww <= 0.03 else 0.12
    np.testing.assert_allclose([ww, wp, pp], [exact[0, 0], exact[0, 1], exact[1, 1]], rtol=tolerance)


def test_the_printed_equation_fails_at_the_usual_decay() -> None:
    """Eq. 21 prints S_wp = eta_p/rms: for eta_p = 0.1 about twice the exact value or more, for any gradients."""
    eta, eta_p = 1e-3, 0.1
    ratios = [riccati(eta, eta_p, rms**2)[0, 1] / (eta_p / rms) for rms in np.logspace(-1, 6, 57)]
    assert 0.5 < max(ratios) < 0.56
    assert riccati(eta, eta_p, 1.0)[0, 1] / eta_p == pytest.approx(0.005, abs=5e-4)
    assert stationary(eta, eta_p, 1e3)[0, 1] / (eta_p / 1e3) == pytest.approx(0.52, abs=5e-3)  # the optimizer's own
    small = riccati(eta, 1e-3, 1e6)[0, 1] / (1e-3 / 1e3)
    assert small == pytest.approx(0.94, abs=5e-3)


def test_steady_state_is_the_closed_form_under_a_running_mean() -> None:
    eta, eta_p, beta, count = 3e-3, 0.1, 0.9, 5
    p = weight(0.2, 0.4)
    optimizer = KalmanMomentum(
        [p], lr=eta, batch_size=count, momentum_decay=eta_p, steady_state=True, beta2=beta, weight_decay=0.1
    )
    x, momentum, moment = np.array([0.2, 0.4]), np.zeros(2), np.zeros(2)
    rng = np.random.default_rng(1)
    for t in range(1, 50):
        g = rng.normal(size=2) * [1e-3, 1e3]
        p.grad = torch.tensor(g)
        optimizer.step()
        moment = beta * moment + (1 - beta) * (count * g) ** 2
        ww, wp, _ = np.array([closed_form(eta, eta_p, s) for s in moment / (1 - beta**t)]).T
        momentum = (1 - eta_p) * momentum - wp * count * g
        x = (1 - eta * 0.1) * (x - ww * count * g) + eta * momentum
    np.testing.assert_allclose(p.detach().numpy(), x, rtol=1e-11)
    assert set(optimizer.state[p]) - {"ahead"} == {"step", "moment", "momentum"}


def test_strong_data_is_adam_and_weak_data_is_rmsprop() -> None:
    """Displacement by momentum over direct displacement is eta S_wp/(eta_p S_ww), in a table."""
    for eta_p, rms, share in ((0.1, 1.0, 0.0047), (0.1, 1e3, 1.7), (1e-3, 1e3, 22.0)):
        cov = riccati(1e-3, eta_p, rms**2)
        assert 1e-3 * cov[0, 1] / (eta_p * cov[0, 0]) == pytest.approx(share, rel=0.05)
    # RMSprop: nearly without momentum, the step is lr g/rms.
    found = stationary(1e-3, 0.1, 10.0)
    assert found[0, 0] * 10.0 == pytest.approx(1e-3, rel=0.12)


def test_nothing_but_the_scale_of_weights_depends_on_eta() -> None:
    """Weights in units of eta depend on eta rms and eta_p only."""
    a, b = stationary(1e-2, 0.1, 10.0), stationary(1e-3, 0.1, 100.0)
    np.testing.assert_allclose(a, b * np.array([[100.0, 10.0], [10.0, 1.0]]), rtol=1e-9)


@pytest.mark.parametrize(("dtype", "power"), [(torch.float32, 30), (torch.float64, 200)])
def test_covariances_stay_positive_whatever_comes(dtype: torch.dtype, power: int) -> None:
    p = torch.nn.Parameter(torch.zeros(1000, dtype=dtype))
    optimizer = KalmanMomentum([p], lr=1e-3, batch_size=100, fused=False)
    generator = torch.Generator().manual_seed(0)
    for _ in range(500):
        sizes = 10 ** (power * (2 * torch.rand(1000, generator=generator, dtype=torch.float64) - 1))
        p.grad = (torch.randn(1000, generator=generator, dtype=torch.float64) * sizes).to(dtype)
        optimizer.step()
    ww, wp, pp = (optimizer.state[p][slot].double() for slot in OrnsteinUhlenbeckPair.slots)
    assert (ww > 0).all()
    assert (pp > 0).all()
    assert torch.isfinite(p).all()
    assert (wp.square() <= ww * pp * (1 + 1e-5)).all()


def test_variances_follow_the_learning_rate_at_once() -> None:
    p = weight(0.0)
    optimizer = KalmanMomentum([p], lr=1e-2, batch_size=1)
    for sign in (1, -1) * 500:
        p.grad = torch.tensor([10.0 * sign], dtype=torch.float64)
        optimizer.step()
    model = torch.nn.Module()
    model.p = p
    before = optimizer.posterior(model).variance()["p"].item()
    optimizer.param_groups[0]["lr"] = 1e-3
    p.grad = torch.zeros(1, dtype=torch.float64)
    optimizer.step()
    after = optimizer.posterior(model).variance()["p"].item()
    assert after == pytest.approx(before / 10, rel=0.2)


def test_pair_is_what_a_matrix_inverse_says() -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(5, 2, 2, generator=generator, dtype=torch.float64)
    cov = root @ root.mT + 0.1 * torch.eye(2, dtype=torch.float64)
    h = torch.rand(5, generator=generator, dtype=torch.float64) * 10
    pair = Pair(cov[:, 0, 0], cov[:, 0, 1], cov[:, 1, 1]).add(h)
    information = torch.linalg.inv(cov)
    information[:, 0, 0] += h
    expected = torch.linalg.inv(information)
    found = torch.stack([pair.weight, pair.cross, pair.momentum])
    torch.testing.assert_close(found, torch.stack([expected[:, 0, 0], expected[:, 0, 1], expected[:, 1, 1]]))
