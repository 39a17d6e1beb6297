"""Section 3.2 of Khan and Rue 2023: several minima from one run of the learning rule with a mixture."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache, partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from bayesgrad.families import FixedGaussian, Gaussian, MixtureOfGaussians
from bayesgrad.inference import Delta, Node, OutsideDomain, minimize, step
from bayesgrad.inference.multimodal import MixtureLogDensity
from bayesgrad_lab import figures
from bayesgrad_lab.context import Context
from bayesgrad_lab.report import Report
from bayesgrad_lab.results import less, mean_and_error, outcome, shown, sign

Loss = Callable[[Tensor], Tensor]
COMPONENTS, BOX = 6, 5.0
STARTS = {"spread over the box": BOX, "close together": 0.5}  # half the side of where components begin
TEMPERATURES = (1.0, 10.0, 100.0)  # the loss is divided by them: the entropy counts for more
PRECISIONS = torch.eye(2, dtype=torch.float64).expand(COMPONENTS, 2, 2)  # of components at the start
RADIUS = 0.1  # of what counts as having found a minimum, after polishing


def himmelblau(theta: Tensor) -> Tensor:
    """Four minima, all with the value 0."""
    x, y = theta[0], theta[1]
    return (x**2 + y - 11).square() + (x + y**2 - 7).square()


PLACES = ((-3.5, -3.0), (-3.0, 3.0), (0.0, 0.0), (2.5, -3.5), (3.0, 2.5))
WIDTHS, DEPTHS = (1.2, 0.9, 1.0, 0.8, 1.3), (60.0, 50.0, 40.0, 55.0, 45.0)


def pits(theta: Tensor) -> Tensor:
    """Five pits of different depth and width in a shallow bowl."""
    places = theta.new_tensor(PLACES)
    distance = (theta - places).square().sum(-1) / theta.new_tensor(WIDTHS).square()
    return theta.square().sum() - (theta.new_tensor(DEPTHS) * (-distance / 2).exp()).sum()


LOSSES: dict[str, Loss] = {"Himmelblau's function": himmelblau, "five pits": pits}


@cache
def true_minima(title: str) -> Tensor:
    """By gradient descent from a fine grid; each once."""
    side, loss = torch.linspace(-BOX, BOX, 25, dtype=torch.float64), LOSSES[title]
    return distinct(polished(loss, torch.cartesian_prod(side, side)), loss)


def polished(loss: Loss, points: Tensor, steps: int = 400) -> Tensor:
    """Each point at the bottom of where it is: gradient descent with steps that are shortened until the loss falls."""
    gradient, value = torch.vmap(torch.func.grad(loss)), torch.vmap(loss)
    size = torch.full(points.shape[:1], 0.05, dtype=points.dtype)
    for _ in range(steps):
        moved = points - size[:, None] * gradient(points)
        falls = value(moved) <= value(points)
        points = torch.where(falls[:, None], moved, points)
        size = torch.where(falls, 1.3 * size, size / 3)
    return points


def distinct(points: Tensor, loss: Loss) -> Tensor:
    """Minima among points, each once."""
    kept: list[Tensor] = []
    for point in points:
        flat = torch.func.grad(loss)(point).norm() < 1e-2 * (1 + loss(point).abs())
        if flat and all((point - other).norm() > RADIUS for other in kept):
            kept.append(point)
    return torch.stack(kept) if kept else points[:0]


def found(loss: Loss, points: Tensor, minima: Tensor) -> Tensor:
    """Which minima some of the points end in."""
    inside = points[torch.isfinite(points).all(1)]
    if not len(inside):
        return torch.zeros(len(minima), dtype=torch.bool)
    return (torch.cdist(minima, polished(loss, inside)) < RADIUS).any(1)


def starts(seed: int, side: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return side * (2 * torch.rand(COMPONENTS, 2, dtype=torch.float64, generator=generator) - 1)


def mixture(loss: Loss, seed: int, side: float, steps: int, temperature: float) -> dict[str, Tensor]:
    """The path of all components, (steps + 1, K, 2)."""
    family = MixtureOfGaussians(torch.full((COMPONENTS,), 1 / COMPONENTS, dtype=torch.float64))
    node = Node(family, family.of(starts(seed, side), PRECISIONS))
    factor = MixtureLogDensity(node, lambda theta: -loss(theta) / temperature, Delta())
    path = [family.moments(node.natural)[1]]
    for _ in range(steps):
        try:
            step(node, [factor], rho=0.1, domain="retract")
        except OutsideDomain:
            break
        path.append(family.moments(node.natural)[1])
    path += [path[-1]] * (steps + 1 - len(path))
    return {"path": torch.stack(path)}


def restarts(loss: Loss, seed: int, side: float, steps: int, temperature: float) -> dict[str, Tensor]:
    """Newton's method from each start by itself, with the same steps: one component has no neighbour."""
    node = Node(Gaussian(), Gaussian().of(starts(seed, side), PRECISIONS))
    return {"path": _alone(lambda theta: loss(theta) / temperature, node, steps, 0.1)}


