"""Aitchison 2018, section 2.2: each suggestion against its plain counterpart, and Kronecker whitening."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bayesgrad_lab import datasets, figures
from bayesgrad_lab.aitchison2018_training import VARIANTS, Finals, Task, Variant, counted, finals
from bayesgrad_lab.dataset import Dataset
from bayesgrad_lab.report import Report
from bayesgrad_lab.study import Context, mean_and_error

T95 = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78}  # two-sided 95 % of Student's t, by the number of seeds; 2.6 beyond


@dataclass(frozen=True)
class Question:
    """A suggestion of the paper, and what it would replace."""

    section: str
    short: str
    words: str
    new: str
    plain: str


QUESTIONS = (
    Question("2.2.8", "centred", "centred against raw evidence", "centered", "adabayes"),
    Question("2.2.8", "sampled", "sampled against raw evidence", "sampled", "adabayes"),
    Question("2.2.7", "direct and momentum", "direct and momentum against momentum only", "kalman", "momentum"),
    Question("2.2.7", "noise on weights", "with noise on weights, against momentum only", "noisy", "momentum"),
    Question("2.2.4", "Nesterov decay", "Nesterov decay against plain decay", "early-decay", "late-decay"),
    Question(
        "2.2.2", "linearised", "statistical linearisation against the gradient at the mean", "linearised", "adabayes"
    ),
    Question(
        "2.2.9", "1/k in visit k", "repeated data counted 1/k in visit k, against in full", "revisiting", "adabayes"
    ),
)
RIVALS = ("adamw", "soap", "kfac", "foof")


def significant(difference: tuple[float, float], seeds: int) -> bool:
    """Whether a mean over paired seeds differs from zero, at 95 %; never for one seed."""
    mean, error = difference
    return math.isfinite(mean) and math.isfinite(error) and abs(mean) > T95.get(seeds, 2.6) * error


def judged(new: Finals, plain: Finals, score: str) -> str:
    """In a word, whether a value that should be low is."""
    difference = new.less(plain, score)
    if not math.isfinite(difference[0]):
        broke = [not math.isfinite(one.mean(score)[0]) for one in (new, plain)]
        return "both diverged" if all(broke) else "diverged" if broke[0] else "the other diverged"
    if not significant(difference, len(new.runs)):
        return "no difference"
    return "better" if difference[0] < 0 else "worse"


def open_questions(context: Context) -> Report:
    """Scores of the suggestions on small tasks."""
    report = Report(
        "aitchison2018-open-questions: the suggestions of section 2.2",
        claim="Filtering suggests: centred or sampled evidence in place of raw squares (2.2.8), the direct term beside "
        "momentum (2.2.7), weight decay before the gradient is taken (2.2.4), gradients at weights drawn from the "
        "belief (2.2.2), a correction for repeated data (2.2.9), and whitening by Kronecker factors (2.1.3). The paper "
        "leaves all of them to future work and claims no numbers.",
    )
    answers: dict[str, list[str]] = {q.new: [] for q in QUESTIONS}
    words: list[str] = []
    shown: dict[str, dict[str, tuple[float, float]]] = {}
    for task, suggestions, kinds in _tasks(context):
        context.say(f"{task.title}: {task.steps * task.epochs} steps, {len(task.data.test_x):,} test examples")
        wanted = [*dict.fromkeys(k for q in suggestions for k in (q.plain, q.new)), *kinds]
        results = {k: finals(context, task, _scaled(context, VARIANTS[k])) for k in dict.fromkeys(wanted)}
        report.add_table(
            f"{task.title}: all runs",
            ["method", "lr", "test error %", "test NLL", "training loss", "CPU s"],
            [_row(one) for one in results.values()],
        )
        if suggestions:
            title = f"{task.network}: Δ test NLL"
            shown[title] = {q.short: results[q.new].less(results[q.plain], "nll") for q in suggestions}
            rows = []
            for q in suggestions:
                new, plain = results[q.new], results[q.plain]
                verdicts = [judged(new, plain, s) for s in ("nll", "loss")]
                answers[q.new].append(f"{verdicts[0]} in test NLL and {verdicts[1]} in training loss on {task.network}")
                rows.append(
                    [f"{q.section} {q.words}", *(_difference(new.less(plain, s)) for s in ("nll", "loss")), *verdicts]
                )
            report.add_table(
                f"{task.title}: differences over paired seeds, new less plain",
                ["suggestion", "test NLL", "training loss", "verdict, test NLL", "verdict, training loss"],
                rows,
            )
        if kinds:
            words.append(_whitening(report, context, task, {k: results[k] for k in kinds}))
        rows = [
            [one.variant.title, *(f"{lr:.3g}: {v:.3f}" for lr, v in one.tried.items()), "edge" if one.edge else ""]
            for one in results.values()
        ]
        tries = len(next(iter(results.values())).tried)
        report.add_table(
            f"{task.title}: validation NLL of each learning rate tried",
            ["method", *map(str, range(1, tries + 1)), "chosen at the edge"],
            rows,
        )
        report.settings[f"protocol of {task.title}"] = (
            f"{len(task.data.train_x):,} training examples, {task.epochs} epochs, batches of {task.batch}, cosine "
            f"schedule to zero, {tries} learning rates for each method, chosen by validation NLL on 20 % of them with "
            f"a separate seed, then {context.seeds} seeds on all of them; {len(task.data.test_x):,} test examples, "
            "evaluated once"
        )
    if shown:
        figures.dots(context.folder / "suggestions.png", shown)
        report.add_figure(
            "suggestions.png",
            "Test NLL of each suggestion less that of its plain counterpart: mean and standard error over paired "
            "seeds; below zero is better.",
        )
    repeated = _repeated(report, context)
    lines = [f"{q.section}, {q.words}: {'; '.join(answers[q.new])}." for q in QUESTIONS if answers[q.new]]
    better = sum("better in test NLL" in a for some in answers.values() for a in some)
    worse = sum("worse in test NLL" in a for some in answers.values() for a in some)
    count = sum(map(len, answers.values()))
    report.verdict = (
        f"Holds in {better} of {count} comparisons: in test NLL the suggestions are better in {better}, worse in "
        f"{worse} and not different in {count - better - worse} (95 % of Student's t over paired seeds, not corrected "
        "for their number). " + " ".join(lines) + f" {repeated} Kronecker whitening: {' '.join(words)}"
    )
    if not better:
        report.verdict = report.verdict.replace(f"Holds in {better} of {count} comparisons:", "Does not hold here:", 1)
    return report


def _tasks(context: Context) -> list[tuple[Task, Sequence[Question], Sequence[str]]]:
    """Task, suggestions that are tried on it, and the methods that whitening is compared with."""
    if context.scale == "smoke":
        return [(Task(datasets.load("digits").part(200), "mlp", 2, 32), QUESTIONS, ("kroneckerfp", *RIVALS[:1]))]

    def load(name: str, count: int | None):
        return datasets.load(name, context.data_dir, context.download).part(count)

    every = ("kroneckerfp", *RIVALS)
    if context.scale == "laptop":
        return [
            (Task(load("fashion-mnist", 6000), "mlp", 10), QUESTIONS, every),
            (Task(_tested(load("cifar10", 1000), 2000), "resnet", 5, 64), QUESTIONS, every),
            (Task(load("tinyshakespeare", 1600), "gpt", 2, 16), (), every),
        ]
    return [
        (Task(load("fashion-mnist", None), "mlp", 30, large=True), QUESTIONS, ("kroneckerfp", "kronecker", *RIVALS)),
        (Task(load("cifar10", None), "resnet", 60), QUESTIONS, every),
        (Task(load("tinyshakespeare", None), "gpt", 10, 64, large=True), (), every),
    ]


def _tested(data: Dataset, count: int) -> Dataset:
    """The same with the first test examples only."""
    return replace(data, test_x=data.test_x[:count], test_y=data.test_y[:count])


def _scaled(context: Context, variant: Variant) -> Variant:
    """One learning rate where all is only to be run through."""
    if context.scale != "smoke":
        return variant
    return Variant(variant.kind, variant.title, variant.lrs[1:2], variant.build)


def _whitening(report: Report, context: Context, task: Task, results: dict[str, Finals]) -> str:
    """Tables and curves by step and by second; and the words for them."""
    own = results["kroneckerfp"]
    budget = results["adamw"].mean("seconds")[0]
    rows = []
    for one in results.values():
        versus = ["", ""] if one is own else [judged(own, one, "loss"), judged(own, one, "nll")]
        rows.append(
            [
                one.variant.title,
                _cell(one.mean("loss")),
                _cell(one.mean("nll")),
                f"{one.mean('seconds')[0]:.1f}",
                _cell(one.at(budget)),
                *versus,
            ]
        )
    report.add_table(
        f"{task.title}: Kronecker whitening and others",
        [
            "method",
            "training loss, last epoch",
            "test NLL",
            "CPU s",
            f"training loss after {budget:.1f} CPU s",
            "KroneckerFilterFP's training loss compared with it",
            "KroneckerFilterFP's test NLL compared with it",
        ],
        rows,
    )
    name = f"kronecker-{task.data.name}.png"
    figures.curves(
        context.folder / name,
        {f"{task.title}: training loss": {one.variant.title: one.epochs() for one in results.values()}},
    )
    report.add_figure(name, f"{task.title}: training loss by epoch, mean and standard error over seeds.")
    name = f"kronecker-{task.data.name}-time.png"
    figures.lines(
        context.folder / name,
        {
            f"{task.title}: training loss": {
                one.variant.title: (one.clock(), list(zip(*one.epochs()))) for one in results.values()
            }
        },
        "CPU seconds",
    )
    report.add_figure(name, f"{task.title}: the same by processor time, on a machine with other processes.")
    others = [k for k in results if k != "kroneckerfp"]
    by_step = {k: judged(own, results[k], "loss") for k in others}
    by_test = {k: judged(own, results[k], "nll") for k in others}

    def listed(found: dict[str, str]) -> str:
        kinds = dict.fromkeys(found.values())
        return ", ".join(f"{v} than/to {', '.join(VARIANTS[k].title for k in found if found[k] == v)}" for v in kinds)

    first, rival = own.at(budget), results["adamw"].at(budget)
    return (
        (
            f"{task.title}: KroneckerFilterFP's training loss per step is {listed(by_step)}; its test NLL "
            f"{listed(by_test)}; its loss is {_cell(first)} when AdamW's run ends at {_cell(rival)}."
        )
        .replace("no difference than/to", "not different from")
        .replace("than/to", "than")
    )


def _repeated(report: Report, context: Context) -> str:
    """How often the belief counts the data, by epoch; and the words for it."""
    if context.scale == "smoke":
        task = Task(datasets.load("digits").part(200), "mlp", 2, 32)
    else:
        size, epochs = (6000, 10) if context.scale == "laptop" else (None, 30)
        task = Task(datasets.load("fashion-mnist", context.data_dir, context.download).part(size), "mlp", epochs)
    lr = 1e-3
    rows, ends, panels = [], {}, {"copies": {}, "seen": {}, "unseen": {}}
    for kind in ("adabayes", "revisiting"):
        found = [counted(context, task, VARIANTS[kind], lr, seed) for seed in range(context.seeds)]
        for name, lines in panels.items():
            lines[VARIANTS[kind].title] = [run[name].tolist() for run in found]
        for epoch in sorted({1, 2, task.epochs // 2, task.epochs} - {0}):
            values = [mean_and_error([run[name][epoch - 1].item() for run in found]) for name in panels]
            rows.append([VARIANTS[kind].title, str(epoch), *(_cell(v) for v in values)])
            ends[kind, epoch] = values
    report.add_table(
        f"Repeated data, {task.title}, lr {lr:g} and constant: the belief compared with the data",
        ["method", "epoch", "copies of the data counted", "surprise of seen data", "surprise of unseen data"],
        rows,
    )
    titles = ("copies of the data counted", "surprise of seen data", "surprise of unseen data")
    figures.curves(context.folder / "repeated.png", dict(zip(titles, panels.values())))
    report.add_figure(
        "repeated.png",
        "Left: precision that was added to the belief, over the information of the data set at the present weights. "
        "Others: squared gradients of batches, over what they would be if labels were drawn from the model.",
    )
    first, last = ends["adabayes", 1], ends["adabayes", task.epochs]
    corrected = ends["revisiting", task.epochs]
    return (
        f"Repeated data: after one epoch the precision that AdaBayes accumulated is {first[0][0]:.2f} times the "
        f"information of the data, after {task.epochs} epochs {last[0][0]:.2f} times ({corrected[0][0]:.2f} with 1/k); "
        f"the squared gradients of seen data are then {last[1][0]:.2f} and those of unseen data {last[2][0]:.2f} times "
        f"what the model expects, after {first[1][0]:.2f} and {first[2][0]:.2f} in the first."
    )


def _row(one: Finals) -> list[str]:
    error, bar = one.mean("error")
    return [
        one.variant.title,
        f"{one.lr:.3g}",
        _cell((100 * error, 100 * bar), 2),
        _cell(one.mean("nll")),
        _cell(one.mean("loss")),
        f"{one.mean('seconds')[0]:.1f}",
    ]


def _cell(value: tuple[float, float], digits: int = 3) -> str:
    mean, error = value
    if not math.isfinite(mean):
        return "diverged"
    return f"{mean:.{digits}f} ± {error:.{digits}f}" if math.isfinite(error) else f"{mean:.{digits}f}"


def _difference(value: tuple[float, float]) -> str:
    mean, error = value
    if not math.isfinite(mean):
        return "diverged"
    return f"{mean:+.4f} ± {error:.4f}" if math.isfinite(error) else f"{mean:+.4f}"
