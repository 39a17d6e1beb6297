"""Parameters of which each process has a part: the DTensors of `fully_shard` (FSDP2) and of tensor parallelism.

An elementwise step is the same on every part. So kernels work on the part that a process has, `local(p)`, and the state
of such a parameter are DTensors of the same placement, which `torch.distributed.checkpoint` saves and loads under any
number of processes. Noise is a function of a weight's position in the whole parameter, so a process draws its part of
the vector that one process would draw. For ordinary tensors all functions here do nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from bayesgrad import distributed, noise

FSDP = "torch.distributed.fsdp"  # the module of `fully_shard`
_ORDINARY = (Tensor, nn.Parameter)
_OWNERS = WeakTensorKeyDictionary()  # what `fully_shard` has gathered -> the DTensor; None for other parameters


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


def has_nonzero_gradient(p: Any) -> bool:
    """Whether the gradient of a parameter, in any process, has an element that is not zero."""
    return bool(any_process(gradient_of(p).any(), [p]))


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


# --- what forward passes gather ---


def _sharded_modules() -> list[Any]:
    """All modules of this process to which `fully_shard` was applied."""
    kind = getattr(sys.modules.get(FSDP), "FSDPModule", None)
    if kind is None:
        return []
    # A parameter does not know its module, and an optimizer of parameters does not either.
    states = sys.modules.get("torch.distributed._composable_state")
    return [module for module in getattr(states, "_module_state_mapping", ()) if isinstance(module, kind)]


def _groups_of(module: Any) -> list[Any]:
    """The groups of parameters that a module of `fully_shard` gathers."""
    state = module._get_fsdp_state()
    one = getattr(state, "_fsdp_param_group", None)
    return getattr(state, "_fsdp_param_groups", [] if one is None else [one])


def gathering_modules(params: Iterable[Tensor]) -> list[nn.Module]:
    """The modules of `fully_shard` whose forward passes gather these parameters."""
    mine = {id(p) for p in params if is_shard(p)}
    known = _sharded_modules() if mine else []
    return [m for m in known if any(id(p.sharded_param) in mine for group in _groups_of(m) for p in group.fsdp_params)]


def _gathered_parameters() -> Iterator[tuple[Tensor, Tensor | None]]:
    """Each DTensor of `fully_shard`, and what forward passes use in its place; None before the first of them."""
    for one in (one for module in _sharded_modules() for group in _groups_of(module) for one in group.fsdp_params):
        yield one.sharded_param, getattr(one, "_unsharded_param", None)


def owner(tensor: Any) -> Any:
    """The DTensor whose gathered values `fully_shard` has put in its place; another tensor itself."""
    if tensor is None or is_shard(tensor) or FSDP not in sys.modules:
        return tensor
    if tensor not in _OWNERS:
        _OWNERS.update({whole: p for p, whole in _gathered_parameters() if whole is not None})
        _OWNERS.setdefault(tensor, None)
    found = _OWNERS[tensor]
    return tensor if found is None else found


def gathered(params: Iterable[Tensor], now: bool = False) -> dict[Tensor, Tensor]:
    """Parameter -> what forward passes use in its place; a parameter that none has used is left out.

    Args:
        now: whether to gather those that none has used; all processes have to call this.
    """
    params = list(params)
    known = {id(p): whole for p, whole in _gathered_parameters()} if any(map(is_shard, params)) else {}
    if now and (new := [p for p in params if is_shard(p) and known.get(id(p)) is None]):
        for module in gathering_modules(new):
            module.unshard()  # pyright: ignore[reportCallIssue]
            module.reshard()  # pyright: ignore[reportCallIssue]
        return gathered(params)
    found = {p: known.get(id(p)) if is_shard(p) else p for p in params}
    return {p: whole for p, whole in found.items() if whole is not None}


def has_gradient(p: Tensor) -> bool:
    """Whether a parameter has a gradient, perhaps one that `fully_shard` has not reduced yet."""
    if p.grad is not None or not is_shard(p):
        return p.grad is not None
    some = (one for module in gathering_modules([p]) for group in _groups_of(module) for one in group.fsdp_params)
    (own,) = (one for one in some if one.sharded_param is p)
    whole = getattr(own, "_unsharded_param", None)
    return own.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


@contextmanager
def unreduced(params: Iterable[Tensor], keep: bool = False) -> Iterator[None]:
    """A context for `torch.autograd.grad`: `fully_shard` gathers parameters in it, and reduces no gradients.

    Args:
        keep: whether gathered parameters stay until the end, for a graph of gradients.
    """
    modules: list[Any] = gathering_modules([owner(p) for p in params])
    groups = [group for module in modules for group in _groups_of(module)]
    before = [(group, group.reduce_grads, group.reshard_after_backward) for group in groups]
    for group in groups:
        group.reduce_grads, group.reshard_after_backward = False, group.reshard_after_backward and not keep
    for module in modules if keep else ():
        module.unshard()
    try:
        yield
    finally:
        for group, reduces, reshards in before:
            group.reduce_grads, group.reshard_after_backward = reduces, reshards
        for module in modules if keep else ():
            module.reshard()


# --- whole tensors, one at a time ---


class Solve(NamedTuple):
    """A function of the whole tensors of some parameters, of which each process has a part.

    Args:
        params: DTensors.
        parts: of one tensor in the shape of each parameter, all of one dtype.
        run: whole tensors -> whole tensors in the same shapes.
    """

    params: Sequence[Any]
    parts: Sequence[Tensor]
    run: Callable[[list[Tensor]], Sequence[Tensor]]


def _dimension(p: Any) -> tuple[int, int] | None:
    """The dimension of the mesh by which a DTensor is divided, and its own; None if there are several, or none."""
    found = [(i, one.dim) for i, one in enumerate(p.placements) if not one.is_replicate()]
    plain = len(found) == 1 and type(p.placements[found[0][0]]).__name__ == "Shard"
    return found[0] if plain else None


def _sizes(p: Any) -> list[int]:
    """The length of each process's part, in the dimension by which a DTensor is divided."""
    mesh, dim = _dimension(p)  # pyright: ignore[reportGeneralTypeIssues]
    length, number = p.shape[dim], p.device_mesh.size(mesh)
    step = -(-length // number)
    return [max(0, min(step, length - rank * step)) for rank in range(number)]


def _pieces(whole: Tensor, p: Any) -> tuple[Tensor, ...]:
    """The parts of all processes."""
    return whole.reshape(p.shape).split(_sizes(p), _dimension(p)[1])  # pyright: ignore[reportOptionalSubscript]


def part_of(whole: Tensor, p: Any) -> Tensor:
    """The part of a whole tensor that belongs to the part of the parameter, as a copy; a part itself."""
    if not is_shard(p) or whole.shape == local(p).shape:
        return whole
    mesh, _ = _dimension(p)  # pyright: ignore[reportGeneralTypeIssues]
    return _pieces(whole, p)[p.device_mesh.get_local_rank(mesh)].clone()  # a view would keep the whole


def solved(jobs: Sequence[Solve]) -> list[list[Tensor]]:
    """The parts that this process has of the results of each job, which all processes call with the same jobs.

    Each job is run by one process, which receives the parts of the others and sends back those of the result. There are
    as many jobs in a round as processes, so that a process has one job's whole tensors at a time.
    """
    found: dict[int, list[Tensor]] = {}
    kinds: dict[Any, list[int]] = {}
    for i in sorted(range(len(jobs)), key=lambda i: -sum(p.numel() for p in jobs[i].params)):
        params, parts, run = jobs[i]
        meshes = {(p.device_mesh, _dimension(p)[0]) if is_shard(p) else () for p in params}  # pyright: ignore
        if len(meshes) == 1:
            kinds.setdefault((*meshes.pop(), parts[0].dtype), []).append(i)
        else:  # some are not divided, or in another way: each process has the whole
            wholes = run([whole(placed(part, p)) for part, p in zip(parts, params)])
            found[i] = [part_of(one, p) for one, p in zip(wholes, params)]
    for (mesh, dim, _), some in kinds.items():
        group, size = mesh.get_group(dim), mesh.size(dim)
        for start in range(0, len(some), size):
            turn = some[start : start + size]
            found |= zip(turn, _round([jobs[i] for i in turn], group, size, mesh.get_local_rank(dim)))
    return [found[i] for i in range(len(jobs))]


def _round(jobs: Sequence[Solve], group: Any, size: int, rank: int) -> list[list[Tensor]]:
    """As `solved`, for at most one job for each process of a group."""
    nothing = jobs[0].parts[0].new_empty(0)
    # The numbers of elements that each process has of each parameter of a job.
    counts = [[[p.numel() // max(p.shape[_dimension(p)[1]], 1) * n for n in _sizes(p)] for p in j.params] for j in jobs]  # pyright: ignore
    idle = [0] * (size - len(jobs))
    own = [torch.cat([part.reshape(-1) for part in job.parts]) for job in jobs] + [nothing] * len(idle)
    results: list[list[Tensor]] = [[nothing] for _ in range(size)]
    if rank < len(jobs):
        job, each = jobs[rank], list(zip(*counts[rank]))
        received = distributed.swap(own, [sum(numbers) for numbers in each], group)
        rows = list(zip(*(flat.split(numbers) for flat, numbers in zip(received, each))))
        wholes = [_whole_of(parts, p) for parts, p in zip(rows, job.params)]
        pieces = [_pieces(whole, p) for whole, p in zip(job.run(wholes), job.params)]
        results = [[piece.reshape(-1) for piece in one] for one in zip(*pieces)]
    else:
        distributed.swap(own, [0] * size, group)
    mine = [[numbers[rank] for numbers in one] for one in counts]
    back = distributed.swap([torch.cat(one) for one in results], [*map(sum, mine), *idle], group)
    return [
        [flat.view_as(part) for flat, part in zip(whole.split(numbers), job.parts)]
        for whole, numbers, job in zip(back, mine, jobs)
    ]


def _whole_of(parts: Sequence[Tensor], p: Any) -> Tensor:
    dim = _dimension(p)[1]  # pyright: ignore[reportOptionalSubscript]
    shapes = [(*p.shape[:dim], size, *p.shape[dim + 1 :]) for size in _sizes(p)]
    return torch.cat([part.view(shape) for part, shape in zip(parts, shapes)], dim)


def summed(numbers: Sequence[Tensor], params: Sequence[Any]) -> list[Tensor]:
    """The sums over processes of numbers that each has computed from its part of a parameter."""
    found, kinds = list(numbers), {}
    for i, p in enumerate(params):
        if is_shard(p):
            kinds.setdefault((p.device_mesh, tuple(hasattr(one, "dim") for one in p.placements)), []).append(i)
    for (mesh, over), some in kinds.items():
        totals = _summed(torch.stack([numbers[i] for i in some]), mesh, list(over))
        for i, total in zip(some, totals.unbind()):
            found[i] = total
    return found


# --- refusals ---


def refuse(name: str, what: str, params: Iterable[Tensor], processes: int) -> None:
    """Raises for distributed tensors.

    Args:
        name: of the optimizer.
        what: it uses, which passes with whole parameters give.
        params: all that it has.
        processes: with which it exchanges what passes have given.
    """
    some: list[Any] = [p for p in params if is_shard(p)]
    if not some:
        return
    known = {id(p) for p, _ in _gathered_parameters()}
    if any(id(p) not in known or _dimension(p) is None for p in some):
        raise TypeError(
            f"{name} uses {what}, which fully_shard gathers, but tensor parallelism does not: use fully_shard alone, "
            "DistributedDataParallel, or an optimizer that uses gradients and draws alone, such as AdaBayes, "
            "KalmanMomentum or IVON."
        )
    if sizes := {size for p in some if (size := p.device_mesh.size()) != processes}:
        raise TypeError(
            f"{name} uses {what} in the batches of all processes that train one model, {processes}, but fully_shard "
            f"has divided parameters among {max(sizes)}: use a mesh of all processes, outside of "
            "independent_processes()."
        )


def refuse_replaced(optimizer: Any) -> None:
    """Raises if the whole parameters that an optimizer was built for became shards in its groups, as by accelerate."""
    if any(is_shard(p) for group in optimizer.param_groups for p in group["params"]):
        own = optimizer.__class__.__name__
        raise RuntimeError(
            f"fully_shard has replaced the parameters that {own} was built for: build {own} after fully_shard."
        )


def refuse_unreduced(name: str) -> None:
    """Raises if the gradients of a draw were added to those of a later one before they became shards."""
    raise RuntimeError(
        f"{name} supports one draw of weights until gradients are averaged over processes, got a second one: run all "
        "micro-batches without gradient synchronisation inside one `with optimizer.sampled():`, or call zero_grad() "
        "after a pass without gradients."
    )


def refuse_posterior(params: Iterable[Tensor], what: str = "posterior()") -> None:
    """Raises for distributed tensors."""
    if any(map(is_shard, params)):
        raise TypeError(
            f"{what} needs whole parameters, got DTensors: save a full state dict of model and optimizer (see "
            "torch.distributed.checkpoint.state_dict), and load it in one process without fully_shard."
        )
