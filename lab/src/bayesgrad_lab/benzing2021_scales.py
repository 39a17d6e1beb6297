"""What a scale means in the experiments of Benzing 2021: data, networks, steps, and the grids of the searches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bayesgrad_lab.benzing2021_runs import KEY, Grid, Rule, rule
from bayesgrad_lab.context import Context
from bayesgrad_lab.task import Task


@dataclass(frozen=True)
class Size:
    """What is measured at one scale.

    Args:
        pair: the data sets of figures 1 and 5; `single` of the others, but for figure 4, whose are `mnist`.
        examples: training images; `few` where batches are full.
        steps: of final runs and of those that choose hyper-parameters; `short` in figures 2 to 4, `full_steps` where
            batches are full.
        fisher: images that a Fisher is taken from: usually the first, in figure 2B all of these.
        refresh: steps between two Fishers of natural gradients; where batches are full, every step has its own.
        rounds: of timing.
        grids: by kind of method: for mini-batches, for full batches, for the convolutional network, and where a figure
            needs others.
    """

    pair: tuple[str, ...]
    single: tuple[str, ...]
    mnist: tuple[str, ...]
    examples: int | None
    few: int
    widths: tuple[int, ...]
    batch: int
    steps: tuple[int, int]
    short: tuple[int, int]
    full_steps: tuple[int, int]
    fisher: tuple[int, ...]
    refresh: int
    rounds: int
    grids: Mapping[str, Mapping[str, Grid]]

    def rule(self, kind: str, title: str = "", where: str = "mini", **changes: Any) -> Rule:
        """A method with its grid; `changes` are of its Fisher, or options of the optimizer."""
        values = self.grids.get(where, {}).get(kind) or self.grids["mini"][kind]
        usual = {"fisher": self.fisher[0], "refresh": self.refresh if kind == "ng" else 1}
        return rule(kind, values, title, **{**usual, **changes})

    def whole(self, kind: str, title: str = "", **changes: Any) -> Rule:
        """As `rule`, where batches are full: everything is computed anew in every step, from all images."""
        fresh = {"kfac": {"ema": 0.0, "update_every": 1}}.get(kind, {})
        return self.rule(kind, title, "full", fisher=self.few, refresh=1, **fresh, **changes)

    def task(self, context: Context, name: str, lengths: tuple[int, int] | None = None, network: str = "mlp") -> Task:
        data = context.load(name, self.examples)
        context.say(f"{data.note}; {len(data.train_x):,} are trained on")
        widths = self.widths if network == "mlp" else None
        large = network != "mlp" and context.scale == "paper"
        return Task(data, network, 1, self.batch, widths, large, lengths or self.steps, name=KEY)

    def full(self, context: Context, name: str, widths: tuple[int, ...] | None = None) -> Task:
        """All of a few images in every batch."""
        widths = self.widths if widths is None else widths
        return Task(context.load(name, self.few), "mlp", 1, None, widths, lengths=self.full_steps, name=KEY)


def _decades(low: int, high: int) -> tuple[float, ...]:
    """1 and 3 times every power of ten."""
    return tuple(float(f"{m}e{i}") for i in range(low, high + 1) for m in (1, 3))


PAPER_DAMPINGS = (1e-6, 1e-4, 1e-2, 1.0, 1e2, 1e4, 1e6)
THREE, LOW = (0.3, 1.0, 3.0), (0.1, 0.3, 1.0)
SIZES = {
    "smoke": Size(
        *(("digits",),) * 3,
        examples=200,
        few=60,
        widths=(16, 16, 16),
        batch=20,
        steps=(10, 4),
        short=(6, 3),
        full_steps=(6, 3),
        fisher=(20, 30, 40),
        refresh=2,
        rounds=4,
        grids={
            "mini": {
                "sgd": Grid((1.0,), (0.9,)),
                "adam": Grid((1e-3, 1e-2)),
                "kfac": Grid((0.1,), (1e-2, 1e-1), 0.5),
                "ng": Grid((0.3,), (1e-2, 1e-1), 1.0),
                "foof": Grid((1.0,), (0.1, 1.0), 0.5),
            }
        },
    ),
    "laptop": Size(
        ("fashion-mnist", "mnist"),
        ("fashion-mnist",),
        ("mnist",),
        examples=3000,
        few=1000,
        widths=(1000, 1000, 1000),
        batch=100,
        steps=(200, 200),
        short=(100, 100),
        full_steps=(25, 25),
        fisher=(100, 300, 1000),
        refresh=10,
        rounds=40,
        grids={
            "mini": {
                "sgd": Grid(LOW, (0.0, 0.9)),
                "adam": Grid((3e-4, 1e-3, 3e-3)),
                "kfac": Grid(LOW, (1e-3, 1e-2, 1e-1), 0.5),
                "ng": Grid(LOW, (1e-3, 1e-2, 1e-1), 1.0),
                "foof": Grid((1.0, 3.0, 10.0), (0.1, 1.0, 10.0), 0.5),
            },
            "fig2": {
                "kfac": Grid((0.03, *LOW), (1e-3, 1e-2, 1e-1, 1.0), 0.5),
                "ng": Grid((*LOW, 3.0), (1e-3, 1e-2, 1e-1, 1.0), 1.0),
            },
            "product": {"kfac": Grid((0.03, 0.1, 0.3), (1e-2, 1e-1, 1.0), 0.5)},
            "full": {
                "sgd": Grid(THREE, (0.0, 0.9)),
                "kfac": Grid(THREE, (1e-4, 1e-3, 1e-2), 0.5),
                "ng": Grid(THREE, (1e-2, 1e-1, 1.0), 0.5),
            },
            "conv": {
                "kfac": Grid(LOW, (1e-2, 1e-1, 1.0), 0.5),
                "ng": Grid(LOW, (0.1, 1.0, 10.0), 1.0),
                "foof": Grid((1.0, 3.0, 10.0), (0.1, 1.0, 10.0), 0.5),
            },
            "fig4": {
                "kfac": Grid((0.03, *LOW), (1e-4, 1e-3, 1e-2, 1e-1), 0.5),
                "foof": Grid((0.1, *THREE), (0.001, 0.01, 0.1, 1.0), 0.5),
            },
        },
    ),
    "paper": Size(
        *(("fashion-mnist", "mnist"),) * 3,
        examples=None,
        few=1000,
        widths=(1000, 1000, 1000),
        batch=100,
        steps=(6000, 6000),
        short=(6000, 6000),
        full_steps=(1000, 1000),
        fisher=(100, 300, 1000),
        refresh=100,
        rounds=200,
        grids={
            "mini": {
                "sgd": Grid(_decades(-3, 0), (0.0, 0.9)),
                "adam": Grid(_decades(-5, -2)),
                **{kind: Grid(_decades(-4, 0), PAPER_DAMPINGS) for kind in ("kfac", "ng", "foof")},
            }
        },
    ),
}
