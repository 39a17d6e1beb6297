"""The one place that knows of other processes: what is exchanged with them.

DistributedDataParallel averages `.grad`. An optimizer that uses nothing else, and whose draws are functions of seed and
position, then gives each process the weights that one process would have. What a part collects from the batch of its
own process is summed over processes before it is read: see `Exchange` and `Part.share`. docs/distributed.md says what
is communicated.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

_independent = ContextVar("independent", default=False)
_own_draws = ContextVar("own_draws", default=False)
RUN = "the seed or the number of draws"  # what must be the same in all processes
SINK = 32  # operations between the outputs of DistributedDataParallel and what is observed
REMEDY = "If each process trains a model of its own, use `with bayesgrad.distributed.independent_processes():`."


# Whether there is a process group: torch's own function, as every step of an optimizer asks it.
has_group: Callable[[], bool] = torch.distributed.is_initialized if torch.distributed.is_available() else bool


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


@contextmanager
def independent_draws() -> Iterator[None]:
    """A context for optimizers whose weights or masks are drawn anew in each of several processes of one training run.

    An optimizer that is built in it takes the average over the processes' draws: the evidence of a step has less
    variance than with one draw for all. Draws are functions of the seed and of the number of the process, so runs with
    the same number of processes are reproducible. Resume a run inside of this context, too.

    >>> with independent_draws():
    ...     draws_differ()
    True
    """
    token = _own_draws.set(True)
    try:
        yield
    finally:
        _own_draws.reset(token)


def draws_differ() -> bool:
    """Whether each process draws weights of its own."""
    return _own_draws.get()


def process_index() -> int:
    """The number of this process."""
    return torch.distributed.get_rank()


def joint_processes() -> int:
    """The number of processes that train one model; 1 without a process group."""
    return torch.distributed.get_world_size() if has_group() and not _independent.get() else 1


def from_process(value: Any, source: int = 0) -> Any:
    """The value of one of the processes that train one model, all of which have to call this."""
    values = [value]
    if joint_processes() > 1:
        with unset_fake_temporarily():
            torch.distributed.broadcast_object_list(values, src=source)
    return values[0]


def fill_seeds(optimizer: Any, draw: Callable[[], int]) -> None:
    """Replaces a seed of None, once: that of the first group by a drawn number, others by the first group's.

    Args:
        optimizer: with the attributes `independent`, `defaults` and `param_groups`; sets `joined`, the number of
            processes that it knows of.
        draw: a number, which all processes take from the first one.
    """
    first = optimizer.param_groups[0]
    if first.get("seed", 0) is None:
        first["seed"] = draw() if optimizer.independent else from_process(draw())
    for values in (optimizer.defaults, *optimizer.param_groups):
        if values.get("seed", 0) is None:
            values["seed"] = first["seed"]
    optimizer.joined = 1 if optimizer.independent else joint_processes()


def agree_on_seed(optimizer: Any) -> None:
    """Takes the seed of the first process if the process group was initialised after an optimizer was built."""
    if optimizer.independent or optimizer.joined >= (size := joint_processes()):
        return
    optimizer.joined, groups = size, optimizer.param_groups
    if "seed" in groups[0]:
        old, new = groups[0]["seed"], from_process(groups[0]["seed"])
        for group in (group for group in groups if group["seed"] == old):
            group["seed"] = new


class Sum(NamedTuple):
    """What was collected, summed: over examples, then over processes.

    Args:
        total: the sum.
        count: the number of terms, so that a mean is total / count; a tensor once it was communicated.
    """

    total: Tensor
    count: Any = 1.0


class Exchange:
    """What the processes of one training run have collected since the last step: sums, and rows.

    Each part adds what it has, and a function that receives the same of all processes; `run` then communicates. All
    processes have to add tensors of the same shapes in the same order, also where they have collected nothing.
    """

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self._before = before
        self._sums: list[tuple[Tensor, Callable[[Tensor], None]]] = []
        self._rows: list[tuple[Tensor, Callable[[list[Tensor]], None]]] = []
        self._owners: list[Hashable] = []
        self._after: list[Callable[[], None]] = []
        self._device: torch.device | None = None

    def expect(self, like: Tensor) -> None:
        """Says that all processes take part, also one that has nothing to add: else the others would wait for it."""
        self._device = like.device

    def after(self, call: Callable[[], None]) -> None:
        """Calls a function when everything was received."""
        self._after.append(call)

    def add(self, one: Sum, receive: Callable[[Sum], Any], owner: Hashable = None) -> None:
        """Sums total and count over processes.

        Args:
            one: what this process has.
            receive: is called with the sums.
            owner: what it belongs to, as the number of a parameter: others of the same shape are not added to it.
        """
        self._owners.append(owner)
        held: list[Tensor] = []
        count = torch.as_tensor(one.count, dtype=one.total.dtype, device=one.total.device)
        self._sums.append((one.total, held.append))
        self._sums.append((count, lambda count: receive(Sum(held[0], count))))  # of one dtype: one all-reduce

    def gather(self, rows: Tensor, receive: Callable[[list[Tensor]], None], owner: Hashable = None) -> None:
        """Collects one tensor of each process; they may differ in shape, but not in the number of dimensions."""
        self._owners.append(owner)
        self._rows.append((rows, receive))

    def run(self, *run: Hashable, what: str = RUN) -> None:
        """Communicates: one all-reduce of all sums, and one all-gather of all rows, for each dtype.

        Args:
            run: what must be equal in all processes beside the shapes, as the seed.
            what: names it, in an error message.
        """
        for tensor, _ in (*self._sums[:1], *self._rows[:1]):
            self.expect(tensor)
        if self._device is None:
            return
        self._before()
        shapes = [(tuple(t.shape), t.dtype) for t, _ in self._sums], [(t.dim(), t.dtype) for t, _ in self._rows]
        layout = (*shapes, self._owners)
        own = torch.tensor([zlib.crc32(repr(words).encode()) for words in (layout, run)], device=self._device)
        every = torch.stack(_gathered(own)).tolist()
        for words, name in zip(zip(*every), ("what they have collected", what)):
            if len(set(words)) > 1:
                raise RuntimeError(
                    f"processes that train one model differ in {name}: build the optimizer alike in all of them, and "
                    f"use the same parts of the model, and observe() at least one example, in each step. {REMEDY}"
                )
        for total, (_, receive) in zip(_all_reduced([t for t, _ in self._sums]), self._sums):
            receive(total)
        for parts, (_, receive) in zip(_all_gathered([t for t, _ in self._rows]), self._rows):
            receive(parts)
        for call in self._after:
            call()


class Sharing(Protocol):
    """What takes part in an exchange."""

    def share(self, exchange: Exchange) -> None: ...


def exchange(
    parts: Iterable[Sharing], *run: Hashable, what: str = RUN, before: Callable[[], None] = lambda: None
) -> None:
    """Exchanges what parts have collected, if several processes train one model.

    Args:
        parts: what takes part.
        run, what: as in `Exchange.run`.
        before: is called if anything is exchanged.
    """
    if joint_processes() > 1:
        one = Exchange(before)
        for part in parts:
            part.share(one)
        one.run(*run, what=what)


def _gathered(own: Tensor) -> list[Tensor]:
    """A tensor of each process, all of the same shape."""
    found = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(found, own)
    return found


def _by_kind(tensors: Sequence[Tensor]) -> Iterable[list[int]]:
    """The indices of tensors of one dtype on one device."""
    found: dict[Any, list[int]] = {}
    for index, t in enumerate(tensors):
        found.setdefault((t.dtype, t.device), []).append(index)
    return found.values()


def _all_reduced(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sums over processes."""
    found = list(tensors)
    for chosen in _by_kind(tensors):
        flat = torch.cat([tensors[i].reshape(-1) for i in chosen])
        torch.distributed.all_reduce(flat)
        for i, part in zip(chosen, flat.split([tensors[i].numel() for i in chosen])):
            found[i] = part.view(tensors[i].shape)
    return found


