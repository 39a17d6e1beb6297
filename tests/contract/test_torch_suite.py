"""PyTorch's own tests of optimizers, test/test_optim.py, for every optimizer here.

The optimizers are `OptimizerInfo`s, as those in torch's `optim_db`, with the schedulers of its entry for SGD. The tests
say what torch's tests of the same names say, in the training loop that all optimizers here share. Tests that do not
apply are in `NOT_APPLICABLE`, with the reason, and with the test of this library that takes their place.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
    get_error_inputs_for_all_optims,
    optim_db,
)

from bayesgrad import optim
from bayesgrad.parts import Needs
from cases import CASES, Case, same, states

pytestmark = pytest.mark.filterwarnings(
    "ignore:.* trains .* by ", "ignore:lr=.* (samples at temperature|is not small|is .* times the )"
)
ROWS, INPUTS, CLASSES = 8, 5, 10
NAMES = ["weight", "bias"]
TABLE = (
    *CASES,
    Case("DenseFilter", optim.DenseFilter, {"batch_size": ROWS}, (), layers=True),
)

# The tests of TestOptimRenewed in test/test_optim.py (of about torch 2.6) that have no test of their name below.
NO_GPU = "needs a GPU, which the machines of this project do not have"
NO_FOREACH = "there is one implementation and no option foreach"
NOT_APPLICABLE = {
    "test_forloop_goes_right_direction_multigpu": NO_GPU,
    "test_rosenbrock_sparse": "sparse gradients are refused: test_sparse_gradients_are_refused",
    "test_complex": "complex parameters are refused: test_complex_parameters_are_refused",
    "test_complex_2d": "complex parameters are refused: test_complex_parameters_are_refused",
    "test_foreach_matches_forloop": f"{NO_FOREACH}: test_flags_of_torch_are_refused",
    "test_set_default_dtype_works_with_foreach": f"{NO_FOREACH}: test_set_default_dtype",
    "test_foreach_large_tensor": f"{NO_FOREACH}, and it needs 72 GB",
    "test_peak_memory_foreach": f"{NO_FOREACH}; contract/test_memory.py counts the memory of a step",
    "test_defaults_changed_to_foreach": NO_FOREACH,
    "test_mixed_device_dtype": f"{NO_GPU}; dtypes: test_mixed_dtypes",
    "test_fused_matches_forloop": "test_kernels.py compares compiled with eager steps for every optimizer",
    "test_fused_large_tensor": "needs 64 GB",
    "test_fused_cpu_matches_cuda": NO_GPU,
    "test_fused_does_not_step_if_foundinf": f"{NO_GPU}, and no kernel reads found_inf: test_grad_scaler_skips_a_step",
    "test_cpu_load_state_dict": NO_GPU,
    "test_state_dict_with_cuda_params": NO_GPU,
    "test_load_nontensor_step": "no released version saved a step as a number: test_a_step_that_is_a_number_is_refused",
    "test_second_order_optims_return_consistent_types": "for LBFGS: test_step_returns_what_the_closure_returns",
}
# Tests of optimizers in other files of torch.
ELSEWHERE = {
    "TestDifferentiableOptimizer": "there is no option differentiable: test_flags_of_torch_are_refused",
    "TestLRScheduler": "tests schedulers with SGD: contract/test_schedules.py has all schedulers and optimizers",
    "TestSWAUtils": "AveragedModel does not use the optimizer; SWALR is in contract/test_schedules.py",
    "test_grad_scaling_autocast_fused_optimizers": f"{NO_GPU}; on CPUs: test_grad_scaler_skips_a_step",
    "test_correctness": "torch.compile(optimizer.step): test_kernels.py compiles the kernels, which `fused` selects",
    "test_profiler_optimizer": "test_profiler_names_a_step",
}
# Weight and bias of a layer have one metric or belief in units of lr; others are refused: contract/test_layers.py.
ONE_LR = ("Langevin-default", "KroneckerFilter", "KroneckerFilterFP-prior")
TORCH_TESTS = [
    "test_can_load_from_to_named_state_dict",
    "test_can_load_older_state_dict",
    "test_complex",
    "test_complex_2d",
    "test_cpu_load_state_dict",
    "test_deepcopy_copies_all_public_attrs",
    "test_defaults_changed_to_foreach",
    "test_errors",
    "test_foreach_large_tensor",
    "test_foreach_matches_forloop",
    "test_forloop_goes_right_direction",
    "test_forloop_goes_right_direction_multigpu",
    "test_fused_cpu_matches_cuda",
    "test_fused_does_not_step_if_foundinf",
    "test_fused_error_on_params_on_meta",
    "test_fused_large_tensor",
    "test_fused_matches_forloop",
    "test_load_nontensor_step",
    "test_load_state_dict_post_hook",
    "test_load_state_dict_pre_hook_and_prepend",
    "test_load_state_dict_pre_post_hook",
    "test_mixed_device_dtype",
    "test_non_empty_state",
    "test_optim_infos_do_not_specify_global_cliquey_kwargs",
    "test_optimizer_can_be_printed",
    "test_param_group_with_lrscheduler_goes_right_direction",
    "test_param_groups_lr",
    "test_param_groups_weight_decay",
    "test_peak_memory_foreach",
    "test_rosenbrock_sparse",
    "test_save_load_equality_with_weights_only",
    "test_second_order_optims_return_consistent_types",
    "test_set_default_dtype_works_with_foreach",
    "test_state_dict_deterministic",
    "test_state_dict_post_hook",
    "test_state_dict_pre_hook",
    "test_state_dict_pre_post_hook",
    "test_state_dict_with_cuda_params",
    "test_step_all_hooks",
    "test_step_is_noop_for_zero_grads",
    "test_step_is_noop_when_params_have_no_grad",
    "test_step_post_hook",
    "test_step_pre_hook",
    "test_tensor_lr",
]


def error_inputs(cases: list[Case]) -> Callable[..., list[ErrorOptimizerInput]]:
    """Torch's errors for all optimizers, and those of the table; parameters are those of a Linear(1, 1)."""

    def func(device: str, dtype: torch.dtype) -> list[ErrorOptimizerInput]:
        common = get_error_inputs_for_all_optims(device, dtype)
        own = [
            ErrorOptimizerInput(OptimizerInput(None, kwargs), error_type=ValueError, error_regex=message)
            for case in cases
            for kwargs, message in case.bad
        ]
        return [*common, *own]

    return func


