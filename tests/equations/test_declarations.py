"""SGD, Adam, RMSprop and others, declared with curvature, transition and rule, against torch's."""

from __future__ import annotations

import math

import pytest
import torch

from bayesgrad.optim import AdaBayesFP
from bayesgrad.optimizer import BeliefOptimizer
from bayesgrad.rules import Forget, NaturalStep, OrnsteinUhlenbeck, SquaredGradient, Static, SteadyState, UpdateRule


class SGD(BeliefOptimizer):
    """A belief that never changes: every weight has the same precision."""

    rule = UpdateRule(None, Static(), NaturalStep(heavy_ball=True))

    def __init__(self, params, lr, momentum=0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum))


class Adam(BeliefOptimizer):
    """The steady state of a random walk (sigma = inf), with prior precision eps."""

    rule = UpdateRule(SquaredGradient(), SteadyState(OrnsteinUhlenbeck()), NaturalStep())

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, damping=eps, weight_decay=weight_decay))

    def dynamics(self, group):
        return {"beta": group["betas"][1]}


class RMSprop(BeliefOptimizer):
    """Adam without momentum, and without debiasing of the average of squares."""

    rule = UpdateRule(SquaredGradient(), SteadyState(OrnsteinUhlenbeck(), debias=False), NaturalStep())

    def __init__(self, params, lr, alpha=0.99, eps=1e-8):
        super().__init__(params, dict(lr=lr, alpha=alpha, damping=eps))

    def dynamics(self, group):
        return {"beta": group["alpha"]}


PAIRS = {
    "SGD": (lambda p: SGD(p, 0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "SGD with momentum": (lambda p: SGD(p, 0.1, 0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "RMSprop": (lambda p: RMSprop(p, 0.01), lambda p: torch.optim.RMSprop(p, 0.01)),
    "Adam": (lambda p: Adam(p, 0.01), lambda p: torch.optim.Adam(p, 0.01)),
    "AdamW": (
        lambda p: Adam(p, 0.01, (0.8, 0.99), 1e-4, 0.1),
        lambda p: torch.optim.AdamW(p, 0.01, (0.8, 0.99), 1e-4, 0.1),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_equals_torch_optim(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(40, dtype=torch.float64, generator=generator)
    weights = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    optimizers = [make([weight]) for make, weight in zip(PAIRS[name], weights)]
    scale = torch.logspace(-2, 1, 40, dtype=torch.float64)
    for step in range(300):
        noise = torch.randn(40, dtype=torch.float64, generator=generator)
        for weight, optimizer in zip(weights, optimizers):
            optimizer.param_groups[0]["lr"] = 0.01 * (1 + math.cos(step / 40))
            weight.grad = scale * (weight.detach() + noise)
            optimizer.step()
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(weights[0], start, atol=1e-2)


class Recursive(BeliefOptimizer):
    """No drift: precisions add up."""

    rule = UpdateRule(SquaredGradient(), Static(), NaturalStep())

    def __init__(self, params, lr=1.0):
        super().__init__(params, dict(lr=lr))

    def prior_variance(self, group):
        return 4.0


def test_without_dynamics_precision_is_the_sum_of_squared_gradients() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = Recursive([weight])
    gradients = torch.randn(50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected, precision = torch.zeros(3, dtype=torch.float64), 0.25
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
        precision = precision + gradient**2
        expected = expected - gradient / precision
    torch.testing.assert_close(optimizer.state[weight]["variance"], 1 / precision, rtol=1e-12, atol=0)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=0)


class FadingMemory(BeliefOptimizer):
    """1/v <- (1 - forget)/v + (B g)^2;  w <- w - lr v B g."""

    rule = UpdateRule(SquaredGradient(), Forget(), NaturalStep())

    def __init__(self, params, lr=1.0, *, batch_size, forget=0.01):
        super().__init__(params, dict(lr=lr, batch_size=batch_size, forget=forget))

    def dynamics(self, group):
        return {"keep": 1 - group["forget"], "take": 1.0}

    def step_scale(self, group):
        return group["lr"] * group["batch_size"]

    def gradient_scale(self, group):
        return group["batch_size"]


def test_the_fading_memory_filter_is_a_mean_square_normaliser() -> None:
    """Aitchison 2020, Eq. 28-31: forgetting instead of process noise gives lambda/<g^2>."""
    forget, batch = 0.02, 16
    gradients = torch.randn(400, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradients *= torch.logspace(-2, 1, 5, dtype=torch.float64)
    weight = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    optimizer = FadingMemory([weight], batch_size=batch, forget=forget)
    precision, expected = torch.ones(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
        precision = (1 - forget) * precision + (batch * gradient) ** 2  # Eq. 30
        expected = expected - batch * gradient / precision
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=0)

    weight.grad = torch.tensor([0.1, 0.2, 0.4, 0.8, 1.6], dtype=torch.float64)
    for _ in range(2000):
        optimizer.step()
    model = torch.nn.Module()
    model.register_parameter("w", weight)
    steady = forget / (batch * weight.grad) ** 2  # Eq. 31
    torch.testing.assert_close(optimizer.posterior(model).variance()["w"], steady, rtol=1e-9, atol=0)


class Divided(BeliefOptimizer):
    """SGD whose steps are divided by an entry of the group that is no option."""

    rule = UpdateRule(None, Static(), NaturalStep())

    def step_scale(self, group):
        return group["lr"] / float(group.get("visit", 1))


def test_steps_follow_entries_of_groups_that_are_no_options() -> None:
    """What a step prepares of a group is kept until a value changes, also of a tensor that is changed in place."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = Divided([weight], {"lr": 1.0})
    weight.grad, number = torch.ones_like(weight), torch.tensor(5.0)
    expected = 0.0
    for visit, value in ((None, 1), (2, 2), (2, 2), (4, 4), (number, 5), (number, 8), (10, 10)):
        if isinstance(visit, torch.Tensor):
            visit.fill_(value)
        if visit is not None:
            optimizer.param_groups[0]["visit"] = visit
        optimizer.step()
        expected -= 1 / value
        assert weight.item() == pytest.approx(expected, rel=1e-14)


def test_a_group_without_gradients_takes_its_reference_at_its_first_step() -> None:
    """The lr of the first step with a gradient is that for which options were given, for a group built with lr = 0."""

    def trained(idle: bool) -> torch.Tensor:
        first, second = (torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
        optimizer = AdaBayesFP([{"params": [first]}, {"params": [second]}], 0.0, batch_size=4)
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        first.grad = torch.ones_like(first)
        for _ in range(3 * idle):
            optimizer.step()
        second.grad = torch.full_like(second, 0.01)
        optimizer.step()
        return second.detach()

    assert torch.equal(trained(True), trained(False))
