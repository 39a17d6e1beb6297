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


@pytest.mark.filterwarnings("ignore:.* by Adam with learning rate fallback_lr")
@pytest.mark.parametrize("rows", [(4, 4), (30, 3)])
@pytest.mark.parametrize("kind", ["tokens", "many inputs"])
@pytest.mark.parametrize("name", ["FOOF", "KFAC", "SpectralFOOF"])
def test_micro_batches_may_be_in_one_buffer(name: str, kind: str, rows: tuple[int, int]) -> None:
    """Tokens were counted as those of the last one, and rows that were fewer than those before were lost."""
    found = []
    for overwrites in (True, False):
        torch.manual_seed(0)
        first = nn.Embedding(20, 4) if kind == "tokens" else nn.Linear(40, 12)
        model = nn.Sequential(first, nn.Flatten(), nn.Linear(12, 3)).to(D)
        optimizer: Any = STORED.get(name, optim.SpectralFOOF)(model)
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            optimizer.zero_grad()
            buffer = torch.zeros(30, 3, dtype=torch.long) if kind == "tokens" else torch.zeros(30, 40, dtype=D)
            for n in rows:
                x = torch.randint(20, (n, 3), generator=generator)
                x = x if kind == "tokens" else torch.randn(n, 40, generator=generator, dtype=D)
                x = buffer[:n].copy_(x) if overwrites else x
                outputs = model(x)
                optimizer.observe(outputs)
                (cross_entropy(outputs, torch.zeros(n, dtype=torch.long)) * n / sum(rows)).backward()
            buffer.zero_()
            optimizer.step()
        found.append(model)
    assert_same(*found)


EMPIRICAL = {
    "OGN": lambda model: optim.OGN(model, lr=0.1, num_data=100, betas=(0.9, 0.5)),
    "KroneckerFilter": lambda model: optim.KroneckerFilter(model, batch_size=8, fisher="empirical", stats_every=1),
    "KroneckerFilterFP": lambda model: optim.KroneckerFilterFP(model, batch_size=8, fisher="centered", stats_every=1),
}


@pytest.mark.parametrize("order", ["another pass", "two passes", "copies", "concatenated"])
@pytest.mark.parametrize("name", EMPIRICAL)
def test_ignored_labels_are_those_of_the_pass_of_the_observed_outputs(name: str, order: str) -> None:
    """Whatever pass is the latest; outputs of two passes that are concatenated count in both as in one batch."""
    models = network(), network()
    for model, usual in zip(models, (False, True)):
        optimizer: Any = EMPIRICAL[name](model)
        for index in range(4):
            x, y = data(index, 16)
            y[1:7] = -100  # six labels of the first half are ignored, and two of the other
            y[12:14] = -100
            if order == "concatenated":
                y[8:12] = -100  # as many in both
            optimizer.zero_grad()
            outputs: list[Any] = []
            for half in (slice(8), slice(8, 16)):
                outputs.append(model(x[half]))
                if usual:
                    optimizer.observe(outputs[-1], labels=y[half])
                elif order == "another pass":
                    model(x[:3].requires_grad_())
                    optimizer.observe(outputs[-1], labels=y[half])
            if not usual and order in ("two passes", "copies"):
                for one, half in zip(outputs, (slice(8), slice(8, 16))):
                    optimizer.observe(one.clone() if order == "copies" else one, labels=y[half])
            if not usual and order == "concatenated":
                optimizer.observe(torch.cat(outputs), labels=y)
            cross_entropy(torch.cat(outputs), y).backward()
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


def pass_while_frozen(model: Any, part: str, gradients: bool) -> None:
    """As of a generator through its discriminator, or of a reference model without adapters."""
    frozen = [p for n, p in model.named_parameters() if n.endswith(part)]
    for p in frozen:
        p.requires_grad_(False)
    with torch.set_grad_enabled(gradients):
        z = data(7)[0].requires_grad_(gradients)
        outputs = model(z)
        if gradients:
            torch.autograd.grad(outputs.sum(), z)
    for p in frozen:
        p.requires_grad_(True)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("part", ["", "bias"])
