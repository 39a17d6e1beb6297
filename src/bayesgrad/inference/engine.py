r"""The Bayesian learning rule: one step, from which the rest of this package comes.

.. math::
    \lambda \leftarrow \lambda + \rho \left[\frac{1}{c} \sum_a s_a \nabla_\mu E_q[\log f_a] + \nabla_\mu H(q)\right]

for a node with natural parameters λ and expectations μ, factors f_a with scales s_a, and a scale c of its entropy.
Where the family's base measure is constant, ∇_μ H = -λ, and the step goes a part rho of the way to the messages' sum.

Reference: 002, Eqs. 3, 6 and 58 to 60.
Checked by: tests/equations/test_inference.py.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from numbers import Integral, Real
from operator import add
from typing import Any

import torch
from torch import Tensor

from bayesgrad.families import Parameters
from bayesgrad.inference.expectation import Delta
from bayesgrad.inference.factor import Factor
from bayesgrad.inference.node import Node

DOMAINS = ("backtrack", "retract", "search", "refuse")
SCHEDULES = ("sequential", "parallel")
HALVINGS = 40

Rho = float | Callable[[int], float] | Mapping[Node, float]
Fresh = dict[Factor, Parameters]


class OutsideDomain(ArithmeticError):
    """No step along a message leads to a distribution."""


def message(node: Node, factors: Iterable[Factor]) -> Parameters:
    """The sum of the factors' messages to a node: where λ goes with rho = 1.

    Raises:
        ValueError: no factor mentions the node.
    """
    return _added(node, [_scaled(node, factor) for factor in factors if _mentions(factor, node)])


def elbo(nodes: Iterable[Node], factors: Iterable[Factor]) -> Tensor:
    """E_q[log p(data, x)] + H(q), complete: of a conjugate model, at its posterior, the log evidence."""
    values = [_times(factor.scale, factor.value()).sum() for factor in factors]
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
    count: int = 0,
) -> None:
    """Moves each node once.

    Args:
        rho: in (0, 1]; a number, a function of `count`, or one for each node.
        momentum: adds so much of the last change of λ (002, Eq. 80).
        domain: what happens where a step would leave the family's parameters: `"backtrack"` halves rho, for the plates
            that need it, `"retract"` bends a Gaussian's step so that it never does (where there is no momentum),
            `"search"` halves rho until the bound has not fallen either (with `Delta`, whose messages are no gradients
            of its bound: the joint density at the mean), `"refuse"` raises.
        schedule: `"sequential"`: each node sees what became of those before it; `"parallel"`: of none.
        sites: messages that are kept factor by factor (the local form, Eq. 60).

    Raises:
        OutsideDomain: see `domain`. Nodes are as they were before the one that failed.
    """
    nodes = [nodes] if isinstance(nodes, Node) else list(nodes)
    if domain not in DOMAINS:
        raise ValueError(f"domain must be one of {', '.join(map(repr, DOMAINS))}, got {domain!r}.")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be 'sequential' or 'parallel', got {schedule!r}.")
    if not (isinstance(momentum, Real) and 0 <= momentum < 1):
        raise ValueError(f"momentum must be in [0, 1), got {momentum!r}.")
    rates = [_rate(rho, node, count) for node in nodes]
    ready: dict[Node, tuple[Parameters, Fresh]] = {}
    if schedule == "parallel":
        ready = {node: _direction(node, factors, sites) for node in nodes}
    for node, rate in zip(nodes, rates):
        direction, fresh = ready[node] if ready else _direction(node, factors, sites)
        before = node.natural
        drift = None
        if momentum and node.previous is not None:
            drift = tuple(momentum * (now - old) for now, old in zip(before, node.previous))
        bound = _height(nodes, factors) if domain == "search" else None
        node.natural, size = _moved(node, direction, rate, domain, drift)
        node.previous = before
        if bound is not None:
            size = size * _search(nodes, factors, node, before, bound)
        if sites is not None:
            sites.keep(node, fresh, size)


@dataclass(eq=False)
class Sites:
    """Messages that are kept for each factor and node, and faded one by one: the lazy form.

    λ is their sum, also after steps that were shortened or bent. What the start had beyond them is shared out evenly
    among the factors of a node's first step; a factor that comes later starts with nothing.

    Reference: 002, Eq. 60.
    """

    kept: dict[tuple[Factor, Node], Parameters] = field(default_factory=dict)

    def total(self, node: Node) -> Parameters | None:
        """The sum of what is kept for a node; None where nothing is."""
        own = [value for (_, other), value in self.kept.items() if other is node]
        return _added(node, own) if own else None

    def changes(self, node: Node, factors: Sequence[Factor]) -> Fresh:
        """What each factor's message would change of the one that is kept."""
        own = [factor for factor in factors if _mentions(factor, node)]
        if own and self.total(node) is None:
            for factor in own:
                self.kept[factor, node] = tuple(part / len(own) for part in node.natural)
        zero = tuple(torch.zeros_like(part) for part in node.natural)
        old = [self.kept.get((factor, node), zero) for factor in own]
        new = [_scaled(node, factor) for factor in own]
        return {factor: tuple(b - a for a, b in zip(*pair)) for factor, *pair in zip(own, old, new)}

    def keep(self, node: Node, fresh: Fresh, size: float | Tensor) -> None:
        """Moves messages by a step of that size; what bends and momentum add to λ is shared out evenly."""
        for factor, change in fresh.items():
            zero = tuple(torch.zeros_like(part) for part in change)
            moved = zip(self.kept.get((factor, node), zero), node.spread(size, change))
            self.kept[factor, node] = tuple(a + b for a, b in moved)
        total = self.total(node)
        if total is not None and fresh:
            rest = [(now - known) / len(fresh) for now, known in zip(node.natural, total)]
            for factor in fresh:
                self.kept[factor, node] = tuple(a + b for a, b in zip(self.kept[factor, node], rest))


