"""What several processes that train one model may not do: refusals in a sentence."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import Tensor

from bayesgrad.distributed import joint_processes, process_index


def refuse_empty(rows: int | None, independent: bool) -> None:
    """Raises if a process observes no rows: others may exchange what they observe, and wait for it."""
    if rows == 0 and not independent and joint_processes() > 1:
        raise RuntimeError(
            f"process {process_index()} of {joint_processes()} observed an empty batch, for which the others would "
            "wait: give each process at least one example in each step, for example by drop_last=True."
        )


def refuse_several_squares(name: str) -> None:
    """Raises for a second draw of weights before a step, whose gradients are squared.

    The gradient of each draw is a difference of `.grad` before and after it, which under `no_sync` belongs to the batch
    of one process, and the mean of squares is not the square of the mean.
    """
    raise RuntimeError(
        f"{name} squares the gradient of each draw of weights and supports one draw for each step in several "
        "processes, got a second one: run all micro-batches inside one `with optimizer.sampled():`, or call "
        "zero_grad() before it."
    )


def refuse_shards(name: str, params: Iterable[Tensor]) -> None:
    """Raises for parameters of which each process has a part, in an optimizer that draws weights.

    Noise is a function of a weight's position among all weights, which a process that has a part does not know.
    """
    if joint_processes() == 1:
        return
    if any(getattr(p, "_fsdp_flattened", False) for p in params):
        raise RuntimeError(
            f"{name} draws weights and needs all of them in each process, got the shards of "
            "FullyShardedDataParallel: the draws of shards would be correlated. Use DistributedDataParallel."
        )
    refuse_partition(name)


def refuse_partition(name: str) -> None:
    """Raises in the constructor of an optimizer that changes weights outside of `step()`, by ZeroRedundancyOptimizer.

    That class gives each process some of the parameters, and sends them to the others after a step only.
    """
    if joint_processes() == 1 or (module := sys.modules.get("torch.distributed.optim")) is None:
        return
    kind = getattr(module, "ZeroRedundancyOptimizer", ())
    frame = sys._getframe(1)
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), kind):
            raise RuntimeError(
                f"{name} changes weights outside of step() and needs all of them in each process, but "
                "ZeroRedundancyOptimizer gives it some: processes would compute gradients at different weights. "
                f"Use {name} with DistributedDataParallel alone."
            )
        frame = frame.f_back
