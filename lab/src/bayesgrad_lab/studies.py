"""Choosing settings on what is not tested on, by trials of an Optuna study that several processes may work on.

A study has all settings before the first is tried, so that what is tried does not depend on who tries it. Each process
of a run takes trials that wait, waits for those that others have, and takes up those of a process that has died.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import filelock
import optuna
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages._heartbeat import get_heartbeat_thread
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from bayesgrad_lab.context import Context

SEARCH_SEED = 1000  # finals count from 0
JOURNAL = "study.journal"
PAUSE = 0.2  # seconds between two looks at the trials of others
BEAT, SILENCE = 60, 180  # seconds between the signs of life of a database's worker, and until it counts as dead
PRUNERS: Mapping[str, Callable[[], optuna.pruners.BasePruner]] = {
    "asha": optuna.pruners.SuccessiveHalvingPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
}
Setting = tuple[float, ...]
Point = Mapping[str, float]
Report = Callable[[int, float], None]
Score = Callable[[Setting, int, Report], float]
T = TypeVar("T")


class Study:
    """Points of one search, each measured once, by whichever process of the run comes first.

    The storage is a journal in the run's folder, another journal ("journal:PATH") or a database (an URL of
    SQLAlchemy). A process that works on a journal's trial holds a lock beside the journal, which the operating system
    takes back when the process dies; a database has Optuna's signs of life.
    """

    def __init__(self, context: Context, name: str) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        config = context.folder / "config.json"
        run = hashlib.sha256(config.read_bytes()).hexdigest()[:8] if config.exists() else ""
        self.journal, self.queue, self.storage = _opened(context)
        self.study = optuna.create_study(
            study_name=" ".join(filter(None, [context.folder.name, run, name])),
            storage=self.storage,
            load_if_exists=True,
            sampler=optuna.samplers.RandomSampler(0),  # never asked: every trial comes with its parameters
            pruner=PRUNERS[context.pruner]() if context.pruner else optuna.pruners.NopPruner(),
        )
        self.id = self.storage.get_study_id_from_name(self.study.study_name)

    def measure(self, points: Sequence[Point], value: Callable[[Point, optuna.Trial], float]) -> list[float]:
        """The value of each point; infinite for one that was pruned, or whose value is not finite."""
        while (found := self.work(points, value)) is None:
            time.sleep(PAUSE)
        return found

    def work(self, points: Sequence[Point], value: Callable[[Point, optuna.Trial], float]) -> list[float] | None:
        """Measures all points that no other process works on. Values of all; None while there are not all of them."""
        while True:
            self._take_up()
            found = self._enqueue(points)
            if len(found) == len(points):
                return found
            with self._next() as trial:
                if trial is None:
                    return None
                self._run(trial, value)

    def _take_up(self) -> None:
        """Fails the trials of processes that have died, which are enqueued anew, and removes locks that they left."""
        if self.journal is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                optuna.storages.fail_stale_trials(self.study)
            return
        for trial in self._trials():
            left = trial.state.is_finished() and self._lock_path(trial).exists()  # by a kill after its last line
            if trial.state is not TrialState.RUNNING and not left:
                continue
            with self._held(trial) as free:
                if free and self._state(trial) is TrialState.RUNNING:
                    self.study.tell(trial.number, state=TrialState.FAIL)

    def _enqueue(self, points: Sequence[Point]) -> list[float]:
        """Enqueues the points that no trial has; returns the values that there are."""
        with self.queue:
            kept = [trial for trial in self._trials() if trial.state is not TrialState.FAIL]
            trials = {tuple(trial.params.items()): trial for trial in reversed(kept)}  # the first of equal ones
            for point in points:
                if tuple(point.items()) not in trials:
                    state, ranges = TrialState.WAITING, {name: _range(name, points) for name in point}
                    self.study.add_trial(
                        optuna.create_trial(state=state, params=dict(point), distributions=ranges)  # pyright: ignore
                    )
        found = [trials.get(tuple(point.items())) for point in points]
        return [_value(trial) for trial in found if trial is not None and trial.state.is_finished()]

    @contextlib.contextmanager
    def _next(self) -> Iterator[optuna.Trial | None]:
        """A trial that waits, held against other processes; None if there is none."""
        for trial in self._trials(TrialState.WAITING):
            with self._held(trial) as free:
                if free and self._state(trial) is TrialState.WAITING:
                    number = self._number(trial)
                    if self.storage.set_trial_state_values(number, TrialState.RUNNING):
                        with get_heartbeat_thread(number, self.storage):
                            yield optuna.Trial(self.study, number)
                        return
        yield None

    def _run(self, trial: optuna.Trial, value: Callable[[Point, optuna.Trial], float]) -> None:
        try:
            found = value(trial.params, trial)
            self.study.tell(trial, found if math.isfinite(found) else math.inf)
        except optuna.TrialPruned:
            self.study.tell(trial, state=TrialState.PRUNED)
        except BaseException:
            self.study.tell(trial, state=TrialState.FAIL)
            raise

    @contextlib.contextmanager
    def _held(self, trial: FrozenTrial) -> Iterator[bool]:
        """Whether this process holds a trial; what its state is has to be asked again then."""
        if self.journal is None:
            yield True
            return
        path = self._lock_path(trial)
        lock = filelock.FileLock(path)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            yield False
            return
        try:
            yield True
            if self._state(trial).is_finished():
                path.unlink(missing_ok=True)
        finally:
            lock.release()

    def _lock_path(self, trial: FrozenTrial) -> Path:
        assert self.journal is not None
        return self.journal.with_name(f"{self.journal.name}.{self.id}.{trial.number}.lock")

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=states or None)

    def _number(self, trial: FrozenTrial) -> int:
        """Its number in the storage."""
        return self.storage.get_trial_id_from_study_id_trial_number(self.id, trial.number)

    def _state(self, trial: FrozenTrial) -> TrialState:
        return self.storage.get_trial(self._number(trial)).state


def _opened(context: Context) -> tuple[Path | None, Any, Any]:
    """The journal's file, where there is one; what a process holds while it enqueues; and the storage."""
    url = context.storage or f"journal:{context.folder / JOURNAL}"
    if url.startswith("journal:"):
        path = Path(url.removeprefix("journal:")).absolute()
        lock: Any = filelock.FileLock(f"{path}.lock")  # Optuna's own would be in the way for 30 s after a kill
        return path, lock, _journal(path, lock)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of the signs of life
            return None, contextlib.nullcontext(), RDBStorage(url, heartbeat_interval=BEAT, grace_period=SILENCE)
    except Exception as error:  # whatever SQLAlchemy and a driver may raise
        words = str(error).partition("\n")[0]
        raise ValueError(
            f"--storage {url} cannot be used ({words}): name journal:PATH, or a database that SQLAlchemy can open."
        ) from error


