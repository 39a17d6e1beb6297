"""Runs of Benzing 2021: constant learning rate and damping, chosen by the training loss of short runs."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesgrad import optim
from bayesgrad.layers.modules import Layer
from bayesgrad_lab.context import Context, Trial
from bayesgrad_lab.methods import Method, built
from bayesgrad_lab.results import Results, Value, mean_and_error
from bayesgrad_lab.studies import best, each, edges, grid, search
from bayesgrad_lab.task import Task, shuffled
from bayesgrad_lab.training import evaluate, steps

MORE_SEEDS = (1001, 1002)  # of searches, beside the first
DIVERGED = 1e4  # a loss beyond which nothing comes back
KEY = "{data}{count}-{network}{large}-batch{batch}"
POINTS = 10  # of a curve
KINDS: dict[str, tuple[str, type, str]] = {
    "sgd": ("SGD", torch.optim.SGD, "momentum"),
    "adam": ("Adam", torch.optim.Adam, ""),
    "kfac": ("KFAC", optim.KFAC, "damping"),
    "ng": ("NG", optim.NaturalGradient, "damping"),
    "foof": ("FOOF", optim.FOOF, "damping"),
}  # title, class, second hyper-parameter
TIMING = {"kfac": "stats_every", "ng": "update_every"}  # arguments that say how often a Fisher is taken
Measure = Callable[[torch.optim.Optimizer], Tensor]


# --- rules ---


@dataclass(frozen=True)
class Grid:
    """Learning rates and dampings (momenta for SGD).

    Args:
        power: learning rates are in units of this power of the damping, so that few of them fit all dampings; SGD's are
            divided by what momentum multiplies them with.
    """

    lrs: tuple[float, ...]
    seconds: tuple[float, ...] = ()
    power: float = 0.0


@dataclass(frozen=True)
class Rule(Method):
    """A method whose curvature may come from other images than the gradient.

    Args:
        power: see `Grid`.
        fisher: images of the independent batch that the Fisher is taken from; 0 for the batch of the gradient.
        refresh: steps between two such batches; 0 for rules without a Fisher.
    """

    power: float = 0.0
    fisher: int = 0
    refresh: int = 0

    def scaled(self, lr: float, second: float) -> float:
        """The learning rate of a setting of the grid."""
        return lr * (1 - second if self.second == "momentum" else second**self.power if self.power else 1)

    def observed(self, model: nn.Module, x: Tensor, others: Iterator[Tensor]) -> Callable[[int, Tensor], Tensor | None]:
        """The outputs that a step takes its Fisher from: of other rows, if there is one at all."""

        def outputs(step: int, own: Tensor) -> Tensor | None:
            if not self.refresh or step % self.refresh:
                return None
            return model(x[next(others)[: self.fisher]]) if self.fisher else own

        return outputs


def rule(kind: str, values: Grid, title: str = "", fisher: int = 100, refresh: int = 1, **options: Any) -> Rule:
    """A method of `KINDS` with its grid; `options` are further arguments of the optimizer."""
    name, make, second = KINDS[kind]
    timing = TIMING.get(kind)
    key = kind + "".join(f"-{option}={value}" for option, value in sorted(options.items()))
    arguments = {second: attrgetter("second")} if second else {}
    if kind in ("kfac", "foof"):
        arguments |= {"damping_mode": "absolute", "max_norm": math.inf, "stats_every": 1}
    elif kind == "ng":
        arguments |= {"max_norm": math.inf, "momentum": 0.0}
    if timing:
        key += f"-fisher{fisher}-every{refresh}"
        arguments |= {timing: refresh, "seed": attrgetter("seed")}
    build = built(make, **arguments, **options)
    shown = title or name
    fields = {"power": values.power, "fisher": fisher, "refresh": refresh if timing else 0}
    return Rule(key, shown, values.lrs, build, second, values.seconds, **fields)


# --- one run ---


def train(
    context: Context,
    task: Task,
    rule: Rule,
    lr: float,
    second: float,
    seed: int,
    purpose: str,
    measure: Measure | None = None,
) -> dict[str, Tensor]:
    """One run, from the run's folder where it is there: the curve of training loss, and the final test error.

    Args:
        measure: called with the optimizer, gradients in place, at a third, two thirds and the end of a final run.
    """
    length = task.lengths[0 if purpose == "final" else 1]
    trial = Trial(purpose, task.key, rule.kind, {"lr": lr, rule.second: second, "steps": length}, seed)
    return context.once(trial, partial(_train, context, task, rule, trial, length, measure))


def _train(
    context: Context, task: Task, rule: Rule, trial: Trial, length: int, measure: Measure | None
) -> dict[str, Tensor]:
    seed, final, data = trial.seed or 0, trial.purpose == "final", task.data
    points = POINTS if final else 1
    model = task.model(seed).to(context.device)
    (optimizer,) = rule.build(model, task, trial.settings["lr"], seed, trial.settings[rule.second])
    order, other = (torch.Generator().manual_seed(2 * seed + i) for i in range(2))
    looks = {round(length * (i + 1) / points) for i in range(points)}
    moments = {round(length * i / 3) for i in (1, 2, 3)} if measure and final else set()
    count = len(data.train_x)
    rows = itertools.islice(shuffled(count, task.size, order, backwards=True), length)
    observed = rule.observed(model, data.train_x.to(context.device), shuffled(count, count, other))
    loop = steps(model, [optimizer], task.batches(rows, context.device), observed=observed, limit=DIVERGED)
    curve, measured = [], []
    for step in context.watch(trial, loop, 1, length):
        if step.lost:
            if step.reason:
                context.say(f"{trial.key} gave up: {step.reason}")
            curve += [math.inf] * (points - len(curve))
            break
        if measure and step.number + 1 in moments:
            measured.append(measure(optimizer))
        if step.number + 1 in looks:
            nll = evaluate(model, data.train_x, data.train_y, context.device)["nll"]
            curve.append(nll if nll < DIVERGED else math.inf)
            model.train()
    error = math.nan
    if final and math.isfinite(curve[-1]):
        error = evaluate(model, data.test_x, data.test_y, context.device)["error"]
    found = {"loss": torch.tensor(curve, dtype=torch.float64), "error": torch.tensor(error, dtype=torch.float64)}
    return {**found, "measured": torch.stack(measured)} if measured else found


# --- choosing ---


def score(run: Mapping[str, Tensor], name: str) -> float:
    """The training loss at the end of a run, or its test error."""
    return run["loss"][-1].item() if name == "loss" else run["error"].item()


def study(task: Task, rule: Rule) -> str:
    """The name of a search: all that its settings' meaning depends on."""
    return f"{task.key}-{rule.kind}-power{rule.power:g}-steps{task.lengths[1]}"


