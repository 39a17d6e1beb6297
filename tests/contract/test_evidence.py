"""Evidence is what made the gradients, whatever else happens around them: loops that are not the usual one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from bayesgrad.curvature import SubsampledFisher
from bayesgrad.optim import FOOF, KFAC, NaturalGradient
from cases import observe

D = torch.float64
every_rule = pytest.mark.parametrize("rule", [FOOF, KFAC, NaturalGradient], ids=lambda rule: rule.__name__)
factored = pytest.mark.parametrize("rule", [FOOF, KFAC], ids=lambda rule: rule.__name__)
observing = pytest.mark.parametrize("rule", [KFAC, NaturalGradient], ids=lambda rule: rule.__name__)


def linear(*sizes: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(*sizes, bias=bias).to(D)


def loss(outputs: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, torch.zeros(len(outputs), dtype=torch.long))


class Watched:
    """FOOF on one layer, and whether its step was the one that some inputs ask for."""

    def __init__(self) -> None:
        self.layer = linear(6, 3)
        self.optimizer = FOOF(self.layer, lr=1.0, damping=0.3)
        self.before = self.layer.weight.detach().clone()

    def check(self, inputs: torch.Tensor) -> None:
        self.optimizer.step()
        a = torch.cat([inputs, torch.ones(len(inputs), 1, dtype=D)], 1)
        gradient = torch.cat([self.layer.weight.grad, self.layer.bias.grad[:, None]], 1)
        step = gradient @ torch.linalg.inv(a.T @ a / len(inputs) + 0.3 * torch.eye(7, dtype=D))
        torch.testing.assert_close(self.before - self.layer.weight.detach(), step[:, :-1])


def test_an_input_buffer_may_be_used_again() -> None:
    watched, batches, buffer = Watched(), torch.randn(2, 8, 6, dtype=D), torch.empty(8, 6, dtype=D)
    for x in batches:
        buffer.copy_(x)
        (watched.layer(buffer).square().mean() / 2).backward()
    watched.check(batches.flatten(0, 1))
    layers = [linear(64, 30, bias=False) for _ in range(2)]
    optimizers = [FOOF(layer, lr=0.1, update_every=2) for layer in layers]
    buffer = torch.empty(4, 64, dtype=D)
    for i in range(8):
        x = (i + 1) * torch.randn(4, 64, dtype=D)
        for layer, optimizer, seen in zip(layers, optimizers, (buffer.copy_(x), x)):
            optimizer.zero_grad()
            layer(seen).square().mean().backward()
            optimizer.step()
    assert torch.equal(layers[0].weight, layers[1].weight)


@observing
def test_an_observed_buffer_may_be_used_again(rule: type) -> None:
    layers, batches = [linear(6, 3), linear(6, 3)], torch.randn(2, 8, 6, dtype=D)
    for layer, again in zip(layers, (True, False)):
        optimizer, buffer = rule(layer), batches[0].clone()
        optimizer.observe(layer(buffer), torch.ones(8, dtype=torch.long))
        loss(layer(buffer.copy_(batches[1]) if again else batches[1])).backward()
        optimizer.step()
    assert torch.equal(layers[0].weight, layers[1].weight)


def test_an_input_that_changes_before_the_backward_pass_is_one_clear_error() -> None:
    layer, x = nn.Linear(6, 3), torch.randn(8, 6)
    FOOF(layer)  # listens for as long as it lives
    optimizer = FOOF(layer)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = layer(x)
    x.add_(100)
    with pytest.raises(RuntimeError, match="the input of layer '' was changed in place before the backward pass"):
        outputs.float().square().mean().backward()
    assert optimizer.tap.uses[""] == []


def test_passes_that_leave_nothing_in_grad_are_no_evidence() -> None:
    watched, inputs = Watched(), []
    for _ in range(2):
        x = 100 * torch.randn(8, 6, dtype=D, requires_grad=True)
        torch.autograd.grad(watched.layer(x).square().sum(), x)
        inputs.append(torch.randn(8, 6, dtype=D))
        (watched.layer(inputs[-1]).square().mean() / 2).backward()
    SubsampledFisher(watched.layer, 10 * x.detach() + 1)
    values = {name: p.detach() for name, p in watched.layer.named_parameters()}
    call = torch.func.grad(lambda p, x: torch.func.functional_call(watched.layer, p, (x[None],)).sum())
    torch.func.vmap(call, (None, 0))(values, torch.randn(4, 6, dtype=D))
    assert len(watched.optimizer.tap.uses[""]) == 2
    watched.check(torch.cat(inputs))


@pytest.mark.parametrize("order", [1, -1])
def test_several_forward_passes_in_one_backward_pass_are_several_batches(order: int) -> None:
    watched, x = Watched(), torch.randn(32, 6, dtype=D)
    (sum(watched.layer(part).square().sum() for part in (x[:8], x[8:])[::order]) / 32).backward()
    watched.check(x)


def test_gradients_that_are_set_to_zero_begin_anew() -> None:
    watched, x = Watched(), torch.randn(8, 6, dtype=D)
    loss(watched.layer(1e3 * torch.randn(8, 6, dtype=D))).backward()
    watched.layer.zero_grad(set_to_none=False)
    loss(watched.layer(x)).backward()
    watched.check(x)


def test_an_empty_batch_is_no_evidence() -> None:
    watched, x = Watched(), torch.randn(8, 6, dtype=D)
    watched.layer(torch.empty(0, 6, dtype=D)).sum().backward()
    loss(watched.layer(x)).backward()
    watched.check(x)


@every_rule
def test_a_skipped_batch_leaves_nothing_behind(rule: type) -> None:
    layer = linear(6, 3)
    optimizer = rule(layer, nonfinite="skip", update_every=1)
    for i in range(3):
        layer.zero_grad()
        x = torch.randn(8, 6, dtype=D)
        x[0] *= float("nan") if i == 1 else 1
        outputs = layer(x)
        observe(optimizer, outputs, torch.ones(8, dtype=torch.long))
        loss(outputs).backward()
        optimizer.step()
    assert all(bool(torch.isfinite(p).all()) for p in layer.parameters())
    assert optimizer.state[layer.weight]["step"] == 2


# --- what layers do not explain ---


class Raw(nn.Module):
    """An embedding whose weight is read once more, as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x).mean(1) @ self.table.weight.T


