"""Topics of the Associated Press corpus beside scikit-learn.

Run: python benchmarks/inference_topics.py --data-dir DIR [--rounds 3]

Both take the same documents, batches, priors, passes and tolerance. Times are CPU seconds of one thread; the median
over rounds in which the competitors take turns. The bound is ours, on documents that neither has seen.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from bayesgrad.models import LatentDirichlet
from bayesgrad_lab.benchmarks import page
from bayesgrad_lab.corpora import associated_press

PASSES, SWEEPS, TOPICS, HELD = 3, 10, (10, 50), 300
SHARED: dict[str, Any] = dict(
    doc_topic_prior=0.1, topic_word_prior=0.1, learning_offset=10.0, learning_decay=0.7, batch_size=128
)
SHARED |= dict(max_doc_update_iter=100, mean_change_tol=1e-3)


def section(rounds: int, data_dir: str | None = None) -> list[str]:
    """Lines of Markdown: time and held-out bound of streams and of sweeps."""
    corpus = associated_press(data_dir)
    order = np.random.RandomState(0).permutation(corpus.counts.shape[0])
    train, test = corpus[order[HELD:]], corpus[order[:HELD]]
    lines = [
        "## Topics of documents",
        "",
        f"{corpus.note}; {train.shape[0]} to learn from, {PASSES} passes over batches of {SHARED['batch_size']} or "
        f"{SWEEPS} sweeps, the same priors and tolerance; medians of {rounds} rounds with a seed each. The bound is "
        f"ours for the topics of both, on {HELD} held-out documents.",
        "",
        "| model | method | ours, CPU s | scikit-learn, CPU s | ours / theirs | bound per word, ours | theirs |",
        "|---|---|---|---|---|---|---|",
    ]
    for topics in TOPICS:
        for method, name in (("svi", "online"), ("batch", "batch")):
            times, bounds = ([], []), ([], [])
            for seed in range(rounds):
                for place, fit in enumerate((_ours, _theirs)):
                    spent, found = _measured(partial(fit, train, topics, (method, name), seed))
                    judge = LatentDirichlet(topics, doc_topic_prior=SHARED["doc_topic_prior"])
                    times[place].append(spent)
                    bounds[place].append(judge.bound(test, found).sum() / test.sum())
            ours, theirs = map(statistics.median, times)
            values = " | ".join(f"{statistics.median(some):.3f}" for some in bounds)
            what = f"LDA, {topics} topics | {'SVI, online' if method == 'svi' else 'batch'}"
            lines.append(f"| {what} | {ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} | {values} |")
    return [*lines, ""]


def _options(methods: tuple[str, str]) -> dict[str, Any]:
    return SHARED | dict(max_iter=SWEEPS if methods[0] == "batch" else PASSES)


def _ours(train, topics: int, methods: tuple[str, str], seed: int) -> np.ndarray:
    model = LatentDirichlet(topics, method=methods[0], tol=0, random_state=seed, progress=False, **_options(methods))
    return model.fit(train).components_


def _theirs(train, topics: int, methods: tuple[str, str], seed: int) -> np.ndarray:
    from sklearn.decomposition import LatentDirichletAllocation

    model = LatentDirichletAllocation(topics, learning_method=methods[1], random_state=seed, **_options(methods))
    return model.fit(train).components_


def _measured(function: Callable[[], np.ndarray]) -> tuple[float, np.ndarray]:
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = function()
    return time.process_time() - start, found


def main() -> None:
    parser = page.options(__doc__, rounds=3)
    parser.add_argument("--data-dir", help="where lda/ap is; else $BAYESGRAD_DATA")
    options = parser.parse_args()
    torch.set_num_threads(1)
    page.publish(section(options.rounds, options.data_dir), options.write)


if __name__ == "__main__":
    main()
