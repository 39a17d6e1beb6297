"""Parts of a model that are trained or sampled in turn: their parameters have taken different numbers of steps."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bayesgrad import optim, samplers


def network(inputs: int = 3, width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, 3)).double()


def data(index: int, rows: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(rows, 3, generator=generator).double()
    return x, torch.randint(3, (rows,), generator=generator)


def train(model: nn.Module, optimizer: Any, index: int) -> None:
    x, y = data(index)
    optimizer.zero_grad()
    outputs = model(x)
    loss = cross_entropy(outputs, y)
    optimizer.observe(outputs, loss=loss, labels=y if isinstance(optimizer, optim.NaturalGradient) else None)
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("phase", [0, 5])
def test_noise_of_a_sampler_is_new_in_each_step(phase: int) -> None:
    """Of the last layer alone, after the first was sampled alone."""
    model, lr, found = network(), 0.1, []
    sampler = samplers.Langevin(
        model, lr=lr, num_data=16, metric="identity", prior_precision=0.0, correction=None, limit_step=False, seed=0
    )
    for index in range(phase + 4):
        model[0].requires_grad_(index < phase)
        model[2].requires_grad_(index >= phase)
        before = model[2].bias.detach().clone()
        train(model, sampler, index)
        if index >= phase:
            found.append(model[2].bias.detach() - before + lr * model[2].bias.grad)
    assert len({round(float(noise.sum()), 9) for noise in found}) == 4  # the same noise, but for rounding, is one


@pytest.mark.parametrize("phase", [0, 3])
@pytest.mark.parametrize("saved", [False, True])
def test_the_fisher_matrix_is_that_of_each_batch(phase: int, saved: bool) -> None:
    """Of the last layer alone, after the first was trained alone; also in a run that is resumed in between."""
    model, lr, damping = network(), 0.1, 0.1

    def make() -> optim.NaturalGradient:
        return optim.NaturalGradient(model, lr=lr, damping=damping, momentum=0.0, max_norm=math.inf, update_every=1)

    optimizer = make()
    for index in range(phase + 4):
        model[0].requires_grad_(index < phase)
        model[2].requires_grad_(index >= phase)
        if saved and index == phase + 2:
            state = optimizer.state_dict()
            optimizer = make()
            optimizer.load_state_dict(state)
        before = [p.detach().clone() for p in model[2].parameters()]
        x, y = data(index)
        rows = [torch.autograd.grad(cross_entropy(model(x[i, None]), y[i, None]), trained(model)) for i in range(16)]
        train(model, optimizer, index)
        if index >= phase:
            g = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])[:, -15:]
            fisher = g.T @ g / 16 + damping * torch.eye(15).double()
            change = torch.cat([(p.detach() - b).flatten() for p, b in zip(model[2].parameters(), before)])
            torch.testing.assert_close(change, -lr * torch.linalg.solve(fisher, g.mean(0)), rtol=1e-9, atol=1e-12)


def trained(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("rule", [optim.FOOF, optim.KFAC])
def test_moments_are_updated_while_a_weight_has_no_gradient(rule: Any) -> None:
    model = network()
    optimizer = rule(model, stats_every=1, ema=0.9, **({"seed": 0} if rule is optim.KFAC else {}))
    total = torch.zeros(5, 5).double()
    for index in range(12):
        x, y = data(index)
        optimizer.zero_grad()
        inputs = torch.cat([model[1](model[0](x)).detach(), torch.ones(16, 1).double()], 1)
        outputs = model(x)
        optimizer.observe(outputs)
        cross_entropy(outputs, y).backward()
        if index > 4:
            model[2].weight.grad = None
        optimizer.step()
        total = 0.9 * total + 0.1 * inputs.T @ inputs / 16
    found = optimizer.state[model[2].weight]["input_moment"][0]
    torch.testing.assert_close(found.tril(), (total / (1 - 0.9**12)).tril(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("thaw", [False, True])
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (optim.FOOF, {"max_norm": math.inf}),
        (optim.KFAC, {"max_norm": math.inf, "seed": 0}),
        (optim.KroneckerFilterFP, {"batch_size": 16, "fisher": "empirical", "momentum": 0.0}),
    ],
)
def test_a_layer_of_which_another_part_is_trained_begins_with_the_statistics_of_the_batch(
    rule: Any, options: Any, thaw: bool
) -> None:
    """Also in a step in which none would be due: as a new optimizer does in its first step."""
    model = network()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model[0].bias.requires_grad_(not thaw)
        optimizer = rule(model, **options)
        for index in range(14):
            train(model, optimizer, index)
        model[0].bias.requires_grad_(thaw)
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        train(model, optimizer, 14)
        moved = {name: p.detach() - start[name] for name, p in model.named_parameters() if name.startswith("0")}
        model.load_state_dict(start)
        fresh = rule(model, **options)
        train(model, fresh, 14)
    for name, change in moved.items():
        expected = model.get_parameter(name).detach() - start[name]
        if rule is optim.KFAC and expected.any():  # other labels were sampled
            assert 0.2 < float(change.norm() / expected.norm()) < 5
        else:
            torch.testing.assert_close(change, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("draws", [2, 4])
def test_a_term_that_is_added_to_several_draws_leaves_the_curvature_as_it_was(draws: int) -> None:
    """Gradients of draws nearly cancel at an optimum: products multiplied by the change would be arbitrarily large."""
    found = []
    for term in (0.0, 0.01):
        weight = nn.Parameter(torch.tensor([0.5, 0.5]).double())
        optimizer = optim.IVON([weight], num_data=100, hess_init=1.0, prior_precision=0.0, seed=0)
        for index in range(draws):
            noise = torch.tensor([1.0, 0.7]).double() * (-1) ** index * (1 - 1e-4 * index)
            with optimizer.sampled(noise=lambda _, noise=noise: noise):
                ((weight - 0.5).square().sum() / 2 / draws).backward()
        weight.grad.add_(term)
        if term:
            with pytest.warns(UserWarning, match="gradients of several draws of weights were changed before step"):
                optimizer.step()
        else:
            optimizer.step()
        found.append(optimizer.state[weight]["variance"])
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)


@pytest.mark.parametrize("steps", [1, 100])
def test_a_batch_counts_once_after_a_weight_was_frozen(steps: int) -> None:
    """Not for the steps in which its bias was trained alone."""
    found = []
    for frozen in (0, steps):
        model = nn.Linear(3, 3).double()
        with torch.no_grad():
            model.weight.zero_(), model.bias.zero_()
        optimizer = optim.KroneckerFilter(
            model, batch_size=16, prior_std=0.5, fisher="empirical", momentum=0.0, lr=1e-3
        )
        train(model, optimizer, 0)
        model.weight.requires_grad_(False)
        for index in range(frozen):
            train(model, optimizer, 100 + index)
        model.weight.requires_grad_(True)
        with torch.no_grad():
            model.weight.zero_(), model.bias.zero_()
        train(model, optimizer, 1)
        state = optimizer.state[model.weight]
        found.append(torch.kron(state["error_covariance"][0], state["input_covariance"][0]))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", [optim.KroneckerFilter, optim.KroneckerFilterFP])
def test_a_posterior_about_a_layer_that_was_frozen_is_refused(rule: Any) -> None:
    model = network()
    optimizer = rule(model, batch_size=16, fisher="empirical")
    for index in range(2):
        train(model, optimizer, index)
    model[0].requires_grad_(False)
    train(model, optimizer, 2)
    with pytest.raises(ValueError, match=r"state of parameter '0.weight' has no '\w+': its layer was frozen, or taken"):
        optimizer.posterior(model)


class Switched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Linear(3, 3), nn.Linear(3, 3), "a"

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule(self.head)(x)


@pytest.mark.parametrize("metric", ["diagonal", "fisher", "kronecker"])
def test_corrections_of_a_model_that_has_become_another_function_are_refused(metric: str) -> None:
    model = Switched().double()
    sampler = samplers.Langevin(model, num_data=16, metric=metric, correction="flat", limit_step=False, seed=0)
    x, y = data(0)
    outputs = model(x)
    sampler.observe(outputs)
    cross_entropy(outputs, y).backward()
    model.head = "b"
    with pytest.raises(
        RuntimeError, match="its outputs differ from those that were observed: pass what selects a head"
    ):
        sampler.step()


@pytest.mark.parametrize("rule", [optim.KalmanMomentum, optim.DenseFilter])
def test_weights_that_were_loaded_in_evaluation_mode_are_kept(rule: Any) -> None:
    model = network()
    optimizer = rule(model if rule is optim.DenseFilter else model.parameters(), lr=0.05, batch_size=16)
    for index in range(3):
        train(model, optimizer, index)
    best = {name: value.clone() for name, value in model.state_dict().items()}, optimizer.state_dict()
    for index in range(3, 6):
        train(model, optimizer, index)
    latest = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.eval()
    with torch.no_grad():  # weights that are swapped, and swapped back
        for p in model.parameters():
            p.copy_(p.clone().mul_(2).div_(2))
    optimizer.train()
    torch.testing.assert_close(dict(model.state_dict()), latest, rtol=0, atol=0)
    optimizer.eval()
    model.load_state_dict(best[0])
    with pytest.warns(UserWarning, match=r"was changed since eval\(\): train\(\) keeps the new weights"):
        optimizer.train()
    optimizer.load_state_dict(best[1])
    torch.testing.assert_close(dict(model.state_dict()), best[0], rtol=0, atol=0)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, head: str) -> Tensor:
        return self.get_submodule(head)(self.body(x).tanh())


@pytest.mark.parametrize("given_up", [False, True])
@pytest.mark.parametrize("sizes", [(8, 8), (2, 14)])
def test_squares_of_heads_are_divided_by_the_losses_of_all_passes(sizes: tuple[int, int], given_up: bool) -> None:
    """Two heads in one step, each with its own examples; a pass of the other head before was given up."""
    model = TwoHeads().double()
    optimizer = optim.OGN(model, num_data=100, betas=(0.0, 0.0), prior_precision=0.0)
    if given_up:
        x, y = data(9, 5)
        cross_entropy(model(x, "b"), y).backward()
        model.zero_grad()
    right = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for index, (head, rows) in enumerate(zip("ab", sizes)):
        x, y = data(index, rows)
        for one, label in zip(x[:, None], y[:, None]):
            found = torch.autograd.grad(
                cross_entropy(model(one, head), label), list(model.parameters()), allow_unused=True
            )
            for (name, _), gradient in zip(model.named_parameters(), found):
                right[name] += 0 if gradient is None else gradient.square() / 16
    for index, (head, rows) in enumerate(zip("ab", sizes)):
        x, y = data(index, rows)
        (cross_entropy(model(x, head), y) * rows / 16).backward()
    optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(1 / optimizer.state[p]["variance"], right[name], rtol=1e-10, atol=0)


def test_squares_of_a_layer_that_some_draws_use_are_divided_by_all_draws() -> None:
    model = TwoHeads().double()
    optimizer = optim.VOGN(model, num_data=100, betas=(0.0, 0.0), prior_precision=0.0, samples=2, seed=0)
    heads, found, (x, y) = iter("ab"), [], data(0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x, head := next(heads)), y)
        loss.backward()
        bias = model.get_submodule(head).bias
        rows = [torch.autograd.grad(cross_entropy(model(x[i, None], head), y[i, None]), bias)[0] for i in range(16)]
        found.append(torch.stack(rows).square().mean(0) / 2)
        return loss

    optimizer.step(closure)
    for head, expected in zip("ab", found):
        state = optimizer.state[model.get_submodule(head).bias]
        torch.testing.assert_close(1 / state["variance"], expected, rtol=1e-10, atol=0)


def test_weights_that_were_set_move_the_mean_of_a_dense_filter() -> None:
    """By averages of weights or by hand: as the next step does, `eval()` and `posterior()` begin at these."""
    model = network()
    optimizer = optim.DenseFilter(model, lr=0.01, batch_size=16, prior_std=0.3, seed=0)
    for index in range(3):
        train(model, optimizer, index)
    optimizer.eval()
    mean = model[2].weight.detach().clone()
    optimizer.train()
    with torch.no_grad():
        model[2].weight.add_(1.0)
    torch.testing.assert_close(optimizer.posterior(model).mean["2.weight"], mean + 1, rtol=1e-12, atol=1e-12)
    optimizer.eval()
    torch.testing.assert_close(model[2].weight.detach(), mean + 1, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("padded", [0, 12, 16])
def test_errors_of_lookups_are_averaged_over_tokens_without_padding(padded: int) -> None:
    """One token per example, all others padding: a Kronecker product is then the Fisher matrix of its row."""
    torch.manual_seed(0)
    embedding = nn.Embedding(3, 2, padding_idx=0)
    model = nn.Sequential(embedding, nn.Linear(2, 3)).double()
    tokens = torch.tensor([0] * padded + [1] * (16 - padded))
    labels = torch.randint(0, 3, (16,))
    optimizer = optim.KFAC(model, lr=0.0, damping=1e-3)
    outputs = model(tokens)
    optimizer.observe(outputs, labels=labels)
    cross_entropy(outputs, labels).backward()
    optimizer.step()
    rows = [
        torch.autograd.grad(cross_entropy(model(tokens[i, None]), labels[i, None]), embedding.weight)[0][1]
        for i in range(16)
    ]
    expected = torch.stack([torch.outer(row, row) for row in rows]).mean(0)
    state = optimizer.state[embedding.weight]
    found = state["input_moment"][0, 1] * state["error_moment"][0]
    torch.testing.assert_close(found.tril(), expected.tril(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("given_up", [None, True, False])
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (optim.KFAC, {"stats_every": 1}),
        (optim.KroneckerFilterFP, {"batch_size": 8, "fisher": "empirical"}),
        (optim.FOOF, {}),
        (samplers.Langevin, {"num_data": 8, "metric": "kronecker", "fisher": "sampled", "correction": None}),
    ],
)
def test_moments_of_heads_are_divided_by_the_losses_of_all_passes(
    rule: Any, options: Any, given_up: bool | None
) -> None:
    """Seven examples of one head and one of the other: for one example the product is its Fisher matrix.

    A pass of a third head before was given up, and its gradients were set to None or to zero.
    """
    model = TwoHeads().double()
    model.c = nn.Linear(4, 3).double()
    optimizer = rule(model, lr=0.0, **options)
    if given_up is not None and rule in (optim.FOOF, optim.KroneckerFilterFP):  # others forget by optimizer.zero_grad
        x, y = data(9, 5)
        cross_entropy(model(x, "c"), y).backward()
        model.zero_grad(set_to_none=given_up)
    x, y = data(0, 8)
    hidden = torch.cat([model.body(x[7:]).tanh(), torch.ones(1, 1).double()], 1).detach()[0]
    error = (model(x[7:], "b").softmax(1) - nn.functional.one_hot(y[7:], 3)).detach()[0]
    for head, rows in (("a", slice(7)), ("b", slice(7, 8))):
        outputs = model(x[rows], head)
        optimizer.observe(outputs, labels=None if rule is optim.FOOF else y[rows])
        (cross_entropy(outputs, y[rows]) * len(y[rows]) / 8).backward()
    optimizer.step()
    state = optimizer.state[model.b.weight]
    found = state["input_moment"][0].trace() * (state["error_moment"][0].trace() if "error_moment" in state else 1)
    expected = hidden.square().sum() / 8 * (error.square().sum() if "error_moment" in state else 1)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


def test_a_metric_of_parts_is_that_of_the_batch_if_labels_are_missing() -> None:
    x, y = torch.randn(6, 4, 5).double(), torch.randint(3, (6, 4))
    y[0, :3] = y[1, 1] = -100
    found = []
    for parts in (1, 2, 3):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        options = {"metric": "kronecker", "fisher": "sampled", "correction": None, "limit_step": False}
        sampler = samplers.Langevin(model, lr=0.0, num_data=20, seed=0, **options)
        for one, labels in zip(x.chunk(parts), y.chunk(parts)):
            sampler.observe(outputs := model(one), labels=labels)
            total = cross_entropy(outputs.reshape(-1, 3), labels.reshape(-1), reduction="sum")
            (total / (y != -100).sum()).backward()
        sampler.step()
        state = sampler.state[model[0].weight]
        found.append([state[f"{side}_moment"] for side in ("input", "error")])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-10, atol=1e-14)


@pytest.mark.filterwarnings("ignore")  # those of the compiler
@pytest.mark.parametrize("part", ["weight", "bias"])
@pytest.mark.parametrize("rule", [optim.FOOF, optim.KFAC])
def test_a_part_of_a_layer_that_is_frozen_and_thawed_trains_compiled_as_eager(rule: Any, part: str) -> None:
    """The forward pass of a compiled model tells nobody that it begins; its backward pass finds the layers."""
    results = []
    for backend in (None, "aot_eager"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        optimizer = rule(model, stats_every=1, update_every=1, **({"seed": 0} if rule is optim.KFAC else {}))
        net = model if backend is None else torch.compile(model, backend=backend)
        for index in range(6):
            model[0].get_parameter(part).requires_grad_(index not in (2, 3))
            x, y = torch.randn(8, 5).double(), torch.randint(0, 3, (8,))
            optimizer.zero_grad()
            loss = cross_entropy(outputs := net(x), y)
            optimizer.observe(outputs)
            loss.backward()
            optimizer.step()
        results.append(list(model.parameters()))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("part", ["weight", "bias"])
@pytest.mark.parametrize("rule", [optim.FOOF, optim.KFAC])
def test_a_part_of_a_layer_may_be_frozen_if_layers_are_called_outside_of_the_model(rule: Any, part: str) -> None:
    results = []
    for outside in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        optimizer = rule(model, stats_every=1, update_every=1, **({"seed": 0} if rule is optim.KFAC else {}))
        for index in range(6):
            model[2].get_parameter(part).requires_grad_(index not in (2, 3))
            x, y = torch.randn(8, 5).double(), torch.randint(0, 3, (8,))
            optimizer.zero_grad()
            loss = cross_entropy(outputs := model[2](model[1](model[0](x))) if outside else model(x), y)
            optimizer.observe(outputs)
            loss.backward()
            optimizer.step()
        results.append(list(model.parameters()))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)
