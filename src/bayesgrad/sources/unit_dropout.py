"""Gradients that are computed with dropped units."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesgrad import kernels, noise
from bayesgrad.layers.call import Through
from bayesgrad.parts import Noise, weak
from bayesgrad.posterior.units import Units, units_of
from bayesgrad.shards import gathered, local, part_of
from bayesgrad.sources.weight_sampling import Draws


class MaskedUnits(NamedTuple):
    """The units that the mask of a weight drops."""

    layer: str
    units: Units
    start: int  # position of the first unit among the units of all layers, which determines the mask


def masked_units(model: nn.Module) -> dict[Tensor, MaskedUnits]:
    """The weights to mask, the first layer's first; a weight shared with a module of another type is never masked."""
    found: dict[Tensor, MaskedUnits] = {}
    holders: dict[Tensor, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for p in module._parameters.values():
            if p is not None:
                holders.setdefault(p, []).append((name, module))
    start = 0
    for p, uses in holders.items():
        (name, module), *_ = uses
        units = units_of(module)
        if units is None or module._parameters.get("weight") is not p:
            continue
        if any(units_of(other) != units or other._parameters.get("weight") is not p for _, other in uses):
            continue
        found[p] = MaskedUnits(name.replace("_orig_mod.", "").removesuffix("_orig_mod"), units, start)
        start += units.count(p.shape)
    return found


class UnitDropout(Draws):
    """Gradients with dropped units: inside `sampled()`, the weights that multiply a dropped unit are zero.

    Weights are z m for one draw of masks z. Gradients are multiplied by the mask and divided by the probability to keep
    a unit: `.grad` is z grad/keep, whose expectation is that of the gradient given that the unit is kept. Noise that is
    given to `sampled()` has the values of units, (units,), for each weight.

    Args:
        masked: the weights to mask.
        keep_of: param group and weight -> the probability to keep each unit; None if units are never dropped.
    """

    whole = "masks of units"

    def __init__(
        self, masked: Mapping[Tensor, MaskedUnits], keep_of: Callable[[Mapping[str, Any], Tensor], float | None]
    ) -> None:
        self.masked, self.keep_of = masked, weak(keep_of)
        self.buffers: dict[Tensor, Tensor] = {}
        self.saved: list[tuple[Tensor, Tensor]] = []
        self.hooks: list[Any] = []
        super().__init__()

    def perturb(self, key: noise.Key, given: Noise | None, training: bool) -> None:
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                keep = self.keep_of(group, p)
                if keep is None or not p.numel() or (keep == 1 and given is None):
                    continue
                mask, weight = self._mask(p, keep, key, given), local(p)
                if training and p.requires_grad:
                    # The mask is part of the model: hooks of users see the gradient behind it.
                    owner = gathered([p], now=True)[p]
                    others = dict(owner._backward_hooks or {})
                    self.hooks.append(owner.register_hook(Through(mask / keep)))
                    for number, hook in others.items():  # autograd calls them in the order in which they were inserted
                        del owner._backward_hooks[number]  # pyright: ignore[reportOptionalSubscript]
                        owner._backward_hooks[number] = hook  # pyright: ignore[reportOptionalSubscript]
                self.saved.append((p, self._buffer(weight).copy_(weight)))
                weight.mul_(part_of(mask.expand(p.shape), p).to(p.dtype))

    def restore(self, finished: bool) -> None:
        for hook in self.hooks:
            hook.remove()
        for p, mean in self.saved:
            local(p).copy_(mean)
        self.hooks, self.saved = [], []

    def perturbed(self) -> Iterator[Tensor]:
        return (p for p, _ in self.saved)

    def _buffer(self, p: Tensor) -> Tensor:
        """A buffer for the weight during a draw; reused, because an allocation costs more than the copy."""
        old = self.buffers.get(p)
        if old is None or (old.shape, old.dtype, old.device) != (p.shape, p.dtype, p.device):
            old = self.buffers[p] = torch.empty_like(p)
        return old

    def _mask(self, p: Tensor, keep: float, key: noise.Key, given: Noise | None) -> Tensor:
        """z in the shape of the weight and the dtype of the state."""
        masked, dtype = self.masked[p], kernels.compute_dtype(p.dtype)
        count = masked.units.count(p.shape)
        if given is not None:
            z = given(p) if callable(given) else given[p]
            if z.shape != (count,):
                raise ValueError(f"the mask of {masked.layer!r} must have shape {(count,)}, got {tuple(z.shape)}.")
        else:
            position = torch.arange(count, dtype=torch.int32, device=p.device) + noise.signed(masked.start)
            z = noise.fraction(noise.bits(position, *key)[0]) <= keep
        return masked.units.spread(z.to(p.device, dtype), p.shape)
