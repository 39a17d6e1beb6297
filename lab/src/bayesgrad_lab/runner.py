"""Training runs that survive: a folder, a lock, a checkpoint each epoch, and the same numbers after a kill.

A run is a folder. `config.json` says what it is, `trials/<key>.pt` holds each trial's last finished epoch and
`trials/<key>.json` its metrics so far, `report.json`, `report.html` and the plots come at the end. Files are written
beside their name and renamed, so that whatever kills the process leaves whole files behind.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pickle
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesgrad import metrics
from bayesgrad.optimizer.layerwise import LayerwiseOptimizer
from bayesgrad_lab import networks
from bayesgrad_lab.dataset import Dataset
from bayesgrad_lab.methods import Amounts, method

EVALUATION_BATCH = 500
CURVE_EXAMPLES = 2000  # of the test part that an epoch's point of a curve looks at; final scores look at all
DIVERGED = 1e6  # a loss from which rules that invert what layers see cannot go on


# --- folders ---


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes beside `path` and renames, so that a reader finds the old file or the new one."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, lambda p: p.write_text(json.dumps(value, indent=1, allow_nan=True)))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object that was written by `write_json`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: delete it and run again with --resume.")
    return value


def write_tensors(path: Path, value: Any) -> None:
    """Saves through memory, so that a full disk is an OSError and not one of torch's own."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    write_atomically(path, lambda p: p.write_bytes(buffer.getvalue()))


def read_tensors(path: Path, device: str = "cpu") -> Any:
    """What `write_tensors` wrote, or None where the file is damaged: whatever it held can be computed again."""
    try:
        return torch.load(path, weights_only=True, map_location=device)
    except (RuntimeError, EOFError, IndexError, KeyError, ValueError, pickle.UnpicklingError):
        return None


def versions() -> dict[str, str]:
    import bayesgrad

    threads = torch.get_num_threads()
    return {
        "bayesgrad": bayesgrad.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {threads} thread{'s' * (threads > 1)}",
    }


@contextlib.contextmanager
def run_folder(path: Path, config: dict[str, Any], resume: bool) -> Iterator[Path]:
    """Opens a folder for one run alone.

    Raises:
        ValueError: the folder belongs to another run, or to the same and `resume` was not asked for.
        OSError: it cannot be written.
    """
    existing = path / "config.json"
    foreign = [p for p in path.iterdir() if not _ours(p)] if path.is_dir() else []
    if foreign and not existing.exists():
        raise ValueError(f"{path} holds files of something else: choose another --out.")
    if existing.exists():
        if not resume:
            raise ValueError(f"{path} holds a run already: pass --resume to continue it, or choose another --out.")
        before = read_json(existing)
        changed = sorted(k for k in {*before, *config} if before.get(k) != config.get(k))
        if changed:
            k = changed[0]
            raise ValueError(
                f"{path} was started with {k}={before.get(k)!r}, not {config.get(k)!r}: "
                "resume with the same arguments, or choose another --out."
            )
    (path / "trials").mkdir(parents=True, exist_ok=True)
    with _lock(path / ".lock", path):
        for partial in path.rglob("*.partial"):
            partial.unlink()  # of a process that was killed while it wrote
        if not existing.exists():
            write_json(existing, config)
        yield path


def _ours(path: Path) -> bool:
    """What a run that was killed at its very beginning may have left."""
    return path.name == ".lock" or path.suffix == ".partial" or (path.name == "trials" and not any(path.iterdir()))