@pytest.mark.parametrize("place", ["observe", "backward", "second micro-batch", "step"])
@pytest.mark.parametrize("name", LAYERWISE)
def test_a_forward_pass_of_frozen_weights_within_a_step_changes_nothing(
    name: str, place: str, part: str, gradients: bool
) -> None:
    """What was recorded of the other passes is used: peft's `disable_adapter`, Lightning's `toggle_optimizer`."""
    models = network(), network()
    for model, between in zip(models, (True, False)):
        optimizer: Any = LAYERWISE[name](model)

        def extra(now: str, model: nn.Module = model, between: bool = between) -> None:
            if between and now == place:
                pass_while_frozen(model, part, gradients)

        for index in range(4):
            optimizer.zero_grad()
            for half in range(2):
                x, y = data(2 * index + half)
                outputs = model(x)
                extra("observe")
                optimizer.observe(outputs, labels=y)
                extra("backward")
                (cross_entropy(outputs, y) / 2).backward()
                extra("second micro-batch" if half == 0 else "step")
            optimizer.step()
    assert_same(*models)


@pytest.mark.parametrize("name", LAYERWISE)
def test_a_model_that_another_part_has_frozen_takes_the_step_of_its_gradient(name: str) -> None:
    """Both steps of a GAN at the end, with a pass of the generator while the discriminator is frozen."""
    models = network(), network()
    for model, frozen in zip(models, (True, False)):
        optimizer: Any = LAYERWISE[name](model)
        for index in range(4):
            x, y = data(index)
            optimizer.zero_grad()
            outputs = model(x)
            optimizer.observe(outputs, labels=y)
            cross_entropy(outputs, y).backward()
            model.requires_grad_(not frozen)
            torch.autograd.grad(model(z := data(7)[0].requires_grad_()).sum(), z)
            optimizer.step()
            model.requires_grad_(True)
    assert_same(*models)


@pytest.mark.parametrize("name", LAYERWISE)
def test_a_layer_that_was_frozen_when_the_optimizer_was_built_trains_with_scaled_losses(name: str) -> None:
    """What its gradient is multiplied by before the step is known: the scale of a GradScaler changes nothing."""
    models = network(), network()
    for model, scale in zip(models, (1024.0, 1.0)):
        model[0].requires_grad_(False)
        optimizer: Any = LAYERWISE[name](model)
        model[0].requires_grad_(True)
        for index in range(4):
            x, y = data(index)
            optimizer.zero_grad()
            outputs = model(x)
            optimizer.observe(outputs, labels=y)
            (scale * cross_entropy(outputs, y)).backward()
            for p in model.parameters():
                assert p.grad is not None
                p.grad.mul_(1 / scale)
            optimizer.step()
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


# --- gradients that the backward pass preconditions ---

IN_BACKWARD = {name: make for name, make in LAYERWISE.items() if name.endswith("backward")} | {
    "KroneckerFilterFP": lambda model: optim.KroneckerFilterFP(
        model, batch_size=8, momentum=0.0, precondition="backward", seed=0
    )
}


@pytest.mark.parametrize("name", IN_BACKWARD)
def test_two_steps_with_one_gradient_are_equal(name: str) -> None:
    """`.grad` is the preconditioned gradient, in the second step too, until it is replaced."""
    model = network()
    optimizer: Any = IN_BACKWARD[name](model)
    for index in range(5):
        step(model, optimizer, index)
    seen = [weights(model)]
    step(model, optimizer, 5)
    seen.append(weights(model))
    optimizer.step()
    seen.append(weights(model))
    for key in seen[0]:
        torch.testing.assert_close(seen[2][key] - seen[1][key], seen[1][key] - seen[0][key], rtol=1e-9, atol=1e-12)


def test_a_penalty_of_biases_from_the_first_step_on_is_preconditioned_in_the_step() -> None:
    found = []
    for place in ("step", "backward"):
        model = network()
        optimizer = optim.FOOF(
            model, lr=0.1, max_norm=math.inf, precondition=place, update_every=10**6, stats_every=10**6
        )
        for index in range(4):
            x, y = data(index)
            optimizer.zero_grad()
            (cross_entropy(model(x), y) + sum(model[k].bias.square().sum() for k in (0, 2, 4))).backward()
            optimizer.step()
        found.append(weights(model))
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-9, atol=1e-12)


