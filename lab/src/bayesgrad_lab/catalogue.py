"""`experiments.md`: every experiment with its claim, its recorded outcome and the function that measures it."""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def read() -> dict[str, dict[str, str]]:
    """Name -> paper, title, claim, figure, about, run, status and unresolved; see `Experiment`."""
    text = resources.files("bayesgrad_lab").joinpath("experiments.md").read_text(encoding="utf-8")
    found: dict[str, dict[str, str]] = {}
    paper = ""
    for section in text.split("# ")[1:]:
        title, _, rest = section.partition("\n")
        if not rest.strip("#\n"):  # the heading of a paper
            paper = title.partition(": ")[2]
            continue
        items, _, claim = rest.strip("#\n").partition("\n\n")
        lines = items.removeprefix("- ").replace("\n  ", " ").split("\n- ")
        fields = dict(line.split(": ", 1) for line in lines)
        found[title.partition(":")[0]] = {**fields, "paper": paper, "title": title, "claim": claim.replace("\n", " ")}
    return found
