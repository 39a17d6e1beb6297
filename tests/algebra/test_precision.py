"""Every operation of a precision against its dense matrix, in float64."""

from __future__ import annotations

import pytest
import torch

from bayesgrad.precision import Blocks, Dense, Diagonal, Kronecker, LowRank, Pair, Precision, Scalar, Spectral
from bayesgrad.precision.linalg import cholesky, diagonal_inverse, inverse
from bayesgrad.precision.low_rank import Matrix

SHAPE = (2, 3)
GROUPED = (2, 2, 3)
GENERATOR = torch.Generator().manual_seed(0)


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=GENERATOR) + 0.1


def covariance(*shape: int) -> torch.Tensor:
    root = torch.randn(shape, dtype=torch.float64, generator=GENERATOR)
    return root @ root.mT + 0.3 * torch.eye(shape[-1], dtype=torch.float64)


def orthogonal(*shape: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(shape, dtype=torch.float64, generator=GENERATOR))[0]


def directions(*shape: int) -> Matrix:
    return Matrix(torch.randn(shape, dtype=torch.float64, generator=GENERATOR))


def eye(size: int) -> torch.Tensor:
    return torch.eye(size, dtype=torch.float64)


def number(h: float) -> torch.Tensor:
    return h * eye(6)


def many(h: float) -> torch.Tensor:
    return h * eye(12)


def outer(h: Matrix) -> torch.Tensor:
    flat = h.columns.flatten(0, -2)
    return flat @ flat.T


# The factor that two Kronecker products share has to be the same tensor.
SHARED, RIGHT, VECTOR = covariance(2, 2), covariance(3, 3), positive(2)
BASIS = (orthogonal(2, 2), orthogonal(3, 3))

