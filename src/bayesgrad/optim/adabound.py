"""AdaBound and AMSBound: Adam with learning rates clipped to a range that shrinks to SGD's learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesgrad.checkpoint import settings
from bayesgrad.constraints import FINITE, NONNEGATIVE, OPEN_FRACTION
from bayesgrad.optimizer import BeliefOptimizer
from bayesgrad.precision import Diagonal, Pair, Precision
from bayesgrad.rules import NaturalStep, SquaredGradient, SteadyState, UpdateRule
from bayesgrad.rules.transition import Memory, Scalars
from bayesgrad.rules.update import MOMENTUM
from bayesgrad.schedule import relative_lr


@dataclass(frozen=True)
class SteadyStateOfMaximum(SteadyState):
    """The `SteadyState` for the largest average so far, so the normaliser never decreases, as in AMSGrad."""

    slots = ("moment", "peak")

    def steady_state(self, memory: Memory, n: Scalars) -> Diagonal | Pair:
        memory["peak"] = torch.maximum(memory["peak"], memory["moment"])
        return self.of.steady(memory["peak"], n)


@dataclass(frozen=True)
class BoundedStep(NaturalStep):
    """w <- w - clip(step_scale P^-1, lower, upper) m: the learning rate of each weight stays in a range.

    m is the biased average of the gradient. Its bias correction is in step_scale, inside the clip, as in the original.
    """

    def scalars(self, group: Mapping[str, Any], step: int, step_scale: float) -> dict[str, float]:
        beta1, beta2 = group["betas"]
        final = group["final_lr"] * relative_lr(group)
        return {
            "step_scale": step_scale * math.sqrt(1 - beta2**step) / (1 - beta1**step),
            "momentum": beta1,
            "fresh": 1 - beta1,
            "lower": final * (1 - 1 / (group["gamma"] * step + 1)),
            "upper": final * (1 + 1 / (group["gamma"] * step)),
        }

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return (MOMENTUM,)

    def move(self, mean: Tensor, gradient: Tensor, precision: Precision, memory: Memory, n: Scalars) -> Tensor:
        average = memory[MOMENTUM] = n["momentum"] * memory[MOMENTUM] + n["fresh"] * gradient
        rate = (n["step_scale"] * precision.variance()).clamp(n["lower"], n["upper"])
        return mean - rate * average


class AdaBound(BeliefOptimizer):
    r"""Adam with learning rates clipped to a range around `final_lr` that shrinks with time.

    .. math::
        w \leftarrow w - \mathrm{clip}\left(\frac{\eta \sqrt{1-\beta_2^t}}{(1-\beta_1^t)(\sqrt{s} + \epsilon)},
        \eta^* \left(1 - \frac{1}{\gamma t + 1}\right), \eta^* \left(1 + \frac{1}{\gamma t}\right)\right) m

    with m and s the (biased) moving averages of g and g^2, eta = `lr` and eta^* = `final_lr`.

    Args:
        params: parameters, named parameters or param groups.
        lr: eta, Adam's learning rate at the start.
        final_lr: eta^*, SGD's learning rate at the end. A schedule multiplies it by the factor of lr.
        betas: decays of the moving averages.
        gamma: how fast the range shrinks.
        eps: added to the root mean square.
        weight_decay: L2 penalty in the gradient, as in the original; not decoupled.
        nonfinite, fused: as in `AdaBayes`.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = AdaBound([weight], lr=1e-3)
        >>> weight.grad = torch.tensor([10.0])
        >>> optimizer.step()
        >>> round(1 - weight.item(), 6)
        0.001

    The defaults are those of the original. A baseline in Aitchison 2020. It estimates no variance of the weights, so it
    has no posterior.

    Reference: Luo et al., Adaptive gradient methods with dynamic bound of learning rate, 2019.
    Checked by: tests/equations/test_adabound.py, against the authors' package.
    """

    rule = UpdateRule(SquaredGradient(), SteadyState(debias=False), BoundedStep())
    scaled_by_lr = ("final_lr",)
    accepts = {**BeliefOptimizer.accepts, "final_lr": FINITE, "gamma": OPEN_FRACTION, "eps": NONNEGATIVE}

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        final_lr: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        gamma: float = 1e-3,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, settings(locals()))

    def dynamics(self, group: Mapping[str, Any]) -> dict[str, float]:
        return {"beta": group["betas"][1]}

    def scalars(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        penalty = {"l2": group["weight_decay"]} if group["weight_decay"] else {}
        return super().scalars({**group, "weight_decay": 0.0, "damping": group["eps"]}, step) | penalty


class AMSBound(AdaBound):
    r"""AdaBound with the largest average of squared gradients so far in place of the current one.

    Args: as `AdaBound`.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = AMSBound([weight], lr=1e-3)
        >>> weight.grad = torch.tensor([10.0])
        >>> optimizer.step()
        >>> round(1 - weight.item(), 6)
        0.001

    Reference: Luo et al., Adaptive gradient methods with dynamic bound of learning rate, 2019.
    Checked by: tests/equations/test_adabound.py, against the authors' package.
    """

    rule = UpdateRule(SquaredGradient(), SteadyStateOfMaximum(debias=False), BoundedStep())
