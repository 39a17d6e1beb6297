"""Parameters, named parameters and groups of either are the same to every optimizer; models come first."""

from __future__ import annotations

import gc
import inspect
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from bayesgrad import optim, samplers
from cases import Case, every_case, same, small_model, states, train, weights

FORMS = {
    "parameters": lambda model: model.parameters(),
    "named parameters": lambda model: model.named_parameters(),
    "a list of names": lambda model: list(model.named_parameters()),
    "a group": lambda model: [{"params": list(model.parameters())}],
    "a group of names": lambda model: [{"params": model.named_parameters()}],
}


def built(case: Case, model: nn.Module, params: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return case(model, params=params) if case.layers else case(params)


@every_case
def test_every_form_of_parameters_gives_the_same_run(case: Case) -> None:
    runs = []
    for form in FORMS.values():
        model = small_model(width=30)
        optimizer = built(case, model, form(model))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(model, optimizer, range(2))
        runs.append((weights(model), states(optimizer)))
    for other in runs[1:]:
        assert same(runs[0][0], other[0])
        assert same(runs[0][1], other[1])


@every_case
@pytest.mark.parametrize("named", [False, True], ids=["parameters", "names"])
def test_groups_can_be_added_in_every_form(case: Case, named: bool) -> None:
    model = small_model(width=30)
    every = list(model.named_parameters()) if named else list(model.parameters())
    optimizer = built(case, model, every[:2])
    optimizer.add_param_group({"params": every[2:]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, optimizer, range(2))
    assert [p for group in optimizer.param_groups for p in group["params"]] == list(model.parameters())


@every_case
def test_an_optimizer_that_is_deleted_is_freed_at_once_with_its_hooks(case: Case) -> None:
    """Not by the garbage collector: it would keep memory, and remove hooks in the middle of a forward pass."""
    model = small_model(width=30)
    optimizer = built(case, model, None if case.layers else model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, optimizer, range(2))
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    finally:
        gc.enable()


def test_a_model_is_the_first_argument_of_every_optimizer_that_takes_one() -> None:
    for make in (*(getattr(optim, name) for name in optim.__all__), samplers.Langevin, samplers.SNGD):
        first, second, *_ = list(inspect.signature(make).parameters)
        assert first == ("model" if make.takes_model else "params")
        assert second == "lr"
        if make.takes_model:
            with pytest.raises(TypeError, match=f"{make.__name__} takes the model, not its parameters, got list"):
                make(
                    [nn.Parameter(torch.ones(1))],
                    **{name: 1 for name in ("num_data", "batch_size") if required(make, name)},
                )


def required(make: type, name: str) -> bool:
    """Whether an argument has no default value."""
    parameter = inspect.signature(make).parameters.get(name)
    return parameter is not None and parameter.default is parameter.empty
