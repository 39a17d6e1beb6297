"""The experiments of Benzing 2021: KFAC, exact subsampled natural gradients, and FOOF."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from bayesgrad.optim import FOOF, KFAC
from bayesgrad_lab import figures
from bayesgrad_lab.benzing2021_runs import (
    KINDS,
    SIZES,
    Rule,
    Size,
    by_damping,
    factor,
    finish,
    layers_of,
    similarities,
    step_times,
    tune,
    tuned,
)
from bayesgrad_lab.context import Context
from bayesgrad_lab.report import Report
from bayesgrad_lab.results import Results, Value, mean_and_error, shown
from bayesgrad_lab.task import Task
from bayesgrad_lab.training import steps

T = 100  # steps between inversions in the amortised versions that are timed
PROTOCOL = (
    "hyper-parameters chosen by the training loss (the paper's criterion) of runs of "
    "{search} steps with a separate seed, the best of them confirmed by two more seeds, from {grids}; final runs of "
    "{steps} steps with batches of {batch}, at a constant lr and damping; the loss is over all {examples:,} training "
    "images, the test error was evaluated once at the end"
)


# --- words and tables ---


def _show(value: Value) -> str:
    return shown(value, ".3g", error_form=".2g")


def _show_most(values: Sequence[float]) -> str:
    """As `_show`, of the seeds that came to an end, and how many did not."""
    good = [value for value in values if math.isfinite(value)]
    if not good or len(good) == len(values):
        return _show(mean_and_error(values))
    return f"{_show(mean_and_error(good))} ({len(values) - len(good)} of {len(values)} diverged)"


def _table(report: Report, title: str, results: Mapping[str, Results]) -> None:
    rows = []
    for name, one in results.items():
        second = " ".join(f"{key} {value:g}" for key, value in one.settings.items() if key not in ("lr", "")) or "-"
        scores = [_show_most(one.values("loss")), _show_most([100 * error for error in one.values("error")])]
        rows.append([name, f"{one.lr:.3g}", second, *scores, "; ".join(one.edges) or "-"])
    columns = ["method", "lr", "damping or momentum", "training loss", "test error %", "at the edge of the search"]
    report.add_table(title, columns, rows)


def _curves(context: Context, report: Report, file: str, panels: Mapping[str, Mapping[str, Results]]) -> None:
    lines = {
        title: {
            name: [run["loss"].tolist() for run in one.runs]
            for name, one in results.items()
            if all(map(math.isfinite, one.values("loss")))
        }
        for title, results in panels.items()
    }
    lines = {title: some for title, some in lines.items() if some}
    if lines:
        axes = ("tenths of the run", "training loss (nats)")
        words = "Training loss over all training images, mean and standard error over seeds."
        report.draw(context.folder / file, figures.curves, lines, *axes, caption=words)


def _protocol(report: Report, task: Task, rules: Sequence[Rule]) -> None:
    words = PROTOCOL.format(
        search=task.lengths[1],
        steps=task.lengths[0],
        batch=task.batch or "all images",
        examples=len(task.data.train_x),
        grids="; ".join(dict.fromkeys(map(_grid, rules))),
    )
    report.settings["protocol" if task.batch else "protocol of full batches"] = words


def _grid(rule: Rule) -> str:
    """The values that a search chooses from, in words."""
    lrs, seconds = (", ".join(f"{value:g}" for value in values) for values in (rule.lrs, rule.seconds))
    unit = " x (1 - momentum)" if rule.second == "momentum" else f" x damping^{rule.power:g}" if rule.power else ""
    return f"{rule.title}: lr {lrs}{unit}" + (f", {rule.second} {seconds}" if seconds else "")


class Comparison:
    """Whether one training loss is lower than another by two standard errors, in words and as a truth."""

    def __init__(self, where: str, above: str, below: str, results: Mapping[str, Results]) -> None:
        self.log, error = factor(results[above], results[below])
        self.lower = self.log > (2 * error if math.isfinite(error) else 0)
        self.higher = self.log < (-2 * error if math.isfinite(error) else 0)
        if math.isfinite(self.log):
            reach = (math.exp(self.log - error), math.exp(self.log + error)) if math.isfinite(error) else ()
            band = f" ({reach[0]:.3g} to {reach[1]:.3g})" if reach else ""
            self.words = f"{where}: {above}'s training loss is {math.exp(self.log):.3g} times {below}'s{band}"
        else:
            self.words = f"{where}: {self._of_the_rest(above, below, results)}"

    @staticmethod
    def _of_the_rest(above: str, below: str, results: Mapping[str, Results]) -> str:
        pairs = list(zip(results[above].values("loss"), results[below].values("loss")))
        lost = {name: sum(not math.isfinite(pair[i]) for pair in pairs) for i, name in enumerate((above, below))}
        words = " and ".join(f"{name} diverged for {n} of {len(pairs)} seeds" for name, n in lost.items() if n)
        logs = [math.log(a / b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
        if not logs:
            return words
        ratio = math.exp(sum(logs) / len(logs))
        return (
            f"{words} (counted as an infinite loss); for the other seeds {above}'s training loss is {ratio:.3g} "
            f"times {below}'s"
        )


def _verdict(comparisons: Sequence[Comparison], held: Sequence[bool], *more: str) -> str:
    words = "; ".join(c.words for c in comparisons)
    truth = "Holds" if all(held) else "Does not hold"
    count = "" if all(held) else f" in {len(held) - sum(held)} of {len(held)} parts"
    return f"{truth}{count}. {'. '.join((words, *more))}. In brackets: one standard error over seeds."


# --- the figures ---


def fig1(context: Context) -> Report:
    """What exact natural gradients cost, and what they reach beside KFAC."""
    size = SIZES[context.scale]
    report = Report.of("benzing2021-fig1")
    ratios, comparisons = _against_time(context, report, size, "fig1", ("ng",), ("NG", "KFAC"))
    cheap, lower = ratios[f"NG (T={T})"] < 2, [c.lower for c in comparisons]
    tenfold = all(c.log > math.log(5) for c in comparisons)
    report.verdict = _verdict(
        comparisons,
        [cheap, *lower],
        f"The claimed factor of about ten {'is' if tenfold else 'is not'} reached (target: at least 5)",
        f"A step with a Fisher refreshed every {T} steps takes {ratios[f'NG (T={T})']:.2f} times SGD's time (claim: "
        f"less than 2), one with a new Fisher {ratios['NG (T=1)']:.2f} times",
    )
    report.settings["Fisher"] = _fisher_words(size, "ng", "kfac")
    return report


def _against_time(
    context: Context, report: Report, size: Size, file: str, timed: Sequence[str], pair: tuple[str, str]
) -> tuple[dict[str, float], list[Comparison]]:
    """Time of a step and training loss of a pair of methods, beside SGD and Adam, on two data sets."""
    kinds = dict.fromkeys(("sgd", "adam", "kfac", *timed))
    rules, panels = [size.rule(kind) for kind in kinds], {}
    tasks = {name: size.task(context, name) for name in size.pair}
    ratios = _ratios(context, size, tasks[size.pair[0]], timed)
    _time_table(context, report, f"{file}-time.png", ratios)
    for name, task in tasks.items():
        panels[name] = tuned(context, task, rules)
        _table(report, name, panels[name])
        _protocol(report, task, rules)
    _curves(context, report, f"{file}.png", panels)
    return ratios, [Comparison(name, *pair, results) for name, results in panels.items()]


def _fisher_words(size: Size, *kinds: str) -> str:
    own = {
        "ng": f"refreshed every {size.refresh} steps",
        "kfac": "taken at every step, averaged with decay 0.95, inverted less and less often, in the end every 100 "
        "steps",
    }
    words = f"of {size.fisher[0]} images independent of the gradient's, one sampled label each; "
    return words + "; ".join(f"{KINDS[kind][0]}'s is {own[kind]}" for kind in kinds)


def _ratios(context: Context, size: Size, task: Task, kinds: Sequence[str]) -> dict[str, float]:
    """Time of a step over SGD's: with everything refreshed in every step, and amortised over T of them.

    A step that refreshes everything and one that refreshes as little as can be are timed, and mixed 1 : T - 1.
    """
    rules = {"sgd": size.rule("sgd")}
    for kind in kinds:
        for part, often in (("whole", 1), ("rest", 10**6)):
            options: dict[str, Any] = {"refresh": often} if kind == "ng" else {"refresh": 1, "update_every": often}
            rules[f"{kind} {part}"] = size.rule(kind, **options)
    seconds = step_times(context, task, rules, size.rounds)
    ratios = {"SGD": 1.0}
    for kind in kinds:
        whole, rest = (seconds[f"{kind} {part}"] / seconds["sgd"] for part in ("whole", "rest"))
        title = size.rule(kind).title
        ratios |= {f"{title} (T=1)": whole, f"{title} (T={T})": (whole + (T - 1) * rest) / T}
    return ratios


def _time_table(context: Context, report: Report, file: str, ratios: Mapping[str, float]) -> None:
    rows = [[name, f"{ratio:.2f}"] for name, ratio in ratios.items()]
    report.add_table("Time of a step over SGD's, medians of steps measured in turns", ["method", "time / SGD's"], rows)
    words = "Time of a step over SGD's; one inversion (or one Fisher) is used for T steps."
    report.draw(context.folder / file, figures.bars, ratios, "time of a step / SGD's", caption=words)


def fig2(context: Context) -> Report:
    """KFAC and natural gradients with the same data in their Fishers."""
    size = SIZES[context.scale]
    report = Report.of("benzing2021-fig2")
    one, *more = size.fisher
    single = size.rule("kfac", "KFAC of one batch", "fig2", refresh=size.refresh, ema=0.0, update_every=size.refresh)
    titles = {one: "NG"} | {count: f"NG, Fisher of {count}" for count in more}
    ng = [size.rule("ng", title, "fig2", fisher=count) for count, title in titles.items()]
    panels, comparisons, held = {}, [], []
    for name in size.single:
        task = size.task(context, name, size.short)
        results = tuned(context, task, [single, *ng])
        _protocol(report, task, [single, *ng])
        full = size.full(context, name)
        rules = [size.whole(kind) for kind in ("sgd", "kfac", "ng")]
        whole = tuned(context, full, rules)
        _protocol(report, full, rules)
        first = {title: results[title] for title in (single.title, "NG")}
        second = {title: results[title] for title in (single.title, *(rule.title for rule in ng))}
        panels |= {f"A. {name}": first, f"B. {name}": second, f"C. {name}, {len(full.data.train_x)} images": whole}
        new = [Comparison(f"A, {name}", "NG", single.title, results)]
        new += [Comparison(f"B, {name}", rule.title, single.title, results) for rule in ng[1:]]
        new += [Comparison(f"C, {name}", "NG", "KFAC", whole)]
        held += [c.lower for c in new]
        comparisons += [*new, Comparison(f"More data, {name}", "NG", ng[-1].title, results)]
    for title, results in panels.items():
        _table(report, title, results)
    _curves(context, report, "fig2.png", panels)
    report.verdict = _verdict(comparisons, held)
    report.settings["Fisher"] = (
        f"KFAC of one batch and NG from {one} images (or the number in the title), KFAC's factors not averaged, both "
        f"refreshed every {size.refresh} steps; with full batches, from all images in every step"
    )
    return report


def fig3(context: Context) -> Report:
    """KFAC and natural gradients that are both block-diagonal."""
    size = SIZES[context.scale]
    report = Report.of("benzing2021-fig3")
    panels, comparisons = {}, []
    blocks = size.rule("ng", "layer-wise NG", blocks="layer")
    whole = size.whole("ng", "layer-wise NG", blocks="layer")
    for name in size.single:
        task, full = size.task(context, name, size.short), size.full(context, name)
        layer = size.full(context, name, ())
        parts = {
            f"A. {name}, one layer": (layer, [size.whole("kfac"), size.whole("ng")]),
            f"B. {name}": (task, [size.rule("kfac"), size.rule("ng"), blocks]),
            f"C. {name}, {len(full.data.train_x)} images": (full, [size.whole("kfac"), whole]),
        }
        for title, (what, rules) in parts.items():
            panels[title] = tuned(context, what, rules)
            comparisons.append(Comparison(title, rules[-1].title, "KFAC", panels[title]))
            _table(report, title, panels[title])
        _protocol(report, task, parts[f"B. {name}"][1])
        _protocol(report, full, [size.whole("kfac"), size.whole("ng"), whole])
    _curves(context, report, "fig3.png", panels)
    report.verdict = _verdict(comparisons, [c.lower for c in comparisons])
    report.settings["Fisher"] = _fisher_words(size, "ng", "kfac") + "; with full batches, from all images in every step"
    return report


def fig4(context: Context) -> Report:
    """How damping makes KFAC similar to FOOF, and better."""
    size = SIZES[context.scale]
    report = Report.of("benzing2021-fig4")
    kfac, foof = size.rule("kfac", where="fig4"), size.rule("foof", where="fig4")
    product = size.rule("kfac", "KFAC, damped product", "product", exact_damping=True)
    similar, losses, held, words, comparisons = {}, {}, [], [], []
    for name in size.mnist:
        task = size.task(context, name, size.short)
        _protocol(report, task, [kfac, product, foof])
        factors = by_damping(context, task, kfac, partial(similarities, dampings=kfac.seconds))
        neurons = by_damping(context, task, foof)
        best, whole = (finish(context, task, tune(context, task, rule)) for rule in (kfac, product))
        rows, lines = [], {"damped factors": [], "damped product": []}
        for i, (damping, one) in enumerate(factors.items()):
            seen = [run["measured"][:, :, i].mean(0).tolist() for run in one.runs if "measured" in run]
            pairs = list(zip(*seen)) or [(math.nan,), (math.nan,)]
            for line, values in zip(lines.values(), pairs):
                line.append(values)
            rows.append([f"{damping:g}", *(_show(mean_and_error(values)) for values in pairs)])
        columns = ["damping", "damped factors", "damped product"]
        report.add_table(f"{name}: cosine of KFAC's update to FOOF's, averaged over layers", columns, rows)
        results = {f"{r.title}, {d:g}": f for r, some in ((kfac, factors), (foof, neurons)) for d, f in some.items()}
        _table(report, name, {**results, "KFAC, searched": best, f"{product.title}, searched": whole})
        similar[name] = {title: (list(factors), values) for title, values in lines.items()}
        losses[name] = {
            rule.title: (list(some), [one.values("loss") for one in some.values()])
            for rule, some in ((kfac, factors), (foof, neurons))
        }
        means = [[mean_and_error(values)[0] for values in line] for line in lines.values()]
        rising = all(a < b for a, b in zip(means[0], means[0][1:]))
        closer = all(a > b for a, b in zip(*means))
        named = {f"KFAC at damping {d:g}": one for d, one in factors.items()}
        gain = Comparison(name, next(iter(named)), list(named)[-1], named)
        pair = Comparison(name, product.title, "KFAC", {product.title: whole, "KFAC": best})
        held += [rising, closer, gain.lower]
        comparisons += [gain, pair]
        words.append(
            f"On {name} the similarity {'rises' if rising else 'does not rise'} with every step of damping, from "
            f"{means[0][0]:.3f} to {means[0][-1]:.3f}, and is {'always' if closer else 'not always'} higher for damped "
            f"factors than for the damped product ({means[1][0]:.3f} to {means[1][-1]:.3f})"
        )
    panels = {f"{name}: similarity to FOOF": lines for name, lines in similar.items()}
    panels |= {f"{name}: training loss": lines for name, lines in losses.items()}
    axes = ["cosine"] * len(similar) + ["training loss (nats)"] * len(losses)
    report.draw(context.folder / "fig4.png", figures.lines, panels, "damping", axes)
    report.verdict = _verdict(comparisons, held, *words)
    report.settings["Fisher"] = _fisher_words(size, "kfac")
    return report


def fig5(context: Context) -> Report:
    """FOOF beside KFAC: time and training loss."""
    size = SIZES[context.scale]
    report = Report.of("benzing2021-fig5")
    ratios, comparisons = _against_time(context, report, size, "fig5", ("kfac", "foof"), ("KFAC", "FOOF"))
    speed = ratios[f"KFAC (T={T})"] / ratios[f"FOOF (T={T})"]
    report.verdict = _verdict(
        comparisons,
        [speed > 1.25, *(not c.higher for c in comparisons)],
        f"A step of KFAC takes {speed:.2f} times that of FOOF when T={T} (claim: 1.5; target: at least 1.25)",
    )
    report.settings["Fisher"] = _fisher_words(size, "kfac")
    return report


def fig9(context: Context) -> Report:
    """Fisher and gradient of the same batch, or of two."""
    size = SIZES[context.scale]
    report = Report.of("benzing2021-fig9")
    base = size.rule("ng")
    apart = size.rule("ng", "independent batches", refresh=1, fisher=size.batch)
    same = size.rule("ng", "the same batch", refresh=1, fisher=0)
    panels, comparisons = {}, []
    for name in size.single:
        task = size.task(context, name, size.short)
        _protocol(report, task, [base])
        found = {rule.title: by_damping(context, task, rule) for rule in (apart, same)}
        _table(report, name, {f"{title}, {d:g}": f for title, some in found.items() for d, f in some.items()})
        panels[name] = {
            title: (list(some), [one.values("loss") for one in some.values()]) for title, some in found.items()
        }
        for damping in base.seconds:
            pair = {title: some[damping] for title, some in found.items()}
            comparisons.append(Comparison(f"{name}, damping {damping:g}", same.title, apart.title, pair))
    report.draw(context.folder / "fig9.png", figures.lines, panels, "damping", "training loss (nats)")
    report.verdict = _verdict(comparisons, [c.lower for c in comparisons])
    report.settings["Fisher"] = f"of {size.batch} images with one sampled label each, refreshed in every step"
    return report


def conv(context: Context) -> Report:
    """The four findings of section 4, on a small convolutional network."""
    size = SIZES[context.scale]
    report = Report.of("benzing2021-conv")
    rules = [size.rule(kind, where="conv") for kind in ("sgd", "adam", "kfac", "ng", "foof")]
    panels, comparisons, held, words = {}, [], [], []
    for name in size.single[:1]:
        task = size.task(context, name, size.short, "cnn")
        _protocol(report, task, rules)
        ratios = _ratios(context, size, task, ("ng", "kfac", "foof"))
        _time_table(context, report, "conv-time.png", ratios)
        panels[name] = results = tuned(context, task, rules)
        _table(report, name, results)
        comparisons = [Comparison("(2)", "NG", "KFAC", results), Comparison("(4)", "KFAC", "FOOF", results)]
        difference = _input_factors_differ(task)
        cost = ratios[f"NG (T={T})"]
        held += [cost < 2, comparisons[0].lower, difference < 1e-5, not comparisons[1].higher]
        words.append(f"(1) a step of NG takes {cost:.2f} times SGD's time when T={T} (target: less than 2)")
        words.append(f"(3) the input factors of KFAC and FOOF differ by {difference:.1g} of their norm")
    _curves(context, report, "conv.png", panels)
    report.verdict = _verdict(comparisons, held, *words)
    report.settings["Fisher"] = _fisher_words(size, "ng", "kfac")
    return report


def _input_factors_differ(task: Task) -> float:
    """The largest relative difference, over layers, of the input factors of KFAC and FOOF after the same batch."""
    factors = []
    for make in (KFAC, FOOF):
        model = task.model(0)
        optimizer = make(model, lr=0.0)
        next(steps(model, [optimizer], task.batches(iter([torch.arange(task.size)]))))
        factors.append([optimizer.state[layer.owner]["input_moment"] for layer in layers_of(optimizer)])
    return max(float(torch.dist(a, b) / b.norm()) for a, b in zip(*factors))
