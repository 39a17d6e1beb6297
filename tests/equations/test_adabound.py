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
                warnings.simplefilter("ignore")  # the package calls overloads that torch has deprecated
                optimizer.step()
        torch.testing.assert_close(weights[0], weights[1], rtol=1e-10, atol=1e-12)


def test_holds_no_posterior() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match="AdaBound holds no belief"):
        AdaBound(model.parameters()).posterior(model)
