"""Names that doctests may use without importing them, and one thread for all tests.

Matrix products on several threads may round differently from run to run on a busy machine; tests that compare runs bit
for bit are about the optimizers, not about that. Kernels are tested on two threads all the same.
"""

import os
from pathlib import Path
from typing import Any

# Read when the libraries are loaded, so before that. Threads that wait for each other must sleep: those that spin take
# the core from the one they wait for, where several test processes share the cores, and a loop takes ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# A kernel is compiled by the process that asks for it: others that stand by would each have to import torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed of None is 0, so that numbers do not depend on the order of tests; tests of None undo it."""
    monkeypatch.setattr("bayesgrad.noise.fresh_seed", lambda: 0)


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict) -> None:
    doctest_namespace["torch"] = torch


@pytest.fixture
def saved_figures(monkeypatch: pytest.MonkeyPatch) -> list:
    """The matplotlib figures that a test saves; each must leave a file that is not empty."""
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig

    def savefig(figure: Figure, path: Path, **options: Any) -> None:
        figures.append(figure)
        save(figure, path, **options)
        assert path.stat().st_size > 5_000

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures
