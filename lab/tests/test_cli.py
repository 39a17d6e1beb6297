"""The command line as a user meets it: what it prints, what it leaves behind, and how it refuses."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bayesgrad_lab.cli import main
from bayesgrad_lab.context import Context
from bayesgrad_lab.experiments import EXPERIMENTS, Experiment
from bayesgrad_lab.methods import METHODS
from bayesgrad_lab.report import Report, load, markdown, render
from bayesgrad_lab.terminal import show

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SMALL = ["compare", "--optimizers", "sgd,adabayes", "--epochs", "2", "--seeds", "2", "--examples", "200"]
QUICK = ["--epochs", "1", "--seeds", "1", "--examples", "100"]


def refused(capsys, arguments: list[str]) -> str:
    """The one sentence with which a command is refused."""
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("bayesgrad: ")
    assert said.err.count("\n") == 1, said.err
    return said.err


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    assert main([*SMALL, "--out", str(out)]) == 0
    return out / "compare-digits-mlp"


def test_list_shows_paper_figure_and_status(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for experiment in EXPERIMENTS.values():
        at = next(i for i, line in enumerate(lines) if line.startswith(f"{experiment.name} "))
        end = next(i for i in range(at, len(lines)) if lines[i].endswith(experiment.about))
        shown = " ".join(line.strip() for line in lines[at:end])
        assert shown.removeprefix(experiment.name).strip() == experiment.outcome
        assert lines[end].strip().startswith(experiment.figure)
        assert all(len(line) <= 80 for line in lines[at:end])
        assert experiment.paper in lines[:at]
    assert len(lines) < 3.5 * len(EXPERIMENTS)


def test_experiments_have_a_status_or_a_reason_why_they_are_not_resolved() -> None:
    assert all(bool(e.status) != bool(e.unresolved) for e in EXPERIMENTS.values())


@pytest.mark.parametrize(
    ("scale", "reason", "verdict"),
    [
        ("smoke", "", "Smoke run: no verdict."),
        ("smoke", "one seed was run", "Smoke run: no verdict."),
        ("laptop", "", "Holds."),
        ("laptop", "one seed was run", "Not resolved at this size: one seed was run."),
        ("paper", "one seed was run", "Holds."),
    ],
)
def test_verdicts_are_only_given_where_a_run_can_carry_them(
    scale: str, reason: str, verdict: str, tmp_path: Path
) -> None:
    experiment = Experiment("some", "", "", "", lambda context: Report("some", verdict="Holds."), "holds", reason)
    report = experiment.report(Context(tmp_path, scale))
    assert report.verdict == verdict


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_runs_at_smoke_scale(experiment: str, smoke) -> None:
    run = smoke(experiment)
    assert run.code == 0
    folder = run.folder
    report = load(folder)
    assert report.claim
    assert report.verdict == "Smoke run: no verdict."
    assert report.tables
    assert all((folder / figure["file"]).stat().st_size > 5000 for figure in report.figures)
    assert "Smoke run: no verdict." in run.said
    assert "report.html" in run.said
    for words in (run.said, (folder / "report.html").read_text(), (folder / "report.json").read_text()):
        assert not re.search(r"\b(Holds|Does not hold|Not resolved)\b", words)


def test_compare_leaves_a_whole_report(finished: Path) -> None:
    report = load(finished)
    (table,) = report.tables
    assert table["columns"] == ["optimizer", "lr", "error %", "NLL", "ECE %", "Brier", "steps/s", "MiB"]
    assert [row[0] for row in table["rows"]] == ["SGD", "AdaBayes"]
    assert all("±" in row[2] for row in table["rows"])
    page = (finished / "report.html").read_text()
    assert 'src="data:image/png;base64,' in page
    assert "http" not in page.replace("http-equiv", "")
    assert report.versions["torch"] in page
    assert "bayesgrad compare" in page
    assert "| AdaBayes |" in markdown(report)
    assert "optimizers: sgd, adabayes," in markdown(report)
    assert "<dt>optimizers</dt><dd>sgd, adabayes</dd>" in page
    config = json.loads((finished / "config.json").read_text())
    assert config["optimizers"] == ["sgd", "adabayes"]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: the page is not looked at in a browser")
def test_the_page_renders_in_a_browser(finished: Path, tmp_path: Path) -> None:
    import matplotlib.image

    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--disable-sync", "--disable-component-update"]
    address = (finished / "report.html").as_uri()
    shot = tmp_path / "page.png"
    subprocess.run(
        [CHROMIUM, *flags, "--window-size=1100,1400", f"--screenshot={shot}", address],
        check=True,
        capture_output=True,
        timeout=120,
    )
    picture = matplotlib.image.imread(shot)[..., :3]
    assert picture.shape == (1400, 1100, 3)
    lines = picture[:, 60:1040].std((1, 2)) > 0.02  # rows of pixels with something on them
    assert lines[:900].mean() > 0.3
    dom = subprocess.run(
        [CHROMIUM, *flags, "--dump-dom", address], check=True, capture_output=True, text=True, timeout=120
    ).stdout
    assert dom.count("<tr>") == 3
    assert "AdaBayes" in dom


def test_columns_of_words_are_wrapped_and_columns_of_numbers_are_not(tmp_path: Path) -> None:
    report = Report("some")
    report.add_table(
        "a", ["method", "loss", "what is approximated"], [["x", "-0.1 ± 0.2", "all"], ["y", "nan", "5 of it"]]
    )
    report.add_table("b", ["method", "loss"], [])
    page = render([(report, tmp_path)])
    assert '<th>method</th><th>loss</th><th class="words">what is approximated</th>' in page
    assert '<td>y</td><td>nan</td><td class="words">5 of it</td>' in page
    assert page.count("<th>loss</th>") == 2


def test_verdicts_have_their_colours(tmp_path: Path) -> None:
    kinds = {"Holds on most": "verdict", "Holds in part. So": "verdict part", "Does not hold here": "verdict not"}
    kinds["Does not hold in 1 of 3 parts"] = "verdict part"
    kinds |= {"Not resolved at this size: one": "verdict open", "Smoke run: no verdict.": "verdict open"}
    for words, kind in kinds.items():
        assert f'<p class="{kind}"><b>Verdict.</b> {words}' in render([(Report("some", verdict=words), tmp_path)])


def test_no_digit_is_cut_off_in_a_narrow_terminal(capsys) -> None:
    from rich.console import Console

    report = Report("some")
    cells = [f"{i}.1234567±0.0000089" for i in range(8)]
    report.add_table("a", [f"score {i}" for i in range(8)], [cells])
    show(Console(width=80), report)
    said = capsys.readouterr().out
    assert "…" not in said
    assert sum(character.isdigit() for character in said) == sum(map(str.isdigit, "".join(cells))) + 8


def test_reports_of_several_runs_make_one_page(finished: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "all.html"
    assert main(["report", str(finished), str(finished), "--out", str(out)]) == 0
    assert out.read_text().count("<h1>") == 2
    twice = ["report", str(finished), str(finished), "--markdown", str(tmp_path / "docs")]
    assert "would become the same Markdown page" in refused(capsys, [*twice, "--out", str(out)])
    assert main(["report", str(finished), "--out", str(out), "--markdown", str(tmp_path / "docs")]) == 0
    capsys.readouterr()
    assert (tmp_path / "docs" / "compare-digits-mlp.md").exists()
    assert (tmp_path / "docs" / "compare-digits-mlp-curves.png").exists()
    assert "is no folder" in refused(capsys, ["report", str(tmp_path / "nowhere")])
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.json").write_text("{}")
    assert "has not finished: run it again with --resume" in refused(capsys, ["report", str(tmp_path / "begun")])
    (tmp_path / "begun" / "report.json").write_text('{"title": ')
    assert "is damaged" in refused(capsys, ["report", str(tmp_path / "begun")])


def test_unknown_names_get_the_nearest_one(capsys, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path)]
    assert "no optimizer is called 'adabayse'; did you mean 'adabayes'?" in refused(
        capsys, ["compare", "--optimizers", "sgd,adabayse", *out]
    )
    said = refused(capsys, ["compare", "--data", "mnits", *out])
    assert "no data set is called 'mnits'; did you mean 'mnist'?" in said
    said = refused(capsys, ["compare", "--model", "resnt", *out])
    assert "no model is called 'resnt'; did you mean 'resnet'?" in said
    assert "did you mean 'aitchison2020-fig3'?" in refused(capsys, ["run", "aitchison-fig3", *out])
    assert "resnet takes image data, but mnist1d is table data; use mlp" in refused(
        capsys, ["compare", "--data", "mnist1d", "--model", "resnet", *out]
    )
    assert not any(tmp_path.iterdir())


def test_an_optimizer_that_cannot_train_a_network_is_refused_before_anything_is_written(capsys, tmp_path: Path) -> None:
    arguments = ["compare", "--model", "resnet", "--optimizers", "sgd,naturalgradient", "--out", str(tmp_path / "runs")]
    assert "naturalgradient cannot train resnet: stem.1 (BatchNorm2d) mixes the examples" in refused(capsys, arguments)
    assert not (tmp_path / "runs").exists()


def test_bad_data_is_refused_before_anything_is_written(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("BAYESGRAD_DATA", raising=False)
    out = ["--out", str(tmp_path / "runs")]
    (tmp_path / "text.csv").write_text("a,label\n1,0\ncat,1\n")
    assert "'cat' is no number" in refused(capsys, ["compare", "--data", str(tmp_path / "text.csv"), *out])
    np.savez(tmp_path / "half.npz", x=np.zeros((20, 2)), y=np.arange(20) / 2)
    assert "labels must be integers" in refused(capsys, ["compare", "--data", str(tmp_path / "half.npz"), *out])
    (tmp_path / "cut.npz").write_bytes((tmp_path / "half.npz").read_bytes()[:100])
    assert "cannot be read as .npz" in refused(capsys, ["compare", "--data", str(tmp_path / "cut.npz"), *out])
    assert "mnist needs the file train-images" in refused(capsys, ["compare", "--data", "mnist", *out])
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_written_is_named(capsys, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = refused(capsys, ["compare", *QUICK, "--out", str(tmp_path / "file")])
    assert "cannot be used: not a directory" in said
    assert str(tmp_path / "file") in said


@pytest.mark.parametrize(
    ("code", "words"), [(errno.ENOSPC, "no space left on device"), (errno.EACCES, "permission denied")]
)
def test_a_full_disk_loses_nothing(code: int, words: str, capsys, tmp_path: Path, monkeypatch) -> None:
    """The third checkpoint does not fit. What was there stays readable, and the run goes on once there is room."""
    write, count = Path.write_bytes, 0

    def full(path: Path, value: bytes) -> int:
        nonlocal count
        count += 1
        if count == 3:
            write(path, value[: len(value) // 2])
            raise OSError(code, words.capitalize(), str(path))
        return write(path, value)

    arguments = ["compare", "--optimizers", "adabayes", "--epochs", "4", "--seeds", "1", "--examples", "100", "--out"]
    assert main([*arguments, str(tmp_path / "whole")]) == 0
    capsys.readouterr()
    monkeypatch.setattr(Path, "write_bytes", full)
    assert f"cannot be used: {words}." in refused(capsys, [*arguments, str(tmp_path / "full")])
    assert main([*arguments, str(tmp_path / "full"), "--resume"]) == 0
    results = [
        json.loads(next((tmp_path / name / "compare-digits-mlp" / "trials").glob("*.json")).read_text())
        for name in ("whole", "full")
    ]
    assert results[0]["rows"] == results[1]["rows"]
    assert results[0]["final"] == results[1]["final"]


def test_a_second_run_into_a_folder_is_refused(finished: Path, capsys) -> None:
    before = (finished / "report.json").read_bytes()
    assert "pass --resume" in refused(capsys, [*SMALL, "--out", str(finished.parent)])
    assert "was started with seeds=2, not 1" in refused(
        capsys, [*SMALL, "--seeds", "1", "--out", str(finished.parent), "--resume"]
    )
    assert (finished / "report.json").read_bytes() == before


def test_a_disk_that_is_really_full_is_a_sentence(tmp_path: Path) -> None:
    """The operating system's own limit on the size of a file, met while a checkpoint is written."""
    code = (
        "import resource, signal, sys; from bayesgrad_lab.cli import main;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000)); sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["compare", *QUICK, "--optimizers", "adabayes", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "file too large" in done.stderr


def test_a_method_that_diverges_does_not_cost_the_comparison(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(METHODS, "sgd", replace(METHODS["sgd"], lrs=(1e12,)))
    assert main([*SMALL, "--lr-search", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "sgd: every learning rate of the search diverged" in said
    rows = load(tmp_path / "compare-digits-mlp").tables[0]["rows"]
    assert rows[0][2:6] == ["diverged"] * 4
    assert "diverged" not in rows[1]


def test_data_that_changed_is_not_mixed_with_what_was_measured(tmp_path: Path, capsys) -> None:
    generator = np.random.default_rng(0)
    own, out = tmp_path / "own [1].npz", str(tmp_path / "runs")
    np.savez(own, x=generator.normal(size=(60, 3)), y=generator.integers(0, 2, 60))
    arguments = ["compare", "--data", str(own), "--epochs", "1", "--seeds", "1", "--optimizers", "sgd", "--out", out]
    assert main(arguments) == 0
    assert "own [1].npz: 48 training and 12 test examples" in capsys.readouterr().out
    np.savez(own, x=generator.normal(size=(60, 3)), y=generator.integers(0, 2, 60))
    assert "was started with data fingerprint=" in refused(capsys, [*arguments, "--resume"])


def test_devices_that_are_not_there(capsys, tmp_path: Path) -> None:
    for name in ("nonsense", "meta"):
        assert f"--device {name} is not available" in refused(
            capsys, ["compare", *QUICK, "--device", name, "--out", str(tmp_path)]
        )
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["config.json", "report.json", "trials/{}.json"])
def test_damaged_files_of_a_run_are_named(name: str, capsys, tmp_path: Path) -> None:
    arguments = ["compare", *QUICK, "--optimizers", "sgd", "--out", str(tmp_path)]
    assert main(arguments) == 0
    folder = tmp_path / "compare-digits-mlp"
    path = folder / name.format(next((folder / "trials").glob("*.json")).stem)
    for damage in ("{", "[]", "\udcff"):
        path.write_bytes(damage.encode("utf-8", "surrogateescape"))
        capsys.readouterr()
        command = ["report", str(folder), "--out", str(tmp_path / "page.html")]
        said = refused(capsys, command if name == "report.json" else [*arguments, "--resume"])
        assert f"{path.name} is damaged" in said


def test_nothing_but_a_sentence_reaches_the_terminal() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bayesgrad_lab.cli", "compare", "--optimizers", "nonesuch"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("bayesgrad: no optimizer is called 'nonesuch'")


def test_quiet_prints_where_the_report_is_and_nothing_else(tmp_path: Path, capsys) -> None:
    assert main(["compare", *QUICK, "--optimizers", "sgd", "--quiet", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.out == f"The report is in {tmp_path / 'compare-digits-mlp' / 'report.html'}\n"
    assert not said.err


def test_version_and_the_names_that_arguments_may_take(capsys) -> None:
    for arguments, words in (
        (["--version"], ["bayesgrad 0.", "torch 2.", "python 3."]),
        (["compare", "--help"], ["fashion-mnist", "densenet", "kroneckerfp", "--quiet"]),
        (["run", "--help"], ["aitchison2020-fig1", "uci-regression", "{smoke,laptop,paper}"]),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        said = capsys.readouterr().out
        assert all(word in said for word in words), said


def test_a_missing_package_is_named_as_pip_knows_it(capsys, monkeypatch) -> None:
    def absent(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")

    monkeypatch.setattr("bayesgrad_lab.cli._list", absent)
    assert "scikit-learn is missing: pip install scikit-learn." in refused(capsys, ["list"])
