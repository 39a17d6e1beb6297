"""The natural gradient against dense solves, and its options against their definitions."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesgrad import SubsampledFisher
from bayesgrad.optim import NaturalGradient

PLAIN: dict[str, Any] = {"max_norm": math.inf, "update_every": 1, "momentum": 0}  # the equations of the paper

D = torch.float64


def flat(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def mlp(dtype: torch.dtype = D) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def data(n: int, seed: int = 0, dtype: torch.dtype = D) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=generator, dtype=D).to(dtype), torch.randint(0, 3, (n,), generator=generator)


def conv() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 2, groups=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(4, 3)]
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), *layers).to(D)


@pytest.mark.parametrize("build", [mlp, conv])
@pytest.mark.parametrize("blocks", ["full", "layer"])
def test_independent_batch_against_a_dense_solve(build, blocks: str) -> None:
    model = build()
    optimizer = NaturalGradient(
        model,
        lr=0.1,
        damping=0.05,
        max_norm=math.inf,
        blocks=blocks,
        update_every=2,
        weight_decay=0.3,
        momentum=0,
        seed=5,
    )
    fisher = torch.zeros(0)
    draws = {0: 0, 1: 1, 2: 2, 4: 3}  # steps that update the Fisher matrix, and the draw of labels
    for t in range(6):
        optimizer.zero_grad()
        observed, _ = data(9, 10 + t)
        x, y = data(6, t)
        outputs = model(observed)
        optimizer.observe(outputs)
        if t in draws:
            draw = torch.Generator().manual_seed((5 * 0x9E3779B97F4A7C15 + draws[t]) % 2**63)
            fisher = SubsampledFisher(model, observed, labels=_labels(outputs, draw)).dense()
        if blocks == "layer":
            kept = torch.zeros_like(fisher)
            start = 0
            for layer in (m for m in model if list(m.parameters())):
                end = start + sum(p.numel() for p in layer.parameters())
                kept[start:end, start:end] = fisher[start:end, start:end]
                start = end
            fisher = kept
        F.cross_entropy(model(x), y).backward()
        before, g = flat(model), gradient(model)
        optimizer.step()
        step = torch.linalg.solve(fisher + 0.05 * torch.eye(len(fisher), dtype=D), g)
        torch.testing.assert_close(flat(model), before * (1 - 0.1 * 0.3) - 0.1 * step, rtol=1e-10, atol=1e-11)


def _labels(outputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    u = torch.rand(len(outputs), dtype=D, generator=generator)
    return (outputs.softmax(1).cumsum(1) <= u[:, None]).sum(1)


@pytest.mark.parametrize("ratio", [7e2, 7e4, 7e6])
def test_same_batch_and_labels_take_the_stable_form(ratio: float) -> None:
    """In float32, where the general form has an error of 5e-8 lambda_max/damping, against float64."""
    model, exact = mlp(torch.float32), mlp()
    exact.load_state_dict({name: p.to(D) for name, p in model.state_dict().items()})
    x, y = data(12, dtype=torch.float32)
    fisher = SubsampledFisher(exact, x.to(D), labels=y, fisher="empirical")
    damping = torch.linalg.eigvalsh(fisher.gram())[-1].item() / ratio
    optimizer = NaturalGradient(model, lr=1.0, damping=damping, **PLAIN)
    outputs = model(x)
    optimizer.observe(outputs, labels=y)
    F.cross_entropy(outputs, y).backward()
    before = flat(model)
    F.cross_entropy(exact(x.to(D)), y).backward()
    expected = fisher.solve(gradient(exact), damping)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # so that adding the step to the weights does not round it
    optimizer.step()
    error = (flat(model).to(D) + expected).norm() / expected.norm()
    assert error < 2e-4, before


def test_two_observations_are_one_batch() -> None:
    model, other = mlp(), mlp()
    x, y = data(10)
    halves, whole = NaturalGradient(model), NaturalGradient(other)
    for part in (slice(0, 4), slice(4, 10)):
        halves.observe(model(x[part]), labels=y[part])
    whole.observe(other(x), labels=y)
    for net, optimizer in ((model, halves), (other, whole)):
        F.cross_entropy(net(data(5, 3)[0]), data(5, 3)[1]).backward()
        optimizer.step()
    torch.testing.assert_close(flat(model), flat(other), rtol=1e-12, atol=1e-13)


def test_the_quadratic_model_chooses_step_and_momentum() -> None:
    """(a, m) minimise g'd + d'(F + damping I)d/2 over d = -(a n + m b), b the buffer; by the normal equations."""
    model = mlp()
    optimizer = NaturalGradient(model, lr=0.5, damping=0.05, step_size="quadratic", **PLAIN | {"momentum": 0.9})
    buffer = torch.zeros(0)
    for t in range(4):
        optimizer.zero_grad()
        observed, labels = data(9, 10 + t)
        optimizer.observe(model(observed), labels=labels)
        damped = SubsampledFisher(model, observed, labels=labels, fisher="empirical").dense()
        damped = damped + 0.05 * torch.eye(len(damped), dtype=D)
        x, y = data(6, t)
        F.cross_entropy(model(x), y).backward()
        g, before = gradient(model), flat(model)
        natural = torch.linalg.solve(damped, g)
        basis = torch.stack([natural] if t == 0 else [natural, buffer], 1)
        best = torch.linalg.solve(basis.T @ damped @ basis, basis.T @ g)
        buffer = basis @ best
        optimizer.step()
        torch.testing.assert_close(flat(model), before - 0.5 * buffer, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("step_size", ["lr", "quadratic"])
def test_momentum_that_is_switched_off_leaves_no_buffer(step_size: str) -> None:
    """Neither in that step, nor for momentum that is switched on again."""
    found = []
    for deleted in (False, True):
        model = mlp()
        optimizer = NaturalGradient(model, lr=0.5, damping=0.05, step_size=step_size, **PLAIN | {"momentum": 0.9})
        for t, momentum in enumerate((0.9, 0.9, 0.0, 0.9)):
            optimizer.param_groups[0]["momentum"] = momentum
            for p in model.parameters() if deleted and t > 1 else ():
                optimizer.state[p].pop("momentum", None)
            optimizer.zero_grad()
            x, y = data(8, t)
            outputs = model(x)
            optimizer.observe(outputs, labels=y)
            F.cross_entropy(outputs, y).backward()
            optimizer.step()
            found.append(flat(model))
    for kept, without in zip(found[:4], found[4:]):
        torch.testing.assert_close(kept, without, rtol=1e-12, atol=0)


def test_without_momentum_the_quadratic_model_takes_the_whole_step() -> None:
    model, other = mlp(), mlp()
    x, y = data(9)
    for net, options in ((model, {"step_size": "quadratic"}), (other, {})):
        optimizer = NaturalGradient(net, lr=1.0, damping=0.05, **PLAIN | options)
        optimizer.observe(net(data(7, 1)[0]), labels=data(7, 1)[1])
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(flat(model), flat(other), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("lr", "grows"), [(0.05, False), (60.0, True)])
def test_damping_adapts_to_how_well_the_model_predicts(lr: float, grows: bool) -> None:
    """The model predicts small steps well; much too large steps increase the loss."""
    model = mlp()
    optimizer = NaturalGradient(model, lr=lr, damping=0.05, adapt_damping=True, **PLAIN)
    x, y = data(30)
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        outputs = model(x)
        optimizer.observe(outputs)
        loss = F.cross_entropy(outputs, y)
        loss.backward()
        calls.append(loss.item())
        return loss

    for _ in range(5):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step(closure)
    assert len(calls) == 6
    assert any(not torch.equal(before[name], p) for name, p in model.named_parameters())
    factor = (19 / 20) ** 5
    expected = 0.05 / factor if grows else 0.05 * factor
    assert optimizer.param_groups[0]["damping"] == pytest.approx(expected, rel=1e-12)
    assert optimizer.param_groups[0]["draws"] == 5
    with pytest.raises(ValueError, match=r"adapt_damping=True compares losses .* use step\(closure\)"):
        optimizer.step()


def regression(optimizer: NaturalGradient, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    """A closure of half the mean square of errors."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        outputs = model(x)
        optimizer.observe(outputs)
        loss = (outputs - y).square().mean() / 2
        loss.backward()
        return loss

    return closure


