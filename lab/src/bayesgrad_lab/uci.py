"""Regression by one hidden layer: point estimates, Laplace's method and variational rules on fixed splits.

Six data sets of the UCI repository with twenty splits each (Hernandez-Lobato and Adams, 2015; the files are those of
Gal and Ghahramani, 2016): data.txt, index_features.txt, index_target.txt, index_train_K.txt and index_test_K.txt in a
folder for each.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bayesgrad import laplace, metrics, optim, plots
from bayesgrad.posterior import LaplacePosterior
from bayesgrad.predictions import Moments
from bayesgrad_lab import figures, networks
from bayesgrad_lab.context import Context, Trial
from bayesgrad_lab.dataset import Dataset
from bayesgrad_lab.datasets import Files
from bayesgrad_lab.methods import Method, built, of_setup
from bayesgrad_lab.names import unknown
from bayesgrad_lab.report import Report
from bayesgrad_lab.results import Results, outcome, shown, sign
from bayesgrad_lab.studies import Setting, chosen, each
from bayesgrad_lab.task import Task
from bayesgrad_lab.training import epoch_seconds, fit, steps

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
class Split(Dataset):
    """Training and test data, in float64, scaled to mean 0 and deviation 1 over the training part.

    Args:
        train_y, test_y: (n, 1).
        number: of the split.
        unit: what targets were divided by.
    """

    number: int = 0
    unit: float = 1.0

    def validation(self, fraction: float = 0.2) -> Split:
        """A fifth of the training part in place of the test part, which is out of reach."""
        return self.held_out(fraction, self.number)


def scaled(name: str, number: int, x: np.ndarray, y: np.ndarray, train: np.ndarray, test: np.ndarray) -> Split:
    inputs, targets = torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)[:, None]
    parts = []
    for values in (inputs, targets):
        mean, deviation = values[train].mean(0), values[train].std(0, correction=0)
        deviation = torch.where(deviation > 0, deviation, 1.0)  # of columns that are constant
        parts += [(values[train] - mean) / deviation, (values[test] - mean) / deviation, deviation]
    train_x, test_x, _, train_y, test_y, unit = parts
    return Split(name, train_x, train_y, test_x, test_y, 1, "table", number=number, unit=float(unit))


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
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an empty file is only warned of
            values = np.loadtxt(path, ndmin=2)
    except (ValueError, UserWarning) as error:
        raise ValueError(f"{path} is damaged: it is no table of numbers ({error}); get it again.") from error
    if not values.size or not np.isfinite(values).all():
        raise ValueError(f"{path} is damaged: it has no numbers, or some that are not finite; get it again.")
    return values


# --- methods ---


@dataclass(frozen=True)
class Recipe:
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

    def task(self, split: Split) -> Task:
        epochs = max(1, round(self.steps / -(-len(split.train_x) // self.batch)))
        name, widths = f"{{data}}-split{split.number}", (self.hidden,)
        return Task(split, "mlp", epochs, self.batch, widths, samples=self.samples, name=name, make=regressor)


def regressor(
    network: str, data: Dataset, seed: int, large: bool = False, widths: tuple[int, ...] | None = None
) -> nn.Module:
    """A perceptron in float64 with one output."""
    with networks.seeded(seed):
        return networks.perceptron((data.train_x.shape[1], *(widths or ()), 1)).double()


SECOND = attrgetter("second")
NEWTON = {"prior_precision": SECOND, "fused": False, **of_setup("num_data", "seed")}
STEADY = {"betas": (0.9, 0.999), "rescale_lr": False, "clip_radius": CLIP}
# Learning rates of the variational rules are in units of a Newton step.
METHODS = (
    Method("map", "MAP", (0.01, 0.03, 0.1), built(torch.optim.Adam, weight_decay=SECOND), "weight_decay", (1e-4, 1e-3)),
    Method(
        "vogn", "VOGN", (0.1, 0.3, 1.0), built(optim.VOGN, betas=(0.9, 0.99), **NEWTON), "prior_precision", (1.0, 10.0)
    ),
    Method("ivon", "IVON", (0.3, 1.0, 3.0), built(optim.IVON, **STEADY, **NEWTON), "prior_precision", (1.0, 10.0)),
)
STRUCTURES = ("diag", "kron", "input", "full", "subsampled")
SCORES = ("rmse", "nll", "coverage")


def half_square(outputs: Tensor, targets: Tensor, noise: float = 1.0) -> Tensor:
    """|f - y|^2/(2 noise), whose second derivative by f is 1/noise."""
    return (outputs - targets).square().mean() / (2 * noise)


def with_noise(moments: Moments, noise: float) -> Moments:
    """What is predicted of targets, where `moments` are of the network's outputs."""
    return Moments(moments.mean, moments.variance + noise)


