"""Experiments that measure the claims of the papers: `experiments.csv` lists them, with their recorded outcomes."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, resources

from bayesgrad_lab.context import Context
from bayesgrad_lab.report import NO_VERDICT, UNRESOLVED, Report

PAPERS = {
    "aitchison2018": "Aitchison, A unified theory of adaptive stochastic gradient descent as Bayesian filtering",
    "aitchison2020": "Aitchison, Bayesian filtering unifies adaptive and non-adaptive neural network optimization "
    "methods",
    "benzing2021": "Benzing, Kronecker-factored second-order optimizers perform first-order descent on neurons",
    "khan2023": "Khan and Rue, The Bayesian learning rule",
    "smith2018": "Smith et al., Stochastic natural gradient descent draws posterior samples in function space",
    "uci": "No paper; data of Hernandez-Lobato and Adams, Probabilistic backpropagation",
}


@dataclass(frozen=True)
class Experiment:
    """A claim of a paper and the function that measures it.

    Args:
        status: the verdict of the recorded laptop run, in a few words; its page is docs/results/<name>.md.
        unresolved: why a laptop run cannot decide the claim, in one sentence without its first capital and its full
            stop. It replaces the status in lists and the verdict in reports, until the experiment is changed.
    """

    name: str
    paper: str
    figure: str
    about: str
    run: Callable[[Context], Report]
    status: str = ""
    unresolved: str = ""

    @property
    def outcome(self) -> str:
        """The recorded outcome, for lists."""
        return f"{UNRESOLVED}: {self.unresolved}" if self.unresolved else self.status

    def report(self, context: Context) -> Report:
        """Runs the experiment. The report has a verdict only where a run of this scale can carry one."""
        report = self.run(context)
        if context.scale == "smoke":
            report.verdict = NO_VERDICT
        elif context.scale == "laptop" and self.unresolved:
            report.verdict = f"{UNRESOLVED.capitalize()}: {self.unresolved}."
        return report


def _lazily(place: str) -> Callable[[Context], Report]:
    """A function by its module and name; the module is imported when it runs."""

    def run(context: Context) -> Report:
        module, function = place.split(".")
        return getattr(import_module(f"bayesgrad_lab.{module}"), function)(context)

    return run


def _read() -> dict[str, Experiment]:
    table = resources.files("bayesgrad_lab").joinpath("experiments.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(table.splitlines())
    return {
        row["name"]: Experiment(**{**row, "paper": PAPERS[row["paper"]], "run": _lazily(row["run"])}) for row in rows
    }


EXPERIMENTS = _read()
