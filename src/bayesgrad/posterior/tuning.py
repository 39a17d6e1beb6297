"""Optimisation of a few positive hyperparameters, with and without gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

STRIDE, FINEST = math.log(4.0), 0.02  # first and last step of the search in logarithms: a factor of 4, then 2 %
GAIN = 1e-6  # the smallest improvement that is accepted, in nats per example


def maximise_by_gradient(objective: Callable[[Tensor], Tensor], start: Sequence[float], steps: int) -> list[float]:
    """Maximises a differentiable function of positive numbers by L-BFGS in their logarithms."""
    theta = torch.tensor(start, dtype=torch.float64).log().requires_grad_()
    search = torch.optim.LBFGS(
        [theta], max_iter=steps, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        theta.grad = None
        with torch.enable_grad():
            loss = -objective(theta.exp())
            loss.backward()
        return loss.detach()

    search.step(closure)
    return theta.detach().exp().tolist()


def maximise_by_search(objective: Callable[[list[float]], float], start: Sequence[float], steps: int) -> list[float]:
    """Maximises any function of positive numbers by pattern search in their logarithms.

    Each number is moved up and down by a stride. A successful move is repeated; without success the stride is halved.

    >>> [round(x, 1) for x in maximise_by_search(lambda x: -(math.log(x[0] / 3) ** 2), [100.0], 100)]
    [3.0]

    Reference: Hooke and Jeeves, 1961.
    """
    theta, stride = [math.log(value) for value in start], STRIDE
    best = objective(list(start))

    def better(other: list[float]) -> bool:
        nonlocal theta, best, steps
        value = objective([math.exp(t) for t in other])
        steps -= 1
        if value > best + GAIN:
            best, theta = value, other
            return True
        return False

    while stride > FINEST and steps > 0:
        before = theta
        for place in range(len(theta)):
            for move in (stride, -stride):
                if better([*theta[:place], theta[place] + move, *theta[place + 1 :]]):
                    break
        if theta is before:
            stride /= 2
        while theta is not before and steps > 0:
            ahead = [2 * now - then for now, then in zip(theta, before)]
            before = theta
            better(ahead)
    return [math.exp(t) for t in theta]
