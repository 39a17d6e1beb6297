"""Blocks of parameters with a common metric, and vectors of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.modules import Layer
from bayesgrad.precision import Precision, Scalar
from bayesgrad.shards import whole


@dataclass(frozen=True, eq=False)
class ParameterSpace:
    """The parameters of a step.

    Args:
        params: the parameters with gradients, in flat order.
        all_params: all parameters of the sampler, in flat order.
        layers: the Linear, Conv and Embedding layers.
    """

    params: tuple[Tensor, ...]
    all_params: tuple[Tensor, ...]
    layers: tuple[Layer, ...]

    def flat(self) -> Tensor:
        """The current weights, (n,)."""
        return MetricBlock(self.params, UNIT).join({p: whole(p.detach()) for p in self.params})


@dataclass(frozen=True, eq=False)
class MetricBlock:
    """Some parameters and the precision of their concatenation to one vector.

    Args:
        members: the parameters.
        precision: of the concatenated vector.
        layer: of which they are [W b], if the precision is that of a matrix.
        block: the number of weights in each of several independent blocks.
    """

    members: tuple[Tensor, ...]
    precision: Precision
    layer: Layer | None = None
    block: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        kinds = {compute_dtype(p.dtype) for p in self.members}
        return torch.float64 if torch.float64 in kinds else torch.float32

    def join(self, values: Mapping[Tensor, Tensor]) -> Tensor:
        device = self.members[0].device
        parts = [values[p].to(device, self.dtype) for p in self.members]
        if self.layer is None:
            return torch.cat([part.reshape(-1) for part in parts]) if len(parts) > 1 else parts[0].reshape(-1)
        return self.layer.join(parts)

    def parted(self, joined: Tensor) -> dict[Tensor, Tensor]:
        if self.layer is None:
            pieces = joined.split([p.numel() for p in self.members])
        else:
            pieces = self.layer.parted(joined)
        return {p: piece.reshape(p.shape).to(p.device) for p, piece in zip(self.members, pieces)}

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.members)

    @property
    def columns(self) -> int:
        """The number of columns of R."""
        return self.size if self.block is None else self.block

    def basis(self) -> Tensor:
        """Vectors z, (columns, size), for which `samples` are the columns of R."""
        eye = torch.eye(self.columns, dtype=self.dtype, device=self.members[0].device)
        return eye.repeat(1, self.size // self.columns)

    def samples(self, noise: Tensor) -> tuple[Tensor, ...]:
        """R times each row of noise (rows, size), as a flat (rows, n) for each member."""

        def one(row: Tensor) -> tuple[Tensor, ...]:
            pieces = zip(self.members, row.split([p.numel() for p in self.members]))
            sample = self.precision.sample(self.join({p: piece.view(p.shape) for p, piece in pieces}))
            return tuple(piece.flatten() for piece in self.parted(sample).values())

        return vmap(one)(noise)


UNIT = Scalar(torch.ones(()), ())


def solve_blocks(parts: Sequence[MetricBlock], vectors: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """G^-1 v, by parameter."""
    found: dict[Tensor, Tensor] = {}
    for part in parts:
        found |= part.parted(part.precision.solve(part.join(vectors)))
    return found


def root_columns(
    parts: Sequence[MetricBlock], params: Sequence[Tensor], signs: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """The columns of R as flat vectors (columns, n), or R z for random signs z of each parameter, (rows, *shape)."""
    pieces: dict[Tensor, list[Tensor]] = {p: [] for p in params}
    for part in parts:
        noise = part.basis() if signs is None else torch.cat([_flat_rows(signs(p)) for p in part.members], 1)
        for p, samples in zip(part.members, part.samples(noise.to(part.dtype))):
            pieces[p].append(samples)
    if signs is None and len(parts) > 1:  # the columns of a block are zero in other blocks
        total, start = sum(part.columns for part in parts), 0
        for part in parts:
            for p in part.members:
                (own,) = pieces[p]
                padded = own.new_zeros(total, own.shape[1])
                padded[start : start + len(own)] = own
                pieces[p] = [padded]
            start += part.columns
    flat = [pieces[p][0] for p in params]
    return torch.cat([rows.to(flat[0].device, MetricBlock(tuple(params), UNIT).dtype) for rows in flat], 1)


def _flat_rows(values: Tensor) -> Tensor:
    """(rows, *shape) -> (rows, n), with n = 1 for the values of a scalar parameter."""
    return values.reshape(len(values), values[0].numel())
