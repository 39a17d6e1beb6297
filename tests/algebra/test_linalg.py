"""Functions of matrices that are computed by products alone, against their decompositions."""

from __future__ import annotations

import pytest
import torch

from bayesgrad.precision.linalg import QUINTICS, polar_factor


def composed(values: torch.Tensor) -> torch.Tensor:
    for a, b, c in QUINTICS:
        values = a * values + b * values**3 + c * values**5
    return values


@pytest.mark.parametrize("shape", [(4, 4), (3, 7), (9, 2), (2, 5, 3), (1, 6)])
def test_polar_factor_is_the_polynomials_of_singular_values(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = composed(values / (values**8).sum(-1, keepdim=True) ** 0.125)
    expected = (left * values[..., None, :]) @ right
    torch.testing.assert_close(polar_factor(matrix @ matrix.mT) @ matrix, expected, rtol=1e-10, atol=1e-10)


def test_polar_factor_of_a_similar_matrix_is_similar() -> None:
    torch.manual_seed(0)
    matrix, change = torch.randn(4, 7, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    gram, inverse = matrix @ matrix.T, torch.linalg.inv(change)
    expected = change @ polar_factor(gram) @ inverse
    torch.testing.assert_close(polar_factor(change @ gram @ inverse), expected, rtol=1e-9, atol=1e-9)


def test_polynomials_take_a_hundredth_to_one_near_one() -> None:
    found = composed(torch.logspace(0, -2, 10_000, dtype=torch.float64))
    assert 0.729 < found.min() < 0.74
    assert 1.26 < found.max() < 1.27


@pytest.mark.parametrize("size", [1e-18, 1e-10, 1e10, 1e18])
def test_polar_factor_does_not_depend_on_the_size_of_the_matrix(size: float) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(3, 5)
    one = polar_factor(matrix @ matrix.T) @ matrix
    matrix = size * matrix
    torch.testing.assert_close(polar_factor(matrix @ matrix.T) @ matrix, one)
    assert not (polar_factor(torch.zeros(3, 3)) @ torch.zeros(3, 5)).any()
