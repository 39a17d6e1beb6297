"""Points: ∇A = T(mode), and one step that is the M-step of EM."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.testing import assert_close

from bayesgrad.families import (
    Bernoulli,
    Beta,
    Categorical,
    Dirichlet,
    Family,
    FixedGaussian,
    Gamma,
    Gaussian,
    NormalWishart,
    Parameters,
    Point,
    TiedNormalWishart,
    Wishart,
)


def tensor(value: object) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


MATRIX = tensor([[2.0, 0.5], [0.5, 1.0]])
CASES: dict[str, tuple[Family, Parameters]] = {
    "Gaussian": (Gaussian(), Gaussian().of(tensor([1.0, -2.0]), MATRIX)),
    "FixedGaussian": (FixedGaussian(MATRIX), (tensor([1.0, -2.0]),)),
    "Bernoulli": (Bernoulli(), (tensor([0.5, -2.0]),)),
    "Categorical": (Categorical(), (tensor([0.5, -2.0, 1.0]),)),
    "Gamma": (Gamma(), Gamma().of(tensor([1.5, 4.0]), tensor([2.0, 0.5]))),
    "Beta": (Beta(), Beta().of(tensor([1.5, 4.0]), tensor([2.0, 1.5]))),
    "Dirichlet": (Dirichlet(), Dirichlet().of(tensor([[1.5, 2.0, 4.0]]))),
    "Wishart": (Wishart(), Wishart().of(tensor(5.0), MATRIX)),
    "NormalWishart": (NormalWishart(), NormalWishart().of(tensor([1.0, -2.0]), tensor(2.0), tensor(5.0), MATRIX)),
    "TiedNormalWishart": (
        TiedNormalWishart(),
        TiedNormalWishart().of(
            tensor([[1.0, -2.0], [0.0, 1.0], [3.0, 0.5]]), tensor([2.0, 1.0, 0.5]), tensor(5.0), MATRIX
        ),
    ),
}
every = pytest.mark.parametrize(("family", "natural"), CASES.values(), ids=CASES)


@every
def test_mean_is_statistics_at_the_mode_and_gradient_of_log_partition(family: Family, natural: Parameters) -> None:
    point = Point(family)
    leaves = tuple(part.clone().requires_grad_() for part in natural)
    gradient = point.symmetric(torch.autograd.grad(point.log_partition(leaves).sum(), leaves))
    for found, statistic, expected in zip(point.mean(natural), family.statistics(family.mode(natural)), gradient):
        assert_close(found, statistic)
        assert_close(found, expected, rtol=1e-12, atol=1e-12)


@every
def test_what_a_point_is(family: Family, natural: Parameters) -> None:
    point, mode = Point(family), family.mode(natural)
    plates = family.plates(natural)
    assert_close(point.entropy(natural), torch.zeros(plates, dtype=torch.float64))
    for found, expected in zip(point.entropy_gradient(natural), family.entropy_gradient(natural)):
        assert_close(found, expected)
    assert_close(point.divergence(natural, natural), torch.zeros(plates, dtype=torch.float64), rtol=0, atol=1e-14)
    assert_close(point.sample(natural, 3), mode.expand(3, *mode.shape))
    assert_close(point.log_density(natural, mode), torch.zeros(plates, dtype=torch.float64), rtol=0, atol=1e-14)
    delta = point.to_distribution(natural)
    assert delta.batch_shape == plates
    assert (delta.log_prob(delta.sample((2,))) == 0).all()
    assert (delta.log_prob(mode + 1) == -torch.inf).all()
    point.check(natural)
    with pytest.raises(ValueError, match="store the natural parameters"):
        point.natural(point.mean(natural))


def step(point: Point, natural: Parameters, messages: Parameters) -> Parameters:
    """λ + rho (Σ messages + ∇H), rho = 1."""
    return tuple(a + (b + c) for a, b, c in zip(natural, messages, point.entropy_gradient(natural)))


def test_step_gives_maximum_likelihood() -> None:
    y = torch.randn(20, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 + 1
    n = tensor(10.0)
    pair = Point(NormalWishart())
    mean, precision = NormalWishart().unpack(
        pair.mode(step(pair, CASES["NormalWishart"][1], (y.sum(0), -n, -y.T @ y / 2, n)))
    )
    assert_close(mean, y.mean(0))
    assert_close(torch.linalg.inv(precision), torch.cov(y.T, correction=0))
    scale = Point(Wishart())
    centred = y - y.mean(0)
    found = scale.mode(step(scale, CASES["Wishart"][1], (n, -centred.T @ centred / 2)))
    assert_close(torch.linalg.inv(found), torch.cov(y.T, correction=0))
    rate = Point(Gamma())
    found = rate.mode(step(rate, (tensor(3.0), tensor(-1.0)), (n, -centred[:, 0].square().sum() / 2)))
    assert_close(1 / found, y[:, 0].var(correction=0))
    group = torch.nn.functional.one_hot(torch.arange(20) % 3, 3).to(y)
    tied, counts = Point(TiedNormalWishart()), group.sum(0)
    found = step(tied, CASES["TiedNormalWishart"][1], (group.T @ y, -counts / 2, -y.T @ y / 2, n))
    means, precision = TiedNormalWishart().unpack(tied.mode(found))
    expected = group.T @ y / counts[:, None]
    assert_close(means, expected)
    assert_close(torch.linalg.inv(precision), torch.cov((y - group @ expected).T, correction=0))
    shares = Point(Dirichlet())
    found = shares.mean(step(shares, (tensor([1.0, 1.0, 5.0]),), (tensor([6.0, 0.0, 2.0]),)))[0]
    assert_close(found.exp(), tensor([0.75, torch.finfo(torch.float64).tiny, 0.25]))
    assert torch.isfinite(found).all()


def test_two_points_and_an_indicator_are_em() -> None:
    """Mixture of two Gaussians, 5 iterations: weights, means and precisions as points against the plain formulas."""
    generator = torch.Generator().manual_seed(1)
    y = torch.randn(40, 2, dtype=torch.float64, generator=generator)
    y[:20] += 2
    pair, shares = Point(NormalWishart()), Point(Dirichlet())
    r = torch.rand(40, 2, dtype=torch.float64, generator=generator)
    r = r / r.sum(1, keepdim=True)
    plain = r
    for _ in range(5):
        n = r.sum(0)
        square = torch.einsum("nk,ni,nj->kij", r, y, y)
        push, bend, precision, volume = pair.mean((r.T @ y, -n / 2, -square / 2, n / 2))
        (log_share,) = shares.mean((n,))
        inner = torch.einsum("ni,kij,nj->nk", y, precision, y)
        (r,) = Categorical().mean((log_share + y @ push.T - bend / 2 - inner / 2 + volume / 2,))

        count = plain.sum(0)
        means = plain.T @ y / count[:, None]
        offset = y[:, None] - means
        covariances = torch.einsum("nk,nki,nkj->kij", plain, offset, offset) / count[:, None, None]
        joint = (count / 40).log() + MultivariateNormal(means, covariances).log_prob(y[:, None])
        plain = joint.softmax(1)
    assert_close(r, plain, rtol=1e-10, atol=1e-12)


def test_points_without_a_mode_are_refused() -> None:
    with pytest.raises(ValueError, match="that has a mode; 1 of 2 are not"):
        Point(Dirichlet()).check((tensor([[1.0, 2.0], [-0.5, 1.0]]),))
    with pytest.raises(ValueError, match="Point must define a distribution that has a mode"):
        Point(Gamma()).check((tensor(-0.5), tensor(-1.0)))
