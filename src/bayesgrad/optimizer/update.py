"""The elementwise step that parts make together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesgrad import kernels
from bayesgrad.curvature import Curvature, Evidence
from bayesgrad.precision import Scalar
from bayesgrad.rule import Rule
from bayesgrad.transition import Transition


class Parts(NamedTuple):
    """What a filter is made of."""

    curvature: Curvature | None
    transition: Transition
    rule: Rule


@dataclass(frozen=True)
class Update:
    """The elementwise step that some parts make together, as a function for `kernels.run`.

    Args:
        parts: what to do.
        names: of the scalars, in order.
        slots: of the state, in order.
        evidence: names of what evidence there is beside the gradient, in order.
    """

    parts: Parts
    names: tuple[str, ...]
    slots: tuple[str, ...]
    evidence: tuple[str, ...] = ()

    @property
    def writes(self) -> tuple[int, ...]:
        first = 2 + len(self.evidence)
        return (0, *range(first, first + len(self.slots)))

    def __call__(self, scalars: Iterable[Any], weight: Tensor, gradient: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        curvature, transition, rule = self.parts
        n = dict(zip(self.names, scalars))
        memory = dict(zip(self.slots, more[len(self.evidence) :]))
        dtype = kernels.compute_dtype(weight.dtype)
        weight, gradient = weight.to(dtype), gradient.to(dtype)
        evidence = {name: values.to(dtype) for name, values in zip(self.evidence, more)}
        if "l2" in n:
            gradient = gradient + n["l2"] * weight
        gradient = transition.clip(gradient)
        if curvature is None:  # nothing is learnt of the curvature: every weight stays equally certain
            precision = Scalar(torch.ones((), dtype=dtype, device=weight.device), tuple(weight.shape))
        else:
            increment = curvature.read(Evidence(gradient, **evidence), memory, n)
            if "prior" in n:  # a Gaussian prior: its precision in the same units, and its pull on the mean
                strength = n["prior"] * memory["prior_precision"] if "prior_precision" in memory else n["prior"]
                increment = increment + strength
                n["pull"] = strength * (weight - memory["prior_mean"] if "prior_mean" in memory else weight)
            precision = transition.merge(memory, increment, n)
        if "damping" in n:
            precision = precision.add(n["damping"])
        weight = rule.move(transition.drift(weight, n), gradient, precision, memory, n)
        return (weight, *(memory[slot] for slot in self.slots))
