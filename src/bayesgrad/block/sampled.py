"""Weights that are perturbed together, in place, and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesgrad import kernels, noise
from bayesgrad.block.elementwise import SMALL, flat, is_dense


@dataclass(frozen=True)
class Perturb:
    """w + sqrt(scale v) e for standard normal e: a kernel on (weight, variance, saved) and, if given, positions.

    Args:
        given: whether the row ends with the positions of its elements; else they are consecutive.
    """

    given: bool
    writes = (2, 0)

    def __call__(self, scalars: Sequence[Any], place: Sequence[Any], *row: Tensor) -> tuple[Tensor, ...]:
        weight, variance, _, *position = row
        where = position[0] if self.given else noise.positions(place[2], weight)
        square, cosine = noise.normal_parts(where, place[0], place[1])
        dtype = kernels.compute_dtype(weight.dtype)
        spread = kernels.sqrt(scalars[0] * variance.to(dtype) * square.to(dtype))
        return weight, weight.to(dtype) + spread * cosine.to(dtype)


@dataclass(frozen=True)
class Restore:
    """(weight, saved) <- (saved, weight - saved): the mean again, and where the draw was from it."""

    writes = (0, 1)

    def __call__(self, scalars: Sequence[Any], weight: Tensor, saved: Tensor) -> tuple[Tensor, Tensor]:
        return saved, weight - saved


class SampledBlock:
    """Parameters of one group, dtype and device.

    Args:
        group: whose hyper-parameters apply.
        params: those that are perturbed.
        starts: the position of each one's first element among all weights, which its noise is a function of.
    """

    state_key: ClassVar[str] = "variance"  # the state that a draw is made from
    kernel: ClassVar[Callable[..., Any]] = Perturb

    def __init__(self, group: dict[str, Any], params: list[Tensor], starts: list[int]) -> None:
        self.group, self.params = group, params
        self.device, self.dtype = params[0].device, params[0].dtype
        self.elements = sum(p.numel() for p in params)
        self.layout = [_layout(p) for p in params]
        self.large = [i for i, p in enumerate(params) if p.numel() > SMALL and is_dense(p)]
        chosen = set(self.large)
        self.small = [i for i in range(len(params)) if i not in chosen]
        self.starts = [noise.signed(start) for start in starts]
        self.saved = {i: torch.empty_like(params[i]) for i in self.large}
        self.order = {i: _order(params[i], self.starts[i]) for i in self.large if not params[i].is_contiguous()}
        size = sum(params[i].numel() for i in self.small)
        self.pack = [torch.empty(size, dtype=self.dtype, device=self.device) for _ in range(2)]
        self.spread = torch.empty(size, dtype=kernels.compute_dtype(self.dtype), device=self.device)
        self.views = [self._views(buffer) for buffer in (*self.pack, self.spread)]
        self.positions = torch.cat(
            [torch.empty(0, dtype=torch.int32, device=self.device)]
            + [noise.positions(self.starts[i], params[i]) for i in self.small]
        )
        self.entered = False

    def _views(self, buffer: Tensor) -> list[Tensor]:
        some = [self.params[i] for i in self.small]
        return [part.view(p.shape) for part, p in zip(buffer.split([p.numel() for p in some]), some)]

    def fits(self) -> bool:
        return all(_layout(p) == layout for p, layout in zip(self.params, self.layout))

    def perturb(
        self,
        spreads: list[Tensor],
        scalars: list[float],
        key: noise.Key,
        given: Mapping[Any, Tensor] | Callable[[Tensor], Tensor] | None,
        fused: bool,
    ) -> None:
        """Draws from what each parameter's state says; `given` is noise to be used instead."""
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
            for i, (p, one) in enumerate(zip(self.params, spreads)):
                e = given(p) if callable(given) else given[p]
                if e.shape != p.shape:
                    raise ValueError(f"noise has shape {tuple(e.shape)}, but its parameter {tuple(p.shape)}.")
                self.place(i, one, e.to(one), scalars)
            return
        rows = [
            (flat(self.params[i]), flat(_like(spreads[i], self.params[i])), flat(self.saved[i]), *self.more(i))
            for i in self.large
        ]
        for i, row in zip(self.large, rows):
            order = [self.order[i]] if i in self.order else []
            kernels.run(self.kernel(given=bool(order)), scalars, [(*row, *order)], fused, [(*key, self.starts[i])])
        if small:
            torch._foreach_copy_(spread, [spreads[i] for i in self.small])
            row = (self.pack[0], self.spread, self.pack[1], *self.more(None), self.positions)
            kernels.run(self.kernel(given=True), scalars, [row], fused, [(*key, 0)])
            torch._foreach_copy_(small, weights)

    def place(self, i: int, spread: Tensor, noise: Tensor, scalars: list[float]) -> None:
        """Puts the i-th parameter where given noise takes it."""
        p = self.params[i]
        p.copy_(p.to(spread.dtype) + (scalars[0] * spread).sqrt() * noise)

    def more(self, i: int | None) -> tuple[Tensor, ...]:
        """What else the kernel writes, for the i-th parameter or for all small ones."""
        return ()

    def restore(self, offsets: bool, fused: bool) -> None:
        """The means again; `offsets` asks for where the draw was."""
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
        """Where each parameter was in the last draw, from its mean."""
        for i in self.large:
            yield self.params[i], self.saved[i]
        for i, view in zip(self.small, self.views[0]):
            yield self.params[i], view


def _order(p: Tensor, start: int) -> Tensor:
    """The positions of a parameter's elements, in the order in which they lie in memory."""
    return flat(torch.empty_like(p, dtype=torch.int32).copy_(noise.positions(start, p).view(p.shape)))


def _layout(p: Tensor) -> tuple:
    return p.dtype, p.device, p.shape, p.stride()


def _like(values: Tensor, p: Tensor) -> Tensor:
    return values if values.stride() == p.stride() else torch.empty_like(p, dtype=values.dtype).copy_(values)
