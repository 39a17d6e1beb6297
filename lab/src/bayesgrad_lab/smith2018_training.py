"""Chains of the experiments of Smith et al. 2018: what is sampled, how, and how well ensembles predict."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesgrad import likelihoods
from bayesgrad.samplers import SNGD, Diverged, Ensemble, Langevin, Predictive, temperature
from bayesgrad_lab import figures
from bayesgrad_lab.dataset import Dataset
from bayesgrad_lab.report import Report
from bayesgrad_lab.study import Context, mean_and_error

SCORES = ("nll", "error", "single nll", "single error")


@dataclass(frozen=True)
class Task:
    """A network and the chains that sample its weights.

    Args:
        name: what files of this task begin with.
        data: a function of the seed, so that errors are over data sets as well as over chains.
        network: a function of the seed.
        prior_precision: of the prior N(0, 1/prior_precision).
        burn_in, steps, thin: updates that are forgotten, updates that follow, and one of how many of those is a sample.
        fisher: "exact" is over all labels, "sampled" over one that is drawn.
        examples: of which the metric is read, drawn anew at each refresh; None is all of them.
        refresh: updates from one reading of the metric to the next.
        begins: after how many steps of Adam; see `begun`.
    """

    name: str
    data: Callable[[int], Dataset]
    network: Callable[[int], nn.Module]
    lr: float
    damping: float
    burn_in: int
    steps: int
    prior_precision: float = 0.0
    thin: int = 1
    likelihood: str = "categorical"
    metric: str = "fisher"
    fisher: str = "sampled"
    examples: int | None = None
    refresh: int = 1
    begins: int = 0


def batches(count: int, size: int, seed: int) -> Iterator[Tensor]:
    """Rows of batches without replacement, each of a fresh shuffle (Smith et al. 2018, after Eq. 12)."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randperm(count, generator=generator)[:size]


def build(task: Task, model: nn.Module, count: int, seed: int, *, batch: int | None, heat: float) -> SNGD | Langevin:
    """Natural gradients of minibatches, or of all data with noise of a temperature added where there is no batch."""
    shared: dict[str, Any] = dict(
        num_data=count,
        prior_precision=task.prior_precision,
        metric=task.metric,
        damping=task.damping,
        likelihood=task.likelihood,
        fisher=task.fisher,
        update_every=task.refresh,
        seed=seed,
    )
    if batch is None:
        return Langevin(model, task.lr, temperature=heat, **shared)
    return SNGD(model, task.lr, batch_size=batch, **shared)


def chain(
    task: Task, seed: int, *, batch: int | None = None, heat: float = 1.0, keep: bool = False
) -> dict[str, Tensor]:
    """Scores of the ensemble and the mean scores of its members, on test data; with `keep`, the samples as well.

    Args:
        batch: of minibatch natural gradients; None is Langevin dynamics with gradients of all data.
        heat: the temperature of the latter.
    """
    data, model = task.data(seed), task.network(seed)
    x, y = data.train_x, data.train_y
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of temperatures far from 1, which are the point here
        sampler = build(task, model, len(x), seed, batch=batch, heat=heat)
    reading = likelihoods.named(task.likelihood)
    ensemble = Ensemble(model, burn_in=task.burn_in, thin=task.thin, sampler=sampler, keep=keep)
    running = Predictive(model, data.test_x, likelihood=task.likelihood)
    rows, shown = batches(len(x), batch or len(x), 2 * seed), batches(len(x), task.examples or len(x), 2 * seed + 1)
    singles = []
    try:
        for step in range(task.burn_in + task.steps):
            if step % task.refresh == 0:
                sampler.observe(model(x if task.examples is None else x[next(shown)]))
            here = next(rows) if batch else slice(None)
            sampler.zero_grad()
            loss = reading.loss(model(x[here]), y[here]).mean()
            loss.backward()
            sampler.step(loss=loss)
            if ensemble.collect(loss):
                singles.append(torch.tensor(score(running.collect(), data.test_y)))
    except Diverged:
        return {name: torch.tensor(math.nan) for name in SCORES}
    average = running.prediction()
    scores = [*score(average, data.test_y), *torch.stack(singles).mean(0).tolist()]  # pyright: ignore
    found = {name: torch.tensor(value) for name, value in zip(SCORES, scores)}
    return found | (dict(ensemble.posterior().members) if keep else {})


