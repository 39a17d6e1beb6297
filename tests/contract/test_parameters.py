"""Parameters, named parameters and groups of either are the same to every optimizer; models come first."""

from __future__ import annotations

import copy
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
def test_groups_that_another_optimizer_has_are_options_alone(case: Case) -> None:
    """A second optimizer trains as one of parameters, and leaves the first one's groups as they are."""
    runs = []
    for reused in (False, True):
        model = small_model(width=30)
        form = [{"params": list(model.named_parameters())}]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if reused:
                other = copy.deepcopy(model)
                first = built(case, other, [{"params": list(other.named_parameters())}])
                train(other, first, range(2))
                form = [{**group, "params": list(model.parameters())} for group in first.param_groups]
                notes = [dict(group) for group in form]
            optimizer = built(case, model, form)
            if reused:
                assert [dict(group) for group in form] == notes
            saved = optimizer.state_dict()
            built(case, model, [{"params": list(model.named_parameters())}]).load_state_dict(saved)
            train(model, optimizer, range(2))
        runs.append((weights(model), states(optimizer)))
    assert same(runs[0][0], runs[1][0])
    assert same(runs[0][1], runs[1][1])


def test_a_prior_stays_with_the_optimizer_that_was_given_it() -> None:
    model = nn.Linear(4, 3).double()
    options: dict[str, Any] = {"num_data": 100, "prior_precision": 50.0}
    groups = [{"params": list(model.named_parameters())}]
    first = optim.IVON(groups, prior=optim.IVON(model.named_parameters(), num_data=100).posterior(model), **options)
    second, fresh = optim.IVON(groups, **options), optim.IVON(model.named_parameters(), **options)
    variances = [one.posterior(model).variance()["weight"] for one in (first, second, fresh)]
    assert torch.equal(variances[1], variances[2])
    assert not torch.allclose(variances[0], variances[1])


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


@every_case
def test_two_parameters_with_one_memory_are_refused(case: Case) -> None:
    """As after `a.data = b.data`: tensors that are updated together would overwrite each other."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ValueError, match="share memory, so the update of one would undo that of the other"):
        built(case, model, model.parameters())
    optimizer = built(case, model, [model[0].weight])
    with pytest.raises(ValueError, match=r"parameter .* and parameter .* share memory"):
        optimizer.add_param_group({"params": [model[1].weight]})
    assert [group["params"] for group in optimizer.param_groups] == [[model[0].weight]]


def test_views_of_one_memory_without_a_common_element_are_parameters() -> None:
    memory = torch.arange(24.0, dtype=torch.float64)
    parts = [memory[:4], memory[4:8].view(2, 2), memory[8::2], memory[9::2], memory[8:8], memory[4:4]]
    params = [nn.Parameter(part) for part in parts]
    alone = [nn.Parameter(part.clone()) for part in parts]
    for some in (params, alone):
        optimizer = optim.AdaBayesFP(some)
        for p in some:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, alone))
    with pytest.raises(ValueError, match="share memory"):
        optim.AdaBayesFP([nn.Parameter(memory[8::2]), nn.Parameter(memory[9:11])])


@pytest.mark.parametrize("first", [0, 2])
def test_layers_that_are_added_late_have_a_fisher_matrix_at_once(first: int) -> None:
    """They were trained as parameters without one until the next update, if they came after the others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = optim.NaturalGradient(model, lr=1e-3, params=model[first].parameters(), update_every=10)
    for index in range(26):
        if index == 24:
            optimizer.add_param_group({"params": list(model[2 - first].parameters())})
        outputs = model(torch.randn(16, 4).double())
        optimizer.zero_grad()
        optimizer.observe(outputs)
        torch.nn.functional.cross_entropy(outputs, torch.randint(3, (16,))).backward()
        optimizer.step()
    assert int(optimizer.state[model[0].weight]["clock"][1]) == 25
    assert all("moment" not in entry for entry in optimizer.state.values())
