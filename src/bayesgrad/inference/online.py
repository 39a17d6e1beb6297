"""Learning from losses that come one after the other."""

from __future__ import annotations

from numbers import Real

from bayesgrad.inference.engine import run, step
from bayesgrad.inference.factor import Factor, Prior
from bayesgrad.inference.node import Node


def online(
    nodes: Node | list[Node],
    factor: Factor,
    rho: float,
    *,
    exact: bool = False,
    steps: int = 100,
    domain: str = "backtrack",
) -> None:
    r"""Moves a belief by one loss and keeps the rest of it:

    .. math::
        q_{t+1} = \mathrm{argmin}_q\; E_q[\ell_t] + \tfrac{1}{\rho}\, KL(q, q_t)

    The belief before is the prior, the loss's scale is rho, and one step of the rule with all of its length does the
    rest: it is exact where the loss is conjugate, and linear in expectations elsewhere. With a Categorical node that is
    Hedge, with FixedGaussian and Delta online gradient descent, with Gaussian and Delta("gauss-newton") the online
    Newton step.

    Args:
        factor: of -loss.
        rho: the learning rate, any positive number.
        exact: repeats the step until the minimum is found, the proximal point; a factor that is not conjugate then
            counts at the new belief, not at the old one.
        steps: of that, at most.

    Reference: 002, section 5.4; van der Hoeven et al., 2018.
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
