"""What every optimizer keeps to, whichever rule it follows."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from cases import CASES, Case, backward, batch, same, small_model, train, weights

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: t / 4),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=10),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)]
    ),
}

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def states(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    saved = optimizer.state_dict()["state"]
    return {f"{key}.{name}": value.clone() for key, entry in saved.items() for name, value in entry.items()}


@every_case
def test_keeps_the_state_it_declares_in_the_shapes_of_the_parameters(case: Case) -> None:
    model = small_model()
    optimizer = case(model.parameters())
    train(model, optimizer, range(2))
    for p in model.parameters():
        entry = optimizer.state[p]
        assert set(entry) == {"step", *case.slots}
        assert entry["step"] == 2
        assert all(entry[slot].shape == p.shape for slot in case.slots)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_resumes_bit_for_bit_from_a_file(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    model = small_model(dtype)
    optimizer = case(model.parameters(), lr=0.01)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 6)
    for index in range(3):
        train(model, optimizer, range(index, index + 1))
        scheduler.step()
    torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], tmp_path / "checkpoint.pt")
    for index in range(3, 6):
        train(model, optimizer, range(index, index + 1))
        scheduler.step()

    other = small_model(dtype, seed=1)
    resumed = case(other.parameters(), lr=0.5)
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
        kept = {value.dtype for entry in resumed.state.values() for value in entry.values()}
        assert kept == {torch.float32}


def test_resumes_bit_for_bit_in_a_new_process(tmp_path: Path) -> None:
    for case in CASES:
        model = small_model()
        optimizer = case(model.parameters())
        train(model, optimizer, range(3))
        torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / f"{case.name}.pt")
        train(model, optimizer, range(3, 6))
        torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / f"{case.name}.expected.pt")
    script = """
