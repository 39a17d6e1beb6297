"""Regression on fixed splits: what is read, what is refused, and scores in the targets' own units."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bayesgrad import laplace
from bayesgrad_lab import uci
from bayesgrad_lab.results import Results, sign
from bayesgrad_lab.uci import METHODS, Recipe, read, scaled

from .conftest import at_smoke_scale as context

SMALL = Recipe(hidden=4, batch=20, steps=6, samples=3, points=10)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Ten rows of three columns, of which the middle one is the target, and one split."""
    folder = tmp_path / "uci_regression" / "yacht"
    folder.mkdir(parents=True)
    np.savetxt(folder / "data.txt", np.arange(30).reshape(10, 3) ** 1.5)
    for name, index in (("features", [0, 2]), ("target", [1]), ("train_0", range(1, 10)), ("test_0", [0])):
        np.savetxt(folder / f"index_{name}.txt", np.array(list(index)), fmt="%d")
    return folder


def test_a_split_is_scaled_by_its_training_part(files: Path) -> None:
    split = read("yacht", 0, str(files.parents[1]))
    table = np.loadtxt(files / "data.txt")
    assert_close(split.train_x.mean(0), torch.zeros(2).double(), atol=1e-12, rtol=0)
    assert_close(split.train_y.std(0, correction=0), torch.ones(1).double())
    assert split.unit == pytest.approx(table[1:, 1].std())
    assert split.test_y.item() == pytest.approx((table[0, 1] - table[1:, 1].mean()) / table[1:, 1].std())
    assert (len(split.train_x), len(split.test_x)) == (9, 1)


def test_a_constant_column_stays_finite() -> None:
    x = np.stack([np.arange(6.0), np.ones(6)], 1)
    split = scaled("some", 0, x, np.arange(6.0), np.arange(5), np.array([5]))
    assert bool(torch.isfinite(split.train_x).all())


def test_validation_data_are_training_data_and_the_test_part_is_out_of_reach(files: Path) -> None:
    split = read("diabetes", 3)
    held = split.validation()
    assert len(held.train_x) + len(held.test_x) == len(split.train_x)
    rows = {tuple(row) for row in torch.cat([held.train_x, held.test_x]).tolist()}
    assert rows == {tuple(row) for row in split.train_x.tolist()}
    assert not rows & {tuple(row) for row in split.test_x.tolist()}


def test_files_that_do_not_fit_are_refused(files: Path) -> None:
    root = str(files.parents[1])
    with pytest.raises(ValueError, match="did you mean 'yacht'"):
        read("yachts", 0, root)
    with pytest.raises(FileNotFoundError, match="index_train_7"):
        read("yacht", 7, root)
    (files / "index_test_0.txt").write_text("0\n1\n")
    with pytest.raises(ValueError, match="no split"):
        read("yacht", 0, root)
    (files / "index_features.txt").write_text("0\n5\n")
    with pytest.raises(ValueError, match=r"columns that data\.txt does not have"):
        read("yacht", 0, root)
    (files / "data.txt").write_text("1 2 3\n4 x 6\n")
    with pytest.raises(ValueError, match="no table of numbers"):
        read("yacht", 0, root)


def test_scores_are_in_the_units_of_the_targets(tmp_path: Path) -> None:
    """Targets times ten: the same network, ten times the error, log 10 more NLL, the same coverage."""
    split = read("diabetes", 0)
    tenfold = replace(split, name="tenfold", unit=10 * split.unit)
    one, ten = (uci.run(context(tmp_path), SMALL, s, METHODS[0], (0.01, 1e-3), 1.0) for s in (split, tenfold))
    for way in ("map", *uci.STRUCTURES):
        assert_close(ten[way], one[way] * torch.tensor([10, 1, 1]) + torch.tensor([0, np.log(10), 0]).double())
        assert_close(ten[way][0], ten["map"][0])  # linearised predictions have the network's mean


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.kind)
def test_runs_are_functions_of_their_split(method, tmp_path: Path) -> None:
    split = read("diabetes", 1)
    setting = method.seeks[0]
    state = torch.get_rng_state()
    found = [uci.run(context(tmp_path / str(i)), SMALL, split, method, setting, 0.5, "search") for i in range(2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found[0][method.kind], found[1][method.kind])


def test_noise_is_added_once() -> None:
    """A linear network with its Gaussian likelihood: targets' variance is that of ridge regression and the noise."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 30, 1, dtype=torch.float64, generator=generator)
    model = torch.nn.Linear(1, 1, bias=False).double()
    posterior = laplace(
        model, [(x, y)], likelihood="gaussian", structure="full", prior_precision=2.0, noise_scale=0.3**0.5
    )
    moments = posterior.predict(x, method="linear", likelihood="gaussian")
    found = uci.with_noise(moments, posterior.noise_scale**2)
    assert_close(found.variance, x.square() / (x.square().sum() / 0.3 + 2.0) + 0.3, rtol=1e-9, atol=0)


def test_a_search_takes_the_lowest_validation_nll_and_map_tells_the_noise(tmp_path: Path) -> None:
    split = read("diabetes", 0)
    method = replace(METHODS[0], lrs=(1e-4, 0.1), seconds=(1e-4,))
    setting, tried, noise = uci.choose(context(tmp_path), SMALL, split, method)
    assert setting == (0.1, 1e-4)
    assert tried[0.1, 1e-4] < tried[1e-4, 1e-4]
    found = uci.run(context(tmp_path), SMALL, split.validation(), method, (0.1, 1e-4), 1.0, "search")
    assert noise == found["error"].item()
    assert found["error"].sqrt().item() * split.unit == pytest.approx(found["map"][0].item())


def test_searches_are_as_long_for_each_method() -> None:
    assert len({(len(method.lrs), len(method.seconds)) for method in METHODS}) == 1


def test_a_run_that_diverges_has_no_scores(tmp_path: Path) -> None:
    found = uci.run(context(tmp_path), SMALL, read("diabetes", 0), METHODS[2], (1e300, 1.0), 1.0)
    assert bool(torch.isnan(found["ivon"]).all())


def test_differences_are_paired_and_signs_take_two_standard_errors() -> None:
    one, two = (Results("some", [{"nll": a} for a in values]) for values in ([1.0, 3.0], [0.5, 2.5]))
    assert one.less(two, "nll") == pytest.approx((0.5, 0.0))
    assert [sign(gap) for gap in ((0.5, 0.2), (0.5, 0.3), (-0.5, 0.2))] == [1, 0, -1]


@pytest.mark.parametrize("experiment", ["uci-regression"])
def test_the_experiment_reports_and_a_second_run_measures_nothing(experiment: str, second_run) -> None:
    second_run(experiment)


def test_map_s_noise_is_the_mean_squared_training_error(tmp_path: Path) -> None:
    """Of its own training data the NLL is that of the best Gaussian, log(2 pi e noise)/2."""
    split = read("diabetes", 0)
    own = replace(split, test_x=split.train_x, test_y=split.train_y, unit=1.0)
    found = uci.run(context(tmp_path), SMALL, own, METHODS[0], (0.01, 1e-3), 1.0, "search")
    assert found["map"][1].item() == pytest.approx(0.5 * np.log(2 * np.pi * np.e * found["error"].item()))
