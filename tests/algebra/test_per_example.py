"""Every product of per-example gradients against the matrix G written down, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bayesgrad.directions import dense
from bayesgrad.layers import per_example as module
from bayesgrad.layers.combination import concatenated, summed
from bayesgrad.layers.per_example import (
    EmbeddingGradients,
    OuterProducts,
    PerExampleGradients,
    StoredGradients,
    restored,
)

GENERATOR = torch.Generator().manual_seed(0)
COUNT = 5


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def outer(
    groups: int = 1, positions: int = 1, fan_in: int = 3, fan_out: int = 4, count: int = COUNT, each: int = 1
) -> OuterProducts:
    inputs, errors = normal(groups, count, positions, fan_in), normal(groups, count * each, positions, fan_out)
    return OuterProducts(torch.Size((groups * fan_out, fan_in)), inputs, errors)


def lookup(
    positions: int = 6, rows: int = 4, features: int = 3, count: int = COUNT, each: int = 1
) -> EmbeddingGradients:
    """With more positions than rows, so that each example repeats some."""
    indices = torch.randint(rows, (count, positions), generator=GENERATOR)
    return EmbeddingGradients(torch.Size((rows, features)), indices, normal(count * each, positions, features))


def rows(*shape: int, count: int = COUNT) -> StoredGradients:
    return StoredGradients(torch.Size(shape), normal(count, *shape))


CASES = {
    "OuterProducts": outer(),
    "OuterProducts, wide": outer(fan_in=6, fan_out=2),
    "OuterProducts, 3 groups": outer(groups=3),
    "OuterProducts, 3 groups, wide": outer(groups=3, fan_in=6, fan_out=2),
    "OuterProducts, positions, explicit": outer(positions=4),
    "OuterProducts, positions, explicit, wide": outer(positions=4, fan_in=6, fan_out=2),
    "OuterProducts, positions, explicit, 3 groups": outer(groups=3, positions=4),
    "OuterProducts, positions, implicit": outer(positions=2, fan_in=12, fan_out=12),
    "OuterProducts, positions, implicit, 3 groups": outer(groups=3, positions=2, fan_in=12, fan_out=12),
    "OuterProducts, kernel": OuterProducts(torch.Size((4, 3, 2, 1)), normal(2, COUNT, 3, 6), normal(2, COUNT, 3, 2)),
    "OuterProducts, one example": outer(positions=3, count=1),
    "OuterProducts, 2 directions": outer(each=2),
    "OuterProducts, 2 directions, 3 groups": outer(groups=3, each=2, fan_in=6, fan_out=2),
    "OuterProducts, 3 directions, positions, explicit": outer(positions=4, each=3),
    "OuterProducts, 3 directions, positions, explicit, groups": outer(groups=2, positions=4, each=3),
    "OuterProducts, 3 directions, positions, implicit": outer(positions=2, fan_in=12, fan_out=12, each=3),
    "EmbeddingGradients, 2 directions": lookup(each=2),
    "EmbeddingGradients": lookup(),
    "EmbeddingGradients, one position": lookup(positions=1),
    "StoredGradients": rows(4),
    "StoredGradients, matrix": rows(4, 3),
    "StoredGradients, scalar": rows(),
}


def written(case: PerExampleGradients) -> Tensor:
    """G', (N, n), by loops over examples, positions and groups."""
    if isinstance(case, StoredGradients):
        return case.values.reshape(case.count, -1)
    gradients = []
    for j in range(case.count):
        example = j // case.directions  # whose inputs these are
        if isinstance(case, EmbeddingGradients):
            total = torch.zeros(case.shape, dtype=torch.float64)
            for index, error in zip(case.indices[example], case.errors[j]):
                total[index] += error
        else:
            assert isinstance(case, OuterProducts)
            groups = [
                sum(torch.outer(e, a) for e, a in zip(errors[j], inputs[example]))
                for errors, inputs in zip(case.errors, case.inputs)
            ]
            total = torch.cat(groups)
        gradients.append(total.flatten())
    return torch.stack(gradients)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 40, module.CHUNK])