def tune(context: Context, task: Task, rule: Rule, seconds: Sequence[float] | None = None) -> Results:
    """Hyper-parameters by the training loss of search runs, whose seeds are not the finals'.

    All of the grid is run with one seed, and the best of it with two more; see `search`.

    Args:
        seconds: values of damping (or momentum) to choose from, where not all of the rule's.
    """
    settings = grid(rule.lrs, seconds or rule.seconds or (0.0,))

    def loss(setting: tuple[float, ...], seed: int, *_: Any) -> float:
        return score(train(context, task, rule, rule.scaled(*setting), setting[1], seed, "search"), "loss")

    names = ("lr", rule.second)
    tried = search(context, study(task, rule), names, settings, loss, confirm=MORE_SEEDS)
    chosen = best(tried)
    values = dict(zip(names, (rule.scaled(*chosen), chosen[1])))
    words = [
        f"{names[i]} {values[names[i]]:.2g} is the {end} tried"
        for i, end in edges(settings, chosen).items()
        if names[i] != "momentum"
    ]
    if not math.isfinite(tried[chosen]):
        words = ["all that was tried diverged"]
    return Results(rule.title, [], score, values, tried, tuple(words), rule)


def finish(context: Context, task: Task, chosen: Results, measure: Measure | None = None) -> Results:
    """The final runs of a rule whose hyper-parameters are chosen."""
    for words in chosen.edges:
        context.say(f"{chosen.title} on {task.data.name}: {words}")
    lr, second = chosen.settings.values()

    def final(seed: int) -> dict[str, Tensor]:
        return train(context, task, chosen.of, lr, second, seed, "final", measure)

    name, seeds = study(task, chosen.of), range(context.seeds)
    runs = each(context, name, chosen.settings, seeds, final, lambda one: score(one, "loss"))
    return replace(chosen, runs=runs)


