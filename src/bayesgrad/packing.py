"""Packing: blocks of parameters that one kernel call updates together.

An elementwise update does not depend on how weights are grouped. So a block holds all parameters of one dtype, one
device and one step count. Large tensors are passed to the kernel as they are. A call for each small tensor would be
slow, so the state of small tensors is in one flat tensor per slot, and their weights and gradients are copied into flat
buffers before the call and back after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from bayesgrad.kernels import Row, compute_dtype

SMALL = 1 << 15  # elements up to which a tensor is packed with others
PACK = 1 << 18  # elements of one pack at most: bounds the memory of the gathered copies

State = dict[str, Tensor]
Job = tuple[Any, dict[str, Any], list[Tensor], tuple[str, ...]]


@dataclass(frozen=True, eq=False)
class Product:
    """A direction factor * left.T @ right as its two factors, left (rows, out) and right (rows, in)."""

    left: Tensor
    right: Tensor
    factor: float
    shape: torch.Size

    def dense(self) -> Tensor:
        return (self.left.T @ self.right).mul_(self.factor).view(self.shape)

    def into(self, target: Tensor, keep: float, fresh: float) -> None:
        """target <- keep target + fresh direction, in one pass over it."""
        target.view(self.left.shape[1], -1).addmm_(self.left.T, self.right, beta=keep, alpha=fresh * self.factor)

    def subtract_from(
        self, p: Tensor, momentum: Tensor | None, keep: float, fresh: float, step_scale: float, shrink: float
    ) -> None:
        """p <- shrink p - step_scale m, with m the direction or its momentum, m <- keep m + fresh direction."""
        if momentum is None:
            self.into(p, shrink, -step_scale)
            return
        self.into(momentum, keep, fresh)
        (p if shrink == 1 else p.mul_(shrink)).add_(momentum, alpha=-step_scale)


Directions = Mapping[Tensor, Tensor | Product]


def dense(direction: Tensor | Product) -> Tensor:
    return direction.dense() if isinstance(direction, Product) else direction


class Block:
    """Parameters that are updated together, with a shared step counter and their state by slot.

    Args:
        params: parameters of one dtype and device, all with a gradient.
        state: the optimizer's state. Its tensors are replaced by tensors with the same values in the kernel's layout.
        slots: the names of the state tensors, in the order of the kernel's arguments.
    """

    def __init__(self, params: Sequence[Tensor], state: dict[Any, State], slots: tuple[str, ...]) -> None:
        self.params = list(params)
        self.slots = slots
        self.dtype, self.device = params[0].dtype, params[0].device
        self.elements = sum(p.numel() for p in params)
        self.step = state[params[0]]["step"].clone()
        for p in params:
            state[p]["step"] = self.step
        self.large = [p for p in params if p.numel() > SMALL and is_dense(p)]
        large = set(map(id, self.large))
        dtype = compute_dtype(self.dtype)
        for p in self.large:
            for slot in slots:
                if state[p][slot].stride() != p.stride() or state[p][slot].dtype != dtype:
                    state[p][slot] = torch.empty_like(p, dtype=dtype).copy_(state[p][slot])
        parts = list(_parts([p for p in params if id(p) not in large]))
        longest = max((sum(p.numel() for p in part) for part in parts), default=0)
        buffers = [torch.empty(longest, dtype=dtype, device=self.device) for _ in range(2)]
        self.packs = [Pack(part, state, slots, *buffers) for part in parts]
        self.layout = [layout_of(p) for p in self.params]
        self.kept = [[state[p][slot] for slot in ("step", *slots)] for p in self.params]
        self.flat = [[flat(state[p][slot]) for slot in slots] for p in self.large]

    def holds(self, params: Sequence[Tensor], state: dict[Any, State]) -> bool:
        """Whether the block is still valid: no parameter and no tensor of the state was replaced."""
        if len(params) != len(self.params):
            return False
        for p, mine, layout, kept in zip(params, self.params, self.layout, self.kept):
            entry = state.get(p, {})
            if p is not mine or layout_of(p) != layout:
                return False
            if not all(map(is_, map(entry.get, ("step", *self.slots)), kept)):
                return False
        return True

    def rows(
        self,
        directions: Directions,
        axpy_coefficients: tuple[float, float, float, float] | None,
        evidence: Sequence[Mapping[Tensor, Tensor]] = (),
    ) -> Iterator[list[Row]]:
        """Yields the rows of one kernel call at a time; the caller updates them in place before the next.

        Args:
            directions: replace the gradients of some parameters.
            axpy_coefficients: (keep, fresh, step_scale, shrink), if the step is p <- shrink p - step_scale m, with m
                the direction or its momentum (the only slot). A `Product` is then applied here and never stored.
            evidence: further inputs of the kernel, each a tensor per parameter.
        """
        rows = []
        for p, state in zip(self.large, self.flat):
            gradient = directions.get(p)
            if (
                isinstance(gradient, Product)
                and axpy_coefficients
                and p.is_contiguous()
                and gradient.left.dtype == p.dtype
            ):
                gradient.subtract_from(p, state[0].view_as(p) if state else None, *axpy_coefficients)
            else:
                gradient = gradient_of(p) if gradient is None else dense(gradient)
                more = [flat(_laid_out(values[p], p, values[p].dtype)) for values in evidence]
                rows.append((flat(p), flat(_laid_out(gradient, p, p.dtype)), *more, *state))
        if rows:
            yield rows
        for pack in self.packs:
            if axpy_coefficients and pack.step_axpy(directions, *axpy_coefficients):
                continue
            yield [pack.gather(directions, evidence)]
            pack.scatter()


class Layout:
    """The blocks of an optimizer, reused from step to step until parameters or state tensors are replaced."""

    def __init__(self) -> None:
        self.kept: list[list[Block]] = []

    def of(
        self,
        jobs: Sequence[Job],
        state: dict[Any, State],
        initialise: Callable[[Any, dict[str, Any], list[Tensor]], None],
    ) -> list[tuple[Any, dict[str, Any], list[Block]]]:
        """The blocks of each job.

        Args:
            jobs: whose rule updates the parameters, their group, the parameters, and the names of their state tensors.
            state: the optimizer's.
            initialise: creates missing state tensors of a job.
        """
        kept, self.kept = self.kept, []
        for index, (owner, group, params, slots) in enumerate(jobs):
            blocks = kept[index] if index < len(kept) else []
            if not blocks_fit(blocks, params, state, slots):
                initialise(owner, group, params)
                keys = [(p.dtype, p.device, float(state[p]["step"])) for p in params]
                blocks = [
                    Block([p for p, k in zip(params, keys) if k == key], state, slots) for key in dict.fromkeys(keys)
                ]
            self.kept.append(blocks)
        return [(owner, group, blocks) for (owner, group, *_), blocks in zip(jobs, self.kept)]


class Pack:
    """Small tensors in one row; `weight` and `gradient` are buffers that all packs of a block share."""

    def __init__(
        self, params: list[Tensor], state: dict[Any, State], slots: tuple[str, ...], weight: Tensor, gradient: Tensor
    ) -> None:
        self.params = params
        size = sum(p.numel() for p in params)
        self.weight, self.gradient = weight[:size], gradient[:size]
        self.state = [torch.empty_like(self.weight) for _ in slots]
        self.weights, self.gradients = self._views(self.weight), self._views(self.gradient)
        for slot, storage in zip(slots, self.state):
            views = self._views(storage)
            torch._foreach_copy_(views, [state[p][slot] for p in params])
            for p, view in zip(params, views):
                state[p][slot] = view

    def _views(self, storage: Tensor) -> list[Tensor]:
        parts = storage.split([p.numel() for p in self.params])
        return [part.view(p.shape) for part, p in zip(parts, self.params)]

    def gather(self, directions: Directions, evidence: Sequence[Mapping[Tensor, Tensor]]) -> Row:
        gradients = [dense(directions[p]) if p in directions else gradient_of(p) for p in self.params]
        torch._foreach_copy_(self.weights + self.gradients, self.params + gradients)
        more = [torch.cat([values[p].to(self.weight.dtype).reshape(-1) for p in self.params]) for values in evidence]
        return (self.weight, self.gradient, *more, *self.state)

    def step_axpy(self, directions: Directions, keep: float, fresh: float, step_scale: float, shrink: float) -> bool:
        """The step of `Product.subtract_from` for all parameters, without a kernel; False if it does not apply."""
        steps = [dense(directions[p]) for p in self.params if p in directions]
        if len(steps) < len(self.params) or any(d.dtype != p.dtype for d, p in zip(steps, self.params)):
            return False
        if self.state:
            momenta = self._views(self.state[0])
            torch._foreach_mul_(momenta, keep)
            torch._foreach_add_(momenta, steps, alpha=fresh)
            steps = momenta
        if shrink != 1:
            torch._foreach_mul_(self.params, shrink)
        torch._foreach_add_(self.params, steps, alpha=-step_scale)
        return True

    def scatter(self) -> None:
        torch._foreach_copy_(self.params, self.weights)


def blocks_fit(blocks: list[Block], params: list[Tensor], state: dict[Any, State], slots: tuple[str, ...]) -> bool:
    """Whether these blocks are still valid and hold exactly these parameters."""
    if len(blocks) == 1:  # the usual case keeps the order of the parameters
        return blocks[0].slots == slots and blocks[0].holds(params, state)
    mine = {id(p) for block in blocks for p in block.params}
    return mine == {id(p) for p in params} and all(
        block.slots == slots and block.holds(block.params, state) for block in blocks
    )


def _parts(params: list[Tensor]) -> Iterator[list[Tensor]]:
    part: list[Tensor] = []
    size = 0
    for p in params:
        if part and size + p.numel() > PACK:
            yield part
            part, size = [], 0
        part.append(p)
        size += p.numel()
    if part:
        yield part


def layout_of(p: Tensor) -> tuple:
    """What must not change for a block to remain valid."""
    return p.dtype, p.device, p.shape, p.stride()


def gradient_of(p: Tensor) -> Tensor:
    """`p.grad` of a parameter that has one, as type Tensor."""
    return p.grad  # pyright: ignore[reportReturnType]


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a memory range without gaps or overlap, for any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor's memory as one dimension."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def _laid_out(values: Tensor, p: Tensor, dtype: torch.dtype) -> Tensor:
    """Values with the strides of the parameter and the given dtype; a copy only if they differ."""
    alike = values.stride() == p.stride() and values.dtype == dtype
    return values if alike else torch.empty_like(p, dtype=dtype).copy_(values)