def score(p: Tensor, y: Tensor) -> tuple[float, float]:
    """Cross-entropy and error of probabilities (n, classes), or (n, 1) of a label that is 1."""
    if p.shape == y.shape:
        p = torch.cat([1 - p, p], 1)
        y = y[:, 0].long()
    found = p.double().gather(1, y[:, None]).clamp(min=1e-12).log()
    return -found.mean().item(), (p.argmax(1) != y).double().mean().item()


@dataclass(frozen=True)
class Sweep:
    """Scores of chains at several temperatures.

    Args:
        temperatures: ascending.
        batches: of each; empty where noise is injected.
        runs: for each temperature the scores of each seed.
        middle: lr N/2, the batch at T = 1 of the paper; 0 where noise is injected.
    """

    temperatures: list[float]
    batches: list[int]
    runs: list[list[dict[str, float]]]
    middle: float = 0.0

    def near(self) -> bool:
        """Whether the best batch is within a factor of 2 of lr N/2, or the best temperature of 1."""
        ratios = [self.temperatures[self.best()]]
        if self.batches:
            ratios.append(self.batches[self.best()] / self.middle)
        return any(0.49 < ratio < 2.05 for ratio in ratios)

    def values(self, name: str) -> list[list[float]]:
        return [[run[name] for run in some] for some in self.runs]

    def mean(self, index: int, name: str) -> tuple[float, float]:
        return mean_and_error([run[name] for run in self.runs[index]])

    def best(self, name: str = "nll") -> int:
        """Where the mean over seeds is smallest, among temperatures at which no seed has diverged."""
        means = [self.mean(i, name)[0] for i in range(len(self.runs))]
        return min(range(len(means)), key=lambda i: means[i] if math.isfinite(means[i]) else math.inf)

    def above(self, index: int, name: str = "nll") -> tuple[float, float]:
        """How much larger a score is than at the best temperature: mean and error of paired differences."""
        best = self.runs[self.best(name)]
        return mean_and_error([run[name] - least[name] for run, least in zip(self.runs[index], best)])

    def alike(self, name: str = "nll") -> list[float]:
        """Temperatures at which the score is within two standard errors of the best one."""
        found = []
        for i, heat in enumerate(self.temperatures):
            more, error = self.above(i, name)
            if math.isfinite(more) and more <= 2 * (error if math.isfinite(error) else 0.0):
                found.append(heat)
        return found

    def one(self) -> int:
        """The temperature that is nearest to 1."""
        return min(range(len(self.temperatures)), key=lambda i: abs(math.log(self.temperatures[i])))


def sweep(
    context: Context, task: Task, *, sizes: Sequence[int] = (), heats: Sequence[float] = (), seeds: int | None = None
) -> Sweep:
    """Chains of minibatches of these sizes, or of Langevin dynamics at these temperatures, for each seed."""
    count = len(task.data(0).train_x)
    if sizes:
        sizes = sorted(set(sizes), reverse=True)
        heats = [temperature(task.lr, count, size) for size in sizes]
    runs: list[list[dict[str, float]]] = []
    for i, heat in enumerate(heats):
        batch = sizes[i] if sizes else None
        some = []
        for seed in range(seeds or context.seeds):
            label = f"B{batch}" if batch else f"T{heat:g}"
            with context.hearing():
                found = context.once(
                    f"{task.name}-{label}-seed{seed}", partial(chain, task, seed, batch=batch, heat=heat)
                )
            some.append({name: found[name].item() for name in SCORES})
        runs.append(some)
        mean, single = (mean_and_error([run[name] for run in some])[0] for name in ("nll", "single nll"))
        context.say(
            f"{task.name}, T = {heat:.3g}{f', B = {batch}' if batch else ''}: NLL {mean:.4f}, single {single:.4f}"
        )
    return Sweep(list(heats), list(sizes), runs, task.lr * count / 2)


# --- reports ---


def add_sweeps(
    context: Context,
    report: Report,
    found: dict[str, Sweep],
    file: str,
    *,
    by: str = "temperature",
    singles: bool = True,
) -> Report:
    """Adds a table of each sweep and a figure."""
    panels: dict[str, dict] = {}
    marks = {}
    for name, some in found.items():
        rows = [
            [f"{heat:.3g}", *([str(some.batches[i])] if some.batches else []), *_cells(some, i)]
            for i, heat in enumerate(some.temperatures)
        ]
        batched = ["B"] if some.batches else []
        columns = ["T", *batched, "ensemble: NLL", "ensemble: error %", "single: NLL", "single: error %"]
        report.add_table(name, columns, rows)
        x = some.temperatures if by == "temperature" else some.batches
        for score, title in (("nll", "cross-entropy"), ("error", "error")):
            if singles:
                shown = {"ensemble": (x, some.values(score)), "single sample": (x, some.values(f"single {score}"))}
                panels[f"{name}, {title}"] = shown
                marks[f"{name}, {title}"] = 1.0 if by == "temperature" else some.batches[some.one()]
            elif score == "nll":
                panels.setdefault("cross-entropy of the ensemble", {})[name] = (x, some.values(score))
                marks["cross-entropy of the ensemble"] = 1.0
    figures.lines(context.folder / file, panels, "temperature" if by == "temperature" else "batch size", marks=marks)
    report.add_figure(file, "Test data, mean and standard error over seeds; the dotted line is T = 1.")
    return report


