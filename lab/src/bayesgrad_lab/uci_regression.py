"""Regression by one hidden layer: point estimates, Laplace's method and variational rules on fixed splits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bayesgrad import laplace, plots
from bayesgrad_lab import figures, uci
from bayesgrad_lab.report import Report
from bayesgrad_lab.study import Context
from bayesgrad_lab.uci import METHODS, SPLITS, STRUCTURES, Results, Setting, results

TITLES = {
    "map": "MAP",
    **{name: f"Laplace, {name}" for name in STRUCTURES},
    "vogn": "VOGN",
    "ivon": "IVON",
}
SHOWN = {"nll": ("log-likelihood", -1, 3), "rmse": ("RMSE", 1, 3), "coverage": ("coverage of 90 % intervals", 100, 1)}
SIZES: dict[str, tuple[Setting, tuple[str, ...], tuple[str, ...]]] = {
    "smoke": (Setting(8, 40, 20, 5, 10), ("diabetes",), ("map", "vogn", "ivon")),
    "laptop": (Setting(), tuple(uci.FOLDERS), ("map", "ivon")),
    "paper": (Setting(steps=20_000), tuple(uci.FOLDERS), ("map", "vogn", "ivon")),
}  # setting, data sets, methods


def everything(context: Context) -> list[Results]:
    """All ways to predict on all data sets of a scale, on as many splits as there are seeds."""
    setting, names, kinds = SIZES[context.scale]
    methods = tuple(method for method in METHODS if method.kind in kinds)
    return [results(context, setting, name, methods, min(SPLITS, context.seeds)) for name in names]


def regression(context: Context) -> Report:
    """Test log-likelihood and error of MAP, Laplace's method and variational training."""
    report = Report(
        "uci-regression: posteriors of small networks",
        claim="Not from a paper: a posterior improves the predictions of a trained network of one hidden layer. "
        "Target: Laplace's method, with prior precision and noise by evidence and linearised predictions, has a higher "
        "test log-likelihood than the network alone with the noise that fits the training data best (by two standard "
        "errors of paired differences).",
    )
    found = everything(context)
    ways = [way for way in TITLES if way in found[0].scores]
    for score, (title, factor, digits) in SHOWN.items():
        rows = [[TITLES[way], *(_cell(one.mean(way, score), factor, digits) for one in found)] for way in ways]
        report.add_table(f"Test data: {title}", ["method", *(one.name for one in found)], rows)
    compared, words = _differences(found, ways)
    report.add_table("Log-likelihood less MAP's, paired", ["method", *(one.name for one in found)], compared)
    chosen = [
        [one.name, TITLES[kind], f"{c.lr:g}", f"{c.second:g}", *(f"{v:.3f}" for v in c.tried.values())]
        for one in found
        for kind, c in one.choices.items()
    ]
    pairs = len(next(iter(found[0].choices.values())).tried)
    report.add_table(
        "Chosen, and the validation NLL of each pair tried: learning rates, each with both second hyper-parameters",
        ["data", "method", "lr", "weight decay or prior precision", *map(str, range(1, pairs + 1))],
        chosen,
    )
    won = sum(sign(one.less(way, "map", "nll")) < 0 for one in found for way in STRUCTURES)
    every = len(found) * len(STRUCTURES)
    outcome = "Holds" if won == every else "Holds in part" if won else "Does not hold"
    report.verdict = f"{outcome} here: in {won} of {every} pairs of structure and data set. {' '.join(words)}"
    for first in range(0, len(found), 3):
        some = found[first : first + 3]
        file = f"likelihood-{first // 3 + 1}.png"
        panels = {
            one.name: {TITLES[way]: (-one.mean(way, "nll")[0], one.mean(way, "nll")[1]) for way in ways} for one in some
        }
        figures.dots(context.folder / file, panels)
        report.add_figure(file, "Test log-likelihood for each target, mean and standard error over splits.")
    picture(context)
    report.add_figure(
        "bands.png",
        "A network of 50 tanh units on data with a gap: Laplace's method, prior precision and noise by evidence, "
        "linearised. 95 % intervals of the mean and of the targets.",
    )
    report.settings["protocol"] = protocol(context, SIZES[context.scale][2])
    return report