def test_the_predicted_change_of_the_loss_includes_weight_decay() -> None:
    """The change of a quadratic loss is the one that its quadratic model predicts, but for sampled labels."""
    torch.manual_seed(0)
    model, x, weight = nn.Linear(3, 1).to(D), torch.randn(400, 3, dtype=D), torch.tensor([[3.0, 2.0, 1.0]], dtype=D)
    y = x @ weight.T
    with torch.no_grad():
        model.weight.copy_(0.9 * weight)
    options = {"likelihood": "gaussian", "weight_decay": 1.0, "adapt_damping": True, "seed": 0}
    optimizer = NaturalGradient(model, lr=0.5, damping=0.3, **options, **PLAIN)
    closure, losses, predicted = regression(optimizer, model, x, y), [], []
    for _ in range(6):
        losses.append(optimizer.step(closure).item())
        predicted.append(optimizer.preconditioner.predicted_change)
    changes = [after - before for before, after in pairwise(losses)]
    assert predicted[:-1] == pytest.approx(changes, rel=0.1)


def test_a_predicted_rise_of_the_loss_never_lowers_the_damping() -> None:
    """Momentum carries a step uphill, as the quadratic model of a linear regression predicts."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1).to(D), torch.randn(20, 3, dtype=D)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=D)
    options = {"likelihood": "gaussian", "momentum": 0.9, "adapt_damping": True}
    optimizer = NaturalGradient(model, lr=0.2, damping=0.3, **PLAIN | options)
    closure, rises = regression(optimizer, model, x, y), 0
    for _ in range(60):
        damping, before = optimizer.param_groups[0]["damping"], closure().item()
        optimizer.step(closure)
        changed = optimizer.param_groups[0]["damping"] - damping
        if closure().item() > before and changed:
            rises += 1
            assert changed > 0
    assert rises >= 3


@pytest.mark.parametrize("labelled", [False, True])
def test_terms_divide_the_fisher(labelled: bool) -> None:
    """With T losses per example the Fisher matrix is that of their sum; for the mean loss it is divided by T."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(D)
    x, y = torch.randn(6, 5, 4, dtype=D), torch.randint(0, 3, (6, 5))
    optimizer = NaturalGradient(model, lr=1.0, damping=0.05, losses_per_example=5, **PLAIN)
    outputs = model(x)
    optimizer.observe(outputs, labels=y if labelled else 2 - y)
    F.cross_entropy(outputs.flatten(0, 1), y.flatten()).backward()
    fisher = SubsampledFisher(model, x, labels=y if labelled else 2 - y).dense() / 5
    before, g = flat(model), gradient(model)
    optimizer.step()
    step = torch.linalg.solve(fisher + 0.05 * torch.eye(len(fisher), dtype=D), g)
    torch.testing.assert_close(flat(model), before - step, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("update_every", [1, 10])
def test_a_state_without_examples_holds_no_rows_and_observes_at_the_next_step(update_every: int) -> None:
    def steps(model: nn.Module, optimizer: NaturalGradient, numbers: range) -> None:
        for index in numbers:
            x, y = data(7, index)
            optimizer.zero_grad()
            outputs = model(x)
            optimizer.observe(outputs)
            F.cross_entropy(outputs, y).backward()
            optimizer.step()

    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.5, "update_every": update_every}
    model, other = mlp(), mlp()
    optimizer = NaturalGradient(model, **options)
    steps(model, optimizer, range(15))
    saved = optimizer.state_dict_without_examples()
    assert {name for entry in saved["state"].values() for name in entry} == {"step", "momentum", "clock"}
    assert any("inputs" in name for entry in optimizer.state_dict()["state"].values() for name in entry)
    other.load_state_dict(model.state_dict())
    resumed = NaturalGradient(other, **options)
    resumed.load_state_dict(saved)
    before = resumed.param_groups[0]["draws"]
    steps(other, resumed, range(15, 16))
    assert resumed.param_groups[0]["draws"] == before + 1  # labels were drawn
    steps(model, optimizer, range(15, 16))
    assert torch.equal(flat(model), flat(other)) == (update_every == 1)
    steps(other, resumed, range(16, 20))
    assert resumed.param_groups[0]["draws"] == before + (5 if update_every == 1 else 1)


def test_the_fisher_matrix_is_updated_early_in_a_run() -> None:
    model = mlp()
    optimizer = NaturalGradient(model)
    updated = set()
    for t in range(40):
        optimizer.zero_grad()
        x, y = data(9, t)
        outputs = model(x)
        optimizer.observe(outputs)
        F.cross_entropy(outputs, y).backward()
        optimizer.step()
        updated.add(int(optimizer.state[next(model.parameters())]["clock"][1]))
    assert sorted(updated) == [1, 2, 3, 6, 12, 22, 32]
