"""The engine with input that cannot be: one sentence each, and never parameters that are wrong in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bayesgrad.families import (
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    Dirichlet,
    FixedGaussian,
    Gamma,
    Gaussian,
    MixtureOfGaussians,
    NormalWishart,
    Point,
)
from bayesgrad.inference import (
    GaussHermite,
    Linear,
    LinearPredictorFactor,
    MonteCarlo,
    Node,
    OutsideDomain,
    Prior,
    linear_gaussian,
    minimize,
    online,
    run,
    step,
)

NORMAL = Gaussian()
ONES, EYE = torch.ones(4, 2).double(), torch.eye(2).double()


def weights() -> Node:
    return Node(NORMAL, NORMAL.of(torch.zeros(2).double(), EYE), name="weights")


def test_numbers_and_arrays_are_parameters() -> None:
    """In float64, of nodes and of priors."""
    tau = Node(Gamma(), Gamma().of(2.0, 3.0))  # pyright: ignore[reportArgumentType]
    step(tau, [Prior(tau, Gamma().of(1.5, 0.5))])  # pyright: ignore[reportArgumentType]
    assert_close(Gamma().standard_parameters(tau.natural), tuple(torch.tensor([1.5, 0.5]).double()))
    assert_close(Node(NORMAL, (np.zeros(2), -np.eye(2) / 2)).mean[1], EYE)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("natural", "words"),
    [
        (("a", "b"), "must be tensors of numbers, got 'a'"),
        (ONES, "must be a tuple of 2 tensors"),
        ((ONES[0].long(), -EYE.long()), "must be floating-point, got torch.int64"),
        ((ONES[0], -EYE.float()), "must have the same dtype, got torch.float64, torch.float32"),
        ((ONES[0], -ONES[:3]), r"must have matching shapes, got \(2,\), \(3, 2\)"),
        ((ONES[0], -torch.eye(3).double()), r"must have matching shapes, got \(2,\), \(3, 3\)"),
        ((ONES, -EYE.expand(3, 2, 2)), r"must have matching shapes, got \(4, 2\), \(3, 2, 2\)"),
        ((ONES[0], -torch.tensor([[1.0, 0.5], [0.0, 1.0]]).double()), "must have symmetric matrices"),
    ],
)
def test_parameters_that_cannot_be(natural: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^natural parameters of Gaussian {words}"):
        Node(NORMAL, natural)


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (lambda q: Prior(q, NORMAL.of(torch.zeros(3).double(), torch.eye(3).double())), "prior parameters of shapes"),
        (lambda q: Prior(q, NORMAL.of(ONES, EYE.expand(4, 2, 2))), "prior parameters of shapes"),
        (lambda q: Prior(q, q.natural, scale=-1.0), "scale must be finite and not negative, got -1"),
        (lambda q: Prior(q, q.natural, scale=float("nan")), "scale must be finite and not negative, got nan"),
        (lambda q: Linear(q, (ONES[0],)), "message of shapes"),
        (lambda q: linear_gaussian(q, ONES, ONES[:3, 0]), r"targets \(n,\) and precision a number or \(n,\), got"),
        (lambda q: linear_gaussian(q, ONES, ONES[:, :1]), r"targets \(n,\) and precision a number or \(n,\), got"),
        (lambda q: linear_gaussian(q, torch.ones(4, 3).double(), ONES[:, 0]), "design must have 2 columns"),
        (lambda q: linear_gaussian(q, ONES, ONES[:, 0], -1.0), "precision must be positive, got -1"),
        (lambda q: linear_gaussian(q, ONES.numpy(), ONES[:, 0]), "design must be a tensor, got ndarray"),
        (
            lambda q: LinearPredictorFactor(q, ONES.float(), torch.sin),
            "design must have the node's dtype, torch.float64, got",
        ),
        (
            lambda q: LinearPredictorFactor(Node(NORMAL, NORMAL.of(ONES, EYE.expand(4, 2, 2))), ONES, torch.sin),
            "without plates",
        ),
        (
            lambda q: LinearPredictorFactor(q, ONES, torch.sin, "delta"),
            "expectation must be .* got 'delta'",
        ),  # pyright: ignore
        (lambda q: minimize(torch.sum, q, expectation="mc"), "expectation must be .* got 'mc'"),  # pyright: ignore
        (lambda q: GaussHermite(1.5), "n must be a positive integer, at most 2000, got 1.5"),  # pyright: ignore
        (lambda q: MonteCarlo("a"), "samples must be a positive integer, got 'a'"),  # pyright: ignore
        (lambda q: MixtureOfGaussians([0.5, 0.5]), "weights of components must be a tensor"),  # pyright: ignore
        (lambda q: Node(NORMAL, q.natural, "a"), "scale must be positive, got 'a'"),
        (lambda q: Node(Gaussian, q.natural), "family must be an instance from bayesgrad.families"),
        (lambda q: step(q, [Prior(q, q.natural)], "fast"), r"rho must be in \(0, 1\], got 'fast'"),
        (lambda q: step(q, [Prior(q, q.natural)], None), r"rho must be in \(0, 1\], got None"),
        (lambda q: step(q, [Prior(q, q.natural)], momentum="a"), r"momentum must be in \[0, 1\), got 'a'"),
        (lambda q: run(q, [Prior(q, q.natural)], 1.5), "steps must be a positive integer, got 1.5"),
        (lambda q: online(q, Prior(q, q.natural), "a"), "rho must be a finite positive number, got 'a'"),
        (lambda q: minimize(lambda theta: theta**2, q), "must return a scalar for a vector, got shape"),
        (lambda q: minimize(lambda theta: 0.0, q), "must return a tensor, got"),  # pyright: ignore
        (lambda q: minimize(torch.sum, torch.zeros(2)), "q must be a Node"),
        (lambda q: FixedGaussian(-1.0), "precision must be a positive number, .* got -1.0"),
        (lambda q: FixedGaussian(float("nan")), "precision must be a positive number, .* got nan"),
        (lambda q: FixedGaussian(-EYE), "precision must be a positive number, .* got"),
        (lambda q: FixedGaussian("a"), "precision must be a positive number, .* got 'a'"),  # pyright: ignore
        (lambda q: DiagonalGaussian().natural((ONES[0], ONES[0] / 2)), "not the expectations of a DiagonalGaussian"),
        (lambda q: Bernoulli().natural((1.5 * ONES[0],)), "not the expectations of a Bernoulli"),
        (lambda q: Categorical().natural((ONES[0],)), "not the expectations of a Categorical"),
        (
            lambda q: NormalWishart().natural((ONES[0], ONES[0, 0], EYE, -ONES[0, 0])),
            "not the expectations of",
        ),
    ],
)
def test_one_sentence(attempt: Callable[[Node], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words) as caught:
        attempt(weights())
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 1e200), (torch.float32, 1e30)])
def test_a_retracted_step_that_overflows_raises(dtype: torch.dtype, size: float) -> None:
    """Its precision is the square of the message, which is infinite here: the node stays where it was."""
    eye = torch.eye(2, dtype=dtype)
    node = Node(NORMAL, NORMAL.of(torch.zeros(2, dtype=dtype), eye))
    with pytest.raises(OutsideDomain, match="leads outside the valid parameters"):
        step(node, [Linear(node, (torch.zeros(2, dtype=dtype), size * eye))], domain="retract")
    assert_close(node.natural[1], -eye / 2)


def test_families_that_cannot_bend_go_straight() -> None:
    """Those inside a Point as well."""
    for family in (Dirichlet(), Point(Dirichlet())):
        node = Node(family, (torch.tensor([3.0, 1.0]),))
        step(node, [Prior(node, (torch.tensor([1.0, 2.0]),))], 0.5, domain="retract")
        assert_close(node.natural[0], torch.tensor([2.0, 1.5]))


def test_losses_with_branches_are_minimised() -> None:
    """Functions with data-dependent control flow, which vmap does not support: rows are evaluated one by one."""

    def loss(theta: Tensor) -> Tensor:
        return (theta - 1).square().sum() if theta[0] > 0 else (theta - 2).square().sum()

    assert_close(minimize(loss, weights()).point, torch.ones(2).double())
