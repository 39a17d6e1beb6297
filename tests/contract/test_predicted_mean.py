"""Optimizers with a predicted mean: posterior_mean() sets the weights and restores them bit for bit."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from bayesgrad.curvature import SquaredGradient
from bayesgrad.optimizer.predicted_mean import PredictedMean
from bayesgrad.rule import NaturalGradient
from bayesgrad.transition import OrnsteinUhlenbeck
from cases import same, weights


class Ahead(PredictedMean):
    """An optimizer whose posterior means are the weights plus one; scalars have none."""

    curvature = SquaredGradient()
    transition = OrnsteinUhlenbeck()
    rule = NaturalGradient()

    def __init__(self, params, lr: float = 0.1) -> None:
        super().__init__(params, dict(lr=lr, batch_size=4))

    def dynamics(self, group, step: int) -> dict[str, float]:
        return {"process": 0.01, "stationary": 1.0}

    def _posterior_means(self) -> dict[Tensor, Tensor]:
        every = [p for group in self.param_groups for p in group["params"]]
        return {p: p.detach().double() + 1 for p in every if p.dim()}


def built(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Ahead]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(dtype)
    model.scale = nn.Parameter(torch.tensor(0.3, dtype=dtype))
    with torch.no_grad():
        model.bias[0] = -0.0
        model.bias[1] = float("nan")
    return model, Ahead(model.parameters())


def bits(model: nn.Module) -> dict[str, Tensor]:
    kinds = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}
    return {name: p.view(kinds[p.dtype]) for name, p in weights(model).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_shows_the_posterior_mean_and_puts_weights_back_bit_for_bit(dtype: torch.dtype) -> None:
    model, optimizer = built(dtype)
    before, plain, pointer = bits(model), weights(model), model.weight.data_ptr()
    with optimizer.posterior_mean():
        expected = (plain["weight"].double() + 1).to(dtype)
        assert torch.equal(model.weight, expected)
        assert torch.equal(model.scale, plain["scale"])
    assert same(before, bits(model))
    assert model.weight.data_ptr() == pointer
    with pytest.raises(ZeroDivisionError), optimizer.posterior_mean():
        raise ZeroDivisionError
    assert same(before, bits(model))
    with optimizer.posterior_mean():  # an exception has not left it open
        pass


def test_what_is_about_the_weights_outside_is_refused_inside() -> None:
    model, optimizer = built()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    saved, before = optimizer.state_dict(), bits(model)
    attempts = {
        r"step\(\)": optimizer.step,
        r"state_dict\(\)": optimizer.state_dict,
        r"load_state_dict\(\)": lambda: optimizer.load_state_dict(saved),
        "a copy": lambda: copy.deepcopy(optimizer),
        "a copy needs": lambda: pickle.dumps(optimizer),
    }
    for what, attempt in attempts.items():
        with optimizer.posterior_mean():
            with pytest.raises(RuntimeError, match=f"^{what}.* outside of posterior_mean.*leave the context first.$"):
                attempt()
            with pytest.raises(RuntimeError, match=r"posterior_mean\(\) is already active"), optimizer.posterior_mean():
                pass
        assert same(before, bits(model))
        attempt()
        before = bits(model)


def test_posteriors_are_around_the_posterior_mean() -> None:
    model, optimizer = built()
    expected = model.weight.detach() + 1
    assert torch.equal(optimizer.posterior(model).mean["weight"], expected)
    with optimizer.posterior_mean():
        assert torch.equal(optimizer.posterior(model).mean["weight"], expected)
