"""Time to a validation target, with eight settings for each optimizer and with none: the protocol and its runs.

A run is trained on one thread until the target is reached or 1.5 budgets are spent; one of a search ends as soon as it
is slower than another setting of the same optimizer, which changes no choice. Its clock is processor time of the
steps alone: validation, compilation and reading of data do not count. The learning rate rises in a twentieth of the
horizon and falls by a cosine to its end, in seconds, so that an optimizer with cheaper steps takes more of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from bayesgrad_lab.context import Context, Trial
from bayesgrad_lab.names import unknown
from bayesgrad_lab.race_entrants import BASELINE, ENTRANTS, Entrant
from bayesgrad_lab.race_workloads import WORKLOADS, Workload
from bayesgrad_lab.store import held, read_json, versions, write_json
from bayesgrad_lab.studies import PAUSE, SEARCH_SEED, Point, Study
from bayesgrad_lab.task import Task, shuffled
from bayesgrad_lab.training import settle, steps

VERSION = 1  # of the protocol: a page compares runs of one version alone
TARGETS = "targets.json"
SECONDS, STEPS, VALUE, LOSS = range(4)  # columns of a curve
FLOOR = 0.02  # of lr, where a warm-up begins and a schedule ends
OVERHEAD = 1.25  # of validation and of counting operations, for estimates
UNTIMED = 3  # steps on a copy, before the clock starts: what is compiled is compiled then


@dataclass(frozen=True)
class Protocol:
    """What is fixed before the first run.

    Args:
        settings: that a search tries for each optimizer.
        lr, decay, horizon: the ranges that they are drawn from, by one scrambled Sobol sequence for all optimizers:
            lr in units of the usual one and L2 strength in SGD's terms, both on a logarithmic scale; the end of the
            schedule in budgets.
        plain: decay and horizon without a search.
        limit: budgets after which a run that has not reached its target ends.
        warm_up: the part of a horizon in which lr rises.
        looks: validations in one budget.
        counted: steps that operations are counted of.
        share: the part of the seeds that has to reach a target.
        budget: seconds, in place of the workloads' own.
    """

    settings: int = 8
    seed: int = 0
    lr: tuple[float, float] = (0.1, 10.0)
    decay: tuple[float, float] = (1e-6, 1e-3)
    horizon: tuple[float, float] = (0.3, 1.0)
    plain: tuple[float, float] = (1e-4, 1.0)
    limit: float = 1.5
    warm_up: float = 0.05
    looks: int = 30
    counted: int = 200
    share: float = 0.9
    budget: float | None = None

    def points(self, entrant: Entrant) -> list[dict[str, float]]:
        """The settings of a search: for all optimizers the same multiples, decays and horizons."""
        unit = torch.quasirandom.SobolEngine(3, scramble=True, seed=self.seed).draw(self.settings, dtype=torch.float64)

        def between(ends: tuple[float, float], u: float) -> float:
            low, high = map(math.log, ends)
            return float(f"{math.exp(low + u * (high - low)):.4g}")

        return [
            {
                "lr": float(f"{entrant.lr * between(self.lr, a):.4g}"),
                "decay": between(self.decay, b),
                "horizon": round(self.horizon[0] + c * (self.horizon[1] - self.horizon[0]), 3),
            }
            for a, b, c in unit.tolist()
        ]

    def usual(self, entrant: Entrant) -> dict[str, float]:
        """The setting without a search."""
        return {"lr": entrant.lr, "decay": self.plain[0], "horizon": self.plain[1]}

    def seconds(self, workload: Workload) -> float:
        return self.budget or workload.budget

    def digest(self) -> str:
        """Of all that is fixed: a target counts only under the protocol that it was measured with."""
        fixed = [VERSION, asdict(self)]
        fixed += [[one.name, one.sizes, one.batch, one.metric, one.validated, one.budget] for one in WORKLOADS.values()]
        return hashlib.sha256(json.dumps(fixed).encode()).hexdigest()[:12]


SCALES = {"laptop": Protocol(), "smoke": Protocol(settings=2, looks=4, counted=2, budget=0.04)}


# --- one run ---


@dataclass
class Clock:
    """Processor seconds of the steps of a run."""

    seconds: float = 0.0

    def factor(self, horizon: float, warm_up: float, cosine: bool, _: int) -> float:
        """Of lr, now."""
        rise = min(1.0, self.seconds / (warm_up * horizon))
        if rise < 1 or not cosine:
            return max(FLOOR, rise)
        part = (self.seconds - warm_up * horizon) / (horizon - warm_up * horizon)
        return max(FLOOR, 0.5 + 0.5 * math.cos(math.pi * min(1.0, part)))


@dataclass(frozen=True)
class Race:
    """A workload and an optimizer, under a protocol."""

    context: Context
    protocol: Protocol
    workload: Workload
    entrant: Entrant
    task: Task

    @property
    def budget(self) -> float:
        return self.protocol.seconds(self.workload)

    def build(self, setting: Point, seed: int) -> tuple[nn.Module, list[Any]]:
        """The network and its optimizers."""
        task, one = replace(self.task, decay=setting["decay"]), self.entrant
        model = task.model(seed).to(self.context.device)
        options = self.workload.likelihood(task) if one.draws_labels else {}
        return model, replace(one, options=options).build(model, task, setting["lr"], seed)

    def trial(self, setting: Point, seed: int) -> Trial:
        return Trial("race", self.workload.name, self.entrant.kind, setting, seed)

    @property
    def limit(self) -> float:
        """Seconds after which a run ends: the budget alone, where the loss at its end counts."""
        return self.budget * (self.protocol.limit if self.entrant.to_target else 1.0)

    @property
    def stops(self) -> bool:
        """Whether its runs end at the target: nothing that comes later counts."""
        return self.entrant.to_target and self.entrant.kind != BASELINE

    def run(self, setting: Point, seed: int, target: float, limit: float = math.inf) -> Tensor:
        """The curve of one run, from the folder where it is there: seconds, steps, score and loss of each validation.

        One that does not stop at the target goes on to its own limit, so that it is the same for every target.

        Args:
            limit: seconds after which a target is reached too late to matter; the run ends a validation later.
        """
        if not self.stops:
            target, limit = -math.inf, math.inf
        trial = self.trial(setting, seed)
        return self.context.once(trial, lambda: {"curve": self._run(trial, target, limit)})["curve"]

    def _run(self, trial: Trial, target: float, limit: float = math.inf) -> Tensor:
        setting, seed = trial.settings, trial.seed or 0
        for _ in self._steps(*self.build(setting, seed), [], seed, UNTIMED):
            pass
        model, optimizers = self.build(setting, seed)
        clock, protocol = Clock(), self.protocol
        shape = partial(clock.factor, setting["horizon"] * self.budget, protocol.warm_up, self.entrant.cosine)
        schedules = [LambdaLR(optimizer, shape) for optimizer in optimizers]
        rows, look = [], self.budget / protocol.looks
        for step in self._steps(model, optimizers, schedules, seed):
            clock.seconds += step.seconds
            if step.lost:
                break
            if clock.seconds >= look:
                scores = self._validate(model, optimizers)
                rows.append((clock.seconds, step.number + 1, *scores))
                look = self.budget / protocol.looks * (1 + clock.seconds * protocol.looks // self.budget)
                if scores[0] <= target or not all(map(math.isfinite, scores)):
                    break
            if clock.seconds >= min(limit + self.budget / protocol.looks, self.limit):
                break
        curve = torch.tensor(rows, dtype=torch.float64).view(-1, 4)
        best = curve[:, VALUE].min().item() if len(curve) else math.inf
        self.context.say(f"{trial.key}: {clock.seconds:.1f} s, {len(curve)} validations, best {best:.4g}")
        return curve

    def _steps(
        self, model: nn.Module, optimizers: Sequence[Any], schedules: Sequence[Any], seed: int, count: int | None = None
    ) -> Iterator[Any]:
        order = torch.Generator().manual_seed(seed)
        rows = itertools.islice(shuffled(len(self.task.data.train_x), self.task.size, order), count)
        batches = self.task.batches(rows, self.context.device, order)
        model.train()
        return steps(model, optimizers, batches, self.task.loss, schedules=schedules, clock=self.context.clock)

    def _validate(self, model: nn.Module, optimizers: Sequence[Any]) -> tuple[float, float]:
        with _evaluated(model, optimizers, self.task, self.context.device):
            return self.workload.scores(model, self.task, self.context.device)

    def flops(self) -> float:
        """Operations of a step, in matrix products, convolutions and decompositions, from the folder if there."""

        def count() -> dict[str, Tensor]:
            from bayesgrad_lab.race_flops import counted

            model, optimizers = self.build(self.protocol.usual(self.entrant), 0)
            every = self.protocol.counted
            with counted() as total:
                for _ in self._steps(model, optimizers, [], 0, every):
                    pass
            return {"flops": torch.tensor(total() / every, dtype=torch.float64)}

        return self.context.once(f"flops-{self.workload.name}-{self.entrant.kind}", count)["flops"].item()


@contextlib.contextmanager
def _evaluated(model: nn.Module, optimizers: Sequence[Any], task: Task, device: str) -> Iterator[None]:
    """The weights to evaluate with, and statistics of BatchNorm at them; inside alone."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    kept = [(norm.momentum, {name: value.clone() for name, value in norm.named_buffers()}) for norm in norms]
    modes = [optimizer for optimizer in optimizers if hasattr(optimizer, "eval")]
    for optimizer in modes:
        optimizer.eval()
    settle(model, task.data, device)
    yield
    for norm, (momentum, buffers) in zip(norms, kept):
        norm.momentum = momentum
        norm.load_state_dict(buffers, strict=False)
    for optimizer in modes:
        optimizer.train()
    model.train()


