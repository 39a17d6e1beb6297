"""Gaussian processes and state spaces beside scikit-learn, dynamax and a compiled loop in JAX.

A part of benchmarks/inference.py; by itself: python benchmarks/inference_models.py [--rounds 5].

Competitors take turns in one process with one thread each; figures are medians over rounds, after a round that is not
counted and in which JAX compiles. Where dynamax cannot be imported, a Kalman smoother as `jax.lax.scan` stands in for
it.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch

from bayesgrad.models import GaussianProcess, LinearStateSpace, kernels
from bayesgrad_lab.benchmarks import page

F, Q = np.array([[1.0, 0.1], [0.0, 1.0]]), np.diag([0.01, 0.02])
H, R = np.array([[1.0, 0.0]]), np.array([[0.25]])

Row = tuple[str, str, Callable[[], float]]


def smoothers(length: int) -> list[Row]:
    """The smoothed means of a car on a line; each gives its log-likelihood."""
    y = np.random.default_rng(0).normal(size=(length, 1)).cumsum(0) * 0.1
    model = LinearStateSpace(F, Q, H, R)
    name = f"Kalman smoother, {length:,} steps"
    rows: list[Row] = [(name, "LinearStateSpace", lambda: float(model.smooth(y).log_likelihood))]
    try:
        import jax
    except ImportError:
        return rows
    jax.config.update("jax_enable_x64", True)
    given = jax.numpy.asarray(y)
    compiled = jax.jit(_scan_smoother)
    rows.append((name, "jax.lax.scan, compiled", lambda: float(jax.block_until_ready(compiled(given))[0])))
    try:
        from dynamax.linear_gaussian_ssm import lgssm_smoother  # pyright: ignore
        from dynamax.linear_gaussian_ssm.inference import make_lgssm_params  # pyright: ignore
    except Exception as error:  # its dependencies follow other versions of JAX
        print(f"  no dynamax: {type(error).__name__}: {error}", file=sys.stderr)
        return rows
    params = make_lgssm_params(np.zeros(2), np.eye(2), F, Q, H, R)
    peer = jax.jit(lgssm_smoother)
    rows.append((name, "dynamax, compiled", lambda: float(jax.block_until_ready(peer(params, given)).marginal_loglik)))
    return rows


def _scan_smoother(y):
    """Filter and Rauch-Tung-Striebel smoother, step by step."""
    import jax
    from jax import numpy as jnp
    from jax.scipy.linalg import cho_factor, cho_solve

    def forward(carry, row):
        mean, covariance, total = carry
        spread = H @ covariance @ H.T + R
        factor = cho_factor(spread, lower=True)
        gain = cho_solve(factor, H @ covariance).T
        error = row - H @ mean
        volume = 2 * jnp.log(jnp.diag(factor[0])).sum()
        total = total - (error @ cho_solve(factor, error) + volume + len(R) * jnp.log(2 * jnp.pi)) / 2
        mean, covariance = mean + gain @ error, covariance - gain @ spread @ gain.T
        return (F @ mean, F @ covariance @ F.T + Q, total), (mean, covariance)

    def backward(carry, found):
        later, spread = carry
        mean, covariance = found
        ahead = F @ covariance @ F.T + Q
        gain = cho_solve(cho_factor(ahead, lower=True), F @ covariance).T
        mean, covariance = mean + gain @ (later - F @ mean), covariance + gain @ (spread - ahead) @ gain.T
        return (mean, covariance), (mean, covariance)

    (_, _, total), found = jax.lax.scan(forward, (jnp.zeros(2), jnp.eye(2), 0.0), y)
    last = tuple(part[-1] for part in found)
    _, smooth = jax.lax.scan(backward, last, tuple(part[:-1] for part in found), reverse=True)
    return total, smooth, last


def classifiers(rows: int, *, optimise: bool) -> list[Row]:
    """Fitting a classifier in two dimensions; each gives its bound or evidence."""
    from sklearn.gaussian_process import GaussianProcessClassifier
    from sklearn.gaussian_process import kernels as peers

    rng = np.random.default_rng(0)
    X = rng.normal(size=(rows, 2))
    y = (np.sin(2 * X[:, 0]) + X[:, 1] + 0.5 * rng.normal(size=rows) > 0).astype(int)
    name = f"GP classification, {rows:,} points, {'numbers chosen' if optimise else 'numbers given'}"

    def ours() -> float:
        return (
            GaussianProcess(1.0 * kernels.RBF(1.0), "logistic", optimizer="auto" if optimise else None).fit(X, y).elbo_
        )

    def theirs() -> float:
        optimizer = "fmin_l_bfgs_b" if optimise else None
        peer = GaussianProcessClassifier(1.0 * peers.RBF(1.0), optimizer=optimizer)  # pyright: ignore
        return float(peer.fit(X, y).log_marginal_likelihood_value_)  # pyright: ignore

    return [(name, "GaussianProcess", ours), (name, "scikit-learn, Laplace", theirs)]


def measured(rows: list[Row], rounds: int) -> list[str]:
    """Lines of a table: what, who, seconds, relative to the first, value."""
    times: dict[str, list[float]] = {who: [] for _, who, _ in rows}
    values: dict[str, float] = {}
    for turn in range(rounds + 1):
        for _, who, call in rows:
            start = time.perf_counter()
            values[who] = call()
            if turn:
                times[who].append(time.perf_counter() - start)
    first = statistics.median(times[rows[0][1]])
    lines = []
    for what, who, _ in rows:
        seconds = statistics.median(times[who])
        lines.append(f"| {what} | {who} | {1e3 * seconds:.1f} | {first / seconds:.2f} | {values[who]:.6f} |")
    return lines


def section(rounds: int) -> list[str]:
    """Lines of Markdown."""
    lines = ["| task | implementation | ms | ours / theirs | evidence or bound |", "|---|---|---|---|---|"]
    for length in (1_000, 10_000, 100_000):
        lines += measured(smoothers(length), rounds)
    lines += measured(classifiers(1_000, optimise=False), rounds)
    lines += measured(classifiers(1_000, optimise=True), max(1, rounds // 3))
    return ["## Gaussian processes and state spaces", "", *lines]


def main() -> None:
    parser = page.options(__doc__, rounds=5)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    page.publish(section(arguments.rounds), arguments.write)


if __name__ == "__main__":
    main()