def infos() -> dict[type, OptimizerInfo]:
    """The optimizers of the table as torch's OptimizerInfo, one for each class."""
    by_class: dict[Any, list[Case]] = {}
    for case in TABLE:
        by_class.setdefault(case.make, []).append(case)
    sgd = next(info for info in optim_db if info.optim_cls is SGD)

    def inputs(cases: list[Case]) -> Callable[..., list[OptimizerInput]]:
        return lambda device, dtype=None: [OptimizerInput(None, dict(case.options), case.name) for case in cases]

    return {
        make: OptimizerInfo(
            make,
            optim_inputs_func=inputs(cases),
            optim_error_inputs_func=error_inputs(cases),
            scheduler_inputs=sgd.scheduler_inputs,
            supported_impls=(),
            supports_complex=False,
        )
        for make, cases in by_class.items()
    }


INFOS = infos()
every_info = pytest.mark.parametrize("info", INFOS.values(), ids=lambda info: info.name)
BY_NAME = {case.name: case for case in TABLE}
every_input = pytest.mark.parametrize(
    "case", [BY_NAME[i.desc] for info in INFOS.values() for i in info.optim_inputs_func("cpu")], ids=lambda c: c.name
)
both = pytest.mark.parametrize("named", [True, False])
SCHEDULES = next(iter(INFOS.values())).scheduler_inputs
every_schedule = pytest.mark.parametrize(
    "makers",
    [(), SCHEDULES[-1], *(pytest.param(makers, marks=pytest.mark.slow) for makers in SCHEDULES[:-1])],
    ids=lambda makers: f"{len(makers)} schedulers",
)


