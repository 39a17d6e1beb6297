"""The one training loop, and what is around it: schedules, checkpoints, statistics of BatchNorm, and scores.

`steps` is the loop. It yields after each step, so that whoever consumes it evaluates, probes or stops between two of
them. `fit` is the loop over the epochs of a task, watched; `train` is a whole trial with a checkpoint each epoch.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR

from bayesgrad import metrics
from bayesgrad_lab import networks
from bayesgrad_lab.context import Context, Trial
from bayesgrad_lab.dataset import Dataset
from bayesgrad_lab.methods import Method
from bayesgrad_lab.store import held, read_json, read_tensors, write_json, write_tensors
from bayesgrad_lab.task import Loss, Task, cross_entropy, shuffled

EVALUATION_BATCH = 500
CURVE_EXAMPLES = 2000  # of the test part that an epoch's point of a curve looks at; final scores look at all
STATISTICS = 1000  # training examples that BatchNorm's statistics are estimated from
DIVERGED = 1e6  # a loss from which rules that invert what layers see cannot go on


# --- the loop ---


@dataclass(frozen=True)
class Step:
    """What a step has left.

    Args:
        number: from 0.
        loss: before the step.
        seconds: of it.
        lost: there was no step, and training cannot go on.
        reason: why, in the words of the optimizer.
    """

    number: int
    loss: float
    outputs: Tensor
    labels: Tensor
    seconds: float
    lost: bool = False
    reason: str = ""

    @property
    def error(self) -> float:
        """The fraction of wrong labels in the batch; nan where labels are no classes."""
        if self.labels.is_floating_point():
            return math.nan
        return (self.outputs.detach().argmax(-1) != self.labels).double().mean().item()


def steps(
    model: nn.Module,
    optimizers: Sequence[Any],
    batches: Iterable[tuple[Tensor, Tensor]],
    loss_fn: Loss = cross_entropy,
    *,
    observed: Callable[[int, Tensor], Tensor | None] | None = None,
    noise: Callable[[int], Any] | None = None,
    schedules: Sequence[Any] = (),
    limit: float | None = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Step]:
    """Trains, and yields after each step.

    Args:
        optimizers: those that step together, of `bayesgrad`, of torch or of others.
        observed: (number of the step, outputs) -> the outputs that an optimizer observes, None for none of them; the
            outputs of the batch if it is not given.
        noise: number of the step -> the noise that weights are drawn with, in place of the optimizers' own.
        schedules: stepped after each step.
        limit: a loss that is not below it ends in no step, and `Step.lost`; None to go on whatever the loss is.
        clock: that measures seconds.
    """
    for number, (x, y) in enumerate(batches):
        start, failed = clock(), []
        with contextlib.ExitStack() as stack:
            given = [] if noise is None else [noise(number)]
            for optimizer in optimizers:
                stack.enter_context(getattr(optimizer, "sampled", contextlib.nullcontext)(*given))
                optimizer.zero_grad()
            outputs = model(x)
            loss = loss_fn(outputs, y)
            value = loss.item()
            lost = limit is not None and not value < limit
            if not lost:
                with _inverting(optimizers) as failed:
                    _observe(optimizers, outputs if observed is None else observed(number, outputs), loss)
                    loss.backward()
        if not lost and not failed:
            with _inverting(optimizers) as failed:
                for part in (*optimizers, *schedules):
                    part.step()
        yield Step(number, value, outputs, y, clock() - start, lost or bool(failed), "".join(failed))


@contextlib.contextmanager
def _inverting(optimizers: Sequence[Any]) -> Iterator[list[str]]:
    """Notes why an optimizer that inverts what layers see cannot go on, where that has grown too large for it."""
    failed: list[str] = []
    try:
        yield failed
    except (ValueError, FloatingPointError) as error:
        if isinstance(error, RuntimeError) or not uses_layers(optimizers):  # a chain that diverged says so itself
            raise
        failed.append(str(error))


def _observe(optimizers: Sequence[Any], outputs: Tensor | None, loss: Tensor) -> None:
    for optimizer in optimizers:
        if outputs is not None and hasattr(optimizer, "observe"):
            optimizer.observe(outputs, loss=loss)


def uses_layers(optimizers: Sequence[Any]) -> bool:
    """Whether one of the optimizers looks at the layers of the model; torch's own do not say what they need."""
    return any(hasattr(optimizer, "needs") and optimizer.needs.model for optimizer in optimizers)


