"""`experiments.md`: every experiment with its claim, its recorded outcome and the function that measures it."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources


@cache
def read() -> dict[str, dict[str, str]]:
    """Name -> paper, title, claim, figure, about, run, status and unresolved, see `Experiment`; and texts of reports.

    These are the protocol, which begins with that word, and captions, by the file of the figure. They may have braces.
    """
    text = resources.files("bayesgrad_lab").joinpath("experiments.md").read_text(encoding="utf-8")
    found: dict[str, dict[str, str]] = {}
    paper = ""
    for section in text.split("# ")[1:]:
        title, _, rest = section.partition("\n")
        if not rest.strip("#\n"):  # the heading of a paper
            paper = title.partition(": ")[2]
            continue
        items, claim, *texts = rest.strip("#\n").split("\n\n")
        lines = items.removeprefix("- ").replace("\n  ", " ").split("\n- ")
        fields = dict(line.split(": ", 1) for line in lines)
        for words in (paragraph.replace("\n", " ") for paragraph in texts):
            caption = re.fullmatch(r"!\[(.*)\]\((.*)\)", words)
            fields |= {caption[2]: caption[1]} if caption else {"protocol": words.removeprefix("Protocol: ")}
        found[title.partition(":")[0]] = {**fields, "paper": paper, "title": title, "claim": claim.replace("\n", " ")}
    return found
