"""Mixtures as candidate distributions: messages, the printed form of their steps, and minima."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bayesgrad.families import Gaussian, MixtureOfGaussians
from bayesgrad.inference import Delta, GaussHermite, Node, elbo, message, minimize, step
from bayesgrad.inference.multimodal import MixtureLogDensity

D = torch.float64
GRID = torch.linspace(-14, 14, 6001, dtype=D)


def well(theta: Tensor) -> Tensor:
    return (theta.square() - 4).square().sum() / 8 + 0.3 * theta.sum()


def mixture(weights: Tensor | None) -> Node:
    family = MixtureOfGaussians(weights)
    means, precisions = torch.tensor([[-1.5], [0.4], [2.5]], dtype=D), torch.tensor([2.0, 1.0, 3.0], dtype=D)
    given = () if weights is not None else (torch.tensor([0.2, 0.5, 0.3], dtype=D),)
    return Node(family, family.of(means, precisions.view(3, 1, 1), *given))


def bound(family: MixtureOfGaussians, mean: tuple[Tensor, ...]) -> Tensor:
    """E_q[-loss] + H(q) of the marginal, by the trapezoidal rule on a grid."""
    natural = family.natural(mean)
    log_q = family.log_density(natural, GRID[:, None])
    values = log_q.exp() * (-torch.vmap(well)(GRID[:, None]) - log_q)
    return torch.trapezoid(values, GRID)


@pytest.mark.parametrize("weights", [torch.tensor([0.2, 0.5, 0.3], dtype=D), None])
def test_natural_gradient_is_that_of_the_bound_with_the_marginals_entropy(weights: Tensor | None) -> None:
    node = mixture(weights)
    factor = MixtureLogDensity(node, lambda theta: -well(theta), GaussHermite(120))
    mean = tuple(part.clone().requires_grad_() for part in node.mean)
    exact = bound(node.family, mean)
    assert_close(elbo([node], [factor]), exact.detach(), rtol=0, atol=1e-6)
    gradient = torch.autograd.grad(exact, mean)
    found = [a + b for a, b in zip(message(node, [factor]), node.family.entropy_gradient(node.natural))]
    if weights is None:  # λ's first part is defined up to a constant
        found[0], gradient = found[0] - found[0].mean(), (gradient[0] - gradient[0].mean(), *gradient[1:])
    for a, b in zip(found, gradient):
        assert_close(a, b, rtol=0, atol=2e-5)


def test_a_step_is_the_printed_one() -> None:
    """Khan and Rue 2023, Eqs. 29 and 30, by Gauss-Hermite quadrature in NumPy."""
    node, rho = mixture(torch.tensor([0.2, 0.5, 0.3], dtype=D)), 0.1
    weights, means, covariances = (part.numpy() for part in node.family.moments(node.natural))
    m, v = means[:, 0], covariances[:, 0, 0]
    points, quadrature = np.polynomial.hermite_e.hermegauss(40)
    quadrature = quadrature / quadrature.sum()
    S, moved = [], []
    for k in range(3):
        x = m[k] + np.sqrt(v[k]) * points
        density = weights * np.exp(-((x[:, None] - m) ** 2) / 2 / v) / np.sqrt(v)
        r = density / density.sum(1, keepdims=True)
        pull = (m - x[:, None]) / v
        score = (r * pull).sum(1)
        gradient = x * (x**2 - 4) / 2 + 0.3 + score
        hessian = (3 * x**2 - 4) / 2 + (r * (pull**2 - 1 / v)).sum(1) - score**2
        S.append(1 / v[k] + rho * quadrature @ hessian)
        moved.append(m[k] - rho * quadrature @ gradient / S[-1])
    step(node, [MixtureLogDensity(node, lambda theta: -well(theta), GaussHermite(40))], rho=rho)
    _, means, covariances = node.family.moments(node.natural)
    assert_close(means[:, 0].numpy(), np.array(moved), rtol=1e-9, atol=0)
    assert_close(1 / covariances[:, 0, 0].numpy(), np.array(S), rtol=1e-9, atol=0)


def himmelblau(theta: Tensor) -> Tensor:
    x, y = theta[0], theta[1]
    return (x**2 + y - 11).square() + (x + y**2 - 7).square()


MINIMA = torch.tensor([[3.0, 2.0], [-2.805118, 3.131312], [-3.779310, -3.283186], [3.584428, -1.848126]], dtype=D)


@pytest.mark.parametrize("learnt", [False, True])
def test_four_components_find_four_minima(learnt: bool) -> None:
    family = MixtureOfGaussians(None if learnt else torch.full((4,), 0.25, dtype=D))
    starts = torch.tensor([[2.0, 3.0], [-1.0, 3.0], [-2.0, -4.0], [4.0, -3.0]], dtype=D)
    node = Node(family, family.of(starts, 50 * torch.eye(2, dtype=D).expand(4, 2, 2)))
    found = minimize(himmelblau, node, expectation=Delta(), rho=0.2, steps=300, domain="retract")
    assert found.points.shape == (4, 2)
    distances = torch.cdist(MINIMA, found.points).min(1).values
    assert distances.max() < 1e-4
    assert (found.losses < 1e-6).all()
    assert found.converged


def test_one_component_is_variational_newton() -> None:
    family, normal = MixtureOfGaussians(torch.ones(1, dtype=D)), Gaussian()
    start, precision = torch.tensor([0.5, 0.5], dtype=D), 60 * torch.eye(2, dtype=D)
    one = Node(family, family.of(start[None], precision[None]))
    other = Node(normal, normal.of(start, precision))
    for node in (one, other):
        minimize(himmelblau, node, expectation=GaussHermite(6), rho=0.2, steps=7, tolerance=0)
    for a, b in zip(one.natural, other.natural):
        assert_close(a[0], b, rtol=1e-9, atol=1e-9)
