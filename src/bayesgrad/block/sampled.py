"""Blocks of weights that are perturbed in place, and restored afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesgrad import kernels, noise
from bayesgrad.block.elementwise import SMALL, flat, is_dense, layout_of


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
