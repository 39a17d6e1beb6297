"""Projections to Kronecker products against flip-flop iterations, a minimiser of the KL, and loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from bayesgrad.precision.projection import Factors, projection_weight

D = torch.float64
SIZES = [(n, m) for n in range(1, 7) for m in range(1, 7)]


def spd(rng: np.random.Generator, n: int) -> np.ndarray:
    root = rng.normal(size=(n, n + 2))
    return root @ root.T


def example(rng: np.random.Generator, Sx: np.ndarray, Sd: np.ndarray, ab: float) -> tuple[np.ndarray, np.ndarray]:
    x, d = rng.normal(size=len(Sx)), rng.normal(size=len(Sd))
    return x * math.sqrt(ab / (x @ Sx @ x) / (d @ Sd @ d)), d


def factors(Sx: np.ndarray, Sd: np.ndarray) -> Factors:
    return Factors(torch.tensor(Sx)[None], torch.tensor(Sd)[None], torch.ones(2, 1, dtype=D)).with_exact_traces()


def dense(belief: Factors) -> np.ndarray:
    return np.kron(belief.inputs[0].numpy(), belief.errors[0].numpy())


def observed(S: np.ndarray, X: np.ndarray, E: np.ndarray) -> np.ndarray:
    """(S^-1 + sum of (x kron d)(x kron d)')^-1, one example after the other."""
    for x, d in zip(X, E):
        v = np.kron(x, d)
        S = S - np.outer(S @ v, S @ v) / (1 + v @ S @ v)
    return S


def flip_flop(P: np.ndarray, n: int, m: int) -> np.ndarray:
    """The Kronecker product Q that minimises KL(N(0, P) || N(0, Q)), one factor after the other."""
    P4, A, B = P.reshape(n, m, n, m), np.eye(n), np.eye(m)
    for _ in range(20_000):
        old = np.kron(A, B)
        A = np.einsum("imjn,nm->ij", P4, np.linalg.inv(B)) / m
        B = np.einsum("imjn,ji->mn", P4, np.linalg.inv(A)) / n
        new = np.kron(A, B)
        if np.abs(new - old).max() < 2e-14 * np.abs(new).max():
            break
    return new


def divergence(P: np.ndarray, Q: np.ndarray) -> float:
    """KL(N(0, P) || N(0, Q)) without cancellation, from the eigenvalues of Q^-1 P."""
    root = np.linalg.inv(np.linalg.cholesky(Q))
    excess = np.linalg.eigvalsh(root @ P @ root.T) - 1
    return 0.5 * float(np.sum(excess - np.log1p(excess)))


@pytest.mark.parametrize("ab", [1e-3, 1.0, 30.0, 1e3])
def test_one_example_is_the_converged_flip_flop(ab: float) -> None:
    rng = np.random.default_rng(0)
    for n, m in SIZES:
        Sx, Sd = spd(rng, n), spd(rng, m)
        x, d = example(rng, Sx, Sd, ab)
        expected = flip_flop(observed(np.kron(Sx, Sd), [x], [d]), n, m)
        found = factors(Sx, Sd).observe(torch.tensor(x)[None, None], torch.tensor(d)[None, None])
        assert np.abs(dense(found) - expected).max() < 1e-10 * np.abs(expected).max()


@pytest.mark.parametrize("ab", [1e-2, 1.0, 100.0])
@pytest.mark.parametrize(("n", "m"), [(1, 3), (2, 2), (4, 3), (3, 6)])
def test_one_example_minimises_the_divergence(n: int, m: int, ab: float) -> None:
    """BFGS over Cholesky factors in units of the old ones, from another start."""
    rng = np.random.default_rng(1)
    Sx, Sd = spd(rng, n), spd(rng, m)
    x, d = example(rng, Sx, Sd, ab)
    P = observed(np.kron(Sx, Sd), [x], [d])
    unit = np.linalg.inv(np.kron(np.linalg.cholesky(Sx), np.linalg.cholesky(Sd)))
    white = unit @ P @ unit.T
    target = torch.tensor(white)

    def lower(values: torch.Tensor, size: int) -> torch.Tensor:
        i, j = torch.tril_indices(size, size)
        L = torch.zeros(size, size, dtype=D).index_put((i, j), values)
        return L.tril(-1) + torch.diag(L.diagonal().exp())

    def objective(values: np.ndarray) -> tuple[float, np.ndarray]:
        v = torch.tensor(values, requires_grad=True)
        A, B = lower(v[: n * (n + 1) // 2], n), lower(v[n * (n + 1) // 2 :], m)
        inverse = torch.kron(torch.linalg.inv(A), torch.linalg.inv(B))
        value = (inverse @ target @ inverse.T).trace() / 2 + m * A.diagonal().log().sum() + n * B.diagonal().log().sum()
        value.backward()
        return value.item(), v.grad.numpy()

    start = 0.1 * rng.normal(size=(n * (n + 1) + m * (m + 1)) // 2)
    found = minimize(objective, start, jac=True, method="BFGS", options={"gtol": 1e-10, "maxiter": 10_000}).x
    A, B = (lower(torch.tensor(v), k).numpy() for v, k in zip(np.split(found, [n * (n + 1) // 2]), (n, m)))
    best = divergence(white, np.kron(A @ A.T, B @ B.T))
    mine = factors(Sx, Sd).observe(torch.tensor(x)[None, None], torch.tensor(d)[None, None])
    assert abs(divergence(P, dense(mine)) - best) < 1e-12


def test_information_solves_its_equation_and_is_eq_24_for_small_updates() -> None:
    """The first-order step of the paper, corrected: halving ab quarters the difference."""
    p = torch.logspace(-8, 8, 50, dtype=D)
    for m, n in SIZES:
        t = projection_weight((m, n), p)
        terms = torch.stack([m * n * t**2, (m * n + (m * n - m - n) * p) * t, -p])
        assert bool((terms.sum(0).abs() <= 1e-14 * terms.abs().sum(0)).all())
        assert bool((t > 0).all())
    rng = np.random.default_rng(2)
    Sx, Sd = spd(rng, 4), spd(rng, 3)

    def error(ab: float) -> float:
        x, d = example(np.random.default_rng(3), Sx, Sd, ab)
        X, Delta, den = x @ Sx @ x / 4, d @ Sd @ d / 3, 1 + ab
        A = Sx + (0.5 * Delta * X * Sx - Delta * np.outer(Sx @ x, Sx @ x)) / den
        B = Sd + (0.5 * Delta * X * Sd - X * np.outer(Sd @ d, Sd @ d)) / den
        exact = dense(factors(Sx, Sd).observe(torch.tensor(x)[None, None], torch.tensor(d)[None, None]))
        return np.abs(np.kron(A, B) - exact).max() / np.abs(exact).max()

    assert error(1e-2) < 0.5e-4
    assert error(1e-2) / error(5e-3) == pytest.approx(4, rel=0.05)


def batch(rng: np.random.Generator, rows: int, n: int, m: int, size: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(rng.normal(size=(1, rows, n))), torch.tensor(size * rng.normal(size=(1, rows, m)))


def looped(belief: Factors, x: torch.Tensor, d: torch.Tensor) -> Factors:
    for b in range(x.shape[1]):
        belief = belief.observe(x[:, b : b + 1], d[:, b : b + 1])
    return belief


@pytest.mark.parametrize("rows", [3, 10])
def test_a_batch_differs_from_a_loop_to_second_order(rows: int) -> None:
    """Of both, from the flip-flop of the whole batch; in one chunk and in several."""
    rng = np.random.default_rng(4)
    start = factors(spd(rng, 5), spd(rng, 4))
    x, d = batch(rng, rows, 5, 4, 1e-3)

    def errors(scale: float) -> tuple[float, float]:
        P = observed(dense(start), x[0].numpy(), scale * d[0].numpy())
        expected = flip_flop(P, 5, 4)
        many = [dense(start.observe(x, scale * d)), dense(looped(start, x, scale * d))]
        return tuple(np.abs(one - expected).max() / np.abs(expected).max() for one in many)  # pyright: ignore

    (own, other), (half, _) = errors(1.0), errors(math.sqrt(0.5))
    assert own / half == pytest.approx(4, rel=0.1)
    assert own < 3 * other


@pytest.mark.parametrize(("n", "m"), [(4, 1), (1, 4), (1, 1)])
def test_a_batch_is_exact_where_a_side_has_one_unit(n: int, m: int) -> None:
    rng = np.random.default_rng(5)
    start = factors(spd(rng, n), spd(rng, m))
    x, d = batch(rng, 7, n, m, 3.0)
    expected = observed(dense(start), x[0].numpy(), d[0].numpy())
    for chunks in (1, 7):
        np.testing.assert_allclose(dense(start.observe(x, d, chunks)), expected, rtol=1e-9, atol=1e-12)


def test_the_order_of_rows_is_of_no_consequence_and_traces_follow() -> None:
    rng = np.random.default_rng(6)
    start = factors(spd(rng, 4), spd(rng, 3))
    x, d = batch(rng, 20, 4, 3, 1.0)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    one, other = start.observe(x, d), start.observe(x[:, order], d[:, order])
    np.testing.assert_allclose(dense(one), dense(other), rtol=1e-12)
    assert not np.allclose(dense(one), dense(start.observe(x, d, 1)), rtol=1e-6)  # there were chunks
    for trace, factor in zip(one.traces, (one.inputs, one.errors)):
        assert trace.item() == pytest.approx(torch.linalg.inv(factor[0]).trace().item() / len(factor[0]), rel=1e-9)
    assert one.inputs.diagonal(dim1=1, dim2=2).mean().item() == pytest.approx(
        one.errors.diagonal(dim1=1, dim2=2).mean().item()
    )


@pytest.mark.parametrize(("dtype", "decades"), [(torch.float64, 20), (torch.float32, 8)], ids=str)
@pytest.mark.parametrize(("n", "m", "rows"), [(1, 1, 1), (3, 1, 1), (2, 2, 1), (2, 2, 5), (4, 3, 1), (6, 5, 9)])
def test_factors_stay_positive_definite(n: int, m: int, rows: int, dtype: torch.dtype, decades: int) -> None:
    """250 chains of 400 steps with gradients over 2 `decades` orders of magnitude, now and then with drift."""
    generator, chains = torch.Generator().manual_seed(0), 250
    eyes = [torch.eye(k, dtype=dtype).repeat(chains, 1, 1) for k in (n, m)]
    belief = Factors(*eyes, torch.ones(2, chains, dtype=D))
    for step in range(400):
        size = 10 ** (decades * (torch.rand(chains, 1, 1, dtype=D, generator=generator) - 0.5))
        x, d = (size * torch.randn(chains, rows, k, dtype=D, generator=generator) for k in (n, m))
        belief = belief.observe(x.to(dtype), d.to(dtype))
        if step % 2:
            belief = belief.propagate(1.0, 1e-6)
        if step % 50 == 49:
            belief = belief.with_exact_traces()
        if step % 7 == 0 or step == 399:
            for factor in (belief.inputs, belief.errors):
                assert bool(torch.isfinite(factor).all())
                assert not bool(torch.linalg.cholesky_ex(factor)[1].any())


def test_drift_is_eq_28_and_exact_beside_a_multiple_of_the_identity() -> None:
    """Against a flip-flop: err(eta)/err(eta/2) = 16, as for the printed equation, which it equals to first order."""
    rng = np.random.default_rng(7)
    Sx, Sd, sigma = spd(rng, 4), spd(rng, 3), 2.0
    start = factors(Sx, Sd)
    Sx, Sd = start.inputs[0].numpy(), start.errors[0].numpy()

    def drifted(eta: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        r = math.exp(-(eta**2) / sigma**2)
        q = sigma**2 * (1 - r)
        exact = flip_flop(r * np.kron(Sx, Sd) + q * np.eye(12), 4, 3)
        lx, ld, c = np.trace(np.linalg.inv(Sx)) / 4, np.trace(np.linalg.inv(Sd)) / 3, 1 - eta**2 / (2 * sigma**2)
        A = (c - 0.5 * eta**2 * lx * ld) * Sx + eta**2 * ld * np.eye(4)
        B = (c - 0.5 * eta**2 * lx * ld) * Sd + eta**2 * lx * np.eye(3)
        return dense(start.propagate(r, q)), exact, np.kron(A, B)

    def error(eta: float) -> float:
        own, exact, _ = drifted(eta)
        return np.abs(own - exact).max()

    assert error(0.05) / error(0.025) == pytest.approx(16, abs=1)
    own, exact, printed = drifted(0.05)
    assert np.abs(own - exact).max() < 2 * np.abs(printed - exact).max()
    isotropic = factors(Sx, 0.3 * np.eye(3))
    np.testing.assert_allclose(
        dense(isotropic.propagate(0.9, 5.0)), 0.9 * np.kron(Sx, 0.3 * np.eye(3)) + 5 * np.eye(12), rtol=1e-12
    )
    huge = start.propagate(0.0, 1e6)
    np.testing.assert_allclose(dense(huge), 1e6 * np.eye(12), rtol=1e-12)


def test_steady_state_under_drift_whitens() -> None:
    """eta C_x^-1/2 kron C_d^-1/2, within 10 % at eta sqrt(tr C_x tr C_d) = 0.02, over 100 chains."""
    rng = np.random.default_rng(8)
    Cx, Cd = spd(rng, 3) / 5, spd(rng, 2) / 4
    eta = 0.02 / math.sqrt(np.trace(Cx) * np.trace(Cd))
    roots = [torch.tensor(np.linalg.cholesky(C)) for C in (Cx, Cd)]
    whites = [torch.linalg.inv(_root(C)) * math.sqrt(eta) for C in (Cx, Cd)]
    generator, chains = torch.Generator().manual_seed(0), 100
    traces = torch.stack([torch.linalg.inv(S).trace() / len(S) for S in whites])[:, None].repeat(1, chains)
    belief = Factors(*(2 * S.repeat(chains, 1, 1) for S in whites), traces / 2)
    total, count = torch.zeros(6, 6, dtype=D), 0
    for step in range(1200):
        x, d = (torch.randn(chains, 1, len(R), dtype=D, generator=generator) @ R.T for R in roots)
        belief = belief.propagate(1.0, eta**2).observe(x, d)
        if step % 20 == 19:
            belief = belief.with_exact_traces()
        if step >= 600:
            total += torch.einsum("gij,gmn->imjn", belief.inputs, belief.errors).reshape(6, 6) / chains
            count += 1
    expected = torch.kron(*whites)
    assert count * chains >= 40 / eta
    assert (total / count - expected).norm() / expected.norm() < 0.1


def _root(C: np.ndarray) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(torch.tensor(C))
    return vectors @ torch.diag(values.sqrt()) @ vectors.T


def test_without_drift_the_belief_tends_to_the_inverse_fisher_over_t() -> None:
    """(1/t) C_x^-1 kron C_d^-1, relative error 0.07 at t = 4000."""
    rng = np.random.default_rng(9)
    Cx, Cd = spd(rng, 3), spd(rng, 2)
    generator, chains, steps = torch.Generator().manual_seed(0), 10, 4000
    roots = [torch.tensor(np.linalg.cholesky(C)) for C in (Cx, Cd)]
    belief = Factors(*(torch.eye(k, dtype=D).repeat(chains, 1, 1) for k in (3, 2)), torch.ones(2, chains, dtype=D))
    for _ in range(steps // 10):
        x, d = (torch.randn(chains, 10, len(R), dtype=D, generator=generator) @ R.T for R in roots)
        belief = belief.observe(x, d)
    found = torch.einsum("gij,gmn->imjn", belief.inputs, belief.errors).reshape(6, 6) / chains
    expected = torch.tensor(np.kron(np.linalg.inv(Cx), np.linalg.inv(Cd))) / steps
    assert (found - expected).norm() / expected.norm() < 0.1
