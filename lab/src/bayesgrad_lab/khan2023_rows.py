"""Rows of Table 1 of Khan and Rue 2023: an algorithm out of the engine, and the same without it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesgrad.families import FixedGaussian, Gaussian, MixtureOfGaussians
from bayesgrad.inference import Delta, Factor, LogDensity, Node, step
from bayesgrad.inference.multimodal import MixtureLogDensity
from bayesgrad_lab.khan2023_multimodal import himmelblau

D = torch.float64


@dataclass(frozen=True)
class Row:
    """One algorithm of the table.

    Args:
        candidate: the paper's posterior approximation.
        approximations: and what it does to natural gradients.
        ours: numbers that the engine gives, a path or a result.
        theirs: the same numbers of somebody else.
        peer: who that is.
        tolerance: of the difference, relative where numbers are larger than 1.
        also: the same numbers of this library's optimizer, where it has one.
    """

    part: str
    algorithm: str
    section: str
    candidate: str
    approximations: str
    peer: str
    ours: Callable[[], Tensor]
    theirs: Callable[[], Tensor]
    tolerance: float = 1e-9
    also: Callable[[], Tensor] | None = None

    def gap(self) -> float:
        """The largest difference of the engine's numbers, and of the optimizer's, from the other's."""
        theirs = self.theirs()
        return max(difference(made(), theirs) for made in (self.ours, self.also) if made is not None)


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest, relative where numbers are larger than 1."""
    return ((ours - theirs).abs() / theirs.abs().clamp(min=1)).max().item()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


# --- optimization: a ridge-penalised logistic regression, and Himmelblau's function ---

STEPS = 30


@cache
def logistic() -> tuple[Tensor, Tensor]:
    """Rows (100, 4), and labels -1 or 1."""
    X = normal(100, 4)
    return X, torch.where(X @ torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=D) + normal(100, seed=1) > 0, 1.0, -1.0).to(D)


def log_joint() -> Callable[[Tensor], Tensor]:
    X, y = logistic()
    return lambda theta: -torch.nn.functional.softplus(-y * (X @ theta)).sum() - theta.square().sum() / 2


def logistic_derivatives(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    X, y = (part.numpy() for part in logistic())
    p = 1 / (1 + np.exp(y * (X @ theta)))
    return theta - X.T @ (y * p), np.eye(4) + X.T @ ((p * (1 - p))[:, None] * X)


def walked(
    node: Node,
    steps: Iterable[Sequence[Factor]],
    rho: float = 1.0,
    read: Callable[[], Tensor] | None = None,
    **options: Any,
) -> Tensor:
    """The path of a node's mode, or of what `read` gives, over steps, each of which has its factors."""
    path = []
    for factors in steps:
        step(node, factors, rho, **options)
        path.append(node.family.mode(node.natural) if read is None else read())
    return torch.stack(path)


def by_hand(direction: Callable[[np.ndarray, np.ndarray], np.ndarray], steps: int) -> Tensor:
    """A path of weights that move against a direction, a function of gradient and Hessian, in NumPy."""
    theta, path = np.zeros(4), []
    for _ in range(steps):
        theta = theta - direction(*logistic_derivatives(theta))
        path.append(theta)
    return torch.as_tensor(np.array(path))


descent_by_hand = partial(by_hand, lambda gradient, hessian: 0.01 * gradient, STEPS)
newton_by_hand = partial(by_hand, lambda gradient, hessian: np.linalg.solve(hessian, gradient), 8)


def descent() -> Tensor:
    node = Node(FixedGaussian(1.0), (torch.zeros(4, dtype=D),))
    return walked(node, repeat([LogDensity(node, log_joint(), Delta())], STEPS), 0.01, domain="raise")


def newton() -> Tensor:
    node = Node(Gaussian(), Gaussian().of(torch.zeros(4, dtype=D), torch.eye(4, dtype=D)))
    return walked(node, repeat([LogDensity(node, log_joint(), Delta())], 8), domain="raise")


STARTS = [[2.5, 2.5], [-2.5, 3.3], [-3.5, -3.5], [3.7, -2.2]]


def multimodal_by_hand() -> Tensor:
    """Eqs. 29 to 32 with the delta method: gradient and Hessian of loss + log q at each mean."""
    m, S, rho, path = np.array(STARTS), np.stack([np.eye(2)] * 4), 0.2, []
    for _ in range(STEPS):
        moved, sharper = [], []
        for mean, precision in zip(m, S):
            x, y = mean
            a, b = x**2 + y - 11, x + y**2 - 7
            gradient = np.array([4 * x * a + 2 * b, 2 * a + 4 * y * b])
            off = 4 * (x + y)
            hessian = np.array([[12 * x**2 + 4 * y - 42, off], [off, 12 * y**2 + 4 * x - 26]])
            gaps = m - mean
            log_density = [np.linalg.slogdet(s)[1] / 2 - gap @ s @ gap / 2 for s, gap in zip(S, gaps)]
            r = np.exp(np.array(log_density) - max(log_density))
            r = r / r.sum()
            pulls = np.einsum("kij,kj->ki", S, gaps)
            score = r @ pulls
            hessian = hessian + np.einsum("k,kij->ij", r, pulls[:, :, None] * pulls[:, None, :] - S)
            hessian = hessian - np.outer(score, score)
            sharper.append(precision + rho * hessian)
            moved.append(mean - rho * np.linalg.solve(sharper[-1], gradient + score))
        m, S = np.array(moved), np.array(sharper)
        path.append(m)
    return torch.as_tensor(np.array(path))


def multimodal() -> Tensor:
    family = MixtureOfGaussians(torch.full((4,), 0.25, dtype=D))
    node = Node(family, family.of(torch.tensor(STARTS, dtype=D), torch.eye(2, dtype=D).expand(4, 2, 2)))
    factor = MixtureLogDensity(node, lambda theta: -himmelblau(theta), Delta())
    return walked(node, repeat([factor], STEPS), 0.2, lambda: family.moments(node.natural)[1], domain="raise")
