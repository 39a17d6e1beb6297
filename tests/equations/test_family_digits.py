r"""Families against mpmath, at parameters from 1e-8 to 1e8: how many digits are right.

The reference has 80 digits, and is the definition: A(λ), μ = ∇A(λ), entropy A - ⟨λ, μ⟩ - E[log h], divergence
A(λ_p) - A(λ_q) - ⟨λ_p - λ_q, μ_q⟩, log density ⟨λ, T(x)⟩ - A + log h. Its arguments are the floating-point numbers that
the family receives.

**The condition bound.** No algorithm can be better than what follows from rounding its arguments and its result once.
For a result f of arguments z_i (all entries of λ, and of λ_p or x) this is

.. math::
    \epsilon \left(|f| + \sum_i |z_i\, \partial f / \partial z_i|\right)

with ε = 2^-52. The derivatives are differences of the reference. Errors must be below ten times this bound. An entry
that stores a shape minus one, a - 1, is rounded as a was: |z_i| is replaced by max(|z_i|, |a|). Results that are
vectors or matrices are compared in the largest of their entries.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mpmath as mp
import pytest
import torch
from torch import Tensor

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
from bayesgrad.inference import GaussHermite, Linear, Node, Prior, run

SIZES = (1e-8, 1e-3, 1.0, 30.0, 1e8)
EPS = 2.0**-52
FACTOR = 10
REFERENCE_DIGITS = mp.mpf(10) ** -60  # results that are smaller cancel in the reference
STEP = mp.mpf(10) ** -30  # relative, for derivatives of the reference
Numbers = list[list[Any]]  # one flat list of mpmath numbers for each parameter


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@dataclass(frozen=True)
class Reference:
    """A family written out with mpmath, for λ as flat lists.

    Args:
        partition: A(λ).
        mean: μ(λ).
        statistics: T(x) of a flat list x.
        log_base: log h(x), with its expectation `expected_log_base` as a function of λ.
    """

    partition: Callable[[Numbers], Any]
    mean: Callable[[Numbers], Numbers]
    statistics: Callable[[list[Any]], Numbers]
    log_base: Callable[[list[Any]], Any] = lambda x: mp.mpf(0)
    expected_log_base: Callable[[Numbers], Any] = lambda natural: mp.mpf(0)
    shapes: tuple[int, ...] = ()  # the parameters that are a shape minus one

    def entropy(self, natural: Numbers) -> Any:
        return self.partition(natural) - inner(natural, self.mean(natural)) - self.expected_log_base(natural)

    def divergence(self, natural: Numbers, other: Numbers) -> Any:
        change = [[b - a for a, b in zip(*pair)] for pair in zip(natural, other)]
        return self.partition(other) - self.partition(natural) - inner(change, self.mean(natural))

    def expected_log_density(self, natural: Numbers, other: Numbers) -> Any:
        return inner(other, self.mean(natural)) - self.partition(other) + self.expected_log_base(natural)

    def log_density(self, natural: Numbers, x: list[Any]) -> Any:
        return inner(natural, self.statistics(x)) - self.partition(natural) + self.log_base(x)


def inner(first: Numbers, second: Numbers) -> Any:
    return sum((a * b for pair in zip(first, second) for a, b in zip(*pair)), mp.mpf(0))


def square(flat: Sequence[Any]) -> Any:
    P = int(len(flat) ** 0.5)
    return mp.matrix([list(flat[i * P : i * P + P]) for i in range(P)])


def entries(matrix: Any) -> list[Any]:
    return [matrix[i, j] for i in range(matrix.rows) for j in range(matrix.cols)]


def outer(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    return [a * b for a in first for b in second]


def gaussian_partition(natural: Numbers) -> Any:
    precision, push = -2 * square(natural[1]), mp.matrix(natural[0])
    far = (push.T * mp.lu_solve(precision, push))[0]
    return (far - mp.log(mp.det(precision)) + len(natural[0]) * mp.log(2 * mp.pi)) / 2


def gaussian_mean(natural: Numbers) -> Numbers:
    covariance = mp.inverse(-2 * square(natural[1]))
    mean = list(covariance * mp.matrix(natural[0]))
    return [mean, [a + b for a, b in zip(entries(covariance), outer(mean, mean))]]


def diagonal_as_full(natural: Numbers) -> list[Numbers]:
    return [[[push], [half]] for push, half in zip(*natural)]


def wishart_partition(natural: Numbers) -> Any:
    inverse = -2 * square(natural[1])
    P = inverse.rows
    n = natural[0][0] + mp.mpf(P + 1) / 2
    gammas = sum((mp.loggamma(n - mp.mpf(i) / 2) for i in range(P)), mp.mpf(0))
    return n * (P * mp.log(2) - mp.log(mp.det(inverse))) + gammas + mp.mpf(P * (P - 1)) / 4 * mp.log(mp.pi)


def wishart_mean(natural: Numbers) -> Numbers:
    inverse = -2 * square(natural[1])
    P = inverse.rows
    n = natural[0][0] + mp.mpf(P + 1) / 2
    volume = P * mp.log(2) - mp.log(mp.det(inverse)) + sum((mp.digamma(n - mp.mpf(i) / 2) for i in range(P)), mp.mpf(0))
    return [[volume], entries(2 * n * mp.inverse(inverse))]


def split_normal_wishart(natural: Numbers) -> tuple[list[list[Any]], list[Any], Numbers]:
    """Locations, confidences and the Wishart part, for J means."""
    confidences = [-2 * value for value in natural[1]]
    P = len(natural[0]) // len(confidences)
    locations = [[v / k for v in natural[0][j * P : j * P + P]] for j, k in enumerate(confidences)]
    scale = list(natural[2])
    for location, k in zip(locations, confidences):
        scale = [a + k * b / 2 for a, b in zip(scale, outer(location, location))]
    return locations, confidences, [[natural[3][0] - mp.mpf(len(confidences)) / 2], scale]


def normal_wishart_partition(natural: Numbers) -> Any:
    locations, confidences, wishart = split_normal_wishart(natural)
    terms = [mp.log(2 * mp.pi) - mp.log(k) for k in confidences]
    return wishart_partition(wishart) + mp.mpf(len(locations[0])) / 2 * mp.fsum(terms)


def normal_wishart_mean(natural: Numbers) -> Numbers:
    locations, confidences, wishart = split_normal_wishart(natural)
    (volume,), flat = wishart_mean(wishart)
    pushes = [list(square(flat) * mp.matrix(location)) for location in locations]
    far = [
        mp.mpf(len(m)) / k + sum(a * b for a, b in zip(m, push)) for m, k, push in zip(locations, confidences, pushes)
    ]
    return [[value for push in pushes for value in push], far, flat, [volume]]


def normal_wishart_statistics(x: list[Any], J: int) -> Numbers:
    """Of [m_1 .. m_J Λ] in rows."""
    P = int((-J + (J * J + 4 * len(x)) ** 0.5) / 2 + 0.5)
    rows = [x[i * (P + J) : (i + 1) * (P + J)] for i in range(P)]
    precision = mp.matrix([row[J:] for row in rows])
    means = [[row[j] for row in rows] for j in range(J)]
    pushes = [list(precision * mp.matrix(mean)) for mean in means]
    far = [sum(a * b for a, b in zip(mean, push)) for mean, push in zip(means, pushes)]
    return [[v for push in pushes for v in push], far, entries(precision), [mp.log(mp.det(precision))]]


def mixture_parts(natural: Numbers) -> list[Numbers]:
    K = len(natural[0])
    P = len(natural[1]) // K
    return [[natural[1][k * P : k * P + P], natural[2][k * P * P : (k + 1) * P * P]] for k in range(K)]


def mixture_partition(natural: Numbers) -> Any:
    return mp.log(mp.fsum(mp.exp(c + gaussian_partition(part)) for c, part in zip(natural[0], mixture_parts(natural))))


def mixture_mean(natural: Numbers) -> Numbers:
    total = mixture_partition(natural)
    parts = mixture_parts(natural)
    weights = [mp.exp(c + gaussian_partition(part) - total) for c, part in zip(natural[0], parts)]
    means = [gaussian_mean(part) for part in parts]
    scaled = [[w * value for w, mean in zip(weights, means) for value in mean[place]] for place in (0, 1)]
    return [weights, *scaled]


FIXED = [2.0, 0.5, 0.5, 1.0]


def fixed_log_base(x: list[Any]) -> Any:
    precision = square([mp.mpf(v) for v in FIXED])
    far = (mp.matrix(x).T * precision * mp.matrix(x))[0]
    return (mp.log(mp.det(precision)) - 2 * mp.log(2 * mp.pi) - far) / 2


def fixed_mean(natural: Numbers) -> list[Any]:
    return list(mp.lu_solve(square([mp.mpf(v) for v in FIXED]), mp.matrix(natural[0])))


def dirichlet_partition(natural: Numbers) -> Any:
    alpha = [v + 1 for part in natural for v in part]
    return mp.fsum(mp.loggamma(a) for a in alpha) - mp.loggamma(mp.fsum(alpha))


def dirichlet_mean(natural: Numbers) -> Numbers:
    total = mp.digamma(mp.fsum(v + 1 for part in natural for v in part))
    return [[mp.digamma(v + 1) - total for v in part] for part in natural]


REFERENCES = {
    "Gaussian": Reference(gaussian_partition, gaussian_mean, lambda x: [x, outer(x, x)]),
    "DiagonalGaussian": Reference(
        lambda n: mp.fsum(gaussian_partition(part) for part in diagonal_as_full(n)),
        lambda n: [[gaussian_mean(part)[i][0] for part in diagonal_as_full(n)] for i in (0, 1)],
        lambda x: [x, [v * v for v in x]],
    ),
    "FixedGaussian": Reference(
        lambda n: inner(n, [fixed_mean(n)]) / 2,
        lambda n: [fixed_mean(n)],
        lambda x: [x],
        fixed_log_base,
        lambda n: fixed_log_base(fixed_mean(n)) - 1,
    ),
    "Bernoulli": Reference(lambda n: mp.log(2 * mp.cosh(n[0][0])), lambda n: [[mp.tanh(n[0][0])]], lambda x: [x]),
    "Categorical": Reference(
        lambda n: mp.log(mp.fsum(mp.exp(v) for v in n[0])),
        lambda n: [[mp.exp(v) / mp.fsum(mp.exp(u) for u in n[0]) for v in n[0]]],
        lambda x: [x],
    ),
    "Gamma": Reference(
        lambda n: mp.loggamma(n[0][0] + 1) - (n[0][0] + 1) * mp.log(-n[1][0]),
        lambda n: [[mp.digamma(n[0][0] + 1) - mp.log(-n[1][0])], [-(n[0][0] + 1) / n[1][0]]],
        lambda x: [[mp.log(x[0])], x],
        shapes=(0,),
    ),
    "Beta": Reference(
        dirichlet_partition, dirichlet_mean, lambda x: [[mp.log(x[0])], [mp.log(1 - x[0])]], shapes=(0, 1)
    ),
    "Dirichlet": Reference(dirichlet_partition, dirichlet_mean, lambda x: [[mp.log(v) for v in x]], shapes=(0,)),
    "Wishart": Reference(wishart_partition, wishart_mean, lambda x: [[mp.log(mp.det(square(x)))], x], shapes=(0,)),
    "NormalWishart": Reference(
        normal_wishart_partition, normal_wishart_mean, lambda x: normal_wishart_statistics(x, 1)
    ),
    "TiedNormalWishart": Reference(
        normal_wishart_partition, normal_wishart_mean, lambda x: normal_wishart_statistics(x, 3)
    ),
    "MixtureOfGaussians": Reference(mixture_partition, mixture_mean, lambda x: []),  # its density is another test's
}


def correlated(size: float, other: float) -> Tensor:
    """A positive definite matrix with diagonal entries of two sizes."""
    root = tensor([size**0.5, other**0.5])
    return tensor([[1.0, 0.6], [0.6, 1.0]]) * root[:, None] * root


pairs = list(itertools.product(SIZES, SIZES))
CASES: dict[str, tuple[Family, list[Parameters]]] = {
    "Gaussian": (Gaussian(), [Gaussian().of(tensor([m, 3.0]), correlated(s, 2.0)) for m, s in pairs]),
    "DiagonalGaussian": (
        DiagonalGaussian(),
        [DiagonalGaussian().of(tensor([m, -m]), tensor([s, 2.0])) for m, s in pairs],
    ),
    "FixedGaussian": (
        FixedGaussian(tensor(FIXED).view(2, 2)),
        [FixedGaussian(tensor(FIXED).view(2, 2)).of(tensor([m, m / 3])) for m in SIZES],
    ),
    "Bernoulli": (
        Bernoulli(),
        [(tensor(sign * v),) for v in (1e-8, 1e-3, 0.5, 5.0, 20.0, 300.0, 1e8) for sign in (1, -1)],
    ),
    "Categorical": (
        Categorical(),
        [(tensor([v, -v / 2, w]),) for v in (1e-8, 0.7, 40.0, 1e3, 1e8) for w in (0.0, 2e-8, 30.0)],
    ),
    "Gamma": (Gamma(), [Gamma().of(tensor(a), tensor(b)) for a, b in pairs]),
    "Beta": (Beta(), [Beta().of(tensor(a), tensor(b)) for a, b in pairs]),
    "Dirichlet": (Dirichlet(), [Dirichlet().of(tensor([a, b, 0.7])) for a, b in pairs]),
    "Wishart": (Wishart(), [Wishart().of(tensor(1 + d), correlated(s, 2.0)) for d, s in pairs]),
    "NormalWishart": (
        NormalWishart(),
        [
            NormalWishart().of(tensor([m, 1.0]), tensor(k), tensor(1 + d), correlated(s, 1.0))
            for m, k, d, s in [
                (1.0, 1.0, 1.0, 1.0),
                (1e3, 1e-3, 1e8, 1e-3),
                (1e-8, 1e8, 1e-8, 1.0),
                (30.0, 1.0, 1e3, 1e-8),
            ]
        ],
    ),
    "TiedNormalWishart": (
        TiedNormalWishart(),
        [
            TiedNormalWishart().of(
                tensor([[m, 1.0], [0.0, m], [2.0, -1.0]]), tensor([k, 1.0, 2 * k]), tensor(1 + d), correlated(s, 1.0)
            )
            for m, k, d, s in [(1.0, 1.0, 1.0, 1.0), (1e3, 1e-3, 1e8, 1e-3), (30.0, 1e4, 1e-8, 1.0)]
        ],
    ),
    "MixtureOfGaussians": (
        MixtureOfGaussians(),
        [
            MixtureOfGaussians().of(
                tensor([[m, 0.0], [m, 1.0]]), torch.stack([correlated(s, 1.0), correlated(1.0, s)]), tensor([0.3, 0.7])
            )
            for m, s in [(1.0, 1.0), (1e3, 1e-3), (1e-8, 1e8)]
        ],
    ),
}
every = pytest.mark.parametrize("name", CASES)


def exact(parameters: Parameters) -> Numbers:
    return [[mp.mpf(v) for v in part.flatten().tolist()] for part in parameters]


def bound(function: Callable[[Numbers], Any], arguments: Numbers, shapes: Sequence[int]) -> tuple[list[Any], Any]:
    """The reference's results, and the condition bound of the largest one."""
    at = function(arguments)
    total = [abs(value) for value in at]
    for place, part in enumerate(arguments):
        for i, value in enumerate(part):
            part[i] = value + STEP * (max(abs(value), abs(value + 1)) if place in shapes else abs(value))
            total = [own + abs((b - a) / STEP) for own, a, b in zip(total, at, function(arguments))]
            part[i] = value
    return at, EPS * max(total)


