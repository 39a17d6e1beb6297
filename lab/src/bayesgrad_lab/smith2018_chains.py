"""Chains of the experiments of Smith et al. 2018: what is sampled, how, and how well ensembles predict."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesgrad import likelihoods
from bayesgrad.samplers import SNGD, Diverged, Ensemble, Langevin, Predictive, temperature
from bayesgrad_lab import figures, networks
from bayesgrad_lab.context import Context
from bayesgrad_lab.dataset import Dataset
from bayesgrad_lab.report import Report
from bayesgrad_lab.results import Results, Value, margin, mean_and_error, shown
from bayesgrad_lab.task import Loss
from bayesgrad_lab.training import steps

FORMS = {
    "nll": (".4f", 1),
    "error": (".2f", 100),
    "single nll": (".4f", 1),
    "single error": (".2f", 100),
}  # of an ensemble, and of its members alone
SCORES = tuple(FORMS)


@dataclass(frozen=True)
class Chain:
    """A network and the chains that sample its weights.

    Args:
        name: what files of this task begin with.
        data: a function of the seed, so that errors are over data sets as well as over chains.
        network: a function of the seed.
        prior_precision: of the prior N(0, 1/prior_precision).
        burn_in, steps, thin: updates that are forgotten, updates that follow, and one of how many of those is a sample.
        examples: of which the metric is read, with one drawn label each, drawn anew at each refresh.
        refresh: updates from one reading of the metric to the next.
        begins: after how many steps of Adam; see `begun`.
    """

    name: str
    data: Callable[[int], Dataset]
    network: Callable[[int], nn.Module]
    lr: float = 0.0
    damping: float = 0.0
    burn_in: int = 0
    steps: int = 0
    prior_precision: float = 0.0
    thin: int = 1
    metric: str = "fisher"
    examples: int | None = None
    refresh: int = 1
    begins: int = 0

    @property
    def count(self) -> int:
        return len(self.data(0).train_x)

    def scores(
        self, context: Context, label: str, batch: int | None, heat: float, seeds: int
    ) -> list[dict[str, float]]:
        """Of ensembles and of their members, for each seed."""
        keys = [f"{self.name}-{label}-seed{seed}" for seed in range(seeds)]
        runs = [context.once(key, partial(chain, self, seed, batch=batch, heat=heat)) for seed, key in enumerate(keys)]
        return [{name: run[name].item() for name in SCORES} for run in runs]


def batches(count: int, size: int, seed: int) -> Iterator[Tensor]:
    """Rows of batches without replacement, each of a fresh shuffle (Smith et al. 2018, after Eq. 12)."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randperm(count, generator=generator)[:size]


def sampler_of(model: nn.Module, lr: float, batch: int | None, heat: float, **settings: Any) -> SNGD | Langevin:
    """Natural gradients of minibatches, or of all data with noise of a temperature added where there is no batch."""
    if batch is None:
        return Langevin(model, lr, temperature=heat, limit_step=False, **settings)
    return SNGD(model, lr, batch_size=batch, damping_noise=False, **settings)  # as in the paper


