"""Numbers at the ends of the range of a dtype: finite gradients leave finite weights and beliefs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bayesgrad import optim
from bayesgrad.directions import dense
from bayesgrad.preconditioners.stability import limit_norm
from bayesgrad.rules import Forget

LARGEST = torch.finfo(torch.float32).max


def pushed(optimizer: Any, p: Tensor, gradients: list[float], rates: tuple[float, ...] = ()) -> None:
    for i, gradient in enumerate(gradients):
        if rates:
            optimizer.param_groups[0]["lr"] = rates[i]
        optimizer.zero_grad()
        with optimizer.sampled():
            p.grad = torch.full_like(p, gradient)
        optimizer.step()


def finite(optimizer: Any, p: Tensor) -> bool:
    values = [p.detach(), *optimizer.state[p].values()]
    return all(bool(torch.isfinite(value).all()) for value in values)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (optim.AdaBayes, {"batch_size": 32, "fisher": "centered"}),
        (optim.KalmanMomentum, {"batch_size": 32, "fisher": "centered", "prior_std": 1.0}),
    ],
    ids=["AdaBayes", "KalmanMomentum"],
)
def test_centred_gradients_of_opposite_sign_at_lr_zero(make: Any, options: dict[str, Any]) -> None:
    """Their difference was infinite, and multiplied by an information of zero."""
    p = nn.Parameter(torch.zeros(2))
    optimizer = make([p], lr=1e-3, **options)
    pushed(optimizer, p, [LARGEST, -LARGEST], (1e-3, 0.0))
    assert finite(optimizer, p)


def test_averages_of_the_largest_gradient() -> None:
    """The weights of an average add up to one plus a rounding error."""
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = optim.AdaBayes([p], batch_size=32)
    pushed(optimizer, p, [torch.finfo(torch.float64).max] * 3)
    assert finite(optimizer, p)


def test_latent_weights_of_ste() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = optim.STE([p], lr=1.0)
    pushed(optimizer, p, [LARGEST] * 10)
    assert finite(optimizer, p)


@pytest.mark.parametrize("make", [optim.Newton, optim.VON])
@pytest.mark.parametrize("hessian", [1e-30, -LARGEST / 2, LARGEST / 2])
def test_strong_gradients_and_any_hessian(make: Any, hessian: float) -> None:
    p = nn.Parameter(torch.zeros(2))
    optimizer = make([p], lr=1.0, num_data=10, prior_precision=1e-30, betas=(0.0, 0.0), hess_init=1e-20)
    for _ in range(3):
        optimizer.zero_grad()
        with optimizer.sampled():
            d = p - p.detach()
            loss = (1e30 * d + hessian * d * d / 2).sum()
            optimizer.observe(loss=loss)
            loss.backward()
        optimizer.step()
    assert finite(optimizer, p)
    assert bool((optimizer.state[p]["variance"] > 0).all())


def test_a_retraction_of_minus_infinity() -> None:
    memory = {"variance": torch.ones(1)}
    Forget(retract=True).merge(memory, torch.tensor([-math.inf]), {"take": 0.5})
    assert 0 < memory["variance"].item() < 1e-30


@pytest.mark.parametrize("make", [optim.IVON, optim.OGN], ids=["IVON", "OGN"])
def test_weights_without_gradients_and_without_a_prior(make: Any) -> None:
    """The variance of a weight that never had a gradient doubled in every step, until it was infinite: 0 inf = nan."""
    model = nn.Linear(1, 1)
    options = {"num_data": 10, "prior_precision": 0.0, "betas": (0.9, 0.5)}
    optimizer = make(model if make is optim.OGN else model.parameters(), **options)
    for _ in range(300):
        with optimizer.sampled():
            optimizer.zero_grad()
            (0 * model(torch.ones(1, 1)).sum()).backward()
        optimizer.step()
    assert all(finite(optimizer, p) for p in model.parameters())


def test_a_large_gradient_of_sampled_labels_does_not_stop_a_weight() -> None:
    """An average of squares that was infinite once stayed infinite, and every later step was zero."""
    p = nn.Parameter(torch.zeros(1))
    optimizer = optim.AdaBayesFP([p], lr=0.1, fisher="sampled", betas=(0.0, 0.0))
    for size in (1e25, 1.0):
        before = p.detach().clone()
        optimizer.zero_grad()
        logits = torch.stack([-2 * size * (p - p.detach()).sum(), torch.zeros(())])[None]
        optimizer.observe(logits, labels=torch.tensor([0]))
        p.grad = torch.ones(1)
        optimizer.step()
        assert finite(optimizer, p)
    assert abs(p.detach() - before) > 0.05


def test_squares_of_an_infinite_input_and_an_error_of_zero() -> None:
    """Inputs of 1e20 have infinite squares, and 0 inf = nan."""
    model = nn.Linear(1, 2)
    optimizer = optim.OGN(model, num_data=10)
    optimizer.zero_grad()
    model(torch.full((3, 1), 1e20))[:, 0].sum().backward()  # the second output has an error of zero
    optimizer.step()
    assert all(finite(optimizer, p) for p in model.parameters())


def trained(optimizer: Any, model: nn.Module, x: Tensor, scale: float) -> None:
    optimizer.zero_grad()
    outputs = model(x)
    optimizer.observe(outputs, labels=torch.zeros(len(x), dtype=torch.long))
    (scale * outputs.square().sum(1)).mean().backward()
    optimizer.step()


def test_whitening_with_errors_whose_squares_are_denormal() -> None:
    model = nn.Linear(2, 2)
    optimizer = optim.KroneckerFilterFP(model, batch_size=4, fisher="empirical")
    trained(optimizer, model, torch.eye(2).repeat(2, 1), 1e-21)
    assert all(finite(optimizer, p) for p in model.parameters())


def test_errors_whose_squares_overflow_only_after_they_are_multiplied_by_the_batch_size() -> None:
    """They stay out of the covariances."""
    model = nn.Linear(2, 2, bias=False)
    optimizer = optim.KroneckerFilter(model, batch_size=1000, fisher="empirical")
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
    x = torch.tensor([[1.0, 2.0], [2.0, -1.0]])
    trained(optimizer, model, x, 1e-3)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
    before = {k: v.clone() for k, v in optimizer.state[model.weight].items() if "covariance" in k}
    trained(optimizer, model, x, 3e18)
    assert finite(optimizer, model.weight)
    assert all(torch.equal(optimizer.state[model.weight][k], v) for k, v in before.items())


def test_a_norm_that_is_not_a_number_gives_a_step_of_zero() -> None:
    """Inner products of either sign overflow to inf - inf; the norm is then as good as infinite."""
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([1e30, 1e30])
    found = limit_norm({p: torch.tensor([1e20, -1e20])}, 1.0)
    assert torch.equal(dense(found[p]), torch.zeros(2))


def test_a_gradient_far_larger_than_the_per_example_gradients_of_the_fisher() -> None:
    """The inner products of the two overflow, so the step is zero."""
    model = nn.Linear(2, 2)
    optimizer = optim.NaturalGradient(model)
    trained(optimizer, model, torch.tensor([[1e12, 2e12], [3e12, 1e12]]), 1e5)
    assert all(finite(optimizer, p) for p in model.parameters())


def test_the_quadratic_model_with_a_momentum_of_another_order_of_magnitude() -> None:
    """The step is that without momentum; lstsq took the matrix for one of rank one, and the step was zero."""
    moved = []
    for buffer in (0.0, 1e60):
        torch.manual_seed(0)
        model = nn.Linear(2, 2).double()
        optimizer = optim.NaturalGradient(model, lr=1.0, step_size="quadratic", momentum=0.9)
        x = torch.tensor([[1.0, 2.0], [2.0, -1.0], [0.5, 0.5]], dtype=torch.float64)
        trained(optimizer, model, x, 1.0)
        for p in model.parameters():
            optimizer.state[p]["momentum"].copy_(buffer * torch.ones_like(p))
        start = [p.detach().clone() for p in model.parameters()]
        trained(optimizer, model, x, 1.0)
        moved.append(torch.cat([(p.detach() - old).flatten() for p, old in zip(model.parameters(), start)]))
    assert moved[0].norm() > 1e-3
    torch.testing.assert_close(moved[1], moved[0], rtol=0.5, atol=0)
