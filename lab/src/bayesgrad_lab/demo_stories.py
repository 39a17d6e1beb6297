"""The four stories of the demonstration: headlines that are computed from the runs, figures for plotly, and tables."""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy.special import stdtrit
from torch import Tensor

from bayesgrad import metrics
from bayesgrad.plots import PALETTE
from bayesgrad_lab import demo_runs, race
from bayesgrad_lab.demo_runs import FEATURES, GAP
from bayesgrad_lab.results import Results, Value, less, mean_and_error, shown, sign

DOCS = "https://github.com/bayesgrad/bayesgrad/blob/main/docs"
TITLES = {"adamw": "AdamW", "ivon": "IVON", "kfac": "KFAC", "nuts": "NUTS", "langevin": "Langevin"}
BLUE, RED, GREEN = PALETTE[:3]
COLOURS = dict(zip(TITLES, (RED, BLUE, BLUE, RED, BLUE)))
MARKERS = dict(zip(TITLES, ("square", "circle", "circle", "square", "circle")))
CLASSIFIERS = "adamw", "ivon"
Table = dict[str, Any]


# --- words and figures ---


def _differs(difference: Value, seeds: int) -> int:
    """-1 or 1 where a paired 95 % t interval excludes zero."""
    return sign(difference, float(stdtrit(seeds - 1, 0.975))) if seeds > 1 else 0


def _story(title: str, headline: str, panels: Any, table: Table, text: str, code: Any, **links: str) -> dict[str, Any]:
    addresses = {name: f"{DOCS}/{page}" for name, page in links.items()}
    shown = {"title": title, "headline": headline, "panels": panels, "table": {"title": title, **table}, "text": text}
    return {**shown, "code": inspect.getsource(code), "links": addresses}


def _panel(caption: str, traces: list[dict[str, Any]], x: str, y: str, **layout: Any) -> dict[str, Any]:
    axes = {name: {"title": {"text": text}, **layout.pop(name, {})} for name, text in (("xaxis", x), ("yaxis", y))}
    return {"caption": caption, "figure": {"data": traces, "layout": {**axes, **layout}}}


