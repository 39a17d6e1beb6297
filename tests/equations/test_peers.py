"""Against peers, where they are right: curvlinops and BackPACK, in float64 with the labels given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bayesgrad import SubsampledFisher
from bayesgrad.layers.moments import symmetric
from bayesgrad.optim import FOOF, KFAC

N = 6
CLASSES = 4
pytestmark = [  # the peers' own
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
]


class ClassesSecond(nn.Module):
    """(N, T, classes) to torch's (N, classes, T)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).transpose(1, 2)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6, bias=False), nn.ReLU(), nn.Linear(6, CLASSES))


def per_token() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def pooled() -> nn.Module:
    """Positions are shared by the first layer only."""
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Flatten(), nn.Linear(2 * 5, CLASSES))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(3, 4, (3, 2), padding=(2, 0), dilation=(2, 1), bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(4 * 4 * 3, CLASSES),
    )


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2),
        nn.Tanh(),
        nn.Conv2d(4, 4, 2, dilation=2, padding=1, groups=4),
        nn.Tanh(),
        nn.Conv2d(4, 6, (1, 2), stride=(2, 1), groups=2, bias=False),
        nn.Flatten(),
        nn.Linear(6 * 2 * 3, CLASSES),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (mlp, (5,)),
    "tokens": (per_token, (3, 3)),
    "pooled": (pooled, (2, 3)),
    "conv": (conv, (2, 7, 8)),
    "grouped": (grouped, (2, 7, 8)),
}


def build(name: str, likelihood: str = "categorical") -> tuple[nn.Module, Tensor, Tensor]:
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(N, *shape, dtype=torch.float64)
    outputs = model(x)
    if likelihood == "categorical":
        return model, x, torch.randint(CLASSES, outputs.shape[:-1])
    return model, x, torch.rand_like(outputs).round()


def close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    error = torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected)
    assert error <= 1e-12, f"relative error {error:.2e}"


def dense(operator: Any) -> Tensor:
    return operator @ torch.eye(operator.shape[1], dtype=torch.float64)


# --- Kronecker factors ---


def theirs(model: nn.Module, x: Tensor, y: Tensor, fisher: str, sharing: str) -> Any:
    """The operator, its factors by layer in `_input_covariances` and `_gradient_covariances`."""
    curvlinops = pytest.importorskip("curvlinops")
    operator = curvlinops.KFACLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        [p for p in model.parameters() if p.requires_grad],
        [(x, y)],
        fisher_type=fisher,
        kfac_approx=sharing,
        check_deterministic=False,  # which would add up the factors of two passes
        separate_weight_and_bias=False,  # ours has a one appended to the inputs, as theirs then
    )
    operator.compute_kronecker_factors()
    return operator


def positions_of(model: nn.Module, x: Tensor) -> dict[str, int]:
    """How often each layer is applied to an example."""
    found: dict[str, int] = {}
    h = x
    for name, layer in model.named_children():
        h = layer(h)
        if isinstance(layer, nn.Conv2d):
            found[name] = h.shape[2:].numel()
        elif isinstance(layer, nn.Linear):
            found[name] = h.shape[1:-1].numel()
    return found


def matrix(moment: Tensor) -> Tensor:
    return symmetric(moment)[0]


@pytest.mark.parametrize("name", ["MLP", "pooled", "conv"])
def test_foof_factors(name: str) -> None:
    model, x, y = build(name)
    operator = theirs(model, x, y, "forward-only", "expand")
    places = positions_of(model, x)
    optimizer = FOOF(model, ema=0.5)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    for layer, expected in operator._input_covariances.items():
        found = optimizer.state[model.get_submodule(layer).weight]["input_moment"]
        close(matrix(found), expected * places[layer])  # ours is a sum over positions, theirs a mean


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", ["MLP", "pooled", "conv"])
def test_kfac_factors(name: str, sharing: str) -> None:
    model, x, y = build(name)
    operator = theirs(model, x, y, "empirical", sharing)
    places = positions_of(model, x) if sharing == "expand" else dict.fromkeys(positions_of(model, x), 1)
    optimizer = KFAC(model, sharing=sharing, ema=0.5)
    outputs = model(x)
    optimizer.observe(outputs, labels=y)
    nn.functional.cross_entropy(outputs, y).backward()
    optimizer.step()
    blocks = []
    for layer, count in places.items():
        entry = optimizer.state[model.get_submodule(layer).weight]
        a, e = matrix(entry["input_moment"]), matrix(entry["error_moment"])
        # Expand: ours sums inputs and averages errors over positions, theirs the other way round. The product is one.
        close(a, operator._input_covariances[layer] * count)
        close(e, operator._gradient_covariances[layer] / count)
        blocks.append(torch.kron(e, a))
    by_hand = [
        torch.kron(operator._gradient_covariances[layer], operator._input_covariances[layer]) for layer in places
    ]
    close(torch.block_diag(*blocks), torch.block_diag(*by_hand))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_kfac_factors_of_tokens(sharing: str) -> None:
    """Where each position has a label, both are of the mean over all positions."""
    model, x, y = build("tokens")
    operator = theirs(ClassesSecond(model), x, y, "empirical", sharing)
    optimizer = KFAC(model, sharing=sharing, ema=0.5)
    outputs = model(x)
    optimizer.observe(outputs, labels=y)
    nn.functional.cross_entropy(outputs.flatten(0, 1), y.flatten()).backward()
    optimizer.step()
    for layer in positions_of(model, x):
        entry = optimizer.state[model.get_submodule(layer).weight]
        product = torch.kron(matrix(entry["error_moment"]), matrix(entry["input_moment"]))
        key = f"model.{layer}"
        close(product, torch.kron(operator._gradient_covariances[key], operator._input_covariances[key]))


