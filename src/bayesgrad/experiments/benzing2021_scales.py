"""What a scale means in the experiments of paper 004: data, networks, steps, and the grids of the searches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bayesgrad.experiments import datasets
from bayesgrad.experiments.benzing2021_training import Rule, Task
from bayesgrad.experiments.study import Context


@dataclass(frozen=True)
class Size:
    """What a scale means here.

    Args:
        pair: the data sets of figures 1 and 5.
        single: those of the others, but for figure 4, whose are `mnist`.
        examples: training images; `few` where batches are full.
        steps: of final runs and of those that choose hyper-parameters; `full_steps` where batches are full,
            `damped_steps` in figures 4 and 9, which have a run for each damping.
        fisher: images that a Fisher is taken from, and those of figure 2B.
        refresh: steps between two Fishers of natural gradients.
        grids: for each method its learning rates and its dampings (momenta for SGD); `full` where batches are full.
    """

    pair: tuple[str, ...]
    single: tuple[str, ...]
    mnist: tuple[str, ...]
    examples: int | None
    few: int
    widths: tuple[int, ...]
    batch: int
    steps: tuple[int, int]
    full_steps: tuple[int, int]
    damped_steps: tuple[int, int]
    fisher: tuple[int, ...]
    refresh: int
    rounds: int
    grids: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]

    def rule(self, kind: str, title: str = "", fisher: int | None = None, refresh: int = 1, **options: object) -> Rule:
        titles = {"sgd": "SGD", "adam": "Adam", "kfac": "KFAC", "ng": "NG", "foof": "FOOF"}
        lrs, seconds = self.grids[kind]
        every = self.refresh if kind == "ng" and refresh == 1 else refresh
        seen = self.fisher[0] if fisher is None else fisher
        return Rule(title or titles[kind], kind, lrs, seconds, options, seen, every)

    def task(self, context: Context, name: str, steps: tuple[int, int] | None = None) -> Task:
        data = datasets.load(name, context.data_dir, context.download).part(self.examples)
        context.say(f"{data.note}; {len(data.train_x):,} are trained on")
        return Task(data, self.batch, self.widths, *(steps or self.steps))

    def full(self, context: Context, name: str, widths: tuple[int, ...] | None = None) -> Task:
        """All of a few images in every batch."""
        data = datasets.load(name, context.data_dir, context.download).part(self.few)
        return Task(data, None, self.widths if widths is None else widths, *self.full_steps)


def _decades(low: int, high: int) -> tuple[float, ...]:
    """1 and 3 times every power of ten."""
    return tuple(float(f"{m}e{i}") for i in range(low, high + 1) for m in (1, 3))


PAPER_DAMPINGS = (1e-6, 1e-4, 1e-2, 1.0, 1e2, 1e4, 1e6)
SIZES = {
    "smoke": Size(
        *(("digits",),) * 3,
        examples=200,
        few=60,
        widths=(16, 16, 16),
        batch=20,
        steps=(10, 4),
        full_steps=(6, 3),
        damped_steps=(6, 3),
        fisher=(20, 30, 40),
        refresh=2,
        rounds=4,
        grids={
            "sgd": ((0.1,), (0.9,)),
            "adam": ((1e-3, 1e-2), ()),
            "kfac": ((0.03,), (1e-2, 1e-1)),
            "ng": ((0.1,), (1e-2, 1e-1)),
            "foof": ((0.1,), (0.1, 1.0)),
        },
    ),
    "laptop": Size(
        ("fashion-mnist", "mnist"),
        ("fashion-mnist",),
        ("mnist",),
        examples=6000,
        few=1000,
        widths=(1000, 1000, 1000),
        batch=100,
        steps=(300, 60),
        full_steps=(60, 20),
        damped_steps=(150, 60),
        fisher=(100, 300, 1000),
        refresh=10,
        rounds=40,
        grids={
            "sgd": ((0.03, 0.1, 0.3), (0.0, 0.9)),
            "adam": ((1e-4, 3e-4, 1e-3), ()),
            "kfac": ((0.01, 0.03, 0.1), (1e-2, 1e-1, 1.0)),
            "ng": ((0.01, 0.03, 0.1), (1e-2, 1e-1, 1.0)),
            "foof": ((0.1, 0.3, 1.0), (0.03, 0.1, 0.3)),
        },
    ),
    "paper": Size(
        *(("fashion-mnist", "mnist"),) * 3,
        examples=None,
        few=1000,
        widths=(1000, 1000, 1000),
        batch=100,
        steps=(6000, 6000),
        full_steps=(1000, 1000),
        damped_steps=(6000, 6000),
        fisher=(100, 300, 1000),
        refresh=100,
        rounds=200,
        grids={
            "sgd": (_decades(-3, 0), (0.0, 0.9)),
            "adam": (_decades(-5, -2), ()),
            **{kind: (_decades(-4, 0), PAPER_DAMPINGS) for kind in ("kfac", "ng", "foof")},
        },
    ),
}