def fit(
    context: Context,
    trial: Trial,
    task: Task,
    model: nn.Module,
    optimizers: Sequence[Any],
    *,
    cosine: bool = True,
    order: torch.Generator | None = None,
    seed: int | None = None,
    **options: Any,
) -> Iterator[Step]:
    """All epochs of a task, in a random order, watched.

    Args:
        cosine: lr falls to zero by a cosine, step by step; else it is constant.
        order: draws the order of examples and their augmentation; from the trial's seed if it is not given.
        seed: in place of the trial's.
        options: further arguments of `steps`.
    """
    seed = trial.seed if seed is None else seed
    assert seed is not None
    order = torch.Generator().manual_seed(seed) if order is None else order
    total = max(1, task.epochs * task.steps)
    rows = shuffled(len(task.data.train_x), task.size, order, task.epochs)
    options = {"loss_fn": task.loss, "clock": context.clock, **options}
    options["schedules"] = [CosineAnnealingLR(optimizer, total) for optimizer in optimizers] if cosine else []
    with networks.seeded(seed):  # for dropout's masks
        model.train()
        found = steps(model, optimizers, task.batches(rows, context.device, order), **options)
        yield from context.watch(trial, found, task.epochs, task.steps)


def epoch_seconds(found: Iterator[Step], task: Task) -> Tensor:
    """Runs `fit` to its end: the seconds of each epoch, all nan where training cannot go on."""
    seconds = torch.zeros(task.epochs, dtype=torch.float64)
    for step in found:
        if step.lost:
            return torch.full_like(seconds, math.nan)
        seconds[step.number // task.steps] += step.seconds
    return seconds


# --- a whole trial ---


@dataclass
class History:
    """What a trial has measured: a row for each epoch, and at last the final scores."""

    rows: list[dict[str, float]] = field(default_factory=list)
    final: dict[str, float] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)  # not reproducible: time and memory

    def score(self, name: str) -> float:
        """A final score, the lowest of all epochs ("best ..."), or a cost."""
        if name == "steps/s":
            return self.cost["steps"] / max(self.cost["seconds"], 1e-9)
        if name == "memory":
            return self.cost["memory"] / 2**20
        if name.startswith("best "):
            return min(row[name.removeprefix("best ")] for row in self.rows)
        return self.final[name]


def train(
    context: Context,
    task: Task,
    method: Method,
    lr: float,
    seed: int,
    purpose: str = "final",
    report: Callable[[int, float], None] | None = None,
) -> History:
    """Runs a trial, or what is left of it, and returns its history.

    Nothing is chosen by what is seen of the test part of the task's data: some of it every epoch, for the curves, and
    all of it once at the end, for the scores. In a search the caller passes a task whose test part is held-out training
    data.

    Args:
        report: called with the number and the NLL of each epoch; it may raise to end the trial.
    """
    trial = Trial(purpose, task.key, method.kind, {"lr": lr}, seed)
    record, checkpoint = (context.folder / "trials" / f"{trial.key}.{end}" for end in ("json", "pt"))
    with held(record):
        if record.exists():
            saved = read_json(record)
            if saved.get("final"):
                checkpoint.unlink(missing_ok=True)
                return History(saved["rows"], saved["final"], saved["cost"])
        with context.hearing():
            return _train(context, trial, task, method, record, checkpoint, report)


