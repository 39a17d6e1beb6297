"""Processes that use different heads of a network, for tests/contract/test_heads_in_processes.py.

`python heads_in_processes.py RANK PROCESSES FOLDER` saves FOLDER/RANK.pt: name -> weights, or an error message.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from bayesgrad import optim, samplers

STEPS, BATCH, CLASSES = 3, 8, 3
EVERY: dict[str, Any] = {"stats_every": 1, "update_every": 1}
FILTER: dict[str, Any] = {"batch_size": 16, "lr": 0.01, "seed": 0}
RULES: dict[str, Callable[[nn.Module], Any]] = {
    "FOOF": lambda model: optim.FOOF(model, **EVERY),
    "KFAC": lambda model: optim.KFAC(model, seed=0, **EVERY),
    "KroneckerFilter": lambda model: optim.KroneckerFilter(model, fisher="empirical", **FILTER),
    "KroneckerFilterFP": lambda model: optim.KroneckerFilterFP(model, fisher="empirical", **FILTER, **EVERY),
    "Newton": lambda model: optim.Newton(model.parameters(), num_data=100),
    "IVON": lambda model: optim.IVON(model.parameters(), num_data=100, seed=0),
    "Langevin": lambda model: samplers.Langevin(model, num_data=100, lr=0.05, seed=0),
    "OGN": lambda model: optim.OGN(model, num_data=100),
    "AdaBayes": lambda model: optim.AdaBayes(model.parameters(), batch_size=16, fisher="sampled", seed=0),
    "NaturalGradient": lambda model: optim.NaturalGradient(model, seed=0, update_every=1),
}
# Step, process and micro-batch -> the head. The last pass of a step is that in which gradients are averaged.
HEADS: dict[str, tuple[int, Callable[[int, int, int], str]]] = {
    "of processes": (1, lambda step, rank, micro: "ab"[(rank + step) % 2]),
    "of processes in all passes": (2, lambda step, rank, micro: "ab"[rank]),
    "of passes": (2, lambda step, rank, micro: "ab"[micro]),
    "of passes and processes": (2, lambda step, rank, micro: "ab"[(micro + rank) % 2]),
}


class Heads(nn.Module):
    """Two heads of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(5, 6), nn.Linear(6, CLASSES), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor, head: str) -> Tensor:
        return getattr(self, head)(torch.tanh(self.body(x)))


def train(rule: str, heads: str, clip: bool, rank: int | None) -> dict[str, Tensor]:
    """Trains with the batches of one process, or in one process with those of all as further passes."""
    torch.manual_seed(0)
    model = Heads().double()
    optimizer, (number, head) = RULES[rule](model), HEADS[heads]
    net: Any = model if rank is None else DistributedDataParallel(model, find_unused_parameters=True)
    given = "labels" if rule in ("KFAC", "AdaBayes", "NaturalGradient") else ""  # others take none
    for step in range(STEPS):
        with optimizer.sampled():
            optimizer.zero_grad()
            for micro in range(number):
                for own in (0, 1) if rank is None else (rank,):
                    generator = torch.Generator().manual_seed(100 * step + 10 * micro + own)
                    x = torch.randn(BATCH, 5, generator=generator, dtype=torch.float64)
                    y = torch.randint(CLASSES, (BATCH,), generator=generator)
                    with net.no_sync() if rank is not None and micro < number - 1 else nullcontext():
                        outputs = net(x, head(step, own, micro))
                        loss = F.cross_entropy(outputs, y) / number / (2 if rank is None else 1)
                        optimizer.observe(outputs, loss=loss, labels=y if given else None)
                        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", "gradients were changed")
    found: dict[str, Any] = {}
    every = [(rule, heads, clip) for rule in RULES for heads in HEADS for clip in (False, True)]
    for one in every if rank == 0 else ():
        found[f"alone {one}"] = train(*one, None)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=size)
    for one in every:
        try:
            found[str(one)] = train(*one, rank)
        except (RuntimeError, UserWarning) as error:
            found[str(one)] = f"{type(error).__name__}: {error}"
    distributed.destroy_process_group()
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
