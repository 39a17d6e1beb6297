"""Pages that show code show code that runs, and links lead somewhere."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import re
import runpy
import statistics
from pathlib import Path

import pytest

from bayesgrad_lab import catalogue, figures
from bayesgrad_lab.experiments import EXPERIMENTS
from bayesgrad_lab.report import UNRESOLVED
from printed import differences

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def run_blocks(page: Path, kinds: str) -> None:
    """Runs the blocks of code of a page, and compares what they print with the block of text that follows."""
    names: dict = {}
    blocks = re.findall(rf"```(?:{kinds})\n(.*?)```(?:\n\n```text\n(.*?)```)?", page.read_text(), re.DOTALL)
    for source, shown in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, str(page), "exec"), names)
        assert not shown or not differences(shown, printed.getvalue())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_runs(page: Path) -> None:
    run_blocks(page, "python")


@pytest.mark.slow
def test_nuts_agrees_with_the_engine() -> None:
    """The tutorial's code for NumPyro too."""
    run_blocks(ROOT / "docs/tutorial-numpyro.md", "python|py")


def test_the_readme_is_short_and_prints() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert text.count("```python") == text.count("```text\n") == 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)", page.read_text())
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


def anchors(page: Path) -> set[str]:
    """Of headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_exist(page: Path) -> None:
    targets = re.findall(r"\]\(([^):]*)#([^)]+)\)", page.read_text())
    missing = [(name, at) for name, at in targets if at not in anchors(page.parent / name if name else page)]
    assert not missing


MODULES = ("optim", "samplers", "posterior", "structures", "rules", "models", "models.kernels", "models.observations")
MODULES += ("integrations", "integrations.huggingface", "integrations.lightning", "integrations.skorch")
MODULES += ("inference", "families", "metrics", "conformal", "plots", "custom_likelihoods", "optimizer")


WITHOUT_SENTENCE = {"Parameters", "Family"}  # a type alias, and a docstring that begins with an equation


@pytest.mark.parametrize("name", MODULES)
def test_names_are_listed_with_a_sentence_of_their_docstring(name: str) -> None:
    module = importlib.import_module(f"bayesgrad.{name}")
    _, section = (ROOT / "docs/api.md").read_text().split(f"## `bayesgrad.{name}`\n")
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", section.split("\n## ")[0], re.MULTILINE)
    for own, sentence in rows:
        if own not in WITHOUT_SENTENCE:
            words = " ".join((inspect.getdoc(getattr(module, own)) or "").split())
            assert words.startswith(sentence.replace("\\|", "|").rstrip(".")), own


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_listed(name: str) -> None:
    module = importlib.import_module(f"bayesgrad.{name}")
    own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__ and n[0] != "_"]
    _, section = (ROOT / "docs/api.md").read_text().split(f"## `bayesgrad.{name}`\n")
    listed = re.findall(r"^\| `(\w+)`", section.split("\n## ")[0], re.MULTILINE)
    assert sorted(listed) == sorted(getattr(module, "__all__", own))


def test_every_experiment_has_a_page_and_is_listed() -> None:
    listed = (ROOT / "docs/results/README.md").read_text()
    pages = {path.stem for path in (ROOT / "docs/results").glob("*.md")} - {"README", "claims"}
    assert set(EXPERIMENTS) <= pages
    assert pages == set(re.findall(r"^\| \[[^]]+\]\(([^)]+)\.md\)", listed, re.MULTILINE))


@pytest.mark.parametrize("words", ["holds", "holds in part", "does not hold"])
def test_the_list_says_what_the_page_says(words: str) -> None:
    """Where it says no more than that; other words are somebody's summary."""
    for name in (name for name, e in EXPERIMENTS.items() if e.status.partition(":")[0] == words):
        verdict = verdict_of(name).lower()
        assert verdict.startswith(words), name
        assert verdict.startswith("holds in part") == (words == "holds in part"), name


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_pages_have_the_title_and_the_claim_that_were_fixed_before_the_run(name: str) -> None:
    """What is in braces depends on the scale of a run."""
    entry, text = catalogue.read()[name], (ROOT / f"docs/results/{name}.md").read_text()
    claim = " ".join(text.partition("**Claim.** ")[2].partition("\n\n")[0].split())
    assert text.startswith(f"# {entry['title']}\n")
    assert re.fullmatch(re.sub(r"\\{\w+\\}", "[0-9,]+", re.escape(entry["claim"])), claim)


