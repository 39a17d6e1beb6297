"""The one place that knows of other processes: what one may not do with its part of a batch, of data or of weights.

DistributedDataParallel averages `.grad`. An optimizer that uses nothing else, and whose draws are functions of seed and
position, then gives each process the weights that one process would have. What a part collects from the batch of its
own process (`Part.local`) would differ between processes, and is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

_independent = ContextVar("independent", default=False)
REMEDY = "If each process trains a model of its own, use `with bayesgrad.distributed.independent_processes():`."


@contextmanager
def independent_processes() -> Iterator[None]:
    """A context for a process group in which each process trains a model of its own.

    An optimizer that is built in it, and `laplace` called in it, do not take the processes for one training run. The
    context is not needed for the steps of such an optimizer.

    >>> with independent_processes():  # for example in a search where each process tries other settings
    ...     joint_processes()
    1
    """
    token = _independent.set(True)
    try:
        yield
    finally:
        _independent.reset(token)


def independent() -> bool:
    """Whether each process trains a model of its own."""
    return _independent.get()


def joint_processes() -> int:
    """The number of processes that train one model; 1 without a process group."""
    if _independent.get() or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 1
    return torch.distributed.get_world_size()


def from_first(value: int) -> int:
    """The value of the first of the processes that train one model, all of which have to call this."""
    values = [value]
    if joint_processes() > 1:
        with unset_fake_temporarily():
            torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def refuse_local(name: str, local: str) -> None:
    """Raises if several processes train one model.

    Args:
        name: of the optimizer.
        local: what it would collect from the batch of its own process alone.
    """
    if (size := joint_processes()) > 1:
        raise RuntimeError(
            f"{name} supports one process, got {size}: each would use {local} of its own batch. Train in one process. "
            f"{REMEDY}"
        )


def refuse_several_draws(name: str) -> None:
    """Raises for a second draw of weights before a step.

    The gradient of each draw is a difference of `.grad` before and after it, which under `no_sync` belongs to the batch
    of one process.
    """
    if (size := joint_processes()) > 1:
        raise RuntimeError(
            f"{name} supports one draw of weights for each step in several processes, got a second one in {size} "
            "processes: run all micro-batches inside one `with optimizer.sampled():`, or call zero_grad() before it."
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


def refuse_shard_of_data(name: str, loader: Any, num_data: float | None) -> None:
    """Raises if a loader goes through the part of the data that belongs to one process, and counts it as all data."""
    batches = getattr(loader, "batch_sampler", None)
    samplers = getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)
    # DistributedSampler has `num_replicas`; accelerate's shards have `num_processes`.
    places = (getattr(s, own, 1) for s in (*samplers, getattr(loader, "dataset", None)) for own in _COUNTS)
    size = max((n for n in places if isinstance(n, int)), default=1)
    if size > 1 and num_data is None and not independent():
        raise ValueError(
            f"{name} needs all data, but the sampler of this loader gives one of {size} parts of them: pass a loader "
            f"without DistributedSampler, or num_data= to extrapolate from this part. {REMEDY}"
        )


_COUNTS = ("num_replicas", "num_processes")
