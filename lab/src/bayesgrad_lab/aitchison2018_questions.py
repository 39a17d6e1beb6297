"""Aitchison 2018, section 2.2: each suggestion against its plain counterpart, and Kronecker whitening."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from bayesgrad_lab import figures
from bayesgrad_lab.aitchison2018_runs import KEY, VARIANTS, by_epoch, clock, counted, finals, loss_at
from bayesgrad_lab.context import Context
from bayesgrad_lab.methods import Method
from bayesgrad_lab.report import Report
from bayesgrad_lab.results import Results, Value, mean_and_error, shown
from bayesgrad_lab.task import Task

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


def significant(difference: Value, seeds: int) -> bool:
    """Whether a mean over paired seeds differs from zero, at 95 %; never for one seed."""
    mean, error = difference
    return math.isfinite(mean) and math.isfinite(error) and abs(mean) > T95.get(seeds, 2.6) * error


def judged(new: Results, plain: Results, score: str) -> str:
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
    report = Report.of("aitchison2018-open-questions")
    answers: dict[str, list[str]] = {q.new: [] for q in QUESTIONS}
    words: list[str] = []
    panels: dict[str, dict[str, Value]] = {}
    for task, suggestions, kinds in _tasks(context):
        context.say(f"{task.title}: {task.steps * task.epochs} steps, {len(task.data.test_x):,} test examples")
        wanted = [*dict.fromkeys(k for q in suggestions for k in (q.plain, q.new)), *kinds]
        results = {k: finals(context, task, _scaled(context, VARIANTS[k])) for k in dict.fromkeys(wanted)}
        report.add_rows(f"{task.title}: all runs", [_row(one) for one in results.values()])
        if suggestions:
            title = f"{task.network}: Δ test NLL (nats)"
            panels[title] = {q.short: results[q.new].less(results[q.plain], "nll") for q in suggestions}
            rows = []
            for q in suggestions:
                new, plain = results[q.new], results[q.plain]
                verdicts = [judged(new, plain, s) for s in ("nll", "loss")]
                answers[q.new].append(f"{verdicts[0]} in test NLL and {verdicts[1]} in training loss on {task.network}")
                rows.append(
                    {
                        "suggestion": f"{q.section} {q.words}",
                        "test NLL": shown(new.less(plain, "nll"), "+.4f"),
                        "training loss": shown(new.less(plain, "loss"), "+.4f"),
                        "verdict, test NLL": verdicts[0],
                        "verdict, training loss": verdicts[1],
                    }
                )
            report.add_rows(f"{task.title}: differences over paired seeds, new less plain", rows)
        if kinds:
            words.append(_whitening(report, context, task, {k: results[k] for k in kinds}))
        rows = [
            [one.title, *(f"{lr:.3g}: {v:.3f}" for (lr,), v in one.tried.items()), "edge" if one.edges else ""]
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
    report.draw(context.folder / "suggestions.png", figures.dots, panels)
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


def _task(
    context: Context, data: str, examples: int | None, network: str, epochs: int, batch: int = 128, large: bool = False
) -> Task:
    return Task(context.load(data, examples), network, epochs, batch, large=large, name=KEY)


def _tasks(context: Context) -> list[tuple[Task, Sequence[Question], Sequence[str]]]:
    """Task, suggestions that are tried on it, and the methods that whitening is compared with."""
    task, every = partial(_task, context), ("kroneckerfp", *RIVALS)
    if context.scale == "smoke":
        return [(task("digits", 200, "mlp", 2, 32), QUESTIONS, every[:2])]
    if context.scale == "laptop":
        images = task("cifar10", 1000, "resnet", 5, 64)
        few = replace(images.data, test_x=images.data.test_x[:2000], test_y=images.data.test_y[:2000])
        return [
            (task("fashion-mnist", 6000, "mlp", 10), QUESTIONS, every),
            (replace(images, data=few), QUESTIONS, every),
            (task("tinyshakespeare", 1600, "gpt", 2, 16), (), every),
        ]
    return [
        (task("fashion-mnist", None, "mlp", 30, large=True), QUESTIONS, ("kroneckerfp", "kronecker", *RIVALS)),
        (task("cifar10", None, "resnet", 60), QUESTIONS, every),
        (task("tinyshakespeare", None, "gpt", 10, 64, large=True), (), every),
    ]


def _scaled(context: Context, method: Method) -> Method:
    """One learning rate where all is only to be run through."""
    return replace(method, lrs=method.lrs[1:2]) if context.scale == "smoke" else method


def _whitening(report: Report, context: Context, task: Task, results: dict[str, Results]) -> str:
    """Tables and curves by step and by second; and the words for them."""
    own = results["kroneckerfp"]
    budget = results["adamw"].mean("seconds")[0]
    rows = []
    for one in results.values():
        versus = ["", ""] if one is own else [judged(own, one, score) for score in ("loss", "nll")]
        rows.append(
            {
                "method": one.title,
                "training loss, last epoch": shown(one.mean("loss")),
                "test NLL": shown(one.mean("nll")),
                "CPU s": f"{one.mean('seconds')[0]:.1f}",
                f"training loss after {budget:.1f} CPU s": shown(loss_at(one, budget)),
                "KroneckerFilterFP's training loss compared with it": versus[0],
                "KroneckerFilterFP's test NLL compared with it": versus[1],
            }
        )
    report.add_rows(f"{task.title}: Kronecker whitening and others", rows)
    title, file = f"{task.title}: training loss", f"kronecker-{task.data.name}"
    curves = {one.title: by_epoch(one) for one in results.values()}
    axes = ("epoch", "training loss (nats)")
    words = f"{title} by epoch, mean and standard error over seeds."
    report.draw(context.folder / f"{file}.png", figures.curves, {task.title: curves}, *axes, caption=words)
    timed = {one.title: (clock(one), list(zip(*curves[one.title]))) for one in results.values()}
    words = f"{task.title}: the same by processor time, on a machine with other processes."
    axes = ("CPU seconds", "training loss (nats)")
    report.draw(context.folder / f"{file}-time.png", figures.lines, {task.title: timed}, *axes, caption=words)
    others = [k for k in results if k != "kroneckerfp"]
    by_step = {k: judged(own, results[k], "loss") for k in others}
    by_test = {k: judged(own, results[k], "nll") for k in others}

    def listed(found: dict[str, str]) -> str:
        kinds = dict.fromkeys(found.values())
        return ", ".join(f"{v} than/to {', '.join(VARIANTS[k].title for k in found if found[k] == v)}" for v in kinds)

    first, rival = loss_at(own, budget), loss_at(results["adamw"], budget)
    return (
        (
            f"{task.title}: KroneckerFilterFP's training loss per step is {listed(by_step)}; its test NLL "
            f"{listed(by_test)}; its loss is {shown(first)} when AdamW's run ends at {shown(rival)}."
        )
        .replace("no difference than/to", "not different from")
        .replace("than/to", "than")
    )


def _repeated(report: Report, context: Context) -> str:
    """How often the belief counts the data, by epoch; and the words for it."""
    lr, task = 1e-3, replace(_tasks(context)[0][0], large=False)
    titles = ("copies of the data counted", "surprise of seen data", "surprise of unseen data")
    rows, ends, panels = [], {}, {"copies": {}, "seen": {}, "unseen": {}}
    for kind in ("adabayes", "revisiting"):
        found = [counted(context, task, VARIANTS[kind], lr, seed) for seed in range(context.seeds)]
        for name, lines in panels.items():
            lines[VARIANTS[kind].title] = [run[name].tolist() for run in found]
        for epoch in sorted({1, 2, task.epochs // 2, task.epochs} - {0}):
            values = [mean_and_error([run[name][epoch - 1].item() for run in found]) for name in panels]
            rows.append([VARIANTS[kind].title, str(epoch), *(shown(v) for v in values)])
            ends[kind, epoch] = values
    report.add_table(
        f"Repeated data, {task.title}, lr {lr:g} and constant: the belief compared with the data",
        ["method", "epoch", *titles],
        rows,
    )
    report.draw(context.folder / "repeated.png", figures.curves, dict(zip(titles, panels.values())), "epoch", "ratio")
    first, last = ends["adabayes", 1], ends["adabayes", task.epochs]
    corrected = ends["revisiting", task.epochs]
    return (
        f"Repeated data: after one epoch the precision that AdaBayes accumulated is {first[0][0]:.2f} times the "
        f"information of the data, after {task.epochs} epochs {last[0][0]:.2f} times ({corrected[0][0]:.2f} with 1/k); "
        f"the squared gradients of seen data are then {last[1][0]:.2f} and those of unseen data {last[2][0]:.2f} times "
        f"what the model expects, after {first[1][0]:.2f} and {first[2][0]:.2f} in the first."
    )


def _row(one: Results) -> dict[str, str]:
    return {
        "method": one.title,
        "lr": f"{one.lr:.3g}",
        "test error %": shown(one.mean("error"), ".2f", 100),
        "test NLL": shown(one.mean("nll")),
        "training loss": shown(one.mean("loss")),
        "CPU s": f"{one.mean('seconds')[0]:.1f}",
    }
