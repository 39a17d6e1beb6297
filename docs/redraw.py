"""Draws figures of docs/results again from the tables of their pages: python docs/redraw.py [PAGE...].

It is for a change of style where a run is not kept. A mean and its error are drawn as two runs that have them. Learning
curves and maps are not in tables; these need the run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

from bayesgrad_lab import figures

RESULTS = Path(__file__).with_name("results")
Rows = list[dict[str, str]]
Tables = dict[str, Rows]
SCORES = {"accuracy %": "accuracy %", "NLL": "NLL (nats)", "ECE %": "ECE %", "AUROC, entropy": "AUROC, entropy"}


def tables(page: str) -> Tables:
    """Rows of each table of a page, by its title."""
    found: Tables = {}
    title, columns = "", []
    for line in (RESULTS / f"{page}.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if line.startswith("## "):
            title, columns = line[3:], []
        elif cells and not columns:
            columns = cells
        elif cells and set(line) - set("|-"):
            found.setdefault(title, []).append(dict(zip(columns, cells)))
    return found


def value(cell: str) -> tuple[float, float]:
    """Mean and error of a cell; an error that is not given is nan."""
    if cell.startswith("diverged"):
        return math.nan, math.nan
    mean, _, error = cell.partition(" ± ")
    return float(mean.replace(",", "")), float(error.partition(" ")[0] or "nan")


def runs(cell: str) -> list[float]:
    """Two values with the mean and the standard error of a cell, or its only value."""
    mean, error = value(cell)
    return [mean] if math.isnan(error) else [mean - error, mean + error]


def sweeps(page: str, *, by: str = "T", alone: dict[str, list[str]] | None = None) -> None:
    """Of temperatures or batch sizes; `alone` are the tables whose ensembles are lines of one panel, by file."""
    found, short = tables(page), page.partition("-")[2]
    xlabel = {"T": "temperature", "B": "batch size"}[by]
    for file, titles in (alone or {}).items():
        named = {
            title: ([float(row["T"]) for row in found[title]], [runs(row["ensemble: NLL"]) for row in found[title]])
            for title in titles
        }
        path = RESULTS / f"{page}-{file}.png"
        figures.lines(path, {"ensemble": named}, xlabel, "cross-entropy (nats)", {"ensemble": 1.0})
    if alone:
        return
    panels, marks, axes = {}, {}, []
    for title, rows in found.items():
        x = [float(row[by]) for row in rows]
        one = min(range(len(rows)), key=lambda i: abs(math.log(float(rows[i]["T"]))))
        for score, words, label in (("NLL", "cross-entropy", "nats"), ("error %", "error", "%")):
            names = {"ensemble": f"ensemble: {score}", "single sample": f"single: {score}"}
            panels[f"{title}, {words}"] = {name: (x, [runs(row[key]) for row in rows]) for name, key in names.items()}
            marks[f"{title}, {words}"] = 1.0 if by == "T" else x[one]
            axes.append(f"{words} ({label})")
    figures.lines(RESULTS / f"{page}-{short}.png", panels, xlabel, axes, marks)


def scores(page: str, file: str, title: str, *, left_out: str = "evidence") -> None:
    rows = [row for row in tables(page)[title] if left_out not in row["method"]]
    panels = {label: {row["method"]: value(row[key]) for row in rows} for key, label in SCORES.items()}
    figures.dots(RESULTS / f"{page}-{file}.png", panels)


def uncertainty(page: str) -> None:
    for title in tables(page):
        if title.endswith(", test data"):
            scores(page, f"uncertainty-{title.removesuffix(', test data')}", title)


def likelihoods(page: str) -> None:
    rows = tables(page)["Test data: log-likelihood"]
    names = list(rows[0])[1:]
    for first in range(0, len(names), 3):
        panels = {
            f"{name}: log-likelihood (nats)": {row["method"]: value(row[name]) for row in rows}
            for name in names[first : first + 3]
        }
        figures.dots(RESULTS / f"{page}-likelihood-{first // 3 + 1}.png", panels)


def times(page: str) -> None:
    rows = tables(page)["Time of a step over SGD's, medians of steps measured in turns"]
    ratios = {row["method"]: float(row["time / SGD's"]) for row in rows}
    figures.bars(RESULTS / f"{page}-{page.partition('-')[2]}-time.png", ratios, "time of a step / SGD's")


def dampings(rows: Rows) -> dict[str, tuple[list[float], list[list[float]]]]:
    """The training loss of each method by its damping, which follows its name."""
    found: dict[str, tuple[list[float], list[list[float]]]] = {}
    for row in rows:
        name, _, damping = row["method"].rpartition(", ")
        if damping != "searched":
            x, losses = found.setdefault(name, ([], []))
            x.append(float(damping))
            losses.append(runs(row["training loss"]))
    return found


def fig4(page: str) -> None:
    found = tables(page)
    similar = found["mnist: cosine of KFAC's update to FOOF's, averaged over layers"]
    x = [float(row["damping"]) for row in similar]
    names = list(similar[0])[1:]
    panels = {"mnist: similarity to FOOF": {name: (x, [runs(row[name]) for row in similar]) for name in names}}
    panels["mnist: training loss"] = dampings(found["mnist"])
    figures.lines(RESULTS / f"{page}-fig4.png", panels, "damping", ["cosine", "training loss (nats)"])


def fig9(page: str) -> None:
    panels = {title: dampings(rows) for title, rows in tables(page).items()}
    figures.lines(RESULTS / f"{page}-fig9.png", panels, "damping", "training loss (nats)")


def kronecker(page: str) -> None:
    (noisy, still), files = tables(page).values(), ("kronecker", "static")
    words = (
        ("with process noise", "η √(tr Cx tr Cδ)", "trace / formula"),
        ("without process noise", "examples", "relative error"),
    )
    for rows, file, (title, xlabel, ylabel) in zip((noisy, still), files, words):
        first, measured, *_ = rows[0]
        x = [value(row[first])[0] for row in rows]
        named = {"simulated": (x, [runs(row[measured]) for row in rows])}
        named["target"] = (x, [runs(row["target"]) for row in rows])
        figures.lines(RESULTS / f"{page}-{file}.png", {title: named}, xlabel, ylabel)


def finals(page: str, file: str, scored: dict[str, dict[str, str]]) -> None:
    """Final scores of each method: table -> column -> label."""
    found = tables(page)
    panels = {}
    for title, labels in scored.items():
        first = next(iter(found[title][0]))
        for key, label in labels.items():
            panels[label] = {row[first]: value(row[key]) for row in found[title]}
    figures.dots(RESULTS / f"{page}-{file}.png", panels)


def table1(page: str) -> None:
    networks = ("resnet", "densenet")
    scored = {"test error %": "test error (%)", "test NLL": "test NLL (nats)"}
    finals(page, "final", {f"{n} on fashion-mnist": {k: f"{n}: {w}" for k, w in scored.items()} for n in networks})


def continual(page: str) -> None:
    scored = {"accuracy % after all tasks": "accuracy (%)", "lost on earlier tasks": "lost (points)"}
    streams = ("permuted", "split")
    finals(page, "final", {f"{s} mnist": {k: f"{s}: {w}" for k, w in scored.items()} for s in streams})


CLASSIFIED = "fashion-mnist10000-mlp-100-100-epochs15, test data"
RATED = [f"lr = {lr}" for lr in (0.2, 0.1, 0.05)]
PAGES: dict[str, Callable[[str], None]] = {
    "smith2018-fig2": sweeps,
    "smith2018-fig3": sweeps,
    "smith2018-fig4": lambda page: sweeps(page, by="B"),
    "smith2018-fig5": lambda page: sweeps(page, by="B"),
    "smith2018-fig6": lambda page: sweeps(
        page, alone={"fig6a": RATED, "fig6b": [f"N = {n}" for n in (1024, 2048, 8192)]}
    ),
    "smith2018-ablation": lambda page: sweeps(page, alone={"ablation": list(tables(page))}),
    "ngd-kronecker": sweeps,
    "uci-regression": likelihoods,
    "benzing2021-laplace": lambda page: scores(page, "scores", CLASSIFIED),
    "khan2023-laplace-vs-variational": lambda page: scores(page, "scores", CLASSIFIED),
    "khan2023-uncertainty": uncertainty,
    "benzing2021-fig1": times,
    "benzing2021-fig4": fig4,
    "benzing2021-fig5": times,
    "benzing2021-fig9": fig9,
    "benzing2021-conv": times,
    "aitchison2018-kronecker": kronecker,
    "aitchison2020-table1": table1,
    "continual-mnist": continual,
}

if __name__ == "__main__":
    for chosen in sys.argv[1:] or PAGES:
        PAGES[chosen](chosen)
