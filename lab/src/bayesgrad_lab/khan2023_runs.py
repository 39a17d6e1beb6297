"""Runs of Khan and Rue 2023: one schedule, two hyper-parameters chosen by validation loss, paired seeds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesgrad import metrics, optim
from bayesgrad.posterior import mc_dropout
from bayesgrad_lab import networks
from bayesgrad_lab.context import Context, Trial
from bayesgrad_lab.dataset import Dataset
from bayesgrad_lab.methods import L2, UNBOUNDED, VARIATIONAL, Method, built, of_setup
from bayesgrad_lab.results import Results, Value, shown
from bayesgrad_lab.studies import Setting, chosen, each
from bayesgrad_lab.task import Task
from bayesgrad_lab.training import epoch_seconds, fit, in_batches, settle

AT_ONCE = 2500  # examples of a prediction
SHARPNESS = 10.0  # normalised outputs are of size one, too soft for a softmax
MEMBERS = 2000  # where the seeds of an ensemble's further members begin


# --- tasks ---


def classifier(
    data: Dataset,
    outside: Tensor,
    widths: tuple[int, ...],
    epochs: int,
    batch: int = 128,
    network: str = "mlp",
    **options: Any,
) -> Task:
    """Images and others of another kind; a perceptron, a ResNet of three blocks, or a binary perceptron."""
    options |= {"make": binary_perceptron} if network == "binary" else {}
    name = "{data}{apart}{count}-{network}-epochs{epochs}"
    return Task(data, network, epochs, batch, widths, decay=1e-4, outside=outside, name=name, **options)


def binary_perceptron(
    network: str, data: Dataset, seed: int, large: bool = False, widths: tuple[int, ...] | None = None
) -> nn.Module:
    """A perceptron for weights that are -1 or 1: no biases, and BatchNorm without weights of its own."""
    sizes = (math.prod(data.train_x.shape[1:]), *(widths or ()), data.classes)
    with networks.seeded(seed):
        blocks = [
            [nn.Linear(*pair, bias=False), nn.BatchNorm1d(pair[1], affine=False), nn.ReLU()]
            for pair in itertools.pairwise(sizes)
        ]
    return nn.Sequential(nn.Flatten(), *itertools.chain(*blocks[:-1]), *blocks[-1][:2], Times())


class Times(nn.Module):
    """Multiplies by `SHARPNESS`."""

    def forward(self, x: Tensor) -> Tensor:
        return SHARPNESS * x


def dropped(model: Any, rate: float) -> nn.Module:
    """With dropout before every layer of a perceptron but the first; in a ResNet, between the two convolutions of each
    block (Zagoruyko and Komodakis, 2016) and before the last layer."""
    if isinstance(model, nn.Sequential):
        pairs = [(part, nn.Dropout(rate)) if isinstance(part, nn.ReLU) else (part,) for part in model]
        return nn.Sequential(*itertools.chain(*pairs))
    for block in model.layers:
        block.second = nn.Sequential(nn.Dropout(rate), block.second)
    model.out = nn.Sequential(nn.Dropout(rate), model.out)
    return model


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


def scrambled(data: Dataset) -> Tensor:
    """The test images with their pixels in another order, the same for all."""
    x = data.test_x.flatten(1)
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(0))
    return x[:, order].view_as(data.test_x)


# --- methods ---

SECOND = attrgetter("second")
FUSED = {"fused": True}  # the same numbers as without, in less time
HESSIAN = {"hess_init": SECOND, **VARIATIONAL}
SLOW = {**UNBOUNDED, **FUSED}
SMALL, NEWTON = (3e-4, 1e-3, 3e-3, 1e-2), (0.03, 0.1, 0.3, 1.0)
SIGNS = built(optim.BayesBiNN, relaxation=SECOND, **of_setup("num_data", "seed"))
METHODS = (
    Method("adam", "Adam", SMALL, built(torch.optim.Adam, weight_decay=SECOND), "weight_decay", (1e-4, 1e-3)),
    Method("dropout", "MC dropout", SMALL, built(torch.optim.Adam, **L2), "drop", (0.1, 0.3)),
    Method("ogn", "OGN", NEWTON, built(optim.OGN, **HESSIAN), "hess_init", (0.3, 1.0), FUSED),
    Method("vogn", "VOGN", NEWTON, built(optim.VOGN, **HESSIAN), "hess_init", (0.3, 1.0), FUSED),
    Method("ivon", "IVON", (0.1, 0.3, 1.0, 3.0), built(optim.IVON, **HESSIAN), "hess_init", (0.3, 1.0), SLOW),
)
ADAM = METHODS[0]
BINARY = (
    Method(
        "ste", "STE", (0.01, 0.03, 0.1, 0.3, 1.0), built(optim.STE, weight_decay=SECOND), "weight_decay", (0.0, 0.01)
    ),
    Method("bayesbinn", "BayesBiNN", (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), SIGNS, "relaxation", (0.3, 1.0), FUSED),
)


def ways(method: Method) -> tuple[str, ...]:
    """How a method predicts: at the mean, and averaged over draws."""
    return ("mean",) if method.kind in ("adam", "ste") else ("mean", "drawn")


def searched(method: Method) -> str:
    """The predictions that a search looks at: those the method is for."""
    return "drawn" if method.kind in ("dropout", "ogn", "vogn", "ivon") else "mean"


# --- one run ---


def run(
    context: Context, task: Task, method: Method, setting: Setting, seed: int, purpose: str = "final"
) -> dict[str, Tensor]:
    """One run, from the run's folder where it is there: probabilities of test and outside images, and times.

    Probabilities are at the mean (`mean`, `mean_outside`), and averaged over draws (`drawn`, `drawn_outside`) where the
    method has them.
    """
    trial, (lr, second) = Trial(purpose, task.key, method.kind, method.named(setting), seed), setting

    def compute() -> dict[str, Tensor]:
        model = task.model(seed)
        model = (dropped(model, second) if method.kind == "dropout" else model).to(context.device)
        (optimizer,) = method.build(model, task, lr, seed, second)
        found = {"seconds": epoch_seconds(fit(context, trial, task, model, [optimizer]), task)}
        if not torch.isfinite(found["seconds"]).all():
            return found
        for name, predict in predictions(task, method, model, optimizer, context.device).items():
            found[name] = in_batches(predict, task.data.test_x, context.device, AT_ONCE)
            if purpose == "final":
                found[f"{name}_outside"] = in_batches(predict, task.outside, context.device, AT_ONCE)
        return found

    return context.once(trial, compute)


def predictions(
    task: Task, method: Method, model: nn.Module, optimizer: Any, device: str
) -> dict[str, Callable[[Tensor], Tensor]]:
    """Functions from inputs to probabilities: at the mean (the most probable weights, if binary), and over draws."""
    statistics = settle(model, task.data, device)
    found: dict[str, Callable[[Tensor], Tensor]] = {"mean": lambda x: model(x).softmax(-1)}
    if "drawn" in ways(method):
        posterior = mc_dropout(model) if method.kind == "dropout" else optimizer.posterior(model)
        given = None if method.kind == "dropout" else statistics
        found["drawn"] = lambda x: posterior.predict(x, samples=task.samples, statistics=given)
    return found


# --- scores ---

COLUMNS = {
    "error": ("accuracy %", -100, 100, 2),
    "nll": ("NLL", 1, 0, 4),
    "ece": ("ECE %", 100, 0, 2),
    "brier": ("Brier", 1, 0, 4),
    "auroc maximum": ("AUROC, maximum", 1, 0, 3),
    "auroc entropy": ("AUROC, entropy", 1, 0, 3),
    "seconds": ("CPU s/epoch", 1, 0, 2),
}  # score -> title, factor, offset, decimals
GAPS = {
    "error": ("accuracy", -100, "+.2f", " points"),
    "nll": ("NLL", 1, "+.4f", ""),
    "ece": ("ECE", 100, "+.2f", " points"),
    "auroc entropy": ("AUROC", 1, "+.3f", ""),
}  # score -> title, factor, form and unit of a difference


def scores(found: Mapping[str, Tensor], way: str, task: Task) -> dict[str, float]:
    """All that a run is judged by, from its probabilities."""
    if way not in found or not torch.isfinite(found[way]).all():
        return dict.fromkeys(COLUMNS, math.nan)
    p = found[way]
    values = metrics.classification(p.clamp(min=1e-12).log(), task.data.test_y)
    if f"{way}_outside" in found:
        others = found[f"{way}_outside"]
        values["auroc maximum"] = metrics.auroc(-p.max(1).values, -others.max(1).values)
        values["auroc entropy"] = metrics.auroc(metrics.entropy(p), metrics.entropy(others))
    if "seconds" in found:
        values["seconds"] = found["seconds"].median().item()
    return values


def point(one: Results, name: str) -> Value:
    """A score's mean and standard error in the units of its column."""
    mean, error = one.mean(name)
    _, factor, offset, _ = COLUMNS[name]
    return offset + factor * mean, abs(factor) * error


