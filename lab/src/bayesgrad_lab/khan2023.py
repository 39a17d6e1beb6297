"""Experiments of Khan and Rue 2023: robust solutions, uncertainty, and binary networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor, nn

from bayesgrad import optim, plots
from bayesgrad_lab import datasets, figures
from bayesgrad_lab.dataset import Dataset
from bayesgrad_lab.khan2023_training import (
    BINARY,
    METHODS,
    Finals,
    Method,
    Task,
    ensemble,
    finals,
    like,
    run,
)
from bayesgrad_lab.report import Report
from bayesgrad_lab.results import outcome
from bayesgrad_lab.study import Context, mean_and_error

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
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD([weight], lr=2e-3)
        if seed is None
        else optim.IVON(
            [weight],
            lr=0.02,
            num_data=1,
            prior_precision=0.0,
            hess_init=hess_init,
            betas=(0.9, 0.99),
            samples=4,
            rescale_lr=False,
            clip_radius=5.0,
            seed=seed,
        )
    )

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
    descent, bayes = {}, {}
    for name, loss in losses.items():
        descent[name] = context.once(f"{name}-descent", partial(follow, loss, starts[name], 10 * steps, None))
        bayes[name] = [
            context.once(f"{name}-ivon-seed{seed}", partial(follow, loss, starts[name], steps, seed))
            for seed in range(context.seeds)
        ]
    narrow = [
        context.once(f"wells-narrow-seed{seed}", partial(follow, wells, starts["wells"], steps, seed, NARROW**-2))
        for seed in range(context.seeds)
    ]
    valley = math.log(STEEP / SLOPE) / STEEP
    exact = best_gaussian(wall, -0.5, 2.0)
    ends = [(run["path"][half:].mean().item(), run["spread"][half:].mean().item()) for run in bayes["wall"]]
    place, width = (mean_and_error(column) for column in zip(*ends))
    point = descent["wall"]["path"][-1].mean().item()
    sharp, flat = best_gaussian(wells, -2.5, -0.5), best_gaussian(wells, 0.5, 2.5)
    flat_point = (descent["wells"]["path"][-1] > 0).double().mean().item()
    share, share_narrow = (
        mean_and_error([(run["path"][-1] > 0).double().mean().item() for run in runs])
        for runs in (bayes["wells"], narrow)
    )
    inside = [run["path"][half:][run["path"][half:] > 0].mean().item() for run in bayes["wells"]]
    away = place[0] - 2 * _zero(place[1]) > point + 0.5 * (exact[0] - valley)
    prefers = flat[2] < sharp[2] and share[0] - 2 * _zero(share[1]) > max(flat_point, 0.5)
    moved = f"{place[0]:.3f}{_error(place[1], '.3f')}"
    report = Report(
        "khan2023-fig1: walls and sharp minima",
        claim="Where a minimum lies next to a wall, the Bayesian solution shifts away from it, towards the flatter "
        "side; given a sharp and a flat minimum it often prefers the flatter one; both because of the averaging over q "
        "(Khan and Rue 2023, Fig. 1). The paper gives no formulas for its two losses; ours are exp(-4 x) + 2 x, and "
        "two Gaussian wells in a shallow bowl, of depth 6 and width 0.15 at -1.5, of depth 5 and width 0.8 at 1.5.",
        verdict=f"{'Holds' if away and prefers else 'Does not hold'}. Wall: gradient descent ends at {point:.3f} (the "
        f"minimum is {valley:.3f}), IVON's mean is {moved} with a deviation of {width[0]:.3f}, the best Gaussian has "
        f"mean {exact[0]:.3f} and deviation {exact[1]:.3f}: {exact[0] - valley:.2f} away from the wall. Two minima: "
        f"{100 * flat_point:.0f} % of the starts in [-3, 3] end in the flat one by gradient descent, "
        f"{100 * share[0]:.1f}{_error(share[1], '.1f', 100)} % with IVON whose beliefs begin with deviation 1, "
        f"{100 * share_narrow[0]:.1f}{_error(share_narrow[1], '.1f', 100)} % where they begin with {NARROW}. E_q[loss] "
        f"- entropy is {flat[2]:.2f} in the flat minimum and {sharp[2]:.2f} in the sharp one, whose loss is lower.",
    )
    report.add_table(
        "Where weights end",
        [
            "loss",
            "gradient descent",
            "IVON, mean",
            "IVON, deviation",
            "best Gaussian, mean",
            "best Gaussian, deviation",
        ],
        [
            ["wall", f"{point:.3f}", moved, f"{width[0]:.3f}", f"{exact[0]:.3f}", f"{exact[1]:.3f}"],
            [
                "two minima, in the flat one",
                f"{descent['wells']['path'][-1][descent['wells']['path'][-1] > 0].mean():.3f}",
                f"{mean_and_error(inside)[0]:.3f}",
                f"{np.mean([_spread_in(run, half) for run in bayes['wells']]):.3f}",
                f"{flat[0]:.3f}",
                f"{flat[1]:.3f}",
            ],
        ],
    )
    shown = [count // 6, count // 3, count // 2, 2 * count // 3, count - 1]
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
                descent[name]["path"][::10, shown].numpy(),
                bayes[name][0]["path"][:, shown].numpy(),
                (-7.0, 3.0) if name == "wells" else (0.0, 6.0),
            )
        )
    figures.landscapes(context.folder / "fig1.png", panels)
    report.add_figure(
        "fig1.png",
        "Above: the loss, its average over the best Gaussian's width around each mean, and that Gaussian. Below: the "
        "paths of five weights by gradient descent (ten times as many steps) and by IVON, seed 0.",
    )
    report.settings["protocol"] = (
        f"{count} starts, evenly spaced, {steps} steps of IVON with 4 draws each (lr 0.02, betas 0.9 and 0.99, "
        "steps of at most 0.1), the second half of the steps averaged; gradient descent with lr 0.002, "
        "ten times as many steps"
    )
    return report


def _spread_in(run: dict[str, Tensor], half: int) -> float:
    """The mean deviation of those beliefs that are in the flat minimum."""
    return run["spread"][half:][run["path"][half:] > 0].mean().item()


def _zero(error: float) -> float:
    """No error is known from one seed."""
    return error if math.isfinite(error) else 0.0


def _error(error: float, form: str, factor: float = 1.0) -> str:
    return f" ± {factor * error:{form}}" if math.isfinite(error) else ""


# --- uncertainty ---

COLUMNS = {
    "error": ("accuracy %", -100, 100, 2),
    "nll": ("NLL", 1, 0, 4),
    "ece": ("ECE %", 100, 0, 2),
    "brier": ("Brier", 1, 0, 4),
    "auroc maximum": ("AUROC, maximum", 1, 0, 3),
    "auroc entropy": ("AUROC, entropy", 1, 0, 3),
    "seconds": ("CPU s/epoch", 1, 0, 2),
}  # score -> title, factor, offset, decimals


def uncertainty(context: Context) -> Report:
    """Accuracy, calibration and what is known of foreign images, with and without draws from the belief."""
    report = Report(
        "khan2023-uncertainty: uncertainty estimates of variational training",
        claim="VOGN matches the performance of Adam and gives better uncertainty estimates than Adam, OGN and other "
        "Bayesian alternatives (Khan and Rue 2023, section 4.4, after Osawa et al., 2019). Target here: VOGN or IVON "
        "within 0.5 points of Adam's accuracy, with lower NLL and ECE.",
    )
    words, held, asked = [], [], context.seeds
    for task, members, methods in _tasks(context):
        context = replace(context, seeds=min(asked, task.seeds or asked))
        context.say(f"{task.key}: {len(task.data.test_x):,} test images, {len(task.outside):,} of {task.origin}")
        results = [one for method in methods for one in finals(context, task, method)]
        single = results[0]
        results.insert(1, ensemble(context, task, single, members))
        report.add_table(f"{task.key}, test data", ["method", "chosen", *_titles()], [_row(one) for one in results])
        tried = [one for one in results if one.tried and one.way == one.method.searched]
        rows = [
            [one.method.title, *(f"{lr:g}, {second:g}: {v:.3f}" for (lr, second), v in one.tried.items())]
            for one in tried
        ]
        report.add_table(
            "Validation NLL of each pair tried: lr, second hyper-parameter",
            ["method", *map(str, range(1, len(single.tried) + 1))],
            rows,
        )
        for one in results:
            if one.way == "drawn" and one.method.kind in ("vogn", "ivon"):
                holds, sentence = _against(one, single)
                reached = "target met" if holds else "target missed"
                sentence = f"{task.data.name}, {task.epochs} epochs, {reached}: {sentence}"
                held.append(holds)
                words.append(
                    f"{sentence} {_against(one, _named(results, 'ogn'))[1]}" if "ogn" in _kinds(methods) else sentence
                )
        file = f"uncertainty-{task.key}.png"
        shown = ("error", "nll", "ece", "auroc entropy")
        figures.dots(
            context.folder / file, {COLUMNS[s][0]: {one.title: _shown(one, s) for one in results} for s in shown}
        )
        report.add_figure(file, f"{task.key}: mean and standard error over seeds.")
        report.settings[f"protocol of {task.key}"] = task.protocol(len(single.tried), context.seeds)
    report.verdict = f"{outcome(held)} here. " + " ".join(word for word in words if word)
    return report


def _tasks(context: Context) -> list[tuple[Task, int, Sequence[Method]]]:
    """Task, members of its ensembles, and methods."""
    if context.scale == "smoke":
        data = datasets.load("digits").part(200)
        scrambled = data.test_x.flatten(1)[:, torch.randperm(64, generator=torch.Generator().manual_seed(0))]
        few = [replace(method, lrs=method.lrs[1:2], seconds=method.seconds[1:2], options={}) for method in METHODS]
        few[-1] = replace(few[-1], options={"betas": (0.9, 0.9995)})
        foreign = scrambled.view_as(data.test_x)
        small = Task(data.part(60), foreign[:20], None, 1, 30, samples=2, channels=4, seeds=1)
        return [(Task(data, foreign, (16,), 3, 32, samples=4), 2, few), (small, 2, [few[0], few[3]])]
    images = datasets.load("fashion-mnist", context.data_dir, context.download)
    other = datasets.load("mnist", context.data_dir, context.download)
    outside = like(other.test_x, other.train_x, images.train_x)
    colour = datasets.load("cifar10", context.data_dir, context.download)
    if context.scale == "laptop":
        few = [method for method in METHODS if method.kind in ("adam", "vogn", "ivon")]
        short, long = (Task(images.part(10_000), outside, (100, 100), epochs, origin="mnist") for epochs in (10, 30))
        digits = like(other.test_x[:2500], other.train_x, colour.train_x)
        deep = Task(colour.part(5000), digits, None, 15, 50, samples=16, channels=8, seeds=3, origin="mnist")
        return [(short, 5, METHODS), (long, 5, few), (deep, 5, METHODS)]
    hundred = datasets.load("cifar100", context.data_dir, context.download)
    foreign = like(hundred.test_x, hundred.train_x, colour.train_x)
    return [
        (Task(images, outside, (400, 400), 50, origin="mnist"), 5, METHODS),
        (Task(colour, foreign, None, 100, augment=True, origin="cifar100"), 5, METHODS),
    ]


def _kinds(methods: Sequence[Method]) -> list[str]:
    return [method.kind for method in methods]


def _named(results: Sequence[Finals], kind: str) -> Finals:
    """The averaged predictions of a kind of method."""
    return next(one for one in results if one.method.kind == kind and one.way == "drawn")


def _titles() -> list[str]:
    return [title for title, *_ in COLUMNS.values()]


def _shown(one: Finals, name: str) -> tuple[float, float]:
    mean, error = one.mean(name)
    _, factor, offset, _ = COLUMNS[name]
    return offset + factor * mean, abs(factor) * error


def _row(one: Finals) -> list[str]:
    cells = [one.title, f"lr {one.lr:g}, {one.method.second} {one.second:g}"]
    for name, (*_, digits) in COLUMNS.items():
        mean, error = _shown(one, name)
        cells.append(f"{mean:.{digits}f}{_error(error, f'.{digits}f')}" if math.isfinite(mean) else "diverged")
    return cells


def _against(one: Finals, rival: Finals) -> tuple[bool, str]:
    """Whether accuracy is within 0.5 points, and NLL and ECE are lower by two standard errors of paired differences."""
    error, nll, ece = (one.less(rival, name) for name in ("error", "nll", "ece"))
    lower = all(mean + 2 * _zero(spread) < 0 for mean, spread in (nll, ece))
    words = (
        f"{one.title}, less {rival.title}: accuracy {-100 * error[0]:+.2f}{_error(error[1], '.2f', 100)} points, NLL "
        f"{nll[0]:+.4f}{_error(nll[1], '.4f')}, ECE {100 * ece[0]:+.2f}{_error(ece[1], '.2f', 100)} points."
    )
    return error[0] <= 0.005 and lower, words


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
    images = datasets.load(name, context.data_dir, context.download).part(examples)
    smoke = context.scale == "smoke"
    methods = [replace(m, lrs=m.lrs[:1], seconds=m.seconds[:1], options={}) for m in BINARY] if smoke else BINARY
    tasks = {
        "two moons": Task(toy, features(picture.view(-1, 2)), (64, 64), rounds, 20, binary=True, judge="error"),
        name: Task(images, images.test_x[:10], widths, epochs, 100, binary=True, judge="error"),
    }
    report = Report(
        "khan2023-binary: STE and BayesBiNN",
        claim="BayesBiNN, the Bayesian learning rule with Bernoulli beliefs, is a sound version of the "
        "straight-through estimator, and gives an estimate of its uncertainty (Khan and Rue 2023, section 4.5, after "
        "Meng et al., 2020). Target here: the accuracy of its most probable network is not below STE's by more than "
        "two standard errors.",
    )
    words, held = [], {}
    names = [key for key in COLUMNS if not key.startswith("auroc")]
    for title, task in tasks.items():
        results = [one for method in methods for one in finals(context, task, method)]
        ste, mode = results[0], results[1]
        mean, error = mode.less(ste, "error")
        held[title] = mean - 2 * _zero(error) <= 0
        words.append(
            f"{title}: BayesBiNN's most probable network less STE, accuracy {-100 * mean:+.2f}"
            f"{_error(error, '.2f', 100)} points; its {task.samples} draws less STE, "
            f"{-100 * results[2].less(ste, 'error')[0]:+.2f} points, NLL {results[2].less(ste, 'nll')[0]:+.3f}."
        )
        rows = [[*_row(one)[:2], *(_row(one)[2 + list(COLUMNS).index(key)] for key in names)] for one in results]
        report.add_table(f"{title}, test data", ["method", "chosen", *(COLUMNS[key][0] for key in names)], rows)
        tried = [
            [one.method.title, *(f"{lr:g}, {second:g}: {100 * v:.1f}" for (lr, second), v in one.tried.items())]
            for one in (ste, mode)
        ]
        count = range(1, len(ste.tried) + 1)
        report.add_table(
            f"{title}, validation error % of each pair tried: lr, weight decay or relaxation",
            ["method", *map(str, count)],
            tried,
        )
        if title == "two moons":
            maps = {
                one.title: run(context, task, one.method, one.lr, one.second, 0, True)[f"{one.way}_outside"][:, 1]
                .view(picture.shape[:2])
                .numpy()
                for one in results
            }
            plots.decisions(context.folder / "moons.png", maps, picture.numpy(), where.numpy(), toy.train_y.numpy())
    outcomes = {True: "holds on ", False: "does not hold on "}
    found = [
        outcomes[good] + " and ".join(title for title in tasks if held[title] is good)
        for good in (False, True)
        if good in held.values()
    ]
    report.verdict = f"{', '.join(found).capitalize()}. {' '.join(words)}"
    report.add_figure("moons.png", "The probability of one of two classes, seed 0; the line is where it is one half.")
    report.settings["protocol"] = (
        f"two moons: {points} points, {rounds} epochs; {name}: {len(images.train_x):,} images, {epochs} epochs, hidden "
        f"layers of {widths}; all weights binary, no biases, BatchNorm without weights, whose statistics are estimated "
        "again from 1000 training examples for each network; cosine schedule; lr and a second hyper-parameter chosen "
        f"by validation error, {len(methods[0].lrs) * len(methods[0].seconds)} pairs for each method, 20 % held out, "
        "with a separate seed"
    )
    return report
