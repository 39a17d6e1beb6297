"""Runs that survive: folders and files that are whole or absent, also where several processes work on one run.

A run is a folder. `config.json` says what it is, `trials/<key>.pt` holds what a trial has measured, or its last
finished epoch, `trials/<key>.json` its metrics so far, `report.json`, `report.html` and the plots come at the end.
Files are written beside their name and renamed, so that whatever kills the process leaves whole files behind.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import torch

STALE = 60.0  # seconds after which a file that is being written belongs to no living process


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes beside `path` and renames, so that a reader finds the old file or the new one."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        write(partial)
        os.replace(partial, path)
    except OSError as error:
        if error.filename is None:  # a full disk is noticed by a write, which knows no name
            error.filename = os.fspath(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


def inside(folder: Path, name: str) -> Path:
    """The file of that name in a run's folder, for names that were read from a file.

    Raises:
        ValueError: the name, or what it links to, is outside of the folder, or it is no file.
    """
    path = folder / name
    if Path(name).name != name or not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{folder} names the file {name!r}, which is not in that folder; run it again with --resume.")
    try:
        found = path.is_file()
    except OSError:  # a name that is too long
        found = False
    if not found:
        raise ValueError(f"{path} is missing, though the report names it: run it again with --resume.")
    return path


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, lambda p: p.write_text(json.dumps(value, indent=1, allow_nan=True)))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object that was written by `write_json`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
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
    raw = path.read_bytes()
    try:
        return torch.load(io.BytesIO(raw), weights_only=True, map_location=device)
    except Exception:  # a damaged file may raise anything; nothing of it is called
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


def open_folder(path: Path, config: dict[str, Any], resume: bool) -> None:
    """Opens a folder for one run. Other processes may work on the same run, see `Study`.

    Raises:
        ValueError: the folder belongs to another run, or to the same and `resume` was not asked for.
        OSError: it cannot be written.
    """
    existing = path / "config.json"
    foreign = [p for p in path.iterdir() if not _ours(p)] if path.is_dir() else []
    if foreign and not existing.exists():
        raise ValueError(f"{path} holds files of something else: choose another --out.")
    (path / "trials").mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path / ".lock"):
        _claim(path, existing, config, resume)


def _claim(path: Path, existing: Path, config: dict[str, Any], resume: bool) -> None:
    """Notes what the run is, or checks that it is this one."""
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
    for partial in path.rglob("*.partial"):
        with contextlib.suppress(FileNotFoundError):
            if partial.stat().st_mtime < time.time() - STALE:  # of a process that was killed while it wrote
                partial.unlink()
    if not existing.exists():
        write_json(existing, config)


def _ours(path: Path) -> bool:
    """What a run that was killed at its very beginning may have left."""
    return path.name == ".lock" or path.suffix == ".partial" or (path.name == "trials" and not any(path.iterdir()))


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Waits until no other process makes this file, and keeps others from making it inside.

    The operating system takes the lock back when the process dies, however it dies.
    """
    lock = path.with_name(f"{path.name}.lock")
    with filelock.FileLock(lock):
        yield
        with contextlib.suppress(OSError):
            lock.unlink()
