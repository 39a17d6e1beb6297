"""FOOF against transcriptions of its equation, ridge regression, and its limits."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesgrad.layers.moments import symmetric
from bayesgrad.optim import FOOF, KFAC, KroneckerFilter

PLAIN: dict[str, Any] = {
    "damping_mode": "absolute",
    "max_norm": math.inf,
    "stats_every": 1,
}  # the equations of the paper

D = torch.float64


def close(a: torch.Tensor, b: torch.Tensor, rtol: float = 1e-10) -> None:
    torch.testing.assert_close(a.detach(), b.detach(), rtol=rtol, atol=rtol)


def joint(layer: nn.Module) -> torch.Tensor:
    """[grad W, grad b] as a matrix."""
    weight = layer.weight.grad.flatten(1)
    return weight if layer.bias is None else torch.cat([weight, layer.bias.grad[:, None]], 1)


def update(layer: nn.Module, before: dict[str, torch.Tensor]) -> torch.Tensor:
    """The change of [W b]."""
    moved = (layer.weight.detach() - before["weight"]).flatten(1)
    return moved if layer.bias is None else torch.cat([moved, (layer.bias.detach() - before["bias"])[:, None]], 1)


def copied(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in layer.named_parameters()}


def test_three_layers_over_steps_against_numpy() -> None:
    """A <- debiased average of [a 1]'[a 1]/B, W <- (1 - lr wd) W - lr (m M + G (A + damping)^-1), in NumPy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 40), nn.ReLU(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)).to(D)
    lr, damping, ema, momentum, decay = 0.1, 0.3, 0.8, 0.7, 0.2
    options = dict(lr=lr, damping=damping, ema=ema, momentum=momentum, weight_decay=decay, update_every=1)
    optimizer = FOOF(model, **PLAIN, **options)
    linears = [model[0], model[2], model[4]]
    W = [np.concatenate([k.weight.detach().numpy(), k.bias.detach().numpy()[:, None]], 1) for k in linears]
    A, M = [np.zeros((w.shape[1],) * 2) for w in W], [np.zeros_like(w) for w in W]
    for t in range(1, 6):
        x = torch.randn(9, 5, dtype=D)
        y = torch.randint(0, 3, (9,))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        h = x.numpy()
        inputs = []
        for k, act in enumerate((lambda s: np.maximum(s, 0), np.tanh, lambda s: s)):
            inputs.append(np.concatenate([h, np.ones((9, 1))], 1))
            h = act(inputs[-1] @ W[k].T)
        e = np.exp(h - h.max(1, keepdims=True))
        e = e / e.sum(1, keepdims=True)
        e[np.arange(9), y.numpy()] -= 1
        errors = [np.empty(0), np.empty(0), e / 9]
        errors[1] = errors[2] @ W[2][:, :-1] * (1 - inputs[2][:, :-1] ** 2)
        errors[0] = errors[1] @ W[1][:, :-1] * (inputs[1][:, :-1] > 0)
        optimizer.step()
        for k in range(3):
            A[k] = ema * A[k] + (1 - ema) * inputs[k].T @ inputs[k] / 9
            average = A[k] / (1 - ema**t)
            step = errors[k].T @ inputs[k] @ np.linalg.inv(average + damping * np.eye(len(average)))
            M[k] = momentum * M[k] + step
            W[k] = (1 - lr * decay) * W[k] - lr * M[k]
            close(torch.cat([linears[k].weight, linears[k].bias[:, None]], 1), torch.tensor(W[k]))


def test_is_ridge_regression_of_errors_on_inputs() -> None:
    """min |dW A - E|^2 + B damping |dW|^2 over all rows, by least squares on an extended system."""
    torch.manual_seed(0)
    layer, x, y = nn.Linear(4, 3).to(D), torch.randn(10, 4, dtype=D), torch.randint(0, 3, (10,))
    before = copied(layer)
    optimizer = FOOF(layer, lr=1.0, damping=0.05, **PLAIN)
    outputs = layer(x)
    outputs.retain_grad()
    F.cross_entropy(outputs, y, reduction="sum").div(10).backward()
    optimizer.step()
    ones = torch.cat([x, torch.ones(10, 1, dtype=D)], 1)
    extended = torch.cat([ones, (10 * 0.05) ** 0.5 * torch.eye(5, dtype=D)])
    targets = torch.cat([10 * outputs.grad, torch.zeros(5, 3, dtype=D)])
    solution = torch.linalg.lstsq(extended, targets).solution.T
    close(update(layer, before), -solution)