import sys, torch
from cases import CASES, same, small_model, train
for case in CASES:
    model = small_model(seed=1)
    optimizer = case(model.parameters())
    saved = torch.load(f"{sys.argv[1]}/{case.name}.pt", weights_only=True)
    model.load_state_dict(saved[0]); optimizer.load_state_dict(saved[1])
    train(model, optimizer, range(3, 6))
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
    optimizer = case(model.parameters())
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
    optimizer = CASES[0](model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    elements = sum(p.numel() for p in model.parameters())
    assert len(pickle.dumps(optimizer)) < 3 * 4 * elements + 100 * 2000


@every_case
def test_a_state_dict_is_a_snapshot_that_can_be_returned_to(case: Case) -> None:
    model = small_model()
    optimizer = case(model.parameters(), lr=torch.tensor(0.01))
    train(model, optimizer, range(2))
    saved, start = optimizer.state_dict(), copy.deepcopy(model.state_dict())
    train(model, optimizer, range(2, 4))
    first = weights(model)
    optimizer.param_groups[0]["lr"].fill_(0.5)
    optimizer.load_state_dict(saved)
    model.load_state_dict(start)
    train(model, optimizer, range(2, 4))
    assert same(first, weights(model))


@every_case
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_gives_the_steps_of_setting_lr_by_hand(case: Case, name: str) -> None:
    model = small_model()
    optimizer = case(model.parameters())
    scheduler = SCHEDULERS[name](optimizer)
    settings = []
    for index in range(9):
        settings.append({k: v for k, v in optimizer.param_groups[0].items() if k in ("lr", "momentum", "betas")})
        train(model, optimizer, range(index, index + 1))
        scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
    assert len({setting["lr"] for setting in settings}) > 1

    other = small_model()
    by_hand = case(other.parameters())
    for index, setting in enumerate(settings):
        by_hand.param_groups[0].update(setting)
        train(other, by_hand, range(index, index + 1))
    assert all(bool(torch.isfinite(value).all()) for value in weights(model).values())
    assert same(weights(model), weights(other))


def test_the_list_of_schedulers_is_complete() -> None:
    public = {
        name
        for name, member in vars(lr_scheduler).items()
        if inspect.isclass(member) and issubclass(member, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert public - {"LRScheduler"} <= set(SCHEDULERS)


@every_case
def test_lr_zero_changes_no_weight_and_no_belief(case: Case) -> None:
    model = small_model()
    optimizer = case(model.parameters(), lr=0.01)
    optimizer.param_groups[0]["lr"] = 0.0
    start = weights(model)
    train(model, optimizer, range(1))
    assert same(start, weights(model))
    optimizer.param_groups[0]["lr"] = 0.01
    train(model, optimizer, range(1, 4))
    before, variances = weights(model), [e["variance"].clone() for e in optimizer.state.values() if "variance" in e]
    assert not same(start, before)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, range(4, 6))
    assert same(before, weights(model))
    for old, entry in zip(variances, optimizer.state.values()):
        torch.testing.assert_close(entry["variance"], old, rtol=1e-6, atol=0)
    assert all(bool(torch.isfinite(value).all()) for value in states(optimizer).values())


@every_case
def test_an_optimizer_built_with_lr_zero_takes_its_ratios_from_the_first_lr(case: Case) -> None:
    model, other = small_model(), small_model()
    optimizer, late = case(model.parameters(), lr=0.01), case(other.parameters(), lr=0.0)
    late.param_groups[0]["lr"] = 0.01
    train(model, optimizer, range(3))
    train(other, late, range(3))
    assert same(weights(model), weights(other))


@every_case
def test_steps_at_lr_zero_before_the_first_positive_lr_keep_the_prior(case: Case) -> None:
    """Only what has been averaged so far may differ, so it is the same gradient every time."""
    model, other = small_model(), small_model()
    optimizer, late = case(model.parameters(), lr=0.01), case(other.parameters(), lr=0.0)
    for p, q in zip(model.parameters(), other.parameters()):
        p.grad, q.grad = torch.full_like(p, 1e-3), torch.full_like(q, 1e-3)
    if "gradient_mean" in case.slots:
        return  # a second equal gradient is another evidence than a first one
    late.step()
    late.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] = 0.01
    late.step()
    optimizer.step()
    if "Bound" not in case.name:  # whose band depends on the number of steps
        for p, q in zip(model.parameters(), other.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    assert all(bool(torch.isfinite(q).all()) for q in other.parameters())


@every_case
def test_a_schedule_that_rounds_below_zero_ends_at_zero_and_worse_is_refused(case: Case) -> None:
    model = small_model()
    optimizer = case(model.parameters(), lr=1e-3)
    train(model, optimizer, range(2))
    before, known = weights(model), states(optimizer)
    for bad, message in ((-0.5, "got -0.5"), (float("nan"), "got nan")):
        optimizer.param_groups[0]["lr"] = bad
        with pytest.raises(ValueError, match=message):
            optimizer.step()
        assert same(before, weights(model))
        assert same(known, states(optimizer))
    optimizer.param_groups[0]["lr"] = -1.9e-19
    optimizer.step()
    assert same(before, weights(model))


@every_case
def test_parameters_may_be_laid_out_anew_or_cast_during_a_run(case: Case) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Conv2d(64, 64, 3)

    def step(module: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        for p in module.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()

    plain, moved = model(), model()
    optimizers = case(plain.parameters()), case(moved.parameters())
    for index in range(6):
        if index == 2:
            moved.to(memory_format=torch.channels_last)
        if index == 4:
            wide = torch.zeros(64, 128, 3, 3)
            wide[:, ::2] = moved.weight.detach()
            moved.weight.data = wide[:, ::2]
        for module, optimizer in zip((plain, moved), optimizers):
            step(module, optimizer, index)
    assert same(weights(plain), weights(moved))
    assert bool((wide[:, 1::2] == 0).all())
    moved.double()
    step(moved, optimizers[1], 6)
    kept = {v.dtype for entry in optimizers[1].state.values() for k, v in entry.items() if k != "step"}
    assert kept == {torch.float64}
    moved.weight.data = torch.zeros(3, dtype=torch.float64)
    moved.weight.grad = None
    moved.weight.grad = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"has shape \(64, 64, 3, 3\), but the parameter now has \(3,\)"):
        optimizers[1].step()


@every_case
def test_gradients_of_another_dtype_than_the_weights(case: Case) -> None:
    params = [nn.Parameter(torch.zeros(200, 200, dtype=torch.bfloat16)) for _ in range(3)]
    for p in params[1:]:
        p.grad_dtype = torch.float32
    for p in params:
        p.grad = torch.full((200, 200), 0.5, dtype=p.dtype if p is params[0] else torch.float32)
    case(params).step()
    assert all(torch.equal(p, params[0]) for p in params)
    assert params[0].unique().numel() == 1


@every_case
def test_a_learning_rate_may_be_a_tensor(case: Case) -> None:
    model, other = small_model(), small_model()
    train(model, case(model.parameters(), lr=0.01), range(3))
    train(other, case(other.parameters(), lr=torch.tensor(0.01, dtype=torch.float64)), range(3))
    assert same(weights(model), weights(other))


@every_case
def test_a_closure_is_called_with_gradients_on_and_its_loss_returned(case: Case) -> None:
    model, other = small_model(), small_model()
    optimizer, by_hand = case(model.parameters()), case(other.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return backward(model, 0)

    loss = optimizer.step(closure)
    assert loss.item() == backward(other, 0).item()
    by_hand.step()
    assert same(weights(model), weights(other))


@every_case
def test_gradients_are_left_alone(case: Case) -> None:
    model = small_model()
    optimizer = case(model.parameters(), weight_decay=0.1)
    backward(model, 0)
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    assert same(before, {name: p.grad for name, p in model.named_parameters()})


@every_case
def test_parameters_without_gradient_are_left_alone(case: Case) -> None:
    model, other = small_model(), small_model()
    optimizer = case(model.parameters(), weight_decay=0.1)
    separate = {name: case([p], weight_decay=0.1) for name, p in other.named_parameters()}
    for index in range(6):
        optimizer.zero_grad()
        backward(model, index)
        # Different parameters take part in each step, so that their counters come apart.
        absent = [name for i, (name, _) in enumerate(model.named_parameters()) if (i + index) % 3 == 0]
        for name, p in model.named_parameters():
            if name in absent:
                p.grad = None
        before, known = weights(model), states(optimizer)
        for name, p in other.named_parameters():
            q = dict(model.named_parameters())[name]
            p.grad = None if q.grad is None else q.grad.clone()
        optimizer.step()
        for name in absent:
            assert torch.equal(before[name], weights(model)[name])
        assert set(known) <= set(states(optimizer))
        for one in separate.values():
            one.step()
        assert same(weights(model), weights(other))


@every_case
def test_groups_have_their_own_settings_and_can_be_added_later(case: Case) -> None:
    model, other = small_model(), small_model()
    first, second = list(model.parameters())[:3], list(model.parameters())[3:]
    optimizer = case([{"params": first, "lr": 0.02}], weight_decay=0.0)
    optimizer.add_param_group({"params": second, "lr": 0.005, "weight_decay": 0.3})
    separate = [
        case(list(other.parameters())[:3], lr=0.02, weight_decay=0.0),
        case(list(other.parameters())[3:], lr=0.005, weight_decay=0.3),
    ]
    for index in range(3):
        train(model, optimizer, range(index, index + 1))
        other.zero_grad()
        backward(other, index)
        for one in separate:
            one.step()
    assert same(weights(model), weights(other))


@every_case
def test_dtypes_can_be_mixed(case: Case) -> None:
    params = [nn.Parameter(torch.randn(50, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    optimizer = case(params)
    for p in params:
        p.grad = torch.ones_like(p)
    alone = [nn.Parameter(p.detach().clone()) for p in params]
    for p in alone:
        p.grad = torch.ones_like(p)
        case([p]).step()
    optimizer.step()
    for p, q in zip(params, alone):
        assert torch.equal(p, q)
        assert p.dtype == q.dtype


@every_case
def test_accumulated_gradients_act_like_one_batch(case: Case) -> None:
    model, other = small_model(torch.float64), small_model(torch.float64)
    optimizer, whole = case(model.parameters()), case(other.parameters())
    for index in range(3):
        optimizer.zero_grad()
        x, y = batch(index, torch.float64)
        for part in range(4):
            loss = nn.functional.cross_entropy(model(x[part::4]), y[part::4])
            (loss / 4).backward()
        optimizer.step()
        train(other, whole, range(index, index + 1))
    for a, b in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@every_case
def test_clipping_acts_on_what_the_step_sees(case: Case) -> None:
    model, other = small_model(), small_model()
    optimizer, by_hand = case(model.parameters()), case(other.parameters())
    backward(model, 0)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    for p, q in zip(model.parameters(), other.parameters()):
        q.grad = p.grad.clone()
    optimizer.step()
    by_hand.step()
    assert same(weights(model), weights(other))


@every_case
def test_grad_scaler_unscales_and_skips_overflows(case: Case) -> None:
    model, other = small_model(), small_model()
    optimizer, plain = case(model.parameters()), case(other.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for index in range(3):
        optimizer.zero_grad()
        x, y = batch(index)
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        if index == 1:
            model.out.weight.grad[0, 0] = float("inf")
            before, known = weights(model), states(optimizer)
            scaler.step(optimizer)
            assert same(before, weights(model))
            assert same(known, states(optimizer))
        else:
            scaler.step(optimizer)
            train(other, plain, range(index, index + 1))
        scaler.update()
    for a, b in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@every_case
def test_a_compiled_model_trains_like_any_other(case: Case) -> None:
    model, other = small_model(), small_model()
    optimizer, plain = case(model.parameters()), case(other.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own deprecations on import
        compiled = torch.compile(model, backend="eager")
        train(compiled, optimizer, range(2))
    train(other, plain, range(2))
    assert same(weights(model), weights(other))


@every_case
def test_bfloat16_weights_have_float32_state_and_train(case: Case) -> None:
    model = small_model(torch.bfloat16)
    optimizer = case(model.parameters(), lr=0.01)
    x, y = batch(0, torch.bfloat16)
    before = nn.functional.cross_entropy(model(x), y).item()
    for _ in range(30):
        train(model, optimizer, range(1))
    assert nn.functional.cross_entropy(model(x), y).item() < before / 2
    assert {v.dtype for entry in optimizer.state.values() for v in entry.values()} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@every_case
def test_layout_of_memory_does_not_matter(case: Case) -> None:
    """Transposed, channels-last, sliced and empty parameters, with gradients in another layout."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "transposed": torch.randn(300, 200, generator=generator).T,
        "channels_last": torch.randn(8, 16, 20, 20, generator=generator).contiguous(memory_format=torch.channels_last),
        "sliced": torch.randn(400, 200, generator=generator)[::2],
        "small_sliced": torch.randn(9, generator=generator)[::2],
        "scalar": torch.tensor(0.5),
        "empty": torch.empty(0, 3),
    }
    params = {name: nn.Parameter(tensor) for name, tensor in tensors.items()}
    plain = {
        name: nn.Parameter(tensor.clone(memory_format=torch.contiguous_format)) for name, tensor in tensors.items()
    }
    optimizer, reference = case(params.values()), case(plain.values())
    for _ in range(3):
        for name, p in params.items():
            gradient = torch.randn(p.shape, generator=generator)
            p.grad, plain[name].grad = gradient, gradient.clone()
        optimizer.step()
        reference.step()
    for name, p in params.items():
        assert torch.equal(p, plain[name]), name
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    optimizer.step()
    reference.step()
    for name, p in params.items():
        assert torch.equal(p, plain[name]), name


@every_case
def test_a_step_counts_as_a_change_for_autograd(case: Case) -> None:
    model = small_model()
    optimizer = case(model.parameters())
    loss = backward_later = model(batch(0)[0]).square().sum()
    backward(model, 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward_later.backward()
    assert loss.requires_grad


@every_case
def test_bad_arguments_get_one_sentence(case: Case) -> None:
    for options, message in case.bad:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            case([nn.Parameter(torch.zeros(2))], **options)
    with pytest.raises(ValueError, match="empty parameter list"):
        case([])
    optimizer = case([nn.Parameter(torch.zeros(2))])
    with pytest.raises(ValueError, match="lr must be a finite number >= 0, got -1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": -1})
    with pytest.raises(ValueError, match="complex64: complex weights are not supported"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]})
    assert len(optimizer.param_groups) == 1


@every_case
def test_sparse_gradients_are_refused_before_anything_changes(case: Case) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Embedding(5, 2, sparse=True))
    optimizer = case(model.named_parameters())
    before = weights(model)
    (model[0](torch.ones(1, 2)).sum() + model[1](torch.tensor([1])).sum()).backward()
    with pytest.raises(
        RuntimeError, match=r"takes no sparse gradients, but parameter '1.weight' has one: .*sparse=False"
    ):
        optimizer.step()
    assert same(before, weights(model))


@every_case
def test_nonfinite_gradients(case: Case) -> None:
    for value in (float("nan"), float("inf")):
        for option in ("ignore", "raise", "skip"):
            model = small_model()
            optimizer = case(model.named_parameters(), nonfinite=option)
            train(model, optimizer, range(2))
            backward(model, 2)
            model.out.weight.grad[1, 2] = value
            before, known = weights(model), states(optimizer)
            if option == "raise":
                with pytest.raises(FloatingPointError, match=r"parameter 'out.weight' has 1 entries of 3000"):
                    optimizer.step()
            else:
                optimizer.step()
            if option == "ignore":
                assert not same(before, weights(model))
            else:
                assert same(before, weights(model))
                assert same(known, states(optimizer))
    empty = nn.Parameter(torch.zeros(0, 3))
    empty.grad = torch.zeros(0, 3)
    case([empty], nonfinite="skip").step()
    model = small_model()  # large but finite gradients are not mistaken for infinite ones
    optimizer = case(model.parameters(), nonfinite="raise")
    for p in model.parameters():
        p.grad = torch.full_like(p, 3e38)
    optimizer.step()


@every_case
def test_loading_what_does_not_fit_says_so_and_loses_nothing(case: Case) -> None:
    model = small_model()
    optimizer = case(model.parameters())
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
        (spoilt(lambda s: s.pop("state")), "lacks 'state' or 'param_groups'"),
        (spoilt(lambda s: s["param_groups"][0]["params"].pop()), r"param groups of \[7\] parameters"),
        (spoilt(lambda s: s["param_groups"][0].pop("lr")), r"lacks \['lr'\]"),
        (spoilt(lambda s: s["param_groups"][0].update(lr=-1.0)), "lr must be a finite number >= 0, got -1.0"),
        (torch.optim.SGD(model.parameters(), lr=0.1).state_dict(), "it is not"),
        (spoilt(lambda s: s["state"][0].update(step=3)), "step in the saved state of parameter 0"),
        (spoilt(lambda s: s["state"][0].update(step=torch.zeros(2))), "step in the saved state of parameter 0"),
        (spoilt(lambda s: s["state"][0].update(extra="x")), "extra in the saved state of parameter 0"),
        (spoilt(lambda s: s["param_groups"][0].update(last_lr="x")), "last_lr must be a finite number >= 0, got 'x'"),
        (spoilt(lambda s: s.update(param_groups=[3])), "lacks 'state' or 'param_groups'"),
        (spoilt(lambda s: s.update(state=[])), "lacks 'state' or 'param_groups'"),
        (None, "but a NoneType"),
    ]
    for bad, message in attempts:
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(bad)
        assert same(known, states(optimizer))
        assert optimizer.param_groups[0]["lr"] == groups
    train(model, optimizer, range(2, 3))


@every_case
def test_trains_a_small_network_on_digits_with_its_defaults(case: Case) -> None:
    """Fifteen epochs reach the 90 % that a default must reach; weight decay, where a case has one, is left out."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    order = torch.randperm(len(x))
    x, y = x[order], y[order]
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = case(model.parameters(), weight_decay=0.0)
    for _ in range(15):
        for i in range(0, 1344, 32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[i : i + 32]), y[i : i + 32]).backward()
            optimizer.step()
    accuracy = (model(x[1344:]).argmax(1) == y[1344:]).float().mean().item()
    assert accuracy > 0.9
