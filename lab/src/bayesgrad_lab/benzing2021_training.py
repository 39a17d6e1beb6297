"""Training runs of Benzing 2021: constant learning rate and damping, chosen by the training loss of short runs."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesgrad import optim
from bayesgrad.layers.layer import Layer
from bayesgrad.layers.statistics import flush
from bayesgrad_lab import networks
from bayesgrad_lab.dataset import Dataset
from bayesgrad_lab.runner import Trial, evaluate
from bayesgrad_lab.study import Context, mean_and_error

SEARCH_SEED, MORE_SEEDS = 1000, (1001, 1002)  # finals count from 0
DIVERGED = 1e4  # a loss beyond which nothing comes back
KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "kfac": optim.KFAC,
    "ng": optim.NaturalGradient,
    "foof": optim.FOOF,
}


@dataclass(frozen=True)
class Rule:
    """A method and the values that a search may choose from.

    Args:
        title: for tables and legends, one for each rule of an experiment.
        kind: a key of `KINDS`.
        seconds: values of its second hyper-parameter: damping, or momentum for SGD.
        power: `lrs` are in units of this power of the damping, so that few of them fit all dampings; SGD's are divided
            by what momentum multiplies them with.
        options: all else that the optimizer is built with.
        fisher: images of the independent batch that the Fisher is taken from; 0 for the batch of the gradient.
        refresh: steps between two such batches.
    """

    title: str
    kind: str
    lrs: tuple[float, ...]
    seconds: tuple[float, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    fisher: int = 100
    refresh: int = 1
    power: float = 0.0

    @property
    def second(self) -> str:
        return {"sgd": "momentum", "adam": ""}.get(self.kind, "damping")

    def lr(self, scale: float, second: float) -> float:
        return scale * (1 - second if self.kind == "sgd" else second**self.power if self.power else 1)

    def build(self, model: nn.Module, lr: float, second: float, seed: int) -> torch.optim.Optimizer:
        chosen = {self.second: second} if self.second else {}
        if self.kind in ("sgd", "adam"):
            return KINDS[self.kind](model.parameters(), lr=lr, **chosen, **self.options)
        timing = {"kfac": "stats_every", "ng": "update_every"}.get(self.kind)
        drawn = {timing: self.refresh, "seed": seed} if timing else {}
        return KINDS[self.kind](model, lr=lr, **chosen, **drawn, **self.options)

    def observes(self, step: int) -> bool:
        """Whether the Fisher is refreshed at a step, counted from 0."""
        return self.kind in ("kfac", "ng") and step % self.refresh == 0

    @property
    def key(self) -> str:
        options = "".join(f"-{name}={value}" for name, value in sorted(self.options.items()))
        seen = f"-fisher{self.fisher}-every{self.refresh}" if self.kind in ("kfac", "ng") else ""
        return f"{self.kind}{options}{seen}"


@dataclass(frozen=True)
class Task:
    """What is trained and for how long.

    Args:
        batch: images of a gradient; None for all.
        widths: of hidden layers; None for the convolutional network.
        steps: of a final run, `search_steps` of one that chooses hyper-parameters.
        points: of a curve.
    """

    data: Dataset
    batch: int | None
    widths: tuple[int, ...] | None
    steps: int
    search_steps: int
    points: int = 10
    large: bool = False

    @property
    def key(self) -> str:
        network = "cnn" + "-large" * self.large if self.widths is None else "-".join(map(str, ("mlp", *self.widths)))
        return f"{self.data.name}{len(self.data.train_x)}-{network}-batch{self.batch or 'all'}"

    def model(self, seed: int) -> nn.Module:
        if self.widths is None:
            return networks.build("cnn", self.data, seed, self.large)
        size = math.prod(self.data.train_x.shape[1:])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            sizes = list(itertools.pairwise((size, *self.widths)))
            hidden = [part for pair in sizes for part in (nn.Linear(*pair), nn.ReLU())]
            return nn.Sequential(nn.Flatten(), *hidden, nn.Linear((size, *self.widths)[-1], self.data.classes))


@dataclass(frozen=True)
class Finals:
    """A rule at chosen hyper-parameters: for each seed a curve of training loss, and scores at the end."""

    rule: Rule
    lr: float
    second: float
    runs: list[dict[str, Tensor]]
    edges: tuple[str, ...] = ()

    @property
    def losses(self) -> list[float]:
        return [run["loss"][-1].item() for run in self.runs]

    @property
    def curves(self) -> list[list[float]]:
        return [run["loss"].tolist() for run in self.runs]


# --- one run ---


def train(
    context: Context,
    task: Task,
    rule: Rule,
    lr: float,
    second: float,
    seed: int,
    purpose: str,
    measure: Callable[[torch.optim.Optimizer], Tensor] | None = None,
) -> dict[str, Tensor]:
    """One run, from the run's folder where it is there: the curve of training loss, and the final test error.

    Args:
        measure: called with the optimizer, gradients in place, at a third, two thirds and the end of a final run.
    """
    steps = task.steps if purpose == "final" else task.search_steps
    key = f"{purpose}-{task.key}-{rule.key}-lr{lr:g}-{rule.second}{second:g}-steps{steps}-seed{seed}"
    return context.once(key, partial(_train, context, task, rule, lr, second, seed, purpose, measure))


def _train(
    context: Context,
    task: Task,
    rule: Rule,
    lr: float,
    second: float,
    seed: int,
    purpose: str,
    measure: Callable[[torch.optim.Optimizer], Tensor] | None,
) -> dict[str, Tensor]:
    final = purpose == "final"
    steps, points = (task.steps, task.points) if final else (task.search_steps, 1)
    x, y = task.data.train_x.to(context.device), task.data.train_y.to(context.device)
    batch = task.batch or len(x)
    label = f"{rule.title} {rule.second} {second:g}".strip() if rule.second else rule.title
    trial = Trial(task.key, label, lr, seed, 1, batch, purpose=purpose, data=task.data.name)
    if context.expect:
        context.expect(trial, 1, steps)
    model = task.model(seed).to(context.device)
    optimizer: Any = rule.build(model, lr, second, seed)
    order, other = (torch.Generator().manual_seed(2 * seed + i) for i in range(2))
    looks = {round(steps * (i + 1) / points) for i in range(points)}
    moments = {round(steps * i / 3) for i in (1, 2, 3)} if measure and final else set()
    curve, measured, queue, start = [], [], [], time.perf_counter()
    for step in range(steps):
        if not queue:
            queue = list(torch.randperm(len(x), generator=order).split(batch))
        chosen = queue.pop()
        optimizer.zero_grad()
        outputs = model(x[chosen])
        loss = F.cross_entropy(outputs, y[chosen])
        lost = not loss.item() < DIVERGED
        try:
            if rule.observes(step) and not lost:
                apart = torch.randperm(len(x), generator=other)[: rule.fisher] if rule.fisher else None
                optimizer.observe(outputs if apart is None else model(x[apart]))
            if not lost:
                loss.backward()
                optimizer.step()
        except (ValueError, FloatingPointError) as words:  # something has grown too large to be inverted
            context.say(f"{trial.key} gave up: {words}")
            lost = True
        if lost:
            curve += [math.inf] * (points - len(curve))
            break
        if measure and step + 1 in moments:
            measured.append(measure(optimizer))
        if step + 1 in looks:
            nll = evaluate(model, task.data.train_x, task.data.train_y, context.device)["nll"]
            curve.append(nll if nll < DIVERGED else math.inf)
            model.train()
        if context.progress and (step % 10 == 9 or step + 1 == steps):
            rate = (step + 1) / (time.perf_counter() - start)
            context.progress(trial, 0, step + 1, loss.item(), math.nan, rate)
    error = math.nan
    if final and math.isfinite(curve[-1]):
        error = evaluate(model, task.data.test_x, task.data.test_y, context.device)["error"]
    found = {"loss": torch.tensor(curve, dtype=torch.float64), "error": torch.tensor(error, dtype=torch.float64)}
    return {**found, "measured": torch.stack(measured)} if measured else found


# --- choosing ---


def tune(context: Context, task: Task, rule: Rule, seconds: Sequence[float] | None = None) -> Finals:
    """Hyper-parameters by the training loss of search runs, whose seeds are not the finals'.

    All of the grid is run with one seed. Then, in the order of that loss, with two more, until the lowest mean of three
    is below what is left: what went well by luck, close to divergence, is not chosen.

    Args:
        seconds: values of damping (or momentum) to choose from, where not all of the rule's.
    """
    grid = list(itertools.product(rule.lrs, seconds or rule.seconds or (0.0,)))

    def loss(pair: tuple[float, float], seed: int) -> float:
        return train(context, task, rule, rule.lr(*pair), pair[1], seed, "search")["loss"][-1].item()

    first = {pair: loss(pair, SEARCH_SEED) for pair in grid}
    losses: dict[tuple[float, float], float] = {}
    for pair in sorted(first, key=first.__getitem__):
        if losses and min(losses.values()) <= first[pair]:
            break
        losses[pair] = statistics.mean([first[pair], *(loss(pair, seed) for seed in MORE_SEEDS)])
    best = min(losses, key=losses.__getitem__)
    lr, second = rule.lr(*best), best[1]
    edges = []
    for name, value, shown, values in zip(("lr", rule.second), best, (lr, second), map(sorted, map(set, zip(*grid)))):
        if name != "momentum" and len(values) > 1 and value in (values[0], values[-1]):
            edges.append(f"{name} {shown:.2g} is the {'lowest' if value == values[0] else 'highest'} tried")
    if not math.isfinite(losses[best]):
        edges = ["all that was tried diverged"]
    return Finals(rule, lr, second, [], tuple(edges))


def finish(
    context: Context,
    task: Task,
    chosen: Finals,
    measure: Callable[[torch.optim.Optimizer], Tensor] | None = None,
) -> Finals:
    """The final runs of a rule whose hyper-parameters are chosen."""
    for words in chosen.edges:
        context.say(f"{chosen.rule.title} on {task.data.name}: {words}")
    seeds = range(context.seeds)
    runs = [train(context, task, chosen.rule, chosen.lr, chosen.second, seed, "final", measure) for seed in seeds]
    return replace(chosen, runs=runs)


def tuned(context: Context, task: Task, rules: Sequence[Rule]) -> dict[str, Finals]:
    """Each rule at its best hyper-parameters, by title."""
    return {rule.title: finish(context, task, tune(context, task, rule)) for rule in rules}


def by_damping(
    context: Context,
    task: Task,
    rule: Rule,
    measure: Callable[[torch.optim.Optimizer], Tensor] | None = None,
) -> dict[float, Finals]:
    """A rule at each of its dampings, with the best lr for each."""
    return {d: finish(context, task, tune(context, task, rule, (d,)), measure) for d in rule.seconds}


def factor(above: Finals, below: Finals) -> tuple[float, float]:
    """How many times higher one training loss is than another, over pairs of seeds: the log of it, and its error."""
    if not all(map(math.isfinite, below.losses)):
        return -math.inf, math.nan
    if not all(map(math.isfinite, above.losses)):
        return math.inf, math.nan
    return mean_and_error([math.log(a / b) for a, b in zip(above.losses, below.losses)])


# --- time ---


def step_times(context: Context, task: Task, rules: Mapping[str, Rule], rounds: int) -> dict[str, float]:
    """Median seconds of a step of each rule, all of them taking turns; from the run's folder where it is there."""
    key = f"time-{task.key}-{'-'.join(rules)}-rounds{rounds}".replace(" ", "")
    found = context.once(key, partial(_times, context, task, rules, rounds))
    return {name: value.item() for name, value in found.items()}


