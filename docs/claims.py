"""Writes docs/results/claims.md, one table of every claim, from the pages of docs/results: python docs/claims.py.

A page with a paragraph **Verdict.** is that of a claim. Its row has the first sentence of **Claim.** (or
**Question.**, or the title), the verdict as the list in README.md has it, the first statement of **Measured.** or of
the verdict that has an interval, and the line that is a command. Where no statement has an interval, it has the first
one with a number, and cells of a table of the page (CELLS) or the reason why there is no interval (REASONS).
"""

from __future__ import annotations

import re
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
SENTENCE = r"(?<!Fig)(?<!Eq)(?<!al)(?<![A-Z0-9])\. |(?<=\d)\. (?=[A-Za-z])"
INTERVAL = r"±|\(\S+ to \S+\)"
CELLS = {  # page -> the beginning of a heading, and a row or a column of the table below it
    "aitchison2018-kronecker": ("With process noise", "trace ratio"),
    "aitchison2020-fig1": ("Coverage of the filter's intervals", "known curvature, Eq. 15 corrected"),
    "aitchison2020-fig3": ("resnet on fashion-mnist", "median of measured/predicted"),
    "compare-tinyshakespeare-gpt": ("Test data", "NLL"),
    "compare-tinyshakespeare-gpt-layers": ("Test data", "NLL"),
    "uci-regression": ("Log-likelihood less MAP's, paired", "Laplace, full"),
}
REASONS = {
    "aitchison2018-momentum": "the map is computed, not sampled",
    "khan2023-table1": "differences between two implementations, not samples",
    "smith2018-fig6": "one seed",
}
HEAD = """# Every claim in one table

`python docs/claims.py` writes this page from the pages that it links to, and a test compares them. The verdict is
that of the [list](README.md). The effect is the first statement of the page that has an interval. Where none has, it is
the first with a number, followed by a row or a column of a table of the page, or by the reason why there is no
interval. ± is one standard error over seeds, and (a to b) is one standard error to either side, or a range where it
says so. Pages have all numbers, what was changed after results were seen, and the limits. Most commands need data files
(`--data-dir`).

| claim | verdict | effect | command |
|---|---|---|---|
"""


def paragraph(text: str, word: str) -> str:
    """The paragraph that begins with a bold word, on one line, without that word; empty if there is none."""
    return " ".join(text.partition(f"**{word}.** ")[2].partition("\n\n")[0].split())


def effect(measured: str, text: str, name: str) -> str:
    """The first statement, a sentence or a part of one up to a semicolon, with an interval, or else with a number."""
    found = [part.strip(" .") for part in re.split(f"{SENTENCE}|; ", measured)]
    with_interval = [part for part in found if re.search(INTERVAL, part)]
    if with_interval:
        return with_interval[0]
    more = f"No interval: {REASONS[name]}" if name in REASONS else cells(text, *CELLS[name])
    return f"{next(part for part in found if re.search(r'[0-9]', part))}. {more}"


def cells(text: str, heading: str, of: str) -> str:
    """A column or a row of the first table below a heading: each cell with the name of its row or column."""
    below = text.partition(f"\n## {heading}")[2].partition("\n\n")[2].partition("\n\n")[0]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in below.splitlines())
    if of in head:
        found = [(row[head.index(of)], row[0]) for row in rows]
        of += f" by {head[0]}"
    else:
        found = list(zip(next(row for row in rows if row[0] == of)[1:], head[1:]))
    return f"{heading}, {of}: {', '.join(f'{value} ({name})' for value, name in found)}"


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
    effects = effect(words, text, page.stem) if words else first_cells(text)
    cells = (f"[{page.stem}]({page.name}): {claim}", verdict.partition(": ")[0], effects, f"`{command}`")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def table() -> str:
    """The page."""
    listed = (RESULTS / "README.md").read_text(encoding="utf-8")
    verdicts = dict(re.findall(r"^\| \[[^]]+\]\(([^)]+\.md)\) \| [^|]+ \| ([^|]+) \|$", listed, re.MULTILINE))
    return HEAD + "".join(row(RESULTS / name, words) for name, words in sorted(verdicts.items()) if words != "-")


if __name__ == "__main__":
    (RESULTS / "claims.md").write_text(table(), encoding="utf-8")
