"""Faster convergence to the fixed point of the learning rule, by Anderson mixing."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from bayesgrad.families import Parameters
from bayesgrad.inference.engine import OutsideDomain, Result, check_steps, elbo, message, step
from bayesgrad.inference.factor import Factor
from bayesgrad.inference.node import Node


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

    Reference: Walker and Ni, 2011, for the mixing; Khan and Rue 2023, Eqs. 3 and 60, for the fixed point.
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
        found = _unflatten(_anderson_mix(past), here)
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
    warnings.warn(f"not converged after {steps} steps: the bound still changes by {change:.1g}.", stacklevel=2)
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


def _unflatten(flat: Tensor, like: Parameters) -> Parameters:
    pieces = flat.split([part.numel() for part in like])
    return tuple(piece.view_as(part) for piece, part in zip(pieces, like))
