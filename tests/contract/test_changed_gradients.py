"""Gradients that a loop changes between `backward()` and `step()`: by a factor, in some layers, or in other ways."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from bayesgrad import optim

LAYERED = {
    "FOOF": {},
    "KFAC": {"seed": 0},
    "KroneckerFilterFP": {"batch_size": 8, "seed": 0},
    "NaturalGradient": {"update_every": 3, "seed": 0},
    "OGN": {"num_data": 100},
}


@pytest.mark.parametrize("factor", [0.1, None])
@pytest.mark.parametrize("name", LAYERED)
def test_a_change_of_one_layer_leaves_the_others_as_they_are(name: str, factor: float | None) -> None:
    """In steps in which values are not compared. A factor of 1 for all of them shows every gradient as changed.

    Batches have fewer rows than layers have inputs: directions come from rows where gradients are untouched.
    """
    results = []
    for every in (False, True):
        model, *_ = network(40, 50, 3)
        optimizer = getattr(optim, name)(model, **LAYERED[name])
        for index in range(7):
            x, y = torch.randn(8, 40).double(), torch.randint(0, 3, (8,))
            optimizer.zero_grad()
            loss = cross_entropy(outputs := model(x), y)
            optimizer.observe(outputs, loss=loss)
            loss.backward()
            for p in model[2].parameters() if index > 3 else ():
                p.grad.mul_(factor) if factor else p.grad.add_(p.detach())
            for p in model.parameters() if every else ():
                p.grad.mul_(1.0)
            optimizer.step()
        results.append(dict(model.named_parameters()))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-8)


def network(inputs: int = 6, width: int = 5, classes: int = 3) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, classes)).double()
    return model, torch.randn(8, inputs).double(), torch.randint(0, 3, (8,))


@pytest.mark.parametrize("fisher", ["empirical", "centered"])
def test_moments_of_errors_have_the_factor_of_their_layer(fisher: str) -> None:
    moments = []
    for factor in (1.0, 0.1):
        model, x, y = network()
        optimizer = optim.KroneckerFilterFP(model, batch_size=8, fisher=fisher)
        cross_entropy(model(x), y).backward()
        for p in model[2].parameters():
            p.grad.mul_(factor)
        optimizer.step()
        moments.append([optimizer.state[model[i].weight]["error_moment"] for i in (0, 2)])
    torch.testing.assert_close(moments[1][0], moments[0][0], rtol=1e-12, atol=0)
    torch.testing.assert_close(moments[1][1], 0.01 * moments[0][1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("name", ["FOOF", "KFAC"])
def test_the_norm_of_a_step_has_the_factor_of_each_layer(name: str, layer: int) -> None:
    """With precondition="backward", d·g is a sum over layers, each times the square of its own factor."""
    limit, factor, lr = 0.05, 0.01, 0.5
    model, *_ = network(20, 30, 3)
    optimizer = getattr(optim, name)(model, lr, precondition="backward", max_norm=limit, **LAYERED[name])
    for index in range(3):
        x, y = 2 * torch.randn(4, 20).double(), torch.randint(0, 3, (4,))
        optimizer.zero_grad()
        loss = cross_entropy(outputs := model(x), y)
        optimizer.observe(outputs, loss=loss)
        gradients = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
        loss.backward()
        for p in model[layer].parameters():
            p.grad.mul_(factor)
        own = [factor if p in set(model[layer].parameters()) else 1.0 for p in model.parameters()]
        directions = [p.grad.clone() for p in model.parameters()]
        square = torch.stack([f * (d * g).sum() for f, d, g in zip(own, directions, gradients)]).sum()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        for p, old, d in zip(model.parameters(), before, directions if index else ()):  # the first has no factors yet
            torch.testing.assert_close(old - p.detach(), lr * limit / square.sqrt() * d, rtol=1e-9, atol=1e-12)


def test_layers_without_gradients_have_the_factor_of_the_others() -> None:
    """The inputs of the last layer are zero, and so is the gradient of its weights; errors are not."""
    model, x, y = network()
    model[2].bias = None
    with torch.no_grad():
        model[0].weight.zero_(), model[0].bias.zero_()
        model[2].weight.normal_()
    moments = []
    for scale in (1.0, 1024.0):
        optimizer = optim.KroneckerFilterFP(model, batch_size=8, fisher="empirical", lr=0.0)
        optimizer.zero_grad()
        (scale * cross_entropy(model(x), y)).backward()
        for p in model.parameters():
            p.grad.div_(scale)
        optimizer.step()
        moments.append(optimizer.state[model[2].weight]["error_moment"])
    assert moments[0].abs().sum() > 0
    torch.testing.assert_close(moments[1], moments[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["OGN", "VOGN", "KroneckerFilterFP", "KroneckerFilter"])
@pytest.mark.parametrize("change", ["term", "values"])
def test_changes_that_are_no_factor_are_named_once(name: str, change: str) -> None:
    model, x, y = network()
    filters = {"batch_size": 8, "fisher": "empirical"}
    optimizer = getattr(optim, name)(model, **({"num_data": 100} if "OG" in name else filters))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(4):
            optimizer.zero_grad()
            with optimizer.sampled():
                cross_entropy(model(x), y).backward()
            if change == "term":
                for p in model.parameters():
                    p.grad.add_(p.detach(), alpha=0.2)
            else:
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
    assert len([one for one in found if str(one.message).startswith("gradients were changed between")]) == 1


def test_factors_and_penalties_with_a_pass_of_their_own_are_not_named() -> None:
    model, x, y = network()
    optimizer = optim.OGN(model, num_data=100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            torch.stack([0.1 * p.square().sum() for p in model.parameters()]).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()


@pytest.mark.parametrize("factor", [0.01, 0.0])
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("name", ["FOOF", "KFAC"])
def test_the_bound_of_preconditioned_gradients_has_the_factor_of_each_layer(
    name: str, layer: int, factor: float
) -> None:
    """max_norm / sqrt(sum over layers of c^2 d·g), with `.grad` = c d for precondition="backward"."""
    model, x, y = network()
    optimizer = getattr(optim, name)(model, lr=0.1, max_norm=1e-3, precondition="backward", **LAYERED[name])
    for _ in range(2):
        optimizer.zero_grad()
        loss = cross_entropy(outputs := model(x), y)
        optimizer.observe(outputs)
        loss.backward()
        optimizer.step()
    gradients = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    optimizer.zero_grad()
    loss = cross_entropy(outputs := model(x), y)
    optimizer.observe(outputs)
    loss.backward()
    for p in model[layer].parameters():
        p.grad.mul_(factor)
    changed = {id(p) for p in model[layer].parameters()}
    products = [
        (p.grad * g).sum() * (factor if id(p) in changed else 1.0) for p, g in zip(model.parameters(), gradients)
    ]
    before, directions = [p.detach().clone() for p in model.parameters()], [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    bound = 1e-3 / torch.stack(products).sum().sqrt()
    assert bound < 1
    for p, old, direction in zip(model.parameters(), before, directions):
        torch.testing.assert_close(p.detach(), old - 0.1 * bound * direction, rtol=1e-9, atol=1e-12)
