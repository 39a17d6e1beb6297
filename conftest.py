"""Names that doctests may use without importing them, and one thread for all tests.

Matrix products on several threads may round differently from run to run on a busy machine; tests that compare runs bit
for bit are about the optimizers, not about that. Kernels are tested on two threads all the same.
"""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict) -> None:
    doctest_namespace["torch"] = torch
