"""Damaged files: what disks, transfers and people do to them."""

from __future__ import annotations

import gzip
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXTREME = (
    b"-1",
    b"0",
    b"1e999",
    b"nan",
    b"99999999999999999999",
    b"2147483648",
    b"\xff\xff\xff\xff",
    b"\x00",
    b"",
    b'"',
)


def mutated(whole: bytes, source: random.Random) -> bytes:
    """One to four random damages: bits, runs of bytes, numbers, the end."""
    raw = bytearray(whole)
    for _ in range(source.randint(1, 4)):
        at, end = sorted(source.randrange(len(raw) + 1) for _ in range(2))
        near = min(end, at + source.choice((1, 4, 8, 64)))
        kind = source.randrange(8)
        if kind == 0 and at < len(raw):
            raw[at] ^= 1 << source.randrange(8)
        elif kind == 1:
            raw[at:near] = source.randbytes(near - at)
        elif kind == 2:
            raw[at:near] = b""
        elif kind == 3:
            raw[at:at] = raw[at:near] * source.choice((1, 2, 100))
        elif kind == 4:
            raw[at:near] = source.choice(EXTREME)
        elif kind == 5:
            del raw[at:]
        elif kind == 6:
            start = source.randrange(min(128, len(raw) + 1))  # headers are short
            raw[start : start + 4] = source.choice((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\x00\x00\x00"))
        else:
            other = source.randrange(len(raw) + 1)
            raw[at:near] = raw[other : other + near - at]
    return bytes(raw)


def packed(mutate: Callable[[bytes, random.Random], bytes]) -> Callable[[bytes, random.Random], bytes]:
    """Half of the damages inside of a gzip file, so that its checksum is right."""
    return lambda whole, source: (
        gzip.compress(mutate(gzip.decompress(whole), source), 1) if source.random() < 0.5 else mutate(whole, source)
    )


def survives(
    path: Path,
    read: Callable[[], Any],
    count: int,
    mutate: Callable[[bytes, random.Random], bytes] = mutated,
    seed: int = 0,
    limit: int = 64 << 20,
) -> tuple[int, int]:
    """Reads `count` damaged versions of a file: each is read, or refused by a sentence that names the file.

    Memory that Python and numpy allocate stays below `limit` bytes.

    Returns:
        How many were read, and how many were refused.
    """
    whole, source, refused = path.read_bytes(), random.Random(seed), 0
    tracemalloc.start()
    try:
        for number in range(count):
            damaged = mutate(whole, source)
            path.write_bytes(damaged)
            tracemalloc.reset_peak()
            try:
                read()
            except Exception as error:
                refused += 1
                if not isinstance(error, ValueError | FileNotFoundError) or path.stem not in str(error):
                    pytest.fail(f"damage {number} of {path.name} raised {error!r}; it starts with {damaged[:80]!r}")
            peak = tracemalloc.get_traced_memory()[1]
            assert peak < limit, f"damage {number} of {path.name} took {peak:,} bytes; starts with {damaged[:80]!r}"
    finally:
        tracemalloc.stop()
        path.write_bytes(whole)
    return count - refused, refused
