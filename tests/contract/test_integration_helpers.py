"""Param groups, counts of a loader, optimizers built from both, and diagnostics of a run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from bayesgrad import optim, samplers
from bayesgrad.integrations import batch_to, build_optimizer, counts, diagnostics, parameter_groups
from training_loops import RULES, D, network, plain

DATA = range(100)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm((3, 4))  # whose weight is a matrix
        self.attention = nn.MultiheadAttention(4, 2)  # in_proj_bias
        self.head = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


def names(groups: list[dict[str, Any]]) -> list[set[str]]:
    return [{name for name, _ in group["params"]} for group in groups]


def test_biases_and_norms_are_not_decayed() -> None:
    groups = parameter_groups(Block(), weight_decay=0.1, lr=(0.3, 0.4), prior_precision=2.0)
    assert names(groups) == [
        {"embedding.weight", "attention.in_proj_weight", "attention.out_proj.weight", "head.weight"},
        {"norm.weight", "norm.bias", "attention.in_proj_bias", "attention.out_proj.bias", "head.bias", "scale"},
    ]
    assert [[group[key] for key in ("weight_decay", "lr", "prior_precision")] for group in groups] == [
        [0.1, 0.3, 2.0],
        [0.0, 0.4, 2.0],
    ]
    assert len(parameter_groups(nn.Linear(2, 2, bias=False))) == 1
    with pytest.raises(ValueError, match=r"lr must be one value, or a pair of values for two groups, got \(1, 2, 3\)"):
        parameter_groups(Block(), lr=(1, 2, 3))


def test_torch_optimizers_take_the_groups() -> None:
    optimizer = torch.optim.AdamW(parameter_groups(Block(), weight_decay=0.1))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(DATA, 8), (100, 8)),
        (DataLoader(DATA, 8, drop_last=True, shuffle=True), (100, 8)),
        (DataLoader(DATA, 8, sampler=SubsetRandomSampler(range(30))), (30, 8)),
        (DataLoader(DATA, 8, sampler=WeightedRandomSampler([1.0] * 100, 500)), (100, 8)),
        (DataLoader(DATA, 8, sampler=RandomSampler(DATA, num_samples=30)), (100, 8)),
        (DataLoader(DATA, 8, sampler=DistributedSampler(DATA, num_replicas=4, rank=1)), (100, 8)),
        (DataLoader(DATA, batch_sampler=BatchSampler(SubsetRandomSampler(range(30)), 4, False)), (30, 4)),
        (DataLoader(DATA, 128), (100, 100)),
    ],
)
def test_counts(loader: DataLoader, expected: tuple[int, int]) -> None:
    assert tuple(counts(loader).values()) == expected


def test_counts_with_accumulation() -> None:
    assert counts(DataLoader(DATA, 8), accumulate=4) == {"num_data": 100, "batch_size": 32}


@pytest.mark.parametrize("dispatched", [False, True])
@pytest.mark.parametrize(("divided", "expected"), [(False, 16), (True, 8)])
def test_counts_of_loaders_of_accelerate(dispatched: bool, divided: bool, expected: int, monkeypatch: Any) -> None:
    """With `split_batches=True` the batch of the loader is that of all processes."""
    from accelerate import PartialState
    from accelerate.data_loader import prepare_data_loader

    monkeypatch.setattr("bayesgrad.integrations.building.joint_processes", lambda: 2)
    PartialState(cpu=True)
    options = {"num_processes": 2, "process_index": 1, "put_on_device": dispatched}
    loader = prepare_data_loader(DataLoader(DATA, 8), split_batches=divided, dispatch_batches=dispatched, **options)
    assert counts(loader) == {"num_data": 100, "batch_size": expected}
    assert counts(loader, accumulate=2)["batch_size"] == 2 * expected
    if not dispatched:  # its batches need another process
        assert len(next(iter(loader))) == expected // 2
    PartialState._reset_state()


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(DATA)


class Half(Sampler):
    def __iter__(self) -> Any:
        return iter(range(50))

    def __len__(self) -> int:
        return 50


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(Stream(), 8), "number of examples does not follow from the loader: pass num_data="),
        (DataLoader(DATA, 8, sampler=Half()), "does not follow from a loader with a Half: pass num_data="),
        (DataLoader(DATA, batch_size=None), "size of a batch does not follow from the loader: pass batch_size="),
        ([1, 2, 3], "number of examples does not follow from the loader: pass num_data="),
    ],
)
def test_counts_that_do_not_follow_are_refused(loader: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        counts(loader)


@pytest.mark.parametrize("kind", [optim.AdaBayesFP, optim.IVON, optim.VOGN, optim.FOOF, optim.KFAC, samplers.Langevin])
def test_built_optimizers(kind: Any) -> None:
    """They have what the class asks for: the model or groups, and counts."""
    prior = {"prior_precision": (3.0, 0.5)} if "prior_precision" in kind.accepts else {"weight_decay": 0.1}
    own: Any = build_optimizer(kind, network(), DataLoader(DATA, 8), accumulate=2, lr=1e-3, **prior)
    first, second = own.param_groups
    assert first["param_names"] == ["0.weight", "2.weight"]
    assert (first["weight_decay"], second["weight_decay"]) == ((0.0, 0.0) if "prior_precision" in prior else (0.1, 0.0))
    if "prior_precision" in prior:
        assert (first["prior_precision"], second["prior_precision"]) == (3.0, 0.5)
    assert first.get("num_data", 100) == 100
    assert first.get("batch_size") in (None, 16)
    assert first["lr"] == 1e-3


def test_given_counts_and_betas_are_kept() -> None:
    own = build_optimizer(optim.IVON, network(), DataLoader(DATA, 8), num_data=7, betas=(0.8, 0.9))
    assert own.param_groups[1]["num_data"] == 7
    assert own.param_groups[1]["betas"] == (0.8, 0.9)


def test_a_rule_with_a_prior_refuses_weight_decay() -> None:
    with pytest.raises(ValueError, match=r"weight_decay must be 0, because the prior decays weights, got 0.1"):
        build_optimizer(optim.IVON, network(), DataLoader(DATA, 8), weight_decay=0.1)


def test_weights_without_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight is on the meta device and has no values"):
        build_optimizer(optim.AdaBayesFP, nn.Linear(2, 2, device="meta"))


@pytest.mark.parametrize("name", ["IVON", "AdaBayesFP"])
def test_state_of_half_precision_weights_is_float32(name: str) -> None:
    model = network().to(torch.bfloat16)
    own: Any = build_optimizer(getattr(optim, name), model, DataLoader(DATA, 8))
    x, y = batch_to(model, (torch.randn(8, 5, dtype=D), torch.zeros(8, dtype=torch.long)))
    assert (x.dtype, y.dtype) == (torch.bfloat16, torch.long)
    with own.sampled():
        cross_entropy(model(x), y).backward()
    own.step()
    assert {value.dtype for entry in own.state.values() for value in entry.values()} == {torch.float32}


def test_batches_keep_their_structure() -> None:
    batch = {"x": [torch.ones(2, dtype=D)], "ids": (torch.ones(2, dtype=torch.long), "text", None)}
    moved = batch_to(nn.Linear(1, 1), batch)
    assert moved["x"][0].dtype == torch.float32
    assert moved["ids"][1:] == ("text", None)
    assert moved["ids"][0] is batch["ids"][0]


# --- diagnostics ---


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.AdaBayes([p], 0.01, batch_size=4, momentum=0.0),
        lambda p: optim.AdaBayesFP([p], 0.01, betas=(0.0, 0.9)),
        lambda p: optim.KalmanMomentum([p], 0.01, batch_size=4),
        lambda p: optim.IVON(
            [p], 0.1, num_data=50, betas=(0.0, 0.9), clip_radius=math.inf, prior_precision=0.0, seed=0
        ),
    ],
    ids=["AdaBayes", "AdaBayesFP", "KalmanMomentum", "IVON"],
)
def test_effective_learning_rates_are_those_of_the_step(make: Any) -> None:
    """w <- w - rate g, of the posterior mean."""
    weight = nn.Parameter(torch.zeros(3, dtype=D))
    own = make(weight)
    gradient = torch.tensor([1e-3, 1.0, 30.0], dtype=D)
    with own.sampled():
        own.zero_grad()
        (weight * gradient).sum().backward()
    before = weight.detach().clone()
    own.step()
    own.eval()
    rates = (before - weight.detach()) / gradient
    found = diagnostics(own)
    expected = {"effective_lr": rates.mean(), "effective_lr_min": rates.min(), "effective_lr_max": rates.max()}
    for key, value in expected.items():
        assert found[key] == pytest.approx(float(value), rel=1e-10)


def test_damping_lowers_the_effective_learning_rate() -> None:
    """SpikeSlab steps by lr/(sqrt(s) + eps)."""
    model = nn.Linear(1, 1, bias=False).to(D)
    own = optim.SpikeSlab(model, 0.1, eps=0.5, betas=(0.0, 0.9), seed=0, weight_decay=0.0)
    with own.sampled():
        model(torch.full((1, 1), 3.0, dtype=D)).sum().backward()
    gradient = float(model.weight.grad)
    own.step()
    assert diagnostics(own)["effective_lr"] == pytest.approx(0.1 / (abs(gradient) + 0.5), rel=1e-10)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_the_share_of_weights_in_the_sgd_limit(factor: float) -> None:
    """AdaBayesFP: eta/(k + sqrt(k^2 + s)) is at least half of SGD's rate if s <= 8 k^2, k = eta_0/(2 sgd_lr)."""
    weight = nn.Parameter(torch.zeros(5, dtype=D))
    own = optim.AdaBayesFP([weight], 0.01, sgd_lr=0.1, betas=(0.0, 0.9))
    own.param_groups[0]["lr"] = factor * 0.01
    edge = math.sqrt(8) * 0.05
    weight.grad = torch.tensor([0.0, 0.1 * edge, 0.999 * edge, 1.001 * edge, 10.0], dtype=D)
    own.step()
    assert diagnostics(own)["sgd_share"] == pytest.approx(0.6)
    own.param_groups[0]["sgd_lr"] = math.inf
    assert diagnostics(own)["sgd_share"] == 0.0


