"""Training runs for Khan and Rue 2023: one schedule, two hyper-parameters chosen by validation loss, paired seeds."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesgrad import metrics, optim
from bayesgrad.posterior import mc_dropout
from bayesgrad_lab import networks
from bayesgrad_lab.dataset import Dataset
from bayesgrad_lab.runner import Trial, augmented, drawn
from bayesgrad_lab.study import Context, mean_and_error

AT_ONCE = 2500  # examples of a prediction
STATISTICS = 1000  # training examples that BatchNorm's statistics are estimated from, for each draw
SHARPNESS = 10.0  # normalised outputs are of size one, too soft for a softmax
SEARCH_SEED = 1000  # finals count from 0
MEMBERS = 2000  # where the seeds of an ensemble's further members begin


@dataclass(frozen=True)
class Task:
    """What is trained and for how long.

    Args:
        outside: images (n, ...) of another kind than those of `data`, which a model should be uncertain about.
        widths: of the hidden layers of a multilayer perceptron; None for a ResNet of three blocks.
        decay: the strength of L2 regularisation where a method does not search for it.
        samples: draws that a prediction averages.
        binary: a perceptron for weights that are -1 or 1: no biases, and BatchNorm without weights of its own.
        judge: the validation score that hyper-parameters are chosen by.
        channels: of the ResNet's first block.
        seeds: of the finals, at most, where runs take long.
        origin: of the outside images, for people.
    """

    data: Dataset
    outside: Tensor
    widths: tuple[int, ...] | None
    epochs: int
    batch: int = 128
    decay: float = 1e-4
    samples: int = 32
    augment: bool = False
    binary: bool = False
    judge: str = "nll"
    channels: int = 16
    seeds: int | None = None
    origin: str = "another kind"

    @property
    def key(self) -> str:
        kind = "binary" if self.binary else "mlp"
        network = f"resnet-{self.channels}" if self.widths is None else "-".join(map(str, (kind, *self.widths)))
        apart = "-" if self.data.name[-1].isdigit() else ""
        return f"{self.data.name}{apart}{len(self.data.train_x)}-{network}-epochs{self.epochs}"

    def model(self, seed: int, drop: float = 0.0) -> nn.Module:
        """The network, its weights a function of the seed.

        With dropout before every layer of a perceptron but the first; in a ResNet, between the two convolutions of each
        block (Zagoruyko and Komodakis, 2016) and before the last layer.
        """
        dropout = [nn.Dropout(drop)] if drop else []
        if self.widths is None:
            return self._resnet(seed, dropout)
        sizes = (math.prod(self.data.train_x.shape[1:]), *self.widths)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.binary:
                pairs = list(itertools.pairwise((*sizes, self.data.classes)))
                blocks = [[nn.Linear(*p, bias=False), nn.BatchNorm1d(p[1], affine=False), nn.ReLU()] for p in pairs]
                return nn.Sequential(nn.Flatten(), *itertools.chain(*blocks[:-1]), *blocks[-1][:2], Times())
            hidden = [part for pair in itertools.pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU(), *dropout)]
            return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(sizes[-1], self.data.classes))

    def _resnet(self, seed: int, dropout: Sequence[nn.Module]) -> nn.Module:
        _, colours, height, _ = self.data.train_x.shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: Any = networks.ResNet(colours, self.data.classes, (1, 1, 1), self.channels, 1 + (height >= 28))
        for block in model.layers if dropout else ():
            block.second = nn.Sequential(*dropout, block.second)
        model.out = nn.Sequential(*dropout, model.out)
        return model

    def protocol(self, pairs: int, seeds: int) -> str:
        """How the task was measured, for people."""
        network = ""
        if self.widths is None:
            count = sum(p.numel() for p in self.model(0).parameters())
            network = (
                f"a ResNet of three blocks, {self.channels} to {4 * self.channels} channels, {count:,} weights, with "
                f"BatchNorm, whose statistics are estimated again from {STATISTICS} training images: once at the mean, "
                "for each draw of weights, and once under dropout's masks; "
            )
        return (
            f"{len(self.data.train_x):,} images, {self.epochs} epochs, batches of {self.batch}, cosine schedule; "
            f"{network}lr and a second hyper-parameter (weight decay, dropout rate or hess_init) chosen by the "
            f"validation NLL of averaged predictions, {pairs} pairs for each method, 20 % held out, with a separate "
            f"seed; {seeds} seed{'s' * (seeds > 1)}; {self.samples} draws; prior precision = {self.decay:g} x images; "
            f"{len(self.data.test_x):,} test images; AUROC against {len(self.outside):,} images of {self.origin}"
        )


class Times(nn.Module):
    """Multiplies by `SHARPNESS`."""

    def forward(self, x: Tensor) -> Tensor:
        return SHARPNESS * x


@dataclass(frozen=True)
class Method:
    """A way to train and to predict, and the values that a search may choose from: as many for each method.

    Args:
        lrs: where the schedule begins.
        second: what `seconds` are values of: weight_decay, drop, hess_init or relaxation.
        options: all else that the optimizer is built with.
        members: networks that a prediction averages over.
    """

    title: str
    kind: str
    lrs: tuple[float, ...]
    second: str
    seconds: tuple[float, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    members: int = 1

    @property
    def searched(self) -> str:
        """The predictions that a search looks at: those the method is for."""
        return "drawn" if self.kind in ("dropout", "ogn", "vogn", "ivon") else "mean"

    @property
    def ways(self) -> tuple[str, ...]:
        return ("mean",) if self.kind in ("adam", "ste") else ("mean", "drawn")

    def build(self, model: nn.Module, task: Task, lr: float, second: float, seed: int) -> torch.optim.Optimizer:
        if self.kind in ("adam", "dropout"):
            decay = second if self.kind == "adam" else task.decay
            return torch.optim.Adam(model.parameters(), lr=lr, weight_decay=decay, **self.options)
        if self.kind == "ste":
            return optim.STE(model.parameters(), lr=lr, weight_decay=second, **self.options)
        if self.kind == "bayesbinn":
            count = len(task.data.train_x)
            return optim.BayesBiNN(
                model.parameters(), lr=lr, num_data=count, relaxation=second, seed=seed, **self.options
            )
        make: Any = {"ogn": optim.OGN, "vogn": optim.VOGN, "ivon": optim.IVON}[self.kind]
        count = len(task.data.train_x)
        return make(
            model.parameters() if self.kind == "ivon" else model,
            lr=lr,
            num_data=count,
            prior_precision=task.decay * count,
            hess_init=second,
            seed=seed,
            **self.options,
        )


VARIATIONAL = {"fused": True}  # the same numbers as without, in less time
METHODS = (
    Method("Adam", "adam", (3e-4, 1e-3, 3e-3, 1e-2), "weight_decay", (1e-4, 1e-3)),
    Method("MC dropout", "dropout", (3e-4, 1e-3, 3e-3, 1e-2), "drop", (0.1, 0.3)),
    Method("OGN", "ogn", (0.03, 0.1, 0.3, 1.0), "hess_init", (0.3, 1.0), VARIATIONAL),
    Method("VOGN", "vogn", (0.03, 0.1, 0.3, 1.0), "hess_init", (0.3, 1.0), VARIATIONAL),
    Method("IVON", "ivon", (0.1, 0.3, 1.0, 3.0), "hess_init", (0.3, 1.0), {"betas": (0.9, 0.9995), **VARIATIONAL}),
)
BINARY = (
    Method("STE", "ste", (0.01, 0.03, 0.1, 0.3, 1.0), "weight_decay", (0.0, 0.01)),
    Method("BayesBiNN", "bayesbinn", (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), "relaxation", (0.3, 1.0), VARIATIONAL),
)


# --- one run ---


def fit(
    context: Context,
    trial: Trial,
    model: nn.Module,
    optimizer: Any,
    x: Tensor,
    y: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> Tensor:
    """Trains by a cosine schedule from the optimizer's lr to zero, at draws where it has them.

    Returns:
        The seconds of each epoch, of processor time on a CPU, so that other processes do not count.
    """
    batches = -(-len(x) // trial.batch_size)
    if context.expect:
        context.expect(trial, trial.epochs, batches)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, trial.epochs * batches))
    order, seconds = torch.Generator().manual_seed(trial.seed), []
    clock = time.process_time if context.device == "cpu" else time.perf_counter
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(trial.seed)  # of dropout's masks
        model.train()
        for epoch in range(trial.epochs):
            start = clock()
            for step, chosen in enumerate(torch.randperm(len(x), generator=order).split(trial.batch_size), 1):
                inputs = augmented(x[chosen], order) if trial.augment else x[chosen]
                optimizer.zero_grad()
                with drawn([optimizer]):
                    value = loss(model(inputs.to(context.device)), y[chosen].to(context.device))
                    if not math.isfinite(value.item()):
                        return torch.full((trial.epochs,), math.nan)
                    value.backward()
                optimizer.step()
                schedule.step()
                if context.progress and (step % 10 == 0 or step == batches):
                    rate = step / (clock() - start)
                    context.progress(trial, epoch, step, value.item(), math.nan, rate)
            seconds.append(clock() - start)
    return torch.tensor(seconds, dtype=torch.float64)


def in_batches(predict: Callable[[Tensor], Tensor], x: Tensor, device: str) -> Tensor:
    """Predictions of many examples, on the CPU."""
    return torch.cat([predict(part.to(device)).cpu() for part in x.split(AT_ONCE)])


def run(context: Context, task: Task, method: Method, lr: float, second: float, seed: int, final: bool) -> dict:
    """One run, from the run's folder where it is there: probabilities of test and outside images, and times.

    Probabilities are at the mean (`mean`, `mean_outside`), and averaged over draws (`drawn`, `drawn_outside`) where the
    method has them.
    """
    purpose = "final" if final else "search"
    key = f"{purpose}-{task.key}-{method.kind}-lr{lr:g}-{method.second}{second:g}-seed{seed}"
    return context.once(key, partial(_run, context, task, method, lr, second, seed, final))


def _run(context: Context, task: Task, method: Method, lr: float, second: float, seed: int, final: bool) -> dict:
    model = task.model(seed, second if method.second == "drop" else 0.0).to(context.device)
    optimizer: Any = method.build(model, task, lr, second, seed)
    label = f"{method.kind} {method.second} {second:g}"
    purpose = "final" if final else "search"
    trial = Trial(task.key, label, lr, seed, task.epochs, task.batch, augment=task.augment, purpose=purpose)
    with context.hearing():
        seconds = fit(context, trial, model, optimizer, task.data.train_x, task.data.train_y)
    if not torch.isfinite(seconds).all():
        return {"seconds": seconds}
    ways = predictions(task, method, model, optimizer, context.device)
    found = {"seconds": seconds}
    with torch.no_grad():
        for name, predict in ways.items():
            found[name] = in_batches(predict, task.data.test_x, context.device)
            if final:
                found[f"{name}_outside"] = in_batches(predict, task.outside, context.device)
    return found


def predictions(
    task: Task, method: Method, model: nn.Module, optimizer: Any, device: str
) -> dict[str, Callable[[Tensor], Tensor]]:
    """Functions from inputs to probabilities: at the mean (the most probable weights, if binary), and over draws."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    statistics = task.data.train_x[:STATISTICS].to(device) if norms else None
    for norm in norms:  # at the weights that are left, not at those that were drawn in training
        norm.reset_running_stats()
        norm.momentum = None
    if statistics is not None:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # of dropout's masks
            model.train()(statistics)
    model.eval()
    ways: dict[str, Callable[[Tensor], Tensor]] = {"mean": lambda x: model(x).softmax(-1)}
    if "drawn" in method.ways:
        posterior = mc_dropout(model) if method.kind == "dropout" else optimizer.posterior(model)
        given = None if method.kind == "dropout" else statistics
        ways["drawn"] = lambda x: posterior.predict(x, samples=task.samples, statistics=given)
    return ways


