"""Khan and Rue 2023, section 4.4: Laplace's method around a trained network against variational training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bayesgrad_lab.khan2023_training import METHODS, Method, finals
from bayesgrad_lab.laplace_report import (
    add_classification,
    add_reliability,
    difference,
    named,
    protocol,
    task_of,
)
from bayesgrad_lab.laplace_training import (
    Approximation,
    Row,
    laplace_rows,
    row_of,
)
from bayesgrad_lab.report import Report
from bayesgrad_lab.results import outcome
from bayesgrad_lab.study import Context
from bayesgrad_lab.uci_regression import sign

KINDS = (Approximation("Laplace, diagonal", "diag"), Approximation("Laplace, Kronecker", "kron"))
VARIATIONAL = ("ogn", "vogn", "ivon")
TITLES = {"nll": "NLL", "ece": "ECE", "auroc entropy": "AUROC"}


def against(context: Context) -> Report:
    """NLL, calibration and foreign images, after the same number of epochs."""
    report = Report(
        "khan2023-laplace-vs-variational: posteriors after training or during it",
        claim="Laplace's method, and OGN as its online form, are what the Bayesian learning rule becomes by the delta "
        "method, gradients taken at the mean; VOGN removes it, and its averages over the belief give better "
        "uncertainty (Khan and Rue 2023, sections 1.3.1 and 4.4). Target here: VOGN's and IVON's draws have a lower "
        "NLL and ECE and a higher AUROC than the diagonal Laplace posterior around Adam's weights (linearised, prior "
        "precision and temperature by held-out images) and than OGN's draws, by two standard errors of paired "
        "differences.",
    )
    task = task_of(context)
    adam, *methods = _methods(context)
    rows = laplace_rows(context, task, KINDS, adam)
    rows += [row_of(context, task, one) for method in methods for one in finals(context, task, method)]
    add_classification(report, context, task, rows)
    diagonal = named(rows, "diag", "linear", "held out")
    shown = [named(rows, "map"), diagonal, *(named(rows, kind, "drawn") for kind in ("vogn", "ivon"))]
    add_reliability(report, context, task, shown)
    words, won = _verdict(rows, diagonal)
    report.verdict = f"{outcome(won)} here: {sum(won)} of {len(won)} comparisons. {' '.join(words)}"
    pairs = len(adam.lrs) * len(adam.seconds)
    report.settings["protocol"] = (
        f"{protocol(context, task, pairs)}; OGN, VOGN and IVON: as many epochs and pairs of lr and hess_init, chosen "
        f"by the validation NLL of averaged predictions, prior precision {task.decay:g} x images"
    )
    return report


def _methods(context: Context) -> list[Method]:
    """Adam first; at laptop scale without a choice of weight decay and hess_init."""
    methods = [method for method in METHODS if method.kind in ("adam", *VARIATIONAL)]
    if context.scale == "smoke":
        return [replace(method, lrs=method.lrs[2:3], seconds=method.seconds[:1], options={}) for method in methods]
    if context.scale == "laptop":
        return [replace(m, seconds=m.seconds[1:] if m.kind == "adam" else m.seconds[:1]) for m in methods]
    return methods


def _verdict(rows: Sequence[Row], diagonal: Row) -> tuple[list[str], list[bool]]:
    """Each variational rule against each rival, in words and whether it is ahead, score by score."""
    words, won = [], []
    for kind in ("vogn", "ivon"):
        one = named(rows, kind, "drawn")
        for rival in (diagonal, named(rows, "ogn", "drawn")):
            gaps, sentence = difference(one, rival)
            ahead = [name for name in TITLES if sign(gaps[name]) == (1 if name == "auroc entropy" else -1)]
            won += [name in ahead for name in TITLES]
            words.append(f"{one.title}, less {rival.title}: {sentence}.")
        words.append(f"Less MAP: {difference(one, named(rows, 'map'))[1]}.")
    return words, won
