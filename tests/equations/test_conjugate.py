"""Conjugate observations add to natural parameters, and A gives the exact evidence."""

from __future__ import annotations

import math

import torch
from scipy import stats
from torch import Tensor
from torch.testing import assert_close

from bayesgrad.families import Beta, Dirichlet, Family, Gamma, NormalWishart, Parameters, Wishart


def evidence(family: Family, prior: Parameters, messages: Parameters) -> tuple[Parameters, Tensor]:
    """Posterior and A(λ + Σ messages) - A(λ)."""
    posterior = tuple(a + b for a, b in zip(prior, messages))
    return posterior, family.log_partition(posterior) - family.log_partition(prior)


def tensor(value: object) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def test_normal_wishart_evidence_is_a_product_of_t_distributions() -> None:
    """Each point given those before is Student's t about the location so far."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(6, 3, dtype=torch.float64, generator=generator) + 1
    scale = torch.diag(tensor([0.5, 1.0, 2.0])) + 0.1
    prior = NormalWishart().of(tensor([0.0, 1.0, -1.0]), tensor(0.7), tensor(3.5), scale)
    now, expected = prior, 0.0
    for row in y:
        m, k, nu, V = NormalWishart().standard_parameters(now)
        shape = torch.linalg.inv(V) * (k + 1) / (k * (nu - 2))
        expected += stats.multivariate_t.logpdf(row.numpy(), m.numpy(), shape.numpy(), df=float(nu) - 2)
        half = tensor(0.5)
        now = tuple(a + b for a, b in zip(now, (row, -half, -torch.outer(row, row) / 2, half)))
    n = tensor(len(y) / 2)
    posterior, found = evidence(NormalWishart(), prior, (y.sum(0), -n, -y.T @ y / 2, n))
    assert_close(found - y.numel() / 2 * math.log(2 * math.pi), tensor(expected), rtol=1e-12, atol=0)
    for a, b in zip(posterior, now):
        assert_close(a, b, rtol=1e-13, atol=1e-13)
    location, confidence, degrees, _ = NormalWishart().standard_parameters(posterior)
    assert_close(location, (0.7 * tensor([0.0, 1.0, -1.0]) + y.sum(0)) / 6.7)
    assert_close((confidence, degrees), (tensor(6.7), tensor(9.5)))


def test_wishart_evidence_of_known_mean_is_that_of_one_dimension() -> None:
    """Precision of zero-mean points, P = 1: the same as a Gamma of half the degrees and half the inverse scale."""
    y = tensor([0.3, -1.2, 2.0, 0.1])
    n, square = tensor(len(y) / 2), y.square().sum() / 2
    _, wishart = evidence(Wishart(), Wishart().of(tensor(3.0), tensor([[0.8]])), (n, -square[None, None]))
    _, gamma = evidence(Gamma(), Gamma().of(tensor(1.5), tensor(0.5 / 0.8)), (n, -square))
    assert_close(wishart, gamma, rtol=1e-13, atol=0)
    expected = stats.multivariate_t.logpdf(y.numpy(), None, torch.eye(4, dtype=torch.float64).numpy() / 2.4, df=3)
    assert_close(gamma - n * math.log(2 * math.pi), tensor(expected), rtol=1e-12, atol=0)


def test_counts_have_their_compound_distributions() -> None:
    """Gamma rates of a Poisson: negative binomial. Beta chances: beta-binomial. Dirichlet shares: its multinomial."""
    _, poisson = evidence(Gamma(), Gamma().of(tensor(2.5), tensor(1.5)), (tensor(4.0), tensor(-1.0)))
    expected = stats.nbinom.logpmf(4, 2.5, 1.5 / 2.5)
    assert_close(poisson - math.lgamma(5), tensor(expected), rtol=1e-12, atol=0)
    _, binomial = evidence(Beta(), Beta().of(tensor(2.5), tensor(1.5)), (tensor(4.0), tensor(3.0)))
    expected = stats.betabinom.logpmf(4, 7, 2.5, 1.5)
    assert_close(binomial + math.log(math.comb(7, 4)), tensor(expected), rtol=1e-12, atol=0)
    counts = tensor([1.0, 0.0, 3.0])
    _, shares = evidence(Dirichlet(), Dirichlet().of(tensor([0.5, 1.0, 2.0])), (counts,))
    expected = stats.dirichlet_multinomial.logpmf([1, 0, 3], [0.5, 1.0, 2.0], 4)
    assert_close(shares + math.log(4), tensor(expected), rtol=1e-12, atol=0)
