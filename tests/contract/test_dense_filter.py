"""The contract of DenseFilter, whose state is too large for the model of the common table."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn import functional as F
from torch.optim import lr_scheduler

from bayesgrad.optim import DenseFilter
from cases import same, states, weights

D = torch.float64


def network(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def train(model: nn.Module, optimizer: DenseFilter, steps: range) -> None:
    dtype = next(model.parameters()).dtype
    labelled = optimizer.param_groups[0]["fisher"] in ("empirical", "centered")
    for index in steps:
        generator = torch.Generator().manual_seed(index)
        x, y = torch.randn(8, 4, generator=generator).to(dtype), torch.randint(0, 3, (8,), generator=generator)
        optimizer.zero_grad()
        outputs = model(x)
        optimizer.observe(outputs, labels=y if labelled else None)
        F.cross_entropy(outputs, y).backward()
        optimizer.step()


def momentum(weights: int) -> dict[str, Any]:
    """A transition with a latent momentum for each weight."""
    move = torch.tensor([[1.0, 0.1], [0.0, 0.8]], dtype=D)
    eye = torch.eye(weights, dtype=D)
    A, Q = torch.kron(torch.eye(2, dtype=D) - move, eye), torch.kron(torch.diag(torch.tensor([0.0, 0.04])).to(D), eye)
    return {"transition": (A, Q)}


OPTIONS: dict[str, dict[str, Any]] = {
    "random walk": {"lr": 0.05},
    "sampled": {"lr": 0.05, "prior_std": 0.5, "fisher": "sampled", "seed": 3, "weight_decay": 0.1},
    "centered": {"lr": 0.05, "fisher": "centered"},
    "momentum": {"fisher": "empirical", **momentum(43)},
}
every_option = pytest.mark.parametrize("name", OPTIONS)


def built(model: nn.Module, name: str, **options: Any) -> DenseFilter:
    return DenseFilter(model, batch_size=8, **{**OPTIONS[name], **options})


@every_option
@pytest.mark.parametrize("dtype", [torch.float32, D, torch.bfloat16], ids=str)
def test_resumes_bit_for_bit_from_a_file(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = network(dtype)
    optimizer = built(model, name)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 6)
    for index in range(3):
        train(model, optimizer, range(index, index + 1))
        scheduler.step()
    torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], tmp_path / "checkpoint.pt")
    for index in range(3, 6):
        train(model, optimizer, range(index, index + 1))
        scheduler.step()

    other = network(dtype, seed=1)
    resumed = built(other, name, lr=0.5)
    schedule = lr_scheduler.CosineAnnealingLR(resumed, 6)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    for target, value in zip((other, resumed, schedule), saved):
        target.load_state_dict(value)
    for index in range(3, 6):
        train(other, resumed, range(index, index + 1))
        schedule.step()
    assert same(weights(model), weights(other))
    assert same(states(optimizer), states(resumed))
    assert {value.dtype for key, value in states(resumed).items() if not key.endswith(("step", "clock"))} == {D}
    with optimizer.mode(training=False), resumed.mode(training=False):
        assert same(weights(model), weights(other))


@every_option
def test_the_initialising_step_of_a_distributed_checkpoint_changes_nothing(name: str) -> None:
    """A step with zero gradients and lr = 0 creates the tensors of the state, which the first step does not read."""
    runs = [(model, built(model, name)) for model in (network(D), network(D))]
    (model, optimizer), (other, undisturbed) = runs
    before = weights(model)
    created = get_optimizer_state_dict(model, optimizer)["state"]["0.weight"]
    shapes = {slot: value.shape for slot, value in created.items()}
    with optimizer.mode(training=False):
        assert same(before, weights(model))
    assert torch.equal(optimizer.covariance(), undisturbed.covariance())
    for one, rule in runs:
        train(one, rule, range(2))
    assert same(weights(model), weights(other))
    assert shapes == {slot: value.shape for slot, value in undisturbed.state[other[0].weight].items()}


@every_option
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copy_goes_on_by_itself_with_the_same_numbers(name: str, copier) -> None:
    model = network()
    optimizer = built(model, name)
    train(model, optimizer, range(2))
    twin, twin_optimizer = copier((model, optimizer))
    before = weights(model)
    train(twin, twin_optimizer, range(2, 5))
    assert same(before, weights(model))
    assert not same(before, weights(twin))
    train(model, optimizer, range(2, 5))
    assert same(weights(twin), weights(model))
    assert same(states(twin_optimizer), states(optimizer))


@every_option
def test_a_state_dict_is_a_snapshot_that_can_be_returned_to(name: str) -> None:
    model = network()
    optimizer = built(model, name)
    train(model, optimizer, range(2))
    saved, start = optimizer.state_dict(), copy.deepcopy(model.state_dict())
    train(model, optimizer, range(2, 4))
    first = weights(model)
    optimizer.load_state_dict(saved)
    model.load_state_dict(start)
    train(model, optimizer, range(2, 4))
    assert same(first, weights(model))


def test_groups_have_their_own_lr_prior_and_decay() -> None:
    """Options of a group give the same results as the same options for all weights; checkpoints match names."""
    model = network(D)
    slow, fast = list(model[0].parameters()), list(model[2].parameters())
    groups = [{"params": fast, "lr": 0.2, "prior_std": 0.3, "weight_decay": 0.1}, {"params": slow}]
    optimizer = DenseFilter(model, 0.01, params=groups, batch_size=8, prior_std=0.5)
    prior = torch.cat([torch.full((25,), 0.25, dtype=D), torch.full((18,), 0.09, dtype=D)])
    torch.testing.assert_close(optimizer.covariance().diagonal(), prior)
    train(model, optimizer, range(2))
    entry = optimizer.state[model[0].weight]
    retain = torch.tensor([math.exp(-((0.01 / 0.5) ** 2))] * 25 + [math.exp(-4 / 9)] * 18, dtype=D)
    torch.testing.assert_close(entry["retain"], retain, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(entry["noise"], prior * (1 - retain), rtol=1e-9, atol=0.0)
    mean = entry["mean"] * entry["retain"].sqrt()
    mean[25:] *= 1 - 0.2 * 0.1
    torch.testing.assert_close(nn.utils.parameters_to_vector(model.parameters()).detach(), mean)

    other = network(D, seed=1)
    swapped = [{"params": [*other[i].parameters()][::-1]} for i in (2, 0)]
    again = DenseFilter(other, params=swapped, batch_size=8)
    again.load_state_dict(optimizer.state_dict())
    other.load_state_dict(model.state_dict())
    for net, filters in ((model, optimizer), (other, again)):
        train(net, filters, range(2, 4))
    assert same(weights(model), weights(other))


def test_a_schedule_scales_the_drift_of_the_step_it_stands_at() -> None:
    """The covariance is propagated with the lr that also moved the mean, even if a scheduler has stepped since."""
    model = network(D)
    optimizer = DenseFilter(model, 0.2, batch_size=8)
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    for t in range(3):
        train(model, optimizer, range(t, t + 1))
        scheduler.step()
        torch.testing.assert_close(
            optimizer.state[model[0].weight]["noise"], torch.full((43,), (0.2 / 2**t) ** 2, dtype=D)
        )
    given = DenseFilter(network(D), 0.2, batch_size=8, **momentum(43))
    other = DenseFilter(network(D), 0.7, batch_size=8, **momentum(43))
    for optimizer in (given, other):
        train(optimizer.model, optimizer, range(2))
    assert same(weights(given.model), weights(other.model))


def test_without_any_gradient_nothing_happens() -> None:
    model = network()
    optimizer = built(model, "random walk")
    before = weights(model)
    optimizer.step()
    assert same(before, weights(model))
    assert not optimizer.state_dict()["state"]
    with optimizer.mode(training=False):
        assert same(before, weights(model))


def test_closures_are_evaluated_once() -> None:
    one, two = network(), network()
    plain, closed = built(one, "random walk"), built(two, "random walk")
    train(one, plain, range(1))
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator)

    def closure() -> torch.Tensor:
        closed.zero_grad()
        outputs = two(x)
        closed.observe(outputs)
        loss = F.cross_entropy(outputs, y)
        loss.backward()
        return loss

    assert closed.step(closure).requires_grad
    assert same(weights(one), weights(two))


# --- refusals ---


def eye(size: int) -> torch.Tensor:
    return torch.eye(size, dtype=D)


def skewed() -> torch.Tensor:
    matrix = eye(43)
    matrix[0, 1] = 0.5
    return matrix


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "lr": ({"lr": -1.0}, "lr must be a finite number >= 0, got -1.0."),
    "batch_size": ({"batch_size": 0}, "batch_size must be a number >= 1, got 0."),
    "prior_std": ({"prior_std": 0.0}, "prior_std must be inf or between 1e-18 and 1e18, got 0.0."),
    "evidence": (
        {"fisher": "some"},
        "fisher must be 'exact' or 'sampled' or 'empirical' or 'centered', got 'some'.",
    ),
    "likelihood": ({"likelihood": "cauchy"}, "likelihood must be 'categorical' or 'bernoulli' or 'gaussian', got "),
    "pair": ({"transition": eye(43)}, "transition must be None or a pair of matrices (A, Q), got tensor("),
    "type": ({"transition": (eye(43), [1.0])}, "Q of transition must be a tensor of floating-point numbers, got list."),
    "whole": ({"transition": (eye(43).long(), eye(43))}, "numbers, got torch.int64."),
    "square": (
        {"transition": (torch.ones(43, 2), eye(43))},
        "A of transition must be a square matrix, got shape (43, ",
    ),
    "shapes": ({"transition": (eye(43), eye(86))}, "must have the same shape, got (43, 43) and (86, 86)."),
    "size": ({"transition": (eye(44), eye(44))}, "must have 43 rows, one for each weight, or a multiple of that for "),
    "finite": (
        {"transition": (eye(43) / 0, eye(43))},
        "A of transition must be finite, got 1849 entries that are not.",
    ),
    "symmetric": (
        {"transition": (eye(43), skewed())},
        "Q of transition must be symmetric, got entries that differ by 0.5",
    ),
    "positive": ({"transition": (eye(43), -eye(43))}, "must be positive semi-definite, got an eigenvalue of -1."),
    "prior": ({"prior_covariance": eye(3)}, "prior_covariance must have shape (43, 43), got (3, 3)."),
    "negative prior": ({"prior_covariance": -eye(43)}, "prior_covariance must be positive semi-definite, got "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused_in_one_sentence(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError)) as error:
        DenseFilter(network(), **{"batch_size": 8, **options})
    assert message in str(error.value)


def test_large_models_are_refused() -> None:
    message = "stores a covariance matrix of at most 10000 values, got 10100: pass some of the parameters as params="
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 1, bias=False))
    with pytest.raises(ValueError, match=message):
        DenseFilter(model, batch_size=8)
    assert len(DenseFilter(model, params=model[1].parameters(), batch_size=8).covariance()) == 100


def test_steps_without_evidence_are_refused() -> None:
    model = network()
    optimizer = built(model, "random walk")
    F.cross_entropy(model(torch.ones(2, 4)), torch.tensor([0, 1])).backward()
    with pytest.raises(RuntimeError, match="nothing was observed since the last step: call observe"):
        optimizer.step()
    with pytest.raises(ValueError, match="fisher='exact' sums over all labels"):
        optimizer.observe(model(torch.ones(2, 4)), labels=torch.tensor([0, 1]))
    empirical = built(model, "centered")
    with pytest.raises(ValueError, match=r"fisher='centered' needs labels: call observe\(outputs, labels=labels\)"):
        empirical.observe(model(torch.ones(2, 4)))
    empirical.observe(model(torch.ones(1, 4)), labels=torch.tensor([0]))
    with pytest.raises(ValueError, match="fisher='centered' needs at least two examples in a step, got 1"):
        empirical.step()


def test_a_skipped_batch_is_forgotten() -> None:
    one, two = network(), network()
    first, second = built(one, "random walk"), built(two, "random walk")
    outputs = one(torch.ones(8, 4))
    first.observe(outputs)
    outputs.sum().backward()
    for model, optimizer in ((one, first), (two, second)):
        train(model, optimizer, range(2))
    assert same(weights(one), weights(two))


def test_what_moves_together_has_gradients_together() -> None:
    model = network()
    optimizer = built(model, "momentum")
    model[2].bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"needs a gradient of every parameter, but 2.bias has none: pass params="):
        train(model, optimizer, range(1))


def test_no_weights_are_added_to_a_belief() -> None:
    model = network()
    optimizer = DenseFilter(model, params=model[0].parameters(), batch_size=8)
    optimizer.add_param_group({"params": [model[2].weight]})
    train(model, optimizer, range(1))
    assert optimizer.covariance().shape == (40, 40)
    with pytest.raises(ValueError, match="parameters cannot be added after the first step"):
        optimizer.add_param_group({"params": [model[2].bias]})


def test_loading_what_does_not_fit_says_so_and_loses_nothing() -> None:
    model = network()
    optimizer = built(model, "random walk")
    train(model, optimizer, range(2))
    good, known = optimizer.state_dict(), states(optimizer)
    for change, message in (
        (lambda s: s["state"][0].pop("mean"), r"the saved state .* has \['mean'\], which were not read"),
        (lambda s: s["state"][0].update(covariance=torch.eye(3)), r"covariance has shape \(3, 3\) in the saved state"),
        (lambda s: s["param_groups"][0].pop("fisher"), r"lacks \['fisher'\]"),
    ):
        bad = copy.deepcopy(good)
        change(bad)
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(bad)
        assert same(known, states(optimizer))
    with pytest.raises(ValueError, match="must have the parameters of this DenseFilter, but they differ"):
        DenseFilter(nn.Linear(4, 3), batch_size=8).load_state_dict(good)


def test_evidence_beyond_what_numbers_can_hold_is_refused() -> None:
    model = nn.Linear(4, 3).to(D)
    optimizer = DenseFilter(model, batch_size=8, prior_std=1.0, likelihood="gaussian")
    before = weights(model)
    outputs = model(1e9 * torch.randn(8, 4, dtype=D, generator=torch.Generator().manual_seed(0)))
    optimizer.observe(outputs)
    outputs.square().mean().backward()
    with pytest.raises(FloatingPointError, match=r"became negative: an observation has .* Nothing was changed"):
        optimizer.step()
    assert same(before, weights(model))
    assert torch.equal(optimizer.covariance(), eye(15))


def test_posterior_draws_all_weights_together(tmp_path: Path) -> None:
    model = network(D)
    optimizer = built(model, "random walk")
    train(model, optimizer, range(4))
    outside = weights(model)
    posterior = optimizer.posterior(model, scale=2.0)
    assert same(outside, weights(model))
    with optimizer.mode(training=False):
        for name, mean in posterior.mean.items():
            assert torch.equal(mean, model.get_parameter(name))
    draws = posterior.sample(20_000)
    rows = torch.cat([draws[name].flatten(1) for name, _ in model.named_parameters()], 1)
    found, expected = torch.cov(rows.T), 2 * optimizer.covariance()
    spread = (expected.diagonal()[:, None] * expected.diagonal() / len(rows)).sqrt()
    assert float(((found - expected) / spread).abs().max()) < 6
    for name, variance in posterior.variance().items():
        assert variance.shape == model.get_parameter(name).shape
    posterior.save(tmp_path / "posterior.safetensors")
    again = type(posterior).load(tmp_path / "posterior.safetensors")
    assert same(posterior.sample(2), again.sample(2))
    x = torch.randn(3, 4, dtype=D, generator=torch.Generator().manual_seed(0))
    prediction = posterior.predict(x, method="linear")
    assert prediction.shape == (3, 3)
    with pytest.raises(ValueError, match="is not in the model: pass the model that was optimised"):
        optimizer.posterior(network(D))


def test_a_covariance_is_refused_by_a_model_with_its_modules_in_another_order() -> None:
    """The covariance has one row for each weight, in the order of the model, and would be that of other weights."""

    def built_in(order: str) -> tuple[nn.Module, DenseFilter]:
        torch.manual_seed(0)
        model = nn.ModuleDict({name: nn.Linear(2, 2, dtype=D) for name in order})
        return model, DenseFilter(model, batch_size=8)

    model, optimizer = built_in("xab")
    outputs = model["b"](model["a"](model["x"](torch.ones(8, 2, dtype=D))))
    optimizer.observe(outputs)
    nn.functional.cross_entropy(outputs, torch.zeros(8, dtype=torch.long)).backward()
    optimizer.step()
    for order in ("xba", "abx"):
        _, again = built_in(order)
        before = again.covariance()
        with pytest.raises(ValueError, match=f"has {'a' if order == 'xba' else 'x'}.weight where this model has"):
            again.load_state_dict(optimizer.state_dict())
        assert torch.equal(again.covariance(), before)
    _, again = built_in("xab")
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(again.covariance(), optimizer.covariance())


def test_a_scalar_parameter_has_a_place_in_the_joint_posterior() -> None:
    model = nn.Linear(2, 3, dtype=D)
    model.scale = nn.Parameter(torch.tensor(1.5, dtype=D))
    posterior = DenseFilter(model, batch_size=8, prior_std=0.5).posterior(model)
    assert posterior.mean["scale"].shape == posterior.variance()["scale"].shape == ()
    assert float(posterior.variance()["scale"]) == 0.25
    assert posterior.sample(4)["scale"].shape == (4,)


def test_sparse_gradients_are_refused_in_words() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2))
    optimizer = DenseFilter(model, batch_size=4)
    outputs = model(torch.tensor([[0, 1], [2, 3], [1, 1], [4, 0]]))
    optimizer.observe(outputs)
    nn.functional.cross_entropy(outputs, torch.zeros(4, dtype=torch.long)).backward()
    with pytest.raises(RuntimeError, match=r"needs dense gradients, but that of parameter '0.weight' is sparse"):
        optimizer.step()
