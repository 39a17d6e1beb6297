"""A user's own data: .npz and .csv files."""

from __future__ import annotations

import csv
import math
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bayesgrad_lab.dataset import MOST_BYTES, SPLIT_SEED, Dataset

MOST_CLASSES = 100_000


def _integers(labels: np.ndarray, path: Path) -> Tensor:
    values = np.asarray(labels)
    values = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    if values.ndim != 1 or not len(values):
        raise ValueError(f"{path}: labels must be one number for each example, found shape {values.shape}.")
    if values.dtype.kind not in "iufb" or not np.isfinite(values).all() or not np.all(np.mod(values, 1) == 0):
        bad = next((v for v in values.ravel().tolist() if not isinstance(v, int | float) or v % 1), values.dtype)
        raise ValueError(f"{path}: labels must be integers from 0, found {bad!r}; number the classes.")
    if values.min() < 0:
        raise ValueError(f"{path}: labels must be integers from 0, found {values.min()}; number the classes.")
    if values.max() >= MOST_CLASSES:
        raise ValueError(
            f"{path}: found the label {values.max()}; number the classes from 0, {MOST_CLASSES:,} at most."
        )
    return torch.tensor(values.astype(np.int64))


def _checked(path: Path, x: np.ndarray, y: np.ndarray) -> tuple[Tensor, Tensor]:
    x, y = np.asarray(x), np.asarray(y)
    if x.dtype.kind not in "iufb" or x.ndim < 2 or not x.size:
        raise ValueError(
            f"{path}: inputs must be numbers of shape (examples, ...), found {x.dtype} of shape {x.shape}."
        )
    if y.ndim == 0 or len(x) != len(y):
        raise ValueError(f"{path}: {len(x)} inputs but {len(y) if y.ndim else 'no'} labels.")
    with np.errstate(over="ignore", invalid="ignore"):  # checked in the next line
        inputs = torch.tensor(x.astype(np.float32))
    if not bool(torch.isfinite(inputs).all()):
        raise ValueError(f"{path}: some inputs are not finite in float32; remove or replace them.")
    return inputs, _integers(y, path)


def _own(path: Path, x: np.ndarray, y: np.ndarray, test: tuple[np.ndarray, np.ndarray] | None) -> Dataset:
    inputs, labels = _checked(path, x, y)
    if len(x) < 10:
        raise ValueError(f"{path}: {len(x)} examples are too few to split into training and test data.")
    if test is None:
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(SPLIT_SEED))
        held, kept = order[: len(order) // 5], order[len(order) // 5 :]
        parts = inputs[kept], labels[kept], inputs[held], labels[held]
    else:
        parts = inputs, labels, *_checked(path, *test)
        if parts[2].shape[1:] != inputs.shape[1:]:
            shapes = f"{tuple(inputs.shape[1:])} in training and {tuple(parts[2].shape[1:])} in test data"
            raise ValueError(f"{path}: an example has shape {shapes}.")
    classes = int(max(parts[1].max(), parts[3].max())) + 1
    if classes < 2:
        raise ValueError(f"{path}: all labels are 0; a classifier needs at least two classes.")
    # One scale for a picture, one for each column of a table; a column that is constant in training keeps its own.
    over = (0,) if inputs.dim() == 2 else tuple(range(inputs.dim()))
    mean, deviation = parts[0].mean(over), parts[0].std(over)
    deviation = torch.where(deviation < 1e-6, torch.ones_like(deviation), deviation)
    train_x, test_x = ((part - mean) / deviation for part in (parts[0], parts[2]))
    if train_x.dim() == 3:
        train_x, test_x = train_x[:, None], test_x[:, None]
    kind = "image" if train_x.dim() == 4 else "table"
    note = f"{path.name}: {len(train_x):,} training and {len(test_x):,} test examples, {classes} classes"
    return Dataset(path.stem, train_x, parts[1], test_x, parts[3], classes, kind, note)


def _check_sizes(path: Path) -> None:
    """Refuses arrays that are larger than what the file holds of them, before anything is allocated for them."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            with archive.open(member) as file:
                version = np.lib.format.read_magic(file)
                read_header = np.lib.format.read_array_header_1_0
                shape, _, dtype = (read_header if version == (1, 0) else np.lib.format.read_array_header_2_0)(file)
                held, announced = member.file_size - file.tell(), math.prod(shape) * dtype.itemsize
            if not announced == held <= MOST_BYTES:
                raise ValueError(f"{member.filename} has {held:,} bytes of data, but its header gives {announced:,}")


def read_npz(path: Path) -> Dataset:
    """Arrays x and y, or x_train, y_train, x_test and y_test."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist.")
    try:
        _check_sizes(path)
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except Exception as error:  # zip, header and pickle errors all mean the same to the user
        raise ValueError(f"{path} cannot be read as .npz ({error}).") from error
    if {"x", "y"} <= set(arrays):
        return _own(path, arrays["x"], arrays["y"], None)
    if {"x_train", "y_train", "x_test", "y_test"} <= set(arrays):
        return _own(path, arrays["x_train"], arrays["y_train"], (arrays["x_test"], arrays["y_test"]))
    raise ValueError(f"{path} must hold x and y, or x_train, y_train, x_test and y_test; it holds {sorted(arrays)}.")


def read_csv(path: Path) -> Dataset:
    """Numbers with a header row or without; the last column is the label.

    Columns are separated by semicolons or tabs if the first line has one, otherwise by commas.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist.")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            start = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=next((mark for mark in ";\t" if mark in start), ","))
            numbered = [(reader.line_num, row) for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as CSV ({error}).") from error

    def number(text: str) -> float | None:
        try:
            return float(text)
        except ValueError:
            return None

    rows = [row for _, row in numbered]
    first = 1 if rows and all(number(cell) is None for cell in rows[0]) else 0
    header = rows[0] if first else [str(i + 1) for i in range(len(rows[0]) if rows else 0)]
    table = []
    for i, row in numbered[first:]:
        if len(row) != len(header):
            raise ValueError(f"{path}, line {i}: {len(row)} columns, but the first line has {len(header)}.")
        values = [number(cell) for cell in row]
        if None in values:
            j = values.index(None)
            remedy = "is no number; encode text as numbers, and write decimals with a point"
            if not row[j].strip():
                remedy = "is blank; fill it in, or remove the line or the column"
            elif i == numbered[0][0]:
                remedy = "is no number, but other columns of this line are: give every column a name, or none"
            raise ValueError(f"{path}, line {i}, column {header[j]}: {row[j]!r} {remedy}.")
        table.append(values)
    if not table or len(header) < 2:
        raise ValueError(f"{path} needs at least one column of numbers and a last column of labels.")
    array = np.array(table)
    return _own(path, array[:, :-1], array[:, -1], None)