# --- what a curve says ---


def time_to(curve: Tensor, target: float) -> float:
    """Seconds until the score was first as low as the target; infinite if it never was."""
    return _crossing(curve, target, SECONDS)


def steps_to(curve: Tensor, target: float) -> float:
    return _crossing(curve, target, STEPS)


def _crossing(curve: Tensor, target: float, column: int) -> float:
    """Where the score reaches the target, on the line between the validations before and after."""
    found = (curve[:, VALUE] <= target).nonzero()
    if not len(found):
        return math.inf
    last = int(found[0])
    before, after = curve[max(0, last - 1)], curve[last]
    part = (before[VALUE] - target) / (before[VALUE] - after[VALUE]) if last else 1.0
    return before[column].lerp(after[column], part).item()


def within(curve: Tensor, seconds: float, column: int = VALUE) -> float:
    """The lowest value of a column in that time; infinite if there is none."""
    found = curve[curve[:, SECONDS] <= seconds, column]
    found = found[torch.isfinite(found)]
    return found.min().item() if len(found) else math.inf


def at(curve: Tensor, seconds: float, column: int = LOSS) -> float:
    """The last value of a column in that time."""
    found = curve[curve[:, SECONDS] <= seconds, column]
    return found[-1].item() if len(found) else math.inf