def linear(dtype: torch.dtype = torch.float32, contiguous: bool = True, seed: int = 0) -> nn.Linear:
    """The model of torch's tests, with a weight (10, 5) and a bias (10)."""
    torch.manual_seed(seed)
    model = nn.Linear(INPUTS, CLASSES, dtype=dtype)
    if not contiguous:
        model.weight = nn.Parameter(torch.randn(CLASSES, INPUTS, 2, dtype=dtype)[..., 0])
        model.bias = nn.Parameter(torch.randn(CLASSES, 2, dtype=dtype)[..., 0])
    return model


def build(case: Case, model: nn.Module, named: bool = False, **options: Any) -> Any:
    """The optimizer of all parameters; one that takes the model always has names."""
    if case.layers:
        return case(model, **options)
    return case(model.named_parameters() if named else model.parameters(), **options)


def groups_of(case: Case, model: nn.Module, groups: list[dict[str, Any]], **options: Any) -> Any:
    return case(model, params=groups, **options) if case.layers else case(groups, **options)


def batch(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, INPUTS, generator=generator, dtype=torch.float64).to(dtype), torch.arange(ROWS)


def forward_backward(model: nn.Module, optimizer: Any) -> torch.Tensor:
    x, y = batch(next(model.parameters()).dtype)
    with optimizer.sampled():
        optimizer.zero_grad()
        outputs = model(x)
        loss = nn.functional.cross_entropy(outputs, y)
        optimizer.observe(outputs, loss=loss)
        loss.backward()
    return loss.detach()


def run(model: nn.Module, optimizer: Any, steps: int, schedulers: tuple[Any, ...] = ()) -> None:
    for _ in range(steps):
        loss = forward_backward(model, optimizer)
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step(loss) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()


def loss_of(model: nn.Module, optimizer: Any) -> float:
    """The loss at the weights to evaluate with."""
    x, y = batch(next(model.parameters()).dtype)
    with torch.no_grad(), optimizer.mode(training=False):
        return nn.functional.cross_entropy(model(x), y).item()


def without_names(saved: dict[str, Any]) -> dict[str, Any]:
    groups = [{k: v for k, v in group.items() if k != "param_names"} for group in saved["param_groups"]]
    return {**saved, "param_groups": groups}


