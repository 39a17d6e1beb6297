"""Optimizers of binary weights: a latent value is updated, and the weight is its sign."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesgrad.optimizer.base import BeliefOptimizer
from bayesgrad.optimizer.update import Update


@dataclass(frozen=True)
class SignUpdate(Update):
    """An `Update` of the first slot, the latent value; the weight is set to its sign, sign(0) = 1.

    The gradient with respect to the weight replaces that with respect to the latent value. It is multiplied by the
    slope between the two, if the evidence has one, and by the scalar `gradient_scale`. A slot `prior_natural` is
    subtracted from it.
    """

    def __call__(self, scalars: Iterable[Any], weight: Tensor, gradient: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        scalars = list(scalars)
        n = dict(zip(self.names, scalars))
        evidence, state = dict(zip(self.evidence, more)), more[len(self.evidence) :]
        latent = state[0]
        gradient = gradient.to(latent.dtype)
        if "product" in evidence:
            gradient = evidence["product"].to(latent.dtype)
        elif "slope" in evidence:
            gradient = gradient * evidence["slope"].to(latent.dtype)
        if "gradient_scale" in n:
            largest = torch.finfo(latent.dtype).max / 4  # an infinite latent value would never change again
            gradient = (gradient * n["gradient_scale"]).clamp(-largest, largest)
        if "prior_natural" in self.slots:
            gradient = gradient - state[self.slots.index("prior_natural")]
        inner = Update(self.parts, self.names, self.slots)
        moved, *kept = inner(scalars, latent, gradient, *state)
        return (signs(moved), moved, *kept[1:])


def signs(latent: Tensor) -> Tensor:
    """-1 or 1."""
    return torch.where(latent < 0, -1.0, 1.0)


class BinaryOptimizer(BeliefOptimizer):
    """An optimizer whose parameters are all binary: its constructor sets them to -1 or 1.

    Parameters that do not require gradients are not changed until they do.
    """

    latent: ClassVar[str]  # the slot whose sign is the weight
    _built = True

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._built = False  # a constructor that raises changes no weights
        super().__init__(params, defaults)
        self._built = True

    def _binarise(self) -> None:
        for group in self.param_groups:
            new = [p for p in group["params"] if p.requires_grad and self.latent not in self.state.get(p, {})]
            self._initialise(group, new, self.slots(group))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group, as in torch.optim; its parameters become binary."""
        super().add_param_group(param_group)
        if self._built:
            self._binarise()

    def update(
        self, group: Mapping[str, Any], names: tuple[str, ...], slots: tuple[str, ...], evidence: tuple[str, ...]
    ) -> SignUpdate:
        return SignUpdate(self.parts(group), names, slots, evidence)

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return (self.latent, *super().slots(group))

    @torch.no_grad()
    def _initialise(self, group: Mapping[str, Any], params: list[Tensor], slots: tuple[str, ...]) -> None:
        new = [p for p in params if self.latent not in self.state.get(p, {})]
        super()._initialise(group, params, slots)
        for p in new:
            p.copy_(signs(self.state[p][self.latent]))

    def initial(self, slot: str, group: Mapping[str, Any], p: Tensor) -> float | Tensor:
        return p if slot == self.latent else super().initial(slot, group, p)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `BeliefOptimizer.load_state_dict`; weights are set to the signs of the loaded latent values."""
        super().load_state_dict(state_dict)
        with torch.no_grad():
            for p, entry in self.state.items():
                if self.latent in entry:
                    p.copy_(signs(entry[self.latent]))