def _journal(path: Path, lock: Any) -> JournalStorage:
    try:
        with lock:
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        if not all(isinstance(json.loads(line), dict) for line in lines) or (lines and lines[-1][-1:] != b"\n"):
            raise ValueError("a line is not whole")  # Optuna would notice it after the next line is written
        return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
    except OSError:
        raise
    except Exception as error:  # a damaged line may raise anything
        words = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is damaged ({words}): delete it and run again with --resume.") from error


def _range(name: str, points: Sequence[Point]) -> FloatDistribution | IntDistribution:
    values = [point[name] for point in points]
    if all(isinstance(value, int) for value in values):
        return IntDistribution(int(min(values)), int(max(values)))
    return FloatDistribution(min(values), max(values))


def _value(trial: FrozenTrial) -> float:
    return trial.values[0] if trial.state is TrialState.COMPLETE else math.inf


def _report(trial: optuna.Trial, epoch: int, value: float) -> None:
    trial.report(value, epoch)
    if trial.should_prune():
        raise optuna.TrialPruned


# --- searches ---


def search(
    context: Context,
    study: str,
    names: Sequence[str],
    settings: Iterable[Setting],
    score: Score,
    seed: int = SEARCH_SEED,
    confirm: Sequence[int] = (),
) -> dict[Setting, float]:
    """The score of each setting, the lower the better; one that is not finite counts as infinite.

    Args:
        study: its name in the run's storage.
        names: of the values of a setting.
        score: of a setting and a seed; it may call its third argument with an epoch and the score so far, which ends a
            trial that the run's pruner gives up.
        confirm: further seeds. In the order of the first score, settings are scored with these as well, until the
            lowest mean is below what is left, and these means alone are returned: what went well by luck, close to
            divergence, is not chosen.
    """
    trials, settings = Study(context, study), list(settings)

    def value(point: Point, trial: optuna.Trial) -> float:
        setting, seed = tuple(point[name] for name in names if name in point), int(point["seed"])
        return score(setting, seed, partial(_report, trial))

    def scores(chosen: Iterable[Setting], seeds: Sequence[int]) -> list[float]:
        points = [{**dict(zip(names, setting)), "seed": one} for setting in chosen for one in seeds]
        return trials.measure(points, value)

    tried = dict(zip(settings, scores(settings, [seed])))
    if not confirm:
        return tried
    means: dict[Setting, float] = {}
    for setting in sorted(tried, key=tried.__getitem__):
        if means and min(means.values()) <= tried[setting]:
            break
        means[setting] = statistics.mean([tried[setting], *scores([setting], confirm)])
    return means


def each(
    context: Context,
    study: str,
    settings: Mapping[str, float],
    seeds: Iterable[int],
    run: Callable[[int], T],
    score: Callable[[T], float],
) -> list[T]:
    """The final runs of all seeds, which the run's folder keeps; `score` is what the storage shows of one.

    Args:
        study: the name of the search that the settings come from.
    """
    points = [{**settings, "seed": seed} for seed in seeds]
    final = Study(context, f"{study}-final")
    final.measure(points, lambda point, _: score(run(int(point["seed"]))))
    return [run(int(point["seed"])) for point in points]


def grid(*values: Sequence[float]) -> list[Setting]:
    """All combinations, of lr and a second hyper-parameter, say."""
    return list(itertools.product(*values))


def best(tried: Mapping[Setting, float]) -> Setting:
    """The setting with the lowest score, the first of equal ones."""
    return min(tried, key=tried.__getitem__)


def chosen(
    context: Context,
    study: str,
    title: str,
    names: Sequence[str],
    settings: Iterable[Setting],
    score: Score,
) -> tuple[Setting, dict[Setting, float]]:
    """The best setting and the score of each; which of the values chosen are at the edge of their grid is said."""
    tried = search(context, study, names, settings, score)
    setting = best(tried)
    words = [f"{name} {value:g}" for name, value in zip(names, setting)]
    at_edge = [words[i] for i in edges(tried, setting, 3)]
    if at_edge:
        context.say(f"{title}: {' and '.join(at_edge)} at the edge of the search")
    return setting, tried


def edges(settings: Iterable[Setting], chosen: Setting, least: int = 2) -> dict[int, str]:
    """Which values of the chosen setting are the lowest or highest tried, where there are `least` to choose from."""
    found = {}
    for i, (value, tried) in enumerate(zip(chosen, zip(*settings))):
        if len(set(tried)) >= least and value in (min(tried), max(tried)):
            found[i] = "lowest" if value == min(tried) else "highest"
    return found
