"""Laplace's method on classifiers: networks trained once, posteriors around them, and what these predict.

A posterior has a prior precision δ and a temperature T: its covariance is T (H + δ)^-1. With "evidence", δ has the most
evidence and T is one; "held out", the pair is the one with the lowest NLL on images that the network of the search has
not seen, and the same for all finals. Predictions average the softmax over draws of weights: of the network itself
("draws") or of the network linearised at its weights ("linear").
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn import functional as F

from bayesgrad import laplace, metrics, plots
from bayesgrad_lab import figures
from bayesgrad_lab import khan2023_runs as runs
from bayesgrad_lab.context import Context, Trial
from bayesgrad_lab.dataset import Dataset
from bayesgrad_lab.methods import Method
from bayesgrad_lab.report import Report
from bayesgrad_lab.results import Results, mean_and_error
from bayesgrad_lab.studies import SEARCH_SEED, Setting, edges, grid
from bayesgrad_lab.task import Task
from bayesgrad_lab.training import epoch_seconds, fit, in_batches

PRIORS = (1.0, 10.0, 100.0, 1e3, 1e4)
TEMPERATURES = tuple(10 ** (i / 2) for i in range(-6, 7))
DIVISORS = tuple(10 ** (i / 12) for i in range(-6, 13))  # of logits
LINKS = ("linear", "draws")
COLUMNS = ("error", "nll", "ece", "auroc entropy")


@dataclass(frozen=True)
class Approximation:
    """A kind of posterior.

    Args:
        structure: of `bayesgrad.laplace`, or "peer" for laplace-torch's Kronecker factors.
        options: further arguments of `bayesgrad.laplace`.
        links: how predictions are made.
    """

    title: str
    structure: str
    options: Mapping[str, Any] = field(default_factory=dict)
    links: tuple[str, ...] = LINKS

    @property
    def searched(self) -> bool:
        """Whether there is a choice by held-out images too."""
        return self.structure != "peer"

    def posterior(self, model: nn.Module, data: Dataset, seed: int) -> Any:
        batches = list(zip(data.train_x.split(500), data.train_y.split(500)))
        if self.structure == "peer":
            return Peer(model, batches)
        options = dict(self.options)
        if "subsample" in options:
            options["subsample"] = min(options["subsample"], len(data.train_x))
        return laplace(
            model, batches, likelihood="categorical", structure=self.structure, seed=seed, progress=False, **options
        )


class Peer:
    """laplace-torch's Kronecker-factored posterior, as far as it is needed here: its own evidence, its own draws."""

    def __init__(self, model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        peer = peer_package()
        if peer is None:
            raise ImportError("laplace-torch is not installed: pip install laplace-torch.")

        class Loader(list):
            dataset = range(sum(len(y) for _, y in batches))

        kind = dict(subset_of_weights="all", hessian_structure="kron", backend=peer.curvature.CurvlinopsGGN)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own
            self.inner = peer.Laplace(model, "classification", **kind)
            self.inner.fit(Loader(batches))
        self.mean = {name: p.detach() for name, p in model.named_parameters()}

    @property
    def prior_precision(self) -> float:
        return float(self.inner.prior_precision)

    def tune_prior(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.inner.optimize_prior_precision(method="marglik")

    def sample(self, n: int, seed: int) -> dict[str, Tensor]:
        flat = self.inner.sample(n, generator=torch.Generator().manual_seed(seed)).detach()
        parts = flat.split([weight.numel() for weight in self.mean.values()], 1)
        return {name: part.view(n, *weight.shape) for part, (name, weight) in zip(parts, self.mean.items())}


def peer_package() -> Any:
    """laplace-torch, where it is installed."""
    from importlib import import_module

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own
            found = import_module("laplace")
    except ImportError:
        return None
    return found if hasattr(found, "curvature") else None


# --- networks ---


def task_of(context: Context) -> tuple[Task, str]:
    """Fashion-MNIST, or digits, at a scale, and where the outside images are from."""
    if context.scale == "smoke":
        data = context.load("digits", 150)
        return runs.classifier(data, runs.scrambled(data)[:30], (8,), 3, 32, samples=3), "scrambled digits"
    images, other = context.load("fashion-mnist"), context.load("mnist")
    foreign = runs.like(other.test_x, other.train_x, images.train_x)
    if context.scale == "paper":
        return runs.classifier(images, foreign, (400, 400), 50, samples=100), "mnist"
    few = replace(images.part(10_000), test_x=images.test_x[:5000], test_y=images.test_y[:5000])
    return runs.classifier(few, foreign[:5000], (100, 100), 15, samples=24), "mnist"


def network(context: Context, task: Task, setting: Setting, seed: int, purpose: str = "final") -> nn.Module:
    """Trained with Adam, or read from the run's folder."""
    model, (lr, decay) = task.model(seed).to(context.device), setting
    trial = Trial(f"network-{purpose}", task.key, "", {"lr": lr, "decay": decay}, seed)

    def trained() -> dict[str, Tensor]:
        seconds = epoch_seconds(fit(context, trial, task, model, runs.ADAM.build(model, task, lr, seed, decay)), task)
        return {**{name: p.detach().cpu() for name, p in model.named_parameters()}, "seconds": seconds}

    found = context.once(trial, trained)
    model.load_state_dict({name: value for name, value in found.items() if name != "seconds"})
    model.eval()
    return model


# --- predictions ---


def linearised(model: nn.Module, step: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """The model's outputs, and their derivative in the direction of a step of its weights."""
    mean = {name: p.detach() for name, p in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when it first differentiates forwards
        found: Any = jvp(lambda weights: functional_call(model, weights, (x,)), (mean,), (dict(step),))
    return found[0], found[1]


@torch.no_grad()
def averaged(
    model: nn.Module, steps: Sequence[Mapping[str, Tensor]], x: Tensor, temperatures: Sequence[float], link: str
) -> Tensor:
    """Probabilities (temperatures, n, classes), averaged over steps away from the model's weights.

    Args:
        steps: name -> step, for each draw.
        link: "linear" for the network's linearisation, else the network itself.
    """
    mean = {name: p.detach() for name, p in model.named_parameters()}
    total = 0.0
    for step in steps:
        if link == "linear":
            centre, slope = linearised(model, step, x)
            outputs = [centre + t**0.5 * slope for t in temperatures]
        else:
            moved = [{name: mean[name] + t**0.5 * step[name] for name in mean} for t in temperatures]
            outputs = [functional_call(model, weights, (x,)) for weights in moved]
        total = total + torch.stack(outputs).softmax(-1)
    return total / len(steps)  # pyright: ignore[reportReturnType]


def steps(posterior: Any, samples: int, seed: int) -> list[dict[str, Tensor]]:
    """Draws less the mean."""
    drawn, mean = posterior.sample(samples, seed=seed), posterior.mean
    away = {name: (drawn[name] - mean[name]).to(torch.float32) for name in mean}
    return [{name: value[k] for name, value in away.items()} for k in range(samples)]


def nll(p: Tensor, labels: Tensor) -> float:
    value = F.nll_loss(p.double().clamp(min=1e-12).log(), labels).item()
    return value if math.isfinite(value) else math.inf


# --- searches ---


@dataclass(frozen=True)
class Pair:
    """A prior precision and a temperature, and the held-out NLL that they were chosen by."""

    prior: float
    temperature: float
    value: float

    def words(self) -> str:
        at_edge = edges(grid(PRIORS, TEMPERATURES), (self.prior, self.temperature))
        return f"δ {self.prior:g}, T {self.temperature:.3g}{' (edge of the search)' if at_edge else ''}"


def choose(context: Context, task: Task, kind: Approximation, setting: Setting) -> dict[str, Pair]:
    """For each link the pair with the lowest NLL on a fifth of the training images, of 65."""
    held = task.held_out

    def tried() -> dict[str, Tensor]:
        model = network(context, held, setting, SEARCH_SEED, "search")
        posterior = kind.posterior(model, held.data, SEARCH_SEED)
        x, found = held.data.test_x.to(context.device), {link: [] for link in kind.links}
        for prior in PRIORS:
            posterior.set_prior(prior)
            some = steps(posterior, task.samples, SEARCH_SEED)
            for link in kind.links:
                p = averaged(model, some, x, TEMPERATURES, link).cpu()
                found[link].append([nll(one, held.data.test_y) for one in p])
        return {link: torch.tensor(rows, dtype=torch.float64) for link, rows in found.items()}

    grids = context.once(f"held-out-{task.key}-{kind.structure}", tried)
    pairs = {}
    for link in kind.links:
        i, j = divmod(int(grids[link].argmin()), len(TEMPERATURES))
        pairs[link] = Pair(PRIORS[i], TEMPERATURES[j], grids[link][i, j].item())
    return pairs


def softness(context: Context, task: Task, setting: Setting) -> float:
    """What the logits of the network itself are best divided by (temperature scaling), by the same held-out images."""
    held = task.held_out
    model = network(context, held, setting, SEARCH_SEED, "search")
    with torch.no_grad():
        logits = model(held.data.test_x.to(context.device)).cpu()
    return min(DIVISORS, key=lambda t: nll((logits / t).softmax(-1), held.data.test_y))


# --- finals ---


def laplace_rows(
    context: Context, task: Task, kinds: Sequence[Approximation], adam: Method = runs.ADAM
) -> list[Results]:
    """Adam's network alone, with its temperature, and under each approximation, link and way of tuning."""
    setting, _ = runs.tune(context, task, adam)
    models = [network(context, task, setting, seed) for seed in range(context.seeds)]
    soft = softness(context, task, setting)
    logits = [predicted(context, task, model) for model in models]
    rows = []

    def add(title: str, words: str, key: tuple[str, ...], way: str, found: Sequence[Mapping[str, Tensor]]) -> None:
        values = [runs.scores(one, way, task) for one in found]
        rows.append(Results(title, values, of=runs.Prediction(key, words, found[0][way])))

    for way, divisor, title, words in (
        ("map", 1.0, "MAP", "lr {:g}, weight decay {:g}".format(*setting)),
        ("soft", soft, "MAP, temperature", f"logits/{soft:.2g}"),
    ):
        alone = [{f"{way}{end}": (z / divisor).softmax(-1) for end, z in one.items()} for one in logits]
        add(title, words, (way,), way, alone)
    for kind in kinds:
        context.say(f"{task.key}: {kind.title}")
        pairs = choose(context, task, kind, setting) if kind.searched else {}
        finals = []
        for seed, model in enumerate(models):
            compute = partial(_final, context, task, kind, model, pairs, seed)
            finals.append(context.once(f"laplace-{task.key}-{kind.structure}-seed{seed}", compute))
        prior = mean_and_error([found["prior"].item() for found in finals])[0]
        for tuned, link in itertools.product(("evidence", "held out") if kind.searched else ("evidence",), kind.links):
            words = pairs[link].words() if tuned == "held out" else f"δ {prior:.3g}"
            add(f"{kind.title}, {link}, {tuned}", words, (kind.structure, link, tuned), f"{link} {tuned}", finals)
    return rows


def predicted(context: Context, task: Task, predict: Callable[[Tensor], Tensor], name: str = "") -> dict[str, Tensor]:
    """Predictions of the test images and of those from outside."""
    images = {name: task.data.test_x, f"{name}_outside": task.outside}
    return {key: in_batches(predict, x, context.device, runs.AT_ONCE) for key, x in images.items()}


def _final(
    context: Context, task: Task, kind: Approximation, model: nn.Module, pairs: Mapping[str, Pair], seed: int
) -> dict[str, Tensor]:
    """Probabilities of test and outside images, for each way of tuning and link, and the prior with most evidence."""
    posterior = kind.posterior(model, task.data, seed)
    posterior.tune_prior()
    found = {"prior": torch.tensor(posterior.prior_precision, dtype=torch.float64)}

    def add(link: str, temperature: float, tuned: str) -> None:
        some = steps(posterior, task.samples, seed)
        found.update(
            predicted(context, task, lambda x: averaged(model, some, x, (temperature,), link)[0], f"{link} {tuned}")
        )

    for link in kind.links:
        add(link, 1.0, "evidence")
    for link, pair in pairs.items():
        posterior.set_prior(pair.prior)
        add(link, pair.temperature, "held out")
    return found


# --- reports ---


def protocol(context: Context, task: Task, origin: str, pairs: int = len(runs.ADAM.seeks)) -> str:
    """How networks and their posteriors were made and measured, for people."""
    weights = sum(p.numel() for p in task.model(0).parameters())
    return (
        f"{len(task.data.train_x):,} images, {task.epochs} epochs of Adam, batches of {task.batch}, cosine schedule; "
        f"a perceptron with hidden layers of {task.widths}, {weights:,} weights; lr and weight decay chosen by the "
        f"validation NLL of the network alone, {pairs} pairs, 20 % held out, with a separate seed; posteriors with the "
        "exact Fisher, one block for weight and bias; one prior precision δ by evidence, or δ and a temperature T, "
        "covariance T (H + δ)^-1, by held-out NLL around the search's network, of 65 pairs for each structure and "
        f"link; {task.samples} draws; linear: of the network linearised at its weights; {context.seeds} seeds; "
        f"{len(task.data.test_x):,} test images; AUROC of the entropy, against {len(task.outside):,} images of "
        f"{origin}"
    )


def add_classification(report: Report, context: Context, task: Task, rows: Sequence[Results]) -> None:
    """A table of all ways to predict, and a figure of those that were tuned by held-out images or not at all."""
    report.add_table(f"{task.key}, test data", **runs.score_table(rows, COLUMNS))
    report.draw(
        context.folder / "scores.png",
        figures.dots,
        runs.score_panels([row for row in rows if row.of.key[-1] != "evidence"], COLUMNS),
        caption=f"{task.key}: mean and standard error over seeds; priors by evidence are left out.",
    )


def add_reliability(report: Report, context: Context, task: Task, rows: Sequence[Results]) -> None:
    """A diagram for each of these ways to predict."""
    some = {row.title: row.of.first for row in rows if row.of.first is not None}
    bins = {title: metrics.reliability(first, task.data.test_y) for title, first in some.items()}
    words = "Accuracy against the confidence in the predicted class; seed 0."
    report.draw(context.folder / "reliability.png", plots.reliability, bins, caption=words)