def chain(task: Chain, seed: int, *, batch: int | None = None, heat: float = 1.0) -> dict[str, Tensor]:
    """Scores of the ensemble and the mean scores of its members, on test data.

    Args:
        batch: of minibatch natural gradients; None is Langevin dynamics with gradients of all data.
        heat: the temperature of the latter.
    """
    data, model = task.data(seed), task.network(seed)
    x, y, reading = data.train_x, data.train_y, likelihoods.named("categorical")
    settings: dict[str, Any] = dict(prior_precision=task.prior_precision, metric=task.metric, damping=task.damping)
    settings |= dict(likelihood="categorical", fisher="sampled", update_every=task.refresh, seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of temperatures far from 1, which are the point here
        sampler = sampler_of(model, task.lr, batch, heat, num_data=len(x), **settings)
    rows, others = batches(len(x), batch or len(x), 2 * seed), batches(len(x), task.examples or len(x), 2 * seed + 1)
    places = (next(rows) if batch else slice(None) for _ in range(task.burn_in + task.steps))

    def observed(number: int, outputs: Tensor) -> Tensor | None:
        if number % task.refresh:
            return None
        return model(x if task.examples is None else x[next(others)])

    try:
        return collected(
            sampler,
            Ensemble(model, burn_in=task.burn_in, thin=task.thin, sampler=sampler, keep=False),
            Predictive(model, data.test_x, likelihood="categorical"),
            ((x[here], y[here]) for here in places),
            lambda outputs, labels: reading.loss(outputs, labels).mean(),
            lambda p: score(p, data.test_y),
            observed,
        )
    except Diverged:
        return {name: torch.tensor(math.nan) for name in SCORES}


def collected(
    sampler: SNGD | Langevin,
    ensemble: Ensemble,
    running: Predictive,
    batches: Iterable[tuple[Tensor, Tensor]],
    loss: Loss,
    score: Callable[[Any], Tensor],
    observed: Callable[[int, Tensor], Tensor | None] = lambda number, outputs: None,
) -> dict[str, Tensor]:
    """Runs a chain: scores of its ensemble's predictions, and the mean scores of its members.

    Args:
        score: cross-entropy and error of predictions.
        observed: see `steps`.
    """
    singles = []
    for step in steps(ensemble.model, [sampler], batches, loss, observed=observed, limit=None):
        if ensemble.collect(step.loss):
            singles.append(score(running.collect()))
    return dict(zip(SCORES, (*score(running.prediction()), *torch.stack(singles).mean(0))))


def logistic_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Of labels 0 and 1: the mean over the second dimension, the sum over the first, of which each is a chain."""
    return (F.softplus(outputs) - labels * outputs).mean(1).sum()


def score(p: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy and error of probabilities (n, classes)."""
    found = p.double().gather(1, y[:, None]).clamp(min=1e-12).log()
    return torch.tensor([-found.mean().item(), (p.argmax(1) != y).double().mean().item()])


@dataclass(frozen=True)
class Sweep:
    """Scores of chains at several temperatures.

    Args:
        temperatures: ascending.
        batches: of each; empty where noise is injected.
        runs: for each temperature the scores over seeds.
        middle: lr N/2, the batch at T = 1 of the paper; 0 where noise is injected.
    """

    temperatures: list[float]
    batches: list[int]
    runs: list[Results]
    middle: float = 0.0

    def near(self) -> bool:
        """Whether the best batch is within a factor of 2 of lr N/2, or the best temperature of 1."""
        ratios = [self.temperatures[self.best()]]
        if self.batches:
            ratios.append(self.batches[self.best()] / self.middle)
        return any(0.49 < ratio < 2.05 for ratio in ratios)

    def values(self, name: str) -> list[list[float]]:
        return [run.values(name) for run in self.runs]

    def mean(self, index: int, name: str) -> Value:
        return self.runs[index].mean(name)

    def best(self, name: str = "nll") -> int:
        """Where the mean over seeds is smallest, among temperatures at which no seed has diverged."""
        means = [self.mean(i, name)[0] for i in range(len(self.runs))]
        return min(range(len(means)), key=lambda i: means[i] if math.isfinite(means[i]) else math.inf)

    def above(self, index: int, name: str = "nll") -> Value:
        """How much larger a score is than at the best temperature: mean and error of paired differences."""
        return self.runs[index].less(self.runs[self.best(name)], name)

    def alike(self, name: str = "nll") -> list[float]:
        """Temperatures at which the score is within two standard errors of the best one."""
        gaps = [self.above(i, name) for i in range(len(self.runs))]
        return [heat for heat, gap in zip(self.temperatures, gaps) if gap[0] <= margin(gap)]

    def one(self) -> int:
        """The temperature that is nearest to 1."""
        return min(range(len(self.temperatures)), key=lambda i: abs(math.log(self.temperatures[i])))


def sweep(
    context: Context, task: Any, *, sizes: Sequence[int] = (), heats: Sequence[float] = (), seeds: int | None = None
) -> Sweep:
    """Chains of minibatches of these sizes, or of Langevin dynamics at these temperatures, for each seed."""
    sizes = sorted(set(sizes), reverse=True)
    heats = [temperature(task.lr, task.count, size) for size in sizes] if sizes else heats
    runs = []
    for heat, batch in zip(heats, sizes or [None] * len(heats)):
        label = f"B{batch}" if batch else f"T{heat:g}"
        one = Results(label, task.scores(context, label, batch, heat, seeds or context.seeds))
        runs.append(one)
        mean, single = (one.mean(name)[0] for name in ("nll", "single nll"))
        context.say(f"{task.name}-{label}, T = {heat:.3g}: NLL {mean:.4f}, single {single:.4f}")
    return Sweep(list(heats), list(sizes), runs, task.lr * task.count / 2)


# --- reports ---


def add_sweeps(
    context: Context,
    report: Report,
    found: dict[str, Sweep],
    file: str,
    *,
    by: str = "temperature",
    singles: bool = True,
) -> None:
    """Adds a table of each sweep and a figure."""
    panels: dict[str, dict] = {}
    marks, axes = {}, []
    for name, some in found.items():
        rows = []
        for i, (heat, run) in enumerate(zip(some.temperatures, some.runs)):
            cells = [shown(run.mean(score), form, factor) for score, (form, factor) in FORMS.items()]
            rows.append([f"{heat:.3g}", *([str(some.batches[i])] if some.batches else []), *cells])
        batched = ["B"] if some.batches else []
        columns = ["T", *batched, "ensemble: NLL", "ensemble: error %", "single: NLL", "single: error %"]
        report.add_table(name, columns, rows)
        x = some.temperatures if by == "temperature" else some.batches
        for score, title, label, factor in (("nll", "cross-entropy", "nats", 1), ("error", "error", "%", 100)):
            if singles:
                names = {"ensemble": score, "single sample": f"single {score}"}
                panels[f"{name}, {title}"] = {
                    which: (x, [[factor * value for value in runs] for runs in some.values(key)])
                    for which, key in names.items()
                }
                axes.append(f"{title} ({label})")
                marks[f"{name}, {title}"] = 1.0 if by == "temperature" else some.batches[some.one()]
            elif score == "nll":
                panels.setdefault("ensemble", {})[name] = (x, some.values(score))
                marks["ensemble"] = 1.0
                axes = ["cross-entropy (nats)"]
    report.draw(
        context.folder / file,
        figures.lines,
        panels,
        "temperature" if by == "temperature" else "batch size",
        axes,
        caption="Test data, mean and standard error over seeds; the dotted line is T = 1.",
        marks=marks,
    )


def reported(
    context: Context, report: Report, found: dict[str, Sweep], protocol: str, by: str = "temperature"
) -> Report:
    """The report of an experiment that asks where minima are."""
    report.verdict, report.settings["protocol"] = verdict(found), protocol
    name = report.title.partition(":")[0]
    add_sweeps(context, report, found, f"{name.rpartition('-')[2]}.png", by=by)
    return report


def protocol(task: Chain) -> str:
    of = "all" if task.examples is None else f"{task.examples:,} other"
    begin = f"from the weights after {task.begins:,} steps of Adam, " if task.begins else ""
    often = "in each update" if task.refresh == 1 else f"every {task.refresh} updates"
    return (
        f"lr {task.lr:g}, damping {task.damping:g}, prior precision {task.prior_precision:g} (of the summed cost); "
        f"Fisher with one drawn label each of {of} training examples, {often}; {begin}{task.burn_in} updates of "
        f"burn-in, {task.steps} after it, one in {task.thin} is a sample; {len(task.data(0).test_x):,} test examples; "
        "each seed has its own data"
    )


def verdict(found: dict[str, Sweep]) -> str:
    """Whether each minimum is within a factor of 2 of T = 1, or of its batch, and where it is."""
    held = [some.near() for some in found.values()]
    better = all(some.mean(some.one(), "nll")[0] < some.mean(some.one(), "single nll")[0] for some in found.values())
    words = "Holds" if all(held) and better else "Holds in part" if any(held) else "Does not hold"
    return f"{words}. {' '.join(f'{name}: {where(some)}.' for name, some in found.items())}"


def where(some: Sweep) -> str:
    best, one = some.best(), some.one()
    batch = f" (B = {some.batches[best]}, lr N/2 = {some.middle:g})" if some.batches else ""
    place = f"T = {some.temperatures[best]:.3g}{batch}"
    least, more, heat = shown(some.mean(best, "nll"), ".4f"), some.above(one), f"{some.temperatures[one]:.3g}"
    rest = [f"{other:.3g}" for other in some.alike() if other != some.temperatures[best]]
    also = f", not distinguished from T = {', '.join(rest)}" if rest else ""
    words = f"the ensemble's cross-entropy is smallest at {place}, {least}{also}"
    if not math.isfinite(more[0]):
        return f"{words}; at T = {heat} chains diverged"
    at = "" if best == one else f"; at T = {heat} it is {shown(more, '.4f')} higher"
    return f"{words}{at}; single samples at T = {heat} have {some.mean(one, 'single nll')[0]:.4f}"


def plus_minus(values: Iterable[float]) -> str:
    return shown(mean_and_error([float(value) for value in values]), ".2f")


# --- data and networks ---


def projected(images: Dataset, count: int, seed: int, features: int = 10) -> Dataset:
    """Pixels in [0, 1], projected by a matrix of standard normal numbers; `count` training examples."""
    part = images.part(count, seed)
    low, high = images.train_x.min(), images.train_x.max()
    turn = torch.randn(images.train_x[0].numel(), features, generator=torch.Generator().manual_seed(seed))
    train, test = (((x - low) / (high - low)).flatten(1) @ turn for x in (part.train_x, part.test_x))
    return replace(part, train_x=train, test_x=test, kind="table")


def pooled(images: Dataset, count: int, seed: int) -> Dataset:
    """Images of half the width and height, flat."""
    part = images.part(count, seed)
    train, test = (F.avg_pool2d(x, 2).flatten(1) for x in (part.train_x, part.test_x))
    return replace(part, train_x=train, test_x=test, kind="table")


def perceptron(widths: Sequence[int], seed: int) -> nn.Module:
    """Linear layers with rectifiers in between."""
    with networks.seeded(seed):
        return networks.perceptron(widths)


def convolutional(seed: int, size: int = 28, channels: int = 10) -> nn.Module:
    """Three convolutions of stride 2 and one Linear layer, without biases: 3490 weights on images of 28 x 28."""
    with networks.seeded(seed):
        convolutions = [nn.Conv2d(inner, channels, 3, 2, 1, bias=False) for inner in (1, channels, channels)]
        for _ in range(3):
            size = -(-size // 2)
        parts = [part for one in convolutions for part in (one, nn.ReLU())]
        return nn.Sequential(*parts, nn.Flatten(), nn.Linear(channels * size * size, 10, bias=False))


def trained(model: nn.Module, data: Dataset, count: int, prior_precision: float, seed: int) -> dict[str, Tensor]:
    """Weights after some steps of Adam towards the most probable ones, where chains begin: it shortens the burn-in."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, count)
    rows = islice(batches(len(data.train_x), 128, seed), count)

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        penalty = prior_precision / len(data.train_x) / 2 * sum(p.square().sum() for p in model.parameters())
        return F.cross_entropy(outputs, labels) + penalty

    pairs = ((data.train_x[here], data.train_y[here]) for here in rows)
    for _ in steps(model, [optimizer], pairs, loss, schedules=[schedule], limit=None):
        pass
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def begun(context: Context, task: Chain, steps: int, data: Callable[[int], Dataset] | None = None) -> Chain:
    """The same task, from where Adam gets in so many steps; on other data where they are given."""

    @cache
    def start(seed: int) -> dict[str, Tensor]:
        some = (data or task.data)(seed)
        run = partial(trained, task.network(seed), some, steps, task.prior_precision, seed)
        return context.once(f"{task.name}-start-seed{seed}", run)

    def network(seed: int) -> nn.Module:
        model = task.network(seed)
        model.load_state_dict(start(seed))
        return model

    return replace(task, network=network, begins=steps)
