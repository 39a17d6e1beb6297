r"""The Bayesian learning rule: one step, a loop over steps, and the ELBO.

.. math::
    \lambda \leftarrow \lambda + \rho \left[\frac{1}{c} \sum_a s_a \nabla_\mu E_q[\log f_a] + \nabla_\mu H(q)\right]

for a node with natural parameters λ, expectation parameters μ and a scale c of its entropy, and factors f_a with
scales s_a. Where the family's base measure is constant, ∇_μ H = -λ, and the step is λ ← (1 - rho) λ + rho Σ messages.

Reference: Khan and Rue 2023, Eqs. 3, 6 and 58 to 60.
Checked by: tests/equations/test_inference.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from numbers import Integral, Real
from operator import add
from typing import Any

import torch
from torch import Tensor

from bayesgrad.families import Parameters
from bayesgrad.inference.expectation import Delta, MonteCarlo
from bayesgrad.inference.factor import Factor
from bayesgrad.inference.node import Node, is_one
from bayesgrad.layers.batches import ProgressLine
from bayesgrad.warning import warn

DOMAINS = ("backtrack", "retract", "search", "raise")
SCHEDULES = ("sequential", "parallel")
MAX_HALVINGS = 40

Rho = float | Callable[[int], float] | Mapping[Node, float]
Changes = dict[Factor, Parameters]


class OutsideDomain(ArithmeticError):
    """The step leads outside the set of valid natural parameters, and no shorter step was found."""


def message(node: Node, factors: Iterable[Factor]) -> Parameters:
    """The sum of the factors' messages to a node: the new λ of a step with rho = 1.

    Raises:
        ValueError: no factor depends on the node.
    """
    return _sum_messages(node, [_scaled(node, factor) for factor in factors if _depends_on(factor, node)])


def elbo(nodes: Iterable[Node], factors: Iterable[Factor]) -> Tensor:
    """E_q[log p(data, x)] + H(q), with all constants: the log evidence of a conjugate model at its posterior."""
    values = [_scaled_value(factor) for factor in factors]
    return torch.stack([*values, *[node.entropy for node in nodes]]).sum()


def step(
    nodes: Node | Sequence[Node],
    factors: Sequence[Factor],
    rho: Rho = 1.0,
    *,
    momentum: float = 0.0,
    domain: str = "backtrack",
    schedule: str = "sequential",
    sites: Sites | None = None,
    iteration: int = 0,
) -> None:
    """Updates each node once.

    Args:
        rho: step size in (0, 1]: a number, a function of `iteration`, or a dict with a number for each node.
        momentum: adds this multiple of the last change of λ (Khan and Rue 2023, Eq. 80).
        domain: how to handle a step that leads outside the valid natural parameters. `"backtrack"` halves rho for the
            plates that need it. `"retract"` follows a curve that stays inside (Gaussians, without momentum).
            `"search"` is a line search: it halves rho until the bound does not decrease either. With `Delta`, whose
            messages are not gradients of its bound, it uses the joint density at the mean. `"raise"` raises an error.
        schedule: `"sequential"` updates each node with the new values of the nodes before it; `"parallel"` computes
            all messages first.
        sites: stores the messages of each factor separately (Khan and Rue 2023, Eq. 60).
        iteration: the argument of `rho` where it is a function.

    Raises:
        OutsideDomain: see `domain`. The node that failed and those after it are unchanged.
    """
    nodes = [nodes] if isinstance(nodes, Node) else list(nodes)
    if domain not in DOMAINS:
        raise ValueError(f"domain must be one of {', '.join(map(repr, DOMAINS))}, got {domain!r}.")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be 'sequential' or 'parallel', got {schedule!r}.")
    if not (isinstance(momentum, Real) and 0 <= momentum < 1):
        raise ValueError(f"momentum must be in [0, 1), got {momentum!r}.")
    step_sizes = [_step_size(rho, node, iteration) for node in nodes]
    ready: dict[Node, tuple[Parameters, Changes]] = {}
    if schedule == "parallel":
        ready = {node: _target(node, factors, sites) for node in nodes}
    for node, rate in zip(nodes, step_sizes):
        target, changes = ready[node] if ready else _target(node, factors, sites)
        before = node.natural
        drift = None
        if momentum and node.previous is not None:
            drift = tuple(momentum * (now - old) for now, old in zip(before, node.previous))
        bound = _search_objective(nodes, factors) if domain == "search" else None
        node.natural, size = _take_step(node, target, rate, domain, drift)
        node.previous = before
        if bound is not None:
            size = size * _search(nodes, factors, node, before, bound)
        if sites is not None:
            sites.update(node, changes, size)


@dataclass(eq=False)
class Sites:
    """Stores the last message of each factor to each node and updates each of them with the step size.

    λ is always their sum, also after steps that were shortened or retracted. The first step of a node divides the
    initial λ evenly among its factors. A factor that is added later starts with a message of zero.

    Reference: Khan and Rue 2023, Eq. 60.
    """

    messages: dict[tuple[Factor, Node], Parameters] = field(default_factory=dict)

    def total(self, node: Node) -> Parameters | None:
        """The sum of the messages stored for a node; None if there are none."""
        own = [value for (_, other), value in self.messages.items() if other is node]
        return _sum_messages(node, own) if own else None

    def changes(self, node: Node, factors: Sequence[Factor]) -> Changes:
        """The difference between each factor's current message and its stored message."""
        own = [factor for factor in factors if _depends_on(factor, node)]
        if own and self.total(node) is None:
            for factor in own:
                self.messages[factor, node] = tuple(part / len(own) for part in node.natural)
        zero = tuple(torch.zeros_like(part) for part in node.natural)
        old = [self.messages.get((factor, node), zero) for factor in own]
        new = [_scaled(node, factor) for factor in own]
        return {factor: tuple(b - a for a, b in zip(*pair)) for factor, *pair in zip(own, old, new)}

    def update(self, node: Node, changes: Changes, size: float | Tensor) -> None:
        """Adds `size` times the changes to the stored messages, and divides any other change of λ evenly among them."""
        for factor, change in changes.items():
            zero = tuple(torch.zeros_like(part) for part in change)
            moved = zip(self.messages.get((factor, node), zero), node.scale_by_plate(size, change))
            self.messages[factor, node] = tuple(a + b for a, b in moved)
        total = self.total(node)
        if total is not None and changes:
            rest = [(now - known) / len(changes) for now, known in zip(node.natural, total)]
            for factor in changes:
                self.messages[factor, node] = tuple(a + b for a, b in zip(self.messages[factor, node], rest))


