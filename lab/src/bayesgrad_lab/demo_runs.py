"""What the demonstration measures. Functions without an underscore are printed on its page, as they ran."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, interpolate, mse_loss
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

import bayesgrad
from bayesgrad.optim import IVON
from bayesgrad.samplers import Chains, Langevin
from bayesgrad_lab.context import Context, Trial
from bayesgrad_lab.dataset import Dataset
from bayesgrad_lab.nuts import nuts
from bayesgrad_lab.race import Protocol, Race
from bayesgrad_lab.race_entrants import ENTRANTS, at_defaults
from bayesgrad_lab.race_workloads import WORKLOADS
from bayesgrad_lab.task import shuffled

BATCH = 50
GAP = (-1.0, 1.0)  # of the inputs of a regression, where there are no data
FEATURES = "mean texture", "mean concave points"  # of scikit-learn's breast cancer data
RACERS = {"adamw": ENTRANTS["adamw"], "kfac": at_defaults("kfac", draws_labels=True)}


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Args:
        signals: of each class.
        epochs: of a classifier.
        fitting: steps of a regression.
        chains, walk, burn: of Langevin, at once, and their steps, with those that are left out.
        draws: of NUTS, after as many of warm-up.
        picture: pixels of its height.
    """

    signals: int = 500
    epochs: int = 30
    fitting: int = 2000
    chains: int = 50
    walk: int = 1200
    burn: int = 400
    draws: int = 1000
    picture: int = 128
    race: Protocol = field(default_factory=lambda: Protocol(limit=1.0, looks=20, budget=3.0))


SIZES = {"laptop": Size(), "smoke": Size(20, 1, 20, 3, 30, 10, 20, 16, Protocol(2, limit=1.0, looks=4, budget=0.04))}


# --- a classifier ---


def classifier(make: Callable[[Any], Any], x: Tensor, y: Tensor, inputs: Iterable[Tensor], epochs: int, seed: int):
    torch.manual_seed(seed)
    layers = nn.Linear(40, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)
    model = nn.Sequential(*layers)
    optimizer = make(model.parameters())  # AdamW(params, lr) or IVON(params, lr, num_data=len(x))
    schedule = CosineAnnealingLR(optimizer, epochs * math.ceil(len(x) / BATCH))
    sampled = getattr(optimizer, "sampled", nullcontext)
    for rows in shuffled(len(x), BATCH, torch.Generator().manual_seed(seed), epochs):
        with sampled():  # IVON draws weights from its belief
            optimizer.zero_grad()
            cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        schedule.step()
    if isinstance(optimizer, IVON):  # probabilities, averaged over 32 draws of the weights
        posterior = optimizer.posterior(model)
        return [posterior.predict(some, likelihood="categorical", seed=seed) for some in inputs]
    return [model(some).softmax(-1).detach() for some in inputs]


def _signals(context: Context) -> dict[str, Tensor]:
    """MNIST-1D: ten digits, and two kinds of signals by the same generator that are none: other shapes, and noise."""
    from mnist1d.data import get_dataset_args, get_templates, make_dataset

    def make() -> dict[str, Tensor]:
        digits, arguments = get_templates(), SimpleNamespace(**vars(get_dataset_args()))
        walks = np.random.default_rng(0).normal(size=(10, 12)).cumsum(1)
        walks -= walks[:, :1] + np.linspace(0, 1, 12) * (walks[:, -1:] - walks[:, :1])  # from 0 to 0, as digits
        shapes = np.concatenate([digits["x"], walks / walks.std(1, keepdims=True) / 6, np.zeros((1, 12))])
        arguments.num_samples, arguments.train_split = SIZES[context.scale].signals * len(shapes), 1.0
        made = make_dataset(arguments, {"x": shapes, "t": digits["t"], "y": np.arange(len(shapes))})
        return {"x": torch.tensor(made["x"], dtype=torch.float32), "y": torch.tensor(made["y"])}

    return context.once("signals", make)