@contextlib.contextmanager
def _lock(path: Path, folder: Path) -> Iterator[None]:
    """A lock that the operating system takes back when the process dies, however it dies."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is writing into {folder}: wait for it, or choose another --out."
            ) from None
        yield


# --- trials ---


@dataclass(frozen=True)
class Trial:
    """One training run: everything that its numbers depend on.

    Args:
        data, network, method: names.
        lr: where the method starts.
        seed: of the weights and of the order of examples.
        milestones: epochs after which lr falls tenfold.
        decay: L2 strength in SGD's terms.
        purpose: "search" or "final", for the file's name.
    """

    network: str
    method: str
    lr: float
    seed: int
    epochs: int
    batch_size: int
    milestones: tuple[int, ...] = ()
    decay: float = 0.0
    augment: bool = False
    large: bool = False
    purpose: str = "final"
    data: str = "data"

    @property
    def key(self) -> str:
        return f"{self.purpose}-{self.data}-{self.network}-{self.method}-lr{self.lr:g}-seed{self.seed}"


@dataclass
class History:
    """What a trial has measured: a row for each epoch, and at last the final scores."""

    rows: list[dict[str, float]] = field(default_factory=list)
    final: dict[str, float] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)  # not reproducible: time and memory


Progress = Callable[[Trial, int, int, float, float, float], None]  # trial, epoch, step, loss, error, steps/s


def train(trial: Trial, data: Dataset, folder: Path, device: str = "cpu", progress: Progress | None = None) -> History:
    """Runs a trial, or what is left of it, and returns its history.

    Nothing is chosen by what is seen of the test part of `data`: some of it every epoch, for the curves, and all of it
    once at the end, for the scores. In a search the caller passes a data set whose test part is held-out training data.
    """
    record, checkpoint = folder / "trials" / f"{trial.key}.json", folder / "trials" / f"{trial.key}.pt"
    if record.exists():
        saved = read_json(record)
        if saved.get("final"):
            checkpoint.unlink(missing_ok=True)
            return History(saved["rows"], saved["final"], saved["cost"])
    model = networks.build(trial.network, data, trial.seed, trial.large).to(device)
    losses_per_example = data.train_y[0].numel()  # the loss is a mean over the positions of sequences too
    optimizers = method(trial.method).build(
        model, trial.lr, Amounts(trial.batch_size, losses_per_example, len(data.train_x), trial.seed), trial.decay
    )
    schedulers = [torch.optim.lr_scheduler.MultiStepLR(o, list(trial.milestones)) for o in optimizers]
    parts: list[Any] = [model, *optimizers, *schedulers]
    history = History(cost={"seconds": 0.0, "steps": 0.0, "memory": 0.0})
    if checkpoint.exists() and (saved := read_tensors(checkpoint, device)):
        for part, state in zip(parts, saved["parts"]):
            part.load_state_dict(state)
        history = History(**saved["history"])
    _reset_peak(device)
    for epoch in range(len(history.rows), trial.epochs):
        loss, error, seconds, steps = _epoch(trial, epoch, model, optimizers, data, device, progress)
        for scheduler in schedulers:
            scheduler.step()
        scores = evaluate(model, data.test_x[:CURVE_EXAMPLES], data.test_y[:CURVE_EXAMPLES], device)
        history.rows.append({"epoch": epoch + 1, "train_loss": loss, "train_error": error, **scores})
        history.cost["seconds"] += seconds
        history.cost["steps"] += steps
        history.cost["memory"] = max(history.cost["memory"], _peak(device))
        state = {"parts": [part.state_dict() for part in parts], "history": asdict(history)}
        write_tensors(checkpoint, state)
        write_json(record, asdict(history))
    history.final = final_scores(model, data, device)
    write_json(record, asdict(history))
    checkpoint.unlink(missing_ok=True)
    return history


def _epoch(
    trial: Trial, epoch: int, model: nn.Module, optimizers: list, data: Dataset, device: str, progress: Progress | None
) -> tuple[float, float, float, int]:
    generator = torch.Generator().manual_seed(1_000_003 * trial.seed + epoch)
    order = torch.randperm(len(data.train_x), generator=generator)
    model.train()
    total = torch.zeros(2, dtype=torch.float64)
    start, count = time.perf_counter(), 0
    batches = order.split(trial.batch_size)
    for step, chosen in enumerate(batches, 1):
        x, y = data.train_x[chosen], data.train_y[chosen]
        if trial.augment:
            x = augmented(x, generator)
        x, y = x.to(device), y.to(device)
        for optimizer in optimizers:
            optimizer.zero_grad()
        with drawn(optimizers):
            outputs = model(x)
            loss = F.cross_entropy(outputs.flatten(0, -2), y.flatten())
            going = loss.item() < DIVERGED or not any(isinstance(o, LayerwiseOptimizer) for o in optimizers)
            if going:
                _backward(optimizers, outputs, loss)
        if going:
            _step(trial, model, optimizers)
        else:
            _give_up(model)
        with torch.no_grad():
            wrong = (outputs.argmax(-1) != y).double().mean()
        total += torch.stack([loss.detach().double(), wrong]).cpu() * len(chosen)
        count += len(chosen)
        if progress and (step % 10 == 0 or step == len(batches)):
            mean = (total / count).tolist()
            progress(trial, epoch, step, mean[0], mean[1], step / (time.perf_counter() - start))
    loss, error = (total / count).tolist()
    return loss, error, time.perf_counter() - start, len(batches)


@contextlib.contextmanager
def drawn(optimizers: Iterable[Any]) -> Iterator[None]:
    """Weights drawn from the belief of each optimizer that takes gradients there; passes run inside."""
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            if getattr(optimizer, "takes_draws", False):
                stack.enter_context(optimizer.sampled())
        yield


def _backward(optimizers: list, outputs: Tensor, loss: Tensor) -> None:
    for optimizer in optimizers:
        if hasattr(optimizer, "observe"):
            optimizer.observe(outputs)
    loss.backward()


def _step(trial: Trial, model: nn.Module, optimizers: list) -> None:
    for optimizer in optimizers:
        try:
            optimizer.step()
        except (ValueError, FloatingPointError) as error:  # what a layer sees has grown too large to be inverted
            if not isinstance(optimizer, LayerwiseOptimizer):
                raise
            warnings.warn(f"{trial.method} at lr {trial.lr:.2g} gave up: {error}", UserWarning, stacklevel=2)
            _give_up(model)


@torch.no_grad()
def _give_up(model: nn.Module) -> None:
    """Leaves a model that has no scores."""
    for p in model.parameters():
        p.fill_(math.nan)


def augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each image shifted by up to four pixels and mirrored half of the time."""
    size = x.shape[-1]
    padded = F.pad(x, (4, 4, 4, 4))
    shift = torch.randint(0, 9, (len(x), 2), generator=generator)
    mirror = torch.rand(len(x), generator=generator) < 0.5
    rows = (torch.arange(size) + shift[:, :1])[:, None, :, None]
    columns = torch.arange(size).expand(len(x), size).clone()
    columns[mirror] = columns[mirror].flip(1)
    columns = (columns + shift[:, 1:])[:, None, None, :]
    return padded[torch.arange(len(x))[:, None, None, None], torch.arange(x.shape[1])[:, None, None], rows, columns]


# --- scores ---


@torch.no_grad()
def log_probabilities(model: nn.Module, x: Tensor, device: str) -> Tensor:
    """(n, classes) in evaluation mode; positions of a sequence count as examples."""
    model.eval()
    parts = [model(part.to(device)).log_softmax(-1).cpu() for part in x.split(EVALUATION_BATCH)]
    return torch.cat(parts).flatten(0, -2)


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
