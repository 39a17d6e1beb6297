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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn import functional as F

from bayesgrad import laplace
from bayesgrad_lab.dataset import Dataset
from bayesgrad_lab.khan2023_training import (
    METHODS,
    SEARCH_SEED,
    Finals,
    Method,
    Task,
    fit,
    on_edge,
    run,
    scores,
    tune,
)
from bayesgrad_lab.runner import Trial
from bayesgrad_lab.study import Context, mean_and_error

ADAM = METHODS[0]
PRIORS = (1.0, 10.0, 100.0, 1e3, 1e4)
TEMPERATURES = tuple(10 ** (i / 2) for i in range(-6, 7))
LINKS = ("linear", "draws")
AT_ONCE = 2500  # images of a pass


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


def network(context: Context, task: Task, lr: float, decay: float, seed: int, final: bool) -> nn.Module:
    """Trained with Adam, or read from the run's folder."""
    model = task.model(seed).to(context.device)
    purpose = "final" if final else "search"

    def trained() -> dict[str, Tensor]:
        trial = Trial(task.key, "adam", lr, seed, task.epochs, task.batch, purpose=purpose)
        optimizer = ADAM.build(model, task, lr, decay, seed)
        seconds = fit(context, trial, model, optimizer, task.data.train_x, task.data.train_y)
        return {**{name: p.detach().cpu() for name, p in model.named_parameters()}, "seconds": seconds}

    found = context.once(f"network-{purpose}-{task.key}-lr{lr:g}-decay{decay:g}-seed{seed}", trained)
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


def in_parts(
    model: nn.Module, some: Sequence[Mapping[str, Tensor]], x: Tensor, temperature: float, link: str
) -> Tensor:
    """Probabilities (n, classes) of many images."""
    parts: Iterator[Tensor] = (averaged(model, some, part, (temperature,), link)[0] for part in x.split(AT_ONCE))
    return torch.cat([part.cpu() for part in parts])


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
        edges = [
            name
            for name, value, every in (("δ", self.prior, PRIORS), ("T", self.temperature, TEMPERATURES))
            if on_edge(value, every)
        ]
        return f"δ {self.prior:g}, T {self.temperature:.3g}{' (edge of the search)' if edges else ''}"


def choose(context: Context, task: Task, kind: Approximation, lr: float, decay: float) -> dict[str, Pair]:
    """For each link the pair with the lowest NLL on a fifth of the training images, of 65."""
    held = replace(task, data=task.data.validation())

    def tried() -> dict[str, Tensor]:
        model = network(context, held, lr, decay, SEARCH_SEED, False)
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


def softness(context: Context, task: Task, lr: float, decay: float) -> Pair:
    """What the logits of the network itself are best divided by (temperature scaling), by the same held-out images."""
    held = replace(task, data=task.data.validation())
    model = network(context, held, lr, decay, SEARCH_SEED, False)
    with torch.no_grad():
        logits = model(held.data.test_x.to(context.device)).cpu()
    divisors = [10 ** (i / 12) for i in range(-6, 13)]
    values = [nll((logits / t).softmax(-1), held.data.test_y) for t in divisors]
    best = min(range(len(values)), key=values.__getitem__)
    return Pair(math.nan, divisors[best], values[best])


# --- finals ---


@dataclass(frozen=True)
class Row:
    """One way to predict: its scores for each seed.

    Args:
        key: of the way, for whoever looks for it: structure, link and what it was tuned by.
        first: probabilities of test images, of the first seed.
    """

    title: str
    chosen: str
    key: tuple[str, ...]
    scores: list[dict[str, float]]
    first: Tensor | None = None

    def mean(self, name: str) -> tuple[float, float]:
        return mean_and_error([row[name] for row in self.scores])

    def less(self, other: Row, name: str) -> tuple[float, float]:
        """Mean and standard error, over paired seeds, of this score less the other's."""
        return mean_and_error([a[name] - b[name] for a, b in zip(self.scores, other.scores)])


