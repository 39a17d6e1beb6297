"""The page of Markdown that a benchmark prints, and writes to a file where it is asked to."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterable
from pathlib import Path

import torch


def options(description: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """What all benchmarks can be asked for; `rounds` is how many there are, of one that has any."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a Markdown file to write the tables to")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    return parser


def publish(lines: Iterable[str], path: Path | None) -> None:
    text = "\n".join(lines)
    print(text)
    if path:
        path.write_text(text + "\n")


def setting() -> str:
    """What figures depend on beside the code."""
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, float32"
