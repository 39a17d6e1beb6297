"""Training loops that are unusual, beside the same computation in the usual order, or written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from bayesgrad import optim, samplers
from cases import weights

D = torch.float64


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3)).to(D)


def data(index: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(rows, 5, generator=generator, dtype=D), torch.randint(3, (rows,), generator=generator)


def step(model: nn.Module, optimizer: Any, index: int) -> None:
    x, y = data(index)
    optimizer.zero_grad()
    outputs = model(x)
    loss = cross_entropy(outputs, y)
    optimizer.observe(outputs, loss=loss, labels=y)
    loss.backward()
    optimizer.step()


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for name, expected in weights(other).items():
        torch.testing.assert_close(weights(model)[name], expected, rtol=1e-10, atol=1e-12, msg=name)


# --- outputs of several forward passes ---

OBSERVERS = {
    "KFAC": lambda model: optim.KFAC(model, max_norm=math.inf, seed=0),
    "KroneckerFilter": lambda model: optim.KroneckerFilter(model, batch_size=8, seed=0),
    "KroneckerFilterFP": lambda model: optim.KroneckerFilterFP(model, batch_size=8, seed=0),
    "SNGD": lambda model: samplers.SNGD(
        model, lr=0.1, num_data=100, batch_size=8, metric="kronecker", fisher="sampled", seed=0
    ),
}


@pytest.mark.filterwarnings("ignore:lr=.* (samples at temperature|is not small)")
@pytest.mark.parametrize("name", OBSERVERS)
def test_outputs_of_two_forward_passes_are_observed_as_one_batch(name: str) -> None:
    """As a discriminator's outputs for real and generated data: the number of losses is that of all outputs."""
    models = network(), network()
    for model, parts in zip(models, ([8], [5, 3])):
        optimizer: Any = OBSERVERS[name](model)
        for index in range(3):
            x, y = data(index)
            optimizer.zero_grad()
            outputs = torch.cat([model(part) for part in x.split(parts)])
            optimizer.observe(outputs, labels=y)
            cross_entropy(outputs, y).backward()
            optimizer.step()
    assert_same(*models)


