"""EM for linear Gaussian states against moments of dense joints, and against derivatives of the log-likelihood."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from statsmodels.datasets import macrodata
from statsmodels.tsa.statespace.structural import UnobservedComponents
from torch.testing import assert_close

from bayesgrad.models import LinearStateSpace
from bayesgrad.models.dynamics import LEARNABLE

D, K = 2, 3


def model(seed: int = 0, **changes) -> LinearStateSpace:
    rng = np.random.default_rng(seed)
    spread = [(lambda A: A @ A.T / n + 0.3 * np.eye(n))(rng.normal(size=(n, n))) for n in (D, K, D)]
    given = dict(
        transition=0.8 * np.linalg.qr(rng.normal(size=(D, D)))[0],
        process_covariance=spread[0],
        observation=rng.normal(size=(K, D)),
        observation_covariance=spread[1],
        initial_mean=rng.normal(size=D),
        initial_covariance=spread[2],
    )
    return LinearStateSpace(**{**given, **changes})


def matrices(found: LinearStateSpace) -> dict[str, np.ndarray]:
    (F, Q, m, P, _), H, R = found._matrices
    parts = F, Q, H, R, m, P
    return {name: part.numpy() for name, part in zip(LEARNABLE, parts)}


def data(holes: bool) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    rows = [rng.normal(size=(n, K)).cumsum(0) * 0.5 for n in (6, 1, 9)]
    if holes:
        rows[0][2, 0] = rows[0][4, 1:] = rows[2][3] = rows[2][8] = np.nan
    return rows


def shumway_stoffer(at: dict[str, np.ndarray], sequences: list[np.ndarray]) -> dict[str, np.ndarray]:
    """One step, with moments of the joint Gaussian of all states and all numbers, observed or not."""
    F, Q, H, R, m, P = at.values()
    sums = dict.fromkeys(("xx", "xz", "zz", "yy", "yx", "seen", "moves", "rows"), 0.0)
    firsts, spreads = [], []
    for y in sequences:
        T = len(y)
        mean, lift = np.zeros(T * D), np.zeros((T * D, T * D))  # x = mean + lift (noise of all times)
        noise = np.kron(np.eye(T), Q)
        noise[:D, :D] = P
        for t in range(T):
            here = slice(t * D, (t + 1) * D)
            mean[here] = m if t == 0 else F @ mean[(t - 1) * D : t * D]
            if t:
                lift[here] = F @ lift[(t - 1) * D : t * D]
            lift[here, here] = np.eye(D)
        seen = np.kron(np.eye(T), H)
        S = lift @ noise @ lift.T
        joint = np.block([[S, S @ seen.T], [seen @ S, seen @ S @ seen.T + np.kron(np.eye(T), R)]])
        centre = np.r_[mean, seen @ mean]
        known = np.r_[np.zeros(T * D, dtype=bool), ~np.isnan(y).ravel()]
        gain = joint[:, known] @ np.linalg.inv(joint[np.ix_(known, known)])
        full = centre + gain @ (y.ravel()[known[T * D :]] - centre[known])
        second = joint - gain @ joint[known] + np.outer(full, full)  # E of all products
        for t in range(T):
            x, row = np.arange(t * D, (t + 1) * D), T * D + np.arange(t * K, (t + 1) * K)
            if t:
                sums["xx"] += second[np.ix_(x, x)]
                sums["xz"] += second[np.ix_(x, x - D)]
                sums["zz"] += second[np.ix_(x - D, x - D)]
                sums["moves"] += 1
            if not np.isnan(y[t]).all():
                sums["yy"] += second[np.ix_(row, row)]
                sums["yx"] += second[np.ix_(row, x)]
                sums["seen"] += second[np.ix_(x, x)]
                sums["rows"] += 1
        firsts.append(full[:D])
        spreads.append(second[:D, :D])
    F, H = sums["xz"] @ np.linalg.inv(sums["zz"]), sums["yx"] @ np.linalg.inv(sums["seen"])
    Q = (sums["xx"] - F @ sums["xz"].T) / sums["moves"]
    R = (sums["yy"] - H @ sums["yx"].T) / sums["rows"]
    m = np.mean(firsts, axis=0)
    return dict(zip(LEARNABLE, (F, Q, H, R, m, np.mean(spreads, axis=0) - np.outer(m, m))))


@pytest.mark.parametrize("holes", [False, True])
def test_sweeps_in_numpy(holes: bool) -> None:
    """Three of them, for sequences of several lengths, one of them of length 1, and rows missing in part or whole."""
    y, want = data(holes), matrices(model())
    found = model().fit(y, learn="all", max_iter=3, tol=0)
    for _ in range(3):
        want = shumway_stoffer(want, y)
    for name, value in want.items():
        assert_close(matrices(found)[name], value, rtol=1e-8, atol=1e-9)
        assert_close(getattr(found, f"{name}_"), value, rtol=1e-8, atol=1e-9)
    assert len(found.elbos_) == 4
    assert_close(found.elbos_[3], float(sum(found.log_likelihood(y))), rtol=1e-12, atol=0)


@pytest.mark.parametrize("names", [(name,) for name in LEARNABLE] + [("transition", "observation_covariance")])
def test_only_what_is_named_moves(names: tuple[str, ...]) -> None:
    y = data(True)
    before, found = matrices(model()), model().fit(y, learn=names, max_iter=4, tol=0)
    for name, value in matrices(found).items():
        assert (name in names) == (not np.array_equal(value, before[name]))
        assert hasattr(found, f"{name}_") == (name in names)
    assert (np.diff(found.elbos_) > 0).all()


@pytest.mark.parametrize(
    "names", ["all", ("process_covariance",), ("observation", "observation_covariance"), ("transition",)]
)
@pytest.mark.parametrize("seed", range(3))
def test_the_likelihood_never_falls(seed: int, names) -> None:
    rng = np.random.default_rng(seed)
    y = rng.normal(size=(3, 12, K)) * rng.uniform(0.1, 5)
    y[rng.random(y.shape) < 0.2] = np.nan
    found = model(seed).fit(y, learn=names, max_iter=25, tol=0)
    assert np.diff(found.elbos_).min() > -1e-9 * abs(found.elbos_[-1])


@pytest.mark.parametrize("names", [("transition", "process_covariance"), ("observation",)])
def test_the_slope_is_zero_where_it_settles(names: tuple[str, ...]) -> None:
    """Derivatives of the log-likelihood by what was learned; noise moves along symmetric directions."""
    y = torch.as_tensor(model(3).simulate(25, 2, random_state=3)[1])
    y[0, 3:6, 1] = y[1, 20] = torch.nan
    found = model(3).fit(y, learn=names, max_iter=1000, tol=1e-11)
    assert found.converged_
    leaves = {name: torch.as_tensor(value).clone().requires_grad_() for name, value in matrices(found).items()}
    given = {name: (leaf + leaf.mT) / 2 if "noise" in name or "cov" in name else leaf for name, leaf in leaves.items()}
    total = LinearStateSpace(**given).log_likelihood(y).sum()
    slopes = torch.autograd.grad(total, list(leaves.values()))
    sizes = {name: float(slope.abs().max()) for name, slope in zip(leaves, slopes)}
    assert max(sizes[name] for name in names) < 2e-3
    assert max(size for name, size in sizes.items() if name not in names) > 1e-1


def test_a_walk_is_learned() -> None:
    """2000 steps of a noisy random walk: the noises within a tenth or so, and likelier than the truth."""
    truth = LinearStateSpace([[1.0]], [[0.5]], [[1.0]], [[2.0]])
    y = truth.simulate(2000, random_state=1)[1][0].numpy()
    found = LinearStateSpace([[1.0]], [[1.0]], [[1.0]], [[1.0]])
    found.fit(y, learn=("process_covariance", "observation_covariance"), max_iter=500, tol=1e-7)
    assert abs(found.process_covariance_.item() - 0.5) < 0.1
    assert abs(found.observation_covariance_.item() - 2.0) < 0.2
    assert found.elbo_ > truth.log_likelihood(y)


@pytest.mark.filterwarnings("ignore:Maximum Likelihood optimization failed")  # of statsmodels, at a variance of zero
@pytest.mark.parametrize("trend", ["local level", "local linear trend"])
@pytest.mark.parametrize("name", ["unemployment", "interest"])
def test_noises_that_vanish_are_found_by_default(trend: str, name: str) -> None:
    """The likelihood of statsmodels' maximum, where one variance or more is zero: EM alone takes thousands of
    iterations, and warned after 200 of them."""
    y = macrodata.load_pandas().data[{"unemployment": "unemp", "interest": "tbilrate"}[name]].to_numpy()
    y = (y - y.mean()) / y.std()
    theirs = UnobservedComponents(y, trend, use_exact_diffuse=True).fit(disp=0)
    F, H = ([[1.0]], [[1.0]]) if trend == "local level" else ([[1.0, 1.0], [0.0, 1.0]], [[1.0, 0.0]])
    found = LinearStateSpace(F, np.eye(len(F)), H, [[1.0]], diffuse=True)
    found.fit(y, learn=("process_covariance", "observation_covariance"))
    assert found.converged_
    assert found.n_iter_ < 100
    assert found.elbo_ > theirs.llf - 1e-3 * len(y)
    assert (np.diff(found.elbos_) > -1e-9 * len(y)).all()


def test_the_slope_by_the_noises_of_a_walk_is_zero() -> None:
    """By central differences of the log-likelihood, with a fifth of the observations missing."""
    y = LinearStateSpace([[1.0]], [[0.5]], [[1.0]], [[2.0]]).simulate(300, random_state=2)[1][0].numpy()
    y[::5] = np.nan
    found = LinearStateSpace([[1.0]], [[1.0]], [[1.0]], [[1.0]])
    found.fit(y, learn=("process_covariance", "observation_covariance"), max_iter=1000, tol=1e-11)
    Q, R = found.process_covariance_.item(), found.observation_covariance_.item()

    def height(Q: float, R: float) -> float:
        return float(LinearStateSpace([[1.0]], [[Q]], [[1.0]], [[R]]).log_likelihood(y))

    assert abs(height(Q + 1e-4, R) - height(Q - 1e-4, R)) / 2e-4 < 2e-3
    assert abs(height(Q, R + 1e-4) - height(Q, R - 1e-4)) / 2e-4 < 2e-3
    assert abs(height(Q, 1.05 * R) - height(Q, R)) > 1e-3


def test_counts_have_dynamics_too() -> None:
    """Of observations that are not Gaussian the chain is learned, by its sites; the bound never falls."""
    truth = LinearStateSpace([[0.9]], [[0.2]], [[1.0]], likelihood="poisson", initial_mean=[1.0])
    y = truth.simulate(60, 2, random_state=0)[1].double().numpy()
    found = LinearStateSpace([[0.5]], [[0.5]], [[1.0]], likelihood="poisson")
    found.fit(y, learn=("transition", "process_covariance", "initial_mean"), max_iter=8, tol=0)
    assert np.diff(found.elbos_).min() > -1e-7
    assert found.elbos_[-1] > found.elbos_[0] + 1


def test_an_interrupted_fit_keeps_the_last_whole_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    from bayesgrad.models import dynamics

    calls, sweep = [], dynamics.m_step

    def interrupted(*given):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return sweep(*given)

    want = model().fit(data(True), learn="all", max_iter=3, tol=0)
    monkeypatch.setattr(dynamics, "m_step", interrupted)
    with pytest.warns(UserWarning, match="interrupted in EM iteration 4: the matrices before this iteration are kept"):
        found = model().fit(data(True), learn="all", max_iter=9, tol=0)
    assert found.elbos_ == want.elbos_
    for name, value in matrices(want).items():
        assert_close(matrices(found)[name], value, rtol=0, atol=0)


def test_refusals() -> None:
    y = data(False)
    with pytest.raises(ValueError, match=r"learn must contain only 'transition', .* got 'Q'"):
        model().fit(y, learn=("Q",))
    counts = LinearStateSpace([[0.5]], [[0.5]], [[1.0]], likelihood="poisson")
    with pytest.raises(ValueError, match="for likelihood 'poisson', got 'observation_covariance'"):
        counts.fit(np.ones(4), learn="observation_covariance")
    with pytest.raises(ValueError, match="all sequences have length 1, so transition and process_covariance"):
        model().fit([y[0][:1], y[2][:1]], learn="transition")
    with pytest.raises(ValueError, match=r"learn must contain only 'transition', .* got 3"):
        model().fit(y, learn=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="max_iter must be a positive integer, got 0"):
        model().fit(y, learn="all", max_iter=0)
    with pytest.raises(ValueError, match="tol must be a non-negative number, got None"):
        model().fit(y, learn="all", tol=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="observation_covariance became singular"):
        LinearStateSpace([[1.0]], [[1.0]], [[1.0]], [[1.0]]).fit(np.zeros(5), learn="all", max_iter=3000, tol=0)
    with pytest.warns(UserWarning, match="not converged after max_iter=2 EM iterations"):
        model().fit(y, learn="all", max_iter=2)
