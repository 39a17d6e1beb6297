"""Regression data with fixed splits, and networks of one hidden layer trained on them.

Six data sets of the UCI repository with twenty splits each (Hernandez-Lobato and Adams, 2015; the files are those of
Gal and Ghahramani, 2016): data.txt, index_features.txt, index_target.txt, index_train_K.txt and index_test_K.txt in a
folder for each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bayesgrad import laplace, metrics, optim
from bayesgrad.likelihoods import Moments
from bayesgrad_lab.datasets import Files
from bayesgrad_lab.khan2023_training import fit
from bayesgrad_lab.names import unknown
from bayesgrad_lab.runner import Trial
from bayesgrad_lab.study import Context, mean_and_error

FOLDERS = {
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "power": "power-plant",
    "wine-red": "wine-quality-red",
    "yacht": "yacht",
}
SPLITS = 20
CLIP = 0.1  # of IVON's steps before lr: its Hessians are noisy, and whole Newton steps would diverge on some splits
SEARCHED = 0  # the split on whose training data hyper-parameters are chosen


# --- data ---


@dataclass(frozen=True)
class Split:
    """Training and test data, in float64, scaled to mean 0 and deviation 1 over the training part.

    Args:
        train_y, test_y: (n, 1).
        unit: what targets were divided by.
    """

    name: str
    number: int
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    unit: float

    @property
    def key(self) -> str:
        return f"{self.name}-split{self.number}"

    def validation(self, fraction: float = 0.2) -> Split:
        """A fifth of the training part in place of the test part, which is out of reach."""
        order = torch.randperm(len(self.train_x), generator=torch.Generator().manual_seed(self.number))
        held, kept = order[: int(fraction * len(order))], order[int(fraction * len(order)) :]
        x, y = self.train_x, self.train_y
        return replace(self, train_x=x[kept], train_y=y[kept], test_x=x[held], test_y=y[held])


def scaled(name: str, number: int, x: np.ndarray, y: np.ndarray, train: np.ndarray, test: np.ndarray) -> Split:
    inputs, targets = torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)[:, None]
    parts = []
    for values in (inputs, targets):
        mean, deviation = values[train].mean(0), values[train].std(0, correction=0)
        deviation = torch.where(deviation > 0, deviation, 1.0)  # of columns that are constant
        parts += [(values[train] - mean) / deviation, (values[test] - mean) / deviation, deviation]
    return Split(name, number, parts[0], parts[3], parts[1], parts[4], float(parts[5]))


def read(name: str, number: int, data_dir: str | None = None) -> Split:
    """Split `number` of a data set; of scikit-learn's diabetes data, which need no file, a random one.

    Raises:
        ValueError: a name that nobody has, or files that do not belong together.
        FileNotFoundError: a file that is not there.
    """
    if name == "diabetes":
        from sklearn.datasets import load_diabetes

        x, y = map(np.asarray, load_diabetes(return_X_y=True))
        order = np.random.default_rng(number).permutation(len(x))
        return scaled(name, number, x, y, order[len(x) // 10 :], order[: len(x) // 10])
    if name not in FOLDERS:
        raise unknown("regression data set", name, (*FOLDERS, "diabetes"))
    files = Files(f"uci_regression/{FOLDERS[name]}", data_dir, False)
    values = _table(files.need("data.txt"))
    names = ("features", "target", f"train_{number}", f"test_{number}")
    features, target, train, test = (_table(files.need(f"index_{n}.txt")).astype(int).ravel() for n in names)
    for what, index, count in (("columns", np.append(features, target), values.shape[1]), ("rows", train, len(values))):
        if index.min() < 0 or index.max() >= count:
            raise ValueError(f"{name}: the index files name {what} that data.txt does not have; get the files again.")
    if np.intersect1d(train, test).size or len(train) + len(test) != len(values):
        raise ValueError(f"{name}: training and test part of split {number} are no split; get the files again.")
    return scaled(name, number, values[:, features], values[:, target[0]], train, test)


def _table(path: Path) -> np.ndarray:
    try:
        values = np.loadtxt(path, ndmin=2)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is no table of numbers ({error}); get it again.") from error
    if not values.size or not np.isfinite(values).all():
        raise ValueError(f"{path} is damaged: it has no numbers, or some that are not finite; get it again.")
    return values


# --- methods ---


@dataclass(frozen=True)
class Setting:
    """How networks are trained, all alike.

    Args:
        steps: about so many, in whole epochs.
        samples: draws that a variational prediction averages.
        points: of the training data that make up a subsampled Fisher.
    """

    hidden: int = 50
    batch: int = 100
    steps: int = 1000
    samples: int = 100
    points: int = 100

    def model(self, split: Split) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(split.number)
            layers = nn.Linear(split.train_x.shape[1], self.hidden), nn.ReLU(), nn.Linear(self.hidden, 1)
            return nn.Sequential(*layers).double()

    def epochs(self, split: Split) -> int:
        return max(1, round(self.steps / -(-len(split.train_x) // self.batch)))


@dataclass(frozen=True)
class Method:
    """A way to train, and the values a search may choose from: as many for each method.

    Args:
        kind: "map", "vogn" or "ivon".
        lrs: where the schedule begins; of the variational rules, in units of a Newton step.
        second: what `seconds` are values of.
    """

    title: str
    kind: str
    lrs: tuple[float, ...]
    second: str
    seconds: tuple[float, ...]

    def build(self, model: nn.Module, split: Split, noise: float, lr: float, second: float) -> Any:
        """An optimizer of the mean of losses |f - y|^2/(2 noise), whose second derivative by f is 1/noise."""
        if self.kind == "map":
            return torch.optim.Adam(model.parameters(), lr=lr, weight_decay=second)
        fixed: dict[str, Any] = dict(num_data=len(split.train_x), prior_precision=second, hess_init=1 / noise)
        fixed |= dict(lr=lr, seed=split.number, fused=False)
        if self.kind == "vogn":
            return optim.VOGN(model, betas=(0.9, 0.99), **fixed)
        steady: dict[str, Any] = dict(betas=(0.9, 0.999), rescale_lr=False, clip_radius=CLIP)
        return optim.IVON(model.parameters(), **steady, **fixed)


METHODS = (
    Method("MAP", "map", (0.01, 0.03, 0.1), "weight_decay", (1e-4, 1e-3)),
    Method("VOGN", "vogn", (0.1, 0.3, 1.0), "prior_precision", (1.0, 10.0)),
    Method("IVON", "ivon", (0.3, 1.0, 3.0), "prior_precision", (1.0, 10.0)),
)
STRUCTURES = ("diag", "kron", "input", "full", "subsampled")
SCORES = ("rmse", "nll", "coverage")


@dataclass(frozen=True)
class Choice:
    """Hyper-parameters of a method on one data set, and the validation score of each pair that was tried.

    Args:
        noise: the variance of the scaled targets that losses are divided by.
    """

    lr: float
    second: float
    noise: float
    tried: Mapping[tuple[float, float], float] = field(default_factory=dict)


def half_square(outputs: Tensor, targets: Tensor, noise: float = 1.0) -> Tensor:
    return (outputs - targets).square().mean() / (2 * noise)


def with_noise(moments: Moments, noise: float) -> Moments:
    """What is predicted of targets, where `moments` are of the network's outputs."""
    return Moments(moments.mean, moments.variance + noise)