# --- scores ---


def scores(found: Mapping[str, Tensor], way: str, task: Task) -> dict[str, float]:
    """All that a run is judged by, from its probabilities."""
    names = ("error", "nll", "ece", "brier", "auroc maximum", "auroc entropy", "seconds")
    if way not in found or not torch.isfinite(found[way]).all():
        return dict.fromkeys(names, math.nan)
    p = found[way]
    values = metrics.classification(p.clamp(min=1e-12).log(), task.data.test_y)
    if f"{way}_outside" in found:
        outside = found[f"{way}_outside"]
        values["auroc maximum"] = metrics.auroc(-p.max(1).values, -outside.max(1).values)
        values["auroc entropy"] = metrics.auroc(metrics.entropy(p), metrics.entropy(outside))
    values["seconds"] = found["seconds"].median().item()
    return values


def like(images: Tensor, own: Tensor, target: Tensor) -> Tensor:
    """Images that were scaled as `own` were, as `target` is: in its scale, its size and its number of channels.

    Both hold pixels from black to white. Smaller images get a black border, and grey ones three equal channels.
    """

    def ends(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.amin((0, 2, 3), keepdim=True), x.amax((0, 2, 3), keepdim=True)

    (low, high), (black, white) = ends(own), ends(target)
    down, across = (t - i for t, i in zip(target.shape[2:], images.shape[2:]))
    border = (across // 2, across - across // 2, down // 2, down - down // 2)
    return black + F.pad((images - low) / (high - low), border) * (white - black)


# --- searches and finals ---


@dataclass(frozen=True)
class Finals:
    """A method at chosen hyper-parameters: scores for each seed, and what was tried."""

    method: Method
    way: str
    lr: float
    second: float
    scores: list[dict[str, float]]
    tried: Mapping[tuple[float, float], float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        if len(self.method.ways) == 1:
            return self.method.title
        at = "most probable" if self.method.kind == "bayesbinn" else "at the mean"
        return f"{self.method.title}, {at if self.way == 'mean' else 'draws'}"

    def mean(self, name: str) -> tuple[float, float]:
        return mean_and_error([row[name] for row in self.scores])

    def less(self, other: Finals, name: str) -> tuple[float, float]:
        """Mean and standard error, over paired seeds, of this score less the other's."""
        return mean_and_error([a[name] - b[name] for a, b in zip(self.scores, other.scores)])


def tune(context: Context, task: Task, method: Method) -> dict[tuple[float, float], float]:
    """The validation score of all pairs of hyper-parameters, of predictions as the method makes them."""
    held = replace(task, data=task.data.validation())
    tried = {}
    for lr, second in itertools.product(method.lrs, method.seconds):
        found = run(context, held, method, lr, second, SEARCH_SEED, False)
        value = scores(found, method.searched, held)[task.judge]
        tried[lr, second] = value if math.isfinite(value) else math.inf
    return tried


def finals(context: Context, task: Task, method: Method) -> list[Finals]:
    """The method at its best pair, for all seeds: predictions at the mean, and averaged ones."""
    tried = tune(context, task, method)
    lr, second = min(tried, key=tried.__getitem__)
    edges = [
        n for n, v, every in (("lr", lr, method.lrs), (method.second, second, method.seconds)) if on_edge(v, every)
    ]
    if edges:
        context.say(f"{method.title}: {' and '.join(edges)} at the edge of the search ({lr:g}, {second:g})")
    runs = [run(context, task, method, lr, second, seed, True) for seed in range(context.seeds)]
    return [Finals(method, way, lr, second, [scores(r, way, task) for r in runs], tried) for way in method.ways]


def on_edge(value: float, every: Sequence[float]) -> bool:
    return len(every) > 2 and value in (min(every), max(every))


def ensemble(context: Context, task: Task, single: Finals, members: int) -> Finals:
    """For each seed, its network and further ones like it, whose probabilities are averaged."""
    rows = []
    for seed in range(context.seeds):
        seeds = (seed, *(MEMBERS + members * seed + i for i in range(1, members)))
        found = [run(context, task, single.method, single.lr, single.second, s, True) for s in seeds]
        if not all("mean" in one for one in found):
            rows.append(scores({}, "mean", task))
            continue
        joint = {name: torch.stack([one[name] for one in found]).mean(0) for name in ("mean", "mean_outside")}
        joint["seconds"] = torch.stack([one["seconds"] for one in found]).sum(0)
        rows.append(scores(joint, "mean", task))
    method = replace(single.method, title=f"Ensemble of {members}", members=members)
    return Finals(method, "mean", single.lr, single.second, rows)
