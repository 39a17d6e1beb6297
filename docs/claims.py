"""Writes docs/results/claims.md, one table of every claim, from the pages of docs/results: python docs/claims.py.

A page with a paragraph **Verdict.** is that of a claim. Its row has the first sentence of **Claim.** (or
**Question.**, or the title), the verdict as the list in README.md has it, the first statement of **Measured.** or of
the verdict that has an interval, and the line that is a command.
"""

from __future__ import annotations

import re
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
SENTENCE = r"(?<!Fig)(?<!Eq)(?<!al)(?<![A-Z0-9])\. |(?<=\d)\. (?=[A-Za-z])"
INTERVAL = r"±|\(\S+ to \S+\)"
HEAD = """# Every claim in one table

`python docs/claims.py` writes this page from the pages that it links to, and a test compares them. The verdict is
that of the [list](README.md). The effect is the first statement of the page that has an interval, or else the first
with a number, marked "no interval". ± is one standard error over seeds, and brackets are one standard error to either
side. Pages have all numbers, what was changed after results were seen, and the limits. Most commands need data files
(`--data-dir`).

| claim | verdict | effect | command |
|---|---|---|---|
"""


def paragraph(text: str, word: str) -> str:
    """The paragraph that begins with a bold word, on one line, without that word; empty if there is none."""
    return " ".join(text.partition(f"**{word}.** ")[2].partition("\n\n")[0].split())


def effect(measured: str) -> str:
    """The first statement, a sentence or a part of one up to a semicolon, with an interval, or else with a number."""
    found = [part.strip(" .") for part in re.split(f"{SENTENCE}|; ", measured)]
    with_interval = [part for part in found if re.search(INTERVAL, part)]
    with_number = [f"{part} (no interval)" for part in found if re.search(r"\d", part)]
    return (with_interval + with_number + ["-"])[0]


def first_cells(text: str) -> str:
    """The first two cells of the first table, with the heading of the second: for pages without those paragraphs."""
    head, _, first = (row.strip("| ").split(" | ") for row in re.findall(r"^\|.*\|$", text, re.MULTILINE)[:3])
    return f"{head[1]} of {first[0]}: {first[1]}"


def row(page: Path, verdict: str) -> str:
    text = page.read_text(encoding="utf-8")
    title = text.partition("\n")[0].lstrip("# ")
    claim = re.split(SENTENCE, paragraph(text, "Claim"))[0].strip(".") or paragraph(text, "Question") or title
    words = f"{paragraph(text, 'Measured')} {paragraph(text, 'Verdict')}".strip()
    command = re.findall(r"^`((?:bayesgrad|python) [^`]+)`", text, re.MULTILINE)[0]
    effects = effect(words) if words else first_cells(text)
    cells = (f"[{page.stem}]({page.name}): {claim}", verdict.partition(": ")[0], effects, f"`{command}`")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def table() -> str:
    """The page."""
    listed = (RESULTS / "README.md").read_text(encoding="utf-8")
    verdicts = dict(re.findall(r"^\| \[[^]]+\]\(([^)]+\.md)\) \| [^|]+ \| ([^|]+) \|$", listed, re.MULTILINE))
    return HEAD + "".join(row(RESULTS / name, words) for name, words in sorted(verdicts.items()) if words != "-")


if __name__ == "__main__":
    (RESULTS / "claims.md").write_text(table(), encoding="utf-8")
