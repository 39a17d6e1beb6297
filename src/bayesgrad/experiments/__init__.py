"""Experiments: what the papers claim, measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bayesgrad.experiments.report import Report
from bayesgrad.experiments.study import Context


@dataclass(frozen=True)
class Experiment:
    """A claim of a paper and the function that measures it.

    Args:
        status: the verdict of the recorded laptop run, in a few words; its page is docs/results/<name>.md.
    """

    name: str
    paper: str
    figure: str
    about: str
    run: Callable[[Context], Report]
    status: str


def _lazily(module: str, function: str) -> Callable[[Context], Report]:
    def run(context: Context) -> Report:
        from importlib import import_module

        return getattr(import_module(f"bayesgrad.experiments.{module}"), function)(context)

    return run


PAPER_001 = "Aitchison, Bayesian filtering unifies adaptive and non-adaptive neural network optimization methods"
EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "aitchison2020-fig1",
            PAPER_001,
            "Fig. 1",
            "the optimum of one weight drifts while the others are trained",
            _lazily("aitchison2020", "fig1"),
            "holds",
        ),
        Experiment(
            "aitchison2020-fig3",
            PAPER_001,
            "Fig. 3",
            "measured learning rates against the fixed-point curve",
            _lazily("aitchison2020", "fig3"),
            "holds",
        ),
        Experiment(
            "aitchison2020-table1",
            PAPER_001,
            "Table 1, Fig. 4, A1-A5",
            "ten optimizers on a ResNet and a DenseNet",
            _lazily("aitchison2020", "table1"),
            "does not hold at laptop scale",
        ),
    )
}
