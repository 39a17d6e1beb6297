"""Data sets, read from their standard files; nothing is downloaded unless asked for.

Files are looked for in the folder given as `--data-dir`, else in `$BAYESGRAD_DATA`, both directly and in a subfolder
named after the data set. What is read is checked: the checksum where the file is as long as the official one, the
structure always.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import os
import pickle
import pickletools
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
from bayesgrad_lab.dataset import MOST_BYTES, SPLIT_SEED, Dataset
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
    """An official file: its length in bytes, its SHA-256, and where it can be had (a file, or an archive)."""

    size: int
    sha256: str
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
            return Path(
                pooch.retrieve(source.url, f"sha256:{source.sha256}", fname=name, path=folder, progressbar=False)
            )
        except Exception as error:  # pooch raises whatever its transport does
            raise FileNotFoundError(f"{name} could not be downloaded ({error}).") from error


def verify(path: Path, source: Source) -> None:
    """Refuses a file that is as long as the official one and differs from it."""
    if path.stat().st_size == source.size:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        if digest.hexdigest() != source.sha256:
            raise ValueError(
                f"{path} is damaged: its SHA-256 is {digest.hexdigest()}, not {source.sha256}; get it again."
            )


# --- MNIST and Fashion-MNIST ---

_MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION_URL = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
IDX = {
    "mnist": {
        "train-images-idx3-ubyte.gz": Source(
            9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609", _MNIST_URL
        ),
        "train-labels-idx1-ubyte.gz": Source(
            28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", _MNIST_URL
        ),
        "t10k-images-idx3-ubyte.gz": Source(
            1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", _MNIST_URL
        ),
        "t10k-labels-idx1-ubyte.gz": Source(
            4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", _MNIST_URL
        ),
    },
    "fashion-mnist": {
        "train-images-idx3-ubyte.gz": Source(
            26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84", _FASHION_URL
        ),
        "train-labels-idx1-ubyte.gz": Source(
            29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845", _FASHION_URL
        ),
        "t10k-images-idx3-ubyte.gz": Source(
            4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073", _FASHION_URL
        ),
        "t10k-labels-idx1-ubyte.gz": Source(
            5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5", _FASHION_URL
        ),
    },
}


def read_idx(path: Path) -> np.ndarray:
    """An array of unsigned bytes in the idx format, gzipped or not."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            start = file.read(4)
            if len(start) < 4 or start[:3] != b"\x00\x00\x08":
                raise ValueError(f"{path} is no idx file of unsigned bytes; get it again.")
            dimensions = file.read(4 * start[3])
            shape = struct.unpack(f">{start[3]}I", dimensions) if len(dimensions) == 4 * start[3] else (0,)
            if (expected := math.prod(shape)) > MOST_BYTES:
                raise ValueError(f"{path} is damaged: its header gives {expected:,} bytes; get it again.")
            raw = bytearray()  # in chunks: nothing is allocated for bytes that are not there, nor read beyond them
            while len(raw) <= expected and (chunk := file.read(1 << 20)):
                raw += chunk
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged or cut short ({error}); get it again.") from error
    if not shape or len(raw) != expected:
        found = f"more than {expected}" if len(raw) > expected else len(raw)
        raise ValueError(f"{path} is cut short or damaged: {found} bytes, but its header gives {expected}.")
    return np.frombuffer(raw, np.uint8).reshape(shape)


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
CIFAR_SHA256 = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
CIFAR_ARCHIVES = {
    "cifar10": (
        "cifar-10-binary.tar.gz",
        Source(170052171, "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"),
    ),
    "cifar100": (
        "cifar-100-binary.tar.gz",
        Source(168513733, "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"),
    ),
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

    def __init__(self, raw: bytes) -> None:
        # The unpickler allocates whatever a damaged index or length asks for, before it looks whether that is there.
        for code, argument, _ in pickletools.genops(raw):
            if code.name == "BYTEARRAY8" or (code.name.endswith("PUT") and int(argument or 0) > len(raw)):
                raise pickle.UnpicklingError(f"it has the instruction {code.name} {argument}")
        super().__init__(io.BytesIO(raw), encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        found = super().find_class(module, name)
        # An empty array, which its state fills from bytes that are there, whatever shape is asked for.
        return (lambda *_: found(np.ndarray, (0,), b"b")) if name == "_reconstruct" else found


def read_cifar(path: Path, label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 3, 32, 32) and labels (n,) of one batch file, binary or python version."""
    if path.suffix == ".bin":
        if path.name in CIFAR_SHA256 and label_bytes == 1:
            verify(path, Source(30_730_000, CIFAR_SHA256[path.name]))
        raw = np.fromfile(path, np.uint8)
        width = label_bytes + 3072
        if len(raw) == 0 or len(raw) % width:
            raise ValueError(f"{path} is cut short: {len(raw)} bytes are no multiple of {width}; get it again.")
        rows = raw.reshape(-1, width)
        return rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1]
    try:
        batch = _ArraysOnly(path.read_bytes()).load()
        pixels, given = batch[b"data"], batch[b"fine_labels" if label_bytes == 2 else b"labels"]
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8:
            raise ValueError("its images are no array of bytes")
        if not isinstance(given, np.ndarray) and not all(isinstance(label, int) for label in given):
            raise ValueError("its labels are no numbers")
        images, labels = pixels.reshape(-1, 3, 32, 32), np.asarray(given)
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
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
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
