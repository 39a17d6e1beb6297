"""The experiment on topics: its files, its judge, and that methods learn what they are said to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bayesgrad.models import LatentDirichlet
from bayesgrad_lab import khan2023_svi as own
from bayesgrad_lab.context import Context
from bayesgrad_lab.corpora import associated_press, invented, read_ldac
from bayesgrad_lab.report import load


def context(path: Path) -> Context:
    (path / "trials").mkdir(parents=True, exist_ok=True)
    return Context(path, "smoke", seeds=2, say=lambda words: None)


@pytest.mark.parametrize("experiment", ["khan2023-svi"])
def test_the_experiment_reports_and_a_second_run_trains_nothing(experiment: str, smoke, monkeypatch) -> None:
    folder = smoke(experiment).folder
    report = load(folder)
    assert all(len(row) == len(table["columns"]) for table in report.tables for row in table["rows"])
    assert (folder / report.figures[0]["file"]).exists()
    assert len(report.tables[0]["rows"]) == 2 * len(own.METHODS)
    for name, (_, sweeps) in own.METHODS.items():
        monkeypatch.setitem(own.METHODS, name, (lambda *_: pytest.fail("trained again"), sweeps))
    assert own.topics(context(folder)).verdict.startswith(("Holds", "Does not hold"))


@pytest.mark.parametrize("name", own.METHODS)
def test_methods_find_topics_that_share_no_word(name: str) -> None:
    corpus = invented(200, 20, 2)
    task = own.Documents(corpus[:180], corpus[180:], corpus[180:], 2, ((1,), (1,)), (1, 1))
    found = own.METHODS[name][0](task, (0.1, 0.1), 10, 0)
    halves = found[:, :10].sum(1) / found.sum(1)
    assert halves.min() < 0.1 < 0.9 < halves.max()
    known = np.kron(np.eye(2), np.full(10, 1e4)) + 1e-3
    best = own.bound(corpus[180:], known, 0.1)
    assert best > own.bound(corpus[180:], found, 0.1) > best - 0.1


def test_the_judge_is_the_models_own_score() -> None:
    corpus = invented()
    model = LatentDirichlet(3, method="svi", doc_topic_prior=0.2, max_iter=2, tol=0, random_state=0).fit(corpus[:50])
    held = corpus[50:]
    assert own.bound(held, model.components_, 0.2) == pytest.approx(model.bound(held).sum() / held.sum(), rel=1e-12)


def test_files_are_read_and_checked(tmp_path: Path) -> None:
    (tmp_path / "ap.dat").write_text("2 0:1 2:3\n1 1:2\n")
    (tmp_path / "vocab.txt").write_text("one\ntwo\nthree\n")
    corpus = associated_press(str(tmp_path))
    assert corpus.counts.toarray().tolist() == [[1, 0, 3], [0, 2, 0]]
    assert corpus.vocabulary == ["one", "two", "three"]
    for damaged in ("2 0:1\n", "1 3:1\n", "1 -1:1\n", "1 0\n", "x 0:1\n", "\n"):
        (tmp_path / "ap.dat").write_text("1 0:1\n" + damaged)
        with pytest.raises(ValueError, match=r"ap.dat is damaged in line 2 .*get it again"):
            read_ldac(tmp_path / "ap.dat", 3)
    (tmp_path / "ap.dat").unlink()
    with pytest.raises(FileNotFoundError, match=r"ap needs the file ap.dat; looked in"):
        associated_press(str(tmp_path))
