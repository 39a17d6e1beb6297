"""What FOOF, KFAC and NaturalGradient share: Adam for the parameters outside of layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bayesgrad.constraints import LAYER_OPTIONS
from bayesgrad.optimizer import BeliefOptimizer
from bayesgrad.rules import NaturalStep, OrnsteinUhlenbeck, SquaredGradient, SteadyState, UpdateRule
from bayesgrad.schedule import relative_lr

FALLBACK = "Adam with learning rate fallback_lr"


class LayerOptimizer(BeliefOptimizer):
    """Layers follow a preconditioner, other parameters Adam, whose learning rate `fallback_lr` follows lr."""

    takes_model = True
    scaled_by_lr = ("fallback_lr",)
    rule = UpdateRule(SquaredGradient(), SteadyState(OrnsteinUhlenbeck()), NaturalStep())
    accepts = {**BeliefOptimizer.accepts, **LAYER_OPTIONS}

    def dynamics(self, group: Mapping[str, Any]) -> dict[str, float]:
        return {"beta": group["ema"]}

    def step_scale(self, group: Mapping[str, Any]) -> float:
        return group["fallback_lr"] * relative_lr(group)

    def scalars(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        return super().scalars({**group, "damping": 0.0}, step)