@every_rule
def test_a_weight_that_something_else_reads_takes_the_fallback_and_is_named(rule: type) -> None:
    model = Raw()
    optimizer = rule(model)
    outputs = model(torch.randint(0, 5, (8, 4)))
    observe(optimizer, outputs, None)
    loss(outputs).backward()
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    with pytest.warns(UserWarning, match=r"has no model of table.weight"):
        optimizer.step()


@factored
def test_a_bias_that_layers_share_takes_the_fallback_and_is_named(rule: type) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].bias = model[0].bias
    with pytest.warns(UserWarning, match=r"has no model of 0.bias"):
        rule(model)


class Sorting(nn.Module):
    """Example 0 and the last are where they were; the others are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = x[:, 0].argsort()
        return self.last(torch.tanh(self.first(x[order]))[order.argsort()])


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].register_forward_hook(lambda module, args, output: output * torch.arange(5, dtype=D))
    return model


def replaced() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    first = model[0]
    first.forward = lambda x: F.linear(x, first.weight, first.bias) * torch.arange(5, dtype=D)
    return model


@pytest.mark.parametrize("build", [Sorting, hooked, replaced], ids=lambda build: build.__name__)
def test_a_fisher_is_right_where_layers_are_not_what_they_seem(build) -> None:
    torch.manual_seed(0)
    model, x, y = build().to(D), torch.randn(8, 6, dtype=D), torch.randint(0, 3, (8,))
    x[0, 0], x[-1, 0] = -9, 9
    rows = []
    for i in range(8):
        own = torch.autograd.grad(F.cross_entropy(model(x)[i : i + 1], y[i : i + 1]), list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in own]))
    explicit = torch.stack(rows)
    fisher = SubsampledFisher(model, x, fisher="empirical", labels=y)
    torch.testing.assert_close(fisher.dense(), explicit.T @ explicit / 8)


@every_rule
def test_layers_that_are_pruned_later_are_one_clear_error(rule: type) -> None:
    layer = nn.Linear(6, 3)
    optimizer = rule(layer)
    prune.l1_unstructured(layer, "weight", 0.5)
    outputs = layer(torch.randn(8, 6))
    observe(optimizer, outputs, None)
    loss(outputs).backward()
    with pytest.raises(RuntimeError, match="if layers were replaced or pruned, build it anew"):
        optimizer.step()


# --- settings that change ---


@every_rule
def test_thawed_layers_are_modelled(rule: type) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    model[0].requires_grad_(False)
    optimizer = rule(model)
    for frozen in (True, False):
        model[0].requires_grad_(not frozen)
        optimizer.zero_grad()
        outputs = model(torch.randn(8, 6))
        observe(optimizer, outputs, None)
        loss(outputs).backward()
        optimizer.step()
        known = optimizer.state.get(model[0].weight, {})
        assert (not frozen) == any(name in known for name in ("input_moment", "outer_inputs"))


@factored
def test_a_weight_may_be_frozen_later(rule: type) -> None:
    layer = nn.Linear(6, 3)
    optimizer = rule(layer)
    layer.weight.requires_grad_(False)
    before, bias = layer.weight.clone(), layer.bias.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        outputs = layer(torch.randn(8, 6))
        observe(optimizer, outputs, None)
        loss(outputs).backward()
        optimizer.step()
    assert torch.equal(layer.weight, before)
    assert not torch.equal(layer.bias, bias)


@every_rule
def test_a_change_of_damping_is_followed_at_once(rule: type) -> None:
    layer = linear(6, 3)
    optimizer = rule(layer, lr=1.0)
    for i in range(12):
        if i == 11:
            optimizer.param_groups[0]["damping"] = 1e8
        before = layer.weight.detach().clone()
        optimizer.zero_grad()
        outputs = layer(torch.randn(8, 6, dtype=D))
        observe(optimizer, outputs, None)
        loss(outputs).backward()
        optimizer.step()
    assert 0 < (layer.weight - before).norm() < 1e-3


@factored
def test_training_goes_on_after_a_singular_factor(rule: type) -> None:
    layer = linear(6, 3)
    optimizer = rule(layer, damping=0.0)
    for damping in (0.0, 0.1):
        optimizer.param_groups[0]["damping"] = damping
        optimizer.zero_grad()
        outputs = layer(torch.randn(2, 6, dtype=D))
        observe(optimizer, outputs, None)
        loss(outputs).backward()
        if damping:
            optimizer.step()
            assert optimizer.state[layer.weight]["step"] == 1
        else:
            with pytest.raises(ValueError, match="is singular with damping 0"):
                optimizer.step()


@factored
def test_a_model_may_be_cast_during_a_run(rule: type) -> None:
    layer = nn.Linear(64, 3)
    optimizer = rule(layer)
    for _ in range(3):
        optimizer.zero_grad()
        outputs = layer(torch.randn(8, 64, dtype=layer.weight.dtype))
        observe(optimizer, outputs, None)
        loss(outputs).backward()
        optimizer.step()
        layer.double()
    assert optimizer.state[layer.weight]["input_moment"].dtype == D


def test_the_gram_matrix_is_that_of_the_parameters_that_take_part() -> None:
    """Of three layers another two have gradients in each step; the Fisher stays."""

    def outputs(model: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        return model[0](x) + model[1](x) + 10 * model[2](x)

    moved = []
    for fresh in (False, True):
        torch.manual_seed(0)
        model, x = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)]).to(D), torch.randn(8, 4, dtype=D)
        optimizer = NaturalGradient(model, lr=1.0, likelihood="gaussian", update_every=10)
        optimizer.observe(outputs(model, x))
        for absent in (2, 1):
            optimizer.zero_grad()
            outputs(model, x).square().mean().backward()
            model[absent].weight.grad = None
            before = model[2].weight.detach().clone()
            if fresh:
                for p in model.parameters():
                    optimizer.state[p].pop("gram", None)
            optimizer.step()
        moved.append(model[2].weight.detach() - before)
    torch.testing.assert_close(*moved)


def test_one_damping_for_the_whole_network() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "damping": 3.0}]
    optimizer = NaturalGradient(model, params=groups)
    outputs = model(torch.randn(8, 6))
    optimizer.observe(outputs)
    loss(outputs).backward()
    with pytest.raises(ValueError, match="blocks='full' has one damping for all groups"):
        optimizer.step()


# --- checkpoints and copies ---


def test_states_of_natural_gradients_fit_or_are_refused() -> None:
    def trained(width: int) -> tuple[nn.Module, NaturalGradient]:
        model = nn.Sequential(nn.Linear(6, width), nn.Linear(width, 3), nn.ModuleList([nn.Linear(3, 3)]))
        optimizer = NaturalGradient(model)
        hidden = model[1](model[0](torch.randn(8, 6)))
        optimizer.observe(hidden + model[2][0](hidden))
        loss(hidden).backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = trained(5)
    NaturalGradient(model).load_state_dict(optimizer.state_dict())  # the last layer was observed and took no step
    with pytest.raises(ValueError, match=r"0.weight in the saved state are of another shape than \(7, 6\)"):
        trained(7)[1].load_state_dict(optimizer.state_dict())


@every_rule
def test_hooks_are_removed_with_their_optimizer(rule: type) -> None:
    layer = nn.Linear(6, 3)
    for _ in range(5):
        rule(layer)
    optimizer = rule(layer)
    assert len(layer._forward_hooks) == len(layer._forward_pre_hooks) == 1
    del optimizer
    assert not layer._forward_hooks


@observing
def test_observing_what_are_no_outputs_is_one_clear_error(rule: type) -> None:
    layer = nn.Linear(6, 3)
    optimizer = rule(layer)
    outputs = layer(torch.randn(8, 6))
    with pytest.raises(TypeError, match="outputs must be one tensor, got tuple"):
        optimizer.observe((outputs, outputs))
    with pytest.raises(ValueError, match="must have a first dimension that counts examples, got a single number"):
        optimizer.observe(outputs.sum())
    with pytest.raises(TypeError, match="labels must be a tensor, got list"):
        optimizer.observe(outputs, [0] * 8)


def test_gradients_that_are_asked_for_by_autograd_grad_are_no_evidence() -> None:
    """A penalty on the gradient of the loss by the weights, say: nothing of it is in .grad."""
    model, other = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
    other.load_state_dict(model.state_dict())
    x = torch.randn(5, 4, dtype=torch.float64)
    optimizer, plain = FOOF(model, 0.1), FOOF(other, 0.1)
    gradients = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert all(bool(g.any()) for g in gradients)
    for network in (model, other):
        network(x).sum().backward()
    optimizer.step()
    plain.step()
    assert torch.equal(model.weight, other.weight)
