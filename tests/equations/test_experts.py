"""Non-conjugate message passing: a multinomial regression that chooses among linear ones."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

PAGE = Path(__file__).parents[2] / "docs" / "inference.md"
D = torch.float64


@pytest.fixture(scope="module")
def page() -> dict:
    """What the section of the page defines, run as it stands."""
    text = PAGE.read_text().split("## Your own model: a mixture of experts")[1].split("\n## ")[0]
    names: dict = {}
    for source in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(source, str(PAGE), "exec"), names)
    return names


def nodes_of(page: dict, seed: int = 0, n: int = 25):
    generator = torch.Generator().manual_seed(seed)
    X = torch.cat([torch.randn(n, 1, dtype=D, generator=generator), torch.ones(n, 1, dtype=D)], 1)
    y = X[:, 0].abs() + 0.2 * torch.randn(n, dtype=D, generator=generator)
    return X, y, page["experts"](X, y, 3, generator)


def test_the_example_on_the_page_finds_its_pieces(page: dict) -> None:
    assert page["result"].converged
    mean, covariance = page["lines"].moments
    slopes, order = mean[:, 0].sort()
    deviations = covariance[order, 0, 0].sqrt()  # mean-field posteriors underestimate them
    assert bool(((slopes - torch.tensor([-2.0, 0.0, 2.0], dtype=D)).abs() < 3 * deviations).all())
    assert float(deviations.max()) < 0.05


def test_messages_are_derivatives_of_the_bound(page: dict) -> None:
    """By automatic differentiation of another quadrature, by the expectations of both nodes."""
    X, _, (nodes, factors) = nodes_of(page)
    chosen, gate = nodes[:2]
    mean = torch.tensor([1.0, -0.5, 0.3, 0.2], dtype=D)
    gate.natural = gate.family.of(mean, 20 * torch.eye(4, dtype=D) + mean[:, None] * mean)
    choice = next(factor for factor in factors if type(factor).__name__ == "Choice")
    points, weights = np.polynomial.hermite_e.hermegauss(24)
    grid = torch.as_tensor(np.stack(np.meshgrid(points, points), -1).reshape(-1, 2))
    share = torch.as_tensor(np.outer(weights, weights).ravel() / weights.sum() ** 2)

    def value(first: Tensor, second: Tensor, r: Tensor) -> Tensor:
        """E[log softmax] of a Gaussian with these expectations, for responsibilities r."""
        covariance = (second - first[:, None] * first).view(2, 2, 2, 2)
        mean = X @ first.view(2, 2).mT
        spread = torch.einsum("ni,jikl,nl->njk", X, covariance, X)
        drawn = mean + torch.einsum("njk,sk->snj", torch.linalg.cholesky(spread), grid)
        logits = torch.cat([drawn, torch.zeros_like(drawn[..., :1])], -1).log_softmax(-1)
        return (share[:, None, None] * r * logits).sum()

    assert_close(choice.value(), value(*gate.mean, chosen.mean[0]), rtol=1e-8, atol=0)
    parts = [part.clone().requires_grad_() for part in (*gate.mean, chosen.mean[0])]
    found = torch.autograd.grad(value(*parts), parts)
    symmetric = (found[1] + found[1].mT) / 2
    assert_close(choice.message(gate), (found[0], symmetric), rtol=1e-5, atol=1e-6)
    assert_close(choice.message(chosen)[0], found[2], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_never_falls(page: dict, seed: int) -> None:
    run = page["run"]
    _, _, (nodes, factors) = nodes_of(page, seed)
    result = run(nodes, factors, 12, domain="search", tolerance=0)
    assert np.diff(result.elbos).min() > -1e-8


def test_known_choices_are_a_multinomial_regression(page: dict) -> None:
    """With responsibilities held at labels, the gate is the GLM of these labels."""
    from bayesgrad.models import GLM

    X, _, (nodes, factors) = nodes_of(page, n=60)
    chosen, gate = nodes[:2]
    labels = (torch.arange(60) + (X[:, 0] > 0)) % 3
    chosen.natural = (50 * torch.nn.functional.one_hot(labels, 3).to(D),)
    own = [factor for factor in factors if any(node is gate for node in factor.nodes)]
    # Contrasts with the last class, whose prior is N(0, I) here; the GLM's weights of classes are independent, and a
    # precision of 1e-6 is nearly none of either: what is compared are maxima of the same likelihood.
    gate_prior = next(factor for factor in own if len(factor.nodes) == 1)
    gate_prior.natural = tuple(1e-6 * part for part in gate_prior.natural)
    for _ in range(30):
        page["step"](gate, own, 0.5)
    model = GLM("multinomial", prior_precision=1e-6, fit_intercept=False).fit(X.numpy(), labels.numpy())
    contrasts = model.coef_[:2] - model.coef_[2]
    assert_close(gate.moments[0].view(2, 2), torch.as_tensor(contrasts), rtol=1e-3, atol=1e-3)
