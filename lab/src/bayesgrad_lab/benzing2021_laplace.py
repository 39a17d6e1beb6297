"""Appendix C of Benzing 2021: does Laplace's method need more of Kronecker factors than that of the inputs?"""

from __future__ import annotations

from collections.abc import Sequence

from bayesgrad_lab import laplace_runs as posteriors
from bayesgrad_lab import uci
from bayesgrad_lab.context import Context
from bayesgrad_lab.khan2023_runs import difference, named
from bayesgrad_lab.report import Report
from bayesgrad_lab.results import Results, outcome, shown, sign

KINDS = (
    posteriors.Approximation("Diagonal", "diag"),
    posteriors.Approximation("Kronecker", "kron"),
    posteriors.Approximation("Input factor", "input"),
    posteriors.Approximation("Full, subsampled", "subsampled", {"subsample": 200}),
)
PEER = posteriors.Approximation("laplace-torch, Kronecker", "peer")


def input_factor(context: Context) -> Report:
    """The input factor alone beside both Kronecker factors, a diagonal, and the exact Fisher of a subsample."""
    report = Report.of("benzing2021-laplace")
    task, origin = posteriors.task_of(context)
    here = posteriors.peer_package() is not None
    rows = posteriors.laplace_rows(context, task, (*KINDS, PEER) if here else KINDS)
    posteriors.add_classification(report, context, task, rows)
    ways = [("map",), *((kind, "linear", "held out") for kind in ("kron", "input", "subsampled"))]
    posteriors.add_reliability(report, context, task, [named(rows, *way) for way in ways])
    found = uci.everything(context, ("map",))
    cells = [
        [uci.TITLES[way], *(shown(one[way].mean("nll")) for one in found.values())]
        for way in next(iter(found.values()))
    ]
    report.add_table("UCI regression, test NLL", ["method", *found], cells)
    holds, words = [], []
    for link in ("linear", "draws"):
        for tuned in ("held out", "evidence"):
            fine, sentence = compared(rows, link, tuned)
            words.append(sentence)
            holds += [fine] if tuned == "held out" else []
    signs = [sign(one["input"].less(one["kron"], "nll")) for one in found.values()]
    words.append(
        f"UCI regression, evidence: the input factor's NLL is lower than both factors' on {signs.count(-1)}, higher on "
        f"{signs.count(1)} of {len(found)} data sets."
    )
    peer = "" if here else " laplace-torch was not installed and is left out."
    report.verdict = f"{outcome(holds)} here. {' '.join(words)}{peer}"
    report.settings["protocol"] = posteriors.protocol(context, task, origin)
    report.settings["protocol of the regressions"] = uci.protocol(context, ("map",))
    return report


def compared(rows: Sequence[Results], link: str, tuned: str) -> tuple[bool, str]:
    """Whether the input factor is as good as both, and by how much it is not."""
    names = ("nll", "ece", "auroc entropy")
    gaps, words = difference(named(rows, "input", link, tuned), named(rows, "kron", link, tuned), names)
    fine = max(sign(gaps["nll"]), sign(gaps["ece"])) < 1 and sign(gaps["auroc entropy"]) > -1
    return fine, f"Input factor less both factors, {link}, {tuned}: {words}."
