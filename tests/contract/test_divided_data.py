"""Data that are divided among processes, and chains: what one process finds with all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from bayesgrad import DataShard, laplace
from divided_data import CASES, EXAMPLES, REFUSED, classifier, examples
from launching import results_of

NAMES = [*(case.name for case in CASES), "tuned", "predicted", "SNGD", "Langevin"]
slow = pytest.mark.slow


@pytest.fixture(scope="module", params=[3, *(pytest.param(n, marks=slow) for n in (1, 2, 4))])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of(tmp_path_factory, "divided_data.py", request.param, request.param)


@pytest.mark.parametrize("name", NAMES)
def test_all_processes_find_what_one_finds_with_all_data(name: str, found: list[dict[str, Any]]) -> None:
    expected = found[0][f"alone {name}"]
    for results in found:
        assert not isinstance(results[name], str), results[name]
        assert results[name].keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(
                results[name][key], value, rtol=1e-10, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}"
            )
            assert torch.equal(results[name][key], found[0][name][key]), key


@pytest.mark.parametrize("how", REFUSED)
def test_refusals_are_those_of_all_processes(how: str, found: list[dict[str, Any]]) -> None:
    if len(found) == 1:
        pytest.skip("a single process has all data")
    words = [results[how] for results in found]
    assert any(isinstance(own, str) and own.startswith(REFUSED[how]) for own in words), words
    for own in words:
        assert isinstance(own, str)
        assert own.startswith(REFUSED[how]) or (own.startswith("RuntimeError: process ") and REFUSED[how] in own), words


def test_a_process_of_its_own_has_a_part_of_the_data(found: list[dict[str, Any]]) -> None:
    """With repetitions, as its loader gives them."""
    for results in found:
        assert results["own"]["fit"][1] == -(-EXAMPLES // len(found)) * 3


def loader(parts: int) -> DataLoader:
    data = TensorDataset(*examples())
    return DataLoader(data, batch_size=8, sampler=DistributedSampler(data, parts, 0))


def test_a_part_is_not_all_data_without_a_process_group() -> None:
    model = classifier()
    with pytest.raises(ValueError, match="laplace needs all data, but the sampler of this loader gives one of 2 parts"):
        laplace(model, loader(2), likelihood="categorical")
    scaled = laplace(model, loader(2), likelihood="categorical", structure="diag", num_data=EXAMPLES)
    assert scaled.fit.outputs == 3 * EXAMPLES
    posterior = laplace(model, loader(1), likelihood="categorical", structure="diag")
    with pytest.raises(ValueError, match="elbo needs all data"):
        posterior.elbo(loader(2), prior_precision=1.0)
    with pytest.raises(ValueError, match="tune_prior needs all data"):
        posterior.tune_prior(method="heldout", heldout=loader(2))


def test_what_is_gathered_has_a_row_for_each_example() -> None:
    shard = DataShard(loader(1))
    assert torch.equal(shard.gather([x for x, _ in shard]), examples()[0])
    with pytest.raises(ValueError, match=f"one row for each example, got .* rows for {EXAMPLES} examples"):
        shard.gather([x[:1] for x, _ in shard])
    with pytest.raises(ValueError, match="at least one batch"):
        shard.gather([])
