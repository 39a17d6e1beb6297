"""Parameters of which each process has a part: the DTensors of `fully_shard` (FSDP2) and of tensor parallelism.

An elementwise step is the same on every part. So kernels work on the part that a process has, `local(p)`, and the state
of such a parameter are DTensors of the same placement, which `torch.distributed.checkpoint` saves and loads under any
number of processes. Noise is a function of a weight's position in the whole parameter, so a process draws its part of
the vector that one process would draw. For ordinary tensors all functions here do nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bayesgrad import noise

_ORDINARY = (Tensor, nn.Parameter)


def _dtensor() -> Any:
    """The class DTensor; an empty tuple if nobody has imported it, so that nothing is an instance of it."""
    module = sys.modules.get("torch.distributed.tensor")
    return () if module is None else module.DTensor


def is_shard(tensor: Any) -> bool:
    """Whether a tensor is a DTensor."""
    return type(tensor) not in _ORDINARY and isinstance(tensor, _dtensor())


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process has, which shares its memory; `to_local` would be part of a graph."""
    return tensor._local_tensor if is_shard(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def whole(tensor: Tensor) -> Tensor:
    """A tensor with the parts of all processes, all of which have to call this."""
    return tensor.full_tensor() if is_shard(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def gradient_of(p: Any) -> Tensor:
    """The part of `p.grad` that belongs to the part of the parameter, for a parameter that has a gradient."""
    gradient = p.grad
    if type(gradient) is Tensor:  # of most parameters; steps with many small ones call this often
        return gradient
    if is_shard(gradient) and gradient.placements != p.placements:  # tensor parallelism leaves sums to be reduced
        gradient = gradient.redistribute(placements=p.placements)
    return local(gradient)


def version(tensor: Tensor) -> int:
    """A number that changes with every change in place; FSDP2 adds gradients to the local part alone."""
    return tensor._version + local(tensor)._version if is_shard(tensor) else tensor._version


def placed(part: Tensor, p: Any) -> Tensor:
    """A local part as a tensor with the placement of the parameter; it shares memory with the part."""
    if not is_shard(p):
        return part
    shape = {"shape": p.shape, "stride": p.stride()}
    return _dtensor().from_local(part, p.device_mesh, p.placements, run_check=False, **shape)


def placed_like(value: Tensor, p: Any) -> Tensor:
    """A whole tensor, or one of another placement, as a tensor with the placement of the parameter."""
    if not is_shard(p):
        return value
    if is_shard(value):
        return value.redistribute(p.device_mesh, p.placements)  # pyright: ignore[reportAttributeAccessIssue]
    distribute = sys.modules["torch.distributed.tensor"].distribute_tensor
    return distribute(value.detach(), p.device_mesh, p.placements, src_data_rank=None)


def _indices(p: Any) -> list[Tensor]:
    """The indices in the whole parameter of the rows, columns, ... that this process has."""
    module = sys.modules["torch.distributed.tensor"]
    found = []
    for dim, size in enumerate(p.shape):
        # One dimension at a time: a tensor with an element for each element of the whole parameter may be too large.
        placements = [_along(one, dim, module.Replicate()) for one in p.placements]
        every = torch.arange(size, device=local(p).device)
        found.append(module.distribute_tensor(every, p.device_mesh, placements, src_data_rank=None).to_local())
    return found


def _along(placement: Any, dim: int, other: Any) -> Any:
    """The placement of the indices of one dimension."""
    if getattr(placement, "dim", None) != dim:
        return other
    strided = {"split_factor": placement.split_factor} if hasattr(placement, "split_factor") else {}
    return type(placement)(0, **strided)


def positions(start: int, p: Tensor) -> Tensor:
    """The position of each element that this process has, for a parameter whose first element is at `start`; int32."""
    if not is_shard(p):
        return noise.positions(start, p)
    total = torch.full(local(p).shape, start, dtype=torch.int64, device=local(p).device)
    stride = p.numel()
    for dim, (size, index) in enumerate(zip(p.shape, _indices(p))):
        stride //= max(size, 1)
        total += (index * stride).view(-1, *[1] * (p.dim() - dim - 1))
    return ((total + 2**31) % 2**32 - 2**31).to(torch.int32).flatten()


def first_position(start: int, p: Tensor) -> int | None:
    """The position of the first of the elements that this process has, if their positions are consecutive."""
    if not is_shard(p):
        return start
    if not local(p).numel() or not local(p).is_contiguous():
        return None
    indices = _indices(p)
    rows, *rest = indices or [torch.zeros(1, dtype=torch.int64)]
    if any(len(index) != size for index, size in zip(rest, p.shape[1:])) or int(rows[-1] - rows[0]) != len(rows) - 1:
        return None
    return noise.signed(start + int(rows[0]) * (p.numel() // p.shape[0] if p.dim() else 1))


def any_process(flag: Tensor, params: Iterable[Tensor]) -> Tensor:
    """Whether a flag is true in any of the processes that have parts of these parameters."""
    for mesh in dict.fromkeys(p.device_mesh for p in params if is_shard(p)):  # pyright: ignore
        flag = _summed(flag.to(torch.int32), mesh, [True] * mesh.ndim) > 0
    return flag


def count_of(number: Tensor, p: Any) -> Tensor:
    """The sum over processes of a number that each has counted in its part of the parameter."""
    if not is_shard(p):
        return number
    return _summed(number, p.device_mesh, [hasattr(one, "dim") for one in p.placements])


def _summed(number: Tensor, mesh: Any, over: list[bool]) -> Tensor:
    module = sys.modules["torch.distributed.tensor"]
    placements = [module.Partial() if one else module.Replicate() for one in over]
    return module.DTensor.from_local(number, mesh, placements, run_check=False).full_tensor()


def gathering_modules(params: Iterable[Tensor]) -> list[nn.Module]:
    """The modules of `fully_shard` whose forward passes gather these parameters."""
    mine = {id(p) for p in params if is_shard(p)}
    states = sys.modules.get("torch.distributed._composable_state")
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    # A parameter does not know its module, and an optimizer of parameters does not either.
    known: list[Any] = list(getattr(states, "_module_state_mapping", ())) if mine else []
    return [module for module in known if isinstance(module, kind) and any(id(p) in mine for p in module.parameters())]


def refuse(name: str, what: str, params: Iterable[Tensor]) -> None:
    """Raises for distributed tensors.

    Args:
        name: of the optimizer.
        what: it uses that needs whole parameters.
        params: all that it has.
    """
    if any(map(is_shard, params)):
        raise TypeError(
            f"{name} uses {what} and needs whole parameters in each process, got DTensors (fully_shard, tensor "
            "parallelism): use DistributedDataParallel, or an optimizer that uses gradients and draws alone, such as "
            "AdaBayes, KalmanMomentum or IVON."
        )


def refuse_unreduced(name: str) -> None:
    """Raises if the gradients of a draw were added to those of a later one before they became shards."""
    raise RuntimeError(
        f"{name} supports one draw of weights until gradients are averaged over processes, got a second one: run all "
        "micro-batches without gradient synchronisation inside one `with optimizer.sampled():`, or call zero_grad() "
        "after a pass without gradients."
    )


def refuse_posterior(params: Iterable[Tensor]) -> None:
    """Raises for distributed tensors."""
    if any(map(is_shard, params)):
        raise TypeError(
            "posterior() needs whole parameters, got DTensors: save a full state dict of model and optimizer (see "
            "torch.distributed.checkpoint.state_dict), and load it in one process without fully_shard."
        )