def assert_digits(
    found: Sequence[Tensor] | Tensor,
    function: Callable[[Numbers], Any],
    arguments: Numbers,
    shapes: Sequence[int],
    what: str,
) -> None:
    parts = [found] if isinstance(found, Tensor) else list(found)
    for place, part in enumerate(parts):

        def one(z: Numbers, place: int = place) -> list[Any]:
            value = function(z)
            return list(value[place]) if isinstance(found, (tuple, list)) else [value]

        expected, limit = bound(one, arguments, shapes)
        error = max(abs(mp.mpf(a) - b) for a, b in zip(part.flatten().tolist(), expected))
        ratio = error / (limit + REFERENCE_DIGITS)
        assert ratio <= FACTOR, f"{what}, part {place}: {mp.nstr(ratio, 4)} times the condition bound"


@pytest.fixture(autouse=True)
def digits() -> Any:
    with mp.workdps(90):
        yield


@every
def test_log_partition_mean_and_entropy(name: str) -> None:
    (family, cases), reference = CASES[name], REFERENCES[name]
    for natural in cases:
        z = exact(natural)
        assert_digits(family.log_partition(natural), reference.partition, z, reference.shapes, f"A of {natural}")
        assert_digits(family.mean(natural), reference.mean, z, reference.shapes, f"mean of {natural}")
        assert_digits(family.entropy(natural), reference.entropy, z, reference.shapes, f"entropy of {natural}")


