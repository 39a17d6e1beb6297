"""Gradients at weights that are sampled from the belief: weights are perturbed in place, and restored afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesgrad import kernels, noise
from bayesgrad.packing import SMALL, flat, gradient_of, is_dense, layout_of
from bayesgrad.parts import Evidence, Groups, Noise
from bayesgrad.sources.draws import Draws, mark, same


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

    state_key: ClassVar[str] = "variance"  # the slot that determines the distribution
    kernel: ClassVar[Callable[..., Any]] = Perturb

    def __init__(self, group: dict[str, Any], params: list[Tensor], starts: list[int]) -> None:
        self.group, self.params = group, params
        self.device, self.dtype = params[0].device, params[0].dtype
        self.elements = sum(p.numel() for p in params)
        self.layout = [layout_of(p) for p in params]
        self.large = [i for i, p in enumerate(params) if p.numel() > SMALL and is_dense(p)]
        chosen = set(self.large)
        self.small = [i for i in range(len(params)) if i not in chosen]
        self.starts = [noise.signed(start) for start in starts]
        self.saved = {i: torch.empty_like(params[i]) for i in self.large}
        self.order = {i: _order(params[i], self.starts[i]) for i in self.large if not params[i].is_contiguous()}
        size = sum(params[i].numel() for i in self.small)
        self.pack = [torch.empty(size, dtype=self.dtype, device=self.device) for _ in range(2)]
        self.state_values = torch.empty(size, dtype=kernels.compute_dtype(self.dtype), device=self.device)
        self.views = [self._views(buffer) for buffer in (*self.pack, self.state_values)]
        self.positions = torch.cat(
            [torch.empty(0, dtype=torch.int32, device=self.device)]
            + [noise.positions(self.starts[i], params[i]) for i in self.small]
        )
        self.entered = False

    def _views(self, buffer: Tensor) -> list[Tensor]:
        some = [self.params[i] for i in self.small]
        return [part.view(p.shape) for part, p in zip(buffer.split([p.numel() for p in some]), some)]

    def fits(self) -> bool:
        """Whether dtype, device, shape and strides of all parameters are still the same."""
        return all(layout_of(p) == layout for p, layout in zip(self.params, self.layout))

    def perturb(
        self,
        states: list[Tensor],
        scalars: list[float],
        key: noise.Key,
        given: Mapping[Any, Tensor] | Callable[[Tensor], Tensor] | None,
        fused: bool,
    ) -> None:
        """Replaces each parameter by a sample.

        Args:
            states: the state tensor `state_key` of each parameter.
            scalars: of the kernel.
            key: determines the noise.
            given: noise to use in place of random numbers.
            fused: whether to compile the kernel.
        """
        weights, saved, spread = self.views
        small = [self.params[i] for i in self.small]
        if small:
            torch._foreach_copy_(weights, small)
            torch._foreach_copy_(saved, small)
        for i in self.large:
            if given is not None:
                self.saved[i].copy_(self.params[i])
        self.entered = True
        if given is not None:
            for i, (p, one) in enumerate(zip(self.params, states)):
                e = given(p) if callable(given) else given[p]
                if e.shape != p.shape:
                    raise ValueError(
                        f"noise must have the shape of its parameter, {tuple(p.shape)}, got {tuple(e.shape)}."
                    )
                self.perturb_with(i, one, e.to(one), scalars)
            return
        rows = [
            (flat(self.params[i]), flat(_like(states[i], self.params[i])), flat(self.saved[i]), *self.extra_buffers(i))
            for i in self.large
        ]
        for i, row in zip(self.large, rows):
            order = [self.order[i]] if i in self.order else []
            kernels.run(
                self.kernel(has_positions=bool(order)), scalars, [(*row, *order)], fused, [(*key, self.starts[i])]
            )
        if small:
            torch._foreach_copy_(spread, [states[i] for i in self.small])
            row = (self.pack[0], self.state_values, self.pack[1], *self.extra_buffers(None), self.positions)
            kernels.run(self.kernel(has_positions=True), scalars, [row], fused, [(*key, 0)])
            torch._foreach_copy_(small, weights)

    def perturb_with(self, i: int, spread: Tensor, noise: Tensor, scalars: list[float]) -> None:
        """Perturbs the i-th parameter with given noise."""
        p = self.params[i]
        p.copy_(p.to(spread.dtype) + (scalars[0] * spread).sqrt() * noise)

    def extra_buffers(self, i: int | None) -> tuple[Tensor, ...]:
        """Further outputs of the kernel, for the i-th parameter or for all small ones (None)."""
        return ()

    def restore(self, offsets: bool, fused: bool) -> None:
        """Restores the means; with `offsets`, stores the differences between samples and means."""
        if not self.entered:
            return
        self.entered = False
        weights, saved, _ = self.views
        small = [self.params[i] for i in self.small]
        if small:
            if offsets:
                torch._foreach_copy_(weights, small)
                self.pack[0].sub_(self.pack[1])
            torch._foreach_copy_(small, saved)
        if offsets:
            rows = [(flat(self.params[i]), flat(self.saved[i])) for i in self.large]
            kernels.run(Restore(), [], rows, fused)
        elif self.large:
            torch._foreach_copy_([self.params[i] for i in self.large], [self.saved[i] for i in self.large])

    def offsets(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The difference between the last sample and the mean of each parameter."""
        for i in self.large:
            yield self.params[i], self.saved[i]
        for i, view in zip(self.small, self.views[0]):
            yield self.params[i], view


