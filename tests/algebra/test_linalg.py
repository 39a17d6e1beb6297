"""Functions of matrices that are computed by products alone, against their decompositions."""

from __future__ import annotations

import pytest
import torch

from bayesgrad.precision.linalg import QUINTIC, orthogonalised


@pytest.mark.parametrize("shape", [(4, 4), (3, 7), (9, 2), (2, 5, 3), (1, 6)])
def test_orthogonalised_is_the_quintic_of_singular_values(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.square().sum(-1, keepdim=True).sqrt()
    for _ in range(5):
        values = sum(c * values**power for c, power in zip(QUINTIC, (1, 3, 5)))
    torch.testing.assert_close(orthogonalised(matrix), (left * values[..., None, :]) @ right, rtol=1e-10, atol=1e-10)


def test_orthogonalised_has_singular_values_near_one() -> None:
    torch.manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(40, 30, dtype=torch.float64), full_matrices=False)
    values = torch.logspace(0, -2, 30, dtype=torch.float64)
    found = torch.linalg.svdvals(orthogonalised(left * (values / values.norm()) @ right))
    assert found.min() > 0.68
    assert found.max() < 1.21


def test_orthogonalised_does_not_depend_on_the_size_of_the_matrix() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(5, 3)
    one = orthogonalised(matrix)
    for factor in (1e-35, 1e-20, 1e20, 1e37):
        torch.testing.assert_close(orthogonalised(factor * matrix), one)
    assert not orthogonalised(torch.zeros(5, 3)).any()
