"""Searches as studies of Optuna: what is tried, what is chosen, and what is said of a storage that cannot be used."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from bayesgrad_lab.cli import main
from bayesgrad_lab.context import Context
from bayesgrad_lab.studies import JOURNAL, SEARCH_SEED, Report, Setting, best, each, search

SETTINGS = [(0.1, 3.0), (0.2, 2.0), (0.4, 1.0), (0.8, 0.0)]


def tried(context: Context, calls: list[tuple[Setting, int]], **options: object) -> dict[Setting, float]:
    """A score with its lowest value at the second setting, that diverges at the last."""

    def score(setting: Setting, seed: int, report: Report) -> float:
        calls.append((setting, seed))
        value = math.nan if setting[1] == 0 else abs(setting[0] - 0.2) + seed % 1000
        for epoch in range(1, 9):
            report(epoch, value)
        return value

    return search(context, "task-method", ["lr", "second"], SETTINGS, score, **options)  # pyright: ignore


@pytest.mark.parametrize("storage", ["", "journal:{}/elsewhere.journal", "sqlite:///{}/trials.db"])
def test_a_setting_is_scored_once_in_a_run_and_in_the_given_order(storage: str, tmp_path: Path) -> None:
    context, calls = Context(tmp_path, storage=storage.format(tmp_path)), []
    found = tried(context, calls)
    assert list(found) == SETTINGS
    assert found[0.8, 0.0] == math.inf
    assert best(found) == (0.2, 2.0)
    assert calls == [(setting, SEARCH_SEED) for setting in SETTINGS]
    assert tried(context, calls) == found
    assert len(calls) == 4
    assert (tmp_path / JOURNAL).exists() == (not storage)


def test_a_lock_that_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """One whose trial had ended already."""
    context = Context(tmp_path)
    found = tried(context, [])
    left = tmp_path / f"{JOURNAL}.0.1.lock"
    left.touch()
    assert tried(context, []) == found
    assert not left.exists()


def test_the_best_are_confirmed_by_further_seeds(tmp_path: Path) -> None:
    """The first setting wins with the search's seed; with two more, its mean is above the first score of the next."""
    values = {(1.0,): [1.0, 9.0, 9.0], (2.0,): [2.0, 2.0, 2.0], (3.0,): [3.0, 0.0, 0.0]}
    seeds = [SEARCH_SEED, 1001, 1002]
    found = search(
        Context(tmp_path),
        "task",
        ["lr"],
        values,
        lambda setting, seed, _: values[setting][seeds.index(seed)],
        confirm=seeds[1:],
    )
    assert found == {(1.0,): 19 / 3, (2.0,): 2.0}


def test_a_pruner_gives_up_what_lags_behind(tmp_path: Path) -> None:
    """Successive halving keeps the first trial, since there is none to compare it with, and the best of later ones."""
    calls: list[tuple[Setting, int]] = []
    found = tried(Context(tmp_path, pruner="asha"), calls)
    assert found[0.2, 2.0] == 0
    assert found[0.4, 1.0] == math.inf
    assert best(found) == (0.2, 2.0)


def test_finals_are_read_from_the_folder_not_from_the_study(tmp_path: Path) -> None:
    context, runs = Context(tmp_path, seeds=3), []

    def run(seed: int) -> float:
        runs.append(seed)
        return 10.0 + seed

    assert each(context, "task", {"lr": 0.1}, range(3), run, lambda value: -value) == [10.0, 11.0, 12.0]
    assert runs == [0, 1, 2] * 2
    assert each(context, "task", {"lr": 0.1}, range(3), run, lambda value: -value) == [10.0, 11.0, 12.0]
    assert runs == [0, 1, 2] * 3


def test_a_trial_that_raises_is_tried_again(tmp_path: Path) -> None:
    context, calls = Context(tmp_path), []

    def fails(setting: Setting, *_: object) -> float:
        calls.append(setting)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return setting[0]

    with pytest.raises(KeyboardInterrupt):
        search(context, "task", ["lr"], [(1.0,), (2.0,)], fails)
    assert search(context, "task", ["lr"], [(1.0,), (2.0,)], fails) == {(1.0,): 1.0, (2.0,): 2.0}
    assert calls == [(1.0,), (2.0,), (2.0,)]


def test_runs_in_one_storage_do_not_mix(tmp_path: Path) -> None:
    """Folders of one name, but of different settings."""
    storage, calls = f"journal:{tmp_path / 'shared'}", []
    for number in (1, 2):
        context = Context(tmp_path / str(number) / "run", storage=storage)
        context.folder.mkdir(parents=True)
        (context.folder / "config.json").write_text(str(number))
        tried(context, calls)
    assert len(calls) == 8
    tried(replace(context, seeds=1), calls)
    assert len(calls) == 8


@pytest.mark.parametrize("damage", [b"{", b'{"op_code":4}\n', b"\xff\n"])
def test_a_damaged_journal_is_refused(damage: bytes, tmp_path: Path) -> None:
    context = Context(tmp_path)
    tried(context, [])
    path = tmp_path / JOURNAL
    path.write_bytes(path.read_bytes() + damage)
    with pytest.raises(ValueError, match=r"study\.journal is damaged .*: delete it and run again with --resume\."):
        tried(context, [])


def test_a_storage_or_a_pruner_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path), "--epochs", "1", "--examples", "50"]
    assert main(["compare", *out, "--storage", "nonesuch://x"]) == 2
    assert "--storage nonesuch://x cannot be used" in capsys.readouterr().err
    assert main(["compare", *out, "--prune", "asha"]) == 2
    assert "--prune needs --lr-search" in capsys.readouterr().err
