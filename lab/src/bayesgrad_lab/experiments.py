"""Experiments that measure the claims of the papers; `experiments.md` lists them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from bayesgrad_lab import catalogue
from bayesgrad_lab.context import Context
from bayesgrad_lab.report import NO_VERDICT, UNRESOLVED, Report


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


FIELDS = ("paper", "figure", "about", "status", "unresolved")
EXPERIMENTS = {
    name: Experiment(name, run=_lazily(entry["run"]), **{field: entry.get(field, "") for field in FIELDS})
    for name, entry in catalogue.read().items()
}