@dataclass(frozen=True)
class Result:
    """The outcome of `run`.

    Args:
        elbos: the bound before the first step and after each step.
        converged: whether the change of the bound fell below the tolerance.
        interrupted: whether Ctrl-C stopped the run.
        taken: number of steps, where the bound was not computed after each step.
    """

    elbos: list[float]
    converged: bool
    interrupted: bool = False
    taken: int | None = None

    @property
    def elbo(self) -> float:
        return self.elbos[-1]

    @property
    def steps(self) -> int:
        return len(self.elbos) - 1 if self.taken is None else self.taken


def run(
    nodes: Node | Sequence[Node],
    factors: Sequence[Factor],
    steps: int = 100,
    rho: Rho = 1.0,
    *,
    tolerance: float = 1e-10,
    momentum: float = 0.0,
    domain: str = "backtrack",
    schedule: str = "sequential",
    sites: Sites | None = None,
    fixed: Sequence[Node] = (),
    tune: Callable[[], None] | None = None,
    progress: bool | None = None,
    unit: float | None = None,
    interruptible: bool = False,
) -> Result:
    """Repeats `step` until the relative change of the bound is below `tolerance`, at most `steps` times.

    A run that does not converge warns. If its last step lowered the bound, the warning names the factor whose value
    fell short of what its messages predict. If the bound becomes NaN or infinite, the nodes get the parameters before
    that step and `OutsideDomain` is raised.

    Args:
        tolerance: relative change of the bound; 0 takes all steps and does not warn.
        fixed: nodes of the factors that keep their distributions. All others must be in `nodes`.
        tune: called after each step, to update hyperparameters of the factors.
        progress: whether to print a progress line; None prints one in a terminal, after two seconds.
        unit: compares the change of the bound with this number (of rows, for example) instead of the bound's size.
        interruptible: whether Ctrl-C ends the run with a warning and the parameters of the last complete step.
        rho, momentum, domain, schedule, sites: see `step`.

    Raises:
        OutsideDomain: the bound became infinite or NaN, or no valid step was found.
        ValueError: a factor depends on a node that is neither in `nodes` nor in `fixed`.
    """
    check_steps(steps)
    nodes = [nodes] if isinstance(nodes, Node) else list(nodes)
    everything = [*nodes, *fixed]
    _check_complete(everything, factors)
    elbos, progress_line = [float(elbo(everything, factors))], ProgressLine(progress, steps)
    before = [node.natural for node in nodes]
    converged = interrupted = False
    for count in range(steps):
        before = [node.natural for node in nodes]
        try:
            step(nodes, factors, rho, momentum=momentum, domain=domain, schedule=schedule, sites=sites, iteration=count)
            if tune is not None:
                tune()
            bound = float(elbo(everything, factors))
        except KeyboardInterrupt:
            _restore(nodes, before)
            if not interruptible:
                raise
            interrupted = True
            break
        if not math.isfinite(bound):
            _restore(nodes, before)
            raise OutsideDomain(f"the bound is {bound} after step {count + 1}: use a smaller rho than {rho}.")
        elbos.append(bound)
        progress_line.update(count + 1, bound)
        size = max(1.0, abs(bound)) if unit is None else unit
        if abs(elbos[-1] - elbos[-2]) <= tolerance * size and tolerance:
            converged = True
            break
    progress_line.close()
    if interrupted:
        warn(f"interrupted in step {len(elbos)}: the parameters before this step are kept.")
    elif not converged and tolerance:
        change = elbos[-1] - elbos[-2]
        words = f"bound still changes by {change:.1g}; use more steps or another rho."
        if change < 0:
            words = f"the last step lowered the bound by {-change:.1g}{_blame(nodes, factors, before)}"
        warn(f"not converged after {steps} steps: {words}")
    return Result(elbos, converged, interrupted)


