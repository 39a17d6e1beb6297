"""A small GPT on text, for ddp.py and fsdp.py."""

from __future__ import annotations

import argparse
import os
import random
import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

CONTEXT = 32
WORDS = (
    "a",
    "the",
    "cat",
    "dog",
    "bird",
    "sees",
    "hears",
    "likes",
    "red",
    "blue",
    "small",
    "old",
    "and",
    "but",
    "never",
)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, 2))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Characters -> logits of the next ones."""

    def __init__(self, characters: int, width: int = 48, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.characters(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).clone()  # fully_shard warns of outputs that are views


def start_processes() -> None:
    """Connects the processes that torchrun has started.

    torchrun keeps one store for all its restarts. With a prefix, no process reads addresses of one that is gone.
    """
    backend, timeout = "nccl" if torch.cuda.is_available() else "gloo", timedelta(seconds=60)
    store, rank, processes = next(rendezvous("env://", timeout=timeout))
    store = distributed.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=processes, timeout=timeout)


def read_text(path: str | None) -> tuple[Tensor, int]:
    """The characters of a text as numbers, and how many different ones it has; without a file, text is generated."""
    text = Path(path).read_text() if path else " ".join(random.Random(0).choices(WORDS, k=20_000))
    known = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([known[character] for character in text]), len(known)


def batch(text: Tensor, step: int, size: int, rank: int, processes: int) -> tuple[Tensor, Tensor]:
    """The rows of this process in the batch of a step, which is a function of the step alone."""
    starts = torch.randint(len(text) - CONTEXT, (size,), generator=torch.Generator().manual_seed(step))
    rows = text[starts.tensor_split(processes)[rank][:, None] + torch.arange(CONTEXT + 1)]
    return rows[:, :-1], rows[:, 1:]


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), labels.flatten())


def mean_of(loss: Tensor) -> float:
    """The loss of all processes, which have batches of the same size."""
    total = loss.detach().clone()
    if distributed.is_initialized():
        distributed.all_reduce(total)
        total /= distributed.get_world_size()
    return float(total)


def checksum(weights: dict[str, Tensor]) -> str:
    """Eight digits that are the same if all weights are, bit for bit."""
    found = 0
    for weight in weights.values():
        found = zlib.crc32(weight.detach().cpu().contiguous().numpy().tobytes(), found)
    return f"{found:08x}"


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """A process that is killed leaves the file that was there before, or a complete one."""
    partial = path.with_name(f"{path.name}.partial")
    write(partial)
    os.replace(partial, path)


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--text", help="a text file; without it, text is generated")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"), help="from whose checkpoint a run goes on")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=24, help="rows of all processes together")
    parser.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--optimizer", default="IVON", help="a name of bayesgrad.optim")
    parser.add_argument("--double", action="store_true", help="float64, in which rounding does not show")
    found = parser.parse_args()
    if found.double:
        torch.set_default_dtype(torch.float64)
    return found
