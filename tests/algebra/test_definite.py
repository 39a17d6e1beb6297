"""Matrices of one number, which have closed forms, against LAPACK; and numbers whose inverse is not finite."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from bayesgrad.families import Gaussian
from bayesgrad.families.definite import cholesky, cholesky_ex, inverted, is_definite, log_abs_det

VALUES = torch.tensor([1e-300, 1e-8, 0.3, 7.0, 1e300], dtype=torch.float64)[:, None, None]


def test_matrices_of_one_number() -> None:
    assert_close(cholesky(VALUES), torch.linalg.cholesky(VALUES), rtol=1e-15, atol=0)
    assert_close(inverted(VALUES), torch.cholesky_inverse(torch.linalg.cholesky(VALUES)), rtol=1e-15, atol=0)
    assert_close(log_abs_det(-VALUES), torch.linalg.slogdet(-VALUES)[1], rtol=1e-15, atol=0)
    assert is_definite(VALUES).all()


def test_what_is_not_positive() -> None:
    wrong = torch.tensor([0.0, -1.0, torch.nan]).double()[:, None, None]
    assert torch.equal(cholesky_ex(wrong)[1], torch.linalg.cholesky_ex(wrong)[1])
    assert not is_definite(torch.cat([wrong, torch.full_like(wrong, torch.inf)])).any()
    with pytest.raises(ValueError, match="not positive definite"):
        cholesky(wrong)


@pytest.mark.parametrize("size", [1, 2])
def test_a_number_whose_inverse_overflows_is_not_valid(size: int) -> None:
    matrix = 1e-310 * torch.eye(size, dtype=torch.float64)
    assert not is_definite(matrix)
    assert not Gaussian().in_domain((torch.zeros(size).double(), -matrix / 2))
