"""Processes that have parts of the parameters (FSDP2, tensor parallelism), and distributed checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from cases import ELEMENTWISE, Case, every_case, same, small_model, train, weights
from launching import results_of
from sharded_processes import BOTH, CHECKPOINTED, FOUR, ITSELF, LAYERED, MODES, SHARDED

UNREADABLE = ("NaturalGradient", "NaturalGradient-layer")  # whose matrices have the shape of a batch
Results = list[dict[str, Any]]
slow = pytest.mark.slow
every_sharded = pytest.mark.parametrize("case", SHARDED, ids=lambda case: case.name)
processes_of = pytest.mark.parametrize("processes", [2, *(pytest.param(n, marks=slow) for n in (1, 3, 4))])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Number of processes -> what each of them found."""
    kept: dict[tuple[int, str], Results] = {}

    def of(processes: int, saved_by: str | None = None) -> Results:
        key = processes, saved_by or (ITSELF if processes == 2 else FOUR)
        if key[1] == FOUR and processes != 4:
            of(4)
        if key not in kept:
            kept[key] = results_of(tmp_path_factory, "sharded_processes.py", processes, *key)
        return kept[key]

    return of


def assert_same(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    """Up to rounding, relative to the largest element: natural parameters of binary weights are large."""
    assert not isinstance(found, str), found
    assert not isinstance(expected, str), expected
    assert found.keys() == expected.keys()
    for name in expected:
        size = float(expected[name].abs().max()) if expected[name].numel() else 0.0
        torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance * max(size, 1.0))


def assert_alike(results: Results, name: str) -> Any:
    """That all processes found the same, bit for bit; what they found."""
    first = results[0][name]
    for other in results[1:]:
        assert type(other[name]) is type(first)
        assert other[name] == first if isinstance(first, str) else same(other[name], first)
    return first


@processes_of
@every_sharded
def test_shards_have_the_weights_and_state_of_one_process(case: Case, processes: int, results: Any) -> None:
    found = results(processes)
    result, expected = assert_alike(found, f"fsdp2 {case.name}"), found[0][f"alone {case.name}"]
    rounding = {"BayesBiNN-sharp": 1e-8}.get(case.name, 1e-10)  # relaxed samples are steep in lambda: slopes of 10
    assert_same(result, expected, rounding)
    assert_same({k: v for k, v in result.items() if " " not in k}, {k: v for k, v in expected.items() if " " not in k})


@processes_of
@pytest.mark.parametrize("kind", ["accumulated", "several", "clipped", "skip", "closure", "large IVON", *MODES])
def test_loops_on_shards_give_what_one_process_gives(kind: str, processes: int, results: Any) -> None:
    """Micro-batches, draws for each of them, clipping, a gradient that is not finite in one process, closures, eval."""
    found, kind = results(processes), f"modes {kind}" if kind in MODES else kind
    assert_same(assert_alike(found, f"fsdp2 {kind}"), found[0][f"alone {kind}"])


@processes_of
@pytest.mark.parametrize("name", [*BOTH, *LAYERED])
def test_other_placements_give_what_one_process_gives(name: str, processes: int, results: Any) -> None:
    """Activation checkpointing, tensor parallelism, both with shards, and groups of processes that have the same."""
    found = results(processes)
    expected = found[0][f"alone recomputed {name}"]
    assert_same(assert_alike(found, f"fsdp2 recomputed {name}"), expected)
    assert_same(assert_alike(found, f"fsdp2 mixed {name}"), found[0][f"alone mixed {name}"], 1e-5)
    if processes % 2 == 0:
        assert_same(assert_alike(found, f"hybrid {name}"), found[0][f"alone {name}"])
    several = [f"tensor recomputed {name}", *([f"tensor and fsdp2 recomputed {name}"] if processes % 2 == 0 else ())]
    for kind in several:
        if name in LAYERED:
            message = assert_alike(found, kind)
            assert message.startswith(f"TypeError: {name} uses ")
            assert "which fully_shard gathers, but tensor parallelism does not: use fully_shard alone" in message
        else:
            assert_same(assert_alike(found, kind), expected)


@processes_of
def test_what_shards_cannot_do_is_refused_in_a_sentence(processes: int, results: Any) -> None:
    found = results(processes)
    message = assert_alike(found, "fsdp2 raise")
    assert message.startswith("FloatingPointError: the gradient of parameter 'wide.weight' has 1 entries of 840")
    message = assert_alike(found, "fsdp2 unreduced")
    assert message.startswith("RuntimeError: IVON supports one draw of weights until gradients are averaged")
    assert assert_alike(found, "fsdp2 loaded").startswith(
        "RuntimeError: load_state_dict() between backward() and step()"
    )
    message = assert_alike(found, "penalised")
    assert message.startswith("RuntimeError: the gradient of layer 'wide' is a sum of terms of which")
    message = assert_alike(found, "before")
    assert message.startswith("RuntimeError: fully_shard has replaced the parameters that KFAC was built for: build")
    if processes > 1:
        message = assert_alike(found, "apart")
        assert message.startswith("TypeError: KFAC uses the layers of the model in the batches of all processes that")
        assert f"train one model, 1, but fully_shard has divided parameters among {processes}: use a mesh" in message
        message = assert_alike(found, "independent draws")
        assert message.startswith("RuntimeError: IVON draws its part of one vector for each DTensor parameter")
    assert assert_alike(found, "posterior").startswith("TypeError: posterior() needs whole parameters, got DTensors")
    for name in ("IVON", "KFAC"):  # parameters of its groups were replaced after it was built
        words = f"RuntimeError: fully_shard has replaced the parameters that {name} was built for: build {name} after"
        assert assert_alike(found, f"replaced {name}").startswith(words)
    assert not isinstance(assert_alike(found, "replaced AdaBayes"), str)