# --- details of a step ---


def _check_complete(nodes: Sequence[Node], factors: Sequence[Factor]) -> None:
    known = {id(node) for node in nodes}
    for place, factor in enumerate(factors):
        for node in factor.nodes:
            if id(node) not in known:
                raise ValueError(
                    f"factors[{place}], {type(factor).__name__}, depends on {node}, which is not updated: add it to "
                    "nodes, or to fixed if it should keep its distribution."
                )


def _blame(nodes: Sequence[Node], factors: Sequence[Factor], before: Sequence[Parameters]) -> str:
    """The end of a warning: which factor's value rose least, compared with ⟨message, change of μ⟩, in the last step.

    A sum of these predictions is not negative for a step of the rule. A value that falls short of it shows a message
    that is not the gradient of the value, or a step that is too long for a value that is not linear in μ.
    """
    after, missing = [node.natural for node in nodes], [0.0] * len(factors)
    _restore(nodes, before)
    for node, natural in zip(nodes, after):
        own = [place for place, factor in enumerate(factors) if _depends_on(factor, node)]
        mean, values = node.mean, [_scaled_value(factors[place]) for place in own]
        messages = [node.scale_by_plate(factors[place].scale, factors[place].message(node)) for place in own]
        node.natural = natural
        change = tuple(b - a for a, b in zip(mean, node.mean))
        for place, value, sent in zip(own, values, messages):
            rise = _scaled_value(factors[place]) - value
            missing[place] += float(node.family.dot(sent, change).sum() - rise)
    worst = max(range(len(factors)), key=missing.__getitem__)
    factor, names = factors[worst], ", ".join(str(node) for node in factors[worst].nodes)
    who = f"factors[{worst}], {type(factor).__name__} of {names}"
    expectation = getattr(factor, "expectation", None)
    if isinstance(expectation, MonteCarlo) and not expectation.fixed:
        return f", by the noise of MonteCarlo in {who}: use more samples, fixed=True or a smaller rho."
    return (
        f". The value of {who} fell short of what its messages predict by {missing[worst]:.1g}: compare it with Monte "
        "Carlo by its method check(), or use domain='search' or a smaller rho."
    )


def _restore(nodes: Sequence[Node], before: Sequence[Parameters]) -> None:
    for node, natural in zip(nodes, before):
        node.natural = natural


def _depends_on(factor: Factor, node: Node) -> bool:
    return any(own is node for own in factor.nodes)


def _scaled(node: Node, factor: Factor) -> Parameters:
    ratio = factor.scale / node.scale
    own = factor.message(node)
    return own if is_one(ratio) else node.scale_by_plate(ratio, own)


def _scaled_value(factor: Factor) -> Tensor:
    value = factor.value()
    return (value if is_one(factor.scale) else factor.scale * value).sum()


def _sum_messages(node: Node, messages: Sequence[Parameters]) -> Parameters:
    if not messages:
        raise ValueError(f"no factor depends on {node}: add a factor or remove the node.")
    return tuple(reduce(add, parts) for parts in zip(*messages))


