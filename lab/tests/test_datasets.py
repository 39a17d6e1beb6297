"""Readers of standard files, on files made here; the real ones too, where $BAYESGRAD_DATA has them."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from bayesgrad_lab import datasets

REAL = os.environ.get("BAYESGRAD_DATA")
RANDOM = np.random.default_rng(0)


def write_idx(path: Path, array: np.ndarray, packed: bool = True) -> None:
    raw = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(raw) if packed else raw)


def write_mnist(folder: Path, packed: bool = True) -> tuple[np.ndarray, np.ndarray]:
    images, labels = RANDOM.integers(0, 256, (30, 28, 28)), RANDOM.integers(0, 10, 30)
    for prefix, part in (("train", slice(0, 20)), ("t10k", slice(20, 30))):
        suffix = ".gz" if packed else ""
        write_idx(folder / f"{prefix}-images-idx3-ubyte{suffix}", images[part], packed)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte{suffix}", labels[part], packed)
    return images, labels


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_files(tmp_path: Path, name: str, packed: bool) -> None:
    (tmp_path / name).mkdir()
    images, labels = write_mnist(tmp_path / name, packed)
    data = datasets.load(name, tmp_path)
    assert data.train_x.shape == (20, 1, 28, 28)
    assert data.test_y.tolist() == labels[20:].tolist()
    torch.testing.assert_close(data.train_x.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    raw = torch.tensor(images[:20]).float() / 255
    torch.testing.assert_close(data.train_x[:, 0], (raw - raw.mean()) / raw.std(), atol=1e-4, rtol=1e-4)
    assert data.note == f"{name}: 20 training and 10 test images found"


def test_damaged_idx_files_say_so(tmp_path: Path, monkeypatch) -> None:
    write_mnist(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    for spoilt in (whole[: len(whole) // 2], whole[:5], b"", gzip.compress(gzip.decompress(whole)[:-7])):
        path.write_bytes(spoilt)
        with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz .*(cut short|no idx file)"):
            datasets.load("mnist", tmp_path)
    write_idx(path, RANDOM.integers(0, 256, (19, 28, 28)))
    with pytest.raises(ValueError, match="19 images but 20 labels"):
        datasets.load("mnist", tmp_path)
    path.write_bytes(whole)
    official = datasets.Source(len(whole), "0" * 64)
    monkeypatch.setitem(datasets.IDX["mnist"], path.name, official)
    with pytest.raises(ValueError, match=r"is damaged: its SHA-256 is .*, not 0000"):
        datasets.load("mnist", tmp_path)


def test_a_missing_file_is_named_with_where_it_was_looked_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("BAYESGRAD_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"train-images.*looked in nowhere.*--data-dir or set BAYESGRAD_DATA"):
        datasets.load("mnist")
    with pytest.raises(FileNotFoundError, match=rf"data_batch_1.bin or data_batch_1; .*{tmp_path.name}/cifar10"):
        datasets.load("cifar10", tmp_path)
    monkeypatch.setenv("BAYESGRAD_DATA", str(tmp_path))
    write_mnist(tmp_path)
    assert len(datasets.load("mnist").train_x) == 20


@pytest.mark.parametrize("version", ["binary", "python"])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_in_both_versions_and_any_subset_of_batches(tmp_path: Path, name: str, version: str) -> None:
    hundred = name == "cifar100"
    batches = {"train": 12, "test": 5} if hundred else {"data_batch_1": 7, "data_batch_4": 5, "test_batch": 5}
    images, labels = RANDOM.integers(0, 256, (17, 3072), dtype=np.uint8), RANDOM.integers(0, 10, 17)
    start = 0
    for batch, count in batches.items():
        part = slice(start, start + count)
        if version == "binary":
            columns = [np.zeros((count, 1)), labels[part, None]] if hundred else [labels[part, None]]
            np.concatenate([*columns, images[part]], 1).astype(np.uint8).tofile(tmp_path / f"{batch}.bin")
        else:
            key = b"fine_labels" if hundred else b"labels"
            content = {b"data": images[part], key: labels[part].tolist()}
            (tmp_path / batch).write_bytes(pickle.dumps(content, protocol=2))
        start += count
    data = datasets.load(name, tmp_path)
    assert data.note == f"{name}: 12 training and 5 test images found"
    assert data.train_y.tolist() == labels[:12].tolist()
    raw = torch.tensor(images[:12].reshape(-1, 3, 32, 32)).float()
    expected = (raw - raw.mean((0, 2, 3), keepdim=True)) / raw.std((0, 2, 3), keepdim=True)
    torch.testing.assert_close(data.train_x, expected, atol=1e-4, rtol=1e-4)
    assert data.classes == (100 if hundred else 10)


def test_cifar_pickles_call_nothing_and_cut_files_are_refused(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self):
            return os.system, ("touch trapped",)

    (tmp_path / "test_batch").write_bytes(pickle.dumps({b"data": Trap()}, protocol=2))
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": Trap()}, protocol=2))
    with pytest.raises(ValueError, match=r"data_batch_1 is no batch of CIFAR's python version \(it asks for .*system"):
        datasets.load("cifar10", tmp_path)
    assert not Path("trapped").exists()
    (tmp_path / "data_batch_1.bin").write_bytes(bytes(3073 * 2 - 1))
    with pytest.raises(ValueError, match="6145 bytes are no multiple of 3073"):
        datasets.load("cifar10", tmp_path)


def test_own_files(tmp_path: Path) -> None:
    x, y = RANDOM.normal(size=(50, 4)), RANDOM.integers(0, 3, 50)
    np.savez(tmp_path / "own.npz", x=x, y=y)
    np.savez(tmp_path / "split.npz", x_train=x[:30], y_train=y[:30], x_test=x[30:], y_test=y[30:])
    np.savez(tmp_path / "images.npz", x=RANDOM.normal(size=(20, 8, 8)), y=RANDOM.integers(0, 2, 20))
    np.savetxt(tmp_path / "own.csv", np.column_stack([x, y]), delimiter=",", header="a,b,c,d,label", comments="")
    own = datasets.load(str(tmp_path / "own.npz"))
    assert (len(own.train_x), len(own.test_x), own.classes, own.kind) == (40, 10, 3, "table")
    assert len(datasets.load(str(tmp_path / "split.npz")).test_x) == 20
    assert datasets.load(str(tmp_path / "images.npz")).train_x.shape == (16, 1, 8, 8)
    table = datasets.load(str(tmp_path / "own.csv"))
    assert table.train_y.tolist() == own.train_y.tolist()
    torch.testing.assert_close(table.train_x, own.train_x, atol=1e-5, rtol=1e-5)


def test_own_files_that_cannot_be_understood_say_why(tmp_path: Path) -> None:
    x = RANDOM.normal(size=(20, 2))
    cases = {
        "half.npz": (dict(x=x, y=np.arange(20) / 2), "labels must be integers from 0, found 0.5"),
        "minus.npz": (dict(x=x, y=np.arange(20) - 1), "labels must be integers from 0, found -1"),
        "words.npz": (dict(x=x, y=np.array(["a", "b"] * 10)), "labels must be integers from 0, found 'a'"),
        "short.npz": (dict(x=x, y=np.arange(19)), "20 inputs but 19 labels"),
        "names.npz": (dict(data=x), r"must hold x and y, .*; it holds \['data'\]"),
        "nan.npz": (dict(x=x * np.nan, y=np.arange(20)), "some inputs are not finite"),
        "one.npz": (dict(x=x, y=np.zeros(20)), "all labels are 0"),
        "flat.npz": (dict(x=x[:, 0], y=np.arange(20)), r"inputs must be numbers of shape \(examples, ...\), found"),
        "hot.npz": (dict(x=x, y=np.eye(20)), r"labels must be one number for each example, found shape \(20, 20\)"),
        "huge.npz": (dict(x=x, y=np.full(20, 10.0**13)), "found the label"),
        "text.npz": (dict(x=np.full((20, 2), "a"), y=np.arange(20)), "inputs must be numbers"),
        "other.npz": (
            dict(x_train=x, y_train=np.arange(20), x_test=x[:, :1], y_test=np.arange(20)),
            r"an example has shape \(2,\) in training and \(1,\) in test data",
        ),
        "objects.npz": (dict(x=np.array([{}] * 20), y=np.arange(20)), "cannot be read as .npz"),
    }
    for name, (arrays, message) in cases.items():
        np.savez(tmp_path / name, **arrays)
        with pytest.raises(ValueError, match=message):
            datasets.load(str(tmp_path / name))
    whole = (tmp_path / "half.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut.npz cannot be read as .npz"):
        datasets.load(str(tmp_path / "cut.npz"))
    texts = {
        "text.csv": ("a,label\n1,0\ncat,1\n", r"text.csv, line 3, column a: 'cat' is no number; encode"),
        "ragged.csv": ("1,0\n1,2,3\n", "line 2: 3 columns, but the first line has 2"),
        "empty.csv": ("", "needs at least one column"),
    }
    for name, (text, message) in texts.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=message):
            datasets.load(str(tmp_path / name))
    (tmp_path / "bom.csv").write_bytes(b"\xef\xbb\xbf" + b"1,0\n2,1\n" * 10)
    assert datasets.load(str(tmp_path / "bom.csv")).classes == 2
    with pytest.raises(FileNotFoundError, match=r"nowhere.csv does not exist"):
        datasets.load("nowhere.csv")


def test_columns_that_are_constant_in_training_and_labels_in_a_column(tmp_path: Path) -> None:
    x, y = RANDOM.normal(size=(40, 2)), RANDOM.integers(0, 2, (40, 1))
    x[:, 1] = 0.0
    test = x[:10].copy()
    test[:, 1] = 1e-3
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=test, y_test=y[:10])
    data = datasets.load(str(tmp_path / "a.npz"))
    assert data.test_x.abs().max() < 10
    assert data.train_y.shape == (40,)


def test_text(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("to be or not to be, " * 200)
    data = datasets.load("tinyshakespeare", tmp_path)
    assert data.train_x.shape[1] == datasets.CONTEXT
    assert torch.equal(data.train_x.flatten()[1:], data.train_y.flatten()[:-1])
    assert data.classes == len(set("to be or not to be, "))
    (tmp_path / "input.txt").write_bytes(b"\xff\xfe\xff" * 5000)
    with pytest.raises(ValueError, match=r"input.txt is damaged: it is not UTF-8"):
        datasets.load("tinyshakespeare", tmp_path)
    (tmp_path / "input.txt").write_text("short")
    with pytest.raises(ValueError, match="is cut short"):
        datasets.load("tinyshakespeare", tmp_path)


@pytest.mark.parametrize(("name", "shape"), [("digits", (1, 8, 8)), ("mnist1d", (40,))])
def test_data_that_comes_with_packages(name: str, shape: tuple) -> None:
    data = datasets.load(name)
    assert data.train_x.shape[1:] == shape
    assert len(data.train_x) > 1000
    assert data.classes == 10


def test_validation_is_part_of_training_and_never_of_test() -> None:
    data = datasets.load("digits").part(500)
    split = data.validation()
    assert (len(split.train_x), len(split.test_x)) == (400, 100)
    rows = {row.numpy().tobytes() for row in data.train_x}
    assert {row.numpy().tobytes() for row in torch.cat([split.train_x, split.test_x])} == rows
    assert torch.equal(split.test_x, data.validation().test_x)


@pytest.mark.skipif(not REAL, reason="BAYESGRAD_DATA names no folder of standard files")
@pytest.mark.parametrize(("name", "count"), [("mnist", 60_000), ("fashion-mnist", 60_000), ("cifar10", 10_000)])
def test_real_files(name: str, count: int) -> None:
    data = datasets.load(name)
    assert len(data.train_x) >= count
    assert len(data.test_x) == 10_000
    assert data.test_y.bincount().tolist()[:2] == {"mnist": [980, 1135]}.get(name, [1000, 1000])
