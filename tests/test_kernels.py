"""Compiled and eager steps give the same bits, compile once, and run without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bayesgrad import kernels
from cases import CASES, ELEMENTWISE, Case, drawn, layerwise_case, same, small_model, train, weights

pytestmark = pytest.mark.filterwarnings("ignore:lr=.* is .* times the ")  # lr is raised by hand

HERE = Path(__file__).parent
SHAPES = [(300, 200), (40_000,), (64, 64), (64,), (1,), (), (7, 3, 5), (33_000,), (5, 0), (1000, 41), (70_001,)]


@pytest.fixture(autouse=True)
def _two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def trained(case: Case, fused: bool, dtype: torch.dtype, shapes: list, steps: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    optimizer = case(params, fused=fused)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-3 * (step + 1)
        with drawn(optimizer):
            for p in params:
                scale = 10 ** torch.empty(()).uniform_(-4, 2, generator=generator).item()
                p.grad = (scale * torch.randn(p.shape, generator=generator)).to(dtype)
        optimizer.step()
    states = {f"{i}.{k}": v for i, entry in optimizer.state_dict()["state"].items() for k, v in entry.items()}
    return {**states, **{str(i): p.detach() for i, p in enumerate(params)}}


@pytest.mark.compiled
@pytest.mark.parametrize("case", ELEMENTWISE, ids=lambda case: case.name)
def test_compiled_and_eager_steps_agree_to_the_last_bit(case: Case) -> None:
    assert same(trained(case, True, torch.float32, SHAPES), trained(case, False, torch.float32, SHAPES))
    assert "cpu" not in kernels._unusable


@pytest.mark.compiled
@layerwise_case
def test_so_do_those_of_rules_that_look_at_layers(case: Case) -> None:
    ends = []
    for fused in (True, False):
        model = small_model()
        train(model, case.of(model, fused=fused), range(3))
        ends.append(weights(model))
    assert same(*ends)


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["AdaBayes", "AdaBayesFP"])
def test_they_agree_in_other_dtypes(name: str, dtype: torch.dtype) -> None:
    case = next(case for case in CASES if case.name == name)
    assert same(trained(case, True, dtype, SHAPES), trained(case, False, dtype, SHAPES))


@pytest.mark.compiled
def test_one_compilation_serves_every_model_and_learning_rate(monkeypatch) -> None:
    compilations = []
    compile_one = kernels._compile
    monkeypatch.setattr(kernels, "_compiled", {})
    monkeypatch.setattr(kernels, "_compile", lambda *a: compilations.append(a) or compile_one(*a))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for shapes in (SHAPES, [(100, 1000)], [(256,)] * 7, [(50_000,), (3, 50_000)], [(40_000,)] * 9):
        trained(CASES[0], True, torch.float32, shapes, steps=6)
    assert len(compilations) == 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 1


@pytest.mark.compiled
def test_many_kernels_do_not_run_into_the_recompilation_limit() -> None:
    """Ten functions share one code path; torch.compile's limit is eight recompilations of one code object."""
    rows = [tuple(torch.ones(5000) for _ in range(2)) for _ in range(4)]
    for i in range(10):

        def function(scalars, weight, gradient, i=i):
            return (weight + scalars[0] * gradient + i,)

        kernels.run(function, [1.0], rows, fused=True)
    assert "cpu" not in kernels._unusable
    assert all(torch.equal(row[0], torch.full((5000,), 1.0 + 10 + sum(range(10)))) for row in rows)


SCRIPT = """
import warnings, torch
from cases import CASES
from test_kernels import SHAPES, same, trained
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    compiled = [trained(case, True, torch.float32, SHAPES) for case in CASES[:3]]
ours = [w for w in caught if "eager mode" in str(w.message)]
assert len(ours) == 1, [str(w.message) for w in caught]
assert issubclass(ours[0].category, RuntimeWarning)
for case, values in zip(CASES, compiled):
    assert same(values, trained(case, False, torch.float32, SHAPES)), case.name
print(ours[0].message)
"""


@pytest.mark.compiled
def test_without_a_compiler_there_is_one_warning_and_the_same_numbers(tmp_path: Path) -> None:
    environment = {**os.environ, "CXX": "/nonexistent/compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=HERE, env=environment, capture_output=True, text=True, check=False
    )
    assert "compiling the optimizer step for cpu failed" in done.stdout, done.stderr
    assert "Pass fused=False" in done.stdout


def test_small_models_are_not_compiled_unless_asked() -> None:
    assert not kernels.should_compile(torch.device("cpu"), 10_000)
    assert kernels.should_compile(torch.device("cpu"), 10_000_000)
    assert not kernels.should_compile(torch.device("mps"), 10_000_000)


@pytest.mark.parametrize("lengths", [[256], [300, 70_000], [10_000] * 6, [257, 258, 259], [1 << 12] * 4])
def test_bundles_cover_every_element_once(lengths: list[int]) -> None:
    rows = [(torch.zeros(n), torch.zeros(n)) for n in lengths]
    for bundle in kernels._bundles(rows):
        assert len(bundle) == kernels.ROWS_PER_CALL
        for weight, gradient in bundle:
            assert len(weight) == len(gradient) > 1
            weight += 1
    assert all(bool((weight == 1).all()) for weight, _ in rows)
