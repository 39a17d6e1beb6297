"""Minimisation of any function by the Bayesian learning rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesgrad.families import MixtureOfGaussians
from bayesgrad.inference.engine import Rho, run
from bayesgrad.inference.expectation import Delta, Expectation
from bayesgrad.inference.factor import LogDensity
from bayesgrad.inference.multimodal import MixtureLogDensity
from bayesgrad.inference.node import Node


@dataclass(frozen=True)
class Minimum:
    """The result of `minimize`.

    Args:
        points: one row for each mixture component of q, lowest loss first.
        losses: at these points.
        objectives: E_q[loss] - H(q), before the first step and after each step.
        converged: whether the objective converged.
    """

    points: Tensor
    losses: Tensor
    objectives: list[float]
    converged: bool

    @property
    def point(self) -> Tensor:
        return self.points[0]

    @property
    def loss(self) -> float:
        return float(self.losses[0])


def minimize(
    loss: Callable[[Tensor], Tensor],
    q: Node,
    *,
    expectation: Expectation | None = None,
    rho: Rho = 1.0,
    steps: int = 100,
    momentum: float = 0.0,
    domain: str = "backtrack",
    tolerance: float = 1e-10,
    progress: bool | None = None,
) -> Minimum:
    r"""Minimises E_q[loss(θ)] - H(q) over the distributions q of a family, and thereby the loss.

    | family | expectation | algorithm |
    |---|---|---|
    | `FixedGaussian(1)` | `Delta()` | gradient descent with learning rate rho |
    | `Gaussian` | `Delta()` | Newton's method, with the Hessian averaged for rho < 1 |
    | `Gaussian` | `GaussHermite()`, `MonteCarlo()` | variational Newton, which prefers wide minima |
    | `MixtureOfGaussians` | any | finds several minima; the entropy of the mixture keeps the components apart |

    Args:
        loss: maps one vector (P,) to a scalar.
        q: a Node, the initial distribution; it holds the final distribution afterwards.
        expectation: computes E_q; None uses `Delta()`.
        rho, momentum, domain: see `step`.
        steps, tolerance, progress: see `run`.

    >>> from bayesgrad.families import Gaussian
    >>> q = Node(Gaussian(), Gaussian().of(torch.zeros(1).double(), torch.eye(1).double()))
    >>> minimize(lambda theta: (theta - 3).square().sum(), q).point
    tensor([3.0000], dtype=torch.float64)

    Reference: Khan and Rue 2023, sections 1.3 and 3, Eqs. 24 to 32.
    Checked by: tests/equations/test_inference.py.
    """
    if not isinstance(q, Node):
        raise TypeError(f"q must be a Node, the initial distribution, got {type(q).__name__}.")
    expectation = Delta() if expectation is None else expectation
    several = isinstance(q.family, MixtureOfGaussians)
    factor = (MixtureLogDensity if several else LogDensity)(q, lambda theta: -loss(theta), expectation)
    result = run(q, [factor], steps, rho, momentum=momentum, domain=domain, tolerance=tolerance, progress=progress)
    points = q.family.moments(q.natural)[1] if isinstance(q.family, MixtureOfGaussians) else q.family.mode(q.natural)
    points = torch.atleast_2d(points)
    losses = torch.stack([loss(point) for point in points])
    order = losses.argsort()
    return Minimum(points[order], losses[order], [-value for value in result.elbos], result.converged)
