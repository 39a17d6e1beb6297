"""Layers inside of activation checkpoints: several forward passes before a backward pass, examples in other dimensions.

A reentrant checkpoint calls its layers without gradients, and again in the backward pass, where other passes of the
model may have followed. References are gradients of single examples, and the same steps without checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from bayesgrad.optim import FOOF, OGN, KroneckerFilterFP

D = torch.float64


class Model(nn.Module):
    """Tokens to classes, by an inner layer that sees all of them.

    Args:
        kind: of the inner layer.
        nested: the number of checkpoints around it.
        time_first: whether the model transposes its inputs (examples, time, features).
    """

    def __init__(self, kind: type[nn.Module], nested: int, reentrant: bool = True, time_first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(5, 3)
        self.inner = nn.Linear(4, 5) if kind is nn.Linear else kind(4, 5, batch_first=not time_first)
        self.nested, self.reentrant, self.time_first = nested, reentrant, time_first
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.transpose(0, 1) if self.time_first else x).tanh()
        hidden = self.run(hidden, self.nested)
        return self.last(hidden[-1] if self.time_first else hidden[:, -1])

    def run(self, hidden: Tensor, nested: int) -> Tensor:
        if nested:
            found: Any = checkpoint(lambda h: self.run(h, nested - 1), hidden, use_reentrant=self.reentrant)
            return found
        found = self.inner(hidden)
        return (found[0] if isinstance(found, tuple) else found).tanh()


def data(seed: int, n: int = 6, time: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, time, 3, dtype=D, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def one_backward_pass(model: nn.Module) -> None:
    (F.cross_entropy(model(data(0)[0]), data(0)[1]) / 2 + F.cross_entropy(model(data(1)[0]), data(1)[1]) / 2).backward()


def two_backward_passes(model: nn.Module) -> None:
    for loss in [F.cross_entropy(model(x), y) / 2 for x, y in map(data, (0, 1))]:
        loss.backward()


def another_pass_between(model: nn.Module) -> None:
    loss = F.cross_entropy(model(torch.cat([data(0)[0], data(1)[0]])), torch.cat([data(0)[1], data(1)[1]]))
    model(data(2, n=3)[0])
    loss.backward()


RULES: dict[str, Callable[[nn.Module], Any]] = {
    "FOOF": lambda model: FOOF(model, stats_every=1, update_every=1, ema=0.0),
    "FP": lambda model: KroneckerFilterFP(model, batch_size=12, fisher="empirical", stats_every=1, update_every=1),
    "OGN": lambda model: OGN(model, num_data=100, betas=(0.9, 0.5)),
}


@pytest.mark.parametrize("nested", [1, 2])
@pytest.mark.parametrize("kind", [nn.Linear, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("loop", [one_backward_pass, two_backward_passes, another_pass_between])
@pytest.mark.parametrize("name", list(RULES))
def test_recomputed_layers_belong_to_their_forward_pass(
    name: str, loop: Callable[[nn.Module], None], kind: type[nn.Module], nested: int
) -> None:
    models = [Model(kind, 0), Model(kind, nested)]
    for model in models:
        optimizer = RULES[name](model)
        for _ in range(2):
            optimizer.zero_grad()
            loop(model)
            optimizer.step()
    for p, q in zip(*(model.parameters() for model in models)):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_squares_of_recomputed_layers_are_those_of_single_examples() -> None:
    model = Model(nn.Linear, 1)
    optimizer = RULES["OGN"](model)
    two_backward_passes(model)
    params = list(model.parameters())
    found = optimizer.sources[-1]._squares(params)
    model.nested = 0
    every = [(x[None], y[None]) for some in map(data, (0, 1)) for x, y in zip(*some)]
    rows = [torch.autograd.grad(F.cross_entropy(model(x), y), params) for x, y in every]
    for p, gradients in zip(params, zip(*rows)):
        torch.testing.assert_close(found[p], torch.stack(gradients).square().mean(0), rtol=1e-9, atol=1e-16)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("time", [4, 6])
def test_examples_in_another_dimension_than_the_first_are_not_taken_for_positions(time: int, reentrant: bool) -> None:
    """A reentrant checkpoint hides which dimension has the examples, and with as many time steps both fit."""
    model = Model(nn.Linear, 1, reentrant, time_first=True)
    optimizer = RULES["OGN"](model)
    x, y = data(0, time=time)
    F.cross_entropy(model(x), y).backward()
    params = list(model.parameters())
    if reentrant:
        with pytest.warns(UserWarning, match=r"OGN trains first\.weight, first\.bias, inner\.weight"):
            found = optimizer.sources[-1]._squares(params)
    else:
        found = optimizer.sources[-1]._squares(params)
    fallback = {p: 6 * p.grad.square() for p in params if p.grad is not None}
    model.nested = 0
    rows = [torch.autograd.grad(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), params) for i in range(6)]
    for p, gradients in zip(params, zip(*rows)):
        own = any(p is q for q in model.last.parameters()) or not reentrant
        expected = torch.stack(gradients).square().mean(0) if own else fallback[p]
        torch.testing.assert_close(found[p], expected, rtol=1e-9, atol=1e-16)


@pytest.mark.parametrize("name", list(RULES))
def test_checkpoints_around_layers_outside_of_the_model_have_passes_of_their_own(name: str) -> None:
    """As the layers themselves, whatever the model was called with before."""

    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()

    models, found = [network(), network()], []
    for model in models:
        optimizer = RULES[name](model)
        for _ in range(2):
            optimizer.zero_grad()
            model(data(2, n=5)[0][:, 0])
            for x, y in map(data, (0, 1)):
                inputs = x[:, 0].requires_grad_()
                outputs = checkpoint_sequential(model, 2, inputs, use_reentrant=True) if found else model(inputs)
                (F.cross_entropy(outputs, y) / 2).backward()
            optimizer.step()
        found.append([p.detach() for p in model.parameters()])
    for p, q in zip(*found):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
