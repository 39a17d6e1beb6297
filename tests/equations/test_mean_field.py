"""Mean field of small discrete models, out of the engine, against enumeration and the fixed point in closed form."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bayesgrad.families import Bernoulli, Categorical
from bayesgrad.inference import Expected, Node, Result, run

F64 = torch.float64


def machine(size: int, strength: float, seed: int) -> tuple[Tensor, Tensor, float]:
    """Couplings and fields of a Boltzmann machine over ±1, and log Z by enumeration."""
    generator = torch.Generator().manual_seed(seed)
    W = strength * torch.randn(size, size, generator=generator, dtype=F64)
    W = ((W + W.T) / 2).fill_diagonal_(0)
    b = 0.3 * torch.randn(size, generator=generator, dtype=F64)
    x = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=size)), dtype=F64)
    return W, b, float((((x @ W) * x).sum(1) / 2 + x @ b).logsumexp(0))


def energy(W: Tensor, b: Tensor, mean: Tensor) -> Tensor:
    return mean @ W @ mean / 2 + b @ mean


def one_by_one(W: Tensor, b: Tensor) -> tuple[Result, Tensor]:
    nodes = [Node(Bernoulli(), (torch.zeros((), dtype=F64),), name=f"x{i}") for i in range(len(b))]
    joint = Expected(lambda *means: energy(W, b, torch.stack([m[0] for m in means])), *nodes)
    return run(nodes, [joint], 500, tolerance=1e-15), torch.stack([node.mean[0] for node in nodes])


@pytest.mark.parametrize("strength", [0.2, 0.6, 2.0])
def test_mean_field_of_a_boltzmann_machine(strength: float) -> None:
    """m = tanh(Wm + b) at the end, one variable after the other; the bound never falls and stays below log Z."""
    W, b, log_z = machine(7, strength, 0)
    result, mean = one_by_one(W, b)
    assert_close(mean, (W @ mean + b).tanh(), rtol=0, atol=1e-7)
    assert result.converged
    assert np.diff(result.elbos).min() > -1e-12
    p = (1 + mean) / 2
    entropy = -(torch.special.xlogy(p, p) + torch.special.xlogy(1 - p, 1 - p)).sum()
    assert result.elbo == pytest.approx(float(energy(W, b, mean) + entropy), abs=1e-9)
    assert result.elbo < log_z


def test_all_variables_at_once_find_the_same_place() -> None:
    W, b, _ = machine(7, 0.3, 1)
    node = Node(Bernoulli(), (torch.zeros(7, dtype=F64),))
    joint = Expected(lambda mean: energy(W, b, mean[0]), node)
    result = run(node, [joint], 500, domain="search", tolerance=1e-15)
    other, mean = one_by_one(W, b)
    assert_close(node.mean[0], mean, rtol=0, atol=1e-6)
    assert result.elbo == pytest.approx(other.elbo, abs=1e-12)


def test_without_couplings_the_bound_is_the_evidence() -> None:
    _, b, _ = machine(5, 0.0, 2)
    node = Node(Bernoulli(), (torch.zeros(5, dtype=F64),))
    result = run(node, [Expected(lambda mean: b @ mean[0], node)], 3)
    assert result.elbo == pytest.approx(float((2 * b.cosh()).log().sum()), abs=1e-12)


def test_mean_field_of_a_potts_model() -> None:
    """Three states on a ring: p_i = softmax(J (p_left + p_right) + h_i)."""
    generator = torch.Generator().manual_seed(3)
    h = torch.randn(5, 3, generator=generator, dtype=F64)
    J, left = 0.7, torch.tensor([4, 0, 1, 2, 3])
    nodes = [Node(Categorical(), (torch.zeros(3, dtype=F64),)) for _ in range(5)]

    def log_density(*means: tuple[Tensor, ...]) -> Tensor:
        p = torch.stack([m[0] for m in means])
        return J * (p * p[left]).sum() + (h * p).sum()

    result = run(nodes, [Expected(log_density, *nodes)], 500, tolerance=1e-15)
    p = torch.stack([node.mean[0] for node in nodes])
    assert_close(p, (J * (p[left] + p[left.argsort()]) + h).softmax(1), rtol=0, atol=1e-7)
    states = torch.tensor(list(itertools.product(range(3), repeat=5)))
    same = (states == states[:, left]).sum(1)
    log_z = (J * same + h[torch.arange(5), states].sum(1)).logsumexp(0)
    assert result.elbo < log_z
