"""EM for hidden Markov models beside hmmlearn.

Run: python benchmarks/inference_markov.py [--rounds 5]

Both fit the same data from the same start with one thread; times are CPU seconds of whole fits, from reading the data
to the last likelihood, divided by the sweeps; the median over rounds in which they take turns. hmmlearn has two ways of
summing: "log", its default, and "scaling", which is faster and underflows where a path is very unlikely.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from typing import Any

import numpy as np
import torch

from bayesgrad.models import HiddenMarkov
from bayesgrad_lab.benchmarks import page

KINDS = ("full", "diag", "categorical")
LENGTH, COLUMNS, SWEEPS = 100_000, 3, 10


def chain(states: int, length: int = LENGTH) -> tuple[np.ndarray, np.ndarray]:
    """Rows and symbols of a chain that stays in a state for about ten steps."""
    rng = np.random.default_rng(0)
    jumps = np.flatnonzero(rng.random(length) < 0.1)
    lengths = np.diff(np.r_[0, jumps, length])
    z = np.repeat(rng.integers(states, size=len(lengths)), lengths)
    return rng.normal(size=(length, COLUMNS)) + 2 * z[:, None], (4 * rng.random(length) + z).astype(int)[:, None]


def start(states: int, symbols: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "startprob": np.full(states, 1 / states),
        "transmat": (np.eye(states) + 1 / states) / 2,
        "means": 2 * rng.normal(size=(states, COLUMNS)) + states,
        "emissionprob": rng.dirichlet(np.full(symbols, 3.0), size=states),
    }


def ones(kind: str, states: int) -> np.ndarray:
    return np.ones((states, COLUMNS)) if kind == "diag" else np.stack([np.eye(COLUMNS)] * states)


def ours(kind: str, X: np.ndarray, given: dict[str, np.ndarray]) -> tuple[float, float]:
    """CPU seconds of a sweep, and the log-likelihood before the last."""
    options: dict[str, Any] = {f"{name}_init": value for name, value in given.items()}
    options |= dict(emissions="categorical") if kind == "categorical" else dict(covariance_type=kind)
    options |= dict(covars_prior=0.0, covars_init=ones(kind, len(given["means"])))
    model = HiddenMarkov(len(given["means"]), tol=0, max_iter=SWEEPS, **options)
    begin = time.process_time()
    model.fit(X)
    return (time.process_time() - begin) / SWEEPS, model.elbos_[SWEEPS - 1]


def theirs(kind: str, X: np.ndarray, given: dict[str, np.ndarray], implementation: str) -> tuple[float, float]:
    from hmmlearn.hmm import CategoricalHMM, GaussianHMM  # pyright: ignore[reportMissingImports]

    K = len(given["means"])
    common: dict[str, Any] = dict(n_iter=SWEEPS, tol=-np.inf, init_params="", implementation=implementation)
    if kind == "categorical":
        peer = CategoricalHMM(K, n_features=given["emissionprob"].shape[1], **common)
        peer.emissionprob_ = given["emissionprob"]
    else:
        peer = GaussianHMM(K, kind, covars_prior=0, min_covar=0, **common)
        peer.means_ = given["means"]
        peer.covars_ = ones(kind, K)
    peer.startprob_, peer.transmat_ = given["startprob"], given["transmat"]
    begin = time.process_time()
    peer.fit(X)
    return (time.process_time() - begin) / SWEEPS, float(peer.monitor_.history[-1])


def section(rounds: int) -> list[str]:
    """Lines of Markdown."""
    logging.getLogger("hmmlearn").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    lines = [
        f"## Hidden Markov models, EM on {LENGTH:,} observations",
        "",
        f"Milliseconds of a sweep (CPU time of one thread, {SWEEPS} sweeps with reading and start, median of {rounds} "
        f"rounds in turns); Gaussian rows have {COLUMNS} columns. The difference is that of log-likelihoods after the "
        "same number of sweeps from the same start, relative to their size.",
        "",
        "| states | emissions | HiddenMarkov | hmmlearn, log | hmmlearn, scaling | to log | to scaling | difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for states in (3, 5):
        rows, symbols = chain(states)
        given = start(states, int(symbols.max()) + 1)
        for kind in KINDS:
            X = symbols if kind == "categorical" else rows
            times: list[list[float]] = [[], [], []]
            ends = [0.0, 0.0, 0.0]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for turn in range(rounds + 1):
                    found = [ours(kind, X, given), *(theirs(kind, X, given, way) for way in ("log", "scaling"))]
                    for place, (seconds, end) in enumerate(found):
                        ends[place] = end
                        if turn:
                            times[place].append(1e3 * seconds)
            own, log, scaling = (statistics.median(part) for part in times)
            apart = abs(ends[0] - ends[1]) / abs(ends[1])
            shown = [f"{value:.1f}" for value in (own, log, scaling)] + [f"{own / log:.2f}", f"{own / scaling:.2f}"]
            lines.append(f"| {states} | {kind} | {' | '.join(shown)} | {apart:.0e} |")
    return lines


def main() -> None:
    arguments = page.options(__doc__, rounds=5).parse_args()
    page.publish(section(arguments.rounds), arguments.write)


if __name__ == "__main__":
    main()