def _step_size(rho: Rho, node: Node, iteration: int) -> float:
    if isinstance(rho, Mapping):
        if node not in rho:
            raise ValueError(f"rho has no step size for {node}: add one.")
        value = rho[node]
    else:
        value = rho(iteration) if callable(rho) else rho
    known = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
    rate = float(value) if known else math.nan
    if not 0 < rate <= 1:
        raise ValueError(f"rho must be in (0, 1], got {value!r}.")
    return rate


def check_steps(steps: Any) -> None:
    if not (isinstance(steps, Integral) and int(steps) >= 1):
        raise ValueError(f"steps must be a positive integer, got {steps!r}.")


def _target(node: Node, factors: Sequence[Factor], sites: Sites | None) -> tuple[Parameters, Changes]:
    """λ after a step with rho = 1: λ plus the natural gradient of the bound. With sites, also the change of each."""
    if sites is None:
        return node.family.full_step(node.natural, message(node, factors)), {}
    if not node.family.constant_base and any(part.any() for part in node.family.base_gradient(node.natural)):
        raise ValueError(f"{node} has a base measure that is not constant: sites do not support it, use sites=None.")
    changes = sites.changes(node, factors)
    if not changes and sites.total(node) is not None:  # none of its factors is given
        return node.natural, {}
    total = _sum_messages(node, list(changes.values()))
    return tuple(a + b for a, b in zip(node.natural, total)), changes


def _take_step(
    node: Node, target: Parameters, rate: float, domain: str, drift: Parameters | None
) -> tuple[Parameters, float | Tensor]:
    """λ after the step, and the step size, which may differ between plates."""
    family, natural = node.family, node.natural
    if domain == "retract" and drift is None and hasattr(family, "retract"):
        _check_finite(node, target)
        direction = tuple(b - a for a, b in zip(natural, target))
        moved = family.retract(natural, direction, rate)  # pyright: ignore[reportAttributeAccessIssue]
        if family.in_domain(moved).all():  # else the step is too long for floating-point numbers
            return moved, rate
    size: float | Tensor = rate
    for _ in range(MAX_HALVINGS):
        moved = family.part_step(natural, target, size)
        if drift is not None:
            moved = tuple(a + b for a, b in zip(moved, node.scale_by_plate(size / rate, drift)))
        inside = family.in_domain(moved)
        if inside.all():
            return moved, size
        _check_finite(node, target)
        if domain == "raise":
            break
        whole = size if isinstance(size, Tensor) else natural[0].new_full(family.plates(natural), size)
        size = torch.where(inside, whole, whole / 2)
    raise OutsideDomain(
        f"a step of rho = {rate:g} leads outside the valid parameters of {node}, and no shorter step was found: use a "
        "smaller rho, domain='retract' for a Gaussian, or a factor with a concave logarithm."
        if domain != "raise"
        else f"a step of rho = {rate:g} leads outside the valid parameters of {node}: use a smaller rho or "
        "domain='backtrack'."
    )


def _check_finite(node: Node, target: Parameters) -> None:
    if any(not torch.isfinite(part).all() for part in target):
        raise OutsideDomain(f"the messages to {node} contain NaN or infinity: check the data and the initial values.")


def _search_objective(nodes: Sequence[Node], factors: Sequence[Factor]) -> Tensor:
    """What a line search must not decrease: the bound, without the entropy of nodes that Delta evaluates at a point."""
    pointwise = [factor for factor in factors if isinstance(getattr(factor, "expectation", None), Delta)]
    points = {id(node) for factor in pointwise for node in factor.nodes}
    values = []
    for factor in factors:
        known = all(id(node) in points for node in factor.nodes)
        values.append((factor.scale * (factor.value_at_mean() if known else factor.value())).sum())
    return torch.stack([*values, *[node.entropy for node in nodes if id(node) not in points]]).sum()


def _search(nodes: Sequence[Node], factors: Sequence[Factor], node: Node, before: Parameters, bound: Tensor) -> float:
    """Halves the last step until the bound is not lower than before; returns the remaining fraction of the step."""
    after, part = node.natural, 1.0
    for _ in range(MAX_HALVINGS):
        now = _search_objective(nodes, factors)
        if now >= bound - 1e-12 * bound.abs():
            return part
        part /= 2
        node.natural = tuple(a + part * (b - a) for a, b in zip(before, after))
    node.natural = before
    return 0.0
