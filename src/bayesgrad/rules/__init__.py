"""Rules: how the belief about a weight changes in one step, as a curvature, a transition and a move."""

from bayesgrad.rules.curvature import (
    AbsoluteHessian,
    CentredGradient,
    Curvature,
    Evidence,
    ExpectedHessian,
    PerExampleSquare,
    Reparameterised,
    SquaredGradient,
)
from bayesgrad.rules.transition import (
    Forget,
    MovingAverage,
    OrnsteinUhlenbeck,
    OrnsteinUhlenbeckPair,
    Static,
    SteadyState,
    Transition,
)
from bayesgrad.rules.update import BinaryRule, LangevinStep, Move, NaturalStep, PredictedStep, UpdateRule

__all__ = [
    "AbsoluteHessian",
    "BinaryRule",
    "CentredGradient",
    "Curvature",
    "Evidence",
    "ExpectedHessian",
    "Forget",
    "LangevinStep",
    "Move",
    "MovingAverage",
    "NaturalStep",
    "OrnsteinUhlenbeck",
    "OrnsteinUhlenbeckPair",
    "PerExampleSquare",
    "PredictedStep",
    "Reparameterised",
    "SquaredGradient",
    "Static",
    "SteadyState",
    "Transition",
    "UpdateRule",
]
