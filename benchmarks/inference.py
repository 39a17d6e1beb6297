"""The inference engine beside its peers.

Run: python benchmarks/inference.py --data-dir DIR [--rounds 3] [--write docs/results/inference.md]

One thread each; the median over rounds in which the competitors take turns. Compilation is not counted. `--only` takes
names of parts: stream, logistic, models, mixture, topics, markov, factors.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import inference_factors
import inference_glm
import inference_markov
import inference_mixture
import inference_models
import inference_topics
import numpy as np
import scipy.io
import torch

from bayesgrad.models import GLM
from bayesgrad_lab.benchmarks import page


def a1a(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows and labels (0, 1) of the training and the test set, with a last column of ones."""
    held = scipy.io.loadmat(folder / "classification" / "a1a.mat")
    width = held["X_te"].shape[1]
    train, test = (np.asarray(held[name].todense(), dtype=np.float64) for name in ("X", "X_te"))
    train = np.pad(train, ((0, 0), (0, width - train.shape[1])))
    labels = [(np.asarray(held[name]).ravel() > 0).astype(int) for name in ("y", "y_te")]
    rows = [np.c_[part, np.ones(len(part))] for part in (train, test)]
    return rows[0], labels[0], rows[1], labels[1]


def cpu(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


class Sampler:
    """NumPyro's NUTS on logistic regression with prior N(0, I): 1000 steps of warm-up, 1000 draws, one chain."""

    def __init__(self, rows: np.ndarray, labels: np.ndarray) -> None:
        import jax
        import jax.numpy as jnp
        import numpyro
        import numpyro.distributions as dist

        X, y = jnp.asarray(rows, dtype=jnp.float32), jnp.asarray(labels)

        def model() -> None:
            weights = numpyro.sample("weights", dist.Normal(jnp.zeros(X.shape[1]), 1.0).to_event(1))
            numpyro.sample("y", dist.Bernoulli(logits=X @ weights), obs=y)

        kernel = numpyro.infer.NUTS(model)

        def draw(state: Any, _: None) -> tuple[Any, Any]:
            state = kernel.sample(state, (), {})
            return state, state.z["weights"]

        self.start = lambda seed: kernel.init(jax.random.PRNGKey(seed), 1000, None, (), {})
        self.chain = jax.jit(lambda state: jax.lax.scan(draw, state, None, length=2000)[1])
        self.chain = self.chain.lower(self.start(0)).compile()
        self.draws: list[np.ndarray] = []

    def __call__(self, state: Any) -> None:
        self.draws.append(np.asarray(self.chain(state), dtype=np.float64)[1000:])


def logistic(folder: Path, rounds: int) -> list[str]:
    from numpyro.diagnostics import effective_sample_size

    rows, labels, test, test_labels = a1a(folder)
    print("  compiling NUTS", file=sys.stderr, flush=True)
    sampler = Sampler(rows, labels)

    def fit(expectation: str = "quadrature") -> GLM:
        return GLM("logistic", fit_intercept=False, expectation=expectation).fit(rows, labels)

    fit()
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(rounds):
        print(f"  round {number + 1}/{rounds}", file=sys.stderr, flush=True)
        ours.append(statistics.median(cpu(fit) for _ in range(5)))
        state = sampler.start(number)
        theirs.append(cpu(lambda: sampler(state)))  # noqa: B023
        print(f"    {ours[-1]:.3f} s against {theirs[-1]:.2f} s", file=sys.stderr, flush=True)
    model, laplace = fit(), fit("delta")
    bounds = np.array(GLM("logistic", fit_intercept=False, tol=1e-15, max_iter=400).fit(rows, labels).elbos_)
    best, needed = bounds[-1], int((bounds[-1] - bounds < 1e-6).argmax())
    draws = np.stack(sampler.draws)  # (rounds, 1000, P)
    pooled = draws.reshape(-1, draws.shape[-1])
    mean, deviation = pooled.mean(0), pooled.std(0)
    sizes = effective_sample_size(draws)
    probability = (1 / (1 + np.exp(-(pooled[::10] @ test.T)))).mean(0)

    def gap(model: GLM) -> np.ndarray:
        return (model.coef_[0] - mean) / deviation

    def nll(p: np.ndarray) -> float:
        return float(-np.log(np.where(test_labels == 1, p, 1 - p)).mean())

    lines = ["| | CPU seconds | steps | means: rms gap to NUTS | largest | deviations, ours/NUTS | test NLL |"]
    lines.append("|---|---|---|---|---|---|---|")
    speed = statistics.median(theirs) / statistics.median(ours)
    for name, own, seconds in (("GLM, quadrature", model, ours), ("GLM, delta (Laplace)", laplace, None)):
        ratio = np.sqrt(own.coef_covariance_.diagonal()) / deviation
        spent = f"{statistics.median(seconds):.3f}" if seconds else f"{cpu(lambda: fit('delta')):.3f}"
        cells = [spent, str(own.n_iter_), f"{np.sqrt((gap(own) ** 2).mean()):.3f}", f"{np.abs(gap(own)).max():.3f}"]
        cells += [f"{ratio.min():.3f} to {ratio.max():.3f}", f"{nll(own.predict_proba(test)[:, 1]):.5f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    noise = np.sqrt((1 / sizes).mean())
    lines.append(
        f"| NumPyro NUTS, 1000 + 1000 | {statistics.median(theirs):.2f} | | {noise:.3f} (its own error) | | "
        f"| {nll(probability):.5f} |"
    )
    return [
        "## Logistic regression on a1a",
        "",
        f"{len(rows)} rows, {rows.shape[1]} weights, prior N(0, I). Gaps are in posterior deviations. NUTS' moments",
        f"are those of {len(pooled)} draws ({rounds} chains), and its time is that of one chain. The bound is within",
        f"1e-6 of its optimum, {best:.4f}, after {needed} steps; Laplace's evidence is {laplace.elbo_:.4f}. NUTS takes",
        f"**{speed:.0f} times** as long as quadrature.",
        "",
        *lines,
    ]


def stream(rows: int = 1_000_000, batch: int = 5000, columns: int = 20) -> list[str]:
    """Logistic regression by partial_fit: memory after the first batches and after the last."""
    rng = np.random.default_rng(0)
    weights, model = rng.normal(size=columns), GLM("logistic")
    lines = [
        "| rows | peak memory, MiB | CPU seconds | largest error of a weight, in its deviations |",
        "|---|---|---|---|",
    ]
    start, batches = time.process_time(), rows // batch
    for number in range(1, batches + 1):
        X = rng.normal(size=(batch, columns))
        y = (X @ weights + rng.logistic(size=batch) > 0).astype(int)
        model.partial_fit(X, y, classes=[0, 1])
        if number in (1, batches // 20, batches // 4, batches // 2, batches):
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            error = (np.abs(model.coef_[0] - weights) / np.sqrt(model.coef_covariance_.diagonal())).max()
            lines.append(f"| {number * batch:,} | {peak} | {time.process_time() - start:.1f} | {error:.1f} |")
    return ["## A stream", "", f"Logistic regression, {columns} columns, batches of {batch}.", "", *lines]


PARTS: dict[str, Callable[[int, str], list[str]]] = {
    "stream": lambda rounds, folder: stream(),
    "logistic": lambda rounds, folder: logistic(Path(folder), rounds),
    "glm": lambda rounds, folder: inference_glm.section(5 * rounds, folder),
    "models": lambda rounds, folder: inference_models.section(rounds + 2),
    "mixture": lambda rounds, folder: inference_mixture.section(rounds),
    "topics": lambda rounds, folder: inference_topics.section(rounds, folder),
    "markov": lambda rounds, folder: inference_markov.section(rounds),
    "factors": lambda rounds, folder: inference_factors.section(rounds),
}


def part(name: str, rounds: int, folder: str) -> list[str]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return PARTS[name](rounds, folder)


def main() -> None:
    parser = page.options(__doc__, rounds=3)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("BAYESGRAD_DATA"), help="or BAYESGRAD_DATA")
    parser.add_argument("--only", nargs="+", metavar="PART", help="not all parts")
    arguments = parser.parse_args()
    if arguments.data_dir is None:
        parser.error("--data-dir is needed: a folder that holds classification/a1a.mat and lda/ap")
    wanted, found = arguments.only or list(PARTS), []
    unknown = sorted(set(wanted) - set(PARTS))
    if unknown:
        parser.error(f"--only takes {', '.join(PARTS)}, got {', '.join(unknown)}")
    for name in wanted:
        print(f"{name}:", file=sys.stderr, flush=True)
        # A process for each, so that peaks of memory are its own.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
            found += ["", *alone.submit(part, name, arguments.rounds, str(arguments.data_dir)).result()]
    lines = [
        "# The inference engine beside other packages",
        "",
        "`python benchmarks/inference.py --data-dir DIR`; one thread each, medians over rounds measured in",
        "turns, without compilation.",
        *found,
    ]
    page.publish(lines, arguments.write)


if __name__ == "__main__":
    main()