def score_table(results: Sequence[Results], names: Sequence[str] = tuple(COLUMNS)) -> dict[str, Any]:
    """A table for a report: each way to predict, what was chosen for it, and its scores."""
    rows = [[one.title, one.of.chosen, *(shown(point(one, n), f".{COLUMNS[n][3]}f") for n in names)] for one in results]
    return {"columns": ["method", "chosen", *(COLUMNS[name][0] for name in names)], "rows": rows}


def score_panels(results: Sequence[Results], names: Sequence[str]) -> dict[str, dict[str, Value]]:
    """Panels of `figures.dots`."""
    labels = {name: "NLL (nats)" if name == "nll" else COLUMNS[name][0] for name in names}
    return {labels[name]: {one.title: point(one, name) for one in results} for name in names}


def difference(one: Results, rival: Results, names: Sequence[str]) -> tuple[dict[str, Value], str]:
    """Of scores, paired by seed, with their standard errors; and in words."""
    gaps = {name: one.less(rival, name) for name in names}
    words = []
    for name, gap in gaps.items():
        title, factor, form, unit = GAPS[name]
        words.append(f"{title} {shown(gap, form, factor)}{unit}")
    return gaps, ", ".join(words)


# --- searches and finals ---


class Prediction(NamedTuple):
    """What results of a way to predict belong to.

    Args:
        key: kind of method (or structure and link) and way, for whoever looks for it; see `named`.
        chosen: hyper-parameters, for people.
        first: probabilities of test images, of the first seed.
    """

    key: tuple[str, ...]
    chosen: str
    first: Tensor | None = None