def run(
    context: Context,
    recipe: Recipe,
    split: Split,
    method: Method,
    setting: Setting,
    noise: float,
    purpose: str = "final",
) -> dict[str, Tensor]:
    """One training run, from the run's folder where it is there: scores in the targets' own units by way of predicting.

    Ways are "map", "vogn" or "ivon"; and for a final of MAP, each structure of Laplace's method. "error" is the mean
    squared one of the scaled test part.

    Args:
        noise: the variance of the scaled targets that losses are divided by.
    """
    task = replace(recipe.task(split), loss=partial(half_square, noise=noise))
    trial = Trial(purpose, task.key, method.kind, method.named(setting))
    options = {} if method.kind == "map" else {"hess_init": 1 / noise}

    def compute() -> dict[str, Tensor]:
        model = task.model(split.number).to(context.device)
        (optimizer,) = replace(method, options=options).build(model, task, setting[0], split.number, setting[1])
        seconds = epoch_seconds(fit(context, trial, task, model, [optimizer], seed=split.number), task)
        nothing = torch.full((len(SCORES),), math.nan, dtype=torch.float64)
        if not torch.isfinite(seconds).all():
            return {method.kind: nothing, "error": nothing[0]}
        model.eval()
        x, found = split.test_x.to(context.device), {}
        if method.kind == "map":
            with torch.no_grad():
                mean, fitted = model(x), model(split.train_x.to(context.device)).cpu()
            own = float((fitted - split.train_y).square().mean())
            predictions = {"map": with_noise(Moments(mean, torch.zeros_like(mean)), own)}
            if purpose == "final":
                predictions |= approximations(context, recipe, split, model, own, x)
        else:
            moments = optimizer.posterior(model).predict(x, samples=task.samples, likelihood="gaussian")
            predictions = {method.kind: with_noise(moments, noise)}
        for way, (mean, variance) in predictions.items():
            values = metrics.regression(mean.cpu(), variance.cpu(), split.test_y)
            values |= {"rmse": values["rmse"] * split.unit, "nll": values["nll"] + math.log(split.unit)}
            found[way] = torch.tensor([values[name] for name in SCORES], dtype=torch.float64)
        error = (predictions[method.kind].mean.cpu() - split.test_y).square().mean()
        return {**found, "error": error}

    return context.once(trial, compute)


def tune(posterior: LaplacePosterior) -> None:
    """Prior precision and noise by evidence, for every structure; a warning of too much noise is what is measured."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "tune_prior found a noise")
        posterior.tune_prior(noise_scale=True)


def approximations(
    context: Context, recipe: Recipe, split: Split, model: nn.Module, noise: float, x: Tensor
) -> dict[str, Moments]:
    """Linearised predictions of Laplace's method, prior precision and noise by evidence, for each structure."""
    found = {}
    batches = list(zip(split.train_x.split(1000), split.train_y.split(1000)))
    fixed: dict[str, Any] = dict(likelihood="gaussian", noise_scale=math.sqrt(noise), seed=split.number)
    for structure in STRUCTURES:
        few = min(recipe.points, len(split.train_x)) if structure == "subsampled" else None
        posterior = laplace(model, batches, structure=structure, subsample=few, **fixed)
        try:
            tune(posterior)
        except ValueError as error:
            key = recipe.task(split).key
            context.say(f"{key}, {structure}: {error} Continuing with prior precision 1.")
        moments = posterior.predict(x, method="linear", likelihood="gaussian")
        found[structure] = with_noise(moments, posterior.noise_scale**2)
    return found