def equal(a: Any, b: Any) -> bool:
    """Whether nested dicts, lists and tensors are equal bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def test_the_table_has_every_test_of_torch() -> None:
    here = {name for name in globals() if name.startswith("test_")}
    assert len(set(TORCH_TESTS)) == len(TORCH_TESTS)
    assert sorted(here & set(TORCH_TESTS) | NOT_APPLICABLE.keys()) == sorted(TORCH_TESTS)
    assert not here & NOT_APPLICABLE.keys()
    for reason in (*NOT_APPLICABLE.values(), *ELSEWHERE.values()):
        named = [word.strip(":,;") for word in reason.split() if word.startswith("test_")]
        assert all(word in here or word == "test_kernels.py" for word in named), reason


def test_the_table_has_every_test_that_torch_names_for_an_optimizer() -> None:
    """The skips in optim_db of the installed version name tests; a new one has to be transcribed or listed."""
    named = {
        decorator.test_name
        for info in optim_db
        for decorator in info.decorators
        if getattr(decorator, "cls_name", None) == "TestOptimRenewed"
    }
    assert named - {None} <= set(TORCH_TESTS)


@every_info
def test_optim_infos_do_not_specify_global_cliquey_kwargs(info: OptimizerInfo) -> None:
    for given in info.optim_inputs_func(device="cpu"):
        assert not {"foreach", "differentiable"} & set(given.kwargs)


@every_info
def test_errors(info: OptimizerInfo) -> None:
    cases = [BY_NAME[given.desc] for given in info.optim_inputs_func("cpu")]
    for error in info.optim_error_inputs_func("cpu", torch.float32):
        given = error.optimizer_error_input
        assert error.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
        case = next((c for c in cases if c.bad), cases[0])
        model = nn.Linear(1, 1)
        if given.params is None:
            check_error(error, partial(case, model if case.layers else model.parameters(), **given.kwargs))
        elif not case.layers:
            check_error(error, partial(case, given.params, **given.kwargs))
        elif issubclass(error.error_type, TypeError):  # parameters where the model is expected
            with pytest.raises(TypeError, match=f"{info.name} takes the model, not its parameters, got Parameter"):
                case(given.params, **given.kwargs)


def check_error(error: ErrorOptimizerInput, construct: Callable[[], Any]) -> None:
    if issubclass(error.error_type, Warning):
        with pytest.warns(error.error_type, match=error.error_regex):
            construct()
    else:
        with pytest.raises(error.error_type) as caught:
            construct()
        # A learning rate with two elements has the message of any other that is not a number.
        words = "lr must be a finite number >= 0, got tensor" if "1-element" in error.error_regex else error.error_regex
        assert str(caught.value).startswith(words)


@every_input
@pytest.mark.parametrize("contiguous", [True, False])
@every_schedule
def test_forloop_goes_right_direction(case: Case, contiguous: bool, makers: tuple[Any, ...]) -> None:
    model = linear(contiguous=contiguous)
    optimizer = build(case, model)
    before = loss_of(model, optimizer)
    run(model, optimizer, 20, tuple(make(optimizer) for make in makers))
    assert loss_of(model, optimizer) < before


@every_input
@every_schedule
def test_param_group_with_lrscheduler_goes_right_direction(case: Case, makers: tuple[Any, ...]) -> None:
    model = linear()
    other = {} if case.name in ONE_LR else {"lr": 0.01}
    optimizer = groups_of(case, model, [{"params": [model.weight]}, {"params": [model.bias], **other}])
    before = loss_of(model, optimizer)
    run(model, optimizer, 20, tuple(make(optimizer) for make in makers))
    assert loss_of(model, optimizer) < before


@every_input
@pytest.mark.parametrize("dims", [0, 1, 2])
def test_tensor_lr(case: Case, dims: int) -> None:
    runs = []
    for lr in (1e-3, torch.tensor(1e-3, dtype=torch.float64).reshape([1] * dims)):
        model = linear()
        optimizer = build(case, model, lr=lr)
        run(model, optimizer, 5, (lr_scheduler.ExponentialLR(optimizer, 0.5),))
        runs.append(dict(model.named_parameters()))
    assert same(*runs)


@every_input
def test_param_groups_weight_decay(case: Case) -> None:
    model, plain = linear(), linear()
    decayed = {"weight_decay": 0.5} if case.decays else {}
    undecayed = {"weight_decay": 0.0} if case.decays else {}
    optimizer = groups_of(case, model, [{"params": [model.weight], **decayed}, {"params": [model.bias], **undecayed}])
    other = groups_of(case, plain, [{"params": [plain.weight], **undecayed}, {"params": [plain.bias], **undecayed}])
    before = loss_of(model, optimizer)
    run(model, optimizer, 20)
    run(plain, other, 20)
    assert loss_of(model, optimizer) < before
    if not case.binary:
        assert torch.equal(model.weight, plain.weight) != case.decays


# Rules whose first steps have a size that is given beside lr; lr = 0 stops them.
RATES_BESIDE_LR = {
    optim.AdaBayes: "sgd_lr, the initial variance",
    optim.KroneckerFilter: "prior_std, the initial variance",
    optim.KalmanMomentum: "weight_noise, and the initial variance",
    optim.AdaBound: "final_lr",
    optim.AMSBound: "final_lr",
}


@every_input
def test_param_groups_lr(case: Case) -> None:
    if case.binary or case.make is optim.DenseFilter:
        pytest.skip("the first step sets weights to signs, for any lr; lr of DenseFilter is its drift")
    model = nn.Sequential(linear(), linear(seed=1))
    model.forward = lambda x: model[0](x) + 1e-3 * model[1](x)  # type: ignore[method-assign]
    start = copy.deepcopy(model[1].state_dict())
    groups = [{"params": list(model[0].parameters()), "lr": 1e-3}, {"params": list(model[1].parameters())}]
    optimizer = groups_of(case, model, groups, lr=0.0 if case.make in RATES_BESIDE_LR else 1e-28)
    before = loss_of(model, optimizer)
    run(model, optimizer, 20)
    assert loss_of(model, optimizer) < before
    for name, value in model[1].named_parameters():
        torch.testing.assert_close(value, start[name], rtol=0, atol=0 if not optimizer.needs.draws else 1e-6)


@every_input
def test_step_is_noop_when_params_have_no_grad(case: Case) -> None:
    model = linear().requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    optimizer = build(case, model)
    assert optimizer.step(lambda: torch.tensor([1.0])) == 1
    assert equal(dict(model.state_dict()), dict(before))


@every_input
def test_step_is_noop_for_zero_grads(case: Case) -> None:
    """Zero gradients move no weight; rules with a prior or binary weights move them without any data."""
    if case.binary or not case.decays or "prior_std" in case.options:
        pytest.skip("weights move towards their prior, or to signs")
    model = linear()
    before = copy.deepcopy(model.state_dict())
    optimizer = build(case, model, **({"weight_decay": 0.0} if case.decays else {}))
    loss = forward_backward(model, optimizer)
    with optimizer.sampled():
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
    optimizer.step()
    assert loss > 0
    assert equal(dict(model.state_dict()), dict(before))


@every_input
def test_optimizer_can_be_printed(case: Case) -> None:
    printed = repr(build(case, linear()))
    assert printed.startswith(f"{case.make.__name__} (\nParameter Group 0\n")
    assert "    lr: " in printed


@every_input
@both
@pytest.mark.parametrize("named_copy", [True, False])
def test_state_dict_deterministic(case: Case, named: bool, named_copy: bool) -> None:
    model = linear()
    optimizer = build(case, model, named)
    run(model, optimizer, 3)
    other = copy.deepcopy(model)
    resumed = build(case, other, named_copy)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(model, optimizer, 3)
    run(other, resumed, 3)
    assert equal(dict(model.state_dict()), dict(other.state_dict()))
    assert equal(without_names(optimizer.state_dict()), without_names(resumed.state_dict()))
    resumed.param_groups.extend(resumed.param_groups)
    assert equal(
        without_names(optimizer.state_dict())["param_groups"][-1],
        without_names(resumed.state_dict())["param_groups"][-1],
    )


@every_input
def test_can_load_older_state_dict(case: Case) -> None:
    """A state without the options that torch added to its optimizers over time; here it has none of them."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(4, 2, 1, stride=2), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, CLASSES)).eval()
    x = torch.rand(ROWS, 4, 4, 4)

    def step() -> None:
        with optimizer.sampled():
            optimizer.zero_grad()
            outputs = model(x)
            loss = nn.functional.cross_entropy(outputs, torch.arange(ROWS))
            optimizer.observe(outputs, loss=loss)
            loss.backward()
        optimizer.step()

    optimizer = build(case, model)
    for _ in range(3):
        step()
    saved = copy.deepcopy(optimizer.state_dict())
    flags = INFOS[case.make].not_og_supported_flags
    assert not any(flag in group for group in saved["param_groups"] for flag in flags)
    for _ in range(2):
        optimizer.load_state_dict(saved)
        step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@every_input
