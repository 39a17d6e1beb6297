"""API pages: one for each module and one for each of its names, as docs/api.md lists them."""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
from pathlib import Path

LABELS = "References?|Differs from [\\w -]+|Checked by|Presets"


def listed(folder: Path) -> dict[str, list[str]]:
    """Module -> names, of the tables in api.md."""
    _, *sections = re.split(r"^## `(bayesgrad[\w.]*)`$", (folder / "api.md").read_text(encoding="utf-8"), flags=re.M)
    rows = (re.findall(r"^\| `(\w+)`", text, re.MULTILINE) for text in sections[1::2])
    return dict(zip(sections[::2], rows))


def heading(words: str, mark: str = "=") -> str:
    return f"{words}\n{mark * len(words)}\n\n"


def sentence_of(module: str) -> str:
    """The first paragraph of a module's docstring."""
    return escaped(" ".join((importlib.import_module(module).__doc__ or "").strip().partition("\n\n")[0].split()))


def page_of(module: str, name: str, seen: set[int]) -> str:
    """A class with its members, a function, or a constant; what has a page already is not indexed a second time."""
    value = getattr(importlib.import_module(module), name)
    kind = "class" if inspect.isclass(value) else "function" if inspect.isroutine(value) else "data"
    options = "   :members:\n   :show-inheritance:\n" if kind == "class" else ""
    options += "   :no-index:\n" if id(value) in seen else ""
    seen.add(id(value))
    return f"{heading(name)}.. currentmodule:: {module}\n\n.. auto{kind}:: {name}\n{options}"


def write_pages(folder: Path) -> None:
    """Writes the folder `reference` anew."""
    place = folder / "reference"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    modules, seen = listed(folder), set()
    for module, names in modules.items():
        short = module.removeprefix("bayesgrad.")
        for name in names:
            (place / f"{short}.{name}.rst").write_text(page_of(module, name, seen), encoding="utf-8")
        rows = "".join(f"   {name}\n" for name in names)
        pages = "".join(f"   {name} <{short}.{name}>\n" for name in names)
        (place / f"{short}.rst").write_text(
            f"{heading(module)}{sentence_of(module)}\n\n.. currentmodule:: {module}\n\n.. autosummary::\n\n{rows}\n"
            f".. toctree::\n   :hidden:\n\n{pages}",
            encoding="utf-8",
        )
    short = {module: module.removeprefix("bayesgrad.") for module in modules}
    shown = "".join(f"- :doc:`{module} <{short[module]}>`: {sentence_of(module)}\n" for module in modules)
    pages = "".join(f"   {name}\n" for name in short.values())
    (place / "index.rst").write_text(
        f"{heading('API')}Every public name has a page. :doc:`/api` has all of them with a sentence each.\n\n{shown}\n"
        f".. toctree::\n   :hidden:\n\n{pages}   /api\n",
        encoding="utf-8",
    )


def from_elsewhere(app, what: str, name: str, value, skip: bool, options) -> bool | None:
    """Sphinx's event autodoc-skip-member: methods that scikit-learn or torch put into our classes."""
    if callable(value) and not inspect.isclass(value):
        return skip or not str(getattr(inspect.unwrap(value), "__module__", "")).startswith("bayesgrad") or None
    return None


def as_restructured_text(app, what: str, name: str, value, options, lines: list[str]) -> None:
    """Sphinx's event autodoc-process-docstring: our docstrings have tables and single backticks as in Markdown.

    Labels such as `Reference:` begin a paragraph, tables become list-tables, and what reStructuredText would take for
    markup outside of code, equations and emphasis is escaped.
    """
    written: list[str] = []
    in_table = False
    block = None  # the indentation of the line that began an equation or a literal block
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if block is not None and line.strip() and indent <= block:
            block = None
        if block is None and (line.strip() == ".. math::" or line.rstrip().endswith("::")):
            block = indent
            written.append(line)
        elif block is not None or line.lstrip().startswith((">>>", "...")):
            written.append(line)
        elif re.match(r" *\|[ -]", line):
            written += table_row(line, first=not in_table)
        else:
            label = re.match(rf"( *)({LABELS}): (.*)", line)
            if label:
                written += ["", f"{label[1]}**{label[2]}:** {escaped(label[3])}"]
            else:
                written.append(escaped(line))
        in_table = bool(re.match(r" *\|[ -]", line)) and block is None
    lines[:] = written


def table_row(line: str, first: bool) -> list[str]:
    """The lines of a list-table for a row of Markdown; `first` for the row of headings."""
    margin = " " * (len(line) - len(line.lstrip()))
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
    if all(re.fullmatch(r":?-+:?", cell) for cell in cells):
        return []
    start = ["", f"{margin}.. list-table::", f"{margin}   :header-rows: 1", ""] if first else []
    rows = [f"{margin}   {'* -' if i == 0 else '  -'} {escaped(cell)}" for i, cell in enumerate(cells)]
    return start + rows


def escaped(line: str) -> str:
    """Outside of backticks: substitutions, references and lone asterisks are escaped."""
    parts = re.split(r"(``.*?``|:\w+:`[^`]*`|`[^`]*`|(?<![\w*])\*\*?\w[^*]*\w\*\*?(?!\w))", line)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"(?<=\w)_(?!\w)|[|*`]", r"\\\g<0>", parts[i])
    return "".join(parts)
