"""Appendix C of Benzing 2021: does Laplace's method need more of Kronecker factors than that of the inputs?"""

from __future__ import annotations

from collections.abc import Sequence

from bayesgrad_lab import uci, uci_regression
from bayesgrad_lab.laplace_report import (
    add_classification,
    add_reliability,
    cell,
    difference,
    named,
    protocol,
    task_of,
)
from bayesgrad_lab.laplace_training import (
    Approximation,
    Row,
    laplace_rows,
    peer_package,
)
from bayesgrad_lab.report import Report
from bayesgrad_lab.results import outcome
from bayesgrad_lab.study import Context
from bayesgrad_lab.uci import METHODS, Results, Setting, results

KINDS = (
    Approximation("Diagonal", "diag"),
    Approximation("Kronecker", "kron"),
    Approximation("Input factor", "input"),
    Approximation("Full, subsampled", "subsampled", {"subsample": 200}),
)
PEER = Approximation("laplace-torch, Kronecker", "peer")


def input_factor(context: Context) -> Report:
    """The input factor alone beside both Kronecker factors, a diagonal, and the exact Fisher of a subsample."""
    report = Report(
        "benzing2021-laplace: the input factor alone",
        claim="A Kronecker-factored Laplace posterior may work because perturbations that it allows are orthogonal to "
        "the inputs of layers, not because it is close to the curvature: keep only the first factor, A A', with the "
        "identity for the second, and the method should perform equally well or better (Benzing 2021, appendix C). "
        "Target here: where prior precision and scale are chosen by held-out images (as Ritter et al., 2018, did), NLL "
        "and ECE are not higher, and AUROC is not lower, than with both factors, by more than two standard errors of "
        "paired differences.",
    )
    task = task_of(context)
    here = peer_package() is not None
    rows = laplace_rows(context, task, (*KINDS, PEER) if here else KINDS)
    add_classification(report, context, task, rows)
    ways = [("map",), *((kind, "linear", "held out") for kind in ("kron", "input", "subsampled"))]
    add_reliability(report, context, task, [named(rows, *way) for way in ways])
    splits = min(uci.SPLITS, context.seeds)
    found = [results(context, _setting(context), name, METHODS[:1], splits) for name in _names(context)]
    ways = [way for way in uci_regression.TITLES if way in found[0].scores]
    titles = [[uci_regression.TITLES[way]] for way in ways]
    cells = [[cell(one.mean(way, "nll"), 3) for one in found] for way in ways]
    columns = ["method", *(one.name for one in found)]
    report.add_table("UCI regression, test NLL", columns, [a + b for a, b in zip(titles, cells)])
    holds, words = [], []
    for link in ("linear", "draws"):
        for tuned in ("held out", "evidence"):
            fine, sentence = compared(rows, link, tuned)
            words.append(sentence)
            holds += [fine] if tuned == "held out" else []
    words.append(_regressions(found))
    peer = "" if here else " laplace-torch was not installed and is left out."
    report.verdict = f"{outcome(holds)} here. {' '.join(words)}{peer}"
    report.settings["protocol"] = protocol(context, task)
    report.settings["protocol of the regressions"] = uci_regression.protocol(context, ("map",))
    return report


def _setting(context: Context) -> Setting:
    return uci_regression.SIZES[context.scale][0]


def _names(context: Context) -> tuple[str, ...]:
    return uci_regression.SIZES[context.scale][1]


def compared(rows: Sequence[Row], link: str, tuned: str) -> tuple[bool, str]:
    """Whether the input factor is as good as both, and by how much it is not."""
    gaps, words = difference(named(rows, "input", link, tuned), named(rows, "kron", link, tuned))
    signs = [uci_regression.sign(gaps["nll"]), uci_regression.sign(gaps["ece"])]
    fine = max(signs) < 1 and uci_regression.sign(gaps["auroc entropy"]) > -1
    return fine, f"Input factor less both factors, {link}, {tuned}: {words}."


def _regressions(found: Sequence[Results]) -> str:
    signs = [uci_regression.sign(one.less("input", "kron", "nll")) for one in found]
    return (
        f"UCI regression, evidence: the input factor's NLL is lower than both factors' on {signs.count(-1)}, higher on "
        f"{signs.count(1)} of {len(found)} data sets."
    )
