"""Online learning: one update per loss."""

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
