"""What processes with parts of the parameters do together, for tests/contract/test_sharded.py.

`python sharded_processes.py RANK PROCESSES FOLDER` saves what it found as FOLDER/RANK.pt: name -> weights, or an error
message.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from cases import CASES, ELEMENTWISE, Case, batch, small_model

STEPS = 20
BY_NAME = {case.name: case for case in CASES}
SHARDED = (*ELEMENTWISE, BY_NAME["AdaBayes-drawn"])
Result = dict[str, Tensor] | str


def model_of(width: int = 20) -> nn.Module:
    model = small_model(torch.float64, width=width)
    model.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))  # fully_shard does not support scalars
    torch.manual_seed(0)  # from which optimizers draw their seeds
    return model


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """A module of its own for one layer; the rest, with odd numbers of rows and single elements, in the root."""
    fully_shard(model.wide, **options)
    return fully_shard(model, **options)


def run(net: nn.Module, optimizer: Any, part: slice, steps: range) -> None:
    """Steps on a part of each batch."""
    for index in steps:
        x, y = (t[part] for t in batch(index, torch.float64))
        with optimizer.sampled():
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
        optimizer.step()


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The weights, of all processes."""
    parts = {name: p.detach() for name, p in model.named_parameters()}
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for name, p in parts.items()}


def alone(case: Case) -> Result:
    model = model_of()
    run(model, case.of(model, fused=False), slice(None), range(STEPS))
    return whole(model)


def fsdp2(case: Case, part: slice) -> Result:
    model = sharded(model_of())
    run(model, case.of(model, fused=False), part, range(STEPS))
    return whole(model)


def attempt(found: dict[str, Result], name: str, what: Callable[..., Result], *args: Any) -> None:
    try:
        found[name] = what(*args)
    except (RuntimeError, ValueError, TypeError, FloatingPointError) as error:
        found[name] = f"{type(error).__name__}: {error}"


def main(rank: int, processes: int, folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Result] = {}
    for case in SHARDED:
        attempt(found, f"alone {case.name}", alone, case)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=processes)
    rows = 32 // processes
    part = slice(rows * rank, rows * rank + rows)
    for case in CASES:
        attempt(found, f"fsdp2 {case.name}", fsdp2, case, part)
    distributed.destroy_process_group()
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