@processes_of
def test_forward_passes_use_the_drawn_weights_and_then_the_mean(processes: int, results: Any) -> None:
    """Also where an earlier pass has left gathered parameters behind; each draw is another."""
    found = assert_alike(results(processes), "drawn")
    for name, value in found.items():
        if "restored" in name:
            assert not value.any(), name
        if "difference" in name:
            torch.testing.assert_close(value, torch.zeros_like(value), rtol=0, atol=1e-14)
    for name in ("wide.weight", "out.bias"):
        assert not torch.equal(found[f"{name} 0"], found[f"{name} 1"])
        assert not torch.equal(found[f"{name} 1"], found[f"{name} 2"])


@processes_of
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_a_resumed_run_goes_on_bit_for_bit(name: str, processes: int, results: Any) -> None:
    found = results(processes)
    undisturbed = assert_alike(found, f"saved {name}")
    assert_same(undisturbed, found[0][f"alone later {name}"])
    for kind in ("sharded", "full"):
        assert same(assert_alike(found, f"resumed from {processes} {kind} {name}"), undisturbed)
    assert_same(assert_alike(found, f"resumed from {processes} one process {name}"), undisturbed)


@slow
@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_a_run_of_four_processes_goes_on_in_any_number(name: str, processes: int, results: Any) -> None:
    expected, found = results(4)[0][f"saved {name}"], results(processes, FOUR)
    for kind in ("sharded", "full", "one process"):
        assert_same(assert_alike(found, f"resumed from 4 {kind} {name}"), expected)


@processes_of
def test_the_state_dict_of_replicas_loads_in_one_process(processes: int, results: Any) -> None:
    found = results(processes)
    assert_same(assert_alike(found, "replicas"), found[0]["alone later IVON"])


# --- in one process, for every optimizer ---


def built(case: Case) -> tuple[nn.Module, Any]:
    model = small_model(torch.float64, width=20)
    torch.manual_seed(0)  # from which optimizers draw their seeds
    return model, case.of(model, fused=False)


@every_case
def test_the_initialising_step_of_a_distributed_checkpoint_changes_nothing(case: Case) -> None:
    """torch takes it with zero gradients and lr = 0, to find the tensors of the state."""
    (model, optimizer), (other, undisturbed) = built(case), built(case)
    before = weights(model)
    saved = get_optimizer_state_dict(model, optimizer)
    assert same(before, weights(model))
    assert not any(float(entry["step"]) for entry in saved["state"].values())
    for one, rule in ((model, optimizer), (other, undisturbed)):
        train(one, rule, range(2))
    assert same(weights(model), weights(other))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@every_case
def test_a_distributed_checkpoint_resumes_bit_for_bit_or_is_refused(case: Case, tmp_path: Path) -> None:
    """Into an optimizer without state; by files that are read into its tensors, and by a whole state dict."""
    model, optimizer = built(case)
    train(model, optimizer, range(3))
    saved = get_optimizer_state_dict(model, optimizer)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_optimizer_state_dict(model, optimizer, options=options)
    checkpoint.save(saved, checkpoint_id=tmp_path, no_dist=True)
    values = copy.deepcopy(model.state_dict())
    train(model, optimizer, range(3, 5))
    for kind in ("files", "full"):
        other, resumed = built(case)
        other.load_state_dict(values)
        if kind == "full":
            set_optimizer_state_dict(other, resumed, full, options=StateDictOptions(full_state_dict=True))
        else:
            template = get_optimizer_state_dict(other, resumed)
            checkpoint.load(template, checkpoint_id=tmp_path, no_dist=True)
            if case.name in UNREADABLE:
                with pytest.raises(ValueError, match="which were not read: a distributed checkpoint is read"):
                    set_optimizer_state_dict(other, resumed, template)
                continue
            set_optimizer_state_dict(other, resumed, template)
        train(other, resumed, range(3, 5))
        assert same(weights(other), weights(model)), kind


def test_a_first_step_at_lr_zero_still_learns_from_gradients() -> None:
    """A warm-up begins with it; only zero gradients mean that a checkpoint is read."""
    case = next(case for case in ELEMENTWISE if case.name == "AdaBayes")
    model, optimizer = built(case)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, range(1))
    assert all(float(entry["step"]) == 1 for entry in optimizer.state.values())
