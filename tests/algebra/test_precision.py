"""Every operation of a precision against its dense matrix, in float64."""

from __future__ import annotations

import pytest
import torch

from bayesgrad.precision import Diagonal, Precision, Scalar

SHAPE = (2, 3)
GENERATOR = torch.Generator().manual_seed(0)


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=GENERATOR) + 0.1


# Each structure with an increment of the same structure, as `add` takes it, and as a matrix.
STRUCTURES = {
    "Scalar": (Scalar(positive(), SHAPE), positive(), lambda h: h * torch.eye(6, dtype=torch.float64)),
    "Diagonal": (Diagonal(positive(*SHAPE)), positive(*SHAPE), lambda h: torch.diag(h.flatten())),
}


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", STRUCTURES)
def test_algebra(name: str) -> None:
    precision, increment, dense_increment = STRUCTURES[name]
    assert isinstance(precision, Precision)
    P = precision.to_dense()
    covariance = torch.linalg.inv(P)
    vector = torch.randn(SHAPE, dtype=torch.float64, generator=GENERATOR)
    eye = torch.eye(6, dtype=torch.float64)
    close(precision.scale(0.3).to_dense(), 0.3 * P)
    close(precision.add(increment).to_dense(), P + dense_increment(increment))
    close(precision.spread(0.7, 0.2).to_dense(), torch.linalg.inv(0.7 * covariance + 0.2 * eye))
    close(precision.solve(vector).flatten(), covariance @ vector.flatten())
    close(precision.variance().flatten(), covariance.diagonal())
    close(precision.logdet(), torch.logdet(P))
    root = torch.stack([precision.sample(unit.view(SHAPE)).flatten() for unit in eye])
    close(root.T @ root, covariance)


def test_nothing_stored_has_a_reciprocal_that_overflows() -> None:
    for dtype in (torch.float32, torch.float64):
        stored = Diagonal(torch.tensor([0.0, 1e-3], dtype=dtype)).storable()
        assert torch.isfinite(1 / stored).all()
        assert stored[1] == torch.tensor(1e-3, dtype=dtype)
