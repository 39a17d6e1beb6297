"""Khan and Rue 2023, section 4.4: Laplace's method around a trained network against variational training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bayesgrad_lab import khan2023_runs as runs
from bayesgrad_lab import laplace_runs as posteriors
from bayesgrad_lab.context import Context
from bayesgrad_lab.methods import Method
from bayesgrad_lab.report import Report
from bayesgrad_lab.results import Results, outcome, sign

KINDS = (posteriors.Approximation("Laplace, diagonal", "diag"), posteriors.Approximation("Laplace, Kronecker", "kron"))
VARIATIONAL = ("ogn", "vogn", "ivon")
BETTER = {"nll": -1, "ece": -1, "auroc entropy": 1}  # the sign of a difference that is an improvement


def against(context: Context) -> Report:
    """NLL, calibration and foreign images, after the same number of epochs."""
    report = Report.of("khan2023-laplace-vs-variational")
    task, origin = posteriors.task_of(context)
    adam, *methods = _methods(context)
    rows = posteriors.laplace_rows(context, task, KINDS, adam)
    rows += [one for method in methods for one in runs.finals(context, task, method)]
    posteriors.add_classification(report, context, task, rows)
    diagonal = runs.named(rows, "diag", "linear", "held out")
    shown = [runs.named(rows, "map"), diagonal, *(runs.named(rows, kind, "drawn") for kind in ("vogn", "ivon"))]
    posteriors.add_reliability(report, context, task, shown)
    words, won = _verdict(rows, diagonal)
    report.verdict = f"{outcome(won)} here: {sum(won)} of {len(won)} comparisons. {' '.join(words)}"
    common = posteriors.protocol(context, task, origin, len(adam.seeks))
    report.settings["protocol"] = (
        f"{common}; OGN, VOGN and IVON: as many epochs and pairs of lr and hess_init, chosen by the validation "
        f"NLL of averaged predictions, prior precision {task.decay:g} x images"
    )
    return report


def _methods(context: Context) -> list[Method]:
    """Adam first; at laptop scale without a choice of weight decay and hess_init."""
    methods = [method for method in runs.METHODS if method.kind in ("adam", *VARIATIONAL)]
    if context.scale == "smoke":
        return [replace(method, lrs=method.lrs[2:3], seconds=method.seconds[:1], options={}) for method in methods]
    if context.scale == "laptop":
        return [replace(m, seconds=m.seconds[1:] if m.kind == "adam" else m.seconds[:1]) for m in methods]
    return methods


def _verdict(rows: Sequence[Results], diagonal: Results) -> tuple[list[str], list[bool]]:
    """Each variational rule against each rival, in words and whether it is ahead, score by score."""
    words, won = [], []
    for kind in ("vogn", "ivon"):
        one = runs.named(rows, kind, "drawn")
        for rival in (diagonal, runs.named(rows, "ogn", "drawn")):
            gaps, sentence = runs.difference(one, rival, tuple(BETTER))
            won += [sign(gaps[name]) == better for name, better in BETTER.items()]
            words.append(f"{one.title}, less {rival.title}: {sentence}.")
        words.append(f"Less MAP: {runs.difference(one, runs.named(rows, 'map'), tuple(BETTER))[1]}.")
    return words, won