def test_kfac_operator() -> None:
    """Not only their factors but their matrix, on a network without biases, where the order of parameters is one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3, bias=False))
    model, x, y = model.double(), torch.randn(N, 2, 4, 4, dtype=torch.float64), torch.randint(3, (N,))
    operator = theirs(model, x, y, "empirical", "expand")
    optimizer = KFAC(model)
    outputs = model(x)
    optimizer.observe(outputs, labels=y)
    nn.functional.cross_entropy(outputs, y).backward()
    optimizer.step()
    entries = [optimizer.state[p] for p in model.parameters()]
    blocks = [torch.kron(matrix(entry["error_moment"]), matrix(entry["input_moment"])) for entry in entries]
    close(torch.block_diag(*blocks), dense(operator))


def test_large_factors_are_lower_triangles() -> None:
    """Sides of 512 and more are computed in strips; `symmetric` fills in the rest."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(600, 3).double(), torch.randn(N, 600, dtype=torch.float64), torch.randint(3, (N,))
    operator = theirs(nn.Sequential(model), x, y, "forward-only", "expand")
    optimizer = FOOF(model)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    close(matrix(optimizer.state[model.weight]["input_moment"]), operator._input_covariances["0"])


# --- the Fisher as a matrix ---


@pytest.mark.parametrize("name", ["MLP", "pooled", "conv", "grouped"])
def test_empirical_fisher(name: str) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    model, x, y = build(name)
    operator = curvlinops.EFLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), [(x, y)])
    fisher = SubsampledFisher(model, x, fisher="empirical", labels=y)
    close(fisher.dense(), dense(operator))


# Their loss is a mean over all entries; MSELoss besides lacks the half. (likelihood, loss, our Fisher over theirs)
LOSSES = {
    "categorical": (nn.CrossEntropyLoss(), 1.0),
    "bernoulli": (nn.BCEWithLogitsLoss(), CLASSES),
    "gaussian": (nn.MSELoss(), CLASSES / 2),
}


@pytest.mark.parametrize("likelihood", LOSSES)
@pytest.mark.parametrize("name", ["MLP", "pooled", "grouped"])
def test_gauss_newton(name: str, likelihood: str) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    model, x, y = build(name, likelihood)
    loss, factor = LOSSES[likelihood]
    operator = curvlinops.GGNLinearOperator(model, loss, list(model.parameters()), [(x, y)])
    fisher = SubsampledFisher(model, x, likelihood=likelihood, fisher="exact")
    close(fisher.dense(), factor * dense(operator))


def test_gauss_newton_of_tokens() -> None:
    """Ours is of the sum over the T positions of an example, theirs of the mean."""
    curvlinops = pytest.importorskip("curvlinops")
    model, x, y = build("tokens")
    wrapped = ClassesSecond(model)
    operator = curvlinops.GGNLinearOperator(wrapped, nn.CrossEntropyLoss(), list(model.parameters()), [(x, y)])
    close(SubsampledFisher(model, x, fisher="exact").dense(), y.shape[1] * dense(operator))


def test_the_solution_solves_their_system() -> None:
    curvlinops = pytest.importorskip("curvlinops")
    model, x, y = build("pooled")
    params = list(model.parameters())
    operator = curvlinops.EFLinearOperator(model, nn.CrossEntropyLoss(), params, [(x, y)])
    damping = 0.1
    fisher = SubsampledFisher(model, x, fisher="empirical", labels=y)
    v = torch.randn(operator.shape[0], dtype=torch.float64)
    solution = fisher.solve(v, damping)
    close(operator @ solution + damping * solution, v)


@pytest.mark.parametrize("name", ["MLP", "pooled", "conv", "grouped"])
def test_squared_gradients(name: str) -> None:
    """BackPACK sums squares over examples; ours is a mean."""
    backpack = pytest.importorskip("backpack")
    extensions = pytest.importorskip("backpack.extensions")
    model, x, y = build(name)
    diagonal = SubsampledFisher(model, x, fisher="empirical", labels=y).diagonal()
    fresh = backpack.extend(build(name)[0])  # an extended model is of no use to others
    loss = backpack.extend(nn.CrossEntropyLoss(reduction="sum"))
    with backpack.backpack(extensions.SumGradSquared()):
        loss(fresh(x), y).backward()
    expected = torch.cat([p.sum_grad_squared.flatten() for p in fresh.parameters()])
    close(N * diagonal, expected)
