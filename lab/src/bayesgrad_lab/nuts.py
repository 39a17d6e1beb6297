"""The No-U-Turn sampler (Hoffman and Gelman 2014, Algorithm 6), as a reference for small posteriors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

DEEPEST = 10  # doublings of a trajectory
SHRINKAGE, OFFSET, FORGETTING = 0.05, 10.0, 0.75  # gamma, t_0 and kappa of dual averaging


class Point(NamedTuple):
    """A position with its momentum, gradient and log density."""

    w: np.ndarray
    momentum: np.ndarray
    gradient: np.ndarray
    log: float

    @property
    def joint(self) -> float:
        return self.log - float(self.momentum @ self.momentum) / 2


class Tree(NamedTuple):
    """Both ends of a trajectory, a point drawn from it, its size, and what its step size is judged by."""

    first: Point
    last: Point
    drawn: Point
    size: int
    goes_on: bool
    accepted: float
    points: int


def nuts(
    density: Callable[[np.ndarray], tuple[float, np.ndarray]],
    start: np.ndarray,
    draws: int,
    warm_up: int,
    seed: int,
    accept: float = 0.8,
) -> tuple[np.ndarray, int]:
    """Samples (draws, n) after a warm-up that adapts the step size, and the number of gradients, warm-up included.

    Args:
        density: w -> log p(w), up to a constant, and its gradient.
        accept: the mean acceptance probability that the step size is adapted to.

    Checked by: lab/tests/test_demo.py::test_nuts_samples_a_gaussian
    """
    rng, log_step = np.random.default_rng(seed), math.log(0.1)
    centre, error, average = math.log(10 * 0.1), 0.0, 0.0
    log, gradient = density(start)
    point, kept, gradients = Point(start, start, gradient, log), [], 1

    def grow(end: Point, slice_: float, energy: float, way: int, depth: int) -> Tree:
        if depth == 0:
            step = way * math.exp(log_step)
            half = end.momentum + step / 2 * end.gradient
            w = end.w + step * half
            log, gradient = density(w)
            new = Point(w, half + step / 2 * gradient, gradient, log)
            inside, ok = int(slice_ <= new.joint), slice_ < new.joint + 1000
            return Tree(new, new, new, inside, ok, math.exp(min(0.0, new.joint - energy)), 1)
        tree = grow(end, slice_, energy, way, depth - 1)
        return extend(tree, slice_, energy, way, depth - 1) if tree.goes_on else tree

    def extend(tree: Tree, slice_: float, energy: float, way: int, depth: int) -> Tree:
        """A trajectory and a new part of the same length, from which the drawn point may come."""
        more = grow(tree.last if way > 0 else tree.first, slice_, energy, way, depth)
        first, last = (tree.first, more.last) if way > 0 else (more.first, tree.last)
        total = tree.size + (more.size if depth < top else 0)  # the last doubling favours new points
        drawn = more.drawn if more.goes_on and rng.random() * max(total, 1) < more.size else tree.drawn
        along = last.w - first.w
        straight = along @ first.momentum >= 0 and along @ last.momentum >= 0
        counts = tree.accepted + more.accepted, tree.points + more.points
        return Tree(first, last, drawn, tree.size + more.size, more.goes_on and bool(straight), *counts)

    for t in range(1, warm_up + draws + 1):
        point = point._replace(momentum=rng.normal(size=len(start)))
        energy = point.joint
        slice_, top = energy - rng.exponential(), 0
        tree = Tree(point, point, point, 1, True, 0.0, 0)
        while tree.goes_on and top < DEEPEST:  # `top` is the depth of the next doubling
            tree = extend(tree, slice_, energy, 1 if rng.random() < 0.5 else -1, top)
            top += 1
        point, gradients = tree.drawn, gradients + tree.points
        if t <= warm_up:
            error += (accept - tree.accepted / tree.points - error) / (t + OFFSET)
            log_step = centre - math.sqrt(t) / SHRINKAGE * error
            average += t**-FORGETTING * (log_step - average)
            log_step = average if t == warm_up else log_step
        else:
            kept.append(point.w)
    return np.array(kept), gradients
