"""Exponential families with very small or very large parameters, and invalid inputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special
from torch.testing import assert_close

from bayesgrad.families import (
    Bernoulli,
    Beta,
    Categorical,
    Dirichlet,
    Family,
    Gamma,
    Gaussian,
    NormalWishart,
    Parameters,
    Wishart,
)
from bayesgrad.families.digamma import inverse_digamma, log_minus_digamma, log_minus_digamma_slope, trigamma

GRID = torch.logspace(-8, 8, 2001, dtype=torch.float64)
magnitude = st.floats(-6, 6).map(lambda power: 10.0**power)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_digamma_and_its_kin_against_scipy() -> None:
    expected = torch.from_numpy(special.polygamma(1, GRID.numpy()))
    assert_close(trigamma(GRID), expected, rtol=2e-14, atol=0)
    assert_close(torch.digamma(inverse_digamma(torch.digamma(GRID))), torch.digamma(GRID), rtol=1e-14, atol=1e-14)
    small = GRID[GRID < 1e3]
    expected = torch.from_numpy(special.digamma(small.numpy()))
    assert_close(log_minus_digamma(small), small.log() - expected, rtol=1e-11, atol=0)


def test_gap_keeps_its_digits_where_it_is_small() -> None:
    """log x - ψ(x) = ∫ (1/(1 - e^-t) - 1/t) e^-xt dt, which is 1/(2x) + 1/(12x²) + O(x^-4)."""
    x = tensor(1e5, 1e8, 1e12, 1e15)
    assert_close(log_minus_digamma(x), 1 / (2 * x) + 1 / (12 * x**2), rtol=1e-15, atol=0)
    assert_close(log_minus_digamma_slope(x), -1 / (2 * x**2) - 1 / (6 * x**3), rtol=1e-15, atol=0)
    near = tensor(19.9, 20.1).requires_grad_()
    (slope,) = torch.autograd.grad(log_minus_digamma(near).sum(), near)
    assert_close(slope, log_minus_digamma_slope(near.detach()), rtol=1e-7, atol=0)


@settings(max_examples=40, deadline=None)
@given(shape=magnitude, rate=magnitude)
def test_gamma_from_its_expectations(shape: float, rate: float) -> None:
    """To the precision of the expectations: E[log x] has 16 digits, log E[x] - E[log x] has fewer."""
    mean = Gamma().mean(Gamma().of(tensor(shape), tensor(rate)))
    found = Gamma().natural(mean)
    again = Gamma().mean(found)
    for value, expected in zip(again, mean):
        assert_close(value, expected, rtol=1e-12, atol=1e-12)
    assert_close(found[0] + 1, tensor(shape), rtol=1e-9 + 1e-13 * shape, atol=1e-15)


@settings(max_examples=30, deadline=None)
@given(concentration=st.lists(magnitude, min_size=2, max_size=6))
def test_dirichlet_from_its_expectations(concentration: list[float]) -> None:
    natural = Dirichlet().of(tensor(*concentration))
    mean = Dirichlet().mean(natural)
    (again,) = Dirichlet().mean(Dirichlet().natural(mean))
    assert_close(again, mean[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("count", [2, 3, 50])
def test_dirichlet_of_equal_concentrations(size: float, count: int) -> None:
    alpha = torch.full((count,), size, dtype=torch.float64)
    (found,) = Dirichlet().standard_parameters(Dirichlet().natural(Dirichlet().mean(Dirichlet().of(alpha))))
    assert_close(found, alpha, rtol=1e-9 + 1e-13 * size, atol=1e-15)


@pytest.mark.parametrize("size", [1, 2, 5, 50])
def test_wishart_from_its_expectations(size: int) -> None:
    excess = tensor(1e-6, 1e-2, 1.0, 1e2, 1e6)
    natural = Wishart().of(excess + size - 1, torch.eye(size, dtype=torch.float64).expand(5, size, size))
    mean = Wishart().mean(natural)
    found = Wishart().natural(mean)
    for value, expected in zip(Wishart().mean(found), mean):
        assert_close(value, expected, rtol=1e-12, atol=1e-11)
    assert_close(found[0][:4], natural[0][:4], rtol=1e-9, atol=1e-12)


def test_solutions_are_found_for_all_plates_at_once() -> None:
    """A plate's answer does not depend on the others, though they need more steps."""
    alpha = torch.stack([tensor(1e-6, 1e-6, 1e-6), tensor(1.0, 2.0, 3.0), tensor(1e6, 1e-2, 1e3)])
    (together,) = Dirichlet().natural(Dirichlet().mean((alpha - 1,)))
    for row, found in zip(alpha, together):
        (alone,) = Dirichlet().natural(Dirichlet().mean((row - 1,)))
        assert_close(found, alone, rtol=1e-9, atol=1e-12)