def run(context: Context, setting: Setting, split: Split, method: Method, choice: Choice, final: bool) -> dict:
    """One training run, from the run's folder where it is there: scores in the targets' own units by way of predicting.

    Ways are "map", "vogn" or "ivon"; and for a final of MAP, each structure of Laplace's method. "error" is the mean
    squared one of the scaled test part.
    """
    purpose = "final" if final else "search"
    key = f"{purpose}-{split.key}-{method.kind}-lr{choice.lr:g}-{method.second}{choice.second:g}"
    return context.once(key, partial(_run, context, setting, split, method, choice, final))


def _run(context: Context, setting: Setting, split: Split, method: Method, choice: Choice, final: bool) -> dict:
    model = setting.model(split).to(context.device)
    optimizer = method.build(model, split, choice.noise, choice.lr, choice.second)
    purpose, epochs = "final" if final else "search", setting.epochs(split)
    trial = Trial("mlp", method.kind, choice.lr, split.number, epochs, setting.batch, purpose=purpose, data=split.name)
    loss = partial(half_square, noise=choice.noise)
    with context.hearing():
        seconds = fit(context, trial, model, optimizer, split.train_x, split.train_y, loss)
    nothing = torch.full((len(SCORES),), math.nan, dtype=torch.float64)
    if not torch.isfinite(seconds).all():
        return {method.kind: nothing, "error": nothing[0]}
    model.eval()
    x, found = split.test_x.to(context.device), {}
    if method.kind == "map":
        with torch.no_grad():
            mean, fitted = model(x), model(split.train_x.to(context.device)).cpu()
        noise = float((fitted - split.train_y).square().mean())
        predictions = {"map": with_noise(Moments(mean, torch.zeros_like(mean)), noise)}
        if final:
            predictions |= approximations(context, setting, split, model, noise, x)
    else:
        moments = optimizer.posterior(model).predict(x, samples=setting.samples, likelihood="gaussian")
        predictions = {method.kind: with_noise(moments, choice.noise)}
    for way, (mean, variance) in predictions.items():
        values = metrics.regression(mean.cpu(), variance.cpu(), split.test_y)
        values |= {"rmse": values["rmse"] * split.unit, "nll": values["nll"] + math.log(split.unit)}
        found[way] = torch.tensor([values[name] for name in SCORES], dtype=torch.float64)
    error = (predictions[method.kind].mean.cpu() - split.test_y).square().mean()
    return {**found, "error": error}


