"""Samples of binary weights, relaxed to values between -1 and 1 so that the loss has gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesgrad import kernels, noise
from bayesgrad.packing import SampledBlock, flat


@dataclass(frozen=True)
class Relax:
    """w = tanh((lambda + d/2)/tau) for logistic d: a kernel of (weight, natural, saved, slope) and optional positions.

    The slope is dw/dmu for the mean mu = tanh(lambda): (sech^2(z) + eps)/(tau sech^2(lambda) + eps) for w = tanh(z). It
    is computed from z, because 1 - w^2 suffers from cancellation if w is close to one. Without eps the quotient is that
    of exponentials, because sech^2 underflows for large arguments.

    The scalars are 1/tau, tau, and eps if it is not zero.

    Reference: Khan and Rue 2023, Eq. 50-51.
    Checked by: tests/equations/test_binary.py, by automatic differentiation.

    Args:
        has_positions: whether the row ends with the positions of its elements; else they are consecutive.
    """

    has_positions: bool
    writes = (2, 0, 3)

    def __call__(self, scalars: Sequence[Any], place: Sequence[Any], *row: Tensor) -> tuple[Tensor, ...]:
        weight, natural, _, _, *position = row
        where = position[0] if self.has_positions else noise.positions(place[2], weight)
        dtype = kernels.compute_dtype(weight.dtype)
        return weight, *self.at(scalars, natural.to(dtype), noise.logistic(where, place[0], place[1]).to(dtype))

    @staticmethod
    def at(scalars: Sequence[Any], natural: Tensor, logistic: Tensor) -> tuple[Tensor, Tensor]:
        """The relaxed weight and its slope."""
        inverse, relaxation, *eps = scalars
        z = (natural + 0.5 * logistic) * inverse
        if eps:
            slope = (kernels.sech_square(z) + eps[0]) / (relaxation * kernels.sech_square(natural) + eps[0])
            return kernels.tanh(z), slope
        a, b = z.abs(), natural.abs()
        ratio = kernels.exp(-2 * (a - b).abs())  # of exp(-2a) and exp(-2b), or its inverse
        root = (1 + kernels.exp(-2 * b)) / (1 + kernels.exp(-2 * a))
        return kernels.tanh(z), torch.where(a < b, 1 / ratio, ratio) * (root * root) * inverse


class Relaxed(SampledBlock):
    """Binary parameters of one group, dtype and device, with relaxed samples; `offsets` returns their slopes."""

    state_key = "natural"
    kernel = Relax

    def __init__(self, group: dict[str, Any], params: list[Tensor], starts: list[int]) -> None:
        super().__init__(group, params, starts)
        self.slope = torch.empty_like(self.state_values)
        self.slopes = dict(zip(self.small, self._views(self.slope)))
        self.slopes |= {i: torch.empty_like(self.weights[i], dtype=self.state_values.dtype) for i in self.large}

    def perturb_with(self, i: int, spread: Tensor, noise: Tensor, scalars: list[float]) -> None:
        if not bool(((noise > 0) & (noise < 1)).all()):
            raise ValueError("noise for binary weights must be in (0, 1), got values outside of this interval.")
        weight, slope = Relax.at(scalars, spread, noise.log() - (-noise).log1p())
        self.weights[i].copy_(weight)
        self.slopes[i].copy_(slope)

    def extra_buffers(self, i: int | None) -> tuple[Tensor, ...]:
        return (self.slope if i is None else flat(self.slopes[i]),)

    def restore(self, offsets: bool, elements: int) -> None:
        super().restore(False, elements)

    def offsets(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i, p in enumerate(self.params):
            yield p, self.slopes[i]