EXTREMES: dict[str, tuple[Family, Parameters]] = {
    "Bernoulli": (Bernoulli(), (tensor(-800, -1e-9, 0, 800),)),
    "Categorical": (Categorical(), (tensor(-2000, 0, 1000),)),
    "Gamma": (Gamma(), Gamma().of(tensor(1e-6, 1, 1e6), tensor(1e6, 1e-6, 1e6))),
    "Beta": (Beta(), Beta().of(tensor(1e-6, 1e6, 1e-6, 1e6), tensor(1e-6, 1e6, 1e6, 1e-6))),
    "Dirichlet(1e-6)": (Dirichlet(), Dirichlet().of(tensor(1e-6, 1e-6, 1e-6))),
    "Dirichlet(1e6)": (Dirichlet(), Dirichlet().of(tensor(1e6, 1e6, 1e6))),
    "Dirichlet(mixed)": (Dirichlet(), Dirichlet().of(tensor(1e-6, 1.0, 1e6))),
}


@pytest.mark.parametrize(("family", "natural"), EXTREMES.values(), ids=EXTREMES)
def test_extreme_parameters_stay_finite(family: Family, natural: Parameters) -> None:
    family.check(natural)
    draws = family.sample(natural, 200, torch.Generator().manual_seed(0))
    for part in [*family.mean(natural), *family.statistics(draws), draws]:
        assert torch.isfinite(part).all()
    assert torch.isfinite(family.log_partition(natural)).all()
    assert torch.isfinite(family.entropy(natural)).all()
    assert torch.isfinite(family.log_density(natural, draws)).all()


def test_sparse_shares_are_at_the_corners() -> None:
    """Concentrations of 1e-6: every draw is at one corner of the simplex, each as often as the others."""
    draws = Dirichlet().sample(Dirichlet().of(tensor(1e-6, 1e-6, 1e-6)), 3000, torch.Generator().manual_seed(0))
    assert ((draws.max(-1).values - 1).abs() < 1e-9).all()
    assert (draws.argmax(-1).bincount() - 1000).abs().max() < 5 * (3000 * 2 / 9) ** 0.5


def test_wishart_of_few_degrees_of_freedom() -> None:
    """nu = P - 1 + 1e-6: matrices of rank P - 1 in all but name, with E[X] = nu V as ever."""
    natural = Wishart().of(tensor(1 + 1e-6), torch.eye(2, dtype=torch.float64)[None])
    Wishart().check(natural)
    for part in [Wishart().log_partition(natural), Wishart().entropy(natural), *Wishart().mean(natural)]:
        assert torch.isfinite(part).all()
    draws = Wishart().sample(natural, 20_000, torch.Generator().manual_seed(0))
    assert torch.isfinite(draws).all()
    error = draws.std(0) / 20_000**0.5
    assert ((draws.mean(0) - Wishart().mean(natural)[1]).abs() <= 5 * error).all()


