"""Layers that some processes use: the weights of one process with a pass for each of them, or a refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from heads_in_processes import HEADS, RULES
from launching import results_of

# These exchange what passes have given, by parameter, and need the same parameters in all processes.
REFUSED = {
    "OGN": ("of processes", "of processes in all passes"),
    "AdaBayes": ("of processes", "of processes in all passes"),
    "NaturalGradient": ("of processes", "of processes in all passes", "of passes and processes"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of(tmp_path_factory, "heads_in_processes.py", 2, 2)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rule", RULES)
def test_heads_that_some_processes_use(rule: str, heads: str, clip: bool, found: list[dict[str, Any]]) -> None:
    key = rule, heads, clip
    for results in found:
        result = results[str(key)]
        if heads in REFUSED.get(rule, ()):
            assert str(result).startswith("RuntimeError: processes that train one model differ in what they have")
            continue
        assert not isinstance(result, str), result
        for name, expected in found[0][f"alone {key}"].items():
            torch.testing.assert_close(result[name], expected, rtol=1e-10, atol=1e-12)
            assert torch.equal(result[name], found[0][str(key)][name])  # all processes have the same bits
