"""Elementwise filters with Fisher estimates from sampled labels, and with gradients at sampled weights."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bayesgrad import optim
from cases import same, states, weights

MAKERS = {
    "AdaBayes": lambda params, **o: optim.AdaBayes(params, lr=0.01, batch_size=8, **o),
    "AdaBayesFP": lambda params, **o: optim.AdaBayesFP(params, lr=0.01, **o),
    "KalmanMomentum": lambda params, **o: optim.KalmanMomentum(params, lr=0.01, batch_size=8, **o),
}
every_maker = pytest.mark.parametrize("name", list(MAKERS))
drawing_maker = pytest.mark.parametrize("name", ["AdaBayes", "KalmanMomentum"])


def problem(seed: int = 0) -> tuple[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A model, inputs, labels, and other labels."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    y, other = (torch.randint(0, 3, (8,), generator=generator) for _ in range(2))
    return model, x, y, other


def increments(name: str, shown: list[int]) -> dict[str, torch.Tensor]:
    """The increments of the precision after one step, for labels observed on `size` examples at a time."""
    model, x, y, other = problem()
    optimizer = MAKERS[name](model.parameters(), fisher="sampled")
    start = 0
    for count in shown:
        optimizer.observe(model(x[start : start + count]), labels=other[start : start + count])
        start += count
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    slot = "moment" if name == "AdaBayesFP" else "variance"
    return {n: optimizer.state[p][slot] for n, p in model.named_parameters()}


@every_maker
def test_the_information_is_the_square_of_the_gradient_at_the_labels_observed(name: str) -> None:
    model, x, _, other = problem()
    found = increments(name, [8])
    F.cross_entropy(model(x), other, reduction="sum").backward()
    for n, p in model.named_parameters():
        if name == "AdaBayesFP":  # which averages squares of the mean gradient
            expected = (p.grad / 8) ** 2
        else:
            plain = MAKERS[name]([q := nn.Parameter(torch.zeros_like(p))])
            q.grad = p.grad / 8
            plain.step()
            expected = plain.state[q]["variance"]
        torch.testing.assert_close(found[n], expected, rtol=1e-12, atol=0)


@every_maker
def test_observing_in_parts_is_observing_at_once(name: str) -> None:
    whole, parts = increments(name, [8]), increments(name, [5, 3])
    for n in whole:
        torch.testing.assert_close(parts[n], whole[n], rtol=1e-12, atol=0)


def test_half_a_batch_stands_for_all_of_it() -> None:
    model, x, y, other = problem()
    optimizer = MAKERS["AdaBayes"](model.parameters(), fisher="sampled", sgd_lr=float("inf"))
    optimizer.observe(model(x[:4]), labels=other[:4])
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    fresh = problem()[0]
    F.cross_entropy(fresh(x[:4]), other[:4], reduction="sum").backward()
    for (_, p), (_, q) in zip(model.named_parameters(), fresh.named_parameters()):
        prior = 0.1 / 8 + 0.01**2
        expected = 1 / (1 / prior + 2 * q.grad**2)  # 8 losses from 4: twice the square
        torch.testing.assert_close(optimizer.state[p]["variance"], expected, rtol=1e-12, atol=0)


@every_maker
def test_observing_leaves_graph_and_gradients_alone(name: str) -> None:
    model, x, y, _ = problem()
    optimizer = MAKERS[name](model.parameters(), fisher="sampled")
    outputs = model(x)
    optimizer.observe(outputs)
    assert all(p.grad is None for p in model.parameters())
    F.cross_entropy(outputs, y).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters()))


@every_maker
def test_drawn_labels_are_a_function_of_seed_and_count(name: str) -> None:
    def run(seed: int) -> dict[str, torch.Tensor]:
        model, x, y, _ = problem()
        optimizer = MAKERS[name](model.parameters(), fisher="sampled", seed=seed)
        for _ in range(3):
            optimizer.zero_grad()
            outputs = model(x)
            optimizer.observe(outputs)
            F.cross_entropy(outputs, y).backward()
            optimizer.step()
        return weights(model)

    torch.manual_seed(1)
    first = run(0)
    torch.manual_seed(2)
    assert same(first, run(0))
    assert not same(first, run(1))


@every_maker
def test_what_was_observed_for_a_step_that_was_not_taken_is_forgotten(name: str) -> None:
    def run(skipped: bool) -> dict[str, torch.Tensor]:
        model, x, y, other = problem()
        optimizer = MAKERS[name](model.parameters(), fisher="sampled")
        if skipped:
            outputs = model(2 * x)
            optimizer.observe(outputs, labels=y)
            F.cross_entropy(outputs, y).backward()
        optimizer.zero_grad()
        outputs = model(x)
        optimizer.observe(outputs, labels=other)
        F.cross_entropy(outputs, y).backward()
        optimizer.step()
        return states(optimizer)

    assert same(run(False), run(True))


@every_maker
def test_a_step_without_observation_is_refused_and_changes_nothing(name: str) -> None:
    model, x, y, _ = problem()
    optimizer = MAKERS[name](model.parameters(), fisher="sampled")
    F.cross_entropy(model(x), y).backward()
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"found no gradient of parameter 0 of group 0 .* call observe"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="the outputs have no autograd graph"), torch.no_grad():
        optimizer.observe(model(x))
    outputs = model(x)
    outputs.sum().backward()
    with pytest.raises(RuntimeError, match=r"a backward pass has freed the graph of these outputs: call observe\(\) b"):
        optimizer.observe(outputs)
    assert same(before, weights(model))
    plain = MAKERS[name](model.parameters())
    plain.observe(model(x))  # nothing to do
    plain.step()


@every_maker
def test_labels_that_give_infinite_gradients_skip_the_step(name: str) -> None:
    model, x, y, other = problem()
    optimizer = MAKERS[name](model.parameters(), fisher="sampled", nonfinite="skip")
    F.cross_entropy(model(x), y).backward()
    before = weights(model)
    optimizer.observe(model(x) * float("inf"), labels=other)
    optimizer.step()
    assert same(before, weights(model))
    optimizer = MAKERS[name](model.parameters(), fisher="sampled", nonfinite="raise")
    optimizer.observe(model(x) * float("inf"), labels=other)
    with pytest.raises(FloatingPointError, match="gradients for the sampled labels are not finite"):
        optimizer.step()


@every_maker
def test_groups_agree_on_what_they_are_shown(name: str) -> None:
    model = problem()[0]
    optimizer = MAKERS[name](model[0].parameters(), fisher="sampled")
    with pytest.raises(ValueError, match=r"fisher must be the same in all groups, got .* beside 'sampled'"):
        optimizer.add_param_group({"params": list(model[2].parameters()), "fisher": "empirical"})


# --- statistical linearisation ---


@drawing_maker
def test_draws_have_the_variance_of_the_belief(name: str) -> None:
    model = nn.Linear(100, 100).double()
    optimizer = MAKERS[name](model.parameters(), sample_weights=True)
    for k in range(3):
        optimizer.zero_grad()
        with optimizer.sampled():
            model(torch.randn(8, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(k))).sum().backward()
        optimizer.step()
    mean = model.weight.detach().clone()
    with torch.no_grad():
        total = torch.zeros_like(mean)
        for _ in range(100):
            with optimizer.sampled():
                total += (model.weight - mean) ** 2
    assert torch.equal(model.weight, mean)
    variance = optimizer.state[model.weight]["variance"]
    ratio = (total / 100 / variance).mean().item()
    assert abs(ratio - 1) < 5 * (2 / (100 * mean.numel())) ** 0.5


@drawing_maker
def test_the_step_takes_the_gradient_at_the_drawn_weights(name: str) -> None:
    model, x, y, _ = problem()
    optimizer = MAKERS[name](model.parameters(), sample_weights=True)
    with optimizer.sampled(noise=torch.ones_like):
        F.cross_entropy(model(x), y).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    optimizer.step()
    other = problem()[0]
    with torch.no_grad():
        for p in other.parameters():
            p += (0.1 / 8) ** 0.5
    F.cross_entropy(other(x), y).backward()
    for n, q in other.named_parameters():
        torch.testing.assert_close(gradients[n], q.grad, rtol=1e-12, atol=1e-15)
    plain = problem()[0]
    reference = MAKERS[name](plain.parameters())
    for n, p in plain.named_parameters():
        p.grad = gradients[n]
    reference.step()
    assert same(weights(plain), weights(model))


@drawing_maker
def test_gradients_at_the_mean_are_refused_where_draws_are_asked_for(name: str) -> None:
    model, x, y, _ = problem()
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="was not computed at sampled weights"):
        MAKERS[name](model.parameters(), sample_weights=True).step()
    plain = MAKERS[name](model.parameters())
    before = weights(model)
    with plain.sampled():  # does nothing where nothing is drawn
        assert same(before, weights(model))


OBSERVERS = {
    "Newton": lambda params: optim.Newton(params, lr=0.01, num_data=100),
    "AdaBayes": lambda params: MAKERS["AdaBayes"](params, fisher="sampled"),
}


@pytest.mark.parametrize("name", list(OBSERVERS))
def test_hooks_that_clip_gradients_do_not_change_what_is_observed(name: str) -> None:
    found = []
    for hooked in (True, False):
        model, x, y, other = problem()
        optimizer = OBSERVERS[name](model.parameters())
        for p in model.parameters() if hooked else ():
            p.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
        outputs = model(x)
        loss = F.cross_entropy(outputs, y)
        optimizer.observe(outputs, loss=loss, labels=other)
        loss.backward()
        assert hooked == all(p.grad.abs().max() <= 1e-2 for p in model.parameters())
        nn.utils.clip_grad_value_(model.parameters(), 1e-2)
        optimizer.step()
        found.append({**weights(model), **states(optimizer)})
    assert same(*found)


@pytest.mark.parametrize("name", list(OBSERVERS))
def test_layers_that_reentrant_checkpointing_hides_are_refused(name: str) -> None:
    """torch.autograd.grad takes them as unused: their Hessian would be zero."""
    model, x, y, _ = problem()
    optimizer = OBSERVERS[name](model.parameters())
    outputs = model[1:](checkpoint(model[0], x.requires_grad_(), use_reentrant=True))
    with pytest.raises(RuntimeError, match=r"reentrant activation checkpointing hides .*use_reentrant=False"):
        optimizer.observe(outputs, loss=F.cross_entropy(outputs, y))


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.a(hidden), self.b(hidden)


@pytest.mark.parametrize("name", ["KFAC", "KroneckerFilterFP", "NaturalGradient", "OGN", "AdaBayes"])
def test_a_compiled_model_of_which_one_output_is_observed_is_as_an_eager_one(name: str) -> None:
    """A compiled graph gives zeros to layers that an output does not depend on. They are not those of a likelihood."""
    options: dict[str, Any] = {
        "KFAC": {"seed": 0},
        "KroneckerFilterFP": {"batch_size": 8, "seed": 0},
        "NaturalGradient": {"seed": 0},
        "OGN": {"num_data": 100, "fisher": "exact"},
        "AdaBayes": {"batch_size": 8, "fisher": "sampled", "seed": 0},
    }[name]
    results = []
    for backend in (None, "aot_eager"):
        torch.manual_seed(0)
        model = TwoOutputs().double()
        optimizer = getattr(optim, name)(model.parameters() if name == "AdaBayes" else model, **options)
        net = model if backend is None else torch.compile(model, backend=backend)
        words = []
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(2):
                x, y = torch.randn(8, 5).double(), torch.randint(0, 3, (8,))
                optimizer.zero_grad()
                outputs, others = net(x)
                optimizer.observe(outputs)
                (F.cross_entropy(outputs, y) + others.square().mean()).backward()
                try:
                    optimizer.step()
                except RuntimeError as error:
                    words.append(str(error))
        words += [str(one.message) for one in warned if "b.weight" in str(one.message)]
        assert len(words) == (2 if name == "AdaBayes" else 1)
        results.append((words, [p.detach() for p in model.parameters()]))
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-10, atol=1e-12)
