"""Runs that survive, and scores against their definitions."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from bayesgrad_lab import datasets, networks, store, training
from bayesgrad_lab.compare import Budget, compare
from bayesgrad_lab.context import Context, Trial
from bayesgrad_lab.dataset import Dataset
from bayesgrad_lab.methods import METHODS, Setup, method
from bayesgrad_lab.results import mean_and_error
from bayesgrad_lab.task import Task, augmented
from bayesgrad_lab.training import train

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return datasets.load("digits").part(200)


def folder(path: Path) -> Path:
    (path / "trials").mkdir(parents=True)
    return path


class Interrupted(Exception):
    """Stands in for whatever ends a process."""


@pytest.mark.parametrize("name", METHODS)
def test_every_method_resumes_to_the_same_numbers(name: str, digits: Dataset, tmp_path: Path) -> None:
    task = Task(digits, "mlp", 3, 50, milestones=(2,), decay=5e-4, augment=True)
    trial = task, METHODS[name], METHODS[name].lr, 1
    whole = train(Context(folder(tmp_path / "whole")), *trial)

    def stop(trial: Trial, epoch: int, step: int, *_: float) -> None:
        if epoch == 1 and step == 4:
            raise Interrupted

    broken = Context(folder(tmp_path / "broken"), progress=stop)
    with pytest.raises(Interrupted):
        train(broken, *trial)
    resumed = train(replace(broken, progress=None), *trial)
    assert (resumed.rows, resumed.final) == (whole.rows, whole.final)
    assert len(whole.rows) == 3
    again = train(broken, *trial)  # finished: nothing runs
    assert again.final == whole.final


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "count",
    [
        4,
        pytest.param(20, marks=pytest.mark.slow),
        pytest.param(int(os.environ.get("SOAK_KILLS", "200")), marks=pytest.mark.soak, id="many"),
    ],
)
def test_kills_at_random_moments_change_nothing(count: int, workers: int, tmp_path: Path) -> None:
    """Of one process, which is resumed; and of one of two processes, whose trial the other takes up."""
    command = [sys.executable, str(HERE / "kills.py"), str(tmp_path), str(count), str(workers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(count), done.stderr[-2000:]


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    store.open_folder(path, {"seeds": 3}, False)
    with pytest.raises(ValueError, match="holds a run already: pass --resume"):
        store.open_folder(path, {}, False)
    store.open_folder(path, {"seeds": 3}, True)
    with pytest.raises(ValueError, match="was started with seeds=3, not 4"):
        store.open_folder(path, {"seeds": 4}, True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="holds files of something else"):
        store.open_folder(tmp_path / "other", {}, True)
    assert [p.name for p in (tmp_path / "other").iterdir()] == ["thesis.tex"]


def test_writing_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    store.write_json(path, {"a": 1})

    def fails(partial: Path) -> None:
        partial.write_text("half")
        raise Interrupted

    with pytest.raises(Interrupted):
        store.write_atomically(path, fails)
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["value.json"]


def test_scores_by_hand() -> None:
    """Three examples with known probabilities: error 1/3, and NLL, ECE and Brier from their definitions."""
    probabilities = torch.tensor([[0.7, 0.3], [0.4, 0.6], [0.9, 0.1]])
    labels = torch.tensor([0, 1, 1])

    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return probabilities.log()[x[:, 0].long()]

    x = torch.arange(3.0)[:, None]
    data = Dataset("fixed", x, labels, x, labels, 2, "table")
    scores = training.final_scores(Fixed(), data)
    assert scores["error"] == pytest.approx(1 / 3)
    assert scores["nll"] == pytest.approx(-(math.log(0.7) + math.log(0.6) + math.log(0.1)) / 3, rel=1e-6)
    assert scores["brier"] == pytest.approx((2 * 0.3**2 + 2 * 0.4**2 + 2 * 0.9**2) / 3, rel=1e-6)
    assert scores["ece"] == pytest.approx((0.3 + 0.4 + 0.9) / 3, rel=1e-5)


def test_augmentation_shifts_and_mirrors() -> None:
    x = torch.arange(2 * 3 * 8 * 8.0).view(2, 3, 8, 8) + 1
    generator = torch.Generator().manual_seed(0)
    seen = [augmented(x, generator) for _ in range(200)]
    for moved in seen[:20]:
        for image, original in zip(moved, x):
            candidates = [
                torch.nn.functional.pad(flip, (4, 4, 4, 4))[:, i : i + 8, j : j + 8]
                for flip in (original, original.flip(2))
                for i in range(9)
                for j in range(9)
            ]
            assert any(torch.equal(image, candidate) for candidate in candidates)
    assert len({moved[0].numpy().tobytes() for moved in seen}) > 80


def test_search_uses_the_same_budget_for_all_and_never_the_test_data(digits: Dataset, tmp_path: Path) -> None:
    spoilt = replace(digits, test_y=torch.zeros_like(digits.test_y))  # labels that would mislead whoever looks at them
    task, search = Task(digits, "mlp", 2, 50), Budget((0.1, 1.0), 1, 100)
    chosen = {}
    for name, data in (("true", digits), ("spoilt", spoilt)):
        said: list[str] = []
        context = Context(folder(tmp_path / name), seeds=2, say=said.append)
        results = compare(context, replace(task, data=data), ["sgd", "adabayes"], search)
        chosen[name] = {method: (finals.lr, finals.tried) for method, finals in results.items()}
        budget = "2 learning rates each, 1 epoch of 100 training examples at a constant rate"
        assert said[0] == f"search on mlp: {budget}, chosen by validation NLL"
        for finals in results.values():
            assert len(finals.runs) == 2
            assert (finals.lr,) == min(finals.tried, key=finals.tried.__getitem__)
    assert chosen["true"] == chosen["spoilt"]


def test_mean_and_standard_error() -> None:
    assert mean_and_error([1.0, 2.0, 3.0]) == (2.0, pytest.approx(1 / math.sqrt(3)))
    assert math.isnan(mean_and_error([1.0])[1])
    assert all(map(math.isnan, mean_and_error([1.0, math.nan, 2.0])))


def test_trials_of_different_data_do_not_share_files(digits: Dataset, tmp_path: Path) -> None:
    other = replace(digits, name="other", test_y=(digits.test_y + 1) % 10)
    context = Context(folder(tmp_path), seeds=1)
    tasks = (Task(data, "mlp", 1, 50) for data in (digits, other))
    first, second = (compare(context, task, ["sgd"], None)["sgd"].runs[0] for task in tasks)
    assert first.final != second.final
    assert len(list((tmp_path / "trials").glob("*.json"))) == 2


def test_a_model_that_diverged_has_no_scores(digits: Dataset) -> None:
    model = networks.build("mlp", digits, 0)
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    assert all(map(math.isnan, training.final_scores(model, digits).values()))
    assert all(map(math.isnan, training.evaluate(model, digits.test_x, digits.test_y).values()))


@pytest.mark.parametrize("name", ["foof", "kfac", "naturalgradient"])
def test_rules_that_invert_give_up_when_they_diverge(name: str, digits: Dataset, tmp_path: Path) -> None:
    for lr in (1e3, 1e12):
        history = train(Context(folder(tmp_path / f"{lr:g}")), Task(digits, "mlp", 3, 50), METHODS[name], lr, 0)
        assert all(map(math.isnan, history.final.values()))


def test_what_cannot_be_inverted_ends_a_trial_with_a_word(digits: Dataset, tmp_path: Path) -> None:
    """Inputs that overflow when they are squared, though the loss is small."""
    spoilt = replace(digits, train_x=digits.train_x * 1e30, test_x=digits.test_x * 1e30)
    said: list[str] = []
    context = Context(folder(tmp_path), seeds=2, say=said.append)
    tiny = replace(spoilt, train_y=torch.zeros_like(digits.train_y), classes=1)
    finals = compare(context, Task(tiny, "mlp", 1, 50), ["foof"], None)["foof"]
    assert math.isnan(finals.mean("error")[0])
    assert len(said) == 1
    assert said[0].startswith("foof at lr 0.2 gave up: the inputs of layer '1', or their squares, are not finite")


def test_what_optimizers_warn_of_is_said_once(digits: Dataset, tmp_path: Path) -> None:
    said: list[str] = []
    context = Context(folder(tmp_path), seeds=2, say=said.append)
    compare(context, Task(digits.part(60), "resnet", 1, 50), ["foof", "kfac"], None)
    assert [words.split(" trains stem.1.weight")[0] for words in said] == ["FOOF", "KFAC"]


def test_rules_know_how_many_losses_an_example_has() -> None:
    model = nn.Linear(3, 2)
    for name in ("foof", "kfac", "naturalgradient"):
        (optimizer,) = method(name).of(model, Setup(0.1, batch=4, losses_per_example=7, decay=0.01))
        group = optimizer.param_groups[0]
        assert (group["lr"], group["losses_per_example"]) == (0.1, 7)
        assert group["lr"] * group["weight_decay"] == pytest.approx(1e-3)
    (optimizer,) = method("adabayes").of(model, Setup(0.1, batch=4, losses_per_example=7))
    assert optimizer.param_groups[0]["batch_size"] == 28
    for name in ("ogn", "vogn", "ivon"):
        (optimizer,) = method(name).of(model, Setup(0.1, 0.0, 3, 4, 7, 100, 0.01))
        group = optimizer.param_groups[0]
        assert (group["lr"], group["num_data"], group["prior_precision"], group["seed"]) == (0.1, 700, 7.0, 3)
        assert group.get("losses_per_example", 7) == 7


def test_a_damaged_checkpoint_costs_time_but_no_result(digits: Dataset, tmp_path: Path) -> None:
    trial = Task(digits, "mlp", 2, 50), METHODS["sgd"], 0.1, 0
    whole = train(Context(folder(tmp_path / "whole")), *trial)
    for damage in (b"", b"PK\x03\x04", b"garbage" * 100):
        spoilt = folder(tmp_path / str(len(damage)))
        (spoilt / "trials" / "final-digits-mlp-sgd-lr0.1-seed0.pt").write_bytes(damage)
        assert train(Context(spoilt), *trial).final == whole.final


def test_a_run_killed_at_its_very_beginning_can_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    (path / "trials").mkdir(parents=True)
    (path / ".lock").write_text("")
    (path / "config.json.12.partial").write_text("{")
    os.utime(path / "config.json.12.partial", (1, 1))
    (path / "report.json.13.partial").write_text("{")  # of a process that still writes it
    store.open_folder(path, {"seeds": 1}, True)
    assert json.loads((path / "config.json").read_text()) == {"seeds": 1}
    assert [p.name for p in path.glob("*.partial")] == ["report.json.13.partial"]


@pytest.mark.parametrize("large", [False, True])
def test_networks_have_their_shapes_and_depend_on_the_seed_alone(large: bool, digits: Dataset) -> None:
    images = replace(digits, train_x=torch.zeros(2, 3, 32, 32), name="images", classes=10)
    expected = {"resnet": 21_282_122, "densenet": 6_956_298} if large else {}  # the CIFAR networks of Aitchison 2020
    for name in ("mlp", "cnn", "resnet", "densenet"):
        model = networks.build(name, images, 0, large)
        if name in expected:
            assert sum(p.numel() for p in model.parameters()) == expected[name]
        if not large:
            assert model(images.train_x).shape == (2, 10)
            again = networks.build(name, images, 0)
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
    with pytest.raises(ValueError, match="gpt takes text data, but images is image data; use mlp, cnn, resnet"):
        networks.build("gpt", images, 0)


def test_the_gpt_does_not_look_ahead() -> None:
    text = Dataset("text", *[torch.randint(0, 9, (4, 16))] * 4, classes=9, kind="text")
    model = networks.build("gpt", text, 0)
    a = text.train_x.clone()
    b = a.clone()
    b[:, 10:] = (b[:, 10:] + 1) % 9
    difference = (model(a) - model(b)).abs().amax((0, 2))
    assert bool((difference[:10] == 0).all())
    assert bool((difference[10:] > 0).all())