@both
@pytest.mark.parametrize("named_copy", [True, False])
def test_can_load_from_to_named_state_dict(case: Case, named: bool, named_copy: bool) -> None:
    model = linear()
    optimizer = build(case, model, named)
    run(model, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    if case.options.get("precondition") == "backward":  # of two, the gradient would be preconditioned by the first
        del optimizer
    other = build(case, model, named_copy)
    other.load_state_dict(saved)
    run(model, other, 1)
    names = other.state_dict()["param_groups"][0].get("param_names")
    assert names == (NAMES if named or named_copy or case.layers else None)


@every_input
@both
def test_save_load_equality_with_weights_only(case: Case, named: bool) -> None:
    model = linear()
    optimizer = build(case, model, named)
    run(model, optimizer, 3)
    saved = optimizer.state_dict()
    file = io.BytesIO()
    torch.save(saved, file)
    for weights_only in (False, True):
        file.seek(0)
        assert equal(torch.load(file, weights_only=weights_only), saved)


@every_input
def test_a_step_that_is_a_number_is_refused(case: Case) -> None:
    model = linear()
    optimizer = build(case, model)
    run(model, optimizer, 3)
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        entry["step"] = float(entry["step"])
    before = states(optimizer)
    with pytest.raises(ValueError, match="step in the saved state of parameter 0 of group 0 must be a tensor"):
        optimizer.load_state_dict(saved)
    assert same(before, states(optimizer))


def note_entry(optimizer: Optimizer) -> None:
    optimizer.state["test"] = 1  # type: ignore[index]


def take_entry(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    saved["ran_state_dict_pre_hook"] = saved["state"].pop("test", None) == 1
    return saved


@every_input
def test_state_dict_pre_hook(case: Case) -> None:
    optimizer = build(case, linear())
    optimizer.register_state_dict_pre_hook(note_entry)
    assert optimizer.state_dict()["state"]["test"] == 1


@every_input
def test_state_dict_post_hook(case: Case) -> None:
    optimizer = build(case, linear())
    optimizer.register_state_dict_post_hook(take_entry)
    assert optimizer.state_dict()["ran_state_dict_pre_hook"] is False


@every_input
def test_state_dict_pre_post_hook(case: Case) -> None:
    optimizer = build(case, linear())
    optimizer.register_state_dict_pre_hook(note_entry)
    optimizer.register_state_dict_post_hook(take_entry)
    saved = optimizer.state_dict()
    assert "test" not in saved["state"]
    assert saved["ran_state_dict_pre_hook"] is True


def set_lr(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["lr"] = 0.002


def replace_lr(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    other = copy.deepcopy(saved)
    other["param_groups"][0]["lr"] = 0.00321
    return other


def note_lr(optimizer: Optimizer) -> None:
    optimizer.state["replaced"] = optimizer.param_groups[0]["lr"] == 0.00321  # type: ignore[index]
    optimizer.state["ran"] = True  # type: ignore[index]


@every_input
def test_load_state_dict_pre_hook_and_prepend(case: Case) -> None:
    optimizer = build(case, linear())
    saved = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(set_lr)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.002
    optimizer.register_load_state_dict_pre_hook(replace_lr, prepend=True)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.002


@every_input
def test_load_state_dict_post_hook(case: Case) -> None:
    optimizer = build(case, linear())
    optimizer.register_load_state_dict_post_hook(note_lr)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state["replaced"] is False
    assert optimizer.state["ran"] is True


@every_input
def test_load_state_dict_pre_post_hook(case: Case) -> None:
    model = linear()
    optimizer = build(case, model)
    run(model, optimizer, 1)
    optimizer.register_load_state_dict_pre_hook(replace_lr)
    optimizer.register_load_state_dict_post_hook(note_lr)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state["replaced"] is True
    assert optimizer.state["ran"] is True
    run(model, optimizer, 1)  # with entries in the state that are not a parameter's


@every_input
def test_step_post_hook(case: Case) -> None:
    optimizer = build(case, linear().requires_grad_(False))
    seen: list[Any] = []
    handle = optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(o))
    optimizer.step()
    optimizer.step()
    handle.remove()
    optimizer.step()
    assert seen == [optimizer, optimizer]


@every_input
def test_step_pre_hook(case: Case) -> None:
    optimizer = build(case, linear().requires_grad_(False))
    seen: list[Any] = []
    handle = optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(o))
    optimizer.step()
    optimizer.step()
    handle.remove()
    optimizer.step()
    assert seen == [optimizer, optimizer]


@every_input
def test_step_all_hooks(case: Case) -> None:
    model = linear().requires_grad_(False)
    optimizers = [build(case, model), SGD(model.parameters())]
    seen: list[str] = []

    def note(word: str) -> Callable[..., None]:
        return lambda o, args, kwargs: seen.append(word)

    handles = [
        register_optimizer_step_pre_hook(note("global before")),
        register_optimizer_step_post_hook(note("global after")),
        *(o.register_step_pre_hook(note("before")) for o in optimizers),
        *(o.register_step_post_hook(note("after")) for o in optimizers),
    ]
    try:
        for optimizer in (*optimizers, optimizers[0]):
            optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    optimizers[0].step()
    assert seen == ["global before", "before", "after", "global after"] * 3


@every_input
def test_hooks_of_a_copy_are_its_own(case: Case) -> None:
    """As in torch: pickling and deepcopy drop hooks, and the original keeps them."""
    model = linear().requires_grad_(False)
    optimizer = build(case, model)
    seen: list[Any] = []
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(o))
    twin = copy.deepcopy(optimizer)
    twin.step()
    assert seen == []
    optimizer.step()
    assert seen == [optimizer]


@every_input
def test_deepcopy_copies_all_public_attrs(case: Case) -> None:
    model = linear()
    optimizer = build(case, model)
    run(model, optimizer, 3)

    def public(o: Any) -> set[str]:
        return {name for name in vars(o) if not name.startswith("_")}

    assert public(optimizer) == public(copy.deepcopy(optimizer))


@every_input
def test_step_returns_what_the_closure_returns(case: Case) -> None:
    model = linear()
    optimizer = build(case, model)
    x, y = batch()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        outputs = model(x)
        loss = nn.functional.cross_entropy(outputs, y)
        optimizer.observe(outputs, loss=loss)
        loss.backward()
        return loss

    for _ in range(2):
        loss = optimizer.step(closure)
        assert isinstance(loss, torch.Tensor)
        assert loss.shape == ()


@every_input
def test_non_empty_state(case: Case) -> None:
    model = linear()
    optimizer = build(case, model)
    run(model, optimizer, 1)
    assert optimizer.state
    assert all(len(entry) > 0 for entry in optimizer.state.values())


@every_input
def test_fused_error_on_params_on_meta(case: Case) -> None:
    """Parameters on the meta device have no values; torch's for-loops step them, and so do rules of gradients."""
    model = linear().to("meta")
    if case.layers or (optimizer := build(case, model)).needs != Needs():
        pytest.skip("reads values: of layers, of draws or of outputs")
    for p in model.parameters():
        p.grad = torch.rand_like(p)
    optimizer.step()
    tensors = [value for entry in optimizer.state.values() for name, value in entry.items() if value.shape]
    assert {tensor.device.type for tensor in tensors if tensor.shape != (2,)} <= {"meta"}


@every_input
def test_set_default_dtype(case: Case) -> None:
    runs = []
    for default in (torch.float32, torch.float64, torch.float16):
        model = linear(torch.float64)
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            optimizer = build(case, model)
            run(model, optimizer, 3)
        finally:
            torch.set_default_dtype(before)
        assert {e["step"].dtype for e in optimizer.state.values() if "step" in e} == {torch.float32}
        runs.append(dict(model.named_parameters()))
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2])


