"""DistributedDataParallel: for every optimizer and sampler, the weights of one process on the union of the batches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from data_parallel import CORRECTED, FEW, JOINED, MANY, NOT_JOINED, OWN_DRAWS, Run, every_run, plain_runs
from launching import results_of

RUNS = every_run(0)
PLAIN = {run.name for run in plain_runs()}
TABLE = [  # variants with two processes are in the fast suite
    pytest.param(run, size, id=f"{run.name}-{size}")
    for size in (1, 2, 4)
    for run in RUNS
    if size > 2 or run.name in PLAIN
]
REFUSED = {
    "IVON-natural drawn for each micro-batch": "RuntimeError: IVON squares the gradient of each draw of weights",
}
DRAWN = " drawn for each micro-batch"  # without synchronisation
WHOLE = {  # by fully_shard
    **{f"{name}{DRAWN}": f"RuntimeError: {name} supports one draw of weights until" for name in ("IVON", "BayesBiNN")},
    f"IVON-natural{DRAWN}": "RuntimeError: IVON supports one draw of weights until",
    **{
        f"Langevin {metric} {correction}": f"TypeError: correction={correction!r} needs whole parameters in each"
        for metric, correction in CORRECTED
    },
}
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return results_of(tmp_path_factory, "data_parallel.py", 2, 2, FEW)


@pytest.fixture(scope="module")
def many(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return results_of(tmp_path_factory, "data_parallel.py", request.param, request.param, MANY)


def check(run: Run, found: Found, kind: str = "") -> None:
    expected = found[0][f"alone {run.name}"]
    refused = {name: words for name, words in (WHOLE if kind else REFUSED).items() if run.name.startswith(name)}
    for results in found:
        result = results[kind + run.name]
        if refused and (kind or len(found) > 1):
            assert isinstance(result, str)
            assert any(result.startswith(words) for words in refused.values()), result
        elif isinstance(expected, str):
            assert run.name.endswith("raises"), expected
            assert result == expected
        else:
            assert not isinstance(result, str), result
            assert result.keys() == expected.keys()
            for name, weight in expected.items():
                error = {"rtol": 1e-10, "atol": 1e-12} if run.dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
                torch.testing.assert_close(result[name].view_as(weight), weight, **error)
                assert torch.equal(result[name], found[0][kind + run.name][name])


@pytest.mark.parametrize("run", [run for run in RUNS if run.sharded], ids=lambda run: run.name)
def test_two_processes_that_have_parts_of_the_parameters_have_the_weights_of_one(run: Run, two: Found) -> None:
    check(run, two, "sharded ")


@pytest.mark.slow
@pytest.mark.parametrize(("run", "many"), [row for row in TABLE if not row.values[0].ddp], indirect=["many"])
def test_parts_of_the_parameters_have_the_weights_of_one_process_after_twenty_steps(run: Run, many: Found) -> None:
    check(run, many, "sharded ")


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_two_processes_have_the_weights_of_one(run: Run, two: Found) -> None:
    check(run, two)


@pytest.mark.slow
@pytest.mark.parametrize(("run", "many"), TABLE, indirect=["many"])
def test_one_two_and_four_processes_have_the_weights_of_one_after_twenty_steps(run: Run, many: Found) -> None:
    check(run, many)


@pytest.mark.parametrize("name", OWN_DRAWS)
def test_independent_draws_are_averaged(name: str, two: Found) -> None:
    close(two, f"own draws {name}")


def test_independent_draws_differ_and_are_reproducible(two: Found) -> None:
    first, second = (results["first draw"] for results in two)
    for name in first:
        assert not torch.equal(first[name], second[name])
        assert torch.equal(first[name], two[0]["first draw again"][name])


def test_processes_that_were_joined_late_agree_on_a_seed(two: Found) -> None:
    first, second = (results["late"] for results in two)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_processes_that_have_collected_different_things_all_raise(two: Found) -> None:
    for results in two:
        words = "RuntimeError: processes that train one model differ in what they have collected: "
        assert results["differing"].startswith(words)


def test_an_empty_batch_is_refused(two: Found) -> None:
    for rank, results in enumerate(two):
        assert results["empty"].startswith(f"RuntimeError: process {rank} of 2 observed an empty batch")


def close(found: Found, name: str) -> None:
    expected = found[0][f"alone {name}"]
    for results in found:
        assert not isinstance(results[name], str), results[name]
        assert results[name].keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(results[name][key], value, rtol=1e-10, atol=1e-12)
            assert torch.equal(results[name][key], found[0][name][key])


@pytest.mark.parametrize("name", JOINED)
def test_a_process_with_fewer_batches_has_weights_and_state_of_the_others(name: str, two: Found) -> None:
    """As one process in which the sum over processes that have a batch is divided by the number of all of them."""
    close(two, f"joined {name}")


@pytest.mark.parametrize("name", NOT_JOINED)
def test_rules_that_communicate_refuse_to_go_on_without_a_process(name: str, two: Found) -> None:
    for results in two:
        words = f"RuntimeError: {name.partition('-')[0]} exchanges more than gradients, and cannot go on without"
        assert results[f"joined {name}"].startswith(words), results[f"joined {name}"]


def test_a_process_with_fewer_batches_needs_the_state_of_the_others(two: Found) -> None:
    for results in two:
        words = "RuntimeError: in join(), a process without batches would miss steps of AdaBayes"
        assert results["joined without state"].startswith(words)


@pytest.mark.parametrize("alone", [False, True])
def test_gradients_of_other_processes_than_those_that_exchange_are_refused(alone: bool, two: Found) -> None:
    """Sums of all processes do not belong to the mean gradient of some; a rule of gradients has nothing to exchange."""
    for results in two:
        for name in ("Newton", "FOOF"):
            words = f"train one model, {1 if alone else 2}, but DistributedDataParallel averages gradients over"
            assert f"RuntimeError: {name} uses more than" in results[f"in group {name} {alone}"]
            assert f"{words} {2 if alone else 1}: " in results[f"in group {name} {alone}"]
        assert not isinstance(results[f"in group AdaBayes {alone}"], str)


def test_elementwise_rules_communicate_nothing(two: Found) -> None:
    for results in two:
        for name in ("AdaBayes", "AdaBayesFP", "IVON", "KalmanMomentum"):
            assert not any(size for size, *_ in results[f"bytes {name}"])


SIDES = [(41, 24), (4, 2), (25, 3)]  # of the layers: inputs with a one, and errors
ROWS = [32, 32 * 38, 32]  # of all processes
WEIGHTS, TENSORS = 1069, 8
NUMBER = 8  # bytes
LABELLED = ("KFAC", "KroneckerFilter", "NaturalGradient", "AdaBayes-sampled", "KalmanMomentum-sampled", "SNGD")


def page() -> dict[str, Any]:
    """What the code of docs/distributed.md defines to compute costs."""
    text, names = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text(), {}
    for source in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        if "def communicated" in source or "def estimate" in source:
            exec(source, names)
    return {**names, "text": text}


DOCUMENTED = {  # tensors and weights that take part: the fallback of OGN does not communicate those beside layers
    "FOOF": "FOOF",
    "SpectralFOOF": "SpectralFOOF",
    "KFAC": "KFAC",
    "KroneckerFilterFP": "KroneckerFilterFP",
    "KroneckerFilter": "KroneckerFilter",
    "NaturalGradient": "NaturalGradient",
    "OGN": "OGN",
    "VOGN": "VOGN",
    "Newton": "Newton",
    "VON": "VON",
    "SpikeSlab-newton": "SpikeSlab newton",
    "AdaBayes-sampled": "AdaBayes sampled",
    "KalmanMomentum-sampled": "KalmanMomentum sampled",
    "SNGD": "SNGD diagonal",
    **{name: name for name in ("AdaBayes", "AdaBayesFP", "IVON", "KalmanMomentum", "AdaBound", "STE", "BayesBiNN")},
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_what_is_communicated_is_documented(name: str, two: Found) -> None:
    """The code of docs/distributed.md, in the first step of each optimizer, in which everything is due."""
    processes = len(two)
    header, labels, shapes = 16 * processes, 8 * processes, 8 * processes
    numbers = page()["communicated"](DOCUMENTED[name], SIDES, ROWS, 32, TENSORS, WEIGHTS)
    more = header if numbers else 0
    more += labels if name in LABELLED else 0
    more += {"KroneckerFilter": 2 * 3, "NaturalGradient": 4 + 4 + 2}.get(name, 0) * len(SIDES) * shapes
    for results in two:
        (size, *_), *_ = results[f"bytes {name}"]
        assert abs(size - more - NUMBER * numbers) <= 0.01 * NUMBER * numbers, (name, (size - more) / NUMBER, numbers)


def test_the_table_of_a_billion_weights_is_what_its_code_computes() -> None:
    names = page()
    rows = re.findall(
        r"^\| ([A-Za-z]+)(?:, `max_factor=(\d+)`)? \| (DDP|FSDP2) \| (.*) \|$", names["text"], re.MULTILINE
    )
    assert len(rows) == 12
    for optimizer, limit, kind, columns in rows:
        found = [names["estimate"](optimizer, W, kind == "FSDP2", int(limit or 8192)) for W in (8, 64, 512)]
        for words, index, unit in zip(columns.split(" | "), (0, 1, 2, 4), (1e9, 1e9, 1e9, 1e12), strict=True):
            for word, one in zip(words.split(" / "), found, strict=True):
                assert float(word) == pytest.approx(one[index] / unit, rel=0.051)
    assert names["N"] == pytest.approx(1e9, rel=0.01)


def test_parts_of_gradients_and_directions_are_sent_once(two: Found) -> None:
    """docs/distributed.md: 2n/W by each process on average, for the n weights of layers."""
    assert sum(results["swapped"] for results in two) == 2 * NUMBER * sum(a * e for a, e in SIDES)


def test_kfac_communicates_what_the_documentation_says(two: Found) -> None:
    """docs/distributed.md: lower triangles and counts of moments that are due, inverses that are due, and headers."""
    processes, number, sides = len(two), NUMBER, SIDES
    triangles = sum(a * (a + 1) // 2 + e * (e + 1) // 2 for a, e in sides)
    statistics = number * (triangles + 2 * len(sides) + TENSORS + 1) + 16 * processes  # and a hash of the layout
    labels = 8 * processes
    for results in two:
        before = [0] * len(sides)
        for step, (size, merged, inverted) in enumerate(results["bytes KFAC"], 1):
            new = [pair for pair, now, last in zip(sides, inverted, before) if now != last]
            inverses = number * sum(a * a + e * e for a, e in new)
            expected = inverses + (statistics + labels if step in merged else 0)
            assert abs(size - expected) <= max(0.01 * expected, number * processes * bool(new)), step  # one flag each
            before = inverted
        assert len({size for size, *_ in results["bytes KFAC"]}) > 2  # steps without and with either


def flops(found: Found) -> float:
    """The largest part of the work of one process."""
    return max(results["flops"] for results in found) / found[0]["flops alone"]


def test_work_is_divided(two: Found) -> None:
    assert flops(two) < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("many", [1, 2, 4], indirect=True)
def test_work_is_divided_by_four(many: Found) -> None:
    assert flops(many) < {1: 1.01, 2: 0.6, 4: 0.35}[len(many)]
