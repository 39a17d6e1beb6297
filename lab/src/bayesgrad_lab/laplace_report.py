"""What experiments on Laplace's method share: a task at each scale, tables, figures and differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from bayesgrad import metrics, plots
from bayesgrad_lab import datasets, figures
from bayesgrad_lab.khan2023_training import Task, like
from bayesgrad_lab.laplace_training import ADAM, Row
from bayesgrad_lab.report import Report
from bayesgrad_lab.study import Context

COLUMNS = {
    "error": ("accuracy %", -100, 100, 2),
    "nll": ("NLL", 1, 0, 4),
    "ece": ("ECE %", 100, 0, 2),
    "auroc entropy": ("AUROC, entropy", 1, 0, 3),
}  # score -> title, factor, offset, decimals


def task_of(context: Context) -> Task:
    """Fashion-MNIST, or digits, at a scale."""
    if context.scale == "smoke":
        data = datasets.load("digits").part(150)
        order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
        foreign = data.test_x.flatten(1)[:, order].view_as(data.test_x)
        return Task(data, foreign[:30], (8,), 3, 32, samples=3, origin="scrambled digits")
    images = datasets.load("fashion-mnist", context.data_dir, context.download)
    other = datasets.load("mnist", context.data_dir, context.download)
    outside = like(other.test_x, other.train_x, images.train_x)
    if context.scale == "paper":
        return Task(images, outside, (400, 400), 50, samples=100, origin="mnist")
    few = replace(images.part(10_000), test_x=images.test_x[:5000], test_y=images.test_y[:5000])
    return Task(few, outside[:5000], (100, 100), 15, samples=24, origin="mnist")


def protocol(context: Context, task: Task, pairs: int = len(ADAM.lrs) * len(ADAM.seconds)) -> str:
    """How networks and their posteriors were made and measured, for people."""
    weights = sum(p.numel() for p in task.model(0).parameters())
    return (
        f"{len(task.data.train_x):,} images, {task.epochs} epochs of Adam, batches of {task.batch}, cosine schedule; "
        f"a perceptron with hidden layers of {task.widths}, {weights:,} weights; lr and weight decay chosen by the "
        f"validation NLL of the network alone, {pairs} pairs, 20 % held out, with a separate seed; posteriors with the "
        "exact Fisher, one block for weight and bias; one prior precision δ by evidence, or δ and a temperature T, "
        "covariance T (H + δ)^-1, by held-out NLL around the search's network, of 65 pairs for each structure and "
        f"link; {task.samples} draws; linear: of the network linearised at its weights; {context.seeds} seeds; "
        f"{len(task.data.test_x):,} test images; AUROC of the entropy, against {len(task.outside):,} images of "
        f"{task.origin}"
    )


def add_classification(report: Report, context: Context, task: Task, rows: Sequence[Row]) -> None:
    """A table of all ways to predict, and a figure of those that were tuned by held-out images or not at all."""
    columns = ["method", "chosen", *(title for title, *_ in COLUMNS.values())]
    report.add_table(f"{task.key}, test data", columns, [[row.title, row.chosen, *_cells(row)] for row in rows])
    shown = [row for row in rows if row.key[-1] != "evidence"]
    panels = {COLUMNS[name][0]: {row.title: _shown(row, name) for row in shown} for name in COLUMNS}
    figures.dots(context.folder / "scores.png", panels)
    report.add_figure("scores.png", f"{task.key}: mean and standard error over seeds; priors by evidence are left out.")


def add_reliability(report: Report, context: Context, task: Task, rows: Sequence[Row]) -> None:
    """A diagram for each of these ways to predict."""
    bins = {row.title: metrics.reliability(row.first, task.data.test_y) for row in rows if row.first is not None}
    plots.reliability(context.folder / "reliability.png", bins)
    report.add_figure("reliability.png", "Accuracy against the confidence in the predicted class; seed 0.")


def _shown(row: Row, name: str) -> tuple[float, float]:
    mean, error = row.mean(name)
    _, factor, offset, _ = COLUMNS[name]
    return offset + factor * mean, abs(factor) * error


def _cells(row: Row) -> list[str]:
    return [cell(_shown(row, name), digits) for name, (*_, digits) in COLUMNS.items()]


def cell(value: tuple[float, float], digits: int) -> str:
    mean, error = value
    if not math.isfinite(mean):
        return "diverged"
    return f"{mean:.{digits}f} ± {error:.{digits}f}" if math.isfinite(error) else f"{mean:.{digits}f}"


def named(rows: Sequence[Row], *key: str) -> Row:
    return next(row for row in rows if row.key == key)


def difference(one: Row, rival: Row) -> tuple[dict[str, tuple[float, float]], str]:
    """Of scores, paired by seed, with their standard errors; and in words."""
    gaps = {name: one.less(rival, name) for name in ("nll", "ece", "auroc entropy")}
    parts = []
    for name, title, factor, digits in (("nll", "NLL", 1, 4), ("ece", "ECE", 100, 2), ("auroc entropy", "AUROC", 1, 3)):
        mean, error = gaps[name]
        spread = f" ± {factor * error:.{digits}f}" if math.isfinite(error) else ""
        parts.append(f"{title} {factor * mean:+.{digits}f}{spread}{' points' if name == 'ece' else ''}")
    return gaps, ", ".join(parts)
