"""Hostile sequences of batches, for rules that use layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

BATCHES = (
    "normal",
    "zero",
    "constant",
    "rank one",
    "duplicated",
    "tiny",
    "huge",
    "mixed scales",
    "sparse",
    "dead",
    "far from zero",
    "growing",
    "shrinking",
)
INPUTS, UNITS, OUTPUTS = 3, 4, 2


def network(groups: int, dtype: torch.dtype) -> nn.Module:
    """Independent networks with two layers each, side by side: grouped convolutions of one position."""
    if groups == 1:
        layers = [nn.Linear(INPUTS, UNITS), nn.ReLU(), nn.Linear(UNITS, OUTPUTS)]
        return nn.Sequential(*layers).to(dtype)
    layers = [
        nn.Conv1d(groups * INPUTS, groups * UNITS, 1, groups=groups),
        nn.ReLU(),
        nn.Conv1d(groups * UNITS, groups * OUTPUTS, 1, groups=groups),
        nn.Flatten(),
        nn.Unflatten(1, (groups, OUTPUTS)),
    ]
    return nn.Sequential(*layers).to(dtype)


def batches(groups: int, steps: int, seed: int, dtype: torch.dtype, far: float = 15) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and labels; each group has its own kind of inputs, and the number of examples changes.

    Args:
        far: the largest inputs are 10^far, the smallest 10^-20.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    kinds = [BATCHES[int(i)] for i in torch.randint(0, len(BATCHES), (groups,), generator=generator)]
    fixed = normal(groups, INPUTS)
    for step in range(steps):
        count = int(torch.tensor([8, 1, 2, 5, 16])[(step + seed) % 5])
        parts = []
        for group, kind in enumerate(kinds):
            x = normal(count, INPUTS)
            if kind == "zero":
                x = 0 * x
            elif kind == "constant":
                x = fixed[group].expand(count, INPUTS)
            elif kind == "rank one":
                x = normal(count, 1) * fixed[group]
            elif kind == "duplicated":
                x = x[:1].expand(count, INPUTS)
            elif kind == "tiny":
                x = x * 1e-20
            elif kind == "huge":
                x = x * 10**far
            elif kind == "mixed scales":
                x = x * torch.tensor([10**-far, 1.0, 10**far], dtype=torch.float64)
            elif kind == "sparse":
                x = x * (torch.rand(count, INPUTS, generator=generator) < 0.1)
            elif kind == "dead":
                x = -x.abs() * 1e3
            elif kind == "far from zero":
                x = 1e4 + x
            elif kind == "growing":
                x = x * 10 ** (far * step / steps)
            elif kind == "shrinking":
                x = x * 10 ** (-20 * step / steps)
            parts.append(x)
        x = torch.stack(parts, 1).to(dtype)
        labels = torch.randint(0, OUTPUTS, (count, groups), generator=generator)
        if step % 3 == 2:
            labels = labels * 0
        yield (x[:, 0], labels[:, 0]) if groups == 1 else (x.flatten(1)[..., None], labels)