CONVOLUTIONS = {
    "plain": lambda: nn.Conv2d(2, 3, 3),
    "strided": lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False),
    "dilated": lambda: nn.Conv2d(2, 4, (3, 2), dilation=2, padding=(2, 1)),
    "groups": lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1),
    "reflected": lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
    "same": lambda: nn.Conv2d(2, 3, 3, dilation=2, padding="same"),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_sum_over_places(name: str) -> None:
    """Ridge regression over all (example, position) pairs, for each group; patches from F.unfold."""
    torch.manual_seed(0)
    conv = CONVOLUTIONS[name]().to(D)
    x = torch.randn(5, conv.in_channels, 7, 6, dtype=D)
    before = copied(conv)
    optimizer = FOOF(conv, lr=0.5, damping=0.7, losses_per_example=1, **PLAIN)
    conv(x).square().mean().backward()
    optimizer.step()
    padded = F.pad(x, conv._reversed_padding_repeated_twice, mode="reflect" if name == "reflected" else "constant")
    moved, gradient = update(conv, before), joint(conv)
    for g in range(conv.groups):
        channels = slice(g * conv.in_channels // conv.groups, (g + 1) * conv.in_channels // conv.groups)
        rows = slice(g * conv.out_channels // conv.groups, (g + 1) * conv.out_channels // conv.groups)
        patches = F.unfold(padded[:, channels], conv.kernel_size, conv.dilation, stride=conv.stride)
        a = patches.transpose(1, 2).flatten(0, 1)
        if conv.bias is not None:
            a = torch.cat([a, torch.ones(len(a), 1, dtype=D)], 1)
        inverse = torch.linalg.inv(a.T @ a / 5 + 0.7 * torch.eye(a.shape[1], dtype=D))
        close(moved[rows], -0.5 * gradient[rows] @ inverse)


def test_an_embedding_is_divided_by_how_often_rows_were_looked_up() -> None:
    table = nn.Embedding(5, 3).to(D)
    before = table.weight.detach().clone()
    optimizer = FOOF(table, lr=1.0, damping=0.5, losses_per_example=1, **PLAIN)
    x = torch.tensor([[0, 1, 1], [1, 4, 4]])
    (table(x) * torch.arange(18, dtype=D).view(2, 3, 3)).sum().backward()
    optimizer.step()
    counts = torch.tensor([1, 3, 0, 0, 2], dtype=D) / 2
    close(table.weight, before - table.weight.grad / (counts + 0.5)[:, None])


def test_sides_above_the_limit_are_diagonal() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 3).to(D), torch.randn(10, 6, dtype=D)
    before = copied(layer)
    optimizer = FOOF(layer, lr=1.0, damping=0.5, max_factor=6, **PLAIN)
    layer(x).square().mean().backward()
    optimizer.step()
    diagonal = torch.cat([x.square().mean(0), torch.ones(1, dtype=D)])
    close(update(layer, before), -joint(layer) / (diagonal + 0.5))


def test_strong_damping_is_sgd() -> None:
    """damping times the step converges to the gradient step."""
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 3).to(D), torch.randn(10, 6, dtype=D)
    before = copied(layer)
    optimizer = FOOF(layer, lr=1e9, damping=1e9, **PLAIN)
    layer(x).square().mean().backward()
    optimizer.step()
    close(update(layer, before), -joint(layer), 1e-7)


def test_inverses_are_refreshed_when_due_and_kept_otherwise() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 2).to(D), torch.randn(4, 3, dtype=D)
    optimizer = FOOF(layer, update_every=3, stats_every=1)
    inverted = []
    for _ in range(20):
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()
        inverted.append(int(optimizer.state[layer.weight]["clock"][2]))
    assert sorted(set(inverted)) == [1, 2, 3, 6, 9, 12, 15, 18]
    optimizer = FOOF(layer, stats_every=4)
    merged = []
    for t in range(9):
        optimizer.zero_grad()
        layer(torch.randn(4, 3, dtype=D)).square().mean().backward()
        before = optimizer.state[layer.weight]["input_moment"].clone() if t else None
        optimizer.step()
        merged.append(before is None or not torch.equal(before, optimizer.state[layer.weight]["input_moment"]))
    assert [t + 1 for t, new in enumerate(merged) if new] == [1, 2, 3, 5, 8]


