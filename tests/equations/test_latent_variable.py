"""Latent-variable factors against models with the latent variables as nodes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from bayesgrad.families import Categorical, Dirichlet, Parameters, Point
from bayesgrad.inference import Chunked, Expected, Factor, LatentVariableFactor, Node, Prior, elbo, message, run, step
from bayesgrad.models import GaussianMixture
from bayesgrad.models.covariances import COVARIANCES, Covariance
from bayesgrad.models.mixture_factor import MixtureFactor, Rows

K, P, N = 3, 2, 25
LOG_2PI = torch.log(torch.tensor(2 * torch.pi, dtype=torch.float64))
every = pytest.mark.parametrize("kind", list(COVARIANCES))
both = pytest.mark.parametrize("points", [False, True], ids=["moments", "points"])


def rows(seed: int = 0, count: int = N) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    places = 3 * torch.randn(K, P, dtype=torch.float64, generator=generator)
    return places[torch.arange(count) % K] + torch.randn(count, P, dtype=torch.float64, generator=generator)


def parameters(covariance: Covariance, data: Tensor, points: bool = False) -> tuple[list[Node], list[Factor]]:
    """Nodes at random shares of the rows, and priors; of points none."""
    spread = covariance.default_spread(data.mT)
    priors = Dirichlet().of(data.new_full((K,), 0.5)), covariance.prior(data.mean(0), 0.5, P + 1.0, spread, K)
    shares = 2 * torch.randn(K, len(data), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sums = shares.softmax(0) @ covariance.features(data.mT, 0.0).mT
    found: list[Parameters] = [(sums[:, 0],), covariance.message(sums, P)]
    if points:
        return [Node(Point(f), n) for f, n in zip((Dirichlet(), covariance.family), found)], []
    natural = [tuple(a + b for a, b in zip(*pair)) for pair in zip(found, priors)]
    nodes = [Node(f, n) for f, n in zip((Dirichlet(), covariance.family), natural)]
    return nodes, [Prior(node, prior) for node, prior in zip(nodes, priors)]


def log_densities(kind: str, mean: Parameters, x: Tensor) -> Tensor:
    """E[log N(x | component)], (n, K), from E[Λm], E[m'Λm], E[Λ], E[log |Λ|] as each family has them."""
    push, square, precision, volume = mean
    if kind == "full":
        inner = torch.einsum("ni,kij,nj->nk", x, precision, x)
        return (volume - square - P * LOG_2PI - inner) / 2 + x @ push.mT
    if kind == "tied":
        inner = torch.einsum("ni,ij,nj->n", x, precision, x)[:, None]
        return (volume - square - P * LOG_2PI - inner) / 2 + x @ push.mT
    if kind == "diag":
        each = volume - square - LOG_2PI - precision[..., 0, 0] * x[:, None].square() + 2 * push[..., 0] * x[:, None]
        return each.sum(-1) / 2
    inner = precision[:, 0, 0] * x.square().sum(1, keepdim=True) + square.sum(1)
    return (P * (volume - LOG_2PI) - inner) / 2 + x @ push[..., 0].mT


def explicit(kind: str, nodes: list[Node], data: Tensor, scale: float = 1.0) -> tuple[Node, Expected]:
    """An indicator of each row, and E[log p(x, z)] with messages by autograd."""
    weights, components = nodes
    indicators = Node(Categorical(), (data.new_zeros(len(data), K),), scale=scale)

    def joint(z: Parameters, log_weights: Parameters, mean: Parameters) -> Tensor:
        return (z[0] * (log_weights[0] + log_densities(kind, mean, data))).sum()

    return indicators, Expected(joint, indicators, weights, components, scale=scale)


@every
@both
def test_value_and_messages_are_those_of_indicators_at_their_best(kind: str, points: bool) -> None:
    covariance, data = COVARIANCES[kind], rows()
    nodes, _ = parameters(covariance, data, points)
    collapsed = MixtureFactor(*nodes, Rows(data, covariance, K))
    indicators, joint = explicit(kind, nodes, data)
    step(indicators, [joint])
    assert_close(collapsed.value(), joint.value() + indicators.entropy, rtol=1e-12, atol=0)
    for node in nodes:
        for found, expected in zip(collapsed.message(node), joint.message(node)):
            assert_close(found, expected.expand_as(found), rtol=1e-10, atol=1e-10)


@every
@both
def test_sweeps_are_those_with_indicators(kind: str, points: bool) -> None:
    """Indicators first, then all parameters, rho = 1: the same numbers, sweep by sweep."""
    covariance, data = COVARIANCES[kind], rows()
    nodes, priors = parameters(covariance, data, points)
    twins, others = parameters(covariance, data, points)
    collapsed = MixtureFactor(*nodes, Rows(data, covariance, K))
    indicators, joint = explicit(kind, twins, data)
    for _ in range(5):
        step(nodes, [*priors, collapsed], schedule="parallel")
        step(indicators, [joint])
        step(twins, [*others, joint])
        for node, twin in zip(nodes, twins):
            for found, expected in zip(node.natural, twin.natural):
                assert_close(found, expected, rtol=1e-9, atol=1e-9)
    step(indicators, [joint])
    bound = elbo([indicators, *twins], [*others, joint])
    assert_close(elbo(nodes, [*priors, collapsed]), bound, rtol=1e-11, atol=0)


def test_a_batch_with_scale_is_a_batch_of_scaled_indicators() -> None:
    """SVI: indicators of scale N/B on factor and entropy, moved with rho = 1, then the parameters with less."""
    covariance, data = COVARIANCES["full"], rows()
    nodes, priors = parameters(covariance, data)
    twins, others = parameters(covariance, data)
    for t in range(1, 5):
        batch, rho = data[t::5], (t + 1.0) ** -0.7
        scale = N / len(batch)
        collapsed = MixtureFactor(*nodes, Rows(batch, covariance, K), scale=scale)
        indicators, joint = explicit("full", twins, batch, scale)
        step(indicators, [joint])
        bound = elbo([indicators, *twins], [*others, joint])
        assert_close(elbo(nodes, [*priors, collapsed]), bound, rtol=1e-12, atol=0)
        step(nodes, [*priors, collapsed], rho, schedule="parallel")
        step(twins, [*others, joint], rho, schedule="parallel")
    for node, twin in zip(nodes, twins):
        for found, expected in zip(node.natural, twin.natural):
            assert_close(found, expected, rtol=1e-10, atol=1e-10)


@every
def test_chunks_add_up(kind: str) -> None:
    covariance, data = COVARIANCES[kind], rows()
    nodes, priors = parameters(covariance, data)
    whole = MixtureFactor(*nodes, Rows(data, covariance, K))
    chunked = Chunked([MixtureFactor(*nodes, Rows(part, covariance, K)) for part in data.split(7)])
    assert_close(chunked.value(), whole.value(), rtol=1e-13, atol=0)
    for node in nodes:
        for found, expected in zip(message(node, [*priors, chunked]), message(node, [*priors, whole])):
            assert_close(found, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="chunks must contain at least one factor"):
        Chunked([])


@every
def test_long_data_are_read_in_pieces(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Piece by piece, the last one shorter, as in one; in one buffer, or with features that are kept."""
    covariance, data = COVARIANCES[kind], rows(count=1000)
    nodes, _ = parameters(covariance, data)
    whole = MixtureFactor(*nodes, Rows(data, covariance, K, 0.1))
    assert [part.shape[1] for part in whole.rows.columns] == [1000]
    monkeypatch.setattr("bayesgrad.models.covariances.CHUNK", 1)
    for most in (1 << 20, 1):
        monkeypatch.setattr("bayesgrad.models.mixture_factor.KEPT", most)
        pieces = MixtureFactor(*nodes, Rows(data, covariance, K, 0.1))
        assert (pieces.rows.kept is None) == (most == 1)
        assert [part.shape[1] for part in pieces.rows.columns] == [256, 256, 256, 232]
        assert_close(pieces.value(), whole.value(), rtol=1e-13, atol=0)
        for node in nodes:
            for found, expected in zip(pieces.message(node), whole.message(node)):
                assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_shared_matrix_is_multiplied_once_however_many_components() -> None:
    """Of 1400 rows and 200 columns; with tied covariances there were as many products as components."""

    class Products(TorchDispatchMode):
        large = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            sizes = [part.shape for part in args if isinstance(part, Tensor)]
            self.large += str(func).startswith("aten.mm") and sizes == [(1400, 200), (200, 200)]
            return func(*args, **(kwargs or {}))

    data = torch.randn(1400, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts = []
    for kind in ("tied", "full"):
        model = GaussianMixture(4, covariance_type=kind, reg_covar=1.0, max_iter=1, tol=0, random_state=0).fit(data)
        weights, components = model._nodes
        factor = MixtureFactor(weights, components, Rows(data, COVARIANCES[kind], 4))
        assert factor.rows.wide
        factor.rows.columns = (data,)
        with Products() as products:
            factor.evaluate()
        counts.append(products.large)
    assert counts == [1, 4]


@pytest.mark.parametrize("kind", ["full", "tied"])
@both
def test_wide_rows_are_read_by_matrices(kind: str, points: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More columns than twice the components, too many rows to keep their products: the same numbers."""
    covariance = COVARIANCES[kind]
    data = torch.cat([rows(seed, count=700) for seed in range(4)], 1)  # (700, 8)
    monkeypatch.setattr(f"{__name__}.P", 8)
    nodes, _ = parameters(covariance, data, points)
    whole = MixtureFactor(*nodes, Rows(data, covariance, K, 0.1))
    monkeypatch.setattr("bayesgrad.models.covariances.CHUNK", 1)
    wide = MixtureFactor(*nodes, Rows(data, covariance, K, 0.1))
    assert wide.rows.wide
    assert not whole.rows.wide
    assert len(wide.rows.columns) == 3
    assert_close(wide.value(), whole.value(), rtol=1e-12, atol=0)
    for node in nodes:
        for found, expected in zip(wide.message(node), whole.message(node)):
            assert_close(found, expected, rtol=1e-11, atol=1e-11)


class Counted(LatentVariableFactor):
    """The number of evaluations."""

    evaluations = 0

    def evaluate(self) -> tuple[Tensor, dict[Node, Parameters]]:
        self.evaluations += 1
        return torch.zeros((), dtype=torch.float64), {node: node.natural for node in self.nodes}


def test_one_look_for_each_place_of_the_nodes() -> None:
    nodes, _ = parameters(COVARIANCES["full"], rows())
    factor = Counted(*nodes)
    for _ in range(3):
        factor.value(), [factor.message(node) for node in nodes]
    assert factor.evaluations == 1
    nodes[0].natural = tuple(part + 1 for part in nodes[0].natural)
    factor.value()
    assert factor.evaluations == 2
    with pytest.raises(ValueError, match=", not on"):
        factor.message(parameters(COVARIANCES["full"], rows())[0][0])


@every
@both
@pytest.mark.parametrize("seed", range(4))
def test_the_bound_never_falls(kind: str, points: bool, seed: int) -> None:
    """Whole sweeps and shorter steps, from random starts, with rows that are blurred."""
    covariance, data = COVARIANCES[kind], rows(seed)
    nodes, priors = parameters(covariance, data, points)
    factors = [*priors, MixtureFactor(*nodes, Rows(data, covariance, K, 0.01))]
    for rho in (1.0, 0.5):
        bounds = np.array(run(nodes, factors, 12, rho, tolerance=0, schedule="parallel").elbos)
        assert (np.diff(bounds) > -1e-10).all()
        assert bounds[-1] > bounds[0] + 1e-3 or rho < 1


@pytest.mark.parametrize("count", range(1, 9))
def test_products_of_any_number_of_components(count: int) -> None:
    """Rows of zeros are added to products of three, six or seven components, and nothing to the sums."""
    covariance, data = COVARIANCES["diag"], rows()
    generator = torch.Generator().manual_seed(count)
    shares = torch.rand(count, len(data), dtype=torch.float64, generator=generator).softmax(0)
    features = covariance.features(data.mT, 0.1)
    sums = Rows(data, covariance, count, 0.1).sums(shares)
    assert_close(sums, shares @ features.mT, rtol=1e-13, atol=1e-13)
    nodes = [
        Node(Point(Dirichlet()), (sums[:, 0],)),
        Node(Point(covariance.family), covariance.message(sums, P)),
    ]
    factor = MixtureFactor(*nodes, Rows(data, covariance, count, 0.1))
    logits = covariance.coefficients(nodes[1].mean) @ features + nodes[0].mean[0][:, None]
    assert_close(factor.value(), logits.logsumexp(0).sum(), rtol=1e-13, atol=0)
    expected = covariance.message(logits.softmax(0) @ features.mT, P)
    for found, right in zip(factor.message(nodes[1]), expected):
        assert_close(found, right, rtol=1e-12, atol=1e-12)
