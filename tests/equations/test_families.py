"""The laws of exponential families, for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence
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
    MixtureOfGaussians,
    NormalWishart,
    Parameters,
    TiedNormalWishart,
    Wishart,
)

PLATES = (3,)


@dataclass(frozen=True)
class Case:
    """A family and natural parameters of three independent variables.

    Args:
        outcome: maps samples to values of torch's distribution.
        gauge: removes the arbitrary constant of natural parameters.
        entropy, divergence: written out, where torch has none.
    """

    family: Family
    draw: Callable[[torch.Generator], Parameters]
    outcome: Callable[[Tensor], Tensor] = lambda x: x
    gauge: Callable[[Parameters], Parameters] = lambda natural: natural
    entropy: Callable[[Parameters], Tensor] | None = None
    divergence: Callable[[Parameters, Parameters], Tensor] | None = None

    def natural(self, seed: int = 0) -> Parameters:
        return self.draw(torch.Generator().manual_seed(seed))


def positive(generator: torch.Generator, size: int = 2, *, plates: tuple[int, ...] = PLATES) -> Tensor:
    rows = torch.randn(*plates, 2 * size, size, dtype=torch.float64, generator=generator)
    return rows.mT @ rows / (2 * size) + 0.1 * torch.eye(size, dtype=torch.float64)


def vector(generator: torch.Generator, size: int = 2) -> Tensor:
    return torch.randn(*PLATES, size, dtype=torch.float64, generator=generator)


def centred(logits: Tensor) -> Tensor:
    return logits - logits.mean(-1, keepdim=True)


def normal_wishart(generator: torch.Generator) -> Parameters:
    confidence, degrees = vector(generator).exp().unbind(-1)
    return NormalWishart().of(vector(generator), confidence, degrees + 2, positive(generator))


def tied_normal_wishart(generator: torch.Generator) -> Parameters:
    """Four means of two dimensions."""
    location = torch.randn(*PLATES, 4, 2, dtype=torch.float64, generator=generator)
    degrees = vector(generator).exp()[:, 0] + 2
    return TiedNormalWishart().of(location, vector(generator, 4).exp(), degrees, positive(generator))


def wishart_divergence(natural: Parameters, other: Parameters) -> Tensor:
    """Written out: torch's takes its natural parameters for what they are not, and does not agree with draws."""
    (nu, V), (nu0, V0) = Wishart().standard_parameters(natural), Wishart().standard_parameters(other)
    P = V.shape[-1]
    scatter = torch.linalg.solve(V0, V)
    trace = scatter.diagonal(dim1=-2, dim2=-1).sum(-1)
    digamma = sum(torch.digamma((nu - i) / 2) for i in range(P))
    gammas = torch.mvlgamma(nu0 / 2, P) - torch.mvlgamma(nu / 2, P)
    return (nu * (trace - P) - nu0 * torch.logdet(scatter) + (nu - nu0) * digamma) / 2 + gammas


def normal_wishart_divergence(natural: Parameters, other: Parameters) -> Tensor:
    """KL of the precisions, and the expected KL of the means given them."""
    m, k, nu, V = NormalWishart().standard_parameters(natural)
    m0, k0, nu0, V0 = NormalWishart().standard_parameters(other)
    precisions = wishart_divergence(Wishart().of(nu, V), Wishart().of(nu0, V0))
    square = torch.einsum("ni,nij,nj->n", m - m0, nu[:, None, None] * V, m - m0)
    P = m.shape[-1]
    return precisions + (P * (k0 / k - 1 - (k0 / k).log()) + k0 * square) / 2


def tied_normal_wishart_divergence(natural: Parameters, other: Parameters) -> Tensor:
    """As that of `NormalWishart`, for each of the means."""
    m, k, nu, V = TiedNormalWishart().standard_parameters(natural)
    m0, k0, nu0, V0 = TiedNormalWishart().standard_parameters(other)
    precisions = wishart_divergence(Wishart().of(nu, V), Wishart().of(nu0, V0))
    square = torch.einsum("nji,nik,njk->nj", m - m0, nu[:, None, None] * V, m - m0)
    return precisions + (m.shape[-1] * (k0 / k - 1 - (k0 / k).log()) + k0 * square).sum(-1) / 2