@every_input
def test_mixed_dtypes(case: Case) -> None:
    """Parameters of several dtypes in one group take the steps that they take alone."""
    if case.layers:
        pytest.skip("layers of one model; contract/test_parameters.py has models of several dtypes")
    if build(case, linear()).needs != Needs():
        pytest.skip("gradients at sampled weights, or more than gradients")
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

    def params() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        found = [nn.Parameter(torch.rand(2, 3, generator=generator).to(dtype)) for dtype in dtypes]
        for p in found:
            p.grad = torch.rand(2, 3, generator=generator).to(p.dtype)
        return found

    together, alone = params(), params()
    optimizers = [case(together), *(case([p]) for p in alone)]
    for optimizer in optimizers:
        for _ in range(7):
            optimizer.step()
    for p, q in zip(together, alone):
        assert torch.equal(p, q)


@every_input
def test_empty_parameters(case: Case) -> None:
    """A parameter without elements, and one without a gradient, do not disturb the others."""
    if case.layers:
        pytest.skip("takes the model")
    runs = []
    for more in ([], [nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.ones(2))]):
        model = linear()
        optimizer = case([*model.parameters(), *more])
        for p in more[:1]:
            p.grad = torch.empty_like(p)
        x, y = batch()
        for _ in range(3):
            with optimizer.sampled():
                outputs = model(x) + sum(p.sum() for p in more[:1])
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(outputs, y)
                optimizer.observe(outputs, loss=loss)
                loss.backward()
            optimizer.step()
        runs.append(dict(model.named_parameters()))
    if not optimizer.needs.draws and not optimizer.needs.loss:  # noise is a function of positions
        assert same(*runs)
    assert bool((more[1] == 1).all())


