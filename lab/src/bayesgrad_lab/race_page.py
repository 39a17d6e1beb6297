"""The page of a race: what was fixed beforehand, times to targets, performance profiles, and the verdict of a rule."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from bayesgrad_lab import figures, race
from bayesgrad_lab.context import Context
from bayesgrad_lab.race import Finish, Finishes, Protocol
from bayesgrad_lab.race_entrants import BASELINE, ENTRANTS
from bayesgrad_lab.race_record import keep, recorded
from bayesgrad_lab.race_workloads import UNITS, WORKLOADS
from bayesgrad_lab.report import NO_VERDICT, Report
from bayesgrad_lab.results import outcome

RECORD = "record.json"
FAST, LEVEL, USUAL = (0.7, 3), (1.1, 1), 5  # the hypotheses: ratios of times, on how many workloads
CLAIM = (
    "With the same search, an optimizer of bayesgrad reaches the target in at most {fast} x the time of the best other "
    "one on {often} of {all} workloads, and in at most {level} x on {more} more. Without a search, one of them is "
    "faster than AdamW on {usual} of {all}."
)


def shown(values: Sequence[float], digits: int = 1, unit: float = 1) -> str:
    """The median over seeds, and the lowest and highest: for five seeds a 94 % interval of the median."""
    ordered = sorted(values)
    words = [f"{value / unit:,.{digits}f}" if math.isfinite(value) else "not reached" for value in ordered]
    middle = statistics.median(ordered)
    if not math.isfinite(middle):
        return f"not reached ({sum(map(math.isfinite, ordered))} of {len(ordered)})"
    return f"{middle / unit:,.{digits}f} [{words[0]}, {words[-1]}]"


def fixed(protocol: Protocol, seeds: int) -> dict[str, str]:
    """All that is fixed before the first run, in words."""
    names = {True: [], False: []}
    for one in WORKLOADS.values():
        names[one.held_out].append(one.name)
    (lr, decay, horizon), (plain, full) = (protocol.lr, protocol.decay, protocol.horizon), protocol.plain
    return {
        "protocol version": f"{race.VERSION} ({protocol.digest()})",
        "for choosing defaults": ", ".join(names[False]),
        "held out, for reporting only": ", ".join(names[True]),
        "target": f"AdamW's best of {protocol.settings} settings, by its lowest validation score in a budget; "
        f"the score that {protocol.share:.0%} of {seeds} seeds reach with it (of five: all)",
        "search": f"{protocol.settings} settings for each optimizer, of one scrambled Sobol sequence (seed "
        f"{protocol.seed}): {lr[0]:g} to {lr[1]:g} x the usual lr, L2 strength {decay[0]:g} to {decay[1]:g} in SGD's "
        f"terms, horizon {horizon[0]:g} to {horizon[1]:g} budgets; one seed apart; chosen by the time to the target, "
        "or by the lowest score where no setting reaches it; a run ends when another setting of its optimizer was "
        "faster",
        "without a search": f"the usual lr, L2 strength {plain:g}, horizon {full:g} budgets",
        "weight decay": "lr x weight_decay = 0.1 x the L2 strength where it is decoupled; SGD has the L2 term itself, "
        "which momentum 0.9 makes ten times as strong at its usual lr",
        "schedule": f"lr rises in {protocol.warm_up:.0%} of the horizon and falls to {race.FLOOR:.0%} by a cosine, in "
        "processor seconds; schedule-free AdamW rises only",
        "known before": "settings of ours were chosen on the workloads for choosing, by single runs with the seed of "
        "the search; after these, budgets were changed from 45 s to 30 s, for the time that a race takes, and to 60 s "
        "for the GPT, because AdamW learnt little in 30 s",
        "end of a run": f"at the target, or after {protocol.limit:g} budgets; if the first {seeds // 2 + 1} of {seeds} "
        "seeds miss the target, so does the median, and the others are not run",
        "clock": "processor time of the steps on one thread; validation and compilation do not count; "
        f"{protocol.looks} validations in a budget, and the target is reached on the line between two of them",
        "products of matrices": "those of bayesgrad's optimizers and of Muon are by oneDNN where that is faster (on "
        "processors of AMD with AVX-512), those of networks and of other optimizers by torch's default",
        "operations": f"matrix products, convolutions and decompositions of the first {protocol.counted} steps",
        "rule": f"medians over seeds: at most {FAST[0]} x the best other time on {FAST[1]} workloads, at most "
        f"{LEVEL[0]} x on {LEVEL[1]} more, by the fastest of bayesgrad's on each; without a search, one optimizer "
        f"faster than AdamW on {USUAL}",
        "how to read the tables": "medians over the seeds that were run, with the lowest and highest in brackets (for "
        "five seeds a 94 % interval of the median); (edge): the lowest or highest of the lrs that were drawn was "
        "chosen",
    }


# --- the verdict ---


def best(track: Finishes, workload: str, ours: bool) -> Finish | None:
    """The fastest of ours, or of the others."""
    found = [one for (name, _), one in track.items() if name == workload and one.entrant.ours == ours]
    return min((one for one in found if one.entrant.to_target), key=lambda one: one.time, default=None)


def ratios(track: Finishes) -> dict[str, float]:
    """Workload -> the time of the best of ours over that of the best of the others."""
    found = {}
    for name in dict.fromkeys(name for name, _ in track):
        own, other = best(track, name, True), best(track, name, False)
        if own and other:
            found[name] = own.time / other.time if math.isfinite(own.time) else math.inf
    return found


def wins(track: Finishes) -> dict[str, int]:
    """Optimizer of ours -> on how many workloads it is faster than AdamW."""
    names = {name for name, _ in track}
    ours = dict.fromkeys(kind for _, kind in track if ENTRANTS[kind].ours and ENTRANTS[kind].to_target)
    return {kind: sum(track[name, kind].time < track[name, BASELINE].time for name in names) for kind in ours}


def verdict(tuned: Finishes, usual: Finishes) -> str:
    """By the rule that was fixed beforehand; for races of all workloads and optimizers alone."""
    if any(set(track) != set(product(WORKLOADS, ENTRANTS)) for track in (tuned, usual)):
        return "Not resolved at this size: not all workloads and optimizers took part."
    found, won = ratios(tuned), wins(usual)
    fast = sum(ratio <= FAST[0] for ratio in found.values())
    level = sum(FAST[0] < ratio <= LEVEL[0] for ratio in found.values())
    spare = max(0, fast - FAST[1])
    champion = max(won, key=won.__getitem__)
    held = [fast >= FAST[1] and level + spare >= LEVEL[1], won[champion] >= USUAL]
    words = ", ".join(f"{name} {ratio:.2f}" for name, ratio in found.items())
    return (
        f"{outcome(held)}: with a search, times of the best of ours over the best of the others are {words}; "
        f"without one, {ENTRANTS[champion].title} is faster than AdamW on {won[champion]} of {len(WORKLOADS)}."
    )


# --- tables and figures ---


def profiles(track: Finishes) -> dict[str, list[float]]:
    """Optimizer -> its time over the shortest, on each workload; infinite where the target was not reached.

    Those that did not take part on every workload are left out.
    """
    shortest = {name: min(one.time for (other, _), one in track.items() if other == name) for name, _ in track}
    found: dict[str, list[float]] = {}
    for (name, kind), one in track.items():
        if one.entrant.to_target and all((other, kind) in track for other in shortest):
            ratio = one.time / shortest[name] if math.isfinite(one.time) else math.inf
            found.setdefault(one.entrant.title, []).append(ratio)
    return found


def add_times(report: Report, title: str, track: Finishes) -> None:
    names = list(dict.fromkeys(name for name, _ in track))
    kinds = [kind for kind in dict.fromkeys(kind for _, kind in track) if ENTRANTS[kind].to_target]
    columns = ["optimizer", *(WORKLOADS[name].title + " (held out)" * WORKLOADS[name].held_out for name in names)]

    def rows(cell) -> list[list[str]]:
        found = [(kind, [track.get((name, kind)) for name in names]) for kind in kinds]
        return [
            [ENTRANTS[kind].title, *("not run" if one is None else cell(one) for one in own)] for kind, own in found
        ]

    report.add_table(f"{title}: seconds to the target", columns, rows(lambda one: shown(one.seconds)))
    report.add_table(f"{title}: steps to the target", columns, rows(lambda one: shown(one.steps, 0)))
    work = rows(lambda one: shown([count * one.flops for count in one.steps], 2, 1e12))
    report.add_table(f"{title}: 10^12 operations to the target", columns, work)


def add_settings(report: Report, track: Finishes) -> None:
    rows = [
        [
            WORKLOADS[name].title,
            one.entrant.title,
            f"{one.setting['lr']:.3g}{' (edge)' * one.at_edge}",
            f"{one.setting['decay']:.2g}",
            f"{one.setting['horizon']:.2f}",
            f"{one.flops / 1e9:.3g}",
        ]
        for (name, _), one in track.items()
    ]
    columns = ["workload", "optimizer", "lr", "L2 strength", "horizon in budgets", "10^9 operations of a step"]
    report.add_table("What the search chose", columns, rows)


def add_losses(report: Report, tracks: Mapping[str, Finishes]) -> None:
    """The loss at the end of a budget, of those that do not stop at a target."""
    kinds = [BASELINE, *(kind for kind, one in ENTRANTS.items() if not one.to_target)]
    rows = [
        [title, WORKLOADS[name].title, *(shown(track[name, kind].losses, 4) for kind in kinds)]
        for title, track in tracks.items()
        for name in dict.fromkeys(name for name, _ in track)
        if all((name, kind) in track for kind in kinds)
    ]
    if rows:
        columns = ["track", "workload", *(ENTRANTS[kind].title for kind in kinds)]
        report.add_table("Validation loss at the end of the budget", columns, rows)


def add_targets(report: Report, context: Context, found: Mapping[str, dict]) -> None:
    protocol = race.SCALES[context.scale]
    rows = [
        [
            one.title + " (held out)" * one.held_out,
            f"{protocol.seconds(one):g}",
            f"{UNITS[one.metric]} {found[name]['target']:.4g}",
            ", ".join(f"{value:.4g}" for value in found[name]["seeds"]),
            ", ".join(f"{key} {value:.3g}" for key, value in found[name]["setting"].items()),
        ]
        for name, one in WORKLOADS.items()
        if name in found
    ]
    columns = ["workload", "budget in s", "target", "AdamW's seeds", "AdamW's setting"]
    report.add_table("Targets", columns, rows)


def add_conditions(report: Report, found: Mapping[str, Sequence[Mapping[str, str]]]) -> None:
    """What each workload was run with: several rows, if that was not the same for all optimizers."""
    rows = [{"workload": WORKLOADS[name].title, **entry} for name, every in found.items() for entry in every]
    report.add_rows("Conditions", rows)


def add_entrants(report: Report) -> None:
    rows = [[one.title, f"{one.lr:g}", one.words] for one in ENTRANTS.values()]
    report.add_table("Settings of the optimizers", ["optimizer", "usual lr", "beside it"], rows)


# --- commands ---


def _report(context: Context) -> Report:
    size = len(WORKLOADS)
    values = dict(fast=FAST[0], often=FAST[1], level=LEVEL[0], more=LEVEL[1], usual=USUAL, all=size)
    report = Report(f"Race to a target, version {race.VERSION}", CLAIM.format(**values))
    report.settings |= fixed(race.SCALES[context.scale], context.seeds)
    return report


def targets(context: Context, workloads: Sequence[str]) -> Report:
    """Measures the targets and records them, before any other optimizer is run."""
    report = _report(context)
    add_targets(report, context, race.measure_targets(context, workloads))
    report.verdict = NO_VERDICT if context.scale == "smoke" else "Not resolved at this size: targets alone."
    return report


def run(context: Context, workloads: Sequence[str], entrants: Sequence[str], record: Path | None = None) -> Report:
    """Both tracks of these, and a page of all that the record has. Missing targets are refused before anything runs."""
    report, path = _report(context), context.folder / race.TARGETS
    record, protocol = record or context.folder / RECORD, race.SCALES[context.scale]
    recorded(record, protocol)  # refuses the record of another protocol
    every = list(race.races(context, workloads, entrants))
    work = [race.track(one, race.target_of(one, path), searched) for searched in (True, False) for one in every]
    for one, setting, curves in race.together(work):
        name = one.race.workload.name
        keep(record, protocol, race.read_json(path)[name], one.searched, race.finish(one, setting, curves))
    tracks, targets, conditions = recorded(record, protocol)
    add_targets(report, context, targets)
    for title, track in tracks.items():
        add_times(report, title, track)
    add_losses(report, tracks)
    tuned, usual = tracks.values()
    add_settings(report, tuned)
    add_entrants(report)
    add_conditions(report, conditions)
    words = (
        "Performance profiles: the part of the workloads on which an optimizer's median time to the target is at most "
        "so many times the shortest, for optimizers that took part on all of them."
    )
    panels = {title: profiles(track) for title, track in tracks.items()}
    report.draw(context.folder / "profiles.png", figures.profiles, panels, caption=words)
    report.verdict = NO_VERDICT if context.scale == "smoke" else verdict(tuned, usual)
    return report