def row_of(context: Context, task: Task, one: Finals) -> Row:
    """A method of Khan and Rue 2023 as a row among these."""
    first = run(context, task, one.method, one.lr, one.second, 0, True).get(one.way)
    words = f"lr {one.lr:g}, {one.method.second} {one.second:g}"
    return Row(one.title, words, (one.method.kind, one.way), one.scores, first)


def laplace_rows(context: Context, task: Task, kinds: Sequence[Approximation], adam: Method = ADAM) -> list[Row]:
    """Adam's network alone, with its temperature, and under each approximation, link and way of tuning."""
    tried = tune(context, task, adam)
    lr, decay = min(tried, key=tried.__getitem__)
    models = [network(context, task, lr, decay, seed, True) for seed in range(context.seeds)]
    soft = softness(context, task, lr, decay)
    logits = [{end: _logits(model, x, context.device) for end, x in _images(task).items()} for model in models]
    rows = []
    for way, divisor, title, words in (
        ("map", 1.0, "MAP", f"lr {lr:g}, weight decay {decay:g}"),
        ("soft", soft.temperature, "MAP, temperature", f"logits/{soft.temperature:.2g}"),
    ):
        alone = [{f"{way}{end}": (z / divisor).softmax(-1) for end, z in one.items()} for one in logits]
        rows.append(Row(title, words, (way,), [_scored(found, way, task) for found in alone], alone[0][way]))
    for kind in kinds:
        context.say(f"{task.key}: {kind.title}")
        pairs = choose(context, task, kind, lr, decay) if kind.searched else {}
        finals = []
        for seed, model in enumerate(models):
            compute = partial(_final, context, task, kind, model, pairs, seed)
            finals.append(context.once(f"laplace-{task.key}-{kind.structure}-seed{seed}", compute))
        prior = mean_and_error([found["prior"].item() for found in finals])[0]
        for tuned, link in itertools.product(("evidence", "held out") if kind.searched else ("evidence",), kind.links):
            words = pairs[link].words() if tuned == "held out" else f"δ {prior:.3g}"
            way, key = f"{link} {tuned}", (kind.structure, link, tuned)
            values = [_scored(found, way, task) for found in finals]
            rows.append(Row(f"{kind.title}, {link}, {tuned}", words, key, values, finals[0][way]))
    return rows


def _images(task: Task) -> dict[str, Tensor]:
    """The images that finals look at, by what is added to the names of their predictions."""
    return {"": task.data.test_x, "_outside": task.outside}


@torch.no_grad()
def _logits(model: nn.Module, x: Tensor, device: str) -> Tensor:
    return torch.cat([model(part.to(device)).cpu() for part in x.split(AT_ONCE)])


def _scored(found: Mapping[str, Tensor], way: str, task: Task) -> dict[str, float]:
    return scores({**found, "seconds": torch.zeros(1)}, way, task)


def _final(
    context: Context, task: Task, kind: Approximation, model: nn.Module, pairs: Mapping[str, Pair], seed: int
) -> dict[str, Tensor]:
    """Probabilities of test and outside images, for each way of tuning and link, and the prior with most evidence."""
    posterior = kind.posterior(model, task.data, seed)
    posterior.tune_prior()
    found = {"prior": torch.tensor(posterior.prior_precision, dtype=torch.float64)}
    some = steps(posterior, task.samples, seed)
    for link in kind.links:
        found |= _both(context, task, model, some, 1.0, link, "evidence")
    for link, pair in pairs.items():
        posterior.set_prior(pair.prior)
        some = steps(posterior, task.samples, seed)
        found |= _both(context, task, model, some, pair.temperature, link, "held out")
    return found


def _both(
    context: Context, task: Task, model: nn.Module, some: list, temperature: float, link: str, tuned: str
) -> dict[str, Tensor]:
    return {
        f"{link} {tuned}{end}": in_parts(model, some, x.to(context.device), temperature, link)
        for end, x in _images(task).items()
    }
