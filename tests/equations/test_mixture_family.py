"""Mixtures of Gaussians: the marginal's derivatives, its gradients by expectations, and what holds components apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.testing import assert_close

from bayesgrad.families import Gaussian, MixtureOfGaussians, Parameters

WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
FAMILIES = {"learnt": MixtureOfGaussians(), "given": MixtureOfGaussians(WEIGHTS)}
both = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def components(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Means (3, 2) and precisions (3, 2, 2)."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(3, 4, 2, dtype=torch.float64, generator=generator)
    means = torch.randn(3, 2, dtype=torch.float64, generator=generator)
    return means, rows.mT @ rows / 4 + 0.2 * torch.eye(2, dtype=torch.float64)


def natural_of(family: MixtureOfGaussians, seed: int = 0) -> Parameters:
    return family.of(*components(seed), WEIGHTS)


@both
def test_score_and_hessian_are_derivatives_of_the_marginal(family: MixtureOfGaussians) -> None:
    natural, theta = natural_of(family), torch.tensor([0.3, -0.7], dtype=torch.float64)
    theta.requires_grad_()
    (score,) = torch.autograd.grad(family.log_density(natural, theta), theta, create_graph=True)
    hessian = torch.stack([torch.autograd.grad(part, theta, retain_graph=True)[0] for part in score])
    assert_close(family.score(natural, theta), score, rtol=1e-12, atol=1e-12)
    assert_close(family.hessian(natural, theta), hessian, rtol=1e-11, atol=1e-11)


@both
def test_responsibilities_and_hessian_as_printed(family: MixtureOfGaussians) -> None:
    """Khan and Rue 2023, Eqs. 70 and 71, sum by sum."""
    natural, (m, S) = natural_of(family), components()
    theta = torch.tensor([0.3, -0.7], dtype=torch.float64)
    joint = WEIGHTS * MultivariateNormal(m, precision_matrix=S).log_prob(theta).exp()
    r = joint / joint.sum()
    assert_close(family.responsibilities(natural, theta), r)
    pull = [S[j] @ (m[j] - theta) for j in range(3)]
    A = [[torch.outer(pull[i], pull[j]) for j in range(3)] for i in range(3)]
    inner = [A[j][j] - S[j] - torch.stack([r[i] * A[i][j] for i in range(3)]).sum(0) for j in range(3)]
    assert_close(family.hessian(natural, theta), torch.stack([r[j] * inner[j] for j in range(3)]).sum(0))


def test_hessian_at_a_mean_needs_the_square_of_the_other_component() -> None:
    """Khan and Rue 2023, Eq. 73: A_jj, where A_ii is printed."""
    family, (m, S) = MixtureOfGaussians(WEIGHTS), components()
    natural, k = natural_of(family), 1
    r = family.responsibilities(natural, m[k])
    pull = torch.einsum("kij,kj->ki", S, m - m[k])
    expected = -r[k] * S[k]
    for j in (0, 2):
        mixed = sum(r[i] * torch.outer(pull[i], pull[j]) for i in (0, 2))
        expected = expected + r[j] * (torch.outer(pull[j], pull[j]) - S[j] - mixed)
    assert_close(family.hessian(natural, m[k]), expected)


@both
def test_gradients_by_expectations_are_newtons(family: MixtureOfGaussians) -> None:
    """Of E_q[l], l quadratic with Hessian B: (E_k[∇l] - B m_k, B/2) for every component, and l's own value for c."""
    B = torch.tensor([[2.0, 0.4], [0.4, 1.0]], dtype=torch.float64)
    b = torch.tensor([0.5, -1.0], dtype=torch.float64)
    natural = natural_of(family)
    mean = tuple(part.detach().requires_grad_() for part in family.mean(natural))
    weights, m, V = family.moments(family.natural(mean))
    value = torch.einsum("kij,ij->k", V + m[:, :, None] * m[:, None, :], B) / 2 + m @ b
    found = family.symmetric(torch.autograd.grad((weights / weights.sum() * value).sum(), mean))
    centres = components()[0]
    slope = centres @ B + b
    assert_close(found[-2], slope - centres @ B, rtol=1e-9, atol=1e-9)
    assert_close(found[-1], (B / 2).expand(3, 2, 2), rtol=1e-9, atol=1e-9)


def test_entropy_of_the_pair_bounds_that_of_the_marginal() -> None:
    """They differ by the entropy of z given θ: not at all for components far apart, by log K for equal ones."""
    family, generator = MixtureOfGaussians(torch.full((2,), 0.5, dtype=torch.float64)), torch.Generator().manual_seed(0)
    for distance, missing in ((60.0, 0.0), (0.0, torch.tensor(2.0).log().item())):
        means = torch.tensor([[0.0], [distance]], dtype=torch.float64)
        natural = family.of(means, torch.ones(2, 1, 1, dtype=torch.float64))
        log_density = family.log_density(natural, family.sample(natural, 20_000, generator))
        found = family.entropy(natural) - missing + log_density.mean()
        assert abs(found) < 5 * log_density.std() / 20_000**0.5


@both
def test_plates_and_draws_in_front(family: MixtureOfGaussians) -> None:
    one, two = natural_of(family, 0), natural_of(family, 1)
    natural = tuple(torch.stack(pair) for pair in zip(one, two))
    theta = family.sample(natural, 4, torch.Generator().manual_seed(0))  # (4, 2, 2)
    assert theta.shape == (4, 2, 2)
    for i, alone in enumerate((one, two)):
        for method in (family.log_density, family.score, family.hessian, family.responsibilities):
            assert_close(method(natural, theta)[:, i], method(alone, theta[:, i]))


@both
def test_retraction_is_the_step_at_first_and_positive_however_long(family: MixtureOfGaussians) -> None:
    natural = natural_of(family)
    generator = torch.Generator().manual_seed(2)
    direction = family.symmetric(
        tuple(torch.randn(part.shape, dtype=torch.float64, generator=generator) for part in natural)
    )
    expected = family.mean(tuple(a + 1e-6 * b for a, b in zip(natural, direction)))
    for a, b in zip(family.mean(family.retract(natural, direction, 1e-6)), expected):
        assert_close(a, b, rtol=0, atol=1e-10)
    assert not family.in_domain(tuple(a + 100 * b for a, b in zip(natural, direction)))
    far = family.retract(natural, direction, 100.0)
    assert family.in_domain(far)
    assert_close(family.moments(far)[0].sum(), torch.tensor(1.0, dtype=torch.float64))


def test_one_component_is_a_gaussian() -> None:
    m, S = components()
    alone, family = Gaussian().of(m[0], S[0]), MixtureOfGaussians()
    natural = family.of(m[:1], S[:1])
    assert_close(family.entropy(natural), Gaussian().entropy(alone))
    assert_close(family.hessian(natural, m[1]), -S[0])
    assert_close(family.score(natural, m[1]), S[0] @ (m[0] - m[1]))


def test_weights_that_are_refused() -> None:
    with pytest.raises(ValueError, match=r"positive and sum to 1, got \[0.5, 0.75\]"):
        MixtureOfGaussians(torch.tensor([0.5, 0.75]))
    with pytest.raises(ValueError, match="Point does not support it"):
        MixtureOfGaussians().mode(natural_of(MixtureOfGaussians()))