def _all_gathered(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors of all processes."""
    if not tensors:
        return []
    shapes = torch.tensor([size for t in tensors for size in t.shape], device=tensors[0].device)
    every = [rank.split([t.dim() for t in tensors]) for rank in _gathered(shapes)]
    every = [[torch.Size(shape.tolist()) for shape in rank] for rank in every]
    found: list[list[Tensor]] = [[] for _ in tensors]
    for chosen in _by_kind(tensors):
        longest = max(sum(rank[i].numel() for i in chosen) for rank in every)
        flat = torch.cat([tensors[i].reshape(-1) for i in chosen])
        flat = torch.cat([flat, flat.new_zeros(longest - len(flat))])
        for rank, part in zip(every, _gathered(flat)):
            sizes = [rank[i].numel() for i in chosen]
            for i, piece in zip(chosen, part[: sum(sizes)].split(sizes)):
                found[i].append(piece.view(rank[i]))
    return found


def after_averaging(call: Callable[[], None]) -> None:
    """Calls a function at the end of the running backward pass, when DistributedDataParallel has averaged gradients."""
    engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportAttributeAccessIssue]
    # Functions are called in the order in which they were queued; that of DistributedDataParallel is queued by now or
    # later in this pass, but before the first of them is called.
    engine.queue_callback(lambda: engine.queue_callback(call))


@contextmanager
def unnoticed(*tensors: Any) -> Iterator[None]:
    """A context for backward passes of these outputs or losses that are not those of a step.

    DistributedDataParallel with `static_graph=True` takes the first backward pass of its outputs for that of a step.
    """
    nodes = [node for t in tensors if (node := getattr(t, "grad_fn", None)) is not None]
    models = set()
    for _ in range(SINK if joint_processes() > 1 else 0):
        models |= {own() for node in nodes if (own := getattr(node, "ddp_weakref", None)) is not None}
        nodes = [after for node in nodes for after, _ in node.next_functions if after is not None]
        if models or not nodes or len(nodes) > SINK:
            break
    waiting = [m for m in models if m.static_graph and not m._static_graph_delay_allreduce_enqueued]
    for model in waiting:
        model._static_graph_delay_allreduce_enqueued = True
    try:
        yield
    finally:
        for model in waiting:
            model._static_graph_delay_allreduce_enqueued = False


def swap(own: Sequence[Tensor], sizes: Sequence[int], group: Any) -> list[Tensor]:
    """Sends a flat tensor to each process of a group, and returns those that they have sent to this one.

    Args:
        own: what to send to each of them; all have one dtype.
        sizes: of what each of them sends.
        group: the process group, all of which have to call this.
    """
    found = own[0].new_empty(sum(sizes))
    torch.distributed.all_to_all_single(found, torch.cat(list(own)), list(sizes), [len(t) for t in own], group=group)
    return list(found.split(list(sizes)))


def average(*values: Tensor) -> list[Tensor]:
    """The means over the processes that train one model, all of which have to call this."""
    size = joint_processes()
    return [total / size for total in _all_reduced(values)] if size > 1 else list(values)


def total(*values: Tensor) -> list[Tensor]:
    """The sums over the processes that train one model, all of which have to call this."""
    return _all_reduced(values)


def largest(number: int, device: torch.device) -> int:
    """The largest number of the processes that train one model, all of which have to call this."""
    found = torch.tensor(number, device=device)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return int(found)


def gathered(*rows: Tensor) -> list[Tensor]:
    """Rows of all processes that train one model, those of the first process first; all have to call this."""
    return [torch.cat(parts) for parts in _all_gathered(rows)]


@contextmanager
def errors_of_all() -> Iterator[None]:
    """A context whose end all processes that train one model reach together: an error of one is raised by all."""
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    words = None if failed is None else f"process {process_index()} raised {type(failed).__name__}: {failed}"
    found: list[str | None] = [None] * joint_processes()
    torch.distributed.all_gather_object(found, words)
    if failed is not None:
        raise failed
    if first := next((one for one in found if one is not None), None):
        raise RuntimeError(first)


class Job(NamedTuple):
    """A computation whose arguments all processes have.

    Args:
        cost: in any unit.
        like: name -> a tensor with the shape and dtype of a result.
        run: computes the results, by name.
    """

    cost: float
    like: Mapping[str, Tensor]
    run: Callable[[], dict[str, Tensor]]


def owners(costs: Sequence[float], size: int) -> list[int]:
    """Which of some processes does each job: the most expensive ones first, each by the process with the least to do.

    >>> owners([1.0, 5.0, 2.0, 3.0], 2)
    [0, 0, 1, 1]
    """
    load, found = [0.0] * size, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        found[index] = min(range(size), key=load.__getitem__)
        load[found[index]] += costs[index]
    return found


def divided(jobs: Sequence[Job], size: int) -> list[dict[str, Tensor]]:
    """The results of jobs that are divided by cost among the processes that train one model, which all call this.

    An error of one process is raised by all of them.

    Args:
        jobs: the same in all processes.
        size: the number of processes.
    """
    if size == 1 or not jobs:
        return [job.run() for job in jobs]
    by, rank = owners([job.cost for job in jobs], size), torch.distributed.get_rank()
    found: list[dict[str, Tensor]] = [{} for _ in jobs]
    failed: Exception | None = None
    try:
        for index in (i for i, owner in enumerate(by) if owner == rank):
            found[index] = jobs[index].run()
    except (ValueError, ArithmeticError, RuntimeError) as error:
        failed = error
    for source in sorted(set(by)):
        places = [(i, name) for i, owner in enumerate(by) if owner == source for name in jobs[i].like]
        for chosen in _by_kind([jobs[i].like[name] for i, name in places]):
            some = [places[k] for k in chosen]
            shapes = [jobs[i].like[name].shape for i, name in some]
            first = jobs[some[0][0]].like[some[0][1]]
            flat = first.new_zeros(1 + sum(shape.numel() for shape in shapes))
            if source == rank and failed is None:
                flat = torch.cat([flat[:1], *(found[i][name].reshape(-1) for i, name in some)])
            elif source == rank:
                flat[0] = 1
            torch.distributed.broadcast(flat, source)
            if bool(flat[0]):
                errors = [failed]
                torch.distributed.broadcast_object_list(errors, source)
                assert errors[0] is not None
                raise errors[0]
            pieces = flat[1:].split([shape.numel() for shape in shapes])
            for (i, name), piece, shape in zip(some, pieces, shapes):
                found[i][name] = piece.view(shape).clone()  # a view would keep all of them
    return found


def position(rows: Tensor) -> int:
    """How many rows of a batch the processes before this one have; all that train one model have to call this."""
    if joint_processes() == 1:
        return 0
    counts = _gathered(rows.new_tensor(len(rows), dtype=torch.int64))
    return int(torch.stack(counts)[: torch.distributed.get_rank()].sum())


def gather(rows: Tensor) -> Tensor:
    """The rows of all processes that train one model, all of which have to call this."""
    return gathered(rows)[0] if joint_processes() > 1 else rows