def mixture(family: MixtureOfGaussians, generator: torch.Generator) -> Parameters:
    means = torch.randn(*PLATES, 2, 3, dtype=torch.float64, generator=generator)
    weights = vector(generator).softmax(-1) if family.weights is None else None
    return family.of(means, positive(generator, 3, plates=(*PLATES, 2)), weights)


def mixture_entropy(family: MixtureOfGaussians, natural: Parameters) -> Tensor:
    """Of component and place: Σ_k π_k (H_k - log π_k)."""
    weights, means, covariances = family.moments(natural)
    return (weights * (MultivariateNormal(means, covariances).entropy() - weights.log())).sum(-1)


def mixture_divergence(family: MixtureOfGaussians, natural: Parameters, other: Parameters) -> Tensor:
    """Of component and place: Σ_k π_k (log π_k/π'_k + KL_k)."""
    (p, *first), (p0, *second) = family.moments(natural), family.moments(other)
    return (p * ((p / p0).log() + kl_divergence(MultivariateNormal(*first), MultivariateNormal(*second)))).sum(-1)


def mixture_case(weights: Tensor | None, gauge: Callable[[Parameters], Parameters]) -> Case:
    family = MixtureOfGaussians(weights)
    return Case(
        family,
        partial(mixture, family),
        gauge=gauge,
        entropy=partial(mixture_entropy, family),
        divergence=partial(mixture_divergence, family),
    )


