"""KFAC against transcriptions of its equations and its limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesgrad import SubsampledFisher
from bayesgrad.optim import FOOF, KFAC

PLAIN: dict[str, Any] = {
    "damping_mode": "absolute",
    "max_norm": math.inf,
    "stats_every": 1,
}  # the equations of the paper

D = torch.float64


def close(a: torch.Tensor, b: torch.Tensor, rtol: float = 1e-10) -> None:
    torch.testing.assert_close(a.detach(), b.detach(), rtol=rtol, atol=rtol)


def flat(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def inverse(matrix: torch.Tensor, damping: float | torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(matrix + damping * torch.eye(len(matrix), dtype=D))


def kfac_step(A: torch.Tensor, E: torch.Tensor, gradient: torch.Tensor, damping: float, exact: bool) -> torch.Tensor:
    if exact:
        whole = torch.kron(E, A) + damping * torch.eye(gradient.numel(), dtype=D)
        return torch.linalg.solve(whole, gradient.flatten()).view(gradient.shape)
    pi = ((A.trace() / len(A)) / (E.trace() / len(E))).sqrt()
    return inverse(E, damping**0.5 / pi) @ gradient @ inverse(A, pi * damping**0.5)


@pytest.mark.parametrize("exact", [False, True], ids=["factors", "product"])
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_layers_over_steps(likelihood: str, exact: bool) -> None:
    """Averages of [a 1][a 1]' and e e' for given labels on an independent batch; the step on another gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 3)).to(D)
    lr, damping, ema = 0.1, 0.05, 0.8
    optimizer = KFAC(
        model, lr, damping=damping, ema=ema, likelihood=likelihood, exact_damping=exact, update_every=1, **PLAIN
    )
    moments = [[torch.zeros(5, 5, dtype=D), torch.zeros(30, 30, dtype=D)]]
    moments += [[torch.zeros(31, 31, dtype=D), torch.zeros(3, 3, dtype=D)]]
    for t in range(1, 5):
        x, observed = torch.randn(6, 4, dtype=D), torch.randn(9, 4, dtype=D)
        labels = torch.randint(0, 3, (9,)) if likelihood == "categorical" else torch.randint(0, 2, (9, 3)).to(D)
        optimizer.zero_grad()
        outputs = model(observed)
        optimizer.observe(outputs, labels=labels)
        model(x).square().mean().backward()
        hidden = torch.tanh(model[0](observed)).detach()
        if likelihood == "categorical":
            e = outputs.softmax(1).detach() - F.one_hot(labels, 3)
        else:
            e = (outputs.sigmoid() if likelihood == "bernoulli" else outputs).detach() - labels
        errors = [(e @ model[2].weight.detach()) * (1 - hidden**2), e]
        before = [torch.cat([k.weight, k.bias[:, None]], 1).detach().clone() for k in (model[0], model[2])]
        optimizer.step()
        for k, (a, layer) in enumerate(((observed, model[0]), (hidden, model[2]))):
            ones = torch.cat([a, torch.ones(9, 1, dtype=D)], 1)
            for side, rows in enumerate((ones, errors[k])):
                moments[k][side] = ema * moments[k][side] + (1 - ema) * rows.T @ rows / 9
            A, E = (moment / (1 - ema**t) for moment in moments[k])
            gradient = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)
            step = kfac_step(A, E, gradient, damping, exact)
            close(torch.cat([layer.weight, layer.bias[:, None]], 1), before[k] - lr * step)


