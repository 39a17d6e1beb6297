"""Continual learning: tasks that come one after the other, and what is kept of those that are gone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from bayesgrad_lab import datasets, figures
from bayesgrad_lab.continual_training import METHODS, PENALTIES, Finals, Stream, finals
from bayesgrad_lab.report import Report
from bayesgrad_lab.study import Context, mean_and_error


def streams(context: Context) -> list[Stream]:
    if context.scale == "smoke":
        data = datasets.load("digits").part(200)
        return [Stream(kind, data, 2, (12,), 2, 25, 20) for kind in ("permuted", "split")]
    data = datasets.load("mnist", context.data_dir, context.download)
    if context.scale == "laptop":
        return [
            Stream(kind, data.part(6000), 5, (100, 100), n, 100, 300) for kind, n in (("permuted", 3), ("split", 3))
        ]
    return [
        Stream("permuted", data, 10, (400, 400), 20, 100, 1000),
        Stream("split", data, 5, (256, 256), 50, 100, 1000),
    ]


def continual(context: Context) -> Report:
    """Permuted and split tasks: nothing kept, penalties of many kinds, and beliefs that are handed on."""
    report = Report(
        "continual-mnist: what to keep from earlier tasks",
        claim="EWC needs v'F v only, which a subsampled Fisher gives exactly, where other methods use a diagonal "
        "(Benzing 2021, A.2); the input factors alone may replace both Kronecker factors, and they add up over tasks "
        "(Benzing 2021, C). Target here: on permuted MNIST, EWC with the subsampled Fisher loses less accuracy on "
        "earlier tasks than diagonal EWC with as many examples, by two standard errors of paired seeds, and is not "
        "less accurate in the end.",
    )
    smoke = context.scale == "smoke"
    methods = [replace(m, strengths=m.strengths[:2], split=m.split[:2]) for m in METHODS] if smoke else METHODS
    paths, words = {}, []
    for stream in streams(context):
        results = {method.key: finals(context, stream, method) for method in methods}
        report.add_table(stream.title, COLUMNS, [_row(one) for one in results.values()])
        tried = [one for one in results.values() if one.tried]
        if tried:
            report.add_table(
                f"{stream.title}: validation accuracy % after all tasks, of each strength tried",
                ["method", *map(str, range(1, 1 + max(len(one.tried) for one in tried)))],
                [
                    [one.method.title, *(f"{strength:g}: {100 * v:.1f}" for strength, v in one.tried.items())]
                    for one in tried
                ],
            )
        paths[stream.title] = {one.method.title: one.path() for one in results.values()}
        words.append((stream, *_compared(results)))
        report.settings[f"protocol of {stream.title}"] = _protocol(stream, context.seeds)
    drawn, exact = words[0][1]
    outcome = (
        "Holds" if drawn else "Holds for the exact Fisher only, not for drawn labels," if exact else "Does not hold"
    )
    report.verdict = f"{outcome} on {words[0][0].title}. " + " ".join(
        f"{stream.title}: {sentence}" for stream, _, sentence in words
    )
    figures.curves(context.folder / "accuracy.png", paths, "tasks learned")
    report.add_figure(
        "accuracy.png", "Test accuracy in %, mean over the tasks so far; mean and standard error over seeds."
    )
    return report


COLUMNS = [
    "kept from earlier tasks",
    "strength",
    "accuracy % after all tasks",
    "directly after training",
    "lost on earlier tasks",
    "numbers kept",
    "CPU s for all tasks",
]


def _shown(mean: float, error: float) -> str:
    if not math.isfinite(mean):
        return "diverged"
    return f"{100 * mean:.2f} ± {100 * error:.2f}" if math.isfinite(error) else f"{100 * mean:.2f}"


def _row(one: Finals) -> list[str]:
    scores = [_shown(*one.mean(name)) for name in ("end", "learned", "lost")]
    seconds = mean_and_error([run["seconds"].sum().item() for run in one.runs])[0]
    chosen = f"{one.strength:g}" if one.tried else "-"
    return [one.method.title, chosen, *scores, f"{int(one.runs[0]['kept']):,}", f"{seconds:.1f}"]


def _compared(results: Mapping[str, Finals]) -> tuple[list[bool], str]:
    """Whether the target is met with drawn labels and with all, and differences between methods in words."""
    pairs = (
        ("ewc-subsampled-few", "ewc-diag-few"),
        ("ewc-subsampled-exact-few", "ewc-diag-few"),
        ("ewc-subsampled-same", "ewc-diag"),
        ("ewc-input", "ewc-kron"),
        ("ewc-kron", "ewc-diag"),
    )
    words, met = [], []
    for one, other in pairs:
        a, b = results[one], results[other]
        lost, end = a.less(b, "lost"), a.less(b, "end")
        margin = [2 * error if math.isfinite(error) else 0.0 for _, error in (lost, end)]
        met.append(lost[0] + margin[0] < 0 and end[0] + margin[1] >= 0)
        words.append(
            f"{a.method.title}, less {b.method.title}: lost {_shown(*lost)} points, accuracy after all tasks "
            f"{_shown(*end)} points."
        )
    return met[:2], " ".join(words)


def _protocol(stream: Stream, seeds: int) -> str:
    count, rates = len(stream.data.train_x), [f"{m.lr:g} ({m.title})" for m in METHODS if m.kind != "ewc"]
    tasks = (
        f"{stream.tasks} tasks, the same {count:,} images under permutations of their pixels, one head"
        if stream.kind == "permuted"
        else f"{stream.tasks} tasks of two classes each, out of {count:,} images, a head of its own for each"
    )
    return (
        f"{tasks}; hidden layers of {stream.widths}, {stream.weights:,} weights; {stream.epochs} epochs of each, "
        f"batches of {stream.batch}, cosine schedule; a new Adam for each task, except for VOGN and BayesBiNN; lr "
        f'{", ".join(rates)}; "few examples" are {stream.examples} of each task, the same for diagonals (exact '
        "Fisher) and for subsampled Fishers (one drawn label each, or exact if named so); strength chosen by the mean "
        f"accuracy after all tasks on 20 % held out of the training data, {len(PENALTIES)} for each method, with a "
        f"separate seed; {seeds} paired seeds; test data were used in final runs only"
    )
