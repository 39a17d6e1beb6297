"""Storage of weight samples: in memory up to a limit, then in files."""

from __future__ import annotations

import copy
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LIMIT = 1 << 30  # bytes of samples in memory
PATTERN = "samples-*.safetensors"


class Samples:
    """Samples of weights, name -> (rows, *shape), in the order in which they were appended.

    The samples in memory take at most `limit` bytes (while a file is written; else half of that). Older ones are in
    safetensors files `samples-000000.safetensors` and so on, which are written atomically.

    Args:
        limit: in bytes; None for no limit.
        folder: for the files; None for a temporary folder, which is deleted with this object and cannot be resumed.
    """

    def __init__(self, limit: int | None = LIMIT, folder: str | os.PathLike | None = None) -> None:
        if limit is not None and limit < 0:
            raise ValueError(f"limit must be a number of bytes, or None for no limit, got {limit}.")
        self.limit = limit
        self.folder = None if folder is None else Path(folder)
        self._persistent = folder is not None
        self._rows: list[dict[str, Tensor]] = []  # in memory, (k, *shape) each
        self._bytes = 0
        self._files: list[int] = []  # rows of each
        self._other_run = self.folder is not None and any(self.folder.glob(PATTERN))
        self._origin: Samples | None = None

    @classmethod
    def open(cls, folder: str | os.PathLike) -> Samples:
        """Opens the files that an earlier process wrote."""
        samples = cls(folder=folder)
        samples._files = [samples._count(path) for path in sorted(Path(folder).glob(PATTERN))]
        samples._other_run = False
        if not samples._files:
            raise ValueError(f"{os.fspath(folder)} contains no samples: pass the folder of a run that wrote samples.")
        return samples

    def __len__(self) -> int:
        return sum(self._files) + sum(_rows(block) for block in self._rows)

    @property
    def stored(self) -> bool:
        """Whether some samples are in files."""
        return bool(self._files)

    def snapshot(self) -> Samples:
        """A copy that does not receive later samples."""
        other = copy.copy(self)
        other._rows, other._files, other._origin = list(self._rows), list(self._files), self  # which owns the folder
        return other

    def append(self, rows: Mapping[str, Tensor]) -> None:
        """Adds copies of these rows, name -> (k, *shape)."""
        if self._other_run:
            raise ValueError(f"{self.folder} contains samples of another run: load its state or choose another folder.")
        block = {name: tensor.detach().cpu().clone() for name, tensor in rows.items()}
        self._rows.append(block)
        self._bytes += sum(tensor.nbytes for tensor in block.values())
        if self.limit is not None and self._bytes > self.limit // 2:
            self._write_file()

    def blocks(self) -> Iterator[dict[str, Tensor]]:
        """All samples in order, one file at a time."""
        yield from (self._read(i) for i in range(len(self._files)))
        if self._rows:
            yield _joined(self._rows)

    def row(self, index: int) -> dict[str, Tensor]:
        """One sample; nothing else of its file is read."""
        for i, count in enumerate(self._files):
            if index < count:
                return self._read(i, index)
            index -= count
        self._rows = [_joined(self._rows)] if len(self._rows) > 1 else self._rows
        return {name: tensor[index] for name, tensor in self._rows[0].items()}

    # --- files ---

    def _path(self, index: int) -> Path:
        if self.folder is None:
            made = tempfile.TemporaryDirectory(prefix="bayesgrad-samples-", ignore_cleanup_errors=True)
            weakref.finalize(self, made.cleanup)
            self.folder = Path(made.name)
        return self.folder / f"samples-{index:06d}.safetensors"

    def _write_file(self) -> None:
        from safetensors.torch import save_file

        path = self._path(len(self._files))
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        block = _joined(self._rows)
        try:
            save_file(block, partial)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        self._files.append(_rows(block))
        self._rows, self._bytes = [], 0

    def _read(self, index: int, row: int | None = None) -> dict[str, Tensor]:
        with _opened(self._path(index)) as file:
            if row is None:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return {name: file.get_slice(name)[row] for name in file.keys()}  # noqa: SIM118

    @staticmethod
    def _count(path: Path) -> int:
        with _opened(path) as file:
            return file.get_slice(list(file.keys())[0]).get_shape()[0]  # noqa: RUF015

    # --- resuming ---

    def state_dict(self) -> dict[str, Any]:
        """The samples in memory and the number of samples in each file; files are not copied."""
        if self._files and not self._persistent:
            raise ValueError(
                "samples in a temporary folder cannot be resumed: pass folder= for a permanent one, or a larger limit."
            )
        return {"files": list(self._files), "rows": _joined(self._rows) if self._rows else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a saved state. Files that were written after it are overwritten when the run continues."""
        for i, count in enumerate(state["files"]):
            if (found := self._count(self._path(i))) != count:
                raise ValueError(f"{self._path(i)} contains {found} samples, expected {count}: sample again.")
        self._files, self._other_run = list(state["files"]), False
        self._rows = [{name: tensor.clone() for name, tensor in state["rows"].items()}] if state["rows"] else []
        self._bytes = sum(tensor.nbytes for block in self._rows for tensor in block.values())


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file of samples; raises ValueError if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (FileNotFoundError, SafetensorError, IndexError) as error:
        raise ValueError(f"{path}, a file of samples, is missing or damaged ({error}): sample again.") from error


def _rows(block: Mapping[str, Tensor]) -> int:
    return len(next(iter(block.values())))


def _joined(blocks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}