def test_one_example_is_exact() -> None:
    """For one example the Fisher of a layer is the Kronecker product: (F + damping I)^-1 g with exact damping."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(D)
    optimizer = KFAC(model, lr=1.0, damping=0.1, exact_damping=True, **PLAIN)
    x, y = torch.randn(1, 3, dtype=D), torch.tensor([1])
    outputs = model(x)
    optimizer.observe(outputs, labels=y)
    fisher = SubsampledFisher(model, x, labels=y, fisher="empirical").dense()
    F.cross_entropy(outputs, torch.tensor([0])).backward()
    gradient, before = torch.cat([p.grad.flatten() for p in model.parameters()]), flat(model)
    optimizer.step()
    for block in (slice(0, 16), slice(16, 26)):
        eye = torch.eye(block.stop - block.start, dtype=D)
        step = torch.linalg.solve(fisher[block, block] + 0.1 * eye, gradient[block])
        close(flat(model)[block], before[block] - step, 1e-12)


@pytest.mark.parametrize(("relative", "bound"), [(1.0, 0.6), (10.0, 0.2), (100.0, 0.02), (1e6, 1e-5)])
def test_tends_to_foof_as_the_damping_of_errors_grows(relative: float, bound: float) -> None:
    """lE KFAC -> FOOF with the damping lA: lr_FOOF = lr_KFAC/lE."""
    torch.manual_seed(0)
    x, y = torch.randn(50, 8, dtype=D), torch.randint(0, 5, (50,))
    model, other = nn.Linear(8, 5).to(D), nn.Linear(8, 5).to(D)
    other.load_state_dict(model.state_dict())
    outputs = model(x)
    e = outputs.softmax(1).detach() - F.one_hot(y, 5)
    mean_E = (e.T @ e / 50).trace() / 5
    mean_A = (x.square().sum() / 50 + 1) / 9
    lE = (relative * mean_E).item()
    damping = (lE * (mean_A / mean_E).sqrt().item()) ** 2
    lA = damping / lE
    kfac, foof = KFAC(model, lr=lE, damping=damping, **PLAIN), FOOF(other, lr=1.0, damping=lA, **PLAIN)
    outputs = model(x)
    kfac.observe(outputs, labels=y)
    start = flat(model)
    F.cross_entropy(outputs, y).backward()
    F.cross_entropy(other(x), y).backward()
    kfac.step()
    foof.step()
    difference = (flat(model) - flat(other)).norm() / (flat(other) - start).norm()
    assert 0.2 * bound < difference < bound or (relative == 1e6 and difference < bound)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_positions_are_expanded_or_reduced(sharing: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3).to(D)
    optimizer = KFAC(layer, lr=1.0, damping=0.05, sharing=sharing, losses_per_example=1, **PLAIN)
    x, y = torch.randn(6, 5, 4, dtype=D), torch.randint(0, 3, (6, 5))
    outputs = layer(x)
    optimizer.observe(outputs, labels=y)
    F.cross_entropy(outputs.flatten(0, 1), y.flatten()).backward()
    before = torch.cat([layer.weight, layer.bias[:, None]], 1).detach().clone()
    optimizer.step()
    a, e = torch.cat([x, torch.ones(6, 5, 1, dtype=D)], 2), outputs.softmax(2).detach() - F.one_hot(y, 3)
    if sharing == "expand":
        A, E = torch.einsum("nti,ntj->ij", a, a) / 6, torch.einsum("nti,ntj->ij", e, e) / 30
    else:
        A, E = (rows.T @ rows / 6 for rows in (a.mean(1), e.sum(1)))
    gradient = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)
    step = kfac_step(A, E, gradient, 0.05, False)
    close(torch.cat([layer.weight, layer.bias[:, None]], 1), before - step)


def test_the_trace_of_an_expanded_block_is_near_the_exact_one() -> None:
    """tr(A) tr(E) is the trace of the Fisher block if errors and inputs are independent over positions."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, 10)).to(D)
    x = torch.randn(200, 1, 8, 8, dtype=D)
    optimizer = KFAC(model, damping=1.0, **PLAIN)
    outputs = model(x)
    optimizer.observe(outputs)
    outputs.square().mean().backward()
    optimizer.step()
    entry = optimizer.state[model[0].weight]
    trace = entry["input_moment"].diagonal(dim1=1, dim2=2).sum() * entry["error_moment"].diagonal(dim1=1, dim2=2).sum()
    exact = SubsampledFisher(model, x, fisher="exact").diagonal()[:40].sum()
    assert 0.5 < trace / exact < 2


def test_sampled_labels_give_the_expected_error_factor() -> None:
    """E[e e'] for labels from the model is the mean of diag(p) - pp', within five standard errors."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 4).to(D)
    optimizer = KFAC(layer, damping=1.0, seed=3, **PLAIN)
    x = torch.randn(20_000, 3, dtype=D)
    outputs = layer(x)
    optimizer.observe(outputs)
    outputs.square().mean().backward()
    optimizer.step()
    p = outputs.softmax(1).detach()
    expected = torch.diag(p.mean(0)) - p.T @ p / len(p)
    each = p[:, None] - torch.eye(4, dtype=D)  # e for every label, (N, label, 4)
    products = each[..., :, None] * each[..., None, :]
    spread = torch.einsum("nk,nkij->nij", p, products**2) - torch.einsum("nk,nkij->nij", p, products) ** 2
    error = (spread.mean(0) / len(p)).sqrt()
    assert bool(((optimizer.state[layer.weight]["error_moment"][0] - expected).abs() < 5 * error).all())


def test_embedding_has_a_diagonal_and_an_error_factor() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 3), nn.Flatten(), nn.Linear(6, 4, bias=False)).to(D)
    optimizer = KFAC(model, lr=1.0, damping=0.04, **PLAIN)
    x, y = torch.tensor([[0, 1], [2, 2], [5, 0]]), torch.tensor([1, 0, 3])
    outputs = model(x)
    optimizer.observe(outputs, labels=y)
    F.cross_entropy(outputs, y).backward()
    before, head = model[0].weight.detach().clone(), model[2].weight.detach().clone()
    optimizer.step()
    e = ((outputs.softmax(1) - F.one_hot(y, 4)).detach() @ head).view(6, 3)
    A, E = torch.tensor([2, 1, 2, 0, 0, 1], dtype=D) / 3, e.T @ e / 6
    pi = (A.mean() / (E.trace() / 3)).sqrt()
    step = model[0].weight.grad / (A + 0.2 * pi)[:, None] @ inverse(E, 0.2 / pi)
    close(model[0].weight, before - step)


def test_exact_damping_of_a_diagonal_side() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 3, bias=False).to(D)
    optimizer = KFAC(layer, lr=1.0, damping=0.05, exact_damping=True, max_factor=5, **PLAIN)
    x, y = torch.randn(9, 6, dtype=D), torch.randint(0, 3, (9,))
    outputs = layer(x)
    optimizer.observe(outputs, labels=y)
    F.cross_entropy(outputs, y).backward()
    before = layer.weight.detach().clone()
    optimizer.step()
    e = outputs.softmax(1).detach() - F.one_hot(y, 3)
    step = kfac_step(torch.diag(x.square().mean(0)), e.T @ e / 9, layer.weight.grad, 0.05, True)
    close(layer.weight, before - step)
    assert "input_basis" not in optimizer.state[layer.weight]
