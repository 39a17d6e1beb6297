"""What is left for people to read: a report as data, as a self-contained page, and as Markdown."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bayesgrad_lab import catalogue
from bayesgrad_lab.store import inside, read_json, write_atomically, write_json

UNRESOLVED = "not resolved at this size"
NO_VERDICT = "Smoke run: no verdict."


@dataclass
class Report:
    """The outcome of a run.

    Args:
        claim: what the paper says, where there is one.
        verdict: whether that holds here, with the figure that decides it.
        tables: each with title, columns and rows of text.
        figures: each with file (in the run's folder) and caption.
        settings: what the run was asked to do.
        versions: of the software it ran with.
    """

    title: str
    claim: str = ""
    verdict: str = ""
    command: str = ""
    tables: list[dict[str, Any]] = field(default_factory=list)
    figures: list[dict[str, str]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, experiment: str, **values: Any) -> Report:
        """A report with the title and the claim of an experiment; `values` are for braces in the claim."""
        entry = catalogue.read()[experiment]
        return cls(entry["title"], entry["claim"].format(**values))

    def add_table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.tables.append({"title": title, "columns": list(columns), "rows": [list(row) for row in rows]})

    def add_rows(self, title: str, rows: Sequence[Mapping[str, str]]) -> None:
        """A table of rows by column."""
        self.add_table(title, list(rows[0]), [list(row.values()) for row in rows])

    def add_figure(self, file: str, caption: str) -> None:
        self.figures.append({"file": file, "caption": caption})

    def text(self, part: str, **values: Any) -> str:
        """The experiment's protocol, or the caption of a figure, from `experiments.md`; `values` are for its braces."""
        return catalogue.read()[self.title.partition(":")[0]][part].format(**values)

    def add_protocol(self, **values: Any) -> None:
        self.settings["protocol"] = self.text("protocol", **values)

    def draw(self, path: Path, plot: Callable[..., None], *args: Any, caption: str = "", **options: Any) -> None:
        """Draws a figure into the run's folder, by a function of `figures` or `plots`, and adds it."""
        plot(path, *args, **options)
        self.add_figure(path.name, caption or self.text(path.name))

    def save(self, folder: Path) -> Path:
        """Writes report.json and report.html into the run's folder; returns the page."""
        write_json(folder / "report.json", asdict(self))
        page = folder / "report.html"
        write_atomically(page, lambda p: p.write_text(render([(self, folder)]), encoding="utf-8"))
        return page


def load(folder: Path) -> Report:
    """The report of a finished run."""
    path = folder / "report.json"
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder: name the folder of a run.")
    if not path.exists():
        state = "has not finished: run it again with --resume" if (folder / "config.json").exists() else "is no run"
        raise ValueError(f"{folder} {state}.")
    try:
        report = Report(**read_json(path))
        render([(report, folder)])
    except (TypeError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} is damaged ({error}): run it again with --resume.") from error
    return report


STYLE = """
:root { color-scheme: light dark; --ink: #1d2433; --soft: #5b6475; --line: #d9dee7; --back: #ffffff; --card: #f6f8fb; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9f0; --soft: #a2abbd; --line: #333b4d; --back: #12161f; --card: #1b2130; }
  img { filter: invert(0.92) hue-rotate(180deg); }
}
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 0 auto;
       max-width: 70rem; padding: 2rem 1.2rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 .4rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
.claim, .verdict { border-left: 4px solid #4477aa; background: var(--card); padding: .7rem 1rem; margin: .8rem 0; }
.verdict { border-color: #228833; } .part { border-color: #ccbb44; } .not { border-color: #ee6677; }
.open { border-color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; min-width: 50%; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; }
.words, td:first-child { text-align: left; white-space: normal; min-width: 6rem; }
th:first-child { text-align: left; } th { color: var(--soft); font-weight: 600; }
figure { margin: 1.2rem 0; } img { max-width: 100%; } figcaption, footer { color: var(--soft); font-size: .9rem; }
code { background: var(--card); padding: .1rem .3rem; border-radius: 3px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; } dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
"""


def _numbers(cells: Sequence[Any]) -> bool:
    """Whether a column is of numbers, which stand on the right and keep to one line; words are wrapped."""
    return all(re.match(r"[-+]?(\d|nan|inf)|-?$", str(cell)) for cell in cells)


def _said(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def render(reports: Sequence[tuple[Report, Path]]) -> str:
    """One page of all reports, with nothing outside of it: style and pictures are inside."""
    escape = html.escape
    parts = []
    for report, folder in reports:
        parts.append(f"<h1>{escape(report.title)}</h1>")
        if report.command:
            parts.append(f"<p><code>{escape(report.command)}</code></p>")
        if report.claim:
            parts.append(f'<p class="claim"><b>Claim.</b> {escape(report.claim)}</p>')
        if report.verdict:
            kind = {"Holds in part": " part", "Does not hold in ": " part", "Does not hold": " not"}
            kind |= {UNRESOLVED.capitalize(): " open", NO_VERDICT: " open"}
            shown = next((kind[words] for words in kind if report.verdict.startswith(words)), "")
            parts.append(f'<p class="verdict{shown}"><b>Verdict.</b> {escape(report.verdict)}</p>')
        for table in report.tables:
            numbers = [_numbers([row[i] for row in table["rows"]]) for i in range(len(table["columns"]))]
            kinds = ["" if i == 0 or right else ' class="words"' for i, right in enumerate(numbers)]
            head = "".join(f"<th{kind}>{escape(c)}</th>" for kind, c in zip(kinds, table["columns"]))
            rows = [[f"<td{kind}>{escape(str(cell))}</td>" for kind, cell in zip(kinds, row)] for row in table["rows"]]
            body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
            parts.append(f'<h2>{escape(table["title"])}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>')
            parts.append(f"<tbody>{body}</tbody></table></div>")
        for figure in report.figures:
            content = inside(folder, figure["file"]).read_bytes()
            if not content.startswith(b"\x89PNG\r\n"):
                raise ValueError(f"{folder / figure['file']} is no PNG picture: run it again with --resume.")
            picture = base64.b64encode(content).decode()
            caption = escape(figure["caption"])
            parts.append(f'<figure><img alt="{caption}" src="data:image/png;base64,{picture}">')
            parts.append(f"<figcaption>{caption}</figcaption></figure>")
        for title, values in (("Settings", report.settings), ("Versions", report.versions)):
            if values:
                rows = "".join(f"<dt>{escape(k)}</dt><dd>{escape(_said(v))}</dd>" for k, v in values.items())
                parts.append(f"<h2>{title}</h2><dl>{rows}</dl>")
    title = escape(reports[0][0].title if len(reports) == 1 else "bayesgrad: reports")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body>{''.join(parts)}"
        "<footer>± is the standard error over seeds. Made by bayesgrad.</footer></body></html>"
    )


def markdown(report: Report) -> str:
    """The report as a page of docs/results."""
    lines = [f"# {report.title}", ""]
    if report.claim:
        lines += [f"**Claim.** {report.claim}", ""]
    if report.verdict:
        lines += [f"**Verdict.** {report.verdict}", ""]
    if report.command:
        lines += [f"`{report.command}`", ""]
    for table in report.tables:
        lines += [f"## {table['title']}", "", "| " + " | ".join(table["columns"]) + " |"]
        lines += ["|---" * len(table["columns"]) + "|"]
        lines += ["| " + " | ".join(map(str, row)) + " |" for row in table["rows"]] + [""]
    for figure in report.figures:
        lines += [f"![{figure['caption']}]({figure['file']})", "", figure["caption"], ""]
    settings = ", ".join(f"{k}: {_said(v)}" for k, v in {**report.settings, **report.versions}.items())
    lines += [f"± is the standard error over seeds. {settings}."]
    return "\n".join(lines) + "\n"