def protocol(task: Task) -> str:
    of = "all" if task.examples is None else f"{task.examples:,} other"
    labels = "exact Fisher" if task.fisher == "exact" else "Fisher with one drawn label each"
    begin = f"from the weights after {task.begins:,} steps of Adam, " if task.begins else ""
    often = "in each update" if task.refresh == 1 else f"every {task.refresh} updates"
    return (
        f"lr {task.lr:g}, damping {task.damping:g}, prior precision {task.prior_precision:g} (of the summed cost); "
        f"{labels} of {of} training examples, {often}; {begin}{task.burn_in} updates of burn-in, {task.steps} after "
        f"it, one in {task.thin} is a sample; {len(task.data(0).test_x):,} test examples; each seed has its own data"
        ""
    )


def _cells(some: Sweep, index: int) -> list[str]:
    cells = []
    for name, factor, digits in (("nll", 1, 4), ("error", 100, 2), ("single nll", 1, 4), ("single error", 100, 2)):
        mean, error = some.mean(index, name)
        cells.append(value(factor * mean, factor * error, digits) if math.isfinite(mean) else "diverged")
    return cells


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
    mean, error = some.mean(best, "nll")
    more, by = some.above(one)
    single = some.mean(one, "single nll")[0]
    rest = [f"{heat:.3g}" for heat in some.alike() if heat != some.temperatures[best]]
    also = f", not distinguished from T = {', '.join(rest)}" if rest else ""
    at = "" if best == one else f"; at T = {some.temperatures[one]:.3g} it is {value(more, by, 4)} higher"
    if not math.isfinite(more):
        least = f"the ensemble's cross-entropy is smallest at {place}, {value(mean, error, 4)}"
        return f"{least}{also}; at T = {some.temperatures[one]:.3g} chains diverged"
    return (
        f"the ensemble's cross-entropy is smallest at {place}, {value(mean, error, 4)}{also}{at}; single samples at T "
        f"= {some.temperatures[one]:.3g} have {single:.4f}"
    )


def value(mean: float, error: float, digits: int = 2) -> str:
    return f"{mean:.{digits}f} ± {error:.{digits}f}" if math.isfinite(error) else f"{mean:.{digits}f}"


def plus_minus(values: Sequence[float] | np.ndarray) -> str:
    return value(*mean_and_error([float(v) for v in values]))


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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts: list[nn.Module] = []
        for inner, outer in pairwise(widths):
            parts += [nn.Linear(inner, outer), nn.ReLU()]
        return nn.Sequential(*parts[:-1])


def convolutional(seed: int, size: int = 28, channels: int = 10) -> nn.Module:
    """Three convolutions of stride 2 and one Linear layer, without biases: 3490 weights on images of 28 x 28."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        convolutions = [nn.Conv2d(inner, channels, 3, 2, 1, bias=False) for inner in (1, channels, channels)]
        for _ in range(3):
            size = -(-size // 2)
        parts = [part for one in convolutions for part in (one, nn.ReLU())]
        return nn.Sequential(*parts, nn.Flatten(), nn.Linear(channels * size * size, 10, bias=False))


def trained(model: nn.Module, data: Dataset, steps: int, prior_precision: float, seed: int) -> dict[str, Tensor]:
    """Weights after some steps of Adam towards the most probable ones, where chains begin: it shortens the burn-in."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    rows = batches(len(data.train_x), 128, seed)
    for _ in range(steps):
        here = next(rows)
        optimizer.zero_grad()
        penalty = prior_precision / len(data.train_x) / 2 * sum(p.square().sum() for p in model.parameters())
        (F.cross_entropy(model(data.train_x[here]), data.train_y[here]) + penalty).backward()
        optimizer.step()
        schedule.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def begun(context: Context, task: Task, steps: int, data: Callable[[int], Dataset] | None = None) -> Task:
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
