"""Every reader of files, on damaged ones: read or refused in a sentence, within bounded memory, without a crash."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bayesgrad_lab import corpora, own, report, store, uci
from bayesgrad_lab.context import Context
from bayesgrad_lab.datasets import Files, Source, read_cifar, read_idx, verify
from bayesgrad_lab.studies import JOURNAL, Study
from mutations import mutated, packed, survives

RANDOM = np.random.default_rng(0)
IMAGES, LABELS = RANDOM.integers(0, 256, (12, 3072), dtype=np.uint8), RANDOM.integers(0, 3, 12)


def idx(path: Path) -> None:
    raw = b"\x00\x00\x08\x03" + np.array([4, 5, 6], ">u4").tobytes() + bytes(range(120))
    import gzip

    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def binary(path: Path) -> None:
    np.concatenate([LABELS[:2, None].astype(np.uint8), IMAGES[:2]], 1).tofile(path)


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps({b"data": IMAGES[:1], b"labels": LABELS[:1].tolist()}, protocol=2))


def arrays(path: Path) -> None:
    np.savez(path, x=RANDOM.normal(size=(12, 3)), y=LABELS)


def table(path: Path) -> None:
    rows = [",".join(f"{v:.3f}" for v in row) + f",{y}" for row, y in zip(RANDOM.normal(size=(12, 3)), LABELS)]
    path.write_text("a,b,c,label\n" + "\n".join(rows) + "\n")


def documents(path: Path) -> None:
    path.write_text("2 0:3 4:1\n1 2:7\n3 0:1 1:1 2:1\n")


def numbers(path: Path) -> None:
    np.savetxt(path, RANDOM.normal(size=(6, 3)))


def record(path: Path) -> None:
    path.write_bytes(b"\x89PNG\r\n")
    path.rename(path.with_name("picture.png"))
    made = report.Report("title", "claim", "Holds", "command", settings={"seeds": 3}, versions={"torch": "2"})
    made.add_table("table", ["a", "b"], [["x", "1"], ["y", "2"]])
    made.add_figure("picture.png", "caption")
    made.save(path.parent)


def tensors(path: Path) -> None:
    store.write_tensors(path, {"step": 3, "weights": torch.arange(6.0)})


def journal(path: Path) -> None:
    study = Study(Context(path.parent), "task")
    study.measure([{"lr": 0.1}, {"lr": 0.3}], lambda point, _: point["lr"])


READERS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "images.gz": (idx, read_idx),
    "images": (idx, read_idx),
    "batch.bin": (binary, lambda path: read_cifar(path, 1)),
    "batch": (pickled, lambda path: read_cifar(path, 1)),
    "own.npz": (arrays, own.read_npz),
    "own.csv": (table, own.read_csv),
    "ap.dat": (documents, lambda path: corpora.read_ldac(path, 5)),
    "data.txt": (numbers, uci._table),
    "report.json": (record, lambda path: report.load(path.parent)),
    "config.json": (lambda path: store.write_json(path, {"seeds": 3, "x": [1.5]}), store.read_json),
    "trial.pt": (tensors, store.read_tensors),
    JOURNAL: (journal, lambda path: Study(Context(path.parent), "task")),
}
COUNTS = [500, pytest.param(10_000, marks=pytest.mark.soak)]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_read_or_refused(name: str, count: int, tmp_path: Path) -> None:
    path, (write, read) = tmp_path / name, READERS[name]
    write(path)
    if name == "report.json":
        (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n")
    read(path)  # whole, it is read
    _, refused = survives(path, lambda: read(path), count, packed(mutated) if name.endswith(".gz") else mutated)
    if name != "trial.pt":  # a trial that cannot be read is computed again
        assert refused > count / 20


def test_files_that_ask_for_more_memory_than_they_fill(tmp_path: Path) -> None:
    import gzip
    import zipfile

    bomb = tmp_path / "images.gz"
    bomb.write_bytes(gzip.compress(b"\x00\x00\x08\x02" + b"\xff" * 8 + bytes(1 << 20)))
    with pytest.raises(ValueError, match=r"images.gz is damaged: its header gives 18,446,744,065,119,617,025 bytes"):
        read_idx(bomb)
    bomb.write_bytes(gzip.compress(b"\x00\x00\x08\x01\x00\x00\x00\x02" + bytes(1 << 24)))
    with pytest.raises(ValueError, match="more than 2 bytes, but its header gives 2"):
        read_idx(bomb)
    large = tmp_path / "own.npz"
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (100000000,), }"
    with zipfile.ZipFile(large, "w") as file:
        file.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64))
    with pytest.raises(ValueError, match=r"own.npz cannot be read as .npz \(x.npy has 64 bytes.* 800,000,000"):
        own.read_npz(large)
    for code in (b"r\xff\xff\xff\x7f", b"\x96\xff\xff\xff\xff\x00\x00\x00\x00"):  # LONG_BINPUT, BYTEARRAY8
        (tmp_path / "batch").write_bytes(b"\x80\x05N" + code + b".")
        with pytest.raises(ValueError, match="batch is no batch of CIFAR's python version"):
            read_cifar(tmp_path / "batch", 1)
    nested = b"(lp0\n" + b"".join(b"(lp%d\ng%d\nag%d\na" % (i, i - 1, i - 1) for i in range(1, 60))
    (tmp_path / "batch").write_bytes(b"(dp99\nC\x04data" + nested + b"sC\x06labels(ls.")
    with pytest.raises(ValueError, match="no batch of CIFAR's python version"):
        read_cifar(tmp_path / "batch", 1)


@pytest.mark.parametrize(
    ("file", "link"),
    [("../secret.png", None), ("/etc/hostname", None), ("plot.png", "../secret.png"), ("a/../b", None)],
)
def test_a_report_takes_pictures_from_its_own_folder_only(file: str, link: str | None, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"\x89PNG\r\n secret")
    folder = tmp_path / "run"
    folder.mkdir()
    if link:
        (folder / file).symlink_to(link)
    made = report.Report("title")
    made.add_figure(file, "caption")
    store.write_json(folder / "report.json", vars(made))
    with pytest.raises(ValueError, match=r"names the file .*, which is not in that folder"):
        report.load(folder)


def test_a_report_embeds_pictures_only_and_names_what_is_missing(tmp_path: Path) -> None:
    made = report.Report("title")
    made.add_figure("plot.png", "caption")
    store.write_json(tmp_path / "report.json", vars(made))
    with pytest.raises(ValueError, match=r"plot.png is missing, though the report names it: run it again"):
        report.load(tmp_path)
    (tmp_path / "plot.png").write_text("password")
    with pytest.raises(ValueError, match=r"plot.png is no PNG picture"):
        report.load(tmp_path)


@pytest.mark.parametrize("name", ["../page", "/page", ".hidden", 3, "a/b"])
def test_pages_are_written_where_they_were_asked_for(name: Any, tmp_path: Path, capsys: Any) -> None:
    from bayesgrad_lab.cli import main

    folder = tmp_path / "run"
    folder.mkdir()
    report.Report("title", settings={"experiment": name}).save(folder)
    before = sorted(tmp_path.rglob("*"))
    arguments = ["report", str(folder), "--out", str(tmp_path / "page.html"), "--markdown", str(tmp_path / "docs")]
    assert main(arguments) == 2
    assert "cannot be the name of a page" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_downloads_are_checked_by_sha256_and_encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pooch

    from bayesgrad_lab import datasets

    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(pooch, "retrieve", lambda url, known, **_: asked.append((url, known)) or os.devnull)
    for name, sources in datasets.IDX.items():
        for file, source in sources.items():
            Files(name, tmp_path, True)._fetch(file, Source(source.size, source.sha256, source.url + file))
    for name in datasets.CIFAR_ARCHIVES:
        with pytest.raises(Exception, match="empty"):
            datasets._unpack(Files(name, tmp_path, True))
    Files("tinyshakespeare", tmp_path, True)._fetch("input.txt", datasets.SHAKESPEARE)
    assert len(asked) == 11
    for url, known in asked:
        assert url.startswith("https://")
        kind, digest = known.split(":")
        assert (kind, len(digest)) == ("sha256", 64)
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    verify(path, Source(3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"))


def test_csv_of_other_programs(tmp_path: Path) -> None:
    path, rows = tmp_path / "own.csv", [(i / 4, i % 2) for i in range(12)]
    for mark in (",", ";", "\t"):
        for head in ("", f"length{mark}label\n"):
            path.write_text(head + "".join(f"{x}{mark}{y}\n" for x, y in rows), encoding="utf-8-sig")
            assert len(own.read_csv(path).train_x) == 10
    for spoilt, words in (
        ("1,;0", "line 4, column length: '1,' is no number.*write decimals with a point"),
        (";0", "line 4, column length: '' is blank; fill it in, or remove the line"),
        ("1;2;0", "line 4: 3 columns, but the first line has 2"),
    ):
        path.write_text("length;label\n1;0\n2;1\n" + spoilt + "\n" + "3;1\n" * 9)
        with pytest.raises(ValueError, match=words):
            own.read_csv(path)
    path.write_text("length;2020;label\n" + "1;2;0\n" * 12)
    with pytest.raises(
        ValueError, match="'length' is no number, but other columns of this line are: give every column"
    ):
        own.read_csv(path)


def test_labels_that_are_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("1,1e999\n" + "1,0\n" * 12)
    with pytest.raises(ValueError, match="labels must be integers from 0, found inf"):
        own.read_csv(path)