class Tokens(nn.Module):
    """One prediction for each token, which depends on earlier ones."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.flat = nn.Linear(5, 6, dtype=D), nn.Linear(6, 3, dtype=D), flat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.last(torch.tanh(self.first(x)).cumsum(1))
        return outputs.flatten(0, 1) if self.flat else outputs


@pytest.mark.parametrize("rule", [optim.OGN, optim.VOGN])
def test_flattened_tokens_have_the_exact_fisher_of_sequences(rule: type) -> None:
    """The tokens of an example have independent labels: no products between them are part of its Fisher matrix."""
    models = Tokens(False), Tokens(True)
    x, y = data(0, 24)
    for model in models:
        optimizer = rule(model, num_data=100, fisher="exact", betas=(0.0, 0.5), losses_per_example=4, seed=0)
        for _ in range(2):
            with optimizer.sampled():
                optimizer.zero_grad()
                outputs = model(x.view(6, 4, 5))
                optimizer.observe(outputs)
                cross_entropy(outputs.reshape(24, 3), y).backward()
            optimizer.step()
    assert_same(*models)


# --- tensors of the caller ---


def correction(model: nn.Module) -> samplers.Langevin:
    options: Any = {"metric": "fisher", "correction": "flat", "probes": 1, "limit_step": False}
    return samplers.Langevin(model, lr=1e-3, num_data=100, damping=1.0, seed=0, **options)


STORED = {
    "NaturalGradient": lambda model: optim.NaturalGradient(model, seed=0),
    "NaturalGradient-layer": lambda model: optim.NaturalGradient(model, blocks="layer", seed=0),
    "KFAC": lambda model: optim.KFAC(model, seed=0),
    "FOOF": lambda model: optim.FOOF(model),
    "OGN": lambda model: optim.OGN(model, num_data=100),
    "DenseFilter": lambda model: optim.DenseFilter(model, batch_size=4, seed=0),
    "correction": correction,
}


@pytest.mark.filterwarnings("ignore:lr=.* (samples at temperature|is not small)")
@pytest.mark.parametrize("name", STORED)
def test_inputs_may_be_overwritten_between_backward_and_step(name: str) -> None:
    """As by a loader that fills one buffer again and again; NaturalGradient uses a batch in several steps."""
    models = network(), network()
    for model, overwrites in zip(models, (True, False)):
        optimizer: Any = STORED[name](model)
        buffer = torch.empty(4, 5, dtype=D)
        for index in range(5):
            x, y = data(index, 4)
            x = buffer.copy_(x) if overwrites else x
            optimizer.zero_grad()
            outputs = model(x)
            optimizer.observe(outputs)
            cross_entropy(outputs, y).backward()
            if overwrites:
                buffer.fill_(math.nan)
                y.zero_()
            optimizer.step()
    assert_same(*models)


# --- layers that are frozen and thawed within a step ---

LAYERWISE = {
    "FOOF": lambda model: optim.FOOF(model, max_norm=math.inf),
    "FOOF-backward": lambda model: optim.FOOF(model, max_norm=math.inf, precondition="backward"),
    "KFAC": lambda model: optim.KFAC(model, max_norm=math.inf, seed=0),
    "KFAC-backward": lambda model: optim.KFAC(model, max_norm=math.inf, precondition="backward", seed=0),
    "KroneckerFilter": lambda model: optim.KroneckerFilter(model, batch_size=8, seed=0),
    "KroneckerFilterFP": lambda model: optim.KroneckerFilterFP(model, batch_size=8, seed=0),
    "NaturalGradient": lambda model: optim.NaturalGradient(model, update_every=1, seed=0),
    "OGN": lambda model: optim.OGN(model, num_data=100),
}


@pytest.mark.parametrize("name", LAYERWISE)
def test_thawing_a_layer_before_a_step_does_not_change_that_of_others(name: str) -> None:
    """A layer that is thawed between the backward pass and the step is trained from the next pass on."""
    models = network(), network()
    for model, early in zip(models, (True, False)):
        optimizer: Any = LAYERWISE[name](model)
        model[2].requires_grad_(False)
        for index in range(6):
            x, y = data(index)
            optimizer.zero_grad()
            outputs = model(x)
            optimizer.observe(outputs, labels=y)
            cross_entropy(outputs, y).backward()
            if early and index == 2:
                model[2].requires_grad_(True)
            optimizer.step()
            if index == 2:
                model[2].requires_grad_(True)
    assert_same(*models)


@pytest.mark.parametrize("part", ["", "weight", "bias"])
@pytest.mark.parametrize("name", LAYERWISE)
def test_freezing_between_forward_and_backward_is_having_no_gradient(name: str, part: str) -> None:
    """Autograd adds nothing to the gradient of what does not require one any more."""
    models = network(), network()
    for model, freezes in zip(models, (True, False)):
        optimizer: Any = LAYERWISE[name](model)
        for index in range(4):
            x, y = data(index)
            frozen = [p for n, p in model[2].named_parameters() if n.startswith(part) and index == 2]
            optimizer.zero_grad()
            outputs = model(x)
            optimizer.observe(outputs, labels=y)
            for p in frozen:
                p.requires_grad_(not freezes)
            cross_entropy(outputs, y).backward()
            for p in frozen:
                p.grad = None
            optimizer.step()
            model.requires_grad_(True)
    assert_same(*models)


def test_half_a_layer_without_gradient_has_no_metric() -> None:
    model = network()
    sampler = samplers.Langevin(model, lr=1e-3, num_data=100, limit_step=False, seed=0)
    outputs = model(data(0)[0])
    sampler.observe(outputs)
    cross_entropy(outputs, data(0)[1]).backward()
    model[2].bias.grad = None
    with pytest.raises(RuntimeError, match="of layer '2' have a common metric, but only one of them has a gradient"):
        sampler.step()


# --- losses that are observed and not differentiated ---


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("rule", [optim.Newton, optim.VON])
def test_the_loss_of_a_micro_batch_that_is_computed_twice_is_refused(rule: Any, together: bool) -> None:
    """The number that a loss is multiplied by is that of the tensor which was observed."""
    model = network()
    optimizer = rule(model.parameters(), num_data=100, hessian="exact")

    def passes(rows: int) -> None:
        losses = []
        for x, y in zip(*(part.split(rows) for part in data(0))):
            each = cross_entropy(model(x), y, reduction="none")
            optimizer.observe(loss=each.mean())
            losses.append(each.sum() / 8)
            if not together:
                losses.pop().backward()
        if together:
            sum(losses).backward()  # pyright: ignore

    with optimizer.sampled():
        optimizer.zero_grad()
        passes(8)  # a single one has the weight 1
    optimizer.step()
    before = weights(model)

    def two() -> None:
        with optimizer.sampled():
            optimizer.zero_grad()
            passes(4)
        optimizer.step()

    with pytest.raises(RuntimeError, match="one of them was not differentiated by backward"):
        two()
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())


# --- hooks ---


@pytest.mark.parametrize("update", ["adam", "newton"])
def test_hooks_of_parameters_see_the_gradients_of_masked_weights(update: str) -> None:
    """A hook that clips acts like clipping between the backward pass and the step."""
    models = network(), network()
    for model, by_hook in zip(models, (True, False)):
        optimizer = optim.SpikeSlab(model, keep=0.5, update=update, seed=0)
        if by_hook:
            for p in model.parameters():
                p.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
        for index in range(3):
            x, y = data(index)
            with optimizer.sampled():
                optimizer.zero_grad()
                loss = cross_entropy(model(x), y)
                optimizer.observe(loss=loss)
                loss.backward()
            if not by_hook:
                nn.utils.clip_grad_value_(model.parameters(), 0.02)
            optimizer.step()
    assert_same(*models)