def verdict_of(page: str) -> str:
    """The paragraph of a result page that begins with its verdict, on one line."""
    text = (ROOT / f"docs/results/{page}.md").read_text().partition("**Verdict.** ")[2]
    return " ".join(text.partition("\n\n")[0].split())


def listed_results() -> dict[str, str]:
    """Page -> verdict, of the table in docs/results/README.md."""
    text = (ROOT / "docs/results/README.md").read_text()
    return dict(re.findall(r"^\| \[[^]]+\]\(([^)]+)\.md\) \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_table_of_results_says_what_the_list_says(name: str) -> None:
    assert listed_results()[name] == EXPERIMENTS[name].outcome


@pytest.mark.parametrize("name", sorted(listed_results()))
def test_verdicts_that_are_not_resolved_are_so_everywhere(name: str) -> None:
    """In the list, on the page and in the table, with the same reason."""
    listed, shown = listed_results()[name], verdict_of(name)
    assert listed.startswith(UNRESOLVED) == shown.lower().startswith(UNRESOLVED)
    if listed.startswith(UNRESOLVED):
        assert shown == f"{listed[0].upper()}{listed[1:]}."


def test_figures_that_are_drawn_from_tables_are_on_their_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """python docs/redraw.py draws them: with numbers only, or nan where the page says that runs diverged."""
    drawn: list[tuple[Path, object]] = []
    for name in ("lines", "dots", "bars"):
        monkeypatch.setattr(figures, name, lambda path, given, *_: drawn.append((path, given)))
    for page, draw in runpy.run_path(str(ROOT / "docs/redraw.py"))["PAGES"].items():
        before = len(drawn)
        draw(page)
        text = (ROOT / f"docs/results/{page}.md").read_text()
        assert len(drawn) > before
        for path, given in drawn[before:]:
            assert path.exists()
            assert f"]({path.name})" in text
            assert "diverged" in text or "nan" not in str(given)


def test_the_values_of_a_cell_have_its_mean_and_error() -> None:
    runs = runpy.run_path(str(ROOT / "docs/redraw.py"))["runs"]
    values = runs("1,204.5 ± 0.25")
    assert statistics.mean(values) == pytest.approx(1204.5)
    assert statistics.stdev(values) / len(values) ** 0.5 == pytest.approx(0.25)
    assert runs("-2.5") == [-2.5]
    assert str(runs("diverged")) == "[nan]"


def test_the_table_of_claims_is_current() -> None:
    """It is written from the other pages: python docs/claims.py."""
    table = runpy.run_path(str(ROOT / "docs/claims.py"))["table"]()
    assert (ROOT / "docs/results/claims.md").read_text() == table
    assert table.count("\n| [") == sum(verdict != "-" for verdict in listed_results().values())


def test_every_claim_has_a_verdict_an_interval_and_a_command() -> None:
    """Or each seed's value, or the reason why there is no interval."""
    rows = re.findall(r"^\| \[(.*) \|$", (ROOT / "docs/results/claims.md").read_text(), re.MULTILINE)
    for _, verdict, effect, command in (re.split(r" (?<!\\)\| ", row) for row in rows):
        assert re.search(r"\d ± \d|\(\S+ to \S+\)| by seed: |No interval: ", effect), effect
        assert verdict != "-"
        assert re.fullmatch("`[^`]+`", command)