def slowness(curve: Tensor, target: float, limit: float) -> float:
    """What a search minimises: the time to the target; runs that miss it come after, by how much they miss it."""
    seconds = time_to(curve, target)
    return seconds if math.isfinite(seconds) else limit + within(curve, math.inf) - target


# --- targets ---


def check(names: Sequence[str], entrants: Sequence[str]) -> None:
    """Refuses names that there are not."""
    for table, chosen, kind in ((WORKLOADS, names, "workload"), (ENTRANTS, entrants, "optimizer")):
        for name in chosen:
            if name not in table:
                raise unknown(kind, name, table)


def races(context: Context, names: Sequence[str], entrants: Sequence[str]) -> Iterator[Race]:
    for name in names:
        task = WORKLOADS[name].task(context)
        for entrant in entrants:
            yield Race(context, SCALES[context.scale], WORKLOADS[name], ENTRANTS[entrant], task)


@dataclass(frozen=True)
class Track:
    """The runs of an optimizer on a workload for one purpose: with a search or without.

    Args:
        purpose: the name of its studies.
        score: of a curve, the lower the better.
    """

    race: Race
    purpose: str
    score: Callable[[Tensor], float]
    target: float = -math.inf
    searched: bool = True

    def work(self) -> tuple[Point, list[Tensor]] | None:
        """The best of the settings, by one seed apart, and the curves of the seeds at it.

        Of an optimizer whose first seeds, more than half of all, miss the target, the others are not run: they change
        no median. None while other processes work on some of the runs; what is left then is done.
        """
        race, setting = self.race, self.race.protocol.usual(self.race.entrant)
        if self.searched:
            points = race.protocol.points(race.entrant)
            found = self._measure("", [{**point, "seed": SEARCH_SEED} for point in points])
            if found is None:
                return None
            setting = points[min(range(len(points)), key=found.__getitem__)]
        seeds, curves = range(race.context.seeds), []
        first = len(seeds) // 2 + 1
        for suffix, some in (("-final", seeds[:first]), ("-rest", seeds[first:])):
            if self._measure(suffix, [{**setting, "seed": seed} for seed in some]) is None:
                return None
            curves += [race.run(setting, seed, self.target) for seed in some]
            if race.stops and all(math.isinf(time_to(curve, self.target)) for curve in curves):
                break
        return setting, curves

    def _measure(self, suffix: str, points: Sequence[Point]) -> list[float] | None:
        race = self.race

        def value(point: Point, trial: Any) -> float:
            setting = {name: value for name, value in point.items() if name != "seed"}
            # A setting of a search that is already slower than another one will not be chosen.
            done = [one.value for one in trial.study.trials if one.value is not None] if not suffix else []
            return self.score(race.run(setting, int(point["seed"]), self.target, min(done, default=math.inf)))

        study = Study(race.context, f"{race.workload.name}-{race.entrant.kind}-{self.purpose}{suffix}")
        return study.work(points, value)