@every
def test_divergences_and_priors(name: str) -> None:
    """Between parameters of different sizes, and between parameters that differ by 1e-6, or by rounding alone."""
    (family, cases), reference = CASES[name], REFERENCES[name]
    for place, natural in enumerate(cases):
        near = tuple(part * (1 - 1e-6 * (i + 1)) for i, part in enumerate(natural))
        for other in (cases[(3 * place + 1) % len(cases)], near, natural):
            if not family.in_domain(other).all():
                continue
            count = len(natural)
            z = exact((*natural, *other))
            compared = [("divergence", family.divergence(natural, other), reference.divergence)]
            if not family.direct and other is not near:
                value = Prior(Node(family, natural), other).value()
                compared.append(("expected log density", value, reference.expected_log_density))
            for what, found, expected in compared:
                assert_digits(
                    found,
                    lambda z, count=count, expected=expected: expected(z[:count], z[count:]),
                    z,
                    (*reference.shapes, *[count + place for place in reference.shapes]),
                    f"{what} of {natural} and {other}",
                )


@every
def test_log_densities(name: str) -> None:
    """At draws. Those that underflow are replaced by 1e-290, and those of matrices that are singular are left out."""
    (family, cases), reference = CASES[name], REFERENCES[name]
    if isinstance(family, MixtureOfGaussians):
        return
    for natural in cases:
        for x in family.sample(natural, 2, torch.Generator().manual_seed(0)):
            x = x.clamp(min=1e-290) if isinstance(family, Gamma | Beta | Dirichlet) else x
            if isinstance(family, Wishart | NormalWishart) and torch.linalg.cholesky_ex(x[:, -2:])[1]:
                continue
            z = [*exact(natural), *exact((x,))]
            assert_digits(
                family.log_density(natural, x),
                lambda z: reference.log_density(z[:-1], z[-1]),
                z,
                reference.shapes,
                f"log density of {natural} at {x}",
            )


