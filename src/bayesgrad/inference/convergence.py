"""The rule's fixed point, reached in fewer steps."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from bayesgrad.families import Parameters
from bayesgrad.inference.engine import OutsideDomain, Result, elbo, message, require_steps, step
from bayesgrad.inference.factor import Factor
from bayesgrad.inference.node import Node


def run_to_convergence(
    node: Node, factors: Sequence[Factor], steps: int = 100, *, tolerance: float = 1e-10, memory: int = 5
) -> Result:
    r"""`run` with rho = 1 for one node, where the steps before say what the next one should add (Anderson's mixing):

    .. math::
        \lambda \leftarrow \lambda + r - (\Delta\Lambda + \Delta R)\,\gamma, \quad
        \gamma = \mathrm{argmin}\, |r - \Delta R\, \gamma|

    for residuals r = message - λ and the differences of the last few λ and r. A step that leaves the domain or lowers
    the bound is not taken: a plain one with a search takes its place, and what was remembered is forgotten. So the
    bound never falls, and where messages are affine in λ a few steps are exact.

    Args:
        memory: how many differences are kept; 0 takes plain steps.

    Reference: Walker and Ni, 2011, for the mixing; 002, Eqs. 3 and 60, for what is mixed.
    Checked by: tests/equations/test_gaussian_process.py.
    """
    require_steps(steps)
    past: deque[tuple[Tensor, Tensor]] = deque(maxlen=memory + 1)
    elbos, slack = [float(elbo([node], factors))], 1e-12
    for _ in range(steps):
        here = node.natural
        target = message(node, factors)
        flat, residual = _flat(here), _flat(target) - _flat(here)
        if not torch.isfinite(residual).all():
            raise OutsideDomain(f"the messages to {node} hold NaN or infinity: look at the data and the start.")
        past.append((flat, residual))
        found = _unflat(_mixed(past), here)
        bound = -math.inf
        if bool(node.family.inside(found).all()):
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
    warnings.warn(f"{steps} steps were not enough: the bound still moves by {change:.1g}.", stacklevel=2)
    return Result(elbos, False)


def _mixed(past: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    flat, residual = past[-1]
    if len(past) < 2:
        return flat + residual
    moves = torch.stack([b[0] - a[0] for a, b in zip(list(past)[:-1], list(past)[1:])], 1)
    turns = torch.stack([b[1] - a[1] for a, b in zip(list(past)[:-1], list(past)[1:])], 1)
    # Normal equations with a ridge at rounding: differences may have become parallel.
    gram = turns.mT @ turns
    gram.diagonal().add_(1e-14 * gram.diagonal().amax() + torch.finfo(gram.dtype).tiny)
    gamma = torch.linalg.solve(gram, turns.mT @ residual)
    return flat + residual - (moves + turns) @ gamma


def _flat(parameters: Parameters) -> Tensor:
    return torch.cat([part.flatten() for part in parameters])


def _unflat(flat: Tensor, like: Parameters) -> Parameters:
    pieces = flat.split([part.numel() for part in like])
    return tuple(piece.view_as(part) for piece, part in zip(pieces, like))