def together(tracks: Sequence[Track]) -> Iterator[tuple[Track, Point, list[Tensor]]]:
    """All of these tracks, in their order, by all processes of the run: none waits while there is work in another."""
    found: dict[int, tuple[Point, list[Tensor]]] = {}
    while len(found) < len(tracks):
        before = len(found)
        for i, track in enumerate(tracks):
            if i not in found and (done := track.work()):
                found[i] = done
        if len(found) == before:
            time.sleep(PAUSE)
    for i, track in enumerate(tracks):
        yield track, *found[i]


def measure_targets(context: Context, names: Sequence[str]) -> dict[str, Any]:
    """AdamW's best setting for each workload, and the score that enough of its seeds reach with it in a budget."""
    path, every = context.folder / TARGETS, races(context, names, [BASELINE])
    tracks = [Track(race, "target", partial(within, seconds=race.budget)) for race in every]
    for track, setting, curves in together(tracks):
        race = track.race
        values = sorted(within(curve, race.budget) for curve in curves)
        needed = math.ceil(race.protocol.share * len(values))
        entry = {"target": values[needed - 1], "seeds": values, "setting": setting}
        entry |= {"data": race.task.data.fingerprint(), "protocol": race.protocol.digest(), "versions": versions()}
        with held(path):
            write_json(path, {**(read_json(path) if path.exists() else {}), race.workload.name: entry})
    return read_json(path)


def target_of(race: Race, path: Path) -> float:
    """The recorded target of a workload.

    Raises:
        ValueError: there is none, or it was measured under another protocol or with other data.
    """
    found = read_json(path).get(race.workload.name) if path.exists() else None
    remedy = f"run 'bayesgrad race targets --workloads {race.workload.name}' first"
    if found is None:
        raise ValueError(f"{path} has no target for {race.workload.name}: {remedy}.")
    for what, expected in (("protocol", race.protocol.digest()), ("data", race.task.data.fingerprint())):
        if found[what] != expected:
            raise ValueError(
                f"{path}: the target for {race.workload.name} is of other {what} ({found[what]}, not {expected}): "
                f"{remedy}, in another --out."
            )
    return found["target"]


# --- results ---


@dataclass(frozen=True)
class Finish:
    """How an optimizer did on a workload: of each seed, seconds and steps to the target, and the loss at the budget.

    Args:
        setting: that was chosen, or the usual one.
        at_edge: of the lr that a search could choose: the lowest or the highest was best.
    """

    workload: Workload
    entrant: Entrant
    setting: Point
    target: float
    seconds: Sequence[float]
    steps: Sequence[float]
    losses: Sequence[float]
    flops: float
    at_edge: bool = False

    @property
    def time(self) -> float:
        return statistics.median(self.seconds)


def track(race: Race, target: float, searched: bool) -> Track:
    score = partial(slowness, target=target, limit=race.protocol.limit * race.budget)
    if not race.entrant.to_target:
        score = partial(at, seconds=race.budget)
    return Track(race, "tuned" if searched else "usual", score, target, searched)


def finish(track: Track, setting: Point, curves: Sequence[Tensor]) -> Finish:
    """How an optimizer did on a workload, by the curves of its seeds."""
    race, target = track.race, track.target
    lrs = [point["lr"] for point in race.protocol.points(race.entrant)]
    return Finish(
        race.workload,
        race.entrant,
        setting,
        target,
        [time_to(curve, target) for curve in curves],
        [steps_to(curve, target) for curve in curves],
        [at(curve, race.budget) for curve in curves],
        race.flops(),
        track.searched and setting["lr"] in (min(lrs), max(lrs)),
    )


def plan(scale: str, seeds: int, names: Sequence[str], entrants: Sequence[str]) -> dict[str, float]:
    """Processor hours at most of each workload, targets included, if no run reaches its target."""
    protocol = SCALES[scale]
    budgets = sum(protocol.limit if ENTRANTS[kind].to_target else 1.0 for kind in entrants)
    budgets *= protocol.settings + 2 * seeds
    budgets += protocol.limit * ((0 if BASELINE in entrants else protocol.settings) + seeds)
    return {name: budgets * protocol.seconds(WORKLOADS[name]) / 3600 for name in names}


Finishes = Mapping[tuple[str, str], Finish]  # by workload and optimizer