@pytest.mark.parametrize("name", CASES)
def test_products(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    case = CASES[name]
    G = written(case).T
    u, w = normal(*case.shape), normal(case.count)
    kept = u.clone(), w.clone()
    assert case.count == G.shape[1]
    close(case.project(u), G.T @ u.flatten())
    close(case.combine(w), (G @ w).view(case.shape))
    close(dense(case.combination(w)), (G @ w).view(case.shape))
    close(case.gram(), G.T @ G)
    close(case.squares(), G.square().sum(1).view(case.shape))
    close(case.rows(), G.T.view(case.count, *case.shape))
    L = torch.linalg.cholesky(G.T @ G + torch.eye(case.count, dtype=torch.float64))
    close(case.weighted_diagonal(L), (G @ torch.cholesky_inverse(L) @ G.T).diagonal().view(case.shape))
    close(case.cross(case), G.T @ G)
    close(case.cross(StoredGradients(case.shape, 2 * u[None])), 2 * (G.T @ u.flatten())[:, None])
    for other in (case.repeated(), *CASES.values()):
        if other.shape == case.shape:
            close(case.cross(other), G.T @ written(other).T)
    examples = case.count // case.directions
    some = case.of_examples(examples, slice(examples // 2, examples))
    close(some.rows().reshape(some.count, -1), G.T[examples // 2 * case.directions :])
    assert torch.equal(u, kept[0])
    assert torch.equal(w, kept[1])


@pytest.mark.parametrize("implicit", [True, False])
def test_which_way_a_gram_matrix_is_computed(implicit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of the cases above say which branch they take."""
    unwanted = "_explicit_gram" if implicit else "_overlap"
    monkeypatch.setattr(OuterProducts, unwanted, lambda *_: pytest.fail(f"{unwanted} was called"))
    word = "implicit" if implicit else "explicit"
    for name in (name for name in CASES if word in name):
        CASES[name].gram()


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_restores_columns(name: str) -> None:
    case = CASES[name]
    back = restored({**case.tensors(), "momentum": torch.zeros(case.shape)}, case.shape)
    assert type(back) is type(case)
    assert torch.equal(back.rows(), case.rows())


def test_nothing_is_restored_from_parts() -> None:
    assert restored({"momentum": torch.zeros(2)}, torch.Size((2,))) is None
    assert restored({"outer_inputs": torch.zeros(1, 2, 1, 2)}, torch.Size((2, 2))) is None


# Uses of one parameter of shape (4, 3), and the kind of their sum.
SUMS = {
    "one": ([outer(positions=2)], OuterProducts),
    "OuterProducts + OuterProducts": ([outer(positions=2), outer(), outer(positions=3)], OuterProducts),
    "OuterProducts + OuterProducts in other groups": (
        [outer(positions=2), outer(groups=2, fan_out=2)],
        StoredGradients,
    ),
    "EmbeddingGradients + EmbeddingGradients": ([lookup(), lookup(positions=2)], EmbeddingGradients),
    "two directions": ([outer(positions=2, each=2), outer(each=2)], OuterProducts),
    "EmbeddingGradients + OuterProducts, two directions": ([lookup(each=2), outer(each=2)], OuterProducts),
    "EmbeddingGradients, two directions": ([lookup(each=2), lookup(positions=2, each=2)], EmbeddingGradients),
    "EmbeddingGradients + OuterProducts": ([lookup(), outer(positions=2)], OuterProducts),
    "OuterProducts + EmbeddingGradients": ([outer(), lookup()], OuterProducts),
    "StoredGradients + StoredGradients": ([rows(4, 3), rows(4, 3)], StoredGradients),
    "StoredGradients + OuterProducts": ([rows(4, 3), outer(positions=2)], StoredGradients),
    "EmbeddingGradients + StoredGradients": ([lookup(), rows(4, 3)], StoredGradients),
    "EmbeddingGradients + OuterProducts + StoredGradients": ([lookup(), outer(), rows(4, 3)], StoredGradients),
}


@pytest.mark.parametrize("name", SUMS)
def test_uses_of_one_parameter_add_up(name: str) -> None:
    parts, kind = SUMS[name]
    total = summed(parts)
    G = sum(written(part) for part in parts).T
    u, w = normal(4, 3), normal(G.shape[1])
    assert isinstance(total, kind)
    close(total.rows().flatten(1), G.T)
    close(total.project(u), G.T @ u.flatten())
    close(total.combine(w).flatten(), G @ w)
    close(total.gram(), G.T @ G)
    close(total.squares().flatten(), G.square().sum(1))


def test_a_lookup_as_outer_products() -> None:
    case = lookup()
    other = case.as_outer()
    assert other.shape == case.shape
    close(other.rows(), case.rows())


BATCHES = {
    "one": [outer()],
    "OuterProducts": [outer(positions=2), outer(positions=2, count=2)],
    "OuterProducts, groups": [outer(groups=3), outer(groups=3, count=2), outer(groups=3, count=1)],
    "EmbeddingGradients": [lookup(), lookup(count=2)],
    "StoredGradients": [rows(4), rows(4, count=2)],
    "two directions": [outer(positions=2, each=2), outer(positions=2, each=2, count=2)],
    "one and two directions": [outer(positions=2), outer(positions=2, each=2, count=2)],
    "EmbeddingGradients, two directions": [lookup(each=2), lookup(each=2, count=2)],
    "EmbeddingGradients, one and two directions": [lookup(), lookup(each=2, count=2)],
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_side_by_side(name: str) -> None:
    parts = BATCHES[name]
    total = concatenated(parts)
    G = torch.cat([written(part) for part in parts]).T
    assert type(total) is type(parts[0])
    assert total.count == sum(part.count for part in parts)
    close(total.rows().flatten(1), G.T)
    close(total.gram(), G.T @ G)


@pytest.mark.parametrize(
    "parts",
    [
        [outer(positions=2), outer(positions=3)],
        [lookup(positions=2), lookup(positions=3)],
        [lookup(), outer()],
        [outer(), rows(4, 3)],
        [rows(4, 3), outer()],
    ],
)
def test_batches_of_different_shapes_are_refused(parts: list[PerExampleGradients]) -> None:
    with pytest.raises(ValueError, match="must have the same shape but for the number of examples"):
        concatenated(parts)