@pytest.mark.parametrize("name", ["FOOF", "KFAC", "KroneckerFilterFP"])
def test_the_drift_of_factors(name: str) -> None:
    """The change of a moment's diagonal since its inversion, relative to the sum, in the layer with the largest."""
    _, own = plain(name)
    changes = []
    for entry in own.state.values():
        for side in ("input", "error"):
            if f"{side}_diagonal" in entry:
                moment = entry[f"{side}_moment"]
                now = moment if moment.dim() == 2 else torch.diagonal(moment, dim1=1, dim2=2)
                changes.append(float((now - entry[f"{side}_diagonal"]).abs().sum() / entry[f"{side}_diagonal"].sum()))
    assert changes
    assert diagnostics(own)["factor_drift"] == pytest.approx(max(changes), rel=1e-12)


def test_a_factor_that_was_just_inverted_has_not_drifted() -> None:
    torch.manual_seed(0)
    model = network()
    own = optim.FOOF(model, 0.1, update_every=1)
    cross_entropy(model(torch.randn(8, 5, dtype=D)), torch.zeros(8, dtype=torch.long)).backward()
    own.step()
    assert diagnostics(own)["factor_drift"] == 0.0


def test_temperatures() -> None:
    model = network()
    assert diagnostics(optim.IVON(model, num_data=50, kl_weight=0.3))["temperature"] == 0.3
    sampler = samplers.Langevin(model, 1e-3, num_data=50, temperature=0.2)
    assert diagnostics(sampler)["temperature"] == pytest.approx(0.2)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.filterwarnings("ignore:.* trains .* by |.* sets all its parameters to -1 or 1")
def test_diagnostics_are_finite_numbers(name: str) -> None:
    """Before the first step too, and they change nothing."""
    assert diagnostics(RULES[name](network()))["lr"] > 0
    _, own = plain(name)
    found = diagnostics(own)
    assert all(type(value) is float and math.isfinite(value) for value in found.values())
    assert found == diagnostics(own)
