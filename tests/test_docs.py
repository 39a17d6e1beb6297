"""Pages that show code show code that runs, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_runs(page: Path) -> None:
    names: dict = {}
    for source in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(source, str(page), "exec"), names)
    if page == ROOT / "README.md":
        assert names["probabilities"].shape == (5, 3)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)", page.read_text())
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing
