"""Densities of labels under Gaussian outputs, whose integrands are narrower than the Gaussian or far from its mean."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bayesgrad.custom_likelihoods import HeteroscedasticGaussian
from bayesgrad.likelihoods import named

D = torch.float64
NODES = torch.linspace(-40, 40, 400_001, dtype=D)
GAUSSIAN = (-NODES.square() / 2).log_softmax(0)


def rows(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=D)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("count", "mean", "variance"),
    [(3, 1.0, 0.5), (0, 0.0, 100.0), (50, 4.0, 9.0), (500, 6.3, 1.0), (1000, 0.0, 1.0), (10_000, 9.0, 1.0)],
)
def test_counts(count: int, mean: float, variance: float, dtype: torch.dtype) -> None:
    f = mean + variance**0.5 * NODES
    expected = (torch.distributions.Poisson(f.exp(), validate_args=False).log_prob(rows(count)) + GAUSSIAN).logsumexp(1)
    given = (rows(value).to(dtype) for value in (mean, variance, count))
    tolerance = 1e-9 if dtype is D else 1e-5
    torch.testing.assert_close(named("poisson").log_density(*given), expected.to(dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("error", "spread", "log_variance"),
    [(1.0, 0.1, 1.0), (0.0, 0.0, 9.0), (30.0, 0.1, 0.1), (100.0, 0.1, 1.0), (30.0, 0.01, 0.01), (1000.0, 0.0, 0.1)],
)
def test_numbers_with_uncertain_noise(error: float, spread: float, log_variance: float) -> None:
    noise = spread + (0.3 + log_variance**0.5 * NODES).exp()
    expected = (torch.distributions.Normal(0.0, noise.sqrt()).log_prob(rows(error)) + GAUSSIAN).logsumexp(1)
    found = HeteroscedasticGaussian().log_density(rows(0.0, 0.3), rows(spread, log_variance), rows(error))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