@every_input
def test_complex_parameters_are_refused(case: Case) -> None:
    model = nn.Linear(INPUTS, CLASSES, dtype=torch.complex64)
    with pytest.raises(
        ValueError, match=r"is torch\.complex64: complex weights are not supported, keep a real parameter"
    ):
        build(case, model)


@every_input
def test_sparse_gradients_are_refused(case: Case) -> None:
    if case.layers:
        pytest.skip("contract/test_refusals.py has sparse embeddings")
    model = linear()
    optimizer = build(case, model)
    forward_backward(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    model.weight.grad = model.weight.grad.to_sparse()
    with pytest.raises(RuntimeError, match=r"needs dense gradients, but that of parameter 0 .* is sparse"):
        optimizer.step()
    assert equal(dict(model.state_dict()), dict(before))


@every_input
@pytest.mark.parametrize("flag", ["foreach", "capturable", "differentiable", "maximize"])
def test_flags_of_torch_are_refused(case: Case, flag: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{flag}'"):
        build(case, linear(), **{flag: True})


@every_input
def test_grad_scaler_skips_a_step(case: Case) -> None:
    """A gradient that overflows changes nothing, and the next step is that of the unscaled loss."""
    model, plain = linear(), linear()
    optimizer, other = build(case, model), build(case, plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    x, y = batch()
    for overflow in (True, False, False):
        with optimizer.sampled():
            optimizer.zero_grad()
            outputs = model(x)
            loss = nn.functional.cross_entropy(outputs, y)
            optimizer.observe(outputs, loss=loss)
            scaler.scale(loss).backward()
        if overflow:
            model.bias.grad[0] = float("inf")
        before = {**copy.deepcopy(dict(model.state_dict())), **states(optimizer)}
        scaler.step(optimizer)
        scaler.update()
        assert equal({**dict(model.state_dict()), **states(optimizer)}, before) == overflow
    assert scaler.get_scale() == 2.0**9
    if not optimizer.needs.draws and not optimizer.needs.outputs:
        run(plain, other, 2)
        for p, q in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@every_input
def test_profiler_names_a_step(case: Case) -> None:
    model = linear()
    optimizer = build(case, model)
    run(model, optimizer, 1)
    forward_backward(model, optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
        optimizer.zero_grad()
    names = [event.name for event in profile.events() or []]
    assert names.count(f"Optimizer.step#{case.make.__name__}.step") == 1
    assert names.count(f"Optimizer.zero_grad#{case.make.__name__}.zero_grad") == 1


@every_input
def test_load_state_dict_with_wrong_sizes_is_refused(case: Case) -> None:
    model = linear()
    optimizer = build(case, model)
    run(model, optimizer, 1)
    saved = optimizer.state_dict()
    with pytest.raises(ValueError, match="parameters"):
        build(case, nn.Linear(INPUTS, CLASSES, bias=False)).load_state_dict(saved)
    short = {**saved, "param_groups": []}
    with pytest.raises(ValueError, match="param"):
        optimizer.load_state_dict(short)


@every_input
def test_a_state_of_a_compiled_model_loads_into_the_plain_one(case: Case) -> None:
    """torch.compile returns an OptimizedModule, whose parameters are those of the model under other names."""
    model = linear()
    optimizer = build(case, model, named=True)
    run(model, optimizer, 2)
    compiled: Any = torch.compile(copy.deepcopy(model), backend="eager")
    other = build(case, compiled, named=True)
    other.load_state_dict(optimizer.state_dict())
    back = build(case, linear(), named=True)
    back.load_state_dict(other.state_dict())
    assert same(states(optimizer), states(back))