def _parts(context: Context, final: bool) -> tuple[Dataset, list[Tensor]]:
    """Training data, and data to be scored: a fifth of all for tests, or a fifth of the rest for a search."""
    signals = _signals(context)
    x, y = signals["x"], signals["y"]
    digits, split = y < 10, int(0.8 * int((y < 10).sum()))
    digit_x, digit_y = x[digits], y[digits]
    parts = digit_x[:split], digit_y[:split], digit_x[split:], digit_y[split:]
    data = Dataset("mnist1d", *parts, 10, "table")
    data = data if final else data.validation()
    return data, [data.test_x, x[(y >= 10) & (y < 20)][: len(data.test_x)], x[y == 20]]


def _classifier(context: Context, trial: Trial) -> dict[str, Tensor]:
    (lr, second), seed = trial.settings.values(), trial.seed or 0
    data, inputs = _parts(context, trial.purpose == "final")

    def make(params: Any) -> Any:
        if trial.method == "adamw":
            return AdamW(params, lr=lr, weight_decay=second)
        return IVON(params, lr=lr, hess_init=second, num_data=len(data.train_x), seed=seed)

    start = time.process_time()
    found = classifier(make, data.train_x, data.train_y, inputs, SIZES[context.scale].epochs, seed)
    seconds = torch.tensor(time.process_time() - start)
    return {"inside": found[0], "shapes": found[1], "noise": found[2], "labels": data.test_y, "seconds": seconds}


# --- a regression ---


def regression_band(x: Tensor, y: Tensor, inputs: Tensor, steps: int, seed: int):
    torch.manual_seed(seed)
    layers = nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)
    model = nn.Sequential(*layers).double()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    schedule = CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
        schedule.step()
    posterior = bayesgrad.laplace(model, [(x, y)], likelihood="gaussian").tune_prior()
    lower, upper = posterior.interval(inputs, level=0.95)  # of new labels
    return model, lower, upper


