"""Bounded steps, relative damping and damping that grows, against dense algebra."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesgrad.optim import FOOF, KFAC, KroneckerFilterFP, NaturalGradient
from bayesgrad.precision.linalg import inverse
from bayesgrad.preconditioners.stability import with_growing_damping

D = torch.float64
RULES = [FOOF, KFAC, NaturalGradient]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(D)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """The gradient and the change of all weights in one step."""
    torch.manual_seed(1)
    x, y = torch.randn(11, 5, dtype=D), torch.randint(0, 3, (11,))
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    outputs = model(x)
    optimizer.observe(outputs)  # pyright: ignore[reportAttributeAccessIssue]
    (factor * F.cross_entropy(outputs, y)).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    optimizer.step()
    return gradient, torch.cat([p.detach().flatten() for p in model.parameters()]) - before


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("limit", [1e-3, 1e3])
def test_the_norm_of_a_direction_is_bounded(rule: type, limit: float) -> None:
    """The step is lr min(1, c/sqrt(d'g)) d, with d that of the optimizer without a bound."""
    free, bounded = network(), network()
    gradient, change = step(free, rule(free, lr=1.0, max_norm=math.inf))
    _, actual = step(bounded, rule(bounded, lr=0.3, max_norm=limit))
    factor = min(1.0, limit / math.sqrt(-float(change @ gradient)))
    assert (factor < 1) == (limit < 1)
    torch.testing.assert_close(actual, 0.3 * factor * change, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("rule", RULES)
def test_bounded_steps_do_not_depend_on_the_scale_of_the_loss(rule: type) -> None:
    one, many = network(), network()
    _, expected = step(one, rule(one, max_norm=1e-3))
    _, actual = step(many, rule(many, max_norm=1e-3), factor=784.0)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("exact", [False, True])
def test_relative_damping_is_a_multiple_of_the_mean_eigenvalue(exact: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(5, 3).to(D), torch.randn(11, 5, dtype=D)
    optimizer = KFAC(model, lr=1.0, damping=0.7, max_norm=math.inf, exact_damping=exact)
    before = torch.cat([model.weight, model.bias[:, None]], 1).detach()
    outputs = model(x)
    labels = torch.randint(0, 3, (11,))
    optimizer.observe(outputs, labels=labels)
    errors = (outputs.softmax(1) - F.one_hot(labels, 3)).detach()
    F.cross_entropy(outputs, torch.zeros(11, dtype=torch.long)).backward()
    optimizer.step()
    inputs = torch.cat([x, torch.ones(11, 1, dtype=D)], 1)
    A, E = inputs.T @ inputs / 11, errors.T @ errors / 11
    a, e = A.trace() / 6, E.trace() / 3
    gradient = torch.cat([model.weight.grad, model.bias.grad[:, None]], 1)  # pyright: ignore
    if exact:
        fisher = torch.kron(E, A) + 0.7 * a * e * torch.eye(18, dtype=D)
        expected = torch.linalg.solve(fisher, gradient.flatten()).view(3, 6)
    else:
        left, right = E + math.sqrt(0.7) * e * torch.eye(3, dtype=D), A + math.sqrt(0.7) * a * torch.eye(6, dtype=D)
        expected = torch.linalg.solve(left, gradient) @ torch.linalg.inv(right)
    after = torch.cat([model.weight, model.bias[:, None]], 1).detach()
    torch.testing.assert_close(before - after, expected, rtol=1e-9, atol=1e-12)


def test_foof_with_relative_damping() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(5, 3, bias=False).to(D), torch.randn(11, 5, dtype=D)
    optimizer = FOOF(model, lr=1.0, damping=0.7, max_norm=math.inf)
    before = model.weight.detach().clone()
    model(x).square().mean().backward()
    optimizer.step()
    A = x.T @ x / 11
    expected = model.weight.grad @ torch.linalg.inv(A + 0.7 * A.trace() / 5 * torch.eye(5, dtype=D))  # pyright: ignore
    torch.testing.assert_close(before - model.weight.detach(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("prior", [math.inf, 0.5])
def test_the_root_mean_square_of_a_whitened_step_is_bounded(prior: float) -> None:
    options = {"lr": 1e-3, "batch_size": 11, "prior_std": prior, "momentum": 0.0}
    free, bounded = network(), network()
    step(free, KroneckerFilterFP(free, max_step=math.inf, **options))
    step(bounded, KroneckerFilterFP(bounded, max_step=0.1, **options))
    for start, without, limited in zip(network()[::2], free[::2], bounded[::2]):
        first, change, actual = (torch.cat([m.weight, m.bias[:, None]], 1).detach() for m in (start, without, limited))
        change, actual = change - first, actual - first
        factor = min(1.0, 0.1 * 1e-3 / float(change.square().mean().sqrt()))
        assert factor < 1
        torch.testing.assert_close(actual, factor * change, rtol=1e-8, atol=0)


def test_damping_grows_until_a_factor_is_positive_and_one_warning_says_so() -> None:
    matrix, warned = torch.diag(torch.tensor([1.0, -0.03], dtype=D))[None], set()
    with pytest.warns(UserWarning, match="^it is singular with damping 0.001 and was inverted with damping 0.1: raise"):
        found, damping = with_growing_damping(inverse, matrix, 1e-3, "it", warned)
    assert damping == pytest.approx(0.1)
    torch.testing.assert_close(found[0], torch.diag(1 / torch.tensor([1.1, 0.07], dtype=D)))
    with_growing_damping(inverse, matrix, 1e-3, "it", warned)
    with pytest.raises(ValueError, match="it is singular with damping 0: raise damping"):
        with_growing_damping(inverse, matrix, 0.0, "it", set())
    with pytest.raises(FloatingPointError, match="it is not finite"):
        with_growing_damping(inverse, matrix * math.nan, 1.0, "it", set())
