"""Arguments: named in every signature, and mistakes of users that would otherwise go unnoticed."""

from __future__ import annotations

import copy
import importlib
import inspect
import pkgutil

import pytest
import torch
from torch import nn

import bayesgrad
from bayesgrad import optim, samplers
from bayesgrad.optimizer import BeliefOptimizer
from cases import CASES, Case, batch

PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (
        bayesgrad,
        *(importlib.import_module(f"bayesgrad.{found.name}") for found in pkgutil.iter_modules(bayesgrad.__path__)),
    )
    for name in getattr(module, "__all__", ())
}
CLASSES = {case.make: case for case in reversed(CASES)}  # the first row of each class
OF_PARAMETERS = [case for case in CLASSES.values() if not case.layers]


def test_every_public_signature_names_its_arguments() -> None:
    """Factors of a graph take any number of nodes, and integrations the options of an optimizer."""
    seen = 0
    for name, thing in PUBLIC.items():
        if not callable(thing) or getattr(thing, "__module__", "").startswith("typing"):
            continue
        if inspect.isclass(thing) and issubclass(thing, Exception):
            continue
        try:
            parameters = inspect.signature(thing).parameters.values()
        except ValueError:  # an alias of a type
            continue
        seen += 1
        odd = [p.name for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        assert odd in ([], ["options"] if "integrations" in name else ["nodes"]), name
    assert seen > 100


@pytest.mark.parametrize("make", CLASSES, ids=lambda make: make.__name__)
def test_the_signature_of_an_optimizer_has_its_options(make: type[BeliefOptimizer]) -> None:
    parameters = inspect.signature(make).parameters
    assert next(iter(parameters)) == ("model" if make.takes_model else "params")
    assert {"params", "lr", "nonfinite", "fused"} <= set(parameters)
    optimizer = CLASSES[make].of(nn.Linear(40, 3))
    internal = {"params", "param_names", "base_lr", "last_lr", "unit_lr", "draws", "rule", "train_mode"}
    internal |= {"last_loss", "loss_scale", "curvature"}  # what samplers have measured
    fixed = {"weight_decay", "kl_weight", "limit_step", "damping_noise"}  # constants of some rules
    options = set(optimizer.param_groups[0]) - internal - fixed
    assert options <= set(parameters), "an option that cannot be given"
    assert all(p.annotation is not inspect.Parameter.empty for p in parameters.values())


def test_every_optimizer_and_sampler_is_in_the_table() -> None:
    every = {thing for module in (optim, samplers) for thing in vars(module).values() if inspect.isclass(thing)}
    assert {c for c in every if issubclass(c, BeliefOptimizer)} - set(CLASSES) <= {optim.DenseFilter}


@pytest.mark.parametrize("case", OF_PARAMETERS, ids=lambda case: case.name)
def test_a_model_stands_for_its_named_parameters(case: Case) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    other = copy.deepcopy(model)
    (group,) = case(model).param_groups
    (named,) = case(other.named_parameters()).param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in model.parameters()]
    assert group["param_names"] == named["param_names"]
    for p, q in zip(group["params"], named["params"]):
        assert torch.equal(p, q)
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        case([nn.Linear(4, 3)])


COUNTED = [case for case in CLASSES.values() if "num_data" in case.options]


@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.name)
def test_fewer_data_than_a_batch_has_examples_warns_once(case: Case) -> None:
    model = nn.Linear(40, 3)
    x, y = batch(0)
    batch_size = {"batch_size": 1} if "batch_size" in case.options else {}
    for num_data in (1, 31, 32):
        optimizer = case.of(model, num_data=num_data, lr=1e-4, **batch_size)
        for index in range(2):
            with optimizer.sampled():
                outputs = model(x)
                loss = nn.functional.cross_entropy(outputs, y)
                if num_data < 32 and not index:
                    with pytest.warns(
                        UserWarning, match=f"num_data={num_data} is less than the 32 examples of a batch"
                    ):
                        optimizer.observe(outputs, loss=loss)
                else:
                    optimizer.observe(outputs, loss=loss)


@pytest.mark.parametrize(
    "make", [optim.STE, lambda params: optim.BayesBiNN(params, num_data=9)], ids=["STE", "BayesBiNN"]
)
def test_biases_among_binary_weights_warn(make) -> None:
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3))
    with pytest.warns(UserWarning, match=r"2 of them have fewer than two dimensions.*see parameter '1.weight'"):
        make(model.named_parameters())
    for quiet in (nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(4, 3, bias=False))):
        make(quiet.parameters())
    model[1].requires_grad_(False)
    make(model.parameters())
