"""State: copied, saved, restored bit for bit, and rejected if it does not fit."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.optim import lr_scheduler

from cases import (
    CASES,
    ELEMENTWISE,
    MASKED,
    SECOND,
    SHOWN,
    Case,
    batch,
    elementwise_case,
    every_case,
    push,
    same,
    small_model,
    states,
    still,
    train,
    weights,
)


@elementwise_case
def test_keeps_the_state_it_declares_in_the_shapes_of_the_parameters(case: Case) -> None:
    model = small_model()
    optimizer = case.of(model)
    train(model, optimizer, range(2))
    for p in model.parameters():
        entry = optimizer.state[p]
        assert set(entry) - {"ahead"} == {"step", *case.slots}
        assert entry["step"] == 2
        assert all(entry[slot].shape == p.shape for slot in case.slots)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_resumes_bit_for_bit_from_a_file(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    model = small_model(dtype)
    optimizer = case.of(model, lr=0.01)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 6)
    for index in range(3):
        train(model, optimizer, range(index, index + 1))
        scheduler.step()
    torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], tmp_path / "checkpoint.pt")
    for index in range(3, 6):
        train(model, optimizer, range(index, index + 1))
        scheduler.step()

    other = small_model(dtype, seed=1)
    resumed = case.of(other, lr=0.5)
    schedule = lr_scheduler.CosineAnnealingLR(resumed, 6)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    for target, value in zip((other, resumed, schedule), saved):
        target.load_state_dict(value)
    for index in range(3, 6):
        train(other, resumed, range(index, index + 1))
        schedule.step()
    assert same(weights(model), weights(other))
    assert same(states(optimizer), states(resumed))
    if dtype == torch.bfloat16:
        kept = {
            value.dtype for entry in resumed.state.values() for k, value in entry.items() if k not in resumed.on_cpu()
        }
        assert {dtype for dtype in kept if dtype.is_floating_point} <= {torch.float32}


def test_resumes_bit_for_bit_in_a_new_process(tmp_path: Path) -> None:
    for case in CASES:
        model = small_model()
        optimizer = case.of(model)
        push(model, optimizer, range(3))
        torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / f"{case.name}.pt")
        push(model, optimizer, range(3, 6))
        torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / f"{case.name}.expected.pt")
    script = """
import sys, torch
torch.set_num_threads(1)
from cases import CASES, push, same, small_model
for case in CASES:
    model = small_model(seed=1)
    optimizer = case.of(model)
    saved = torch.load(f"{sys.argv[1]}/{case.name}.pt", weights_only=True)
    model.load_state_dict(saved[0]); optimizer.load_state_dict(saved[1])
    push(model, optimizer, range(3, 6))
    expected = torch.load(f"{sys.argv[1]}/{case.name}.expected.pt", weights_only=True)
    assert same(model.state_dict(), expected[0]), case.name
    for key, entry in optimizer.state_dict()["state"].items():
        assert same(entry, expected[1]["state"][key]), case.name
