"""What is left for people to read: a report as data, as a self-contained page, and as Markdown."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pygments
from jinja2 import Environment, PackageLoader, StrictUndefined, UndefinedError
from markupsafe import Markup
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

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
        stories: each with title, headline, panels (figures of plotly, with captions), table, text, code and links.
    """

    title: str
    claim: str = ""
    verdict: str = ""
    command: str = ""
    tables: list[dict[str, Any]] = field(default_factory=list)
    figures: list[dict[str, str]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    stories: list[dict[str, Any]] = field(default_factory=list)

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
    except (TypeError, KeyError, AttributeError, IndexError, UndefinedError) as error:
        raise ValueError(f"{path} is damaged ({error}): run it again with --resume.") from error
    return report


def _numbers(cells: Sequence[Any]) -> bool:
    """Whether a column is of numbers, which stand on the right and keep to one line; words are wrapped."""
    return all(re.match(r"[-+]?(\d|nan|inf)|-?$", str(cell)) for cell in cells)


def _said(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _columns(table: Mapping[str, Any]) -> list[Markup]:
    """The attribute of each column's cells."""
    numbers = [_numbers([row[i] for row in table["rows"]]) for i in range(len(table["columns"]))]
    return [Markup("" if i == 0 or right else ' class="words"') for i, right in enumerate(numbers)]


def _picture(folder: Path, file: str) -> str:
    content = inside(folder, file).read_bytes()
    if not content.startswith(b"\x89PNG\r\n"):
        raise ValueError(f"{folder / file} is no PNG picture: run it again with --resume.")
    return base64.b64encode(content).decode()


def _kind(verdict: str) -> str:
    """The class of a verdict, which has a colour."""
    kinds = {"Holds in part": " part", "Does not hold in ": " part", "Does not hold": " not"}
    kinds |= {UNRESOLVED.capitalize(): " open", NO_VERDICT: " open"}
    return next((kind for words, kind in kinds.items() if verdict.startswith(words)), "")


def _highlighted(code: str) -> Markup:
    return Markup(pygments.highlight(code, PythonLexer(), HtmlFormatter(nowrap=True)))


def render(reports: Sequence[tuple[Report, Path]]) -> str:
    """One page of all reports, with nothing outside of it: style, pictures and scripts are inside."""
    environment = Environment(
        loader=PackageLoader("bayesgrad_lab", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    extra: dict[str, Any] = {"plotly": ""}
    if any(report.stories for report, _ in reports):
        from plotly.offline import get_plotlyjs

        light, dark = (HtmlFormatter(style=name).get_style_defs("pre") for name in ("default", "github-dark"))
        rules = (
            f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\npre {{ background: var(--card) !important }}"
        )
        extra = {"plotly": Markup(get_plotlyjs()), "code_style": Markup(rules), "highlighted": _highlighted}
    title = reports[0][0].title if len(reports) == 1 else "bayesgrad: reports"
    calls = {"columns": _columns, "kind": _kind, "picture": _picture, "said": _said}
    return environment.get_template("report.html.jinja").render(reports=reports, title=title, **calls, **extra)


def markdown(report: Report) -> str:
    """The report as a page of docs/results."""
    lines = [f"# {report.title}", ""]
    if report.claim:
        lines += [f"**Claim.** {report.claim}", ""]
    if report.verdict:
        lines += [f"**Verdict.** {report.verdict}", ""]
    if report.command:
        lines += [f"`{report.command}`", ""]
    for story in report.stories:
        lines += [f"**{story['title']}.** {story['headline']}", ""]
    for table in [*(story["table"] for story in report.stories), *report.tables]:
        lines += [f"## {table['title']}", "", "| " + " | ".join(table["columns"]) + " |"]
        lines += ["|---" * len(table["columns"]) + "|"]
        lines += ["| " + " | ".join(map(str, row)) + " |" for row in table["rows"]] + [""]
    for figure in report.figures:
        lines += [f"![{figure['caption']}]({figure['file']})", "", figure["caption"], ""]
    settings = ", ".join(f"{k}: {_said(v)}" for k, v in {**report.settings, **report.versions}.items())
    explained = "± is the standard error over seeds. " if any("±" in line for line in lines) else ""
    lines += [f"{explained}{settings}."]
    return "\n".join(lines) + "\n"