def _order(p: Tensor, start: int) -> Tensor:
    """The positions of a parameter's elements, in memory order."""
    return flat(torch.empty_like(p, dtype=torch.int32).copy_(noise.positions(start, p).view(p.shape)))


def _like(values: Tensor, p: Tensor) -> Tensor:
    return values if values.stride() == p.stride() else torch.empty_like(p, dtype=values.dtype).copy_(values)


class WeightSampling(Draws):
    """Gradients at weights that are sampled from the belief, whose variance is in the state.

    Args:
        evidence: what the curvature needs of a draw beside the gradient: None, the difference between sampled weight
            and mean (`"offset"`), the derivative of the sampled weight by the mean (`"slope"`), or the squared gradient
            of each draw (`"squares"`).
        scalars: param group -> the scalars of the sampling kernel.
        block_type: implements the sampling.
    """

    def __init__(
        self,
        evidence: str | None,
        scalars: Callable[[Mapping[str, Any]], list[float]],
        block_type: type[SampledBlock] = SampledBlock,
    ) -> None:
        self.evidence, self.scalars, self.block_type = evidence, scalars, block_type
        self.layout: list[SampledBlock] = []
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.offsets: dict[Tensor, Tensor] = {}  # offset (or slope) of a parameter whose gradient is from one draw
        self.sums: dict[Tensor, Tensor] = {}  # sums of contributions, if the gradient is from several draws
        self.seen: dict[Tensor, Tensor | None] = {}  # gradients that belong to these sums
        self.count = 0  # number of draws

    def zeroed(self, stale: bool) -> None:
        super().zeroed(stale)
        self.fresh = set(self.before)

    def begin(self, training: bool) -> None:
        """Records which gradients exist already, and their values."""
        self.drawn = self._layout()
        if not training:  # offsets of an earlier draw are in buffers that this draw overwrites
            self.offsets = {p: offset.clone() for p, offset in self.offsets.items()}
            return
        params = [p for part in self.drawn for p in part.params]
        zeroed = self.at_zero_grad
        # parameters without a gradient at the beginning of the context
        self.fresh = {p for p in params if p.grad is None or (p in zeroed and same(zeroed[p], self.before[p]))}
        for p in params:
            if p not in self.fresh and self.evidence is not None:
                self._fold(p)
                self.seen[p] = gradient_of(p).clone()

    def perturb(self, key: noise.Key, given: Noise | None, training: bool) -> None:
        elements = sum(part.elements for part in self.drawn)
        state = self.optimizer.state
        for part in self.drawn:
            states = [state[p][self.block_type.state_key] for p in part.params]
            part.perturb(states, self.scalars(part.group), key, given, _fused(part, elements))

    def restore(self, finished: bool) -> None:
        elements = sum(part.elements for part in self.drawn)
        for part in self.drawn:
            part.restore(self.evidence is not None and finished, _fused(part, elements))

    def _layout(self) -> list[SampledBlock]:
        """The blocks of parameters to perturb; reused from draw to draw until parameters change."""
        groups, state = self.optimizer.param_groups, self.optimizer.state
        wanted = [(group, [p for p in group["params"] if p.requires_grad]) for group in groups]
        every = [p for _, params in wanted for p in params]
        parts = self.layout
        if [p for part in parts for p in part.params] != every or not all(part.fits() for part in parts):
            starts, start = {}, 0
            for group in groups:
                for p in group["params"]:
                    starts[p] = start
                    start += p.numel()
            parts = []
            for group, params in wanted:
                for kind in dict.fromkeys((p.dtype, p.device) for p in params):
                    some = [p for p in params if (p.dtype, p.device) == kind]
                    parts.append(self.block_type(group, some, [starts[p] for p in some]))
            # With several dtypes or devices in a group the order differs; the blocks are then built for each draw.
            self.layout = parts if [p for part in parts for p in part.params] == every else []
        owners = {p: group for group, params in wanted for p in params}
        for part in parts:
            part.group = owners[part.params[0]]  # loading a state replaces groups
        for group, params in wanted:
            if any(state.get(p, {}).get(self.block_type.state_key, _NOTHING).shape != p.shape for p in params):
                with torch.no_grad():
                    self.optimizer.initialise(self.optimizer, group, params)
        return parts

    def _fold(self, p: Tensor) -> None:
        """Replaces the offset of a single draw by its contribution, to which others can be added."""
        offset = self.offsets.pop(p, None)
        if offset is not None:
            self.sums[p] = self._contribution(gradient_of(p), offset)

    def _contribution(self, gradient: Tensor, offset: Tensor) -> Tensor:
        gradient = gradient.to(kernels.compute_dtype(gradient.dtype))
        return gradient.square() if self.evidence == "squares" else gradient * offset

    def end(self) -> None:
        self.count += 1
        for part in self.drawn:
            for p, offset in part.offsets():
                if p.grad is None or same(mark(p), self.before[p]):
                    continue
                self.sampled.add(p)
                if self.evidence is None:
                    continue
                if p in self.fresh:
                    self.offsets[p] = offset
                    continue
                seen = self.seen.get(p)
                new = gradient_of(p) - seen if seen is not None else gradient_of(p)
                more = self._contribution(new, offset)
                self.sums[p] = self.sums[p] + more if p in self.sums else more
                self.seen[p] = gradient_of(p).clone()

    def collect(self, groups: Groups, active: list[list[Tensor]]) -> Evidence:
        super().collect(groups, active)
        if self.evidence is None:
            return {}
        if not self.sums:
            return {} if self.evidence == "squares" else {self.evidence: self.offsets}
        sums = {}
        for p in (p for some in active for p in some):
            if p in self.offsets:
                sums[p] = self._contribution(gradient_of(p), self.offsets[p])
                continue
            seen, now = self.seen[p], gradient_of(p)
            # Apply later changes of the gradient (clipping, unscaling) to the sum.
            factor = 1.0 if seen is None else torch.where(now == seen, 1.0, now / seen).nan_to_num(0.0, 0.0, 0.0)
            sums[p] = self.sums[p] * (self.count * factor * factor if self.evidence == "squares" else factor)
        return {"squares" if self.evidence == "squares" else "product": sums}

    def store_draw(self, samples: int) -> None:
        for p, offset in self.offsets.items():
            if p.grad is not None:
                part = self._contribution(gradient_of(p), offset)
                self.stored[p] = self.stored[p] + part if p in self.stored else part

    def merge_draws(self, samples: int) -> None:
        super().merge_draws(samples)
        self.count = 1
        self.sums = {p: value / samples for p, value in self.stored.items()}
        self.seen = dict.fromkeys(self.stored)
        self.stored = {}


_NOTHING = torch.empty(0, 0, 0)


def _fused(part: SampledBlock, elements: int) -> bool:
    wanted = part.group["fused"]
    return kernels.should_compile(part.device, elements) if wanted is None else wanted
