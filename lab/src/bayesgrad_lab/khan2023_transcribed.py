"""Deep-learning rules of Khan and Rue 2023 in NumPy, weight by weight from the printed equations, without the library.

Gradients are derived by hand. Equations are corrected where they are wrong: the noise of VOGN has the variance 1/s,
sums over a batch of M are multiplied by N/M, and gradients of dropped weights go through the mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

Batch = tuple[Sequence[Sequence[float]], Sequence[float]]
Gradients = Callable[[Sequence[float], Batch], list[list[float]]]  # of the loss of each example


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def perceptron_gradients(w: Sequence[float], batch: Batch) -> list[list[float]]:
    """Of the cross entropy of a network 2-3-1 with tanh, by the chain rule; w has its 13 weights in torch's order."""
    rows = []
    for x, y in zip(*batch):
        hidden = [math.tanh(w[2 * j] * x[0] + w[2 * j + 1] * x[1] + w[6 + j]) for j in range(3)]
        error = sigmoid(sum(w[9 + j] * hidden[j] for j in range(3)) + w[12]) - y
        behind = [error * w[9 + j] * (1 - hidden[j] ** 2) for j in range(3)]
        first = [behind[j] * x[k] for j in range(3) for k in range(2)]
        rows.append([*first, *behind, *(error * hidden[j] for j in range(3)), error])
    return rows


def logistic_gradients(w: Sequence[float], batch: Batch) -> list[list[float]]:
    """Of the cross entropy of a logistic regression with 2 weights."""
    return [[(sigmoid(w[0] * x[0] + w[1] * x[1]) - y) * x[k] for k in range(2)] for x, y in zip(*batch)]


def logistic_hessians(w: Sequence[float], batch: Batch) -> list[list[float]]:
    """Diagonals of the Hessian of each example."""
    rows = []
    for x, _ in zip(*batch):
        p = sigmoid(w[0] * x[0] + w[1] * x[1])
        rows.append([p * (1 - p) * x[k] ** 2 for k in range(2)])
    return rows


def squares(gradients: list[list[float]]) -> list[list[float]]:
    """Eq. 45: of the gradients of single examples, in the place of Hessians."""
    return [[g * g for g in row] for row in gradients]


def online_newton(
    start: Sequence[float],
    batches: Sequence[Batch],
    gradients: Gradients,
    *,
    size: int,
    rho: float,
    delta: float,
    hessians: Gradients | None = None,
    noise: Sequence[Sequence[float]] | None = None,
    retract: bool = False,
) -> Tensor:
    """Eq. 44, or Eq. 46 with given noise: means and precisions s after each step; s starts at N + delta.

    Args:
        size: N.
        hessians: their diagonals; None for Eq. 45.
        noise: standard normal numbers of each step, divided by the root of s.
        retract: s (1 + x + x^2/2), x = rho (h - s)/s, for (1 - rho) s + rho h (Lin et al., 2020).
    """
    theta, s, path = list(start), [size + delta] * len(start), []
    for t, batch in enumerate(batches):
        at = theta if noise is None else [m + e / math.sqrt(p) for m, e, p in zip(theta, noise[t], s)]
        rows = gradients(at, batch)
        curved = squares(rows) if hessians is None else hessians(at, batch)
        for j in range(len(theta)):
            gradient = size / len(rows) * sum(row[j] for row in rows)
            hessian = size / len(rows) * sum(row[j] for row in curved) + delta
            x = rho * (hessian - s[j]) / s[j]
            s[j] = s[j] * (1 + x + x * x / 2) if retract else (1 - rho) * s[j] + rho * hessian
            theta[j] = theta[j] - rho / s[j] * (gradient + delta * theta[j])
        path.append([*theta, *s])
    return torch.as_tensor(np.array(path))


def dropout(
    start: Sequence[float], batches: Sequence[Batch], masks: Sequence[Sequence[float]], *, keep: float, rho: float
) -> Tensor:
    """Eqs. 42 and 43 for the mean loss of a logistic regression, with the masks z of each step; s starts at 1."""
    theta, s, path = list(start), [1.0] * len(start), []
    for batch, z in zip(batches, masks):
        dropped = [m * keeps for m, keeps in zip(theta, z)]
        first, second = logistic_gradients(dropped, batch), logistic_hessians(dropped, batch)
        for j in range(len(theta)):
            gradient = z[j] * sum(row[j] for row in first) / len(first)
            hessian = z[j] ** 2 * sum(row[j] for row in second) / len(second)
            s[j] = (1 - rho) * s[j] + rho * hessian / keep
            theta[j] = theta[j] - rho / s[j] * gradient / keep
        path.append(list(theta))
    return torch.as_tensor(np.array(path))


def straight_through(start: Sequence[float], batches: Sequence[Batch], *, rho: float) -> Tensor:
    """Eq. 48 for the mean loss, with the factor 1 - rho of Eq. 49, the entropy's, which Eq. 48 leaves out."""
    latent, path = list(start), []
    for batch in batches:
        rows = perceptron_gradients([-1.0 if value < 0 else 1.0 for value in latent], batch)
        means = [sum(row[j] for row in rows) / len(rows) for j in range(len(latent))]
        latent = [(1 - rho) * value - rho * mean for value, mean in zip(latent, means)]
        path.append(latent)
    return torch.as_tensor(np.array(path))


def bayes_binn(
    start: Sequence[float],
    batches: Sequence[Batch],
    uniform: Sequence[Sequence[float]],
    *,
    size: int,
    rho: float,
    tau: float,
) -> Tensor:
    """Eq. 52, with the relaxed weights of Eq. 50 and the slopes s of Eq. 51."""
    latent, path = list(start), []
    for batch, draw in zip(batches, uniform):
        weights = [math.tanh((value + 0.5 * math.log(u / (1 - u))) / tau) for value, u in zip(latent, draw)]
        rows = perceptron_gradients(weights, batch)
        moved = []
        for j, (value, weight) in enumerate(zip(latent, weights)):
            slope = (1 - weight**2) / (tau * (1 - math.tanh(value) ** 2))
            total = size / len(rows) * sum(row[j] for row in rows)
            moved.append((1 - rho) * value - rho * slope * total)
        latent = moved
        path.append(latent)
    return torch.as_tensor(np.array(path))