# Each structure with an increment of the same structure, as `add` takes it, and as a matrix.
STRUCTURES = {
    "Blocks": (Blocks.of(covariance(2, 3, 3), shape=SHAPE), 0.4, number),
    "Blocks, added": (Blocks.of(covariance(6, 6), shape=SHAPE), Blocks.of(covariance(6, 6)), Blocks.to_dense),
    "Scalar": (Scalar(positive(), SHAPE), positive(), lambda h: h * eye(6)),
    "Diagonal": (Diagonal(positive(*SHAPE)), positive(*SHAPE), lambda h: torch.diag(h.flatten())),
    "Kronecker": (Kronecker(SHARED, covariance(3, 3), SHAPE), 0.4, number),
    "Kronecker, shared left": (
        Kronecker(SHARED, covariance(3, 3), SHAPE),
        Kronecker(SHARED, covariance(3, 3), SHAPE),
        Kronecker.to_dense,
    ),
    "Kronecker, shared right": (
        Kronecker(covariance(2, 2), RIGHT, SHAPE),
        Kronecker(covariance(2, 2), RIGHT, SHAPE),
        Kronecker.to_dense,
    ),
    "Kronecker, identity left": (Kronecker(None, covariance(3, 3), SHAPE), 0.4, number),
    "Kronecker, identities left": (
        Kronecker(None, covariance(3, 3), SHAPE),
        Kronecker(None, covariance(3, 3), SHAPE),
        Kronecker.to_dense,
    ),
    "Kronecker, identity right": (Kronecker(SHARED, None, SHAPE), 0.4, number),
    "Kronecker, identities right": (
        Kronecker(SHARED, None, SHAPE),
        Kronecker(covariance(2, 2), None, SHAPE),
        Kronecker.to_dense,
    ),
    "Kronecker, diagonal left": (Kronecker(VECTOR, covariance(3, 3), SHAPE), 0.4, number),
    "Kronecker, shared diagonal": (
        Kronecker(VECTOR, covariance(3, 3), SHAPE),
        Kronecker(VECTOR, covariance(3, 3), SHAPE),
        Kronecker.to_dense,
    ),
    "Kronecker, diagonal right": (Kronecker(SHARED, positive(3), SHAPE), 0.4, number),
    "Kronecker, diagonals right": (
        Kronecker(SHARED, positive(3), SHAPE),
        Kronecker(SHARED, positive(3), SHAPE),
        Kronecker.to_dense,
    ),
    "Kronecker, diagonal and matrix": (
        Kronecker(SHARED, positive(3), SHAPE),
        Kronecker(SHARED, covariance(3, 3), SHAPE),
        Kronecker.to_dense,
    ),
    "Kronecker, matrix and diagonal": (
        Kronecker(SHARED, covariance(3, 3), SHAPE),
        Kronecker(SHARED, positive(3), SHAPE),
        Kronecker.to_dense,
    ),
    "Kronecker, groups": (Kronecker(covariance(2, 2, 2), covariance(2, 3, 3), GROUPED), 0.4, many),
    "Kronecker, groups, identity left": (Kronecker(None, covariance(2, 3, 3), GROUPED), 0.4, many),
    "Kronecker, groups, diagonal left": (Kronecker(positive(2, 2), covariance(2, 3, 3), GROUPED), 0.4, many),
    "Kronecker, groups, shared": (
        Kronecker(None, positive(2, 3), GROUPED),
        Kronecker(None, positive(2, 3), GROUPED),
        Kronecker.to_dense,
    ),
    "Spectral": (Spectral(*BASIS, positive(*SHAPE)), 0.4, number),
    "Spectral, diagonal rows": (Spectral(None, BASIS[1], positive(*SHAPE)), 0.4, number),
    "Spectral, same basis": (
        Spectral(*BASIS, positive(*SHAPE)),
        positive(*SHAPE),
        lambda h: torch.kron(*BASIS) @ torch.diag(h.flatten()) @ torch.kron(*BASIS).T,
    ),
    "Spectral, groups": (Spectral(orthogonal(2, 2, 2), orthogonal(2, 3, 3), positive(*GROUPED)), 0.4, many),
    "LowRank": (LowRank(0.6, directions(*SHAPE, 2), SHAPE), 0.4, number),
    "LowRank, directions": (LowRank(0.6, directions(*SHAPE, 2), SHAPE), directions(*SHAPE, 3), outer),
    "LowRank, more directions than weights": (LowRank(0.6, directions(*SHAPE, 8), SHAPE), 0.4, number),
    "Dense": (Dense(covariance(6, 6), SHAPE), 0.4, number),
    "Dense, one direction": (Dense(covariance(6, 6), SHAPE), directions(*SHAPE, 1), outer),
    "Dense, directions": (Dense(covariance(6, 6), SHAPE), directions(*SHAPE, 4), outer),
    "Dense, more directions than weights": (Dense(covariance(6, 6), SHAPE), directions(*SHAPE, 17), outer),
}


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", STRUCTURES)
def test_algebra(name: str) -> None:
    precision, increment, dense_increment = STRUCTURES[name]
    assert isinstance(precision, Precision)
    P = precision.to_dense()
    covariance = torch.linalg.inv(P)
    shape = GROUPED if len(P) == 12 else SHAPE
    vector = torch.randn(shape, dtype=torch.float64, generator=GENERATOR)
    close(precision.scale(0.3).to_dense(), 0.3 * P)
    close(precision.add(increment).to_dense(), P + dense_increment(increment))
    close(precision.propagate(0.7, 0.2).to_dense(), torch.linalg.inv(0.7 * covariance + 0.2 * eye(len(P))))
    close(precision.solve(vector).flatten(), covariance @ vector.flatten())
    close(precision.multiply(vector).flatten(), torch.linalg.solve(covariance, vector.flatten()))
    close(precision.variance().flatten(), covariance.diagonal())
    assert precision.variance().shape == vector.shape
    close(precision.logdet(), torch.logdet(P))
    root = torch.stack([precision.sample(unit.view(shape)).flatten() for unit in eye(len(P))])
    close(root.T @ root, covariance)


