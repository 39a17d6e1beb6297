"""Khan and Rue 2023, section 5.3: topics of documents by stochastic variational inference, and by other code."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesgrad.models import LatentDirichlet
from bayesgrad_lab import figures
from bayesgrad_lab.context import Context
from bayesgrad_lab.corpora import Corpus, associated_press, invented
from bayesgrad_lab.report import Report
from bayesgrad_lab.results import less, mean_and_error, outcome, shown

PRIORS = ((0.05, 0.05), (0.1, 0.1), (0.5, 0.1))  # of shares and of words, for each method to choose from
BATCH, OFFSET, DECAY = 128, 10.0, 0.7
TURNS, TOLERANCE = 100, 1e-3  # of a document
SPLIT_SEED = 0
STEPS = dict(learning_offset=OFFSET, learning_decay=DECAY, batch_size=BATCH)
FIXED = dict(max_doc_update_iter=TURNS, mean_change_tol=TOLERANCE, **STEPS)  # for both packages, whose names are alike


@dataclass(frozen=True)
class Documents:
    """What is learned from, and judged by.

    Args:
        passes: after which the topics are judged: of streams, and of sweeps.
        tuning: passes that priors are chosen after: of streams, and of sweeps.
    """

    train: Any
    validation: Any
    test: Any
    topics: int
    passes: tuple[tuple[int, ...], tuple[int, ...]]
    tuning: tuple[int, int]


def bound(documents: Any, topics: np.ndarray, prior: float) -> float:
    """Our bound for each word of documents that were not learned from, whoever found the topics.

    All methods are judged with the same prior of shares that they were trained with, and turns of documents to the same
    tolerance from the same start.
    """
    judge = LatentDirichlet(doc_topic_prior=prior, max_doc_update_iter=TURNS, mean_change_tol=TOLERANCE)
    return float(judge.bound(documents, topics).sum() / documents.sum())


def fitted(
    make: Any, task: Documents, priors: tuple[float, float], passes: int, seed: int, **options: Any
) -> np.ndarray:
    """The topics of a model, of either package, by the options that they share and by others."""
    shared = dict(doc_topic_prior=priors[0], topic_word_prior=priors[1], max_iter=passes, random_state=seed)
    model = make(task.topics, **FIXED, **shared, **options)
    return model.fit(task.train).components_


def theirs(method: str, *settings: Any) -> np.ndarray:
    from sklearn.decomposition import LatentDirichletAllocation

    return fitted(LatentDirichletAllocation, *settings, learning_method=method)


ours = partial(fitted, LatentDirichlet, tol=0, progress=False)
METHODS: dict[str, tuple[Callable[..., np.ndarray], bool]] = {  # and whether it sweeps
    "SVI": (partial(ours, method="svi"), False),
    "batch VB": (partial(ours, method="batch"), True),
    "scikit-learn, online": (partial(theirs, "online"), False),
    "scikit-learn, batch": (partial(theirs, "batch"), True),
}


def trained(
    context: Context, task: Documents, name: str, priors: tuple[float, float], passes: int, seed: int
) -> dict[str, Tensor]:
    """The topics and the seconds of the processor that they took."""

    def compute() -> dict[str, Tensor]:
        begin = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            topics = METHODS[name][0](task, priors, passes, seed)
        return {"seconds": torch.tensor(time.process_time() - begin), "topics": torch.as_tensor(topics)}

    plain = "".join(letter if letter.isalnum() else "_" for letter in name)
    return context.once(f"{plain}-{priors[0]:g}-{priors[1]:g}-{passes}-{seed}", compute)


def tasks(context: Context) -> tuple[Corpus, Documents]:
    """The corpus, split at random into training, validation and test documents."""
    if context.scale == "smoke":
        corpus, sizes, topics, passes, tuning = invented(), (10, 10), 4, ((1, 2), (1, 2)), (1, 1)
    else:
        corpus = associated_press(context.data_dir)
        large = context.scale == "paper"
        passes = ((1, 2, 4, 8, 16, 32), (4, 8, 16, 32, 64)) if large else ((1, 3, 10), (3, 10, 20))
        sizes, topics, tuning = (246, 300), 100 if large else 20, (8, 16) if large else (3, 5)
    order = np.random.RandomState(SPLIT_SEED).permutation(corpus.counts.shape[0])
    a, b = sizes
    return corpus, Documents(
        corpus[order[a + b :]], corpus[order[:a]], corpus[order[a : a + b]], topics, passes, tuning
    )


def topics(context: Context) -> Report:
    """Held-out bound against time of four ways to the same model."""
    corpus, task = tasks(context)
    context.say(corpus.note)
    rows, curves, last, chosen = [], {}, {}, {}
    seconds: dict[str, list[float]] = {}
    for name, (_, sweeps) in METHODS.items():
        context.say(f"{name}: choosing priors")
        tuning = task.tuning[sweeps]
        scores = {
            priors: bound(
                task.validation, trained(context, task, name, priors, tuning, 10_000)["topics"].numpy(), priors[0]
            )
            for priors in PRIORS
        }
        best = chosen[name] = max(scores, key=lambda priors: scores[priors])
        times, values = [], []
        for passes in task.passes[sweeps]:
            context.say(f"{name}: {passes} passes")
            found = [trained(context, task, name, best, passes, seed) for seed in range(context.seeds)]
            times.append([float(run["seconds"]) for run in found])
            values.append([bound(task.test, run["topics"].numpy(), best[0]) for run in found])
            cells = f"{passes}", f"{np.mean(times[-1]):.1f}", shown(mean_and_error(values[-1]), ".4f")
            rows.append([name, f"{best[0]:g}, {best[1]:g}", *cells])
        curves[name] = ([float(np.mean(some)) for some in times], values)
        last[name], seconds[name] = values[-1], times[-1]
    verdicts, good = [], []
    for other in ("batch VB", "scikit-learn, batch"):
        goal, spent = float(np.mean(last[other])), float(np.mean(seconds[other]))
        reached = next((t for t, some in zip(*curves["SVI"]) if np.mean(some) >= goal), None)
        good.append(reached is not None and reached < spent)
        words = "does not reach" if reached is None else f"takes {reached:.1f} s to"
        verdicts.append(f"SVI {words} the last bound of {other}, which took {spent:.1f} s")
    for own, other in (("SVI", "scikit-learn, online"), ("batch VB", "scikit-learn, batch")):
        gap = shown(less(last[own], last[other]), "+.4f")
        ratio = float(np.mean(seconds[own]) / np.mean(seconds[other]))
        verdicts.append(f"{own} ends {gap} nats for each word from {other}, in {ratio:.2f} of its time")
    report = Report.of("khan2023-svi", topics=task.topics, documents=f"{task.train.shape[0]:,}")
    report.verdict = (
        f"{outcome(good)}. By the bound on {task.test.shape[0]} held-out documents: {'; '.join(verdicts)} "
        f"({context.seeds} paired seeds)."
    )
    report.add_table(
        "Held-out bound for each word, ours for the topics of all methods",
        ["method", "priors of shares, words", "passes", "CPU seconds", "bound, nats for each word"],
        rows,
    )
    first = trained(context, task, "SVI", chosen["SVI"], task.passes[0][-1], 0)["topics"].numpy()
    weight = first.sum(1) / first.sum()
    listed = []
    for place in np.argsort(-weight):
        words = [corpus.vocabulary[i] for i in np.argsort(-first[place])[:10]]
        listed.append([f"{100 * weight[place]:.1f} %", ", ".join(words)])
    report.add_table(
        "Topics of SVI, seed 0: their share of all words, and the ten most probable words", ["part", "words"], listed
    )
    report.draw(
        context.folder / "svi.png",
        figures.lines,
        {"held-out documents": curves},
        "CPU seconds of training",
        "bound for each word (nats)",
    )
    report.add_protocol(corpus=corpus, task=task, pairs=len(PRIORS), **FIXED)
    return report