def squared_slopes(outputs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    (slopes,) = torch.autograd.grad(outputs.logsumexp(1).sum(), x, create_graph=True)
    return slopes.square().sum(1).mean()


HOW = ["one pass", "two passes", "two batches", "weights", "weights first", "weights in the loss", "biases in the loss"]


@pytest.mark.parametrize("how", HOW)
def test_terms_of_penalties_are_preconditioned_or_refused(how: str) -> None:
    """The step is that of the gradient of loss and penalty, with the factors of earlier steps."""
    model = network()
    optimizer = optim.FOOF(
        model, lr=0.1, max_norm=math.inf, precondition="backward", update_every=10**6, stats_every=10**6
    )
    for index in range(4):
        step(model, optimizer, index)
    before, (x, y) = weights(model), data(9)
    inverses = [optimizer.state[model[k].weight]["input_inverse"][0].clone() for k in (0, 2, 4)]
    outputs = model(x.requires_grad_())
    loss = cross_entropy(outputs, y)
    gradients = torch.autograd.grad(loss + squared_slopes(outputs, x), list(model.parameters()), retain_graph=True)
    optimizer.zero_grad()
    optimizer.preconditioner.recorded.marks.twice.clear()  # of the gradients above
    outputs = model(x)
    loss = cross_entropy(outputs, y)
    if how == "one pass":
        (loss + squared_slopes(outputs, x)).backward()
    elif how == "two passes":
        penalty = squared_slopes(outputs, x)
        loss.backward(retain_graph=True)
        penalty.backward()
    else:
        of_weights = sum(p.square().sum() for p in model.parameters())
        terms: list[Any] = [lambda: loss, lambda: of_weights]
        if how == "two batches":
            terms = [lambda: loss, lambda: squared_slopes(model(x), x)]
        elif how.endswith("in the loss"):
            some = of_weights if how.startswith("weights") else sum(model[k].bias.square().sum() for k in (0, 2, 4))
            terms = [lambda: loss + some]
        for term in reversed(terms) if how == "weights first" else terms:
            term().backward()
        with pytest.raises(RuntimeError, match=r"gradient of layer '0' is a sum of terms of which .*'step'"):
            optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
        return
    optimizer.step()
    for k, inverse, weight, bias in zip((0, 2, 4), inverses, gradients[::2], gradients[1::2]):
        direction = torch.cat([weight, bias[:, None]], 1) @ inverse
        found = torch.cat([model[k].weight, model[k].bias[:, None]], 1)
        expected = torch.cat([before[f"{k}.weight"], before[f"{k}.bias"][:, None]], 1) - 0.1 * direction
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def bounded(model: nn.Module, place: str = "backward") -> optim.FOOF:
    """Steps that are shortened; factors are those of the first three steps."""
    return optim.FOOF(model, max_norm=1e-3, precondition=place, update_every=10**6, stats_every=10**6)


@pytest.mark.parametrize("place", ["step", "backward"])
def test_a_gradient_that_is_discarded_does_not_shorten_a_step(place: str) -> None:
    models = network(), network()
    for model, frozen in zip(models, (True, False)):
        optimizer = bounded(model, place)
        for index in range(4):
            step(model, optimizer, index)
        model[2].requires_grad_(not frozen)
        optimizer.zero_grad()
        cross_entropy(model(data(4)[0]), data(4)[1]).backward()
        for p in model[2].parameters():
            p.grad = None
        optimizer.step()
    assert_same(*models)


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = network()[::2]
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        return self.last(hidden if self.skips else hidden + self.middle(hidden).tanh())


def test_the_norms_of_micro_batches_count_whichever_layers_they_use() -> None:
    """A layer that the first micro-batch did not use has no gradient before the second; the others have."""
    models = Skipping(), Skipping()
    for model, order in zip(models, ((True, False), (False, True))):
        optimizer = bounded(model)
        for index in range(4):
            step(model, optimizer, index)
        optimizer.zero_grad()
        for model.skips in order:
            x, y = data(10 + model.skips)
            (cross_entropy(model(x), y) / 2).backward()
        optimizer.step()
    assert_same(*models)