print("all", len(CASES))
"""
    folder = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == f"all {len(CASES)}", done.stderr


@every_case
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copy_goes_on_by_itself_with_the_same_numbers(case: Case, copier) -> None:
    model = nn.Sequential(nn.Linear(40, 1000), nn.Linear(1000, 3))
    optimizer = case.of(model)
    train(model, optimizer, range(2))
    twin, twin_optimizer = copier((model, optimizer))
    before = weights(model)
    train(twin, twin_optimizer, range(2, 5))
    assert same(before, weights(model))
    assert not same(before, weights(twin))
    train(model, optimizer, range(2, 5))
    assert same(weights(twin), weights(model))
    assert same(states(twin_optimizer), states(optimizer))


def test_pickled_size_is_that_of_the_state() -> None:
    model = nn.Sequential(*[nn.Linear(10, 10) for _ in range(50)])
    optimizer = CASES[0].of(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    elements = sum(p.numel() for p in model.parameters())
    assert len(pickle.dumps(optimizer)) < 3 * 4 * elements + 100 * 2000


@every_case
def test_a_state_dict_is_a_snapshot_that_can_be_returned_to(case: Case) -> None:
    model = small_model()
    optimizer = case.of(model, lr=torch.tensor(0.01))
    train(model, optimizer, range(2))
    saved, start = optimizer.state_dict(), copy.deepcopy(model.state_dict())
    train(model, optimizer, range(2, 4))
    first = weights(model)
    optimizer.param_groups[0]["lr"].fill_(0.5)
    optimizer.load_state_dict(saved)
    model.load_state_dict(start)
    train(model, optimizer, range(2, 4))
    assert same(first, weights(model))


@elementwise_case
def test_loading_what_does_not_fit_says_so_and_loses_nothing(case: Case) -> None:
    model = small_model()
    optimizer = case.of(model)
    train(model, optimizer, range(2))
    known, groups = states(optimizer), optimizer.param_groups[0]["lr"]
    good = optimizer.state_dict()

    def spoilt(change) -> dict:
        bad = copy.deepcopy(good)
        change(bad)
        return bad

    slot = case.slots[0]
    attempts = [
        (
            spoilt(lambda s: s["state"][0].update({slot: torch.zeros(3)})),
            rf"{slot} of parameter 0 of group 0 has shape",
        ),
        (spoilt(lambda s: s["state"][1].pop(slot)), rf"parameter 1 of group 0 lacks \['{slot}'\]"),
        (spoilt(lambda s: s.pop("state")), "must have 'state' and 'param_groups'"),
        (spoilt(lambda s: s["param_groups"][0]["params"].pop()), r"param groups of \[7\] parameters"),
        (spoilt(lambda s: s["param_groups"][0].pop("lr")), r"lacks \['lr'\]"),
        (spoilt(lambda s: s["param_groups"][0].update(lr=-1.0)), "lr must be a finite number >= 0, got -1.0"),
        (torch.optim.SGD(model.parameters(), lr=0.1).state_dict(), "is that of another optimizer, as of torch"),
        (spoilt(lambda s: s["state"][0].update(step=3)), "step in the saved state of parameter 0"),
        (spoilt(lambda s: s["state"][0].update(step=torch.zeros(2))), "step in the saved state of parameter 0"),
        (spoilt(lambda s: s["state"][0].update(extra="x")), "extra in the saved state of parameter 0"),
        (spoilt(lambda s: s["param_groups"][0].update(last_lr="x")), "last_lr must be a finite number >= 0, got 'x'"),
        (spoilt(lambda s: s.update(param_groups=[3])), "must have 'state' and 'param_groups'"),
        (spoilt(lambda s: s.update(state=[])), "must have 'state' and 'param_groups'"),
        (None, "must be a dict, got NoneType"),
    ]
    for bad, message in attempts:
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(bad)
        assert same(known, states(optimizer))
        assert optimizer.param_groups[0]["lr"] == groups
    train(model, optimizer, range(2, 3))


@elementwise_case
@pytest.mark.parametrize("names", ["ab", "cd", None])
def test_parameters_of_the_same_names_are_matched_by_name_and_others_by_position(case: Case, names: str | None) -> None:
    """`names` are those of the optimizer that loads, whose parameters are in the opposite order."""
    noise = {name: torch.randn(6, 4, generator=torch.Generator().manual_seed(i)) for i, name in enumerate("ab")}

    def built(given: str | None) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        params = [nn.Parameter(torch.ones(4)) for _ in range(2)]
        return params, case(zip(given, params) if given else params)

    def run(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, order: str, steps: range) -> None:
        for step in steps:
            with still(optimizer):
                for p, name in zip(params, order):
                    p.grad = noise[name][step].clone()
            optimizer.step()

    params, optimizer = built("ab")
    run(params, optimizer, "ab", range(3))
    matched = names == "ab"
    others, again = built(names and names[::-1])
    with torch.no_grad():
        for p, other in zip(params, others[::-1] if matched else others):
            other.copy_(p)
    again.load_state_dict(optimizer.state_dict())
    run(params, optimizer, "ab", range(3, 6))
    run(others, again, "ba" if matched else "ab", range(3, 6))
    for p, other in zip(params, others[::-1] if matched else others):
        assert torch.equal(p, other)
    assert again.param_groups[0].get("param_names") == (list("ba") if matched else list("ab"))


@elementwise_case
def test_named_parameters_in_other_groups_are_refused(case: Case) -> None:
    """As are groups in another order, since the state and the options would be those of other parameters."""

    def built(*groups: str) -> torch.optim.Optimizer:
        return case([{"params": [(name, nn.Parameter(torch.ones(3))) for name in names]} for names in groups])

    saved = built("ab", "c").state_dict()
    built("ba", "c").load_state_dict(saved)
    for groups in (("c", "ab"), ("ac", "b"), ("a", "bc")):
        with pytest.raises(ValueError, match=r"parameters of this \w+ in other param groups: build it with the groups"):
            built(*groups).load_state_dict(saved)


@every_case
def test_loads_again_after_loading_copying_and_unpickling(case: Case) -> None:
    """torch adds `differentiable` to the defaults when it loads or unpickles; accelerate and Trainer load twice."""
    model = nn.Sequential(nn.Linear(40, 20), nn.Linear(20, 3))
    optimizer = case.of(model)
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    for target in (optimizer, copy.deepcopy((model, optimizer))[1], pickle.loads(pickle.dumps(optimizer))):
        for _ in range(3):
            target.load_state_dict(saved)
            assert same(states(target), {f"{k}.{n}": v for k, e in saved["state"].items() for n, v in e.items()})
    train(model, optimizer, range(2, 3))


@every_case
def test_other_objects_in_the_state_are_kept(case: Case) -> None:
    """torch saves and loads what users store in `state` under keys that are not parameters."""
    model = nn.Sequential(nn.Linear(40, 20), nn.Linear(20, 3))
    optimizer = case.of(model)
    optimizer.state["epoch"], optimizer.state["notes"] = 3, ["a"]
    train(model, optimizer, range(2))
    optimizer.eval()
    optimizer.train()
    saved = optimizer.state_dict()
    if hasattr(optimizer, "state_dict_without_examples"):
        assert optimizer.state_dict_without_examples()["state"]["epoch"] == 3
    other = copy.deepcopy(model)
    fresh = case.of(other)
    fresh.load_state_dict(saved)
    for target in (optimizer, fresh, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert target.state["epoch"] == 3
        assert target.state["notes"] == ["a"]
    train(model, optimizer, range(2, 3))
    train(other, fresh, range(2, 3))
    assert same(weights(model), weights(other))


def test_a_saved_entry_that_is_no_dict_is_refused() -> None:
    model = small_model()
    optimizer = CASES[0].of(model)
    train(model, optimizer, range(1))
    saved = optimizer.state_dict()
    saved["state"][0] = 3
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 must be a dict, got int\."):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("case", [*ELEMENTWISE, *SECOND, *SHOWN, *MASKED], ids=lambda case: case.name)
def test_builds_steps_and_saves_without_values_where_adam_does(case: Case) -> None:
    """FakeTensorMode has shapes and no values: nothing but a step counter may be read."""
    shapes = {}
    for fake in (True, False):
        with FakeTensorMode() if fake else nullcontext():
            model = nn.Sequential(nn.Linear(40, 20), nn.ReLU(), nn.Linear(20, 3))
            optimizer = case.of(model, **({} if case.layers else {"fused": False}))
            for index in range(2):
                optimizer.zero_grad()
                with optimizer.sampled():
                    x, y = batch(index)
                    outputs = model(x)
                    loss = nn.functional.cross_entropy(outputs, y)
                    optimizer.observe(outputs, loss=loss)
                    loss.backward()
                optimizer.step()
            shapes[fake] = {k: (v.shape, v.dtype) for k, v in states(optimizer).items()}
            assert isinstance(optimizer.state[model[0].weight]["step"], FakeTensor) == fake
    assert shapes[True] == shapes[False]
