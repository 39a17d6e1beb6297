"""A user's own data: .npz and .csv files."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bayesgrad.experiments.dataset import SPLIT_SEED, Dataset


def _integers(labels: np.ndarray, path: Path) -> Tensor:
    values = np.asarray(labels)
    if values.dtype.kind not in "iufb" or not np.all(np.mod(values, 1) == 0):
        bad = next((v for v in values.ravel().tolist() if not isinstance(v, int | float) or v % 1), values.dtype)
        raise ValueError(f"{path}: labels must be integers from 0, found {bad!r}; number the classes.")
    if values.min() < 0:
        raise ValueError(f"{path}: labels must be integers from 0, found {values.min()}; number the classes.")
    return torch.tensor(values.astype(np.int64))


def _own(path: Path, x: np.ndarray, y: np.ndarray, test: tuple[np.ndarray, np.ndarray] | None) -> Dataset:
    if len(x) != len(y):
        raise ValueError(f"{path}: {len(x)} inputs but {len(y)} labels.")
    if len(x) < 10:
        raise ValueError(f"{path}: {len(x)} examples are too few to split into training and test data.")
    labels = _integers(y, path)
    inputs = torch.tensor(np.asarray(x, np.float32))
    if not bool(torch.isfinite(inputs).all()):
        raise ValueError(f"{path}: some inputs are not finite; remove or replace them.")
    if test is None:
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(SPLIT_SEED))
        held, kept = order[: len(order) // 5], order[len(order) // 5 :]
        parts = inputs[kept], labels[kept], inputs[held], labels[held]
    else:
        parts = inputs, labels, torch.tensor(np.asarray(test[0], np.float32)), _integers(test[1], path)
    classes = int(max(parts[1].max(), parts[3].max())) + 1
    mean, deviation = parts[0].mean(0), parts[0].std(0).clamp(min=1e-6)
    train_x, test_x = ((part - mean) / deviation for part in (parts[0], parts[2]))
    if train_x.dim() == 3:
        train_x, test_x = train_x[:, None], test_x[:, None]
    kind = "image" if train_x.dim() == 4 else "table"
    note = f"{path.name}: {len(train_x):,} training and {len(test_x):,} test examples, {classes} classes"
    return Dataset(path.stem, train_x, parts[1], test_x, parts[3], classes, kind, note)


def read_npz(path: Path) -> Dataset:
    """Arrays x and y, or x_train, y_train, x_test and y_test."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist.")
    try:
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
    """Numbers with a header row or without; the last column is the label."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist.")
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as CSV ({error}).") from error

    def number(text: str) -> float | None:
        try:
            return float(text)
        except ValueError:
            return None

    first = 1 if rows and all(number(cell) is None for cell in rows[0]) else 0
    header = rows[0] if first else [str(i + 1) for i in range(len(rows[0]) if rows else 0)]
    table = []
    for i, row in enumerate(rows[first:], first + 1):
        if len(row) != len(header):
            raise ValueError(f"{path}, line {i}: {len(row)} columns where the first line has {len(header)}.")
        values = [number(cell) for cell in row]
        if None in values:
            j = values.index(None)
            raise ValueError(f"{path}, line {i}, column {header[j]}: {row[j]!r} is no number; encode text as numbers.")
        table.append(values)
    if not table or len(header) < 2:
        raise ValueError(f"{path} needs at least one column of numbers and a last column of labels.")
    array = np.array(table)
    return _own(path, array[:, :-1], array[:, -1], None)
