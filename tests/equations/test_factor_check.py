"""Factors against Monte Carlo, and what `run` says about models that are wrong or incomplete."""

from __future__ import annotations

import math
import re
import resource
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from bayesgrad.families import (
    Bernoulli,
    Beta,
    Categorical,
    DiagonalGaussian,
    Dirichlet,
    FixedGaussian,
    Gamma,
    Gaussian,
    Parameters,
    Point,
    Wishart,
)
from bayesgrad.inference import (
    Delta,
    ElementwiseFactor,
    Expected,
    Factor,
    GaussHermite,
    Linear,
    LinearPredictorFactor,
    LogDensity,
    MonteCarlo,
    MultiLinearPredictorFactor,
    Node,
    Prior,
    elbo,
    linear_gaussian,
    run,
    step,
)

Y = 1.5


def tensor(values: float | list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def place(mean: float = 0.7, name: str = "place") -> Node:
    return Node(Gaussian(), Gaussian().of(tensor([mean]), tensor([[2.0]])), name=name)


def noise() -> Node:
    return Node(Gamma(), Gamma().of(tensor(3.0), tensor(2.0)), name="noise")


def right(x: Parameters, tau: Parameters) -> Tensor:
    """E[log N(Y | x, 1/tau)]."""
    return (tau[0] - math.log(2 * math.pi) - tau[1] * (Y**2 - 2 * Y * x[0][0] + x[1][0, 0])) / 2


def squared_mean(x: Parameters, tau: Parameters) -> Tensor:
    """The same with E[x]² in place of E[x²]."""
    return (tau[0] - math.log(2 * math.pi) - tau[1] * (Y**2 - 2 * Y * x[0][0] + x[0][0] ** 2)) / 2


def test_what_is_right_agrees() -> None:
    report = Expected(right, place(), noise()).check()
    assert report.agrees, str(report)
    assert [part.name for part in report.comparisons] == [
        "value",
        "message to place, part 0",
        "message to place, part 1",
        "message to noise, part 0",
        "message to noise, part 1",
    ]


def test_squared_means_are_noticed() -> None:
    """The value is wrong, and the messages but that of E[log tau]. The estimates are the right ones."""
    wrong, exact = Expected(squared_mean, place(), noise()), Expected(right, place(), noise())
    report = wrong.check()
    names = [part.name for part in report.disagreements]
    assert names == ["value", "message to place, part 0", "message to place, part 1", "message to noise, part 1"]
    assert re.search(r"value: -\S+, Monte Carlo -\S+ \+- \S+: DISAGREES", str(report))
    expected = [exact.value(), *exact.message(exact.nodes[0]), *exact.message(exact.nodes[1])]
    for part, value in zip(report.comparisons, expected):
        assert ((part.expected - value).abs() <= 5 * part.error + 1e-8).all(), part


class Halved(Linear):
    """A factor whose message is half of what it should be."""

    def _message(self, node: Node) -> Parameters:
        return tuple(part / 2 for part in super()._message(node))


def test_messages_that_are_no_gradients_are_noticed() -> None:
    """The value agrees, the message does not."""
    report = Halved(place(), (tensor([2.0]), tensor([[-1.0]]))).check()
    assert [part.name for part in report.disagreements] == ["message to place, part 0", "message to place, part 1"]
    assert_close(report.comparisons[1].expected, tensor([2.0]), rtol=0.1, atol=0)


def plain() -> Node:
    return Node(Gaussian(), Gaussian().of(tensor([0.3, -0.2]), tensor([[2.0, 0.3], [0.3, 1.5]])), name="weights")


def diagonal() -> Node:
    return Node(DiagonalGaussian(), DiagonalGaussian().of(tensor([0.3, -0.2]), tensor([2.0, 1.5])), name="weights")


def fixed() -> Node:
    return Node(FixedGaussian(3.0), FixedGaussian(3.0).of(tensor([0.3, -0.2])), name="weights")


X = tensor([[1.0, 0.5], [-0.3, 2.0], [0.7, -1.0]])


def logistic(f: Tensor) -> Tensor:
    return torch.nn.functional.logsigmoid(f)


def softmax(f: Tensor) -> Tensor:
    return f.log_softmax(-1)[..., 0]


def joint(theta: Tensor) -> Tensor:
    return logistic(X @ theta).sum() - theta.square().sum() / 2


def prior(family: object, natural: Parameters, other: Parameters) -> Factor:
    return Prior(Node(family, natural), other)  # pyright: ignore[reportArgumentType]


EYE = torch.eye(2).double()
FACTORS: dict[str, Callable[[], Factor]] = {
    "linear_gaussian": lambda: linear_gaussian(plain(), X, tensor([0.1, 0.5, -0.4]), 2.0),
    "LinearPredictorFactor": lambda: LinearPredictorFactor(plain(), X, logistic),
    "LinearPredictorFactor, diagonal": lambda: LinearPredictorFactor(diagonal(), X, logistic),
    "LinearPredictorFactor, fixed": lambda: LinearPredictorFactor(fixed(), X, logistic),
    "MultiLinearPredictorFactor": lambda: MultiLinearPredictorFactor(plain(), X[:, :1], softmax, GaussHermite(16)),
    "LogDensity": lambda: LogDensity(plain(), joint, GaussHermite(16)),
    "LogDensity, diagonal": lambda: LogDensity(diagonal(), joint, GaussHermite(16)),
    "LogDensity, diagonal, reparameterised": lambda: LogDensity(diagonal(), joint, GaussHermite(16, "reparameterised")),
    "LogDensity, fixed": lambda: LogDensity(fixed(), joint, GaussHermite(16)),
    "Prior, Gaussian": lambda: Prior(plain(), Gaussian().of(tensor([1.0, 1.0]), EYE)),
    "Prior, FixedGaussian": lambda: Prior(fixed(), FixedGaussian(3.0).of(tensor([1.0, 1.0]))),
    "Prior, Gamma": lambda: Prior(noise(), Gamma().of(tensor(2.0), tensor(1.0))),
    "Prior, Beta": lambda: prior(Beta(), Beta().of(tensor(2.0), tensor(3.0)), Beta().of(tensor(1.0), tensor(4.0))),
    "Prior, Bernoulli": lambda: prior(Bernoulli(), (tensor([0.3, -1.0]),), (tensor([0.1, 0.2]),)),
    "Prior, Categorical": lambda: prior(Categorical(), (tensor([[0.3, 0.0, -1.0]]),), (tensor([[1.0, 0.5, 0.2]]),)),
    "Prior, Dirichlet": lambda: prior(Dirichlet(), (tensor([2.0, 0.5, 1.0]),), (tensor([1.0, 1.0, 0.2]),)),
    "Prior, Wishart": lambda: prior(Wishart(), Wishart().of(tensor(6.0), EYE), Wishart().of(tensor(5.0), 2 * EYE)),
}


@pytest.mark.parametrize("name", FACTORS)
def test_factors_of_the_package_agree(name: str) -> None:
    report = FACTORS[name]().check()
    assert report.agrees, str(report)


def test_approximations_are_reported() -> None:
    """The delta method is not the expectation."""
    assert not LogDensity(plain(), lambda theta: theta.pow(4).sum(), Delta()).check().agrees


def test_what_cannot_be_checked() -> None:
    elementwise = ElementwiseFactor(
        diagonal(), lambda mean, variance: GaussHermite(16).scalar(logistic, mean, variance)
    )
    with pytest.raises(ValueError, match=r"ElementwiseFactor has no log_density: pass check a function"):
        elementwise.check()
    assert elementwise.check(logistic).agrees
    assert not elementwise.check(torch.sin).agrees
    node = Node(Point(Dirichlet()), (tensor([2.0, 1.0]),))
    with pytest.raises(ValueError, match=r"which Node.*Point.* does not support"):
        Linear(node, (tensor([2.0, 1.0]),)).check()
    many = Node(DiagonalGaussian(), DiagonalGaussian().of(torch.zeros(300).double(), torch.ones(300).double()))
    with pytest.raises(ValueError, match=r"at most 500 statistics of a node, .* got 600 and 20000 samples"):
        Prior(many, many.natural).check()


def model(function: Callable[..., Tensor]) -> tuple[list[Node], list[Factor]]:
    x, tau = place(), noise()
    return [x, tau], [
        Prior(x, Gaussian().of(tensor([0.0]), tensor([[0.1]]))),
        Expected(function, x, tau),
        Prior(tau, Gamma().of(tensor(2.0), tensor(2.0))),
    ]


def test_a_node_left_out_is_refused() -> None:
    (x, tau), factors = model(right)
    with pytest.raises(ValueError, match=r"factors\[1\], Expected, depends on Node\(noise, Gamma.*add it to nodes"):
        run(x, factors[:2])
    before = tau.natural
    result = run(x, factors, fixed=[tau])
    assert tau.natural is before
    assert result.elbo == pytest.approx(elbo([x, tau], factors).item())


def test_a_falling_bound_names_the_factor() -> None:
    """A factor whose message has the wrong sign: more steps do not help."""

    class Backwards(Linear):
        def _message(self, node: Node) -> Parameters:
            first, second = super()._message(node)
            return -first, second

    x = place()
    factors = [Prior(x, Gaussian().of(tensor([1.0]), tensor([[1.0]]))), Backwards(x, (tensor([9.0]), tensor([[-0.5]])))]
    with pytest.warns(UserWarning, match="not converged after 3 steps") as caught:
        result = run(x, factors, 3, 0.1)
    words = str(caught[0].message)
    assert result.elbos[-1] < result.elbos[-2]
    assert "the last step lowered the bound by" in words
    assert "factors[1], Backwards of Node(place, Gaussian, plates=())" in words
    assert "more steps" not in words
    assert "check()" in words
    assert not factors[1].check().agrees


def test_the_diagnosis_changes_nothing() -> None:
    """The nodes are those after the last step, as without a warning."""

    def start() -> tuple[Node, list[Factor]]:
        x = place(3.0)
        return x, [LogDensity(x, lambda theta: -theta.pow(4).sum() - theta.square().sum(), Delta())]

    x, factors = start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(x, factors, 2)
    y, same = start()
    for _ in range(2):
        step(y, same)
    assert_close(x.natural, y.natural, rtol=0, atol=0)


def test_noise_is_named_as_noise() -> None:
    """The bound is drawn anew after each step, and falls in one of the first runs."""
    for seed in range(10):
        x = place()
        expectation = MonteCarlo(2, "reparameterised", seed=seed)
        factors = [LogDensity(x, lambda theta: -theta.square().sum() * 5, expectation)]
        with pytest.warns(UserWarning, match="not converged") as caught:
            result = run(x, factors, 2, 0.1)
        if result.elbos[-1] < result.elbos[-2]:
            assert "by the noise of MonteCarlo in factors[0], LogDensity" in str(caught[0].message)
            return
    pytest.fail("the bound never fell")


def matrices(function: Callable[[], object], size: int) -> int:
    """The number of results with size x size numbers or more, of all operations."""

    class Count(TorchDispatchMode):
        large = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            parts = out if isinstance(out, (tuple, list)) else [out]
            self.large += sum(isinstance(part, Tensor) and part.numel() >= size * size for part in parts)
            return out

    with Count() as count:
        function()
    return count.large


def quartic(theta: Tensor) -> Tensor:
    return -(theta - 1).pow(4).sum() / 4 - theta.square().sum() / 2


@pytest.mark.parametrize(
    "expectation", [Delta(), Delta("gauss-newton"), MonteCarlo(4, "reparameterised"), MonteCarlo(2)]
)
@pytest.mark.parametrize("kind", ["diagonal", "fixed", "fixed vector"])
def test_no_matrices_for_diagonal_families(kind: str, expectation: Delta | MonteCarlo) -> None:
    """A step and its bound form nothing of P x P numbers."""
    size = 400
    zero, one = torch.zeros(size).double(), torch.ones(size).double()
    if kind == "diagonal":
        node = Node(DiagonalGaussian(), DiagonalGaussian().of(zero, one))
        ahead: Factor = Prior(node, DiagonalGaussian().of(zero, one))
    else:
        family = FixedGaussian(2.0 if kind == "fixed" else 2 * one)
        node = Node(family, family.of(zero))
        ahead = Prior(node, family.of(one))
    factors = [ahead, LogDensity(node, quartic, expectation)]

    def one_step() -> None:
        step(node, factors, 0.1)
        elbo([node], factors)
        node.family.sample(node.natural, 2)
        node.distribution().sample()

    assert matrices(one_step, size) == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the size of the process is not known")
def test_exact_diagonals_do_not_fill_the_heap() -> None:
    """The process grows by less than a quarter of a matrix of P x P numbers."""

    def size() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    theta = torch.zeros(6000).double()
    node = Node(DiagonalGaussian(), DiagonalGaussian().of(theta, torch.ones_like(theta)))
    before = size()
    moments = LogDensity(node, quartic, Delta()).moments()
    assert size() - before < 2 * theta.numel() ** 2
    assert_close(moments.second, torch.full_like(theta, -4.0))


@pytest.mark.parametrize(
    "expectation", [GaussHermite(8), GaussHermite(8, "reparameterised"), Delta(), Delta("gauss-newton")]
)
def test_diagonal_messages_are_the_diagonals(expectation: GaussHermite | Delta) -> None:
    """Of those to a full Gaussian with a diagonal covariance; with two plates."""
    means, precisions = tensor([[0.3, -0.2], [1.0, 0.5]]), tensor([[2.0, 1.5], [0.5, 3.0]])
    full = Node(Gaussian(), Gaussian().of(means, torch.diag_embed(precisions)))
    flat = Node(DiagonalGaussian(), DiagonalGaussian().of(means, precisions))
    first, second = LogDensity(full, joint, expectation), LogDensity(flat, joint, expectation)
    assert_close(second.value(), first.value())
    assert_close(second.moments().first, first.moments().first)
    assert_close(second.moments().second, first.moments().second.diagonal(dim1=-2, dim2=-1))
    mean, half = second.message(flat)
    assert_close(mean, second.moments().first - second.moments().second * means)
    assert_close(half, second.moments().second / 2)
