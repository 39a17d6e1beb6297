"""Normal numbers, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from bayesgrad.noise import randn


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (5,), (1 << 13,), (1, 10_000), (3, 3001), (20_011,)])
def test_randn_has_the_numbers_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Up to rounding, and with the same state of the generator afterwards."""
    own, other = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    for _ in range(2):
        found = randn(shape, torch.empty(0, dtype=dtype), own)
        assert found.dtype == dtype
        assert_close(found, torch.randn(shape, dtype=dtype, generator=other), rtol=1e-14, atol=1e-300)
    assert torch.equal(own.get_state(), other.get_state())
