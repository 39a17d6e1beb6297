"""The learning rule run to convergence with acceleration, as a minimiser of any function, and online, loss by loss."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from bayesgrad.families import MixtureOfGaussians, Parameters
from bayesgrad.inference.conjugate import Prior
from bayesgrad.inference.engine import OutsideDomain, Result, Rho, check_steps, elbo, message, run, step
from bayesgrad.inference.expectation import Delta, Expectation, Function
from bayesgrad.inference.factor import Factor
from bayesgrad.inference.log_density import LogDensity
from bayesgrad.inference.multimodal import MixtureLogDensity
from bayesgrad.inference.node import Node
from bayesgrad.warning import warn


def run_to_convergence(
    node: Node, factors: Sequence[Factor], steps: int = 100, *, tolerance: float = 1e-10, memory: int = 5
) -> Result:
    r"""`run` with rho = 1 for one node, accelerated by Anderson mixing of the previous steps:

    .. math::
        \lambda \leftarrow \lambda + r - (\Delta\Lambda + \Delta R)\,\gamma, \quad
        \gamma = \mathrm{argmin}\, |r - \Delta R\, \gamma|

    for residuals r = message - λ and the differences of the last few λ and r. A step that leaves the domain or lowers
    the bound is replaced by a step with a line search, and the stored differences are cleared. Therefore the bound
    never decreases. Where messages are affine in λ, a few steps are exact.

    Args:
        memory: number of stored differences; 0 disables mixing.

    Reference: Walker and Ni, 2011, for the mixing; Khan and Rue 2023, Eqs. 5 and 60, for the fixed point.
    Checked by: tests/equations/test_gaussian_process.py.
    """
    check_steps(steps)
    past: deque[tuple[Tensor, Tensor]] = deque(maxlen=memory + 1)
    elbos, slack = [float(elbo([node], factors))], 1e-12
    for _ in range(steps):
        here = node.natural
        target = message(node, factors)
        flat, residual = _flatten(here), _flatten(target) - _flatten(here)
        if not torch.isfinite(residual).all():
            raise OutsideDomain(f"the messages to {node} contain NaN or infinity: check the data and initial values.")
        past.append((flat, residual))
        pieces = _anderson_mix(past).split([part.numel() for part in here])
        found = tuple(piece.view_as(part) for piece, part in zip(pieces, here))
        bound = -math.inf
        if bool(node.family.in_domain(found).all()):
            node.natural = found
            bound = float(elbo([node], factors))
        if not bound >= elbos[-1] - slack * abs(elbos[-1]):
            node.natural = here
            past.clear()
            step(node, factors, domain="search")
            bound = float(elbo([node], factors))
        elbos.append(bound)
        if abs(elbos[-1] - elbos[-2]) <= tolerance * max(1.0, abs(bound)):
            return Result(elbos, True)
    change = abs(elbos[-1] - elbos[-2])
    warn(f"not converged after {steps} steps: the bound still changes by {change:.1g}.")
    return Result(elbos, False)


def _anderson_mix(past: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    flat, residual = past[-1]
    if len(past) < 2:
        return flat + residual
    natural_changes = torch.stack([b[0] - a[0] for a, b in zip(list(past)[:-1], list(past)[1:])], 1)
    residual_changes = torch.stack([b[1] - a[1] for a, b in zip(list(past)[:-1], list(past)[1:])], 1)
    # Normal equations with a ridge of rounding size, because the differences may have become parallel.
    gram = residual_changes.mT @ residual_changes
    gram.diagonal().add_(1e-14 * gram.diagonal().amax() + torch.finfo(gram.dtype).tiny)
    gamma = torch.linalg.solve(gram, residual_changes.mT @ residual)
    return flat + residual - (natural_changes + residual_changes) @ gamma


def _flatten(parameters: Parameters) -> Tensor:
    return torch.cat([part.flatten() for part in parameters])


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
    loss: Function,
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


def online(
    nodes: Node | list[Node],
    factor: Factor,
    rho: float,
    *,
    exact: bool = False,
    steps: int = 100,
    domain: str = "backtrack",
) -> None:
    r"""Updates the distribution of nodes by one loss and keeps it close to the previous one:

    .. math::
        q_{t+1} = \mathrm{argmin}_q\; E_q[\ell_t] + \tfrac{1}{\rho}\, KL(q, q_t)

    The previous distribution is the prior, rho is the scale of the loss, and the update is one step of the learning
    rule with step size 1. It is exact for conjugate losses, and linear in expectations otherwise. With a Categorical
    node it is Hedge, with FixedGaussian and Delta online gradient descent, with Gaussian and Delta("gauss-newton") the
    online Newton step.

    Args:
        factor: the factor of -loss.
        rho: the learning rate, any positive number.
        exact: repeats the step until it converges to the minimum, the proximal point. The message of a factor that is
            not conjugate is then taken at the new distribution, not at the old one.
        steps: maximum number of steps for `exact`.

    Reference: Khan and Rue 2023, section 5.4; van der Hoeven et al., 2018.
    Checked by: tests/equations/test_inference.py.
    """
    if not (isinstance(rho, Real) and 0 < rho < float("inf")):
        raise ValueError(f"rho must be a finite positive number, got {rho!r}.")
    nodes = [nodes] if isinstance(nodes, Node) else nodes
    before, scale = [Prior(node, node.natural) for node in nodes], factor.scale
    try:
        factor.scale = scale * rho
        if exact:
            run(nodes, [*before, factor], steps, domain="search", tolerance=1e-13)
        else:
            step(nodes, [*before, factor], domain=domain)
    finally:
        factor.scale = scale
