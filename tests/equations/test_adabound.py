"""AdaBound and AMSBound against the authors' package."""

from __future__ import annotations

import warnings

import adabound
import pytest
import torch

from bayesgrad.optim import AdaBound, AMSBound


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("ours", "amsbound"), [(AdaBound, False), (AMSBound, True)])
def test_equals_the_authors_package(ours: type, amsbound: bool, weight_decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(30, dtype=torch.float64, generator=generator)
    scales = torch.logspace(-3, 3, 30, dtype=torch.float64)
    weights = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    options = dict(lr=1e-2, final_lr=0.3, gamma=1e-2, weight_decay=weight_decay)
    optimizers = [
        ours([weights[0]], **options),
        adabound.AdaBound([weights[1]], amsbound=amsbound, **options),
    ]
    for step in range(200):
        noise = torch.randn(30, dtype=torch.float64, generator=generator)
        for weight, optimizer in zip(weights, optimizers):
            optimizer.param_groups[0]["lr"] = 1e-2 * (0.1 if step >= 100 else 1.0)
            weight.grad = scales * (noise + weight.detach())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the package calls deprecated torch overloads
                optimizer.step()
        torch.testing.assert_close(weights[0], weights[1], rtol=1e-10, atol=1e-12)


def test_holds_no_posterior() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match="AdaBound has no posterior"):
        AdaBound(model.parameters()).posterior(model)


def test_states_of_the_two_are_told_apart() -> None:
    """A state of AMSBound has one more slot; a state that does not fit raises and changes nothing."""

    def trained(make: type, gradient: float) -> tuple[torch.optim.Optimizer, torch.nn.Parameter]:
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = make([weight])
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
        return optimizer, weight

    for make, other, message in (
        (AdaBound, AMSBound, r"the saved state is that of AMSBound, but this optimizer is AdaBound"),
        (AMSBound, AdaBound, "the saved state is that of AdaBound, but this optimizer is AMSBound"),
    ):
        (optimizer, weight), (given, _) = trained(make, 1.0), trained(other, 3.0)
        before = {name: value.clone() for name, value in optimizer.state[weight].items()}
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(given.state_dict())
        assert all(torch.equal(optimizer.state[weight][name], value) for name, value in before.items())
        optimizer.load_state_dict(trained(make, 3.0)[0].state_dict())
        assert not torch.equal(optimizer.state[weight]["moment"], before["moment"])