def _train(
    context: Context,
    trial: Trial,
    task: Task,
    method: Method,
    record: Path,
    checkpoint: Path,
    report: Callable[[int, float], None] | None,
) -> History:
    lr, seed, data = trial.settings["lr"], trial.seed or 0, task.data
    model = task.model(seed).to(context.device)
    optimizers = method.build(model, task, lr, seed)
    schedules = [MultiStepLR(optimizer, list(task.milestones)) for optimizer in optimizers]
    parts: list[Any] = [model, *optimizers, *schedules]
    history = History(cost={"seconds": 0.0, "steps": 0.0, "memory": 0.0})
    if checkpoint.exists() and (saved := read_tensors(checkpoint, context.device)):
        for part, state in zip(parts, saved["parts"]):
            part.load_state_dict(state)
        history = History(**saved["history"])
    _reset_peak(context.device)
    done = len(history.rows)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for epoch in range(done, task.epochs):
            generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
            yield from task.batches(shuffled(len(data.train_x), task.size, generator, 1), context.device, generator)

    model.train()
    total, seconds = torch.zeros(2, dtype=torch.float64), 0.0
    found = steps(model, optimizers, batches(), task.loss, limit=DIVERGED if uses_layers(optimizers) else None)
    for step in context.watch(trial, found, task.epochs, task.steps, done * task.steps):
        total += torch.tensor([step.loss, step.error], dtype=torch.float64) * len(step.labels)
        seconds += step.seconds
        if step.lost:
            if step.reason:
                context.warn(f"{method.kind} at lr {lr:.2g} gave up: {step.reason}")
            _give_up(model)
        if (step.number + 1) % task.steps:
            continue
        for schedule in schedules:
            schedule.step()
        loss, error = (total / len(data.train_x)).tolist()
        scores = evaluate(model, data.test_x[:CURVE_EXAMPLES], data.test_y[:CURVE_EXAMPLES], context.device)
        history.rows.append({"epoch": len(history.rows) + 1, "train_loss": loss, "train_error": error, **scores})
        history.cost["seconds"] += seconds
        history.cost["steps"] += task.steps
        history.cost["memory"] = max(history.cost["memory"], _peak(context.device))
        write_tensors(checkpoint, {"parts": [part.state_dict() for part in parts], "history": asdict(history)})
        write_json(record, asdict(history))
        total, seconds = torch.zeros_like(total), 0.0
        if report:
            report(len(history.rows), scores["nll"])
        model.train()
    history.final = final_scores(model, data, context.device)
    write_json(record, asdict(history))
    checkpoint.unlink(missing_ok=True)
    return history


@torch.no_grad()
def _give_up(model: nn.Module) -> None:
    """Leaves a model that has no scores."""
    for p in model.parameters():
        p.fill_(math.nan)


# --- scores ---


@torch.no_grad()
def in_batches(predict: Callable[[Tensor], Tensor], x: Tensor, device: str, size: int = EVALUATION_BATCH) -> Tensor:
    """Predictions of many examples, on the CPU."""
    return torch.cat([predict(part.to(device)).cpu() for part in x.split(size)])


def log_probabilities(model: nn.Module, x: Tensor, device: str) -> Tensor:
    """(n, classes) in evaluation mode; positions of a sequence count as examples."""
    model.eval()
    return in_batches(lambda part: model(part).log_softmax(-1), x, device).flatten(0, -2)


def evaluate(model: nn.Module, x: Tensor, y: Tensor, device: str = "cpu") -> dict[str, float]:
    """Error and negative log-likelihood."""
    logs = log_probabilities(model, x, device)
    if not bool(torch.isfinite(logs.exp()).all()):
        return {"error": math.nan, "nll": math.nan}
    return {
        "error": (logs.argmax(1) != y.flatten()).double().mean().item(),
        "nll": F.nll_loss(logs.double(), y.flatten()).item(),
    }


def final_scores(model: nn.Module, data: Dataset, device: str = "cpu") -> dict[str, float]:
    """Error, NLL, calibration error (15 bins) and Brier score on the test part."""
    return metrics.classification(log_probabilities(model, data.test_x, device), data.test_y.flatten())


@torch.no_grad()
def settle(model: nn.Module, data: Dataset, device: str = "cpu") -> Tensor | None:
    """Estimates BatchNorm's statistics at the weights that are left, not at those of training; leaves evaluation mode.

    Returns:
        The training examples that they were estimated from, None for a network without BatchNorm.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    seen = data.train_x[:STATISTICS].to(device) if norms else None
    if seen is not None:
        with networks.seeded(0):  # for dropout's masks
            model.train()(seen)
    model.eval()
    return seen


# --- memory ---


def _reset_peak(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == "linux":
        with contextlib.suppress(OSError):  # some containers forbid it: the peak is then the process's
            Path("/proc/self/clear_refs").write_text("5")


def _peak(device: str) -> float:
    """Peak memory in bytes since the last reset: of the device, or of the process."""
    if device.startswith("cuda"):
        return float(torch.cuda.max_memory_allocated())
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024.0 * float(line.split()[1])
    import resource

    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)
