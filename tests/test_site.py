"""The documentation site: what it shows of examples is current, and it builds without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import api_pages
import gallery
import pages
import pytest

from printed import differences

ROOT = Path(__file__).parents[1]
PAPERS = [script for script in gallery.examples() if script.parent.name == "papers"]


def recorded(script: Path) -> str:
    return gallery.record_of(script).read_text(encoding="utf-8").partition("\n")[2]


@pytest.mark.parametrize("script", gallery.examples(), ids=lambda script: script.stem)
def test_records_of_the_gallery_are_of_the_scripts_as_they_are(script: Path) -> None:
    assert gallery.is_current(script), "make gallery runs the examples that changed"
    assert recorded(script).strip()


def test_every_record_has_its_script() -> None:
    stems = {script.stem for script in gallery.examples()}
    assert {path.stem for path in gallery.RECORDS.glob("*.txt")} == stems
    assert {path.stem for path in gallery.RECORDS.glob("*.png")} <= stems


def test_the_gallery_has_the_order_of_the_lists_and_every_script() -> None:
    grouped = [script for scripts in gallery.groups().values() for script in scripts]
    assert sorted(grouped) == sorted(gallery.examples())


def test_names_of_the_list_lead_to_their_pages() -> None:
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    found = re.findall(r"\(reference/([\w.]+)\.rst\)", pages.linked(text))
    modules = api_pages.listed(ROOT / "docs")
    assert found == [f"{m.removeprefix('bayesgrad.')}.{name}" for m, names in modules.items() for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("script", PAPERS, ids=lambda script: script.stem)
def test_papers_print_what_is_recorded(script: Path, tmp_path: Path) -> None:
    assert not differences(recorded(script), gallery.run(script, tmp_path), relative=0.15)


def test_equations_of_one_line_are_not_aligned() -> None:
    """MathJax draws an error in their place: Sphinx aligns those with several lines only."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    blocks = [block for text in sources for block in re.findall(r"\.\. math::\n+((?: +\S.*\n)+)", text)]
    assert blocks
    assert not [block for block in blocks if "&" in block and r"\\" not in block]


def test_docstrings_become_restructured_text() -> None:
    lines = ["One |x| of coef_ and `a_`.", "", "| a | b |", "|---|---|", "| 1 | `c` |", "", ".. math::", "    a_ | b"]
    lines += ["", "Reference: a paper.", "Checked by: a *kind* test.", "", ">>> f(*x)"]
    api_pages.as_restructured_text(None, "class", "X", None, None, lines)
    table = ["", ".. list-table::", "   :header-rows: 1", "", "   * - a", "     - b", "   * - 1", "     - `c`", ""]
    assert lines[:11] == [r"One \|x\| of coef\_ and `a_`.", "", *table]
    assert lines[11:14] == [".. math::", "    a_ | b", ""]
    assert lines[14:] == ["", "**Reference:** a paper.", "", "**Checked by:** a *kind* test.", "", ">>> f(*x)"]


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="make docs installs Sphinx")
    options = ["--quiet", "--fail-on-warning", "--keep-going", "--builder", "html", "-d", str(tmp_path / "doctrees")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(tmp_path / "site")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|link)[^>]+(?:src|href)=\"(https?://[^\"]+)\"", page.read_text())
        assert not loaded, page.name
