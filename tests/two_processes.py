"""What two processes do together, for tests/contract/test_several_processes.py: one process group for everything.

`python two_processes.py RANK FOLDER` saves what it found as FOLDER/RANK.pt: name -> weights, or an error message.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from bayesgrad.distributed import independent_processes
from cases import CASES, Case, batch, small_model, weights

STEPS = 3
BY_NAME = {case.name: case for case in CASES}
SHARDED = ("AdaBayes", "AdaBayesFP", "AdaBound", "KalmanMomentum", "IVON", "AdaBayes-drawn", "STE", "BayesBiNN")
Result = dict[str, Tensor] | str


def model_of() -> nn.Module:
    model = small_model(torch.float64, width=20)
    model.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))  # FSDP does not support scalars
    torch.manual_seed(0)  # from which optimizers draw their seeds
    return model


def run(net: nn.Module, optimizer: Any, part: slice) -> None:
    """A few steps on a part of each batch."""
    for index in range(STEPS):
        x, y = (t[part] for t in batch(index, torch.float64))
        with optimizer.sampled():
            optimizer.zero_grad()
            outputs = net(x)
            loss = F.cross_entropy(outputs, y)
            optimizer.observe(outputs, loss=loss)
            loss.backward()
        optimizer.step()


def alone(case: Case) -> Result:
    model = model_of()
    run(model, case.of(model, fused=False), slice(None))
    return weights(model)


def zero(case: Case, part: slice) -> Result:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = model_of()
    net = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), case.make, **case.options, fused=False)
    for index in range(STEPS):
        x, y = (t[part] for t in batch(index, torch.float64))
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return weights(model)


def fsdp1(case: Case, part: slice, original: bool) -> Result:
    from torch.distributed.fsdp import FullyShardedDataParallel

    net = FullyShardedDataParallel(model_of(), use_orig_params=original, device_id=torch.device("cpu"))
    run(net, case.make(net.parameters(), **case.options, fused=False), part)
    with FullyShardedDataParallel.summon_full_params(net):
        return {name.replace("_fsdp_wrapped_module.", ""): w for name, w in weights(net).items()}


def independent(case: Case) -> Result:
    """A model of its own in each process; the context is left before the first step, and the optimizer copied."""
    model = model_of()
    with independent_processes():
        optimizer = case.of(model, fused=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = copy.deepcopy((model, optimizer))
    run(model, optimizer, slice(None))
    return weights(model)


def attempt(found: dict[str, Result], name: str, what: Callable[..., Result], *args: Any) -> None:
    try:
        found[name] = what(*args)
    except (RuntimeError, ValueError, TypeError) as error:
        found[name] = f"{type(error).__name__}: {error}"


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Result] = {}
    if rank == 0:
        for case in CASES:
            attempt(found, f"alone {case.name}", alone, case)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    part = slice(16 * rank, 16 * rank + 16)
    for case in CASES:
        attempt(found, f"own {case.name}", independent, case)
    for name in SHARDED:
        attempt(found, f"zero {name}", zero, BY_NAME[name], part)
        attempt(found, f"fsdp1 {name}", fsdp1, BY_NAME[name], part, False)
        attempt(found, f"fsdp1 original {name}", fsdp1, BY_NAME[name], part, True)
    distributed.destroy_process_group()
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