def named(results: Sequence[Results], *key: str) -> Results:
    return next(one for one in results if one.of.key == key)


def study(task: Task, method: Method, judge: str) -> str:
    """The name of a search."""
    return f"{task.key}-{method.kind}-{judge}"


def tune(context: Context, task: Task, method: Method, judge: str = "nll") -> tuple[Setting, dict[Setting, float]]:
    """The best pair of hyper-parameters, and the validation score of all, of predictions as the method makes them."""
    held = task.held_out

    def score(setting: Setting, seed: int, *_: Any) -> float:
        return scores(run(context, held, method, setting, seed, "search"), searched(method), held)[judge]

    return chosen(context, study(task, method, judge), method.title, ("lr", method.second), method.seeks, score)


def finals(context: Context, task: Task, method: Method, judge: str = "nll") -> list[Results]:
    """The method at its best pair, for all seeds: predictions at the mean, and averaged ones."""
    setting, tried = tune(context, task, method, judge)
    settings = method.named(setting)
    runs = each(
        context,
        study(task, method, judge),
        settings,
        range(context.seeds),
        lambda seed: run(context, task, method, setting, seed),
        lambda one: scores(one, searched(method), task)[judge],
    )
    words = ", ".join(f"{name} {value:g}" for name, value in settings.items())
    at = "most probable" if method.kind == "bayesbinn" else "at the mean"
    found = []
    for way in ways(method):
        title = method.title if len(ways(method)) == 1 else f"{method.title}, {at if way == 'mean' else 'draws'}"
        values = [scores(one, way, task) for one in runs]
        kept = Prediction((method.kind, way), words, runs[0].get(way))
        found.append(Results(title, values, settings=settings, tried=tried, of=kept))
    return found


def ensemble(context: Context, task: Task, method: Method, single: Results, members: int) -> Results:
    """For each seed, its network and further ones like it, whose probabilities are averaged."""
    rows, setting = [], tuple(single.settings.values())
    for seed in range(context.seeds):
        seeds = (seed, *(MEMBERS + members * seed + i for i in range(1, members)))
        found = [run(context, task, method, setting, s) for s in seeds]
        joint = {}
        if all("mean" in one for one in found):
            joint = {name: torch.stack([one[name] for one in found]).mean(0) for name in ("mean", "mean_outside")}
            joint["seconds"] = torch.stack([one["seconds"] for one in found]).sum(0)
        rows.append(scores(joint, "mean", task))
    return Results(
        f"Ensemble of {members}", rows, settings=single.settings, of=Prediction(("ensemble",), single.of.chosen)
    )