def protocol(context: Context, kinds: Sequence[str]) -> str:
    """How the regressions were measured, for people."""
    setting = SIZES[context.scale][0]
    others = " and ".join(TITLES[kind] for kind in kinds if kind != "map")
    prior = f" (prior precision of {others})" if others else ""
    bound = f"IVON's steps at most {uci.CLIP} times lr; " if "ivon" in kinds else ""
    noise = f", that of {others} the mean squared validation error of MAP" if others else ""
    return (
        f"{min(SPLITS, context.seeds)} fixed splits, 90 % for training; {setting.hidden} ReLU units; inputs and "
        f"targets scaled by the training part, scores in the targets' units; about {setting.steps} steps, batches of "
        f"{setting.batch}, cosine schedule, float64; lr and weight decay{prior} "
        "chosen for each data set by validation NLL on a fifth of "
        f"the training data of split {uci.SEARCHED}, 6 pairs for each method; MAP's noise is the mean squared training "
        f"error{noise}; one prior precision for a network; "
        f"{setting.samples} draws of variational posteriors; {bound}{setting.points} points in subsampled Fishers; "
        "± over splits, whose data overlap"
    )


def _differences(found: Sequence[Results], ways: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """A table of log-likelihoods less MAP's, and in words how often each way is ahead of it and behind."""
    rows, words = [], []
    for way in ways[1:]:
        gaps = [one.less(way, "map", "nll") for one in found]
        signs = [sign(gap) for gap in gaps]
        rows.append([TITLES[way], *(_cell(gap, -1, 3, "+") for gap in gaps)])
        words.append(f"{TITLES[way]}: ahead of MAP on {signs.count(-1)}, behind on {signs.count(1)} of {len(found)}.")
    return rows, words


def sign(gap: tuple[float, float]) -> int:
    """-1 or 1 where a difference is more than two standard errors from zero."""
    mean, error = gap
    reach = 2 * error if math.isfinite(error) else 0.0
    return int(mean > reach) - int(mean < -reach)


def _cell(value: tuple[float, float], factor: float, digits: int, sign: str = "") -> str:
    mean, error = value
    if not math.isfinite(mean):
        return "diverged"
    spread = f" ± {abs(factor) * error:.{digits}f}" if math.isfinite(error) else ""
    return f"{factor * mean:{sign}.{digits}f}{spread}"


def picture(context: Context) -> Mapping[str, Any]:
    """Bands of four structures around one network."""
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(2, 40, 1, dtype=torch.float64, generator=generator) + torch.tensor([-3.0, 1.0])[:, None, None]
    x = x.reshape(-1, 1)
    y = (2 * x).sin() + 0.15 * torch.randn(x.shape, dtype=torch.float64, generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-4)
    for _ in range(20 if context.scale == "smoke" else 3000):
        optimizer.zero_grad()
        uci.half_square(model(x), y).backward()
        optimizer.step()
    ground = torch.linspace(-4.5, 4.5, 181, dtype=torch.float64)[:, None]
    named = {}
    for structure in ("full", "kron", "input", "diag"):
        posterior = laplace(model, [(x, y)], likelihood="gaussian", structure=structure, noise_scale=0.02**0.5)
        posterior.tune_prior(noise_scale=True)
        mean, variance = posterior.predict(ground, method="linear", likelihood="gaussian")
        noisy = uci.with_noise(uci.Moments(mean, variance), posterior.noise_scale**2)
        deviations = variance.sqrt(), noisy.variance.sqrt()
        named[structure] = plots.Band(*(part[:, 0].numpy() for part in (ground, mean, *deviations)))
    plots.bands(context.folder / "bands.png", named, torch.cat([x, y], 1).numpy())
    return named