@pytest.mark.parametrize(
    ("rule", "every", "updates"),
    [
        (FOOF, 1, list(range(1, 17))),
        (FOOF, 2, [1, 2, 3, 5, 8, 16]),  # every 8 steps
        (partial(KroneckerFilter, batch_size=1, fisher="empirical"), 2, [1, *range(2, 17, 2)]),
    ],
)
def test_statistics_of_a_layer_with_few_outputs(rule: Any, every: int, updates: list[int]) -> None:
    """511 inputs and a one, 2 outputs: a quarter as often, but not if they are wanted in each step, nor in a filter."""
    layer = nn.Linear(511, 2).to(D)
    optimizer = rule(layer, stats_every=every, update_every=100)
    merged = set()
    for _ in range(16):
        optimizer.zero_grad()
        layer(torch.ones(1, 511, dtype=D)).square().mean().backward()
        optimizer.step()
        merged.add(int(optimizer.state[layer.weight]["clock"][1]))
    assert sorted(merged) == updates


def test_inverses_are_refreshed_early_when_moments_have_changed() -> None:
    """Moments are compared with those at the last inversion after every tenth of update_every steps."""
    layer, x = nn.Linear(3, 2, bias=False).to(D), torch.eye(3, dtype=D)
    optimizer = FOOF(layer, update_every=40, stats_every=1, ema=0.5)
    inverted = []
    for t in range(100):
        scale = 1.0 if t < 50 else 1.05 if t < 70 else 2.0
        optimizer.zero_grad()
        layer(scale * x).square().mean().backward()
        optimizer.step()
        inverted.append(int(optimizer.state[layer.weight]["clock"][2]))
    # In steps 51 to 70 squares grow by 10 %, which is too little. From step 71 on they are 4: the average is 3.28 in
    # step 72, and 3.95, or 21 % more, in step 76. Step 80 is a multiple of 40.
    assert sorted(set(inverted)) == [1, 2, 3, 6, 12, 24, 48, 72, 76, 80]


def test_inverses_are_refreshed_in_the_first_steps_when_moments_have_changed() -> None:
    """At step 5, when statistics are updated, a factor that has changed is inverted; else when steps have doubled."""
    for scale, expected in ((1.0, [1, 2, 3, 6, 12]), (2.0, [1, 2, 3, 5, 8])):
        layer, x = nn.Linear(3, 2, bias=False).to(D), torch.eye(3, dtype=D)
        optimizer = FOOF(layer)
        inverted = set()
        for t in range(12):
            optimizer.zero_grad()
            layer((scale if t > 2 else 1.0) ** t * x).square().mean().backward()
            optimizer.step()
            inverted.add(int(optimizer.state[layer.weight]["clock"][2]))
        assert sorted(inverted) == expected


def test_large_moments_are_computed_in_strips_of_the_lower_triangle() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(600, 4, bias=False).to(D), torch.randn(7, 600, dtype=D)
    optimizer = FOOF(layer, damping=1.0, **PLAIN)
    layer(x).square().mean().backward()
    optimizer.step()
    close(symmetric(optimizer.state[layer.weight]["input_moment"])[0], x.T @ x / 7)
    inverse = optimizer.state[layer.weight]["input_inverse"][0]
    close(inverse @ (x.T @ x / 7 + torch.eye(600, dtype=D)), torch.eye(600, dtype=D), 1e-9)


def test_a_mean_over_tokens_is_one_over_examples_that_are_tokens() -> None:
    """With losses_per_example=T, sequences of T tokens take the step of N T examples."""
    torch.manual_seed(0)
    x, y = torch.randn(4, 5, 6, dtype=D), torch.randint(0, 3, (4, 5))
    for make in (FOOF, KFAC):
        layer, other = nn.Linear(6, 3).to(D), nn.Linear(6, 3).to(D)
        other.load_state_dict(layer.state_dict())
        for net, a, b, losses_per_example in ((layer, x, y, 5), (other, x.flatten(0, 1), y.flatten(), 1)):
            optimizer = make(net, losses_per_example=losses_per_example)
            outputs = net(a)
            if make is KFAC:
                optimizer.observe(outputs, labels=b)
            F.cross_entropy(outputs.flatten(0, -2), b.flatten()).backward()
            optimizer.step()
        close(layer.weight, other.weight)