def test_the_dense_kronecker_product_is_of_inverses() -> None:
    """W.flatten() is row-major: P = inv(L) ⊗ inv(R), and L W R is its inverse applied."""
    left, right = covariance(2, 2), covariance(3, 3)
    P = Kronecker(left, right, SHAPE).to_dense()
    close(P, torch.kron(torch.linalg.inv(left), torch.linalg.inv(right)))
    grouped = Kronecker(left.expand(2, 2, 2), right.expand(2, 3, 3), GROUPED).to_dense()
    close(grouped, torch.block_diag(P, P))


def test_operations_follow_each_other() -> None:
    """What one operation returns takes the next one, also after it has left the structure."""
    for precision in (Kronecker(None, covariance(3, 3), SHAPE), LowRank(0.6, directions(*SHAPE, 2), SHAPE)):
        expected = 0.3 * (precision.to_dense() + 0.4 * eye(6))
        expected = torch.linalg.inv(0.7 * torch.linalg.inv(expected) + 0.2 * eye(6))
        found = precision.add(0.4).scale(0.3).propagate(0.7, 0.2)
        close(found.to_dense(), expected)
        close(found.logdet(), torch.logdet(expected))
        close(found.variance().flatten(), torch.linalg.inv(expected).diagonal())


def test_a_dense_belief_moves_by_any_linear_map() -> None:
    """Against the definition, and `spread` with a number for each weight as the diagonal case of it."""
    belief, A = Dense(covariance(6, 6), SHAPE), torch.randn(6, 6, dtype=torch.float64, generator=GENERATOR)
    Q, F = covariance(6, 6), eye(6) - A
    moved = belief.transform(A, Q)
    close(moved.covariance, F @ belief.covariance @ F.T + Q)
    assert torch.equal(moved.covariance, moved.covariance.T)
    retain, noise = positive(*SHAPE), positive(*SHAPE)
    diagonal = eye(6) - torch.diag(retain.flatten().sqrt())
    close(
        belief.propagate(retain, noise).covariance, belief.transform(diagonal, torch.diag(noise.flatten())).covariance
    )


def test_a_dense_belief_of_several_strips_is_symmetric() -> None:
    belief, U = Dense(covariance(150, 150) / 150 + eye(150), (150,)), directions(150, 7)
    found = belief.add(U).covariance
    assert torch.equal(found, found.T)
    close(found, torch.linalg.inv(torch.linalg.inv(belief.covariance) + outer(U)))


def test_a_dense_belief_may_be_certain_of_some_directions() -> None:
    """A covariance of rank two: what is known stays known, the rest is learnt as in those two dimensions alone."""
    basis, inner, U = orthogonal(6, 2), covariance(2, 2), directions(*SHAPE, 3)
    found = Dense(basis @ inner @ basis.T, SHAPE).add(U).covariance
    reduced = Dense(inner, (2,)).add(Matrix(basis.T @ U.columns.reshape(6, 3))).covariance
    close(found, basis @ reduced @ basis.T)


def test_a_dense_belief_stays_positive_and_symmetric() -> None:
    """Under directions that are 1e12 times as certain as the prior, one batch after the other."""
    belief = Dense(eye(6), SHAPE)
    for _ in range(50):
        belief = belief.add(Matrix(1e6 * directions(*SHAPE, 2).columns))
        assert torch.equal(belief.covariance, belief.covariance.T)
        assert torch.linalg.eigvalsh(belief.covariance)[0] > 0
        belief = belief.propagate(0.9 + 0.1 * positive(*SHAPE).clamp(max=1), 1e-12)
        assert torch.equal(belief.covariance, belief.covariance.T)


def test_low_rank_products() -> None:
    precision = LowRank(0.6, directions(*SHAPE, 2), SHAPE)
    both = precision.add(directions(*SHAPE, 3))
    vector = torch.randn(SHAPE, dtype=torch.float64, generator=GENERATOR)
    kept = vector.clone()
    for p in (precision, both, both.scale(2.0)):
        close(p.multiply(vector).flatten(), p.to_dense() @ vector.flatten())
        close(p.multiply(p.solve(vector)), vector)
    assert torch.equal(vector, kept)