FIXED = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
CASES = {
    "Gaussian": Case(Gaussian(), lambda g: Gaussian().of(vector(g), positive(g))),
    "DiagonalGaussian": Case(DiagonalGaussian(), lambda g: DiagonalGaussian().of(vector(g), vector(g).exp())),
    "FixedGaussian": Case(FixedGaussian(FIXED), lambda g: (vector(g),)),
    "FixedGaussian(diagonal)": Case(FixedGaussian(FIXED.diagonal()), lambda g: (vector(g),)),
    "Bernoulli": Case(Bernoulli(), lambda g: (vector(g)[:, 0],), outcome=lambda x: (x + 1) / 2),
    "Categorical": Case(Categorical(), lambda g: (vector(g, 4),), gauge=lambda natural: (centred(natural[0]),)),
    "Gamma": Case(Gamma(), lambda g: Gamma().of(*vector(g).exp().unbind(-1))),
    "Beta": Case(Beta(), lambda g: Beta().of(*vector(g).exp().unbind(-1))),
    "Dirichlet": Case(Dirichlet(), lambda g: Dirichlet().of(vector(g, 4).exp())),
    "Wishart": Case(
        Wishart(), lambda g: Wishart().of(vector(g).exp()[:, 0] + 2, positive(g)), divergence=wishart_divergence
    ),
    "NormalWishart": Case(NormalWishart(), normal_wishart, divergence=normal_wishart_divergence),
    "TiedNormalWishart": Case(TiedNormalWishart(), tied_normal_wishart, divergence=tied_normal_wishart_divergence),
    "MixtureOfGaussians": mixture_case(None, lambda natural: (centred(natural[0]), *natural[1:])),
    "MixtureOfGaussians(weights)": mixture_case(torch.tensor([0.3, 0.7], dtype=torch.float64), lambda natural: natural),
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
def test_ordinary_parameters_are_those_it_is_made_of(case: Case) -> None:
    natural = case.natural()
    matrices = Wishart | NormalWishart | TiedNormalWishart
    if isinstance(case.family, Bernoulli | Categorical | Gamma | Beta | Dirichlet | matrices):
        again = case.family.of(*case.family.standard_parameters(natural))
    elif isinstance(case.family, MixtureOfGaussians):
        weights, means, covariances = case.family.moments(natural)
        again = case.family.of(means, torch.linalg.inv(covariances), weights)
    elif isinstance(case.family, FixedGaussian):
        again = case.family.of(case.family.moments(natural)[0])
    else:
        mean, covariance = case.family.moments(natural)
        again = case.family.of(mean, torch.linalg.inv(covariance) if covariance.dim() == 3 else 1 / covariance)
    for found, expected in zip(case.gauge(again), case.gauge(natural)):
        assert_close(found, expected, rtol=1e-10, atol=1e-10)


@every
def test_entropy_and_divergence_against_torch(case: Case) -> None:
    natural, other = case.natural(0), case.natural(1)
    first, second = case.family.to_distribution(natural), case.family.to_distribution(other)
    expected = case.entropy(natural) if case.entropy else first.entropy()
    assert_close(case.family.entropy(natural), expected, rtol=1e-9, atol=1e-9)
    expected = case.divergence(natural, other) if case.divergence else kl_divergence(first, second)
    assert_close(case.family.divergence(natural, other), expected, rtol=1e-8, atol=1e-8)
    assert_close(case.family.divergence(natural, natural), torch.zeros_like(expected), rtol=0, atol=1e-10)


@every
def test_entropy_gradient_is_that_of_the_entropy_by_expectations(case: Case) -> None:
    mean = tuple(part.detach().requires_grad_() for part in case.family.mean(case.natural()))
    entropy = case.family.entropy(case.family.natural(mean)).sum()
    entropy = entropy if entropy.requires_grad else entropy + 0 * mean[0].sum()  # that of a fixed Gaussian is constant
    expected = case.family.symmetric(torch.autograd.grad(entropy, mean, allow_unused=True, materialize_grads=True))
    for found, want in zip(case.gauge(case.family.entropy_gradient(case.natural())), case.gauge(expected)):
        assert_close(found, want, rtol=1e-7, atol=1e-7)


@every
def test_steps_follow_the_natural_gradient(case: Case) -> None:
    """λ + rho (Σ messages + ∇_μ H), for one rho and for one per plate."""
    family, natural, messages = case.family, case.natural(0), case.natural(1)
    gradient = tuple(a + b for a, b in zip(messages, family.entropy_gradient(natural)))
    target = family.full_step(natural, messages)
    for rho in (0.3, 0.7, 1.0, torch.tensor([0.2, 0.6, 1.0]).double()):
        size = [rho[(...,) + (None,) * n] if isinstance(rho, Tensor) else rho for n in family.event_dims]
        for found, old, change, rate in zip(family.part_step(natural, target, rho), natural, gradient, size):
            assert_close(found, old + rate * change, rtol=1e-13, atol=1e-13)


def test_steps_keep_probabilities_of_zero() -> None:
    """A logit of -inf stays, and a message of -inf excludes an outcome, for every rho."""
    natural, target = torch.tensor([-torch.inf, 0.5, 1.0]).double(), torch.tensor([2.0, -torch.inf, 3.0]).double()
    for rho in (0.3, 0.7, 1.0, torch.tensor(0.7).double()):
        (found,) = Categorical().part_step((natural,), (target,), rho)
        assert found[0] == found[1] == -torch.inf
        assert_close(found[2], 1 + 2 * torch.as_tensor(rho).double())


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
    sample = case.family.sample_joint if isinstance(case.family, MixtureOfGaussians) else case.family.sample
    draws = case.family.statistics(sample(natural, n, torch.Generator().manual_seed(4)))
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
    assert case.family.in_domain(natural).all()
    case.family.check(natural)
    with pytest.raises(ValueError, match=f"{len(natural)} natural parameters, got {len(natural) + 1}"):
        case.family.check((*natural, natural[0]))
    with pytest.raises(ValueError, match="NaN or infinity"):
        case.family.check((natural[0] * float("nan"), *natural[1:]))


@every
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_inside(case: Case, value: float) -> None:
    """In any parameter of one of three variables: the others stay inside."""
    natural = case.natural()
    for place in range(len(natural)):
        wrong = [part.clone() for part in natural]
        wrong[place][1] = value
        assert case.family.in_domain(tuple(wrong)).tolist() == [True, False, True]
