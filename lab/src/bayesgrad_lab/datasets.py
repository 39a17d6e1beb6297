"""Data sets, read from their standard files; nothing is downloaded unless asked for.

Files are looked for in the folder given as `--data-dir`, else in `$BAYESGRAD_DATA`, both directly and in a subfolder
named after the data set. What is read is checked: the checksum where the file is as long as the official one, the
structure always.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesgrad_lab import own
from bayesgrad_lab.dataset import SPLIT_SEED, Dataset
from bayesgrad_lab.names import unknown


def load(name: str, data_dir: str | os.PathLike | None = None, download: bool = False) -> Dataset:
    """The data set of that name, or a user's own .npz or .csv file.

    Args:
        name: one of `NAMES`, or a path ending in .npz or .csv.
        data_dir: where the standard files are.
        download: fetch missing files with pooch, into `data_dir` or pooch's cache.

    Raises:
        ValueError: unknown name, or a file that is damaged or cannot be understood.
        FileNotFoundError: a standard file that is not there.
    """
    if name.endswith(".npz"):
        return own.read_npz(Path(name))
    if name.endswith(".csv"):
        return own.read_csv(Path(name))
    if name not in READERS:
        raise unknown("data set", name, (*READERS, "FILE.npz", "FILE.csv"))
    return READERS[name](Files(name, data_dir, download))


# --- files ---


@dataclass(frozen=True)
class Source:
    """An official file: its length in bytes and md5, and where it can be had (a file, or a member of an archive)."""

    size: int
    md5: str
    url: str = ""


@dataclass(frozen=True)
class Files:
    """Where the files of one data set are looked for."""

    name: str
    data_dir: str | os.PathLike | None
    download: bool

    def folders(self) -> list[Path]:
        given = self.data_dir or os.environ.get("BAYESGRAD_DATA")
        if not given:
            return []
        root = Path(given)
        inner = {
            "cifar10": ("cifar-10-batches-bin", "cifar-10-batches-py"),
            "cifar100": ("cifar-100-binary", "cifar-100-python"),
        }
        names = (
            self.name,
            {"tinyshakespeare": "text", "ap": "lda/ap"}.get(self.name, self.name),
            *inner.get(self.name, ()),
        )
        return [root / name for name in names] + [root / self.name / name for name in names[2:]] + [root]

    def find(self, *names: str) -> Path | None:
        for folder in self.folders():
            for name in names:
                if (folder / name).is_file():
                    return folder / name
        return None

    def need(self, name: str, source: Source | None = None) -> Path:
        path = self.find(name, name.removesuffix(".gz"))
        if path is None and self.download and source and source.url:
            path = self._fetch(name, source)
        if path is None:
            raise self.missing(name)
        if (source and path.suffix == ".gz") or (source and path.name == name):
            verify(path, source)
        return path

    def missing(self, what: str) -> FileNotFoundError:
        looked = ", ".join(map(str, dict.fromkeys(self.folders()))) or "nowhere: no folder was given"
        return FileNotFoundError(
            f"{self.name} needs the file {what}; looked in {looked}. "
            "Pass --data-dir or set BAYESGRAD_DATA to a folder that has it, or pass --download."
        )

    def _fetch(self, name: str, source: Source) -> Path:
        import pooch

        folder = Path(self.data_dir or os.environ.get("BAYESGRAD_DATA") or pooch.os_cache("bayesgrad")) / self.name
        try:
            return Path(pooch.retrieve(source.url, f"md5:{source.md5}", fname=name, path=folder, progressbar=False))
        except Exception as error:  # pooch raises whatever its transport does
            raise FileNotFoundError(f"{name} could not be downloaded ({error}).") from error


def verify(path: Path, source: Source) -> None:
    """Refuses a file that is as long as the official one and differs from it."""
    if path.stat().st_size == source.size:
        digest = hashlib.md5(path.read_bytes()).hexdigest()
        if digest != source.md5:
            raise ValueError(f"{path} is damaged: its md5 is {digest}, not {source.md5}; get it again.")


# --- MNIST and Fashion-MNIST ---

_MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
IDX = {
    "mnist": {
        "train-images-idx3-ubyte.gz": Source(9912422, "f68b3c2dcbeaaa9fbdd348bbdeb94873", _MNIST_URL),
        "train-labels-idx1-ubyte.gz": Source(28881, "d53e105ee54ea40749a09fcbcd1e9432", _MNIST_URL),
        "t10k-images-idx3-ubyte.gz": Source(1648877, "9fb629c4189551a2d022fa330f9573f3", _MNIST_URL),
        "t10k-labels-idx1-ubyte.gz": Source(4542, "ec29112dd5afa0611ce80d1b7f02629c", _MNIST_URL),
    },
    "fashion-mnist": {
        "train-images-idx3-ubyte.gz": Source(26421880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d", _FASHION_URL),
        "train-labels-idx1-ubyte.gz": Source(29515, "25c81989df183df01b3e8a0aad5dffbe", _FASHION_URL),
        "t10k-images-idx3-ubyte.gz": Source(4422102, "bef4ecab320f06d8554ea6380940ec79", _FASHION_URL),
        "t10k-labels-idx1-ubyte.gz": Source(5148, "bb300cfdad3c16e7a12a480ee83cd310", _FASHION_URL),
    },
}


def read_idx(path: Path) -> np.ndarray:
    """An array of unsigned bytes in the idx format, gzipped or not."""
    raw = path.read_bytes()
    if path.suffix == ".gz":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is damaged or cut short ({error}); get it again.") from error
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path} is no idx file of unsigned bytes; get it again.")
    dimensions = raw[3]
    header = 4 + 4 * dimensions
    shape = struct.unpack(f">{dimensions}I", raw[4:header]) if len(raw) >= header else (-1,)
    expected = header + int(np.prod(shape, dtype=np.int64))
    if len(raw) != expected:
        raise ValueError(f"{path} is cut short or damaged: {len(raw)} bytes, but its header gives {expected}.")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def _idx(files: Files) -> Dataset:
    sources = {name: replace(source, url=source.url + name) for name, source in IDX[files.name].items()}
    arrays = [read_idx(files.need(name, source)) for name, source in sources.items()]
    for images, labels in (arrays[:2], arrays[2:]):
        if images.ndim != 3 or labels.ndim != 1 or not len(images) or images.shape[1:] != arrays[0].shape[1:]:
            shapes = f"{images.shape} and {labels.shape}"
            raise ValueError(f"{files.name}: arrays of shape {shapes} are no images and labels; get the files again.")
        if len(images) != len(labels):
            raise ValueError(f"{files.name}: {len(images)} images but {len(labels)} labels; get the files again.")
    return _images(files.name, arrays[0][:, None], arrays[1], arrays[2][:, None], arrays[3], 10)


def _images(name: str, train_x: np.ndarray, train_y, test_x: np.ndarray, test_y, classes: int) -> Dataset:
    """Scales each channel to mean 0 and deviation 1 over the training images."""
    train, test = (torch.tensor(x).float() / 255 for x in (train_x, test_x))
    mean, deviation = train.mean((0, 2, 3), keepdim=True), train.std((0, 2, 3), keepdim=True).clamp(min=1e-6)
    labels = [torch.tensor(np.asarray(y), dtype=torch.int64) for y in (train_y, test_y)]
    for y in labels:
        if len(y) and (y.min() < 0 or y.max() >= classes):
            raise ValueError(f"{name} has a label {int(y.max())}, but only {classes} classes; get the files again.")
    note = f"{name}: {len(train):,} training and {len(test):,} test images found"
    return Dataset(
        name, (train - mean) / deviation, labels[0], (test - mean) / deviation, labels[1], classes, "image", note
    )


# --- CIFAR ---

_CIFAR_URL = "https://www.cs.toronto.edu/~kriz/"
CIFAR_MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
CIFAR_ARCHIVES = {
    "cifar10": ("cifar-10-binary.tar.gz", Source(170052171, "c32a1d4ab5d03f1284b67883e8d87530")),
    "cifar100": ("cifar-100-binary.tar.gz", Source(168513733, "03b5dce01913d631647c71ecec9e9cb8")),
}


class _ArraysOnly(pickle.Unpickler):
    """Reads the arrays, strings and numbers of CIFAR's python version, and calls nothing else."""

    ALLOWED = {
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def read_cifar(path: Path, label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 3, 32, 32) and labels (n,) of one batch file, binary or python version."""
    if path.suffix == ".bin":
        if path.name in CIFAR_MD5 and label_bytes == 1:
            verify(path, Source(30_730_000, CIFAR_MD5[path.name]))
        raw = np.fromfile(path, np.uint8)
        width = label_bytes + 3072
        if len(raw) == 0 or len(raw) % width:
            raise ValueError(f"{path} is cut short: {len(raw)} bytes are no multiple of {width}; get it again.")
        rows = raw.reshape(-1, width)
        return rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1]
    try:
        with path.open("rb") as file:
            batch = _ArraysOnly(file, encoding="bytes").load()
        images = np.asarray(batch[b"data"], np.uint8).reshape(-1, 3, 32, 32)
        labels = np.asarray(batch[b"fine_labels" if label_bytes == 2 else b"labels"])
        if labels.dtype.kind not in "iu" or labels.shape != (len(images),):
            raise ValueError(f"{labels.shape} labels of type {labels.dtype} for {len(images)} images")
        return images, labels
    except Exception as error:  # a damaged pickle can raise anything; nothing of it has been called
        raise ValueError(f"{path} is no batch of CIFAR's python version ({error}); get it again.") from error


def _cifar(files: Files) -> Dataset:
    hundred = files.name == "cifar100"
    train = ["train"] if hundred else [f"data_batch_{i}" for i in range(1, 6)]
    test = "test" if hundred else "test_batch"
    whole = all(files.find(f"{name}.bin", name) for name in (train[0], test))
    if files.download and not whole:
        files = replace(files, data_dir=_unpack(files))
    found = {name: files.find(f"{name}.bin", name) for name in (*train, test)}
    parts = [path for name in train if (path := found[name])]
    if not parts:
        raise files.missing(f"{train[0]}.bin or {train[0]}")
    if found[test] is None:
        raise files.missing(f"{test}.bin or {test}")
    batches = [read_cifar(path, 1 + hundred) for path in parts]
    test_x, test_y = read_cifar(found[test], 1 + hundred)  # pyright: ignore[reportArgumentType]
    x, y = np.concatenate([b[0] for b in batches]), np.concatenate([b[1] for b in batches])
    return _images(files.name, x, y, test_x, test_y, 100 if hundred else 10)


def _unpack(files: Files) -> Path:
    name, source = CIFAR_ARCHIVES[files.name]
    archive = files._fetch(name, replace(source, url=_CIFAR_URL + name))
    with tarfile.open(archive) as tar:
        tar.extractall(archive.parent, filter="data")
    return archive.parent


# --- data that comes with packages ---


def _digits(files: Files) -> Dataset:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(images))
    test, train = order[:360], order[360:]
    return _images("digits", images[train], labels[train], images[test], labels[test], 10)


def _mnist1d(files: Files) -> Dataset:
    from mnist1d.data import get_dataset_args, make_dataset

    made = make_dataset(get_dataset_args())
    train, test = (torch.tensor(made[key], dtype=torch.float32) for key in ("x", "x_test"))
    labels = [torch.tensor(made[key], dtype=torch.int64) for key in ("y", "y_test")]
    note = f"mnist1d: {len(train):,} training and {len(test):,} test signals made"
    return Dataset("mnist1d", train, labels[0], test, labels[1], 10, "table", note)


# --- text ---

SHAKESPEARE = Source(
    1115394,
    "6fb458f1232090904fb40fe944165e91",
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
)
CONTEXT = 64


def _shakespeare(files: Files) -> Dataset:
    """Characters in windows of 64, the last tenth of the text for testing."""
    path = files.find("input.txt") or files.need("tinyshakespeare.txt", SHAKESPEARE)
    verify(path, SHAKESPEARE)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged: it is not UTF-8 text; get it again.") from error
    alphabet = sorted(set(text))
    number = {character: i for i, character in enumerate(alphabet)}
    tokens = torch.tensor([number[character] for character in text])
    cut = int(0.9 * len(tokens))

    def windows(part: Tensor) -> tuple[Tensor, Tensor]:
        count = (len(part) - 1) // CONTEXT
        if count < 1:
            raise ValueError(f"{path} is cut short: {len(text)} characters do not fill a window of {CONTEXT}.")
        return part[: count * CONTEXT].view(-1, CONTEXT), part[1 : count * CONTEXT + 1].view(-1, CONTEXT)

    train, test = windows(tokens[:cut]), windows(tokens[cut:])
    note = f"tinyshakespeare: {len(text):,} characters, {len(alphabet)} distinct"
    return Dataset("tinyshakespeare", *train, *test, len(alphabet), "text", note)


READERS: dict[str, Callable[[Files], Dataset]] = {
    "digits": _digits,
    "mnist": _idx,
    "fashion-mnist": _idx,
    "cifar10": _cifar,
    "cifar100": _cifar,
    "mnist1d": _mnist1d,
    "tinyshakespeare": _shakespeare,
}
NAMES = tuple(READERS)
