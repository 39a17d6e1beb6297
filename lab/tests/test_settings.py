"""The benchmarks of IVON's settings and of BatchNorm in predictions, at the smallest size."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest

from bayesgrad.optim import IVON
from bayesgrad_lab import uci
from bayesgrad_lab.methods import Setup

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ivon_settings_are_measured_once_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    module, page = script("ivon_settings"), tmp_path / "page.md"
    monkeypatch.setattr(module, "SETTINGS", {name: module.SETTINGS[name] for name in (module.CHOSEN, module.FORMER)})
    command = ["--out", str(tmp_path / "runs"), "--data", "diabetes", "--splits", "2", "--steps", "10"]
    module.main([*command, "--write", str(page)])
    text = page.read_text()
    assert text in capsys.readouterr().out
    first, *_ = [line for line in text.splitlines() if line.startswith(f"| {module.CHOSEN} |")]
    context = module.Context(tmp_path / "runs" / "10-steps")
    names, recipe = ["MAP", module.CHOSEN], uci.Recipe(steps=10)
    scores = module.measure(context, recipe, ["diabetes"], names, 2, True)
    mean, error = module.gap(scores, module.CHOSEN, "diabetes")
    assert f"({mean:+.3f} ± {error:.3g})" in first

    with pytest.raises(SystemExit):  # a folder that has runs
        module.main(command)

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(uci, "fit", forbidden)
    module.main([*command, "--resume", "--write", str(page)])
    assert page.read_text() == text


def test_the_page_counts_data_sets_within_a_standard_error() -> None:
    module = script("ivon_settings")
    scores = {"MAP": {"a": [0.0, 0.0], "b": [0.0, 0.0]}, module.CHOSEN: {"a": [-1.0, 0.9], "b": [-1.0, -0.9]}}
    assert module.gap(scores, module.CHOSEN, "a") == pytest.approx((-0.05, 1.9 / math.sqrt(2) / math.sqrt(2)))
    assert module.holds(scores, "a")
    assert not module.holds(scores, "b")
    assert "on 1 of 2 data sets" in module.tables(scores, scores, 2)[2]
    assert not module.holds({**scores, module.CHOSEN: {"a": [-math.inf, 0.0]}}, "a")


def test_recommended_settings_are_those_of_the_documentation() -> None:
    """The optimizer that the benchmark builds, the docstring and the page of choices agree."""
    module = script("ivon_settings")
    method = module.method(module.CHOSEN)
    model = uci.regressor("mlp", uci.read("diabetes", 0), 0, widths=(3,))
    optimizer = method.make(model, Setup(*method.seeks[0], examples=100), hess_init=1 / 0.25)
    (group,) = optimizer.param_groups
    names = ("lr", "betas", "hess_init", "rescale_lr", "clip_radius", "num_data", "prior_precision")
    assert [group[name] for name in names] == [0.5, (0.9, 0.995), 1.2, False, 0.1, 300, 1.0]
    words = " ".join((IVON.__doc__ or "").split())
    others = "clip_radius = 0.1, betas = (0.9, 0.995), num_data = 3 N"
    for text in ("lr = 0.5 and rescale_lr = False", others, "0.3/noise"):
        assert text in words
    page = " ".join((ROOT / "docs/choosing.md").read_text().split())
    assert "lr=0.5, rescale_lr=False, betas=(0.9, 0.995), clip_radius=0.1, num_data=3*N" in page


@pytest.mark.filterwarnings("ignore")
def test_batch_norm_is_measured_with_both_statistics(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    module = script("batch_norm")
    kept = ("Adam, real weights, lr 3e-3", "STE", "BayesBiNN", "SpikeSlab, keep 0.9")
    monkeypatch.setattr(module, "OPTIMIZERS", {name: module.OPTIMIZERS[name] for name in kept})
    monkeypatch.setattr(module, "NETWORKS", {"MLP": module.mlp})
    rows = [line.split(" | ") for line in module.table(1, 1) if line.startswith("| ")]
    assert sum("%" in cell for row in rows for cell in row) == 1 + 2 + 4 + 4
