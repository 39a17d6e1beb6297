"""The elementwise step: curvature, transition and rule as one function."""

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
    """The three parts of an optimizer; see `bayesgrad.transition`."""

    curvature: Curvature | None
    transition: Transition
    rule: Rule


@dataclass(frozen=True)
class Update:
    """The elementwise step of three parts, as a function for `kernels.run`.

    Args:
        parts: curvature, transition and rule.
        names: the names of the scalars, in order.
        slots: the names of the state tensors, in order.
        evidence: the names of the curvature's inputs beside the gradient, in order.
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
        if curvature is None:  # without curvature, the precision of every weight is 1
            precision = Scalar(torch.ones((), dtype=dtype, device=weight.device), tuple(weight.shape))
        else:
            increment = curvature.read(Evidence(gradient, **evidence), memory, n)
            if "prior" in n:  # a Gaussian prior: its precision in the same units, and its gradient
                strength = n["prior"] * memory["prior_precision"] if "prior_precision" in memory else n["prior"]
                increment = increment + strength
                n["pull"] = strength * (weight - memory["prior_mean"] if "prior_mean" in memory else weight)
            precision = transition.merge(memory, increment, n)
        if "damping" in n:
            precision = precision.add(n["damping"])
        weight = rule.move(transition.drift(weight, n), gradient, precision, memory, n)
        return (weight, *(memory[slot] for slot in self.slots))
