"""Options, state and model that change during a run: a change is followed, or refused in a sentence."""

from __future__ import annotations

import pytest
import torch

from cases import CASES, Case, small_model, train

NO_POSTERIOR = ("STE", "AdaBound", "AMSBound", "FOOF", "KFAC", "NaturalGradient", "Langevin", "SNGD")


@pytest.mark.parametrize("case", [c for c in CASES if not c.name.startswith(NO_POSTERIOR)], ids=lambda case: case.name)
def test_a_posterior_is_a_copy_of_the_belief(case: Case) -> None:
    model = small_model(width=30)
    optimizer = case.of(model, **({"batch_size": 32} if "AdaBayesFP" in case.name else {}))
    train(model, optimizer, range(3))
    posterior = optimizer.posterior(model)
    before = posterior.sample(2, seed=0), posterior.variance()
    train(model, optimizer, range(3, 7))
    for then, now in zip(before, (posterior.sample(2, seed=0), posterior.variance())):
        assert all(torch.equal(then[name], now[name]) for name in then)
    other = optimizer.posterior(model).variance()
    assert any(not torch.equal(other[name], posterior.variance()[name]) for name in other)
