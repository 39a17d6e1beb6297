"""Messages that are kept factor by factor."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from bayesgrad.families import Gaussian
from bayesgrad.inference import (
    Factor,
    GaussHermite,
    LinearPredictorFactor,
    Node,
    OutsideDomain,
    Prior,
    Sites,
    linear_gaussian,
    step,
)

NORMAL = Gaussian()


def robust() -> tuple[Node, list[Factor]]:
    """Regression with heavy tails and far-off targets: whole steps leave the domain."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(30, 2, dtype=torch.float64, generator=generator)
    y = X @ torch.tensor([1.0, -2.0]).double() + 0.3 * torch.randn(30, dtype=torch.float64, generator=generator)
    y[:8] += 15
    eye = torch.eye(2).double()
    node = Node(NORMAL, NORMAL.of(torch.zeros(2).double(), eye))
    factors: list[Factor] = [Prior(node, NORMAL.of(torch.zeros(2).double(), 0.01 * eye))]
    for part, own in zip(X.split(10), y.split(10)):
        factors.append(
            LinearPredictorFactor(
                node, part, lambda f, own=own: -2.5 * ((own - f).square() / 4).log1p(), GaussHermite()
            )
        )
    return node, factors


@pytest.mark.parametrize("rho", [1.0, 0.5, 0.2])
@pytest.mark.parametrize("domain", ["backtrack", "retract", "search"])
def test_local_form_is_the_global_form_however_steps_are_cut(rho: float, domain: str) -> None:
    """λ is the sum of the sites, also after shortened or retracted steps (Khan and Rue 2023, Eq. 60)."""
    (lazy, own), (greedy, others), sites = robust(), robust(), Sites()
    for _ in range(5):
        step(lazy, own, rho, domain=domain, sites=sites)
        step(greedy, others, rho, domain=domain)
        assert_close(lazy.natural, greedy.natural, rtol=1e-8, atol=1e-8)
        assert_close(sites.total(lazy), lazy.natural, rtol=1e-10, atol=1e-10)


def test_a_step_that_is_refused_leaves_sites_alone() -> None:
    node, factors = robust()
    sites = Sites()

    def go() -> None:
        for _ in range(20):
            step(node, factors, domain="raise", sites=sites)

    with pytest.raises(OutsideDomain):
        go()
    assert_close(sites.total(node), node.natural)


def test_factors_that_come_later_start_with_nothing() -> None:
    """Batches one after the other, each with rho: λ fades what it had of the batch that is seen, and of no other."""
    generator = torch.Generator().manual_seed(0)
    X, y = torch.randn(20, 2, dtype=torch.float64, generator=generator), torch.ones(20).double()
    node = Node(NORMAL, NORMAL.of(torch.zeros(2).double(), torch.eye(2).double()))
    prior, sites = Prior(node, node.natural), Sites()
    batches = [linear_gaussian(node, part, own) for part, own in zip(X.split(5), y.split(5))]
    step(node, [prior], sites=sites)
    for batch in batches:
        step(node, [batch], 0.5, sites=sites)
    for k, expected in enumerate(prior.natural):
        assert_close(node.natural[k], expected + sum(batch.message(node)[k] / 2 for batch in batches))
    for _ in range(60):
        for batch in batches:
            step(node, [batch], 0.5, sites=sites)
    for k, expected in enumerate(prior.natural):
        assert_close(node.natural[k], expected + sum(batch.message(node)[k] for batch in batches))
