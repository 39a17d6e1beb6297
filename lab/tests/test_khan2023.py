"""The experiments of Khan and Rue 2023 in small: reports, caches, and what is measured."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from bayesgrad_lab import datasets, khan2023, khan2023_runs
from bayesgrad_lab.khan2023 import STEEP, Part, best_gaussian, expected, wall, wells
from bayesgrad_lab.khan2023_runs import (
    BINARY,
    METHODS,
    classifier,
    dropped,
    ensemble,
    finals,
    like,
    run,
    ways,
)
from bayesgrad_lab.results import Results
from bayesgrad_lab.task import Task

from .conftest import at_smoke_scale as context


@pytest.fixture(scope="module")
def task() -> Task:
    data = datasets.load("digits").part(100)
    return classifier(data, data.test_x[:20], (8,), 2, 20, samples=3)


@pytest.fixture(scope="module")
def deep(task: Task) -> Task:
    """A ResNet on colour images of 8 x 8, with grey images of 6 x 6 from outside."""
    data = task.data.part(40)
    data = replace(data, train_x=data.train_x.repeat(1, 3, 1, 1), test_x=data.test_x[:30].repeat(1, 3, 1, 1))
    data = replace(data, test_y=data.test_y[:30])
    grey = task.data.test_x[:20, :, 1:7, 1:7]
    outside = like(grey, task.data.train_x, data.train_x)
    return classifier(data, outside, (4,), 1, 20, "resnet", samples=2)


@pytest.mark.parametrize("experiment", ["khan2023-fig1", "khan2023-uncertainty", "khan2023-binary"])
def test_an_experiment_reports_and_a_second_run_measures_nothing(experiment: str, second_run) -> None:
    second_run(experiment)


def test_expectations_and_best_belief_of_the_wall_in_closed_form() -> None:
    """E[exp(-a x)] = exp(-a m + a^2 v/2); where the slope vanishes v = 1/(a b), and m lies 1/(2 b) off the minimum."""
    a, b = STEEP, khan2023.SLOPE
    mean, deviation = torch.tensor([0.3, 1.0]).double(), torch.tensor([0.1, 0.5]).double()
    exact = (-a * mean + a**2 * deviation**2 / 2).exp() + b * mean
    assert_close(expected(wall, mean, deviation), exact, rtol=1e-10, atol=0)
    place, width, value = best_gaussian(wall, -0.5, 2.0)
    assert place == pytest.approx(math.log(a / b) / a + 1 / (2 * b), abs=0.004)  # half a step of the grid
    assert width == pytest.approx(1 / math.sqrt(a * b), rel=0.015)
    entropy = 0.5 * math.log(2 * math.pi * math.e / (a * b))
    assert value == pytest.approx(b / a + b * (math.log(a / b) / a + 1 / (2 * b)) - entropy, abs=1e-3)


def test_the_sharp_minimum_is_the_deeper_one_and_the_flat_one_is_preferred() -> None:
    x = torch.linspace(-3, 3, 6001).double()
    assert x[wells(x).argmin()].item() == pytest.approx(-1.5, abs=0.01)
    assert best_gaussian(wells, -2.5, -0.5)[2] > best_gaussian(wells, 0.5, 2.5)[2]


def test_searches_are_as_long_for_each_method() -> None:
    for methods in (METHODS, BINARY):
        assert len({(len(method.lrs), len(method.seconds)) for method in methods}) == 1


@pytest.mark.parametrize("network", ["task", "deep"])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.kind)
def test_runs_are_functions_of_their_seed_and_leave_the_global_generator(
    method, network: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    task = request.getfixturevalue(network)
    method = replace(method, options={k: v for k, v in method.options.items() if k != "fused"})
    state = torch.get_rng_state()
    found = [
        run(context(tmp_path / str(i)), task, method, (method.lrs[0], method.seconds[0]), seed)
        for i, seed in enumerate((1, 1, 2))
    ]
    assert torch.equal(torch.get_rng_state(), state)
    assert ways(method) == ("mean",) or not torch.equal(found[0]["mean"], found[0]["drawn"])
    for way in ways(method):
        assert_close(found[0][way].sum(1), torch.ones(len(task.data.test_x)))
        assert torch.equal(found[0][way], found[1][way])
        assert not torch.equal(found[0][way], found[2][way])
        assert len(found[0][f"{way}_outside"]) == 20


def test_binary_weights_are_binary_and_normalised_by_their_own_statistics(task: Task, tmp_path: Path) -> None:
    binary = replace(task, network="binary", make=khan2023_runs.binary_perceptron)
    model = binary.model(0)
    method = replace(BINARY[1], options={})
    (optimizer,) = method.build(model, binary, 1e-3, 0, 0.3)
    assert {p.abs().unique().item() for p in model.parameters()} == {1.0}
    ways = khan2023_runs.predictions(binary, method, model, optimizer, "cpu")
    x = binary.data.train_x
    model.train()
    with torch.no_grad():
        assert_close(ways["mean"](x).argmax(1), model(x).argmax(1))
    model.eval()
    assert_close(ways["mean"](x), optimizer.posterior(model).predict(x, method="mode", statistics=x))


def test_images_of_another_kind_are_scaled_like_one_s_own() -> None:
    pixels = torch.rand(5, 1, 4, 4)
    pixels[0, 0, 0, 0], pixels[0, 0, 0, 1] = 0.0, 1.0
    assert_close(like((pixels - 0.2) / 0.5, (pixels - 0.2) / 0.5, (pixels - 0.7) / 0.1), (pixels - 0.7) / 0.1)


def test_small_grey_images_get_a_black_border_and_three_equal_channels() -> None:
    """28 x 28 in one channel becomes 32 x 32 in three, each scaled as that channel of the target is."""
    mean, deviation = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1), torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)
    colour, grey = torch.rand(4, 3, 32, 32), torch.rand(5, 1, 28, 28)
    colour[0, :, 0, 0], colour[0, :, 0, 1] = 0.0, 1.0
    grey[0, 0, 0, 0], grey[0, 0, 0, 1] = 0.0, 1.0
    found = like((grey[1:] - 0.1) / 0.3, (grey - 0.1) / 0.3, (colour - mean) / deviation) * deviation + mean
    expected = torch.zeros(4, 3, 32, 32)
    expected[:, :, 2:30, 2:30] = grey[1:]
    assert_close(found, expected, rtol=0, atol=1e-6)


def test_an_ensemble_averages_probabilities_and_counts_all_times(task: Task, tmp_path: Path) -> None:
    adam = replace(METHODS[0], lrs=(1e-2,), seconds=(0.0,))
    here = context(tmp_path, seeds=1)
    (single,) = finals(here, task, adam)
    both = ensemble(here, task, adam, single, 2)
    runs = [run(here, task, adam, (1e-2, 0.0), seed) for seed in (0, khan2023_runs.MEMBERS + 1)]
    p = (runs[0]["mean"] + runs[1]["mean"]) / 2
    assert both.runs[0]["nll"] == pytest.approx(-p.log()[range(len(p)), task.data.test_y].mean().item(), rel=1e-5)
    assert both.runs[0]["seconds"] == pytest.approx((runs[0]["seconds"] + runs[1]["seconds"]).median().item())


def test_differences_are_paired() -> None:
    one, two = (Results("some", [{"nll": a}, {"nll": a + 1.0}]) for a in (0.5, 0.3))
    assert one.less(two, "nll") == pytest.approx((0.2, 0.0))


def test_a_run_that_diverges_has_no_scores(task: Task, tmp_path: Path) -> None:
    ogn = replace(METHODS[2], lrs=(1e30,), seconds=(1.0,), options={})
    rows = [row for one in finals(context(tmp_path, seeds=1), task, ogn) for row in one.runs]
    assert all(math.isnan(row["nll"]) for row in rows)


def test_dropout_is_inside_of_blocks_and_leaves_weights_as_they_are(deep: Task) -> None:
    plain, drops = deep.model(3), dropped(deep.model(3), 0.3)
    assert len(list(plain.parameters())) == len(list(drops.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), drops.parameters()))
    first = [part for part in drops.modules() if isinstance(part, torch.nn.Sequential) and len(part) == 2]
    kinds = [type(part[1]).__name__ for part in first if isinstance(part[0], torch.nn.Dropout)]
    assert kinds == ["Conv2d", "Conv2d", "Conv2d", "Linear"]
    assert not any(isinstance(part, torch.nn.Dropout) for part in plain.modules())


@pytest.mark.parametrize("kind", ["ogn", "vogn", "ivon"])
def test_batch_norm_has_statistics_of_the_mean_and_of_each_draw(kind: str, deep: Task) -> None:
    """At the mean those of a batch of all images; draws differ from those that keep the mean's statistics."""
    method = next(replace(m, options={}) for m in METHODS if m.kind == kind)
    model: Any = deep.model(0)
    x = deep.data.train_x
    (optimizer,) = method.build(model, deep, 1e-3, 0, 0.3)
    ways = khan2023_runs.predictions(deep, method, model, optimizer, "cpu")
    stem, norm, *_ = model.stem
    with torch.no_grad():
        hidden = stem(x)
        assert_close(norm.running_mean, hidden.mean((0, 2, 3)))
        assert_close(norm.running_var, hidden.var((0, 2, 3)))
        belief: Any = optimizer.posterior(model)
        assert torch.equal(ways["drawn"](x), belief.predict(x, samples=2, statistics=x))
        assert not torch.allclose(ways["drawn"](x), belief.predict(x, samples=2, statistics="running"), atol=1e-4)


def test_a_task_that_takes_long_has_fewer_seeds_and_says_so(tmp_path: Path, monkeypatch, deep: Task) -> None:
    adam = replace(METHODS[0], lrs=(1e-2,), seconds=(0.0,))
    vogn = replace(METHODS[3], lrs=(0.1,), seconds=(0.3,), options={})
    monkeypatch.setattr(khan2023, "parts", lambda _: [Part(deep, 2, [adam, vogn], "digits, cut", 1)])
    report = khan2023.uncertainty(context(tmp_path, seeds=3))
    finals = {path.name.split("seed")[1] for path in (tmp_path / "trials").glob("final-*")}
    assert finals == {"0.pt", f"{khan2023_runs.MEMBERS + 1}.pt"}  # one seed, and the ensemble's other member
    (protocol,) = (words for key, words in report.settings.items() if key == f"protocol of {deep.key}")
    assert all(words in protocol for words in ("1 seed;", "20 images of digits, cut", "BatchNorm", "4 to 16 channels"))