def _times(context: Context, task: Task, rules: Mapping[str, Rule], rounds: int) -> dict[str, Tensor]:
    x, y = task.data.train_x.to(context.device), task.data.train_y.to(context.device)
    models = {name: task.model(0).to(context.device) for name in rules}
    optimizers: dict[str, Any] = {
        name: rule.build(models[name], 1e-4, (rule.seconds or (0.0,))[-1], 0) for name, rule in rules.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in rules}
    batch, generator = task.batch or len(x), torch.Generator().manual_seed(0)
    for step in range(rounds):
        chosen, apart = (torch.randperm(len(x), generator=generator)[:batch] for _ in range(2))
        for name, rule in rules.items():
            _wait(context.device)
            start = time.perf_counter()
            optimizers[name].zero_grad()
            if rule.observes(step):
                optimizers[name].observe(models[name](x[apart[: rule.fisher]]))
            F.cross_entropy(models[name](x[chosen]), y[chosen]).backward()
            optimizers[name].step()
            _wait(context.device)
            seconds[name].append(time.perf_counter() - start)
    return {name: torch.tensor(statistics.median(values)) for name, values in seconds.items()}


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


# --- similarity ---


def similarities(optimizer: torch.optim.Optimizer, dampings: Sequence[float]) -> Tensor:
    """Cosines of KFAC's updates to FOOF's with KFAC's damping of inputs, averaged over layers: (2, dampings).

    The first row is for damped factors, the second for a damped product. All are functions of KFAC's averages and of
    the gradients that are there, computed where both factors are diagonal.
    """
    assert isinstance(optimizer, optim.KFAC)
    rows = [_similarity(optimizer, layer, dampings) for layer in optimizer.layers]
    return torch.stack(rows).mean(0)


def _similarity(optimizer: optim.KFAC, layer: Layer, dampings: Sequence[float]) -> Tensor:
    entry, group = optimizer.state[layer.owner], optimizer.param_groups[0]
    values, turned = {}, layer.matrix()[0]
    for side in ("input", "error"):
        flush(entry, side)
        values[side], basis = torch.linalg.eigh(entry[f"{side}_moment"][0])
        turned = turned @ basis if side == "input" else basis.T @ turned
    inputs, errors = values["input"].clamp(min=0)[None], values["error"].clamp(min=0)[:, None]
    cosines = []
    for damping in dampings:
        parts = optimizer.dampings(layer, entry, {**group, "damping": damping})
        foof = turned / (inputs + parts["input"])
        for update in (foof / (errors + parts["error"]), turned / (inputs * errors + damping)):
            cosines.append(F.cosine_similarity(update.flatten(), foof.flatten(), dim=0))
    return torch.stack(cosines).view(-1, 2).T.double().cpu()
