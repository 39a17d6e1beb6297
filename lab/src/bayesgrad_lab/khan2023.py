"""Experiments of Khan and Rue 2023: robust solutions, uncertainty, and binary networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bayesgrad import optim, plots
from bayesgrad_lab import figures
from bayesgrad_lab import khan2023_runs as runs
from bayesgrad_lab.context import Context
from bayesgrad_lab.dataset import Dataset
from bayesgrad_lab.methods import Method
from bayesgrad_lab.report import Report
from bayesgrad_lab.results import Results, attempts, margin, mean_and_error, outcome, shown, sign
from bayesgrad_lab.task import Task
from bayesgrad_lab.training import STATISTICS

# --- Fig. 1 ---

STEEP, SLOPE = 4.0, 2.0  # of the wall and of the flat side
SHARP, FLAT = (-1.5, 6.0, 0.15), (1.5, 5.0, 0.8)  # place, depth and width of two wells
NARROW = 0.05  # the deviation of beliefs that begin as narrow as the sharp minimum
EVERY = 5  # steps between two points of a path
BOWL = 0.1  # curvature that keeps weights from leaving both


def wall(x: Tensor) -> Tensor:
    """A minimum beside a wall: exp(-4 x) + 2 x."""
    return (-STEEP * x).exp() + SLOPE * x


def wells(x: Tensor) -> Tensor:
    """A sharp, deep minimum and a flat one that is less deep."""
    depths = [depth * (-0.5 * ((x - place) / width).square()).exp() for place, depth, width in (SHARP, FLAT)]
    return BOWL / 2 * x.square() - depths[0] - depths[1]


def expected(loss: Callable[[Tensor], Tensor], mean: Tensor, deviation: Tensor) -> Tensor:
    """E[loss] under N(mean, deviation^2), by Gauss-Hermite quadrature with 64 points."""
    points, weights = (torch.as_tensor(a) for a in np.polynomial.hermite_e.hermegauss(64))
    return (loss(mean[..., None] + deviation[..., None] * points) * weights).sum(-1) / math.sqrt(2 * math.pi)


@cache
def best_gaussian(loss: Callable[[Tensor], Tensor], low: float, high: float) -> tuple[float, float, float]:
    """Mean, deviation and value of the smallest E_q[loss] - entropy with a mean in [low, high], by a fine grid."""
    mean, deviation = torch.linspace(low, high, 401).double(), torch.logspace(-2, 0.5, 201).double()
    value = expected(loss, mean[:, None].expand(-1, 201), deviation.expand(401, -1)) - deviation.log()
    i, j = divmod(int(value.argmin()), 201)
    return mean[i].item(), deviation[j].item(), value[i, j].item() - 0.5 * math.log(2 * math.pi * math.e)


def follow(
    loss: Callable[[Tensor], Tensor], starts: Tensor, steps: int, seed: int | None, hess_init: float = 1.0
) -> dict[str, Tensor]:
    """Iterates from many starts, each a weight of its own: IVON with draws of that seed, or gradient descent if None.

    The loss stands for that of all data, num_data = 1, without a prior: IVON minimises E_q[loss] - entropy.
    """
    weight = nn.Parameter(starts.clone())
    optimizer: torch.optim.Optimizer = torch.optim.SGD([weight], lr=2e-3)
    if seed is not None:
        whole: Any = dict(num_data=1, prior_precision=0.0, hess_init=hess_init, betas=(0.9, 0.99), rescale_lr=False)
        optimizer = optim.IVON([weight], lr=0.02, samples=4, clip_radius=5.0, seed=seed, **whole)

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = loss(weight).sum()
        total.backward()
        return total

    path, spread = [], []
    belief = nn.Module()
    belief.weight = weight
    for step in range(steps):
        if step % EVERY == 0:
            path.append(weight.detach().clone())
            if isinstance(optimizer, optim.IVON):
                spread.append(optimizer.posterior(belief).variance()["weight"].sqrt())
        optimizer.step(closure)
    return {"path": torch.stack(path), "spread": torch.stack(spread) if spread else torch.zeros(1)}


def fig1(context: Context) -> Report:
    """Averaging over the belief moves away from a wall, and prefers a flat minimum to a sharp one."""
    count, steps = {"smoke": (8, 30), "laptop": (60, 1500), "paper": (400, 10_000)}[context.scale]
    half = steps // EVERY // 2
    starts = {"wall": torch.linspace(-0.5, 2.5, count).double(), "wells": torch.linspace(-3, 3, count).double()}
    losses = {"wall": wall, "wells": wells}

    def path(key: str, name: str, *settings: Any) -> dict[str, Tensor]:
        return context.once(f"{name}-{key}", partial(follow, losses[name], starts[name], *settings))

    descent = {name: path("descent", name, 10 * steps, None) for name in losses}
    seeds = range(context.seeds)
    bayes = {name: [path(f"ivon-seed{seed}", name, steps, seed) for seed in seeds] for name in losses}
    narrow = [path(f"narrow-seed{seed}", "wells", steps, seed, NARROW**-2) for seed in seeds]
    valley = math.log(STEEP / SLOPE) / STEEP
    exact = best_gaussian(wall, -0.5, 2.0)
    ends = [(run["path"][half:].mean().item(), run["spread"][half:].mean().item()) for run in bayes["wall"]]
    place, width = (mean_and_error(column) for column in zip(*ends))
    point = descent["wall"]["path"][-1].mean().item()
    sharp, flat = best_gaussian(wells, -2.5, -0.5), best_gaussian(wells, 0.5, 2.5)
    flat_point = (descent["wells"]["path"][-1] > 0).double().mean().item()
    share, share_narrow = (
        mean_and_error([(run["path"][-1] > 0).double().mean().item() for run in some])
        for some in (bayes["wells"], narrow)
    )
    away = place[0] - margin(place) > point + 0.5 * (exact[0] - valley)
    prefers = flat[2] < sharp[2] and share[0] - margin(share) > max(flat_point, 0.5)
    moved = shown(place)
    report = Report.of("khan2023-fig1")
    report.verdict = (
        f"{'Holds' if away and prefers else 'Does not hold'}. Wall: gradient descent ends at {point:.3f} (the "
        f"minimum is {valley:.3f}), IVON's mean is {moved} with a deviation of {width[0]:.3f}, the best Gaussian has "
        f"mean {exact[0]:.3f} and deviation {exact[1]:.3f}: {exact[0] - valley:.2f} away from the wall. Two minima: "
        f"{100 * flat_point:.0f} % of the starts in [-3, 3] end in the flat one by gradient descent, "
        f"{shown(share, '.1f', 100)} % with IVON whose beliefs begin with deviation 1, "
        f"{shown(share_narrow, '.1f', 100)} % where they begin with {NARROW}. E_q[loss] "
        f"- entropy is {flat[2]:.2f} in the flat minimum and {sharp[2]:.2f} in the sharp one, whose loss is lower."
    )
    columns = [f"{who}, {what}" for who in ("IVON", "best Gaussian") for what in ("mean", "deviation")]
    ends = descent["wells"]["path"][-1]
    inside = [
        ends[ends > 0].mean().item(),
        *(np.mean([_inside(run, name, half) for run in bayes["wells"]]) for name in ("path", "spread")),
    ]
    rows = [
        ["wall", f"{point:.3f}", moved, *(f"{value:.3f}" for value in (width[0], *exact[:2]))],
        ["two minima, in the flat one", *(f"{value:.3f}" for value in (*inside, *flat[:2]))],
    ]
    report.add_table("Where weights end", ["loss", "gradient descent", *columns], rows)
    five = [count // 6, count // 3, count // 2, 2 * count // 3, count - 1]
    panels = []
    for name, title, (mean, deviation, _), ground in (
        ("wall", "a minimum beside a wall", exact, (-0.45, 2.0)),
        ("wells", "a sharp and a flat minimum", flat, (-3.0, 3.0)),
    ):
        x = torch.linspace(*ground, 601).double()
        smooth = expected(losses[name], x, torch.full_like(x, deviation))
        panels.append(
            figures.Landscape(
                title,
                x.numpy(),
                losses[name](x).numpy(),
                smooth.numpy(),
                (mean, deviation),
                descent[name]["path"][::10, five].numpy(),
                bayes[name][0]["path"][:, five].numpy(),
                (-7.0, 3.0) if name == "wells" else (0.0, 6.0),
            )
        )
    report.draw(context.folder / "fig1.png", figures.landscapes, panels)
    report.add_protocol(count=count, steps=steps)
    return report


def _inside(run: dict[str, Tensor], name: str, half: int) -> float:
    """The mean place ("path") or deviation ("spread") of those beliefs that are in the flat minimum."""
    return run[name][half:][run["path"][half:] > 0].mean().item()


# --- uncertainty ---


class Part(NamedTuple):
    """A task of the experiment.

    Args:
        members: of its ensembles.
        origin: of the outside images, for people.
        seeds: of the finals, at most, where runs take long.
    """

    task: Task
    members: int
    methods: Sequence[Method]
    origin: str = "another kind"
    seeds: int | None = None


def uncertainty(context: Context) -> Report:
    """Accuracy, calibration and what is known of foreign images, with and without draws from the belief."""
    report = Report.of("khan2023-uncertainty")
    words, held, asked = [], [], context.seeds
    for part in parts(context):
        task, context = part.task, replace(context, seeds=min(asked, part.seeds or asked))
        others = f"{len(task.outside):,} of {part.origin}"
        context.say(f"{task.key}: {len(task.data.test_x):,} test images, {others}")
        found = {method.title: runs.finals(context, task, method) for method in part.methods}
        results = [one for some in found.values() for one in some]
        single = results[0]
        results.insert(1, runs.ensemble(context, task, part.methods[0], single, part.members))
        report.add_table(f"{task.key}, test data", **runs.score_table(results))
        tried = {title: some[0] for title, some in found.items()}
        report.add_table("Validation NLL of each pair tried: lr, second hyper-parameter", **attempts(tried))
        kinds = [method.kind for method in part.methods]
        for kind in ("vogn", "ivon"):
            if kind in kinds:
                one = runs.named(results, kind, "drawn")
                holds, sentence = _against(one, single)
                held.append(holds)
                reached = "target met" if holds else "target missed"
                words.append(f"{task.data.name}, {task.epochs} epochs, {reached}: {sentence}")
                words += [_against(one, runs.named(results, "ogn", "drawn"))[1]] if "ogn" in kinds else []
        report.draw(
            context.folder / f"uncertainty-{task.key}.png",
            figures.dots,
            runs.score_panels(results, ("error", "nll", "ece", "auroc entropy")),
            caption=f"{task.key}: mean and standard error over seeds.",
        )
        report.settings[f"protocol of {task.key}"] = _protocol(part, len(single.tried), context.seeds)
    report.verdict = f"{outcome(held)} here. {' '.join(words)}"
    return report


def parts(context: Context) -> list[Part]:
    """What is trained at each scale."""
    if context.scale == "smoke":
        data = context.load("digits", 200)
        few = [replace(method, lrs=method.lrs[1:2], seconds=method.seconds[1:2], options={}) for method in runs.METHODS]
        few[-1] = replace(few[-1], options={"betas": (0.9, 0.9995)})
        foreign = runs.scrambled(data)
        small = runs.classifier(data.part(60), foreign[:20], (4,), 1, 30, "resnet", samples=2)
        whole = runs.classifier(data, foreign, (16,), 3, 32, samples=4)
        return [Part(whole, 2, few), Part(small, 2, [few[0], few[3]], seeds=1)]
    images, other, colour = map(context.load, ("fashion-mnist", "mnist", "cifar10"))
    foreign = runs.like(other.test_x, other.train_x, images.train_x)
    if context.scale == "laptop":
        few = [method for method in runs.METHODS if method.kind in ("adam", "vogn", "ivon")]
        short, long = (runs.classifier(images.part(10_000), foreign, (100, 100), epochs) for epochs in (10, 30))
        digits = runs.like(other.test_x[:2500], other.train_x, colour.train_x)
        deep = runs.classifier(colour.part(5000), digits, (8,), 15, 50, "resnet", samples=16)
        return [
            Part(short, 5, runs.METHODS, "mnist"),
            Part(long, 5, few, "mnist"),
            Part(deep, 5, runs.METHODS, "mnist", 3),
        ]
    hundred = context.load("cifar100")
    deep = runs.like(hundred.test_x, hundred.train_x, colour.train_x)
    return [
        Part(runs.classifier(images, foreign, (400, 400), 50), 5, runs.METHODS, "mnist"),
        Part(runs.classifier(colour, deep, (16,), 100, network="resnet", augment=True), 5, runs.METHODS, "cifar100"),
    ]


def _protocol(part: Part, pairs: int, seeds: int) -> str:
    """How a task was measured, for people."""
    task, network = part.task, ""
    if task.network == "resnet":
        (channels,) = task.widths or (0,)
        count = sum(p.numel() for p in task.model(0).parameters())
        network = (
            f"a ResNet of three blocks, {channels} to {4 * channels} channels, {count:,} weights, with "
            f"BatchNorm, whose statistics are estimated again from {STATISTICS} training images: once at the mean, "
            "for each draw of weights, and once under dropout's masks; "
        )
    return (
        f"{len(task.data.train_x):,} images, {task.epochs} epochs, batches of {task.batch}, cosine schedule; "
        f"{network}lr and a second hyper-parameter (weight decay, dropout rate or hess_init) chosen by the "
        f"validation NLL of averaged predictions, {pairs} pairs for each method, 20 % held out, with a separate "
        f"seed; {seeds} seed{'s' * (seeds > 1)}; {task.samples} draws; prior precision = {task.decay:g} x images; "
        f"{len(task.data.test_x):,} test images; AUROC against {len(task.outside):,} images of {part.origin}"
    )


def _against(one: Results, rival: Results) -> tuple[bool, str]:
    """Whether accuracy is within 0.5 points, and NLL and ECE are lower by two standard errors of paired differences."""
    gaps, words = runs.difference(one, rival, ("error", "nll", "ece"))
    lower = all(sign(gaps[name]) < 0 for name in ("nll", "ece"))
    return gaps["error"][0] <= 0.005 and lower, f"{one.title}, less {rival.title}: {words}."


# --- binary networks ---


def features(x: Tensor) -> Tensor:
    """64 fixed random features of points in the plane: signs of two coordinates make four directions and no more."""
    generator = torch.Generator().manual_seed(0)
    turn, shift = torch.randn(2, 64, generator=generator), torch.randn(64, generator=generator)
    return (2 * x @ turn + 2 * shift).tanh()


def moons(count: int) -> tuple[Dataset, Tensor, Tensor]:
    """Two moons as a data set of features, its training points, and the points of a picture (n, n, 2)."""
    from sklearn.datasets import make_moons

    points, labels = make_moons(count + 1000, noise=0.15, random_state=0)
    x, y = torch.tensor(points, dtype=torch.float32), torch.tensor(labels)
    made = Dataset("moons", features(x[:count]), y[:count], features(x[count:]), y[count:], 2, "table")
    across, up = torch.linspace(-2.0, 3.0, 80), torch.linspace(-1.5, 2.0, 80)
    return made, x[:count], torch.stack(torch.meshgrid(across, up, indexing="xy"), -1)


def binary(context: Context) -> Report:
    """Weights that are -1 or 1: straight-through estimates against beliefs about signs."""
    points, rounds, name, examples, widths, epochs = {
        "smoke": (60, 3, "digits", 150, (16,), 2),
        "laptop": (200, 60, "mnist", 10_000, (128, 128), 10),
        "paper": (200, 500, "mnist", None, (2048, 2048, 2048), 100),
    }[context.scale]
    toy, where, picture = moons(points)
    images = context.load(name, examples)
    smoke = context.scale == "smoke"
    methods = (
        [replace(m, lrs=m.lrs[:1], seconds=m.seconds[:1], options={}) for m in runs.BINARY] if smoke else runs.BINARY
    )
    tasks = {
        "two moons": runs.classifier(toy, features(picture.view(-1, 2)), (64, 64), rounds, 20, "binary"),
        name: runs.classifier(images, images.test_x[:10], widths, epochs, 100, "binary"),
    }
    report = Report.of("khan2023-binary")
    words, held = [], {}
    names = [key for key in runs.COLUMNS if not key.startswith("auroc")]
    for title, task in tasks.items():
        found = {method.title: runs.finals(context, task, method, "error") for method in methods}
        ste, mode, drawn = results = [one for some in found.values() for one in some]
        gap, score = mode.less(ste, "error"), partial(drawn.less, ste)
        held[title] = gap[0] - margin(gap) <= 0
        words.append(
            f"{title}: BayesBiNN's most probable network less STE, accuracy {shown(gap, '+.2f', -100)} points; its "
            f"{task.samples} draws less STE, {-100 * score('error')[0]:+.2f} points, NLL {score('nll')[0]:+.3f}."
        )
        report.add_table(f"{title}, test data", **runs.score_table(results, names))
        tried = {method: some[0] for method, some in found.items()}
        heading = f"{title}, validation error % of each pair tried: lr, weight decay or relaxation"
        report.add_table(heading, **attempts(tried, ".1f", 100))
        if title == "two moons":
            maps = {}
            for one in results:
                method = next(method for method in methods if method.kind == one.of.key[0])
                first = runs.run(context, task, method, tuple(one.settings.values()), 0)
                maps[one.title] = first[f"{one.of.key[1]}_outside"][:, 1].view(picture.shape[:2]).numpy()
            report.draw(
                context.folder / "moons.png", plots.decisions, maps, picture.numpy(), where.numpy(), toy.train_y.numpy()
            )
    outcomes = {True: "holds on ", False: "does not hold on "}
    found = [
        outcomes[good] + " and ".join(title for title in tasks if held[title] is good)
        for good in (False, True)
        if good in held.values()
    ]
    report.verdict = f"{', '.join(found).capitalize()}. {' '.join(words)}"
    sizes = dict(points=points, rounds=rounds, name=name, images=len(images.train_x), epochs=epochs, widths=widths)
    report.add_protocol(pairs=len(methods[0].seeks), **sizes)
    return report