def tuned(context: Context, task: Task, rules: Sequence[Rule]) -> dict[str, Results]:
    """Each rule at its best hyper-parameters, by title."""
    return {rule.title: finish(context, task, tune(context, task, rule)) for rule in rules}


def by_damping(context: Context, task: Task, rule: Rule, measure: Measure | None = None) -> dict[float, Results]:
    """A rule at each of its dampings, with the best lr for each."""
    return {d: finish(context, task, tune(context, task, rule, (d,)), measure) for d in rule.seconds}


def factor(above: Results, below: Results) -> Value:
    """How many times higher one training loss is than another, over pairs of seeds: the log of it, and its error."""
    if not all(map(math.isfinite, below.values("loss"))):
        return -math.inf, math.nan
    if not all(map(math.isfinite, above.values("loss"))):
        return math.inf, math.nan
    return mean_and_error([math.log(a / b) for a, b in zip(above.values("loss"), below.values("loss"))])


# --- time ---


def step_times(context: Context, task: Task, rules: Mapping[str, Rule], rounds: int) -> dict[str, float]:
    """Median seconds of a step of each rule, all of them taking turns; from the run's folder where it is there."""
    key = f"time-{task.key}-{'-'.join(rules)}-rounds{rounds}".replace(" ", "")
    found = context.once(key, partial(_times, context, task, rules, rounds))
    return {name: value.item() for name, value in found.items()}


def _times(context: Context, task: Task, rules: Mapping[str, Rule], rounds: int) -> dict[str, Tensor]:
    def clock() -> float:
        if context.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter()

    x, count = task.data.train_x.to(context.device), len(task.data.train_x)
    generator, loops = torch.Generator().manual_seed(0), {}
    drawn = [torch.randperm(count, generator=generator)[: task.size] for _ in range(2 * rounds)]
    for name, rule in rules.items():
        model = task.model(0).to(context.device)
        optimizers = rule.build(model, task, 1e-4, 0, (rule.seconds or (0.0,))[-1])
        observed = rule.observed(model, x, iter(drawn[1 :: 2 * max(1, rule.refresh)]))
        batches = task.batches(iter(drawn[::2]), context.device)
        loops[name] = steps(model, optimizers, batches, observed=observed, clock=clock)
    seconds = [[next(loop).seconds for loop in loops.values()] for _ in range(rounds)]
    return {name: torch.tensor(statistics.median(values)) for name, values in zip(rules, zip(*seconds))}


# --- similarity ---


def similarities(optimizer: torch.optim.Optimizer, dampings: Sequence[float]) -> Tensor:
    """Cosines of KFAC's updates to FOOF's with KFAC's damping of inputs, averaged over layers: (2, dampings).

    The first row is for damped factors, the second for a damped product. All are functions of KFAC's averages and of
    the gradients that are there, computed where both factors are diagonal.
    """
    assert isinstance(optimizer, optim.KFAC)
    rows = [_similarity(optimizer, layer, dampings) for layer in layers_of(optimizer)]
    return torch.stack(rows).mean(0)


def layers_of(optimizer: Any) -> Sequence[Layer]:
    """The layers whose factors KFAC and FOOF keep."""
    return optimizer.preconditioner.recorded.layers


def _similarity(optimizer: optim.KFAC, layer: Layer, dampings: Sequence[float]) -> Tensor:
    preconditioner: Any = optimizer.preconditioner
    entry, group = optimizer.state[layer.owner], optimizer.param_groups[0]
    values, turned = {}, layer.matrix()[0]
    for side in ("input", "error"):
        values[side], basis = torch.linalg.eigh(entry[f"{side}_moment"][0])
        turned = turned @ basis if side == "input" else basis.T @ turned
    inputs, errors = values["input"].clamp(min=0)[None], values["error"].clamp(min=0)[:, None]
    cosines = []
    for damping in dampings:
        parts = preconditioner.dampings(entry, {**group, "damping": damping})
        foof = turned / (inputs + parts["input"])
        for update in (foof / (errors + parts["error"]), turned / (inputs * errors + damping)):
            cosines.append(F.cosine_similarity(update.flatten(), foof.flatten(), dim=0))
    return torch.stack(cosines).view(-1, 2).T.double().cpu()


# --- scales ---


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
