"""The demonstration at smoke scale: what is on its page, that it resumes, and that its sentences follow the numbers."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from bayesgrad_lab import demo, demo_runs, demo_stories
from bayesgrad_lab.cli import main
from bayesgrad_lab.nuts import nuts
from bayesgrad_lab.report import Report, load, markdown
from bayesgrad_lab.results import Results

DOCS = Path(__file__).parents[2] / "docs"
COMMAND = ["demo", "--scale", "smoke", "--seeds", "2"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run, and what it printed."""
    out, said = tmp_path_factory.mktemp("runs"), io.StringIO()
    with contextlib.redirect_stdout(said), pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "PROCESSES", 1)  # importing torch is most of the time
        assert main([*COMMAND, "--out", str(out)]) == 0
    return out / "demo-smoke", said.getvalue()


def test_the_page_has_four_stories_with_figures_tables_and_the_code_that_ran(finished: tuple[Path, str]) -> None:
    folder, said = finished
    report, page = load(folder), (folder / "report.html").read_text()
    assert said.rstrip().endswith("report.html")
    assert page.count('class="panel"') == 8
    assert not re.search(r'(src|href)="(?!data:|https://github.com/bayesgrad/)', page.partition("<script>")[0])
    ran = (demo_runs.classifier, demo_runs.regression_band, demo_runs.race_curve, demo_runs.langevin_samples)
    for story, function in zip(report.stories, ran, strict=True):
        assert story["code"] == inspect.getsource(function)
        assert "±" in story["headline"] + str(story["table"]["rows"])
        assert " ".join(story["headline"].split()) in " ".join(said.split())
        assert all((DOCS / address.partition("/docs/")[2]).is_file() for address in story["links"].values())
        assert f"**{story['title']}.** {story['headline']}" in markdown(report)


def test_figures_are_valid(finished: tuple[Path, str]) -> None:
    go = pytest.importorskip("plotly.graph_objects")
    for story in load(finished[0]).stories:
        for panel in story["panels"]:
            data = [{k: v for k, v in trace.items() if k != "ink"} for trace in panel["figure"]["data"]]
            figure = go.Figure({**panel["figure"], "data": data})
            assert len(figure.data) >= 2
            json.dumps(panel, allow_nan=False)


def test_searches_see_validation_data_and_finals_test_data(finished: tuple[Path, str]) -> None:
    labels = {
        purpose: [torch.load(path)["labels"] for path in finished[0].glob(f"trials/{purpose}-classifier-*.pt")]
        for purpose in ("search", "final")
    }
    assert [len(some) for some in labels.values()] == [4, 4]
    assert {len(one) for one in labels["search"]} == {32}  # a fifth of 160
    assert {len(one) for one in labels["final"]} == {40}  # a fifth of 200
    data, _ = demo_runs._parts(demo.Context(finished[0], "smoke"), final=True)
    held, _ = demo_runs._parts(demo.Context(finished[0], "smoke"), final=False)
    test, train = ({tuple(x.tolist()) for x in some} for some in (data.test_x, data.train_x))
    assert not test & train
    assert not test & {tuple(x.tolist()) for x in torch.cat([held.train_x, held.test_x])}
    assert len(demo.GRIDS["adamw"]) == len(demo.GRIDS["ivon"])


def test_a_second_run_measures_nothing(finished: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = finished
    before = {path: path.stat().st_mtime_ns for path in folder.glob("trials/*.pt")}
    stories = load(folder).stories
    assert main([*COMMAND, "--out", str(folder.parent), "--resume", "--quiet"]) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.glob("trials/*.pt")} == before
    assert load(folder).stories == stories
    assert capsys.readouterr().out == f"The report is in {folder / 'report.html'}\n"
    assert main([*COMMAND, "--out", str(folder.parent)]) == 2
    assert "pass --resume" in capsys.readouterr().err


@pytest.mark.parametrize(("good", "words"), [("ivon", "is better in accuracy"), ("adamw", "is worse in accuracy")])
def test_the_headline_says_who_is_better(good: str, words: str) -> None:
    """One method knows the labels, up to noise, and the other one guesses."""
    generator = torch.Generator().manual_seed(0)

    def predicted(method: str) -> dict[str, torch.Tensor]:
        labels = torch.randint(10, (200,), generator=generator)
        logits = torch.randn(200, 10, generator=generator)
        logits[range(200), labels] += 4.0 * (method == good)
        outside = torch.randn(2, 200, 10, generator=generator).softmax(-1)
        seconds = torch.tensor(2.0 if method == "ivon" else 1.0)
        return {
            "inside": logits.softmax(-1),
            "labels": labels,
            "shapes": outside[0],
            "noise": outside[1],
            "seconds": seconds,
        }

    every = {("classifier", one): [predicted(one) for _ in range(4)] for one in ("adamw", "ivon")}
    chosen = {key: Results("", [], settings={"lr": 1.0}, tried={(1.0,): 0.0}) for key in every}
    story = demo_stories._classifier(every, chosen)
    assert words in story["headline"]
    assert "it takes 2.0 times as long" in story["headline"]
    assert all(word not in story["headline"] for word in {"better", "worse"} - {words.split()[1]})


def test_what_seeds_do_not_resolve_is_no_difference() -> None:
    """The 97.5 % quantile of t with four degrees of freedom is 2.776."""
    assert demo_stories._differs((2.7, 1.0), 5) == 0
    assert demo_stories._differs((-2.8, 1.0), 5) == -1
    assert demo_stories._differs((2.8, 1.0), 5) == 1
    assert demo_stories._differs((2.8, float("nan")), 1) == 0


def test_nuts_samples_a_gaussian() -> None:
    """Means and covariances of four chains are those of the Gaussian, within five standard errors."""
    arviz = pytest.importorskip("arviz")
    covariance, mean = np.array([[4.0, 1.5], [1.5, 1.0]]), np.array([1.0, -2.0])
    precision = np.linalg.inv(covariance)

    def density(w: np.ndarray) -> tuple[float, np.ndarray]:
        return float(-(w - mean) @ precision @ (w - mean) / 2), -precision @ (w - mean)

    chains = np.stack([nuts(density, np.zeros(2), 800, 300, seed)[0] for seed in range(4)])
    centred = chains - mean
    values = {(i,): chains[..., i] for i in range(2)}
    values |= {(i, j): centred[..., i] * centred[..., j] for i, j in ((0, 0), (0, 1), (1, 1))}
    for key, some in values.items():
        expected = mean[key] if len(key) == 1 else covariance[key]
        assert abs(some.mean() - expected) < 5 * some.std() / np.sqrt(arviz.ess(some))
        assert arviz.ess(some) > 400


def test_a_damaged_story_is_named(tmp_path: Path) -> None:
    report = Report("some", stories=[{"title": "no headline"}])
    (tmp_path / "report.json").write_text(json.dumps(vars(report)))
    with pytest.raises(ValueError, match=r"report.json is damaged .*headline"):
        load(tmp_path)
