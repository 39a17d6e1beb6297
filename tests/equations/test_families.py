"""The laws of exponential families, for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bayesgrad.families import (
    Bernoulli,
    Beta,
    Categorical,
    DiagonalGaussian,
    Dirichlet,
    Family,
    FixedGaussian,
    Gamma,
    Gaussian,
    Parameters,
)

PLATES = (3,)


@dataclass(frozen=True)
class Case:
    """A family and natural parameters of three independent variables.

    Args:
        outcome: from what is drawn to what torch's distribution is of.
        gauge: natural parameters without what is arbitrary about them.
    """

    family: Family
    draw: Callable[[torch.Generator], Parameters]
    outcome: Callable[[Tensor], Tensor] = lambda x: x
    gauge: Callable[[Parameters], Parameters] = lambda natural: natural

    def natural(self, seed: int = 0) -> Parameters:
        return self.draw(torch.Generator().manual_seed(seed))


def positive(generator: torch.Generator, size: int = 2, *, plates: tuple[int, ...] = PLATES) -> Tensor:
    rows = torch.randn(*plates, 2 * size, size, dtype=torch.float64, generator=generator)
    return rows.mT @ rows / (2 * size) + 0.1 * torch.eye(size, dtype=torch.float64)


def vector(generator: torch.Generator, size: int = 2) -> Tensor:
    return torch.randn(*PLATES, size, dtype=torch.float64, generator=generator)


FIXED = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
CASES = {
    "Gaussian": Case(Gaussian(), lambda g: Gaussian().of(vector(g), positive(g))),
    "DiagonalGaussian": Case(DiagonalGaussian(), lambda g: DiagonalGaussian().of(vector(g), vector(g).exp())),
    "FixedGaussian": Case(FixedGaussian(FIXED), lambda g: (vector(g),)),
    "FixedGaussian(diagonal)": Case(FixedGaussian(FIXED.diagonal()), lambda g: (vector(g),)),
    "Bernoulli": Case(Bernoulli(), lambda g: (vector(g)[:, 0],), outcome=lambda x: (x + 1) / 2),
    "Categorical": Case(Categorical(), lambda g: (vector(g, 4),), gauge=lambda natural: (natural[0].log_softmax(-1),)),
    "Gamma": Case(Gamma(), lambda g: Gamma().of(*vector(g).exp().unbind(-1))),
    "Beta": Case(Beta(), lambda g: Beta().of(*vector(g).exp().unbind(-1))),
    "Dirichlet": Case(Dirichlet(), lambda g: Dirichlet().of(vector(g, 4).exp())),
}
every = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every
def test_mean_is_gradient_of_log_partition(case: Case) -> None:
    natural = tuple(part.requires_grad_() for part in case.natural())
    gradient = torch.autograd.grad(case.family.log_partition(natural).sum(), natural)
    for found, expected in zip(case.family.mean(natural), case.family.symmetric(gradient)):
        assert_close(found, expected, rtol=1e-9, atol=1e-10)


@every
def test_natural_is_inverse_of_mean(case: Case) -> None:
    natural = case.natural()
    again = case.family.natural(case.family.mean(natural))
    for found, expected in zip(case.gauge(again), case.gauge(natural)):
        assert_close(found, expected, rtol=1e-8, atol=1e-8)


@every
def test_entropy_and_divergence_against_torch(case: Case) -> None:
    natural, other = case.natural(0), case.natural(1)
    first, second = case.family.to_distribution(natural), case.family.to_distribution(other)
    assert_close(case.family.entropy(natural), first.entropy(), rtol=1e-9, atol=1e-9)
    expected = torch.distributions.kl_divergence(first, second)
    assert_close(case.family.divergence(natural, other), expected, rtol=1e-8, atol=1e-8)
    assert_close(case.family.divergence(natural, natural), torch.zeros_like(expected), rtol=0, atol=1e-10)


@every
def test_entropy_gradient_is_that_of_the_entropy_by_expectations(case: Case) -> None:
    mean = tuple(part.detach().requires_grad_() for part in case.family.mean(case.natural()))
    entropy = case.family.entropy(case.family.natural(mean)).sum()
    expected = case.family.symmetric(torch.autograd.grad(entropy, mean, allow_unused=True, materialize_grads=True))
    for found, want in zip(case.gauge(case.family.entropy_gradient(case.natural())), case.gauge(expected)):
        assert_close(found, want, rtol=1e-7, atol=1e-7)


@every
def test_density_against_torch(case: Case) -> None:
    natural = case.natural()
    x = case.family.sample(natural, 5, torch.Generator().manual_seed(3))
    expected = case.family.to_distribution(natural).log_prob(case.outcome(x))
    assert_close(case.family.log_density(natural, x), expected, rtol=1e-9, atol=1e-9)


@every
def test_samples_have_the_expectations(case: Case) -> None:
    """E[T] within five standard errors of 40,000 draws."""
    natural, n = case.natural(), 40_000
    draws = case.family.statistics(case.family.sample(natural, n, torch.Generator().manual_seed(4)))
    for values, expected in zip(draws, case.family.mean(natural)):
        error = values.std(0) / n**0.5
        assert ((values.mean(0) - expected).abs() <= 5 * error + 1e-12).all()


@every
def test_samples_are_those_of_the_seed(case: Case) -> None:
    first, again, other = (
        case.family.sample(case.natural(), 3, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@every
def test_wrong_parameters_are_refused(case: Case) -> None:
    natural = case.natural()
    assert case.family.inside(natural).all()
    case.family.check(natural)
    with pytest.raises(ValueError, match=f"{len(natural)} natural parameters, got {len(natural) + 1}"):
        case.family.check((*natural, natural[0]))
    with pytest.raises(ValueError, match="NaN or infinity"):
        case.family.check((natural[0] * float("nan"), *natural[1:]))
