"""Hostile sequences of gradients: each element of a tensor is a sequence of its own."""

from __future__ import annotations

import math

import torch
from torch import Tensor

KINDS = (
    "zero",
    "constant",
    "denormal",
    "smallest",
    "largest",
    "wild",
    "alternating",
    "spike after zeros",
    "spike before zeros",
    "growth",
    "decay",
    "sparse",
    "squares overflow",
    "squares underflow",
    "offset",
    "phases",
    "noise",
)
MODERATE = ("zero", "constant", "alternating", "sparse", "offset", "phases", "noise")  # kinds without a trend


class Sequences:
    """Gradients of `count` sequences; those of a kind differ in size, sign, factor and timing.

    Args:
        count: number of sequences.
        dtype: of the gradients; their sizes span its range.
        steps: length of the sequences.
        seed: of everything random.
        decades: sizes are between 10^-decades and 10^decades; None for nearly the whole range of the dtype.
        kinds: which of `KINDS`.
    """

    def __init__(
        self,
        count: int,
        dtype: torch.dtype,
        steps: int,
        seed: int,
        decades: float | None = None,
        kinds: tuple[str, ...] = KINDS,
    ) -> None:
        self.dtype, self.steps, self.kinds = dtype, steps, kinds
        self.generator = torch.Generator().manual_seed(seed)
        self.range = torch.finfo(dtype)
        decades = decades or math.floor(math.log10(self.range.max))
        self.kind = torch.arange(count) % len(kinds)
        self.size = 10 ** (decades * (2 * self._uniform(count) - 1))
        self.sign = self._signs(count)
        self.when = (self._uniform(count) * steps).floor()
        self.factor = 10 ** (3 * self._uniform(count))
        self.decades = decades
        self.step = 0

    def _uniform(self, count: int) -> Tensor:
        return torch.rand(count, dtype=torch.float64, generator=self.generator)

    def _signs(self, count: int) -> Tensor:
        return torch.randint(0, 2, (count,), generator=self.generator).double() * 2 - 1

    def next(self) -> Tensor:
        """The gradients of the next step, in float64, representable in the dtype."""
        values = torch.empty(len(self.kind), dtype=torch.float64)
        for index, kind in enumerate(self.kinds):
            which = slice(index, None, len(self.kinds))
            values[which] = self._values(kind, which)
        self.step += 1
        values = values.clamp(self.range.min, self.range.max)
        return values.to(self.dtype).to(torch.float64)

    def _values(self, kind: str, which: slice) -> Tensor:
        size, sign, when, factor = self.size[which], self.sign[which], self.when[which], self.factor[which]
        count, step, top = len(size), self.step, self.range
        if kind == "zero":
            return torch.zeros(count, dtype=torch.float64)
        if kind == "constant":
            return sign * size
        if kind == "denormal":
            return self._signs(count) * top.tiny * self._uniform(count)
        if kind == "smallest":
            return sign * top.tiny * top.eps
        if kind == "largest":
            return (self._signs(count) if step % 3 else sign) * top.max
        if kind == "wild":
            return self._signs(count) * 10 ** (self.decades * (2 * self._uniform(count) - 1))
        if kind == "alternating":
            return sign * size * (-1) ** step
        if kind == "spike after zeros":
            return torch.where(when == step, sign * size, 0.0)
        if kind == "spike before zeros":
            return sign * size * (step < 2)
        if kind == "growth":
            return sign * (size.log() + step * factor.log()).clamp(max=math.log(top.max)).exp()
        if kind == "decay":
            return sign * (size.log() - step * factor.log()).exp()
        if kind == "sparse":
            return torch.where(self._uniform(count) < 0.05, self._signs(count) * size, 0.0)
        if kind == "squares overflow":
            return self._signs(count) * math.sqrt(top.max) * 10 ** (2 * self._uniform(count) - 1)
        if kind == "squares underflow":
            return self._signs(count) * math.sqrt(top.tiny) * 10 ** (2 * self._uniform(count) - 1)
        if kind == "offset":  # nearly constant
            return sign * size * (1 + 1e-3 * (self._uniform(count) - 0.5))
        if kind == "phases":
            return self._signs(count) * torch.where((step + when) % 40 < 20, size, size / factor)
        return size * torch.randn(count, dtype=torch.float64, generator=self.generator)
