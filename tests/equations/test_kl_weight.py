"""kl_weight of all variational rules: E[loss] + (kl_weight/N) KL(q, prior), whose minimum for a quadratic is known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn

from bayesgrad.belief import Belief
from bayesgrad.optim import IVON, OGN, VOGN, VON, Newton
from bayesgrad.optim.variational import VariationalOptimizer
from bayesgrad.posterior import GaussianPosterior
from bayesgrad.precision import Diagonal

F64 = {"dtype": torch.float64}
CURVATURE = torch.tensor([0.3, 1.0, 4.0], **F64)
TARGET = torch.tensor([1.0, -2.0, 0.5], **F64)
SIZE, DELTA = 80.0, 6.0
PRIOR = torch.tensor([0.4, 0.0, -1.0], **F64), torch.tensor([2.0, 9.0, 30.0], **F64)  # means and precisions


def minimum(tau: float, mean: np.ndarray, precision: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and precision of the Gaussian that minimises E[loss] + tau KL/N, by BFGS on the objective itself."""
    h, target = CURVATURE.numpy(), TARGET.numpy()

    def objective(free: np.ndarray) -> float:
        m, s = free[:3], np.exp(free[3:])
        loss = (h / 2 * ((m - target) ** 2 + 1 / s)).sum()
        divergence = 0.5 * (precision / s + precision * (m - mean) ** 2 - 1 + np.log(s / precision)).sum()
        return SIZE * loss / tau + divergence

    found = minimize(objective, np.zeros(6), method="BFGS", options={"gtol": 1e-9, "maxiter": 10_000})
    return found.x[:3], np.exp(found.x[3:])


class Weights(nn.Module):
    """Independent weights, each with a quadratic loss."""

    def __init__(self, copies: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(copies, 3, **F64))

    def forward(self) -> torch.Tensor:
        return (CURVATURE / 2 * (self.w - TARGET).square()).sum()


def trained(
    kind: type[VariationalOptimizer], tau: float, copies: int, steps: int, skip: int, **more: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Means and variances, averaged over the steps after the first, (copies, 3)."""
    model = Weights(copies)
    options = {"num_data": SIZE, "prior_precision": DELTA, "kl_weight": tau, **more}
    optimizer = kind(model.named_parameters(), **options)
    sums = np.zeros((2, copies, 3))
    for step in range(steps):
        with optimizer.sampled():
            optimizer.zero_grad()
            loss = model()
            optimizer.observe(loss=loss)
            loss.backward()
        optimizer.step()
        if step >= skip:
            variance = optimizer.variance_of(optimizer.param_groups[0], model.w)
            sums += np.stack([model.w.detach().numpy(), variance.numpy()]) / (steps - skip)
    return sums[0], sums[1]


@pytest.mark.parametrize("informed", [False, True], ids=["prior_precision", "prior"])
@pytest.mark.parametrize("tau", [0.2, 5.0])
@pytest.mark.parametrize("kind", [Newton, VON, IVON])
def test_finds_the_closed_form_of_a_quadratic(kind: type[VariationalOptimizer], tau: float, informed: bool) -> None:
    """The precision N h/tau + delta and its mean; exactly where Hessians are observed, within errors for IVON's."""
    mean, precision = (part.numpy() for part in PRIOR) if informed else (np.zeros(3), np.full(3, DELTA))
    exact = SIZE * CURVATURE.numpy() / tau + precision
    centre = (SIZE * (CURVATURE * TARGET).numpy() / tau + precision * mean) / exact
    by_search = minimum(tau, mean, precision)
    np.testing.assert_allclose(by_search[0], centre, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(by_search[1], exact, rtol=1e-4)
    copies = 400 if kind is IVON else 1
    more: dict[str, Any] = {"betas": (0.0, 0.98), "lr": 0.1, "rescale_lr": False}
    steps, skip = 450, 250
    if kind is not IVON:
        more = {"betas": (0.0, 0.5), "lr": 0.5, "hessian": "hutchinson"}  # exact for a diagonal Hessian
        steps, skip = 60, 59
    if informed:
        rows = [part.expand(copies, 3) for part in PRIOR]
        more["prior"] = GaussianPosterior({"w": Belief(rows[0], Diagonal(1 / rows[1]))})
    means, variances = trained(kind, tau, copies, steps, skip, **more)
    if kind is Newton:
        np.testing.assert_allclose(means[0], centre, rtol=1e-10)
    elif kind is VON:  # its mean moves with the draws
        assert np.all(np.abs(means[0] - centre) < 5 / np.sqrt(exact))
    else:
        error = means.std(0) / math.sqrt(copies)
        assert np.all(np.abs(means.mean(0) - centre) < 5 * error)
        error = variances.std(0) / math.sqrt(copies)
        assert np.all(np.abs(variances.mean(0) * exact - 1) < 5 * error * exact + 2e-3)
        assert np.all(error * exact < 0.02)
        return
    np.testing.assert_allclose(variances[0], 1 / exact, rtol=1e-10)


@pytest.mark.parametrize("tau", [0.25, 4.0])
@pytest.mark.parametrize("kind", [Newton, VON, IVON, OGN, VOGN])
def test_is_the_rule_for_another_number_of_data(kind: type[VariationalOptimizer], tau: float) -> None:
    """kl_weight = tau and num_data = N are kl_weight = 1 and num_data = N/tau, in weights and posterior."""

    def path(size: float, weight: float) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2).double()
        given = model if kind in (OGN, VOGN) else model.named_parameters()
        optimizer = kind(given, 0.05, num_data=size, prior_precision=2.0, kl_weight=weight, seed=1)
        x, y = torch.randn(20, 3, **F64), torch.randint(0, 2, (20,))
        for _ in range(5):
            with optimizer.sampled():
                optimizer.zero_grad()
                outputs = model(x)
                loss = nn.functional.cross_entropy(outputs, y)
                optimizer.observe(outputs, loss=loss)
                loss.backward()
            optimizer.step()
        return [*(p.detach() for p in model.parameters()), *optimizer.posterior(model).variance().values()]

    pairs = list(zip(path(100.0, tau), path(100.0 / tau, 1.0), path(100.0, 1.0)))
    for tempered, fewer, plain in pairs:
        torch.testing.assert_close(tempered, fewer, rtol=1e-10, atol=1e-14)
        assert not torch.allclose(tempered, plain, rtol=1e-3, atol=0)
