"""Names that doctests may use without importing them, and one thread for all tests.

Matrix products on several threads may round differently from run to run on a busy machine; tests that compare runs bit
for bit are about the optimizers, not about that. Kernels are tested on two threads all the same.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(1)


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
