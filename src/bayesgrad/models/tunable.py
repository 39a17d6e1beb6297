"""Objects with positive hyperparameters: kernels and observation models."""

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
    """An immutable object with positive hyperparameters: numbers, tensors, or nested objects of this kind.

    `hyperparameter_names` lists their fields. `hyperparameters()` returns them by name, and `with_hyperparameters()`
    creates a copy with other values, so that an optimizer can work with a dict of tensors.
    """

    hyperparameter_names: ClassVar[tuple[str, ...]] = ()

    def hyperparameters(self) -> dict[str, Tensor]:
        """The hyperparameters by name; those of a nested object have its name as a prefix."""
        found: dict[str, Tensor] = {}
        for name in self.hyperparameter_names:
            value = getattr(self, name)
            if isinstance(value, Tunable):
                found.update({f"{name}.{inner}": number for inner, number in value.hyperparameters().items()})
            else:
                found[name] = torch.as_tensor(value, dtype=torch.float64)
        return found

    def with_hyperparameters(self: Own, numbers: Mapping[str, Tensor]) -> Own:
        """A copy with other hyperparameters."""
        changes = {}
        for name in self.hyperparameter_names:
            value = getattr(self, name)
            if isinstance(value, Tunable):
                inner = {key.removeprefix(f"{name}."): n for key, n in numbers.items() if key.startswith(f"{name}.")}
                changes[name] = value.with_hyperparameters(inner)
            elif name in numbers:
                changes[name] = numbers[name]
        return replace(self, **changes)

    def detached(self: Own) -> Own:
        """A copy with detached hyperparameters: floats, and tensors of several numbers."""
        numbers = {name: number.detach() for name, number in self.hyperparameters().items()}
        return self.with_hyperparameters({n: v if v.numel() > 1 else v.item() for n, v in numbers.items()})  # pyright: ignore

    def __post_init__(self) -> None:
        for name in self.hyperparameter_names:
            value = getattr(self, name)
            if isinstance(value, Tunable):
                continue
            lowest = float(torch.as_tensor(value).detach().min())
            if not 0 < lowest < math.inf:
                raise ValueError(f"{name} of {type(self).__name__} must be positive, got {lowest:g}.")

    def __repr__(self) -> str:
        parts = [f"{own.name}={_format(getattr(self, own.name))}" for own in fields(self)]
        return f"{type(self).__name__}({', '.join(parts)})"


def like(number: Number, other: Tensor) -> Tensor:
    """The number as a tensor with the dtype and device of another tensor."""
    return torch.as_tensor(number, dtype=other.dtype, device=other.device)


def _format(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{[round(v, 6) for v in value.detach().flatten().tolist()]}" if value.dim() else f"{value.item():.6g}"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)