def choose(
    context: Context, recipe: Recipe, split: Split, method: Method, noise: float = 1.0
) -> tuple[Setting, dict[Setting, float], float]:
    """The pair with the lowest validation NLL on a fifth of a split's training data.

    Returns:
        It; the NLL of all of them; and the noise, of MAP the mean squared validation error of the best pair, which
        others may take for granted.
    """
    held = split.validation()

    def nll(setting: Setting, seed: int, *_: Any) -> float:
        return _nll(run(context, recipe, held, method, setting, noise, "search"), method)

    names, title = ("lr", method.second), f"{split.name}, {method.title}"
    setting, tried = chosen(context, study(recipe, held, method), title, names, method.seeks, nll)
    if method.kind == "map":
        noise = run(context, recipe, held, method, setting, noise, "search")["error"].item()
    return setting, tried, noise


def study(recipe: Recipe, split: Split, method: Method) -> str:
    """The name of a search."""
    return f"{recipe.task(split).key}-{method.kind}"


def _nll(found: Mapping[str, Tensor], method: Method) -> float:
    return found[method.kind][SCORES.index("nll")].item()


def results(context: Context, recipe: Recipe, name: str, methods: Sequence[Method], splits: int) -> dict[str, Results]:
    """All ways to predict on so many splits of one data set, hyper-parameters chosen on the first."""
    first, found, noise = read(name, SEARCHED, context.data_dir), {}, 1.0
    for method in methods:
        setting, tried, noise = choose(context, recipe, first, method, noise)
        every = [read(name, number, context.data_dir) for number in range(splits)]
        used = 1.0 if method.kind == "map" else noise
        runs = each(
            context,
            study(recipe, first, method),
            method.named(setting),
            range(splits),
            lambda i: run(context, recipe, every[i], method, setting, used),  # noqa: B023
            lambda one: _nll(one, method),  # noqa: B023
        )
        for way in set(runs[0]) - {"error"}:
            values = [dict(zip(SCORES, one[way].tolist())) for one in runs]
            own = {"settings": method.named(setting), "tried": tried} if way == method.kind else {}
            found[way] = Results(TITLES[way], values, **own, of=name)
    return {way: found[way] for way in TITLES if way in found}


# --- the report ---

TITLES = {
    "map": "MAP",
    **{name: f"Laplace, {name}" for name in STRUCTURES},
    "vogn": "VOGN",
    "ivon": "IVON",
}
SHOWN = {"nll": ("log-likelihood", -1, 3), "rmse": ("RMSE", 1, 3), "coverage": ("coverage of 90 % intervals", 100, 1)}
SIZES: dict[str, tuple[Recipe, tuple[str, ...], tuple[str, ...]]] = {
    "smoke": (Recipe(8, 40, 20, 5, 10), ("diabetes",), ("map", "vogn", "ivon")),
    "laptop": (Recipe(), tuple(FOLDERS), ("map", "ivon")),
    "paper": (Recipe(steps=20_000), tuple(FOLDERS), ("map", "vogn", "ivon")),
}  # recipe, data sets, methods


def everything(context: Context, kinds: Sequence[str]) -> dict[str, dict[str, Results]]:
    """All ways to predict on all data sets of a scale, on as many splits as there are seeds."""
    recipe, names, _ = SIZES[context.scale]
    methods = [method for method in METHODS if method.kind in kinds]
    return {name: results(context, recipe, name, methods, min(SPLITS, context.seeds)) for name in names}


