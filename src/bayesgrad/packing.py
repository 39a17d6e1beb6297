"""Packing: blocks of parameters that one kernel call updates together.

An elementwise update does not depend on how weights are grouped. So a block holds all parameters of one dtype, one
device and one step count. Large tensors are passed to the kernel as they are. A call for each small tensor would be
slow, so the state of small tensors is in one flat tensor per slot, and their weights and gradients are copied into flat
buffers before the call and back after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesgrad import kernels, noise, shards
from bayesgrad.directions import Directions, Product, Scaled, dense, subtract
from bayesgrad.kernels import CHUNK, Row, compute_dtype
from bayesgrad.shards import gradient_of, local

SMALL = 1 << 15  # elements up to which a tensor is packed with others
PACK = 1 << 18  # elements of one pack at most: bounds the memory of the gathered copies

State = dict[str, Tensor]
VARIANCE = "variance"  # the slot of the variance of each weight, in the units of its optimizer
Job = tuple[Any, dict[str, Any], list[Tensor], tuple[str, ...]]


class Block:
    """Parameters that are updated together, with a shared step counter and their state by slot.

    Args:
        params: parameters of one dtype and device, all with a gradient.
        state: the optimizer's state. Its tensors are replaced by tensors with the same values in the kernel's layout.
        slots: the names of the state tensors, in the order of the kernel's arguments.
        begins: those slots that were created after the first step of the parameters; empty after the next step.
    """

    def __init__(
        self, params: Sequence[Tensor], state: dict[Any, State], slots: tuple[str, ...], begins: tuple[str, ...] = ()
    ) -> None:
        self.params, self.weights = list(params), [local(p) for p in params]
        self.gradient_of = _gradients(params)
        self.slots, self.begins = slots, begins
        self.dtype, self.device = params[0].dtype, params[0].device
        self.elements = sum(w.numel() for w in self.weights)
        self.step = state[params[0]]["step"].clone()
        for p in params:
            state[p]["step"] = self.step
        self.large = [(p, w) for p, w in zip(params, self.weights) if w.numel() > SMALL and is_dense(w)]
        large = {id(p) for p, _ in self.large}
        dtype = compute_dtype(self.dtype)
        for p, w in self.large:
            for slot in slots:
                old = local(state[p][slot])
                if old.stride() != w.stride() or old.dtype != dtype:
                    state[p][slot] = shards.placed(torch.empty_like(w, dtype=dtype).copy_(old), p)
        parts = list(_parts([p for p in params if id(p) not in large]))
        longest = max((sum(local(p).numel() for p in part) for part in parts), default=0)
        buffers = [torch.empty(longest, dtype=dtype, device=self.device) for _ in range(2)]
        self.packs = [Pack(part, state, slots, *buffers) for part in parts]
        self.layout = [layout_of(w) for w in self.weights]
        self.kept = [[state[p][slot] for slot in ("step", *slots)] for p in self.params]
        self.flat = [[flat(local(state[p][slot])) for slot in slots] for p, _ in self.large]
        # Kernels use the memory of these tensors. `.data` of a state is replaced as a whole, so packs show two each.
        shown = [p for p, _ in self.large] + [p for pack in self.packs for p in (pack.params[0], pack.params[-1])]
        values = [local(state[p][slot]) for p in shown for slot in slots]
        self.memory = [(v, v.data_ptr()) for v in values if type(v) is Tensor and v.numel()]

    def holds(self, params: Sequence[Tensor], state: dict[Any, State]) -> bool:
        """Whether the block is still valid: no parameter and no tensor of the state, or its `.data`, was replaced."""
        if len(params) != len(self.params) or any(value.data_ptr() != place for value, place in self.memory):
            return False
        for p, mine, weight, layout, kept in zip(params, self.params, self.weights, self.layout, self.kept):
            entry = state.get(p, {})
            if p is not mine or (weight is not p and local(p) is not weight):
                return False
            if (weight.dtype, weight.device, weight.shape, weight.stride()) != layout:
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
        rest = []
        for (p, w), state in zip(self.large, self.flat):
            gradient = directions.get(p)
            if (
                isinstance(gradient, (Product, Scaled))
                and axpy_coefficients
                and w.is_contiguous()
                and gradient.dtype == w.dtype
            ):
                subtract(gradient, w, state[0].view_as(w) if state else None, *axpy_coefficients)
            elif axpy_coefficients and not state and isinstance(gradient, Tensor) and gradient.dtype == w.dtype:
                *_, step_scale, shrink = axpy_coefficients
                (w if shrink == 1 else w.mul_(shrink)).add_(gradient, alpha=-step_scale)
            else:
                rest.append((p, w, self.gradient_of(p) if gradient is None else dense(gradient), state))
        if rest:
            # One dtype for all, and none in which gradients of half-precision weights (`grad_dtype`) would overflow.
            narrow = all(gradient.dtype == self.dtype for _, _, gradient, _ in rest)
            dtype = self.dtype if narrow else compute_dtype(self.dtype)
            rows = []
            for p, w, gradient, state in rest:
                more = [flat(_laid_out(values[p], w, values[p].dtype)) for values in evidence]
                rows.append((flat(w), flat(_laid_out(gradient, w, dtype)), *more, *state))
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
        initialise: Callable[[Any, dict[str, Any], list[Tensor]], list[tuple[str, ...]]],
    ) -> list[tuple[Any, dict[str, Any], list[Block]]]:
        """The blocks of each job.

        Args:
            jobs: whose rule updates the parameters, their group, the parameters, and the names of their state tensors.
            state: the optimizer's.
            initialise: creates missing state tensors of a job, and returns the names of those that begin late.
        """
        kept, self.kept = self.kept, []
        for index, (owner, group, params, slots) in enumerate(jobs):
            blocks = kept[index] if index < len(kept) else []
            if not blocks_fit(blocks, params, state, slots):
                late = initialise(owner, group, params)
                keys = [(p.dtype, p.device, float(state[p]["step"]), some) for p, some in zip(params, late)]
                blocks = [
                    Block([p for p, k in zip(params, keys) if k == key], state, slots, begins=key[-1])
                    for key in dict.fromkeys(keys)
                ]
            self.kept.append(blocks)
        return [(owner, group, blocks) for (owner, group, *_), blocks in zip(jobs, self.kept)]


class Pack:
    """Small tensors in one row; `weight` and `gradient` are buffers that all packs of a block share."""

    def __init__(
        self, params: list[Tensor], state: dict[Any, State], slots: tuple[str, ...], weight: Tensor, gradient: Tensor
    ) -> None:
        self.params, self.parts, self.gradient_of = params, [local(p) for p in params], _gradients(params)
        size = sum(part.numel() for part in self.parts)
        self.weight, self.gradient = weight[:size], gradient[:size]
        self.state = [torch.empty_like(self.weight) for _ in slots]
        self.weights, self.gradients = self._views(self.weight), self._views(self.gradient)
        for slot, storage in zip(slots, self.state):
            views = self._views(storage)
            torch._foreach_copy_(views, [local(state[p][slot]) for p in params])
            for p, view in zip(params, views):
                state[p][slot] = shards.placed(view, p)

    def _views(self, storage: Tensor) -> list[Tensor]:
        pieces = storage.split([part.numel() for part in self.parts])
        return [piece.view(part.shape) for piece, part in zip(pieces, self.parts)]

    def gather(self, directions: Directions, evidence: Sequence[Mapping[Tensor, Tensor]]) -> Row:
        gradients = [dense(directions[p]) if p in directions else self.gradient_of(p) for p in self.params]
        torch._foreach_copy_(self.weights + self.gradients, self.parts + gradients)
        more = [torch.cat([values[p].to(self.weight.dtype).reshape(-1) for p in self.params]) for values in evidence]
        return (self.weight, self.gradient, *more, *self.state)

    def step_axpy(self, directions: Directions, keep: float, fresh: float, step_scale: float, shrink: float) -> bool:
        """The step of `directions.subtract` for all parameters, without a kernel; False if it does not apply."""
        steps = [dense(directions[p]) for p in self.params if p in directions]
        if len(steps) < len(self.params) or any(d.dtype != p.dtype for d, p in zip(steps, self.params)):
            return False
        if self.state:
            momenta = self._views(self.state[0])
            torch._foreach_mul_(momenta, keep)
            torch._foreach_add_(momenta, steps, alpha=fresh)
            steps = momenta
        if shrink != 1:
            torch._foreach_mul_(self.parts, shrink)
        torch._foreach_add_(self.parts, steps, alpha=-step_scale)
        return True

    def scatter(self) -> None:
        torch._foreach_copy_(self.parts, self.weights)


def _gradients(params: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    return gradient_of if any(map(shards.is_shard, params)) else attrgetter("grad")


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
        if part and size + local(p).numel() > PACK:
            yield part
            part, size = [], 0
        part.append(p)
        size += local(p).numel()
    if part:
        yield part


def layout_of(p: Tensor) -> tuple:
    """What must not change for a block to remain valid."""
    return p.dtype, p.device, p.shape, p.stride()


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


# --- blocks that are perturbed ---


@dataclass(frozen=True)
class Perturb:
    """w + sqrt(scale v) e for standard normal e: a kernel of (weight, variance, saved) and optional positions.

    Args:
        has_positions: whether the row ends with the positions of its elements; else they are consecutive.
    """

    has_positions: bool
    writes = (2, 0)

    def __call__(self, scalars: Sequence[Any], place: Sequence[Any], *row: Tensor) -> tuple[Tensor, ...]:
        weight, variance, _, *position = row
        where = position[0] if self.has_positions else noise.positions(place[2], weight)
        square, cosine = noise.normal_parts(where, place[0], place[1])
        dtype = kernels.compute_dtype(weight.dtype)
        spread = kernels.sqrt(scalars[0] * variance.to(dtype) * square.to(dtype))
        return weight, weight.to(dtype) + spread * cosine.to(dtype)


@dataclass(frozen=True)
class Restore:
    """(weight, saved) <- (saved, weight - saved): restores the mean and keeps the offset of the sample."""

    writes = (0, 1)

    def __call__(self, scalars: Sequence[Any], weight: Tensor, saved: Tensor) -> tuple[Tensor, Tensor]:
        return saved, weight - saved


class SampledBlock:
    """Parameters of one group, dtype and device that are perturbed together.

    Args:
        group: the param group.
        params: the parameters to perturb.
        starts: the position of each parameter's first element among all weights, which determines its noise.
    """

    state_key: ClassVar[str] = VARIANCE  # the slot that determines the distribution
    kernel: ClassVar[Callable[..., Any]] = Perturb

    def __init__(self, group: dict[str, Any], params: list[Tensor], starts: list[int]) -> None:
        self.group, self.params, self.weights = group, params, [local(p) for p in params]
        self.device, self.dtype = params[0].device, params[0].dtype
        self.elements = sum(w.numel() for w in self.weights)
        self.layout = [layout_of(w) for w in self.weights]
        self.large = [i for i, w in enumerate(self.weights) if w.numel() > SMALL and is_dense(w)]
        chosen = set(self.large)
        self.small = [i for i in range(len(params)) if i not in chosen]
        self.saved = {i: torch.empty_like(self.weights[i]) for i in self.large}
        starts = [noise.signed(start) for start in starts]
        first = {i: shards.first_position(starts[i], params[i]) for i in self.large if self.weights[i].is_contiguous()}
        self.first = {i: position for i, position in first.items() if position is not None}
        self.order = {i: _order(params[i], starts[i]) for i in self.large if i not in self.first}
        size = sum(self.weights[i].numel() for i in self.small)
        self.pack = [torch.empty(size, dtype=self.dtype, device=self.device) for _ in range(2)]
        self.state_values = torch.empty(size, dtype=kernels.compute_dtype(self.dtype), device=self.device)
        self.views = [self._views(buffer) for buffer in (*self.pack, self.state_values)]
        self.positions = torch.cat(
            [torch.empty(0, dtype=torch.int32, device=self.device)]
            + [shards.positions(starts[i], params[i]) for i in self.small]
        )
        self.entered = self.complete = False

    def _views(self, buffer: Tensor) -> list[Tensor]:
        some = [self.weights[i] for i in self.small]
        return [part.view(w.shape) for part, w in zip(buffer.split([w.numel() for w in some]), some)]

    def fits(self) -> bool:
        """Whether memory, dtype, device, shape and strides of all parameters are still the same."""
        for p, w, layout in zip(self.params, self.weights, self.layout):
            if (p is not w and local(p) is not w) or (w.dtype, w.device, w.shape, w.stride()) != layout:
                return False
        return True

    def perturb(
        self,
        states: list[Tensor],
        scalars: list[float],
        key: noise.Key,
        given: Mapping[Any, Tensor] | Callable[[Tensor], Tensor] | None,
        elements: int,
    ) -> None:
        """Replaces each parameter by a sample.

        Args:
            states: the state tensor `state_key` of each parameter.
            scalars: of the kernel.
            key: determines the noise.
            given: noise to use in place of random numbers.
            elements: of the whole model: kernels of large ones are compiled.
        """
        weights, saved, spread = self.views
        states = [one if type(one) is Tensor else local(one) for one in states]
        small = [self.weights[i] for i in self.small]
        if small:
            torch._foreach_copy_(weights, small)
            torch._foreach_copy_(saved, small)
        for i in self.large:
            if given is not None:
                self.saved[i].copy_(self.weights[i])
        # An error may end the draw: a kernel replaces NaN before it changes the weights that follow.
        for memory in self.saved.values() if given is None else ():
            flat(memory)[::CHUNK].fill_(math.nan)
        self.entered, self.complete = True, given is not None
        if given is not None:
            for i, (p, one) in enumerate(zip(self.params, states)):
                e = given(p) if callable(given) else given[p]
                if e.shape != p.shape:
                    raise ValueError(
                        f"noise must have the shape of its parameter, {tuple(p.shape)}, got {tuple(e.shape)}."
                    )
                self.perturb_with(i, one, local(shards.placed_like(e, p)).to(one), scalars)
            return
        rows = [
            (flat(w := self.weights[i]), flat(_like(states[i], w)), flat(self.saved[i]), *self.extra_buffers(i))
            for i in self.large
        ]
        for i, row in zip(self.large, rows):
            order = [self.order[i]] if i in self.order else []
            kernel, place = self.kernel(has_positions=bool(order)), (*key, self.first.get(i, 0))
            kernels.run(kernel, scalars, [(*row, *order)], self.group["fused"], elements, [place])
        if small:
            torch._foreach_copy_(spread, [states[i] for i in self.small])
            row = (self.pack[0], self.state_values, self.pack[1], *self.extra_buffers(None), self.positions)
            kernels.run(self.kernel(has_positions=True), scalars, [row], self.group["fused"], elements, [(*key, 0)])
            torch._foreach_copy_(small, weights)
        self.complete = True

    def perturb_with(self, i: int, spread: Tensor, noise: Tensor, scalars: list[float]) -> None:
        """Perturbs the i-th parameter with given noise."""
        w = self.weights[i]
        w.copy_(w.to(spread.dtype) + (scalars[0] * spread).sqrt() * noise)

    def extra_buffers(self, i: int | None) -> tuple[Tensor, ...]:
        """Further outputs of the kernel, for the i-th parameter or for all small ones (None)."""
        return ()

    def restore(self, offsets: bool, elements: int) -> None:
        """Restores the means; with `offsets`, stores the differences between samples and means."""
        if not self.entered:
            return
        self.entered = False
        weights, saved, _ = self.views
        small = [self.weights[i] for i in self.small]
        if small:
            if offsets:
                torch._foreach_copy_(weights, small)
                self.pack[0].sub_(self.pack[1])
            torch._foreach_copy_(small, saved)
        if offsets:
            rows = [(flat(self.weights[i]), flat(self.saved[i])) for i in self.large]
            kernels.run(Restore(), [], rows, self.group["fused"], elements)
        elif self.complete and self.large:
            torch._foreach_copy_([self.weights[i] for i in self.large], [self.saved[i] for i in self.large])
        else:
            for i in self.large:
                for weight, saved in zip(*(flat(t).split(CHUNK) for t in (self.weights[i], self.saved[i]))):
                    weight.copy_(torch.where(saved[0].isnan(), weight, saved))

    def offsets(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The difference between the last sample and the mean of each parameter."""
        for i in self.large:
            yield self.params[i], self.saved[i]
        for i, view in zip(self.small, self.views[0]):
            yield self.params[i], view


def _order(p: Tensor, start: int) -> Tensor:
    """The positions of a parameter's elements, in memory order."""
    weight = local(p)
    return flat(torch.empty_like(weight, dtype=torch.int32).copy_(shards.positions(start, p).view(weight.shape)))


def _like(values: Tensor, p: Tensor) -> Tensor:
    return values if values.stride() == p.stride() else torch.empty_like(p, dtype=values.dtype).copy_(values)