@dataclass(frozen=True)
class Result:
    """How a run went.

    Args:
        elbos: the bound before the first step and after each.
        converged: whether it settled within the tolerance.
        interrupted: whether somebody stopped it.
        taken: steps, where the bound was not looked at after each.
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
    tune: Callable[[], None] | None = None,
    progress: bool | None = None,
    unit: float | None = None,
    interruptible: bool = False,
) -> Result:
    """Steps until the bound moves by less than `tolerance` of its size, or `steps` times.

    A run that does not settle warns. One whose bound is no number any more stops with the last parameters for which
    it was one.

    Args:
        tolerance: 0 takes all steps and warns of nothing.
        tune: called after each step, to move what the factors depend on besides nodes.
        progress: whether a line is kept up to date; None: in a terminal, after two seconds.
        unit: what a change of the bound is compared with in place of its size: the number of rows, say.
        interruptible: whether Ctrl-C ends the run with the parameters of the last whole step, and a warning.
        rho, momentum, domain, schedule, sites: see `step`.

    Raises:
        OutsideDomain: the bound became infinite or NaN, or a step had nowhere to go.
    """
    require_steps(steps)
    nodes = [nodes] if isinstance(nodes, Node) else list(nodes)
    elbos, shown = [float(elbo(nodes, factors))], Line(progress, steps)
    converged = interrupted = False
    for count in range(steps):
        before = [node.natural for node in nodes]
        try:
            step(nodes, factors, rho, momentum=momentum, domain=domain, schedule=schedule, sites=sites, count=count)
            if tune is not None:
                tune()
            bound = float(elbo(nodes, factors))
        except KeyboardInterrupt:
            _put_back(nodes, before)
            if not interruptible:
                raise
            interrupted = True
            break
        if not math.isfinite(bound):
            _put_back(nodes, before)
            raise OutsideDomain(f"the bound is {bound} after step {count + 1}: take a smaller rho than {rho}.")
        elbos.append(bound)
        shown.show(count + 1, bound)
        size = max(1.0, abs(bound)) if unit is None else unit
        if abs(elbos[-1] - elbos[-2]) <= tolerance * size and tolerance:
            converged = True
            break
    shown.end()
    if interrupted:
        warnings.warn(f"interrupted in step {len(elbos)}: the parameters before it are kept.", stacklevel=2)
    elif not converged and tolerance:
        change = abs(elbos[-1] - elbos[-2])
        warnings.warn(
            f"{steps} steps were not enough: the bound still moves by {change:.1g}. Take more steps, or another rho.",
            stacklevel=2,
        )
    return Result(elbos, converged, interrupted)


# --- how a step is taken ---


def _put_back(nodes: Sequence[Node], before: Sequence[Parameters]) -> None:
    for node, natural in zip(nodes, before):
        node.natural = natural


def _mentions(factor: Factor, node: Node) -> bool:
    return any(own is node for own in factor.nodes)


def _scaled(node: Node, factor: Factor) -> Parameters:
    ratio = factor.scale / node.scale
    own = factor.message(node)
    return own if isinstance(ratio, float) and ratio == 1 else node.spread(ratio, own)


def _times(scale: float | Tensor, value: Tensor) -> Tensor:
    return value if isinstance(scale, float) and scale == 1 else scale * value


def _added(node: Node, messages: Sequence[Parameters]) -> Parameters:
    if not messages:
        raise ValueError(f"no factor mentions {node}: it has nothing to learn from.")
    return tuple(reduce(add, parts) for parts in zip(*messages))


def _rate(rho: Rho, node: Node, count: int) -> float:
    if isinstance(rho, Mapping):
        if node not in rho:
            raise ValueError(f"rho names no step size for {node}.")
        value = rho[node]
    else:
        value = rho(count) if callable(rho) else rho
    known = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
    rate = float(value) if known else math.nan
    if not 0 < rate <= 1:
        raise ValueError(f"rho must be in (0, 1], got {value!r}.")
    return rate


def require_steps(steps: Any) -> None:
    if not (isinstance(steps, Integral) and int(steps) >= 1):
        raise ValueError(f"steps must be a whole number of at least 1, got {steps!r}.")


def _direction(node: Node, factors: Sequence[Factor], sites: Sites | None) -> tuple[Parameters, Fresh]:
    """The natural gradient of the bound; with sites, the sum of what they would change, and each of that."""
    if sites is None:
        gradient = node.family.entropy_gradient(node.natural)
        return tuple(a + b for a, b in zip(message(node, factors), gradient)), {}
    if not node.family.flat and any(part.any() for part in node.family.base_gradient(node.natural)):
        raise ValueError(f"{node} has a base measure that its λ does not fade with: leave sites=None.")
    fresh = sites.changes(node, factors)
    if not fresh and sites.total(node) is not None:  # none of its factors is among these
        return tuple(torch.zeros_like(part) for part in node.natural), {}
    return _added(node, list(fresh.values())), fresh


def _moved(
    node: Node, direction: Parameters, rate: float, domain: str, drift: Parameters | None
) -> tuple[Parameters, float | Tensor]:
    """λ after the step, and the size of the step, which may differ between plates."""
    family, natural = node.family, node.natural
    if domain == "retract" and drift is None and hasattr(family, "retract"):
        _check_finite(node, direction)
        moved = family.retract(natural, direction, rate)  # pyright: ignore[reportAttributeAccessIssue]
        if family.inside(moved).all():  # or it is too long for the numbers there are
            return moved, rate
    size: float | Tensor = rate
    for _ in range(HALVINGS):
        change = direction if isinstance(size, float) and size == 1 else node.spread(size, direction)
        if drift is not None:
            change = tuple(a + b for a, b in zip(change, node.spread(size / rate, drift)))
        moved = tuple(a + b for a, b in zip(natural, change))
        inside = family.inside(moved)
        if inside.all():
            return moved, size
        _check_finite(node, direction)
        if domain == "refuse":
            break
        whole = size if isinstance(size, Tensor) else natural[0].new_full(family.plates(natural), size)
        size = torch.where(inside, whole, whole / 2)
    raise OutsideDomain(
        f"a step of rho = {rate:g} leaves the parameters of {node}, and no shorter one was found: take a smaller rho, "
        "domain='retract' for a Gaussian, or a factor with a concave logarithm."
        if domain != "refuse"
        else f"a step of rho = {rate:g} leaves the parameters of {node}: take a smaller rho or domain='backtrack'."
    )


def _check_finite(node: Node, direction: Parameters) -> None:
    if any(not torch.isfinite(part).all() for part in direction):
        raise OutsideDomain(f"the messages to {node} hold NaN or infinity: look at the data and the start.")


def _height(nodes: Sequence[Node], factors: Sequence[Factor]) -> Tensor:
    """What a search may not lower: the bound, where nodes that Delta looks at are points, without entropy."""
    points = {
        id(node)
        for factor in factors
        if isinstance(getattr(factor, "expectation", None), Delta)
        for node in factor.nodes
    }
    values = []
    for factor in factors:
        known = all(id(node) in points for node in factor.nodes)
        values.append((factor.scale * (factor.at_mean() if known else factor.value())).sum())
    return torch.stack([*values, *[node.entropy for node in nodes if id(node) not in points]]).sum()


def _search(nodes: Sequence[Node], factors: Sequence[Factor], node: Node, before: Parameters, bound: Tensor) -> float:
    """Halves the step that was taken until the bound is no lower than it was; the part of it that is left."""
    after, part = node.natural, 1.0
    for _ in range(HALVINGS):
        now = _height(nodes, factors)
        if now >= bound - 1e-12 * bound.abs():
            return part
        part /= 2
        node.natural = tuple(a + part * (b - a) for a, b in zip(before, after))
    node.natural = before
    return 0.0


class Line:
    """One line for people, where something takes more than two seconds."""

    def __init__(self, wanted: bool | None, steps: int) -> None:
        import time

        self.wanted = sys.stderr.isatty() if wanted is None else wanted
        self.steps, self.clock, self.last, self.written = steps, time.monotonic, time.monotonic() + 2, False

    def show(self, count: int, bound: float | None) -> None:
        if self.wanted and self.clock() > self.last:
            words = "" if bound is None else f", bound {bound:.6g}"
            print(f"\r  step {count}/{self.steps}{words} ", end="", file=sys.stderr, flush=True)
            self.last, self.written = self.clock() + 0.2, True

    def end(self) -> None:
        if self.written:
            print(file=sys.stderr)