PAIR = NormalWishart().of(
    tensor(1.0, 2.0), torch.tensor(2.0).double(), torch.tensor(4.5).double(), torch.eye(2).double()
)
MODES = {
    "Bernoulli": (Bernoulli(), (tensor(-0.5, 0.2),)),
    "Gamma": (Gamma(), Gamma().of(tensor(1.5, 4.0), tensor(2.0, 0.5))),
    "Beta": (Beta(), Beta().of(tensor(1.5, 4.0), tensor(2.0, 1.5))),
    "Dirichlet": (Dirichlet(), Dirichlet().of(tensor(1.5, 4.0, 2.0))),
    "Categorical": (Categorical(), (tensor(1.0, 0.0, 2.0),)),
    "Wishart": (Wishart(), Wishart().of(tensor(4.0, 7.5), torch.eye(2, dtype=torch.float64).expand(2, 2, 2))),
    "NormalWishart": (NormalWishart(), PAIR),
}


@pytest.mark.parametrize(("family", "natural"), MODES.values(), ids=MODES)
def test_mode_has_the_greatest_density(family: Family, natural: Parameters) -> None:
    best = family.log_density(natural, family.mode(natural))
    assert (family.log_density(natural, family.sample(natural, 2000, torch.Generator().manual_seed(1))) <= best).all()


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="positive concentrations; 1 of 2 are not"):
        Dirichlet().check((torch.tensor([[0.0, 1.0], [0.0, -1.0]]),))
    with pytest.raises(ValueError, match="positive shape and rate; they are not"):
        Gamma().check((torch.tensor(0.0), torch.tensor(0.5)))
    with pytest.raises(ValueError, match=r"log E\[x\] must be greater"):
        Gamma().natural((torch.tensor(0.5), torch.tensor(1.0)))
    with pytest.raises(ValueError, match="must be less than 1"):
        Dirichlet().natural((torch.tensor([-0.1, -0.1]),))
    with pytest.raises(ValueError, match="needs concentrations of 1 and more"):
        Dirichlet().mode((torch.tensor([-0.5, 1.0]),))
    with pytest.raises(ValueError, match="shapes above 1, got 1 of 2 without"):
        Gamma().mode((torch.tensor([-0.5, 1.0]), torch.tensor([-1.0, -1.0])))


def test_matrices_that_are_refused() -> None:
    eye = torch.eye(2, dtype=torch.float64)
    with pytest.raises(ValueError, match="more than P - 1 degrees of freedom; they are not"):
        Wishart().check((tensor(-1.0)[0], -eye))
    with pytest.raises(ValueError, match="positive definite scale"):
        Wishart().check((tensor(1.0)[0], eye))
    with pytest.raises(ValueError, match="positive confidence"):
        NormalWishart().check((PAIR[0], -PAIR[1], *PAIR[2:]))
    with pytest.raises(ValueError, match=r"log \|E\[X\]\| must be greater"):
        Wishart().natural((tensor(1.0)[0], eye))
    with pytest.raises(ValueError, match="is not positive definite"):
        Wishart().of(tensor(3.0)[0], -eye)
    with pytest.raises(ValueError, match=r"more than P \+ 1 degrees"):
        Wishart().mode(Wishart().of(tensor(2.5)[0], eye))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_keep_their_kind(dtype: torch.dtype) -> None:
    for family, natural in EXTREMES.values():
        cast = tuple(part.clamp(-10, 10).to(dtype) for part in natural)
        if not family.in_domain(cast).all():
            continue
        found = [family.log_partition(cast), *family.mean(cast), family.sample(cast, 2)]
        assert {part.dtype for part in found} == {dtype}


def test_entropy_of_a_gaussian_does_not_depend_on_its_mean() -> None:
    precision = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    near, far = (Gaussian().of(torch.full((2,), mean, dtype=torch.float64), precision) for mean in (0.0, 1e8))
    assert Gaussian().entropy(far) == Gaussian().entropy(near)