def test_kronecker_products_that_share_nothing_have_no_sum() -> None:
    a, b = (Kronecker(covariance(2, 2), covariance(3, 3), SHAPE) for _ in range(2))
    with pytest.raises(ValueError, match="must share a factor to be added"):
        a.add(b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_matrices_are_named(dtype: torch.dtype) -> None:
    singular = torch.zeros(3, 3, dtype=dtype)
    for function in (cholesky, inverse):
        with pytest.raises(ValueError, match="factor of layer '0' is singular with damping 0: raise damping"):
            function(singular, 0.0, "factor of layer '0'")
        with pytest.raises(FloatingPointError, match="it is not finite: check the batch"):
            function(singular + torch.inf, 1.0, "it")
    with pytest.raises(ValueError, match="factor of layer '0' is singular with damping 0: raise damping"):
        diagonal_inverse(singular[0], 0.0, "factor of layer '0'")
    with pytest.raises(FloatingPointError, match="it is not finite: check the batch"):
        diagonal_inverse(singular[0] + torch.nan, 1.0, "it")


def test_inverse_against_torch() -> None:
    matrix, diagonal = covariance(2, 4, 4), positive(4)
    close(inverse(matrix, 0.1, "it"), torch.linalg.inv(matrix + 0.1 * eye(4)))
    close(diagonal_inverse(diagonal, 0.1, "it"), 1 / (diagonal + 0.1))


def test_cholesky_in_float32_is_tried_again_in_float64() -> None:
    """1 + 1e-9 is 1 in float32, so that a matrix of ones with that damping is singular there and only there."""
    ones = torch.ones(2, 2)
    _, info = torch.linalg.cholesky_ex(ones + 1e-9 * torch.eye(2))
    assert info.any()
    factor = cholesky(ones, 1e-9, "it")
    assert factor.dtype == torch.float32
    expected = torch.linalg.cholesky(ones.double() + 1e-9 * eye(2))
    torch.testing.assert_close(factor.double(), expected, rtol=1e-6, atol=0.0)
    assert torch.equal(ones, torch.ones(2, 2))


def test_nothing_stored_has_a_reciprocal_that_overflows() -> None:
    for dtype in (torch.float32, torch.float64):
        stored = Diagonal(torch.tensor([0.0, 1e-3], dtype=dtype)).storable()
        assert torch.isfinite(1 / stored).all()
        assert stored[1] == torch.tensor(1e-3, dtype=dtype)


def test_pairs_of_weight_and_momentum_against_two_by_two_matrices() -> None:
    """Each operation on P = [[a, b], [b, c]]^-1 against the matrix of one weight and its momentum."""
    pair = Pair(positive(3), positive(3), positive(3) + 5)
    covariances = torch.stack([torch.stack([pair.weight, pair.cross]), torch.stack([pair.cross, pair.momentum])])
    covariances = covariances.permute(2, 0, 1)  # (3, 2, 2)

    def matrices(found: Pair) -> torch.Tensor:
        rows = [torch.stack([found.weight, found.cross]), torch.stack([found.cross, found.momentum])]
        return torch.stack(rows).permute(2, 0, 1)

    eye = torch.eye(2, dtype=covariances.dtype)
    close(matrices(pair.scale(2.5)), covariances / 2.5)
    close(matrices(pair.propagate(0.9, 0.2)), 0.9 * covariances + 0.2 * eye)
    increment = positive(3)
    observed = torch.linalg.inv(covariances) + torch.diag_embed(torch.stack([increment, torch.zeros(3).double()], 1))
    close(matrices(pair.add(increment)), torch.linalg.inv(observed))
    vector = positive(2, 3) - 1
    close(pair.solve(vector), (covariances @ vector.T[..., None])[..., 0].T)
    close(pair.variance(), covariances.diagonal(dim1=1, dim2=2).T)
    close(pair.logdet(), -torch.linalg.slogdet(covariances)[1].sum())
    roots = torch.stack([pair.sample(torch.stack([e.expand(3) for e in row])) for row in eye], 1)  # (2, 2, 3)
    close((roots[:, None] * roots[None]).sum(2).permute(2, 0, 1), covariances)