def _plain(values: Any) -> list[float | None]:
    """Numbers for JSON, which has no nan."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in np.ravel(values).tolist()]


def _line(x: Any, y: Any, name: str = "", mode: str = "lines", **options: Any) -> dict[str, Any]:
    quiet = {} if name else {"showlegend": False, "hoverinfo": "skip"}
    return {"type": "scatter", "x": _plain(x), "y": _plain(y), "name": name, "mode": mode, **quiet, **options}


def _shade(x: Any, low: Any, high: Any, colour: str, name: str = "") -> dict[str, Any]:
    fill = {"fill": "toself", "fillcolor": f"{colour}40", "line": {"width": 0}}
    return _line(np.concatenate([x, x[::-1]]), np.concatenate([high, low[::-1]]), name, **fill)


def _dashed(x: Any, y: Any, name: str) -> dict[str, Any]:
    return _line(x, y, name, line={"dash": "dash", "width": 1.5}, ink=True)


def _style(method: str) -> dict[str, Any]:
    return {"marker": {"color": COLOURS[method], "symbol": MARKERS[method], "size": 8}}


# --- the stories ---

Runs = Mapping[tuple[str, str], list[dict[str, Tensor]]]
Chosen = Mapping[tuple[str, str], Results]
SCORES: Mapping[str, tuple[str, str, str, float, int]] = {  # title, unit, format, factor, and the better direction
    "accuracy": ("accuracy", " %", ".1f", 100, 1),
    "nll": ("NLL", "", ".3f", 1, -1),
    "ece": ("ECE", " %", ".1f", 100, -1),
    "shapes": ("AUROC of unknown shapes", "", ".3f", 1, 1),
    "noise": ("AUROC of noise alone", "", ".3f", 1, 1),
}


def scores(run: Mapping[str, Tensor]) -> dict[str, float]:
    found = metrics.classification(run["inside"].clamp(min=1e-30).log(), run["labels"])
    known = metrics.entropy(run["inside"])
    found |= {name: metrics.auroc(known, metrics.entropy(run[name])) for name in ("shapes", "noise")}
    return {**found, "accuracy": 1 - found["error"], "seconds": run["seconds"].item()}


def _classifier(every: Runs, chosen: Chosen) -> dict[str, Any]:
    base, ours = (
        Results(
            TITLES[one], [scores(run) for run in every["classifier", one]], settings=chosen["classifier", one].settings
        )
        for one in CLASSIFIERS
    )
    rows, verdicts = [], {1: [], -1: [], 0: []}
    for name, (title, unit, form, factor, better) in SCORES.items():
        difference = ours.less(base, name)
        cells = [shown(value, form, factor) for value in (base.mean(name), ours.mean(name))]
        rows.append([title + unit, *cells, shown(difference, f"+{form}", factor)])
        values = " against ".join(f"{factor * one.mean(name)[0]:{form}}" for one in (ours, base))
        verdicts[better * _differs(difference, len(ours.runs))].append(f"{title} ({values}{unit})")
    times = [statistics.mean(one.values("seconds")) for one in (base, ours)]
    rows.append(["processor seconds", *(f"{seconds:.1f}" for seconds in times), f"{times[1] - times[0]:+.1f}"])
    words = {1: "is better in", -1: "is worse in", 0: "does not differ beyond the errors in"}
    said = [f"{words[key]} {', '.join(some)}" for key, some in verdicts.items() if some]
    headline = f"Beside AdamW, IVON {'; it '.join(said)}; it takes {times[1] / times[0]:.1f} times as long."
    ideal = _dashed([0, 1], [0, 1], "calibrated")
    diagram, scatter = [ideal], []
    for one in CLASSIFIERS:
        runs = every["classifier", one]
        bins = [metrics.reliability(run["inside"], run["labels"], 10) for run in runs]
        confidence, accuracy = (np.array([getattr(b, k).numpy() for b in bins]) for k in ("confidence", "accuracy"))
        full = np.isfinite(accuracy).all(0)
        error = accuracy[:, full].std(0, ddof=1) / math.sqrt(len(runs)) if len(runs) > 1 else np.zeros(full.sum())
        bars = {"error_y": {"type": "data", "array": _plain(error)}, "line": {"color": COLOURS[one]}, **_style(one)}
        diagram.append(
            _line(confidence[:, full].mean(0), accuracy[:, full].mean(0), TITLES[one], "lines+markers", **bars)
        )
        both = [(base if one == "adamw" else ours).values(name) for name in ("accuracy", "nll")]
        scatter.append(_line(both[0], both[1], TITLES[one], "markers", **_style(one)))
    percent = {"tickformat": ".0%"}
    panels = [
        _panel(
            "Reliability: how often predictions of a confidence are right. Mean and standard error over seeds.",
            diagram, "confidence", "accuracy", xaxis=percent, yaxis=percent,
        ),
        _panel("Test data; one point for each seed.", scatter, "accuracy", "NLL (nats)", xaxis=percent),
    ]  # fmt: skip
    settings = "; ".join(
        f"{one.title}: {', '.join(f'{k} {v:g}' for k, v in one.settings.items())}" for one in (base, ours)
    )
    text = (
        f"A network of 40-100-100-10 units on the signals of MNIST-1D. {settings}, chosen by validation NLL among "
        f"{len(chosen['classifier', 'ivon'].tried)} settings each. IVON predicts by an average over 32 draws of the "
        "weights. AUROC is the probability that a signal that is no digit gets the higher predictive entropy: other "
        "shapes by the same generator, and its noise alone."
    )
    table = {"columns": ["test data", base.title, ours.title, "difference"], "rows": rows}
    links = {"From AdamW to IVON": "choosing.md", "the claim on larger data": "results/khan2023-uncertainty.md"}
    return _story(
        "A classifier: accuracy, calibration, unknown inputs",
        headline,
        panels,
        table,
        text,
        demo_runs.classifier,
        **links,
    )


X, LABEL, MEAN, LOWER, UPPER, PLAIN_LOWER, PLAIN_UPPER = range(7)  # columns of a band
PLACES = {"data": "where there are data", "gap": "where there are none"}


def _covered(rows: Tensor, lower: int, upper: int) -> float:
    return ((rows[:, LABEL] >= rows[:, lower]) & (rows[:, LABEL] <= rows[:, upper])).double().mean().item()


def _band(every: Runs, chosen: Chosen) -> dict[str, Any]:
    runs = every["band", ""]
    width = {k: [(run[k][:, UPPER] - run[k][:, LOWER]).mean().item() for run in runs] for k in PLACES}
    plain = [(run["gap"][:, PLAIN_UPPER] - run["gap"][:, PLAIN_LOWER]).mean().item() for run in runs]
    cover = {k: [_covered(run[k], LOWER, UPPER) for run in runs] for k in PLACES}
    plainly = {k: [_covered(run[k], PLAIN_LOWER, PLAIN_UPPER) for run in runs] for k in PLACES}
    ratio = [a / b for a, b in zip(width["gap"], width["data"])]
    opens = _differs(less(ratio, [1.0] * len(ratio)), len(ratio)) > 0

    def percent(values: Sequence[float]) -> str:
        return shown(mean_and_error(values), ".0f", 100) + " %"

    headline = (
        f"The 95 % band of laplace() {'opens' if opens else 'does not open'} where there are no data: it is "
        f"{shown(mean_and_error(ratio), '.1f')} times as wide there and contains {percent(cover['gap'])} of new labels "
        f"({percent(cover['data'])} at the data); a band from the training error alone contains "
        f"{percent(plainly['gap'])}."
    )
    line = runs[0]["line"].numpy()
    x, train = line[:, X], runs[0]["train"].numpy()
    low, high = (line[:, k] for k in (PLAIN_LOWER, PLAIN_UPPER))
    edge: Any = {"color": RED, "dash": "dot", "width": 1.5}
    traces = [
        _shade(x, line[:, LOWER], line[:, UPPER], BLUE, "laplace(), 95 %"),
        _line(x, low, "training error, 95 %", line=edge),
        _line(x, high, line=edge),
        _line(x, line[:, MEAN], "network", line={"color": BLUE}),
        _dashed(x, line[:, LABEL], "truth"),
        _line(train[:, 0], train[:, 1], "training data", "markers", marker={"color": GREEN, "size": 5}),
    ]
    bars = []
    for name, colour, values in (("laplace()", BLUE, cover), ("training error", RED, plainly)):
        means = [mean_and_error(values[k]) for k in PLACES]
        error = {"type": "data", "array": _plain([e for _, e in means])}
        bars.append({"type": "bar", "x": list(PLACES.values()), "y": _plain([m for m, _ in means]), "name": name,
                     "marker": {"color": colour}, "error_y": error})  # fmt: skip
    bars.append(_dashed([-0.5, 1.5], [0.95, 0.95], "95 %") | {"x": list(PLACES.values())})
    panels = [
        _panel("The first seed. No data lie between -1 and 1.", traces, "input", "label", yaxis={"range": [-10, 10]}),
        _panel("Share of new labels in the 95 % band; standard errors over seeds.", bars, "", "coverage",
               yaxis={"tickformat": ".0%", "range": [0, 1.05]}),
    ]  # fmt: skip
    rows = [
        [f"coverage % {PLACES[k]}", *(shown(mean_and_error(v[k]), ".1f", 100) for v in (cover, plainly))]
        for k in PLACES
    ]
    rows.append(["width where there are none", *(shown(mean_and_error(v), ".2f") for v in (width["gap"], plain))])
    table = {"columns": ["of 1,000 new labels each", "laplace()", "training error"], "rows": rows}
    text = (
        f"A network of 1-20-20-1 units, trained with AdamW on 100 points outside of {GAP}; new data for each seed. "
        "laplace() takes the trained network as it is; prior and noise are those with the most evidence, so that no "
        "validation data are needed. Its size was chosen after the coverage on such new data was seen (30 units: "
        "99.9 %). The other band is ± 1.96 root mean squared training errors."
    )
    links = {"Posteriors and predictions": "posteriors.md", "on UCI data": "results/uci-regression.md"}
    return _story(
        "A trained network becomes a posterior", headline, panels, table, text, demo_runs.regression_band, **links
    )


def _race(every: Runs, chosen: Chosen) -> dict[str, Any]:
    curves = {one: [run["curve"].numpy() for run in every["race", one]] for one in ("adamw", "kfac")}
    ends = {one: [race.at(torch.tensor(curve), math.inf) for curve in some] for one, some in curves.items()}
    goal = max(ends["adamw"])  # which every seed of AdamW reaches
    reached = {one: [race.time_to(torch.tensor(c), goal) for c in some] for one, some in curves.items()}
    seconds = {one: statistics.median(values) for one, values in reached.items()}
    difference = less(ends["kfac"], ends["adamw"])
    words = {-1: "lower than", 1: "higher than", 0: "not different beyond the errors from"}
    outcome = words[_differs(difference, len(ends["kfac"]))]
    budget = max(float(curve[-1, race.SECONDS]) for some in curves.values() for curve in some if len(curve))
    when = [f"{s:.1f} s" if math.isfinite(s) else "more" for s in (seconds["kfac"], seconds["adamw"])]
    ours, theirs = (shown(mean_and_error(ends[one]), ".4f") for one in ("kfac", "adamw"))
    headline = (
        f"After {budget:.1f} s on one core KFAC's test loss, {ours}, is {outcome} AdamW's, {theirs}. The loss that all "
        f"seeds of AdamW reach takes KFAC {when[0]} and AdamW {when[1]}, in the median."
    )
    panels = []
    for column, label in ((race.SECONDS, "processor seconds of training"), (race.STEPS, "steps")):
        traces = []
        for one, every_curve in curves.items():
            some = [curve for curve in every_curve if len(curve) > 1]  # those that did not diverge at once
            if not some:
                continue
            x = np.linspace(max(c[0, column] for c in some), min(c[-1, column] for c in some), 40)
            y = np.array([np.interp(x, c[:, column], c[:, race.LOSS]) for c in some])
            error = y.std(0, ddof=1) / math.sqrt(len(y)) if len(y) > 1 else np.zeros(len(x))
            traces.append(_shade(x, y.mean(0) - error, y.mean(0) + error, COLOURS[one]))
            dash = "solid" if one == "kfac" else "dashdot"
            traces.append(_line(x, y.mean(0), TITLES[one], line={"color": COLOURS[one], "dash": dash}))
        log = {"type": "log", "tickvals": [0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2]}
        panels.append(
            _panel(
                f"Test loss by {label}; mean and standard error over seeds.", traces, label, "squared error", yaxis=log
            )
        )
    rows = [
        [f"test loss after {budget:.1f} s", theirs, ours],
        ["seconds to the loss of AdamW's worst seed, median", *(f"{seconds[one]:.2f}" for one in curves)],
        [
            f"steps in {budget:.1f} s",
            *(f"{statistics.mean(c[-1, race.STEPS] if len(c) else 0 for c in some):.0f}" for some in curves.values()),
        ],
    ]
    settings = "; ".join(
        f"{TITLES[one]}: " + ", ".join(f"{k} {v:.3g}" for k, v in chosen["race", one].settings.items())
        for one in curves
    )
    text = (
        "The workload 'picture' of bayesgrad race in small: the colours of a photograph's pixels by position, 64 "
        f"Fourier features and three layers of 128 units, batches of 512. {settings}; best of "
        f"{len(chosen['race', 'kfac'].tried)} settings each on validation pixels. Schedules are laid out in seconds; "
        "validation does not count. KFAC was chosen among FOOF, KFAC, KroneckerFilterFP and AdaBayesFP on validation "
        "pixels when this page was designed."
    )
    table = {"columns": ["test pixels", "AdamW", "KFAC"], "rows": rows}
    links = {"Layer-wise optimizers": "layers.md", "Choosing": "choosing.md"}
    return _story("Loss against seconds", headline, panels, table, text, demo_runs.race_curve, **links)


def _samples(every: Runs, chosen: Chosen) -> dict[str, Any]:
    methods, weights = ("nuts", "langevin"), (*(name.removeprefix("mean ") for name in FEATURES), "intercept")
    draws = {one: [run["samples"].flatten(0, 1).numpy() for run in every["samples", one]] for one in methods}
    moments: dict[str, dict[Any, list[Value]]] = {
        one: {f: [mean_and_error(v) for v in zip(*(f(d, axis=0).tolist() for d in some))] for f in (np.mean, np.std)}
        for one, some in draws.items()
    }
    exact, ours = moments["nuts"], moments["langevin"]
    scale = [m for m, _ in exact[np.std]]
    shift = [(a[0] - b[0]) / s for a, b, s in zip(ours[np.mean], exact[np.mean], scale)]
    error = [math.hypot(a[1], b[1]) / s for a, b, s in zip(ours[np.mean], exact[np.mean], scale)]
    wide = [a[0] / b[0] - 1 for a, b in zip(ours[np.std], exact[np.std])]
    i, j = (max(range(len(v)), key=lambda k: abs(v[k])) for v in (shift, wide))
    cost = {one: torch.stack([run["cost"] for run in every["samples", one]]).mean(0).tolist() for one in methods}
    spent = [f"{TITLES[one]} took {gradients:,.0f} gradients and {t:.1f} s" for one, (gradients, t) in cost.items()]
    headline = (
        f"Langevin's means are at most {abs(shift[i]):.2f} ± {error[i]:.2f} posterior standard deviations from those "
        f"of NUTS, its deviations at most {100 * abs(wide[j]):.0f} % {'larger' if wide[j] > 0 else 'smaller'}; "
        f"{', '.join(spent)}."
    )
    pooled = {one: np.concatenate(some) for one, some in draws.items()}
    rng, cloud = np.random.default_rng(0), []
    for one in methods:
        some = pooled[one][rng.choice(len(pooled[one]), min(600, len(pooled[one])), replace=False)]
        marker = {"color": COLOURS[one], "size": 5, "opacity": 0.55, "symbol": MARKERS[one]}
        cloud.append(_line(some[:, 0], some[:, 1], TITLES[one], "markers", marker=marker))
    levels = np.linspace(0.01, 0.99, 50)
    quantiles = {one: (np.quantile(pooled[one], levels, axis=0) - pooled["nuts"].mean(0)) / scale for one in methods}
    traces = [_dashed([-3, 3], [-3, 3], "equal")]
    for k, (name, symbol) in enumerate(zip(weights, ("circle", "square", "diamond"))):
        marker = {"color": PALETTE[(0, 1, 2)[k]], "symbol": symbol, "size": 6}
        traces.append(_line(quantiles["nuts"][:, k], quantiles["langevin"][:, k], name, "markers", marker=marker))
    panels = [
        _panel("Samples of two weights, 600 of each.", cloud, f"weight of {weights[0]}", f"weight of {weights[1]}"),
        _panel("Quantiles from 1 to 99 %, in posterior standard deviations from the mean.", traces, "NUTS", "Langevin"),
    ]  # fmt: skip
    rows = [
        [f"{what} of {name}", *(shown(moments[one][f][k]) for one in methods)]
        for k, name in enumerate(weights)
        for what, f in (("mean", np.mean), ("deviation", np.std))
    ]
    rows.append(["gradients of a seed", *(f"{cost[one][0]:,.0f}" for one in methods)])
    rows.append(["processor seconds of a seed", *(f"{cost[one][1]:.1f}" for one in methods)])
    table = {"columns": ["weight", "NUTS", "Langevin"], "rows": rows}
    count = len(draws["langevin"][0]) // len(every["samples", "langevin"][0]["samples"])
    text = (
        "Bayesian logistic regression on 569 patients of scikit-learn's breast cancer data, prior N(0, 1), all data "
        f"in each gradient. For each seed, Langevin keeps {count} steps of "
        f"{len(every['samples', 'langevin'][0]['samples'])} chains at once, started apart and without rejections; a "
        "finite step widens it. NUTS is a transcription of Hoffman and Gelman 2014 and serves as the reference. No "
        "data are held out: the posterior itself is compared."
    )
    links = {"Samplers": "choosing.md", "inference without networks": "inference.md"}
    return _story("Samples of a posterior", headline, panels, table, text, demo_runs.langevin_samples, **links)


STORIES = (_classifier, _band, _race, _samples)
