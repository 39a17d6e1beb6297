"""Names of the old laboratory, until all experiments are converted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from bayesgrad_lab.store import read_json, write_atomically, write_json  # noqa: F401
from bayesgrad_lab.task import augmented  # noqa: F401
from bayesgrad_lab.training import evaluate, log_probabilities  # noqa: F401


@dataclass(frozen=True)
class Trial:
    """One training run: everything that its numbers depend on.

    Args:
        data, network, method: names.
        lr: where the method starts.
        seed: of the weights and of the order of examples.
        milestones: epochs after which lr falls tenfold.
        decay: L2 strength in SGD's terms.
        purpose: "search" or "final", for the file's name.
    """

    network: str
    method: str
    lr: float
    seed: int
    epochs: int
    batch_size: int
    milestones: tuple[int, ...] = ()
    decay: float = 0.0
    augment: bool = False
    large: bool = False
    purpose: str = "final"
    data: str = "data"

    @property
    def key(self) -> str:
        return f"{self.purpose}-{self.data}-{self.network}-{self.method}-lr{self.lr:g}-seed{self.seed}"


@contextlib.contextmanager
def drawn(optimizers: Iterable[Any]) -> Iterator[None]:
    """Weights drawn from the belief of each optimizer that takes gradients there; passes run inside."""
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            if getattr(optimizer, "takes_draws", False):
                stack.enter_context(optimizer.sampled())
        yield
