"""Rules: how the belief about a weight changes in one step, as a curvature, a transition and a move."""

from bayesgrad.rules.transition import (
    Forget,
    MovingAverage,
    OrnsteinUhlenbeck,
    OrnsteinUhlenbeckPair,
    Static,
    SteadyState,
    Transition,
)
from bayesgrad.rules.update import (
    AbsoluteHessian,
    CentredGradient,
    Curvature,
    Evidence,
    ExpectedHessian,
    Move,
    NaturalStep,
    PerExampleSquare,
    Reparameterised,
    SquaredGradient,
    UpdateRule,
)

__all__ = [
    "AbsoluteHessian",
    "CentredGradient",
    "Curvature",
    "Evidence",
    "ExpectedHessian",
    "Forget",
    "Move",
    "MovingAverage",
    "NaturalStep",
    "OrnsteinUhlenbeck",
    "OrnsteinUhlenbeckPair",
    "PerExampleSquare",
    "Reparameterised",
    "SquaredGradient",
    "Static",
    "SteadyState",
    "Transition",
    "UpdateRule",
]
