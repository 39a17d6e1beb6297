"""Values made of positive numbers that data may choose: kernels, and how observations are made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

Number = float | Tensor
Own = TypeVar("Own", bound="Tunable")


@dataclass(frozen=True, eq=False)
class Tunable:
    """A frozen value whose fields named in `tuned` are positive numbers, one or several each, or such values again.

    `numbers()` and `replaced()` take it apart and put it together, so that an optimizer sees tensors by name and the
    value itself stays what it was.
    """

    tuned: ClassVar[tuple[str, ...]] = ()

    def numbers(self) -> dict[str, Tensor]:
        """What can be chosen, by name: those of a part with the part's name in front."""
        found: dict[str, Tensor] = {}
        for name in self.tuned:
            value = getattr(self, name)
            if isinstance(value, Tunable):
                found.update({f"{name}.{inner}": number for inner, number in value.numbers().items()})
            else:
                found[name] = torch.as_tensor(value, dtype=torch.float64)
        return found

    def replaced(self: Own, numbers: Mapping[str, Tensor]) -> Own:
        """The same with other numbers."""
        changes = {}
        for name in self.tuned:
            value = getattr(self, name)
            if isinstance(value, Tunable):
                inner = {key.removeprefix(f"{name}."): n for key, n in numbers.items() if key.startswith(f"{name}.")}
                changes[name] = value.replaced(inner)
            elif name in numbers:
                changes[name] = numbers[name]
        return replace(self, **changes)

    def plain(self: Own) -> Own:
        """The same with numbers that have no graph: floats, and tensors where there are several."""
        numbers = {name: number.detach() for name, number in self.numbers().items()}
        return self.replaced({n: v if v.numel() > 1 else v.item() for n, v in numbers.items()})  # pyright: ignore

    def __post_init__(self) -> None:
        for name in self.tuned:
            value = getattr(self, name)
            if isinstance(value, Tunable):
                continue
            lowest = float(torch.as_tensor(value).detach().min())
            if not 0 < lowest < math.inf:
                raise ValueError(f"{name} of {type(self).__name__} must be positive, got {lowest:g}.")

    def __repr__(self) -> str:
        parts = [f"{own.name}={_shown(getattr(self, own.name))}" for own in fields(self)]
        return f"{type(self).__name__}({', '.join(parts)})"


def like(number: Number, other: Tensor) -> Tensor:
    """The number in the precision and on the device of another tensor."""
    return torch.as_tensor(number, dtype=other.dtype, device=other.device)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{[round(v, 6) for v in value.detach().flatten().tolist()]}" if value.dim() else f"{value.item():.6g}"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)