def regression(context: Context) -> Report:
    """Test log-likelihood and error of MAP, Laplace's method and variational training."""
    report = Report.of("uci-regression")
    kinds = SIZES[context.scale][2]
    found = everything(context, kinds)
    ways = list(next(iter(found.values())))
    columns = ["method", *found]
    for score, (title, factor, digits) in SHOWN.items():
        rows = [
            [TITLES[way], *(shown(one[way].mean(score), f".{digits}f", factor) for one in found.values())]
            for way in ways
        ]
        report.add_table(f"Test data: {title}", columns, rows)
    rows, words = [], []
    for way in ways[1:]:
        gaps = [one[way].less(one["map"], "nll") for one in found.values()]
        signs = [sign(gap) for gap in gaps]
        rows.append([TITLES[way], *(shown(gap, "+.3f", -1) for gap in gaps)])
        words.append(f"{TITLES[way]}: ahead of MAP on {signs.count(-1)}, behind on {signs.count(1)} of {len(found)}.")
    report.add_table("Log-likelihood less MAP's, paired", columns, rows)
    searched = [(name, one[kind]) for name, one in found.items() for kind in kinds]
    chosen = [
        [name, one.title, *(f"{v:g}" for v in one.settings.values()), *(f"{v:.3f}" for v in one.tried.values())]
        for name, one in searched
    ]
    report.add_table(
        "Chosen, and the validation NLL of each pair tried: learning rates, each with both second hyper-parameters",
        ["data", "method", "lr", "weight decay or prior precision", *map(str, range(1, len(searched[0][1].tried) + 1))],
        chosen,
    )
    won = [sign(one[way].less(one["map"], "nll")) < 0 for one in found.values() for way in STRUCTURES]
    report.verdict = (
        f"{outcome(won)} here: in {sum(won)} of {len(won)} pairs of structure and data set. {' '.join(words)}"
    )
    for first in range(0, len(found), 3):
        panels = {}
        for name in list(found)[first : first + 3]:
            values = {way: found[name][way].mean("nll") for way in ways}
            panels[f"{name}: log-likelihood (nats)"] = {
                TITLES[way]: (-mean, error) for way, (mean, error) in values.items()
            }
        report.draw(
            context.folder / f"likelihood-{first // 3 + 1}.png",
            figures.dots,
            panels,
            caption="Test log-likelihood for each target, mean and standard error over splits.",
        )
    report.draw(context.folder / "bands.png", plots.bands, *picture(20 if context.scale == "smoke" else 3000))
    report.settings["protocol"] = protocol(context, kinds)
    return report


def protocol(context: Context, kinds: Sequence[str]) -> str:
    """How the regressions were measured, for people."""
    recipe = SIZES[context.scale][0]
    others = " and ".join(TITLES[kind] for kind in kinds if kind != "map")
    prior = f" (prior precision of {others})" if others else ""
    bound = f"IVON's steps at most {CLIP} times lr; " if "ivon" in kinds else ""
    noise = f", that of {others} the mean squared validation error of MAP" if others else ""
    return (
        f"{min(SPLITS, context.seeds)} fixed splits, 90 % for training; {recipe.hidden} ReLU units; inputs and "
        f"targets scaled by the training part, scores in the targets' units; about {recipe.steps} steps, batches of "
        f"{recipe.batch}, cosine schedule, float64; lr and weight decay{prior} "
        "chosen for each data set by validation NLL on a fifth of "
        f"the training data of split {SEARCHED}, 6 pairs for each method; MAP's noise is the mean squared training "
        f"error{noise}; one prior precision for a network; "
        f"{recipe.samples} draws of variational posteriors; {bound}{recipe.points} points in subsampled Fishers; "
        "± over splits, whose data overlap"
    )


def picture(count: int) -> tuple[Mapping[str, plots.Band], np.ndarray]:
    """Bands of four structures around one network, and its data."""
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(2, 40, 1, dtype=torch.float64, generator=generator) + torch.tensor([-3.0, 1.0])[:, None, None]
    x = x.reshape(-1, 1)
    y = (2 * x).sin() + 0.15 * torch.randn(x.shape, dtype=torch.float64, generator=generator)
    with networks.seeded(0):
        model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-4)
    for _ in steps(model, [optimizer], [(x, y)] * count, half_square):
        pass
    ground = torch.linspace(-4.5, 4.5, 181, dtype=torch.float64)[:, None]
    named = {}
    for structure in ("full", "kron", "input", "diag"):
        posterior = laplace(model, [(x, y)], likelihood="gaussian", structure=structure, noise_scale=0.02**0.5, seed=0)
        tune(posterior)
        mean, variance = posterior.predict(ground, method="linear", likelihood="gaussian")
        noisy = with_noise(Moments(mean, variance), posterior.noise_scale**2)
        deviations = variance.sqrt(), noisy.variance.sqrt()
        named[structure] = plots.Band(*(part[:, 0].numpy() for part in (ground, mean, *deviations)))
    return named, torch.cat([x, y], 1).numpy()