def approximations(
    context: Context, setting: Setting, split: Split, model: nn.Module, noise: float, x: Tensor
) -> dict[str, Moments]:
    """Linearised predictions of Laplace's method, prior precision and noise by evidence, for each structure."""
    found = {}
    batches = list(zip(split.train_x.split(1000), split.train_y.split(1000)))
    for structure in STRUCTURES:
        few = min(setting.points, len(split.train_x)) if structure == "subsampled" else None
        posterior = laplace(
            model,
            batches,
            likelihood="gaussian",
            structure=structure,
            noise_scale=math.sqrt(noise),
            subsample=few,
            seed=split.number,
        )
        try:
            posterior.tune_prior(noise_scale=True)
        except ValueError as error:
            context.say(f"{split.key}, {structure}: {error} Continuing with prior precision 1.")
        moments = posterior.predict(x, method="linear", likelihood="gaussian")
        found[structure] = with_noise(moments, posterior.noise_scale**2)
    return found


def choose(context: Context, setting: Setting, split: Split, method: Method, noise: float = 1.0) -> Choice:
    """The pair with the lowest validation NLL on a fifth of a split's training data.

    Returns:
        The choice; of MAP, with the mean squared validation error as the noise that others may take for granted.
    """
    held, tried, errors = split.validation(), {}, {}
    for lr, second in itertools.product(method.lrs, method.seconds):
        found = run(context, setting, held, method, Choice(lr, second, noise), False)
        nll = found[method.kind][SCORES.index("nll")].item()
        tried[lr, second] = nll if math.isfinite(nll) else math.inf
        errors[lr, second] = found["error"].item()
    best = min(tried, key=tried.__getitem__)
    return Choice(best[0], best[1], errors[best] if method.kind == "map" else noise, tried)


@dataclass(frozen=True)
class Results:
    """Scores of all ways to predict on one data set: way -> score -> a value for each split."""

    name: str
    scores: Mapping[str, Mapping[str, list[float]]]
    choices: Mapping[str, Choice]

    def mean(self, way: str, score: str) -> tuple[float, float]:
        return mean_and_error(self.scores[way][score])

    def less(self, way: str, rival: str, score: str) -> tuple[float, float]:
        """Mean and standard error over splits of this way's score less the other's."""
        return mean_and_error([a - b for a, b in zip(self.scores[way][score], self.scores[rival][score])])


def results(context: Context, setting: Setting, name: str, methods: tuple[Method, ...], splits: int) -> Results:
    """All ways to predict on so many splits of one data set, hyper-parameters chosen on the first."""
    first = read(name, SEARCHED, context.data_dir)
    choices: dict[str, Choice] = {}
    found: dict[str, dict[str, list[float]]] = {}
    for method in methods:
        noise = choices["map"].noise if choices else 1.0
        choices[method.kind] = choice = choose(context, setting, first, method, noise)
        final = replace(choice, noise=1.0) if method.kind == "map" else choice
        for number in range(splits):
            values = run(context, setting, read(name, number, context.data_dir), method, final, True)
            for way in set(values) - {"error"}:
                rows = found.setdefault(way, {score: [] for score in SCORES})
                for score, value in zip(SCORES, values[way].tolist()):
                    rows[score].append(value)
    return Results(name, found, choices)