def _regression_data(seed: int, count: int, inside: bool) -> tuple[Tensor, Tensor]:
    """Noisy values of a smooth function, at inputs on both sides of the gap, or in it."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(count, 1, generator=generator, dtype=torch.float64)
    low, high = GAP
    x = low + (high - low) * u if inside else torch.where(u < 0.5, -3 + 4 * u, high + 4 * (u - 0.5))
    return x, _truth(x) + 0.2 * torch.randn(x.shape, generator=generator, dtype=torch.float64)


def _truth(x: Tensor) -> Tensor:
    return (2 * x).sin() + 0.3 * x


def _band(context: Context, trial: Trial) -> dict[str, Tensor]:
    seed = trial.seed or 0
    x, y = _regression_data(seed, 100, False)
    tests = [_regression_data(1000 + seed, 1000, inside) for inside in (False, True)]
    line = torch.linspace(-3.5, 3.5, 141, dtype=torch.float64)[:, None]
    every = torch.cat([line, *(some for some, _ in tests)])
    model, lower, upper = regression_band(x, y, every, SIZES[context.scale].fitting, seed)
    with torch.no_grad():
        mean, error = model(every), 1.96 * (model(x) - y).square().mean().sqrt()  # of a network without a posterior
    labels = torch.cat([_truth(line), *(some for _, some in tests)])
    columns = torch.cat([every, labels, mean, lower, upper, mean - error, mean + error], 1)
    parts = columns.split([len(line), 1000, 1000])
    return {"line": parts[0], "data": parts[1], "gap": parts[2], "train": torch.cat([x, y], 1)}


# --- a race ---


def race_curve(context: Context, optimizer: str, data: Dataset, name: str, setting: Mapping[str, float], seed: int):
    workload = replace(WORKLOADS["picture"], name=name, sizes=((64, 128), (8, 16)), batch=512)
    task = workload.task_of(data, context.scale == "smoke")  # colours of pixels by position
    protocol = SIZES[context.scale].race  # the seconds of a run, in which its schedule is laid out
    race = Race(context, protocol, workload, RACERS[optimizer], task)
    return race.run(setting, seed, target=-math.inf)  # seconds, steps and loss, 20 times in a run


def _pixels(context: Context) -> Dataset:
    """The colours of the pixels of scikit-learn's photograph of a temple, by position; a fifth are for tests."""
    from sklearn.datasets import load_sample_image

    height = SIZES[context.scale].picture
    image = torch.tensor(load_sample_image("china.jpg")).permute(2, 0, 1)[None].float()
    image = interpolate(image, (height, height * 3 // 2), mode="area")[0]
    colours = ((image - image.mean()) / image.std()).permute(1, 2, 0).flatten(0, 1)
    places = torch.cartesian_prod(torch.linspace(0, 1, height), torch.linspace(0, 1, height * 3 // 2))
    return Dataset("temple", places, colours, places[:0], colours[:0], 0, "table").held_out(0.2, 0)


def _race(context: Context, trial: Trial) -> dict[str, Tensor]:
    data = _pixels(context)
    data, name = data if trial.purpose == "final" else data.validation(), f"{trial.purpose}-picture"
    return {"curve": race_curve(context, trial.method, data, name, trial.settings, trial.seed or 0)}


# --- samples ---


def langevin_samples(x: Tensor, y: Tensor, chains: int, steps: int, burn: int, seed: int):
    model = Chains(nn.Linear(x.shape[1], 1).double(), chains, spread=1.0, seed=seed)
    sampler = Langevin(model, lr=1.0, num_data=len(x), prior_precision=1.0, metric="identity", seed=seed)
    samples = []
    for _ in range(steps):
        sampler.zero_grad()
        model.loss(model(x), y, binary_cross_entropy_with_logits).backward()
        sampler.step()
        weights = model.weights()
        samples.append(torch.cat([weights["weight"].flatten(1), weights["bias"]], 1).clone())
    return torch.stack(samples[burn:], 1)  # (chains, samples, weights)


def _patients() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_breast_cancer

    found: Any = load_breast_cancer()
    names = list(found.feature_names)
    x = torch.tensor(found.data[:, [names.index(name) for name in FEATURES]])
    return (x - x.mean(0)) / x.std(0), torch.tensor(found.target, dtype=torch.float64)[:, None]


def _samples(context: Context, trial: Trial) -> dict[str, Tensor]:
    size, seed = SIZES[context.scale], trial.seed or 0
    (x, y), start = _patients(), time.process_time()
    if trial.method == "langevin":
        found = langevin_samples(x, y, size.chains, size.walk, size.burn, seed)
        gradients = size.chains * size.walk
    else:
        X, labels = np.c_[x.numpy(), np.ones(len(x))], y.numpy()[:, 0]

        def density(w: np.ndarray) -> tuple[float, np.ndarray]:
            z = X @ w
            log = labels @ z - np.logaddexp(0, z).sum() - w @ w / 2
            return float(log), X.T @ (labels - 1 / (1 + np.exp(-z))) - w

        kept, gradients = nuts(density, np.zeros(X.shape[1]), size.draws, size.draws, seed)
        found = torch.tensor(kept)[None]
    cost = torch.tensor([gradients, time.process_time() - start], dtype=torch.float64)
    return {"samples": found, "cost": cost}


_COMPUTED: dict[str, Callable[[Context, Trial], dict[str, Tensor]]] = {
    "classifier": _classifier,
    "band": _band,
    "race": _race,
    "samples": _samples,
}  # by Trial.task


def measured(context: Context, trial: Trial) -> dict[str, Tensor]:
    """What a trial measures, from the run's folder where it is there."""
    return context.once(trial, lambda: _COMPUTED[trial.task](context, trial))