def hermite_polynomials(n: int, x: Any) -> tuple[Any, Any]:
    """He_n(x) and He_{n-1}(x), divided by the square roots of n! and (n-1)!."""
    older, newest = mp.mpf(0), mp.mpf(1)
    for k in range(1, n + 1):
        older, newest = newest, (x * newest - mp.sqrt(k - 1) * older) / mp.sqrt(k)
    return newest, older


@pytest.mark.parametrize("n", [2, 32, 379, 380, 1000])
def test_quadrature_points(n: int) -> None:
    """Each node is a zero of He_n, found by Newton's method in mpmath, and its weight is 1/(n h_{n-1}²)."""
    at, _, weights = GaussHermite(n).points(torch.zeros(1).double(), torch.eye(1).double())
    assert abs(float(weights.sum()) - 1) < 1e-14
    for place in {0, n // 4, n // 2, n - 1}:
        x = mp.mpf(at[place, 0].item())
        for _ in range(4):
            newest, older = hermite_polynomials(n, x)
            x -= newest / (mp.sqrt(n) * older)
        assert abs(at[place, 0].item() - x) < 1e-14 * n**0.5
        weight = 1 / (n * hermite_polynomials(n, x)[1] ** 2)
        assert abs(weights[place].item() - weight) < 1e-13 * n**0.5 * weight + 1e-300


def test_quadrature_with_many_points() -> None:
    """E[cos x] = exp(-1/2) for x ~ N(0, 1)."""
    for n in (379, 380, 1000):
        found = GaussHermite(n).scalar(torch.cos, torch.zeros(1).double(), torch.ones(1).double())
        torch.testing.assert_close(found.value, tensor([-0.5]).exp(), rtol=1e-13, atol=0)
    with pytest.raises(ValueError, match="n must be a positive integer, at most 2000, got 2001"):
        GaussHermite(2001)


def test_probabilities_of_zero() -> None:
    """An outcome of probability zero changes no expectation: the family is that of the other outcomes."""
    zero, few = Categorical().of(tensor([0.2, 0.0, 0.8])), Categorical().of(tensor([0.2, 0.8]))
    other, other_few = Categorical().of(tensor([0.5, 0.1, 0.4])), Categorical().of(tensor([0.5, 0.4]))
    Categorical().check(zero)
    torch.testing.assert_close(Categorical().mean(zero)[0], tensor([0.2, 0.0, 0.8]))
    torch.testing.assert_close(Categorical().entropy(zero), Categorical().entropy(few))
    expected = Categorical().divergence(few, other_few) - tensor(0.9).log()
    torch.testing.assert_close(Categorical().divergence(zero, other), expected)
    assert Categorical().divergence(zero, zero) == 0
    assert Categorical().divergence(other, zero) == torch.inf
    values = Categorical().log_density(zero, torch.eye(3).double())
    assert values.tolist() == [pytest.approx(-1.6094379124341003), -torch.inf, pytest.approx(-0.2231435513142097)]
    assert (Categorical().sample(zero, 1000, torch.Generator().manual_seed(0))[:, 1] == 0).all()
    assert Categorical().natural(Categorical().mean(zero))[0].tolist()[1] == -torch.inf


@pytest.mark.parametrize("rho", [0.3, 1.0])
def test_steps_with_probabilities_of_zero(rho: float) -> None:
    """A prior of zero is a posterior of zero, from any start; the bound at the posterior is the log evidence."""
    prior, likelihood = tensor([0.5, 0.0, 0.5]), tensor([0.1, 0.9, 0.3])
    node = Node(Categorical(), Categorical().of(tensor([0.2, 0.5, 0.3])))
    factors = [Prior(node, Categorical().of(prior)), Linear(node, (likelihood.log(),))]
    result = run(node, factors, 200, rho)
    torch.testing.assert_close(node.mean[0], tensor([0.25, 0.0, 0.75]), rtol=1e-4, atol=0)
    assert result.elbo == pytest.approx(tensor(0.2).log().item(), abs=1e-8)


def test_impossible_everywhere_is_refused() -> None:
    with pytest.raises(ValueError, match="a logit above -inf for at least one outcome; they are not valid"):
        Categorical().check(Categorical().of(tensor([0.0, 0.0])))
    with pytest.raises(ValueError, match="NaN or infinity"):
        Categorical().check((tensor([0.0, torch.inf]),))