def descent(loss: Loss, seed: int, side: float, steps: int, temperature: float) -> dict[str, Tensor]:
    """Gradient descent from each start by itself."""
    return {"path": _alone(loss, Node(FixedGaussian(), (starts(seed, side),)), steps, 0.005)}


def _alone(loss: Loss, node: Node, steps: int, rho: float) -> Tensor:
    with contextlib.suppress(OutsideDomain):
        minimize(loss, node, rho=rho, steps=steps, tolerance=0, domain="retract")
    return node.family.mode(node.natural)[None]


METHODS = {"mixture": mixture, "Newton, restarts": restarts, "gradient descent, restarts": descent}


def count(context: Context, title: str, place: str, name: str, seed: int, steps: int, temperature: float) -> float:
    """How many minima one run of a method ends in."""
    loss = LOSSES[title]
    key = "-".join([title, place, name, f"{temperature:g}", str(seed)])
    key = "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in key)
    path = context.once(key, partial(METHODS[name], loss, seed, STARTS[place], steps, temperature))["path"]
    return float(found(loss, path[-1], true_minima(title)).sum())


def multimodal(context: Context) -> Report:
    """How many minima six components find together, and six runs each by itself."""
    steps, tuning, finals = {"smoke": (3, 1, 2), "laptop": (100, 5, 20), "paper": (200, 50, 200)}[context.scale]
    rows, verdicts, better = [], [], []
    panels: dict[str, figures.Hills] = {}
    for title, place in product(LOSSES, STARTS):
        total, counts, chosen = len(true_minima(title)), {}, {}
        for name in METHODS:
            context.say(f"{title}, starts {place}: {name}")
            measured = partial(count, context, title, place, name, steps=steps)
            grid = (1.0,) if name.startswith("gradient") else TEMPERATURES
            scores = {t: np.mean([measured(seed=10_000 + i, temperature=t) for i in range(tuning)]) for t in grid}
            best = chosen[name] = max(scores, key=lambda t: scores[t])
            counts[name] = [measured(seed=seed, temperature=best) for seed in range(finals)]
            minima = f"{shown(mean_and_error(counts[name]), '.2f')} of {total}"
            share = np.mean([value == total for value in counts[name]])
            rows.append([title, place, name, f"{best:g}", minima, f"{100 * share:.0f} %"])
        for other in list(METHODS)[1:]:
            gap = less(counts["mixture"], counts[other])
            verdicts.append(f"{title}, starts {place}: {shown(gap, '+.2f')} against {other}")
            better.append(sign(gap) > 0)
        path = mixture(LOSSES[title], 0, STARTS[place], steps, chosen["mixture"])["path"]
        side = torch.linspace(-BOX - 1, BOX + 1, 121, dtype=torch.float64)
        x, y = torch.meshgrid(side, side, indexing="xy")
        height = torch.vmap(torch.vmap(LOSSES[title]))(torch.stack([x, y], -1))
        ground = (height - height.min() + 1).log().numpy()
        panels[f"{title}\n{place}"] = figures.Hills(side.numpy(), ground, path.numpy(), true_minima(title).numpy())
    report = Report.of("khan2023-multimodal")
    report.verdict = (
        f"{outcome(better)}. Minima found by the mixture beyond those of others: {'; '.join(verdicts)} "
        f"({finals} paired starts)."
    )
    report.add_table(
        f"Distinct minima that {COMPONENTS} starts end in, after {steps} steps",
        ["loss", "starts", "method", "temperature", "minima found", "runs that found all"],
        rows,
    )
    report.draw(context.folder / "multimodal.png", figures.hills, panels, ("first variable", "second variable"))
    return report
