"""The part of the data that a process reads, of data that are divided among processes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import BatchSampler, DistributedSampler

from bayesgrad import distributed
from bayesgrad.likelihoods import Bernoulli, Categorical, Likelihood

_COUNTS = ("num_replicas", "num_processes")  # of DistributedSampler; of accelerate's shards


class DataShard:
    """The batches of a loader that gives each process a part of the data; `bayesgrad.laplace` and `elbo` sum over them.

    A loader with a `DistributedSampler` is taken for one without this class. That sampler gives some processes an
    example more than there are, so that all have the same number; these repetitions are left out. Of any other loader,
    the parts of processes must be disjoint. In a single process, they are all data.

    >>> shard = DataShard([(torch.zeros(3, 2), torch.tensor([0, 1, 2])), (torch.zeros(2, 2), torch.tensor([0, 1]))])
    >>> shard.gather([inputs.sum(1) for inputs, labels in shard]).shape
    torch.Size([5])

    Args:
        loader: batches, whose tensors have examples along the first dimension.

    Attributes:
        rank, size: the number of this process, and that of processes.
    """

    def __init__(self, loader: Iterable) -> None:
        self._loader = loader
        self._sampler = _distributed_sampler(loader)
        self.size = distributed.joint_processes()
        self.rank = distributed.process_index() if self.size > 1 else 0

    def __iter__(self) -> Iterator[Any]:
        sampler, seen = self._sampler, 0
        if sampler is None and self.size > 1 and _parts(self._loader) > 1:
            raise ValueError(
                "the loader divides examples among processes in a way that is not known: use torch's DataLoader with "
                "DistributedSampler."
            )
        if sampler is None:
            yield from self._loader
            return
        own = self._own(sampler)
        for batch in self._loader:
            rows = _rows(batch)
            keep = min(rows, own - seen)
            seen += rows
            if keep > 0:
                yield batch if keep == rows else _first(batch, rows, keep)
        if own != len(sampler) and seen not in (len(sampler), _whole(self._loader, sampler)):
            raise ValueError(
                f"batches have {seen} rows, but the sampler gives {len(sampler)} examples, some twice, and which is "
                "not known: use a dataset whose examples are rows, or a multiple of the number of processes."
            )

    def __len__(self) -> int:
        """The number of batches, with those that are left out."""
        return len(self._loader)  # pyright: ignore[reportArgumentType]

    def _own(self, sampler: DistributedSampler) -> int:
        """How many of the sampler's examples are no repetitions: example k of process r is k processes + r in all."""
        if (sampler.rank, sampler.num_replicas) != (self.rank, self.size):
            raise ValueError(
                f"the sampler of this loader is of part {sampler.rank} of {sampler.num_replicas}, and this is process "
                f"{self.rank} of {self.size}: leave its rank and num_replicas out. {distributed.REMEDY}"
            )
        batches = getattr(self._loader, "batch_sampler", None)
        plain = type(sampler).__iter__ is DistributedSampler.__iter__ and type(batches) in (BatchSampler, type(None))
        if not plain or not getattr(self._loader, "in_order", True):
            raise ValueError(
                "the order in which this loader gives the examples of its DistributedSampler is not known: use "
                "DistributedSampler and BatchSampler themselves, with in_order=True."
            )
        every = len(sampler.dataset)  # pyright: ignore[reportArgumentType]
        return min(len(sampler), max(0, -(-(every - self.rank) // self.size)))

    # --- of all processes ---

    def together(self) -> AbstractContextManager[None]:
        """A context in which an error of one process is raised by all of them."""
        return distributed.errors_of_all() if self.size > 1 else nullcontext()

    def total(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        """The sums over processes, which communicate through a device."""
        if self.size == 1:
            return list(numbers)
        return distributed.total(torch.tensor(numbers, dtype=torch.float64, device=device))[0].tolist()

    def share(self, parts: Iterable[distributed.Sharing], *run: Hashable) -> None:
        """Exchanges what parts have collected; `run` must be the same in all processes: seed and weights."""
        if self.size > 1:
            distributed.exchange(parts, *run, what="the weights of the model or the seed")

    def gather(self, parts: Sequence[Any]) -> Any:
        """What was computed for each batch, of all processes, in all of them.

        Args:
            parts: for each batch, in order, a tensor, or tuples or dicts of tensors as `Posterior.predict` returns
                them, with one row for each example.

        Returns:
            The same for all examples: in the order of the dataset, for a loader with a `DistributedSampler`, else that
            of the first process first.

        Raises:
            ValueError: there are no batches, or parts have other numbers of rows than examples.
        """
        with self.together():
            if not parts:
                raise ValueError("gather() needs what was computed for at least one batch in each process, got none.")
            spec = tree_flatten(parts[0])[1]
            joined = [torch.cat(column) for column in zip(*(tree_flatten(part)[0] for part in parts))]
            order = None if self._sampler is None else torch.tensor(list(self._sampler)[: self._own(self._sampler)])
            if order is not None and (whole := _whole(self._loader, self._sampler)) < len(order):
                order = order[:whole]
            if any(len(column) != len(joined[0] if order is None else order) for column in joined):
                raise ValueError(
                    f"gather() needs one row for each example, got {[len(column) for column in joined]} rows for "
                    f"{len(joined[0] if order is None else order)} examples."
                )
        if self.size > 1:
            joined = distributed.gathered(*joined)
            order = None if order is None else distributed.gathered(order.to(joined[0].device))[0]
        if order is not None:
            joined = [column[order.argsort().to(column.device)] for column in joined]
        return tree_unflatten(joined, spec)

    # --- random numbers that are functions of an example's number in all processes ---

    def uniform(self, count: int, generator: torch.Generator) -> Tensor:
        """Uniform numbers for the next examples of this process: those that one process would draw for them."""
        return torch.rand(count * self.size, dtype=torch.float64, generator=generator)[self.rank :: self.size]

    def labels(self, likelihood: Likelihood, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Labels sampled for the next examples: those that one process would sample, if each needs one number."""
        shapes = {Categorical: outputs.shape[1:-1], Bernoulli: outputs.shape[1:]}
        if self.size == 1 or (shape := shapes.get(type(likelihood))) is None:
            return likelihood.sample(outputs, generator)
        found = []
        for row in outputs.split(1):
            before, after = self.rank * shape.numel(), (self.size - 1 - self.rank) * shape.numel()
            torch.rand(before, dtype=torch.float64, generator=generator)
            found.append(likelihood.sample(row, generator))
            torch.rand(after, dtype=torch.float64, generator=generator)
        return torch.cat(found)


def data_of(name: str, loader: Iterable, num_data: float | None) -> DataShard:
    """The batches of a loader: of all data, or of a part if it has a `DistributedSampler` or is a `DataShard`.

    Raises:
        ValueError: the loader gives a part of the data that belongs to processes other than those that train one model,
            which would be taken for all data.
    """
    if isinstance(loader, DataShard):
        return loader
    found = DataShard(loader)
    if found._sampler is not None and found.size > 1:
        return found
    if (parts := _parts(loader)) > 1 and num_data is None and not distributed.independent():
        raise ValueError(
            f"{name} needs all data, but the sampler of this loader gives one of {parts} parts of them: initialise the "
            f"process group and use torch's DistributedSampler, or pass a loader of all data. {distributed.REMEDY}"
        )
    found._sampler, found.rank, found.size = None, 0, 1
    return found


def _samplers(loader: Any) -> list[Any]:
    batches = getattr(loader, "batch_sampler", None)
    return [getattr(batches, "sampler", None), batches, getattr(loader, "sampler", None)]


def _distributed_sampler(loader: Any) -> DistributedSampler | None:
    return next((one for one in _samplers(loader) if isinstance(one, DistributedSampler)), None)


def _parts(loader: Any) -> int:
    """The number of parts of which the loader gives one."""
    places = (*_samplers(loader), getattr(loader, "dataset", None))
    found = (getattr(place, name, 1) for place in places for name in _COUNTS)
    return max((n for n in found if isinstance(n, int)), default=1)


def _whole(loader: Any, sampler: Any) -> int:
    """The number of the sampler's examples in the loader's batches, which may leave out the last ones."""
    batches = getattr(loader, "batch_sampler", None)
    size = batches.batch_size if batches is not None and batches.drop_last else 1
    return len(sampler) // size * size


def _rows(batch: Any) -> int:
    """The number of examples: of labels, or of the first tensor."""
    given = batch
    while not isinstance(given, Tensor):
        if isinstance(given, Mapping):
            given = given.get("labels", next((v for v in given.values() if isinstance(v, Tensor)), None))
        else:
            given = given[-1] if isinstance(given, tuple | list) and given else None
        if given is None:
            raise TypeError(f"batches must have tensors, with examples along the first dimension, got {type(batch)}.")
    return len(given)


def _first(batch: Any, rows: int, keep: int) -> Any:
    """The first examples of a batch."""
    if isinstance(batch, Tensor):
        return batch[:keep] if batch.dim() and len(batch) == rows else batch
    if isinstance(batch, Mapping):
        return {key: _first(value, rows, keep) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(_first(value, rows, keep) for value in batch)
    return batch
