"""Filters whose gradients are taken with some of the units dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesgrad import kernels, noise
from bayesgrad.block import gradient_of
from bayesgrad.optimizer.base import BeliefOptimizer
from bayesgrad.optimizer.constraints import BOOLEAN, INTEGER, POSITIVE_INTEGER, Constraint
from bayesgrad.optimizer.layerwise import model_of, named_groups
from bayesgrad.optimizer.variational import Mark, WeightSampling, _mark, _same
from bayesgrad.posterior import DropoutPosterior, Posterior
from bayesgrad.posterior.network import parameters_of
from bayesgrad.posterior.units import Units, units_of

Masks = Mapping[Any, Tensor] | Callable[[Tensor], Tensor]

KEEP = Constraint(
    "in (0, 1], or a dict from names of layers to such numbers",
    lambda x: all(0 < k <= 1 for k in (x.values() if isinstance(x, Mapping) else [x])),
)


class Place(NamedTuple):
    """Where the mask of a weight is."""

    layer: str
    units: Units
    start: int  # position of its first unit among those of all layers, which its masks are a function of


class UnitDropout(BeliefOptimizer):
    """A filter over the layers of a model whose gradients are taken with dropped units, in a `sampled()` context.

    Within the context, weights that leave a dropped unit are zero and gradients are those through the mask, divided by
    the probability to keep: `.grad` is z grad/keep, whose mean is the gradient with the unit there.

    Args:
        model: whose Linear layers and convolutions read units.
        params: parameters, named parameters or groups of the model; None for all.
        defaults: hyper-parameters, among them `keep`, `drop_inputs`, `samples` and `seed`.
    """

    accepts = {
        **BeliefOptimizer.accepts,
        "keep": KEEP,
        "drop_inputs": BOOLEAN,
        "samples": POSITIVE_INTEGER,
        "seed": INTEGER,
    }

    def __init__(self, model: nn.Module, params: Any, defaults: dict[str, Any]) -> None:
        self.model = model_of(self, model)
        self._bind()
        super().__init__(named_groups(self.model, params), defaults)

    def _bind(self) -> None:
        """Looks for layers that read units; a weight that anything else holds too is never masked."""
        self._places: dict[Tensor, Place] = {}
        self._first = None  # whose inputs are the data
        holders: dict[Tensor, list[tuple[str, nn.Module]]] = {}
        for name, module in self.model.named_modules():
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
            self._places[p] = Place(name.replace("_orig_mod.", "").removesuffix("_orig_mod"), units, start)
            self._first = p if self._first is None else self._first
            start += units.count(p.shape)
        self._key: noise.Key | None = None  # of the present draw, in training
        self._reset_draws()

    def _reset_draws(self) -> None:
        """Drops what draws have shown since the last step."""
        self._sampled_params: set[Tensor] = set()  # whose gradients are from draws
        self._before: dict[Tensor, Mark] = {}  # gradients at the beginning of the present context

    def keep_of(self, group: Mapping[str, Any], p: Tensor) -> float | None:
        """The probability to keep each unit that leaves by this weight; None where nothing is ever dropped."""
        place, keep = self._places.get(p), group["keep"]
        if place is None:
            return None
        if isinstance(keep, Mapping):
            return keep.get(place.layer)
        return None if p is self._first and not group["drop_inputs"] else keep

    # --- drawing ---

    @property
    def takes_draws(self) -> bool:
        """Whether gradients are to be taken inside `sampled()`."""
        return True

    @contextmanager
    def sampled(self, masks: Masks | None = None) -> Iterator[None]:
        """Within the context the weights are one draw z m; afterwards they are m, bit for bit.

        Run forward and backward passes inside; `zero_grad` may stand inside or outside, clipping and unscaling come
        between the context and `step()`. Micro-batches looped inside hold the draw; a context inside the loop draws
        anew. Scale losses as for any accumulation: by the number of micro-batches and draws. Parameters that do not
        require gradients are not masked. Under `torch.no_grad()` a draw leaves no trace in training.

        Args:
            masks: a value for each unit to use in place of drawn ones, by weight, or a function of the weight.
        """
        if self.__dict__.get("_active_draw"):
            raise RuntimeError("sampled() is already active: one context is one draw, leave it before the next.")
        training = torch.is_grad_enabled()
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if training:
            self._before = {p: _mark(p) for p in params}
        key = self._next_key(training)
        self._key = key if training else None
        saved: list[tuple[Tensor, Tensor]] = []
        self._active_draw = True
        finished = False
        try:
            with ExitStack() as hooks:
                for group in self.param_groups:
                    for p in group["params"]:
                        keep = self.keep_of(group, p) if p.requires_grad else None
                        if keep is None or not p.numel() or (keep == 1 and masks is None):
                            continue
                        mask = self._mask(p, keep, key, masks)
                        if training:
                            hooks.callback(p.register_hook(_through(mask / keep)).remove)
                        with torch.no_grad():
                            saved.append((p, self._buffer(p).copy_(p)))
                            p.mul_(mask.to(p.dtype))
                yield
            finished = True
        finally:
            with torch.no_grad():
                for p, mean in saved:
                    p.copy_(mean)
            self._active_draw, self._key = False, None
            if training and finished:
                self._sampled_params |= {
                    p for p in params if p.grad is not None and not _same(_mark(p), self._before.get(p))
                }
            self._before = {}

    def _buffer(self, p: Tensor) -> Tensor:
        """Where a weight is kept during a draw: the same memory each time, as new memory costs more than copying."""
        buffers: dict[Tensor, Tensor] = self.__dict__.setdefault("_buffers", {})
        old = buffers.get(p)
        if old is None or (old.shape, old.dtype, old.device) != (p.shape, p.dtype, p.device):
            old = buffers[p] = torch.empty_like(p)
        return old

    def _mask(self, p: Tensor, keep: float, key: noise.Key, masks: Masks | None) -> Tensor:
        """z as a factor of the weight, in the dtype of the state."""
        place, dtype = self._places[p], kernels.compute_dtype(p.dtype)
        count = place.units.count(p.shape)
        if masks is not None:
            z = masks(p) if callable(masks) else masks[p]
            if z.shape != (count,):
                raise ValueError(f"a mask has shape {tuple(z.shape)}, but {place.layer!r} reads {count} units.")
        else:
            position = torch.arange(count, dtype=torch.int32, device=p.device) + noise.signed(place.start)
            z = noise.fraction(noise.bits(position, *key)[0]) <= keep
        return place.units.spread(z.to(p.device, dtype), p.shape)

    _next_key = WeightSampling._next_key

    # --- what draws show ---

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim; forgets what draws have shown."""
        super().zero_grad(set_to_none)
        self._reset_draws()
        if self._key is not None:
            self._before = {p: _mark(p) for group in self.param_groups for p in group["params"]}

    def evidence(self, groups: list[dict[str, Any]], active: list[list[Tensor]]) -> dict[str, Mapping[Tensor, Tensor]]:
        missing = next((p for some in active for p in some if p not in self._sampled_params), None)
        if missing is not None:
            raise RuntimeError(
                f"a gradient of shape {tuple(missing.shape)} was not taken at sampled weights: run forward and "
                f"backward passes inside `with optimizer.sampled():`, then call {type(self).__name__}.step()."
            )
        return {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As `BeliefOptimizer.step`. A closure is called inside of `samples` draws, whose gradients are averaged.

        Args:
            closure: re-evaluates the model, calls backward and returns the loss.
        """
        loss = None if closure is None else self._average_draws(closure)
        super().step()
        self._reset_draws()
        return loss

    def _average_draws(self, closure: Callable[[], Any]) -> Any:
        samples = int(self.param_groups[0]["samples"])
        losses: list[Any] = []
        totals: dict[Tensor, Tensor] = {}
        for _ in range(samples):
            self.zero_grad()
            with torch.enable_grad(), self.sampled():
                losses.append(closure())
            if samples == 1:
                return losses[0]
            self._store_draw(samples)
            for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                totals[p] = totals[p] + gradient_of(p) if p in totals else gradient_of(p).clone()
        self._reset_draws()
        self._sampled_params = set(totals)
        for p, total in totals.items():
            p.grad = total / samples
        return sum(losses[1:], losses[0]) / samples if losses[0] is not None else None

    def _store_draw(self, samples: int) -> None:
        """Keeps what one of several draws of a closure has shown beside gradients."""

    # --- what is believed ---

    def posterior(self, model: nn.Module, scale: float = 1.0) -> Posterior:
        """The belief about the model's weights as a `DropoutPosterior`, a copy.

        Args:
            model: the model that was optimised. Its other parameters are held fixed.
            scale: must be 1: the variance is that of the masks, keep (1 - keep) m^2.
        """
        if scale != 1:
            raise ValueError(f"scale must be 1: the masks' probabilities are the belief's only spread, got {scale!r}.")
        names = {id(p): name for name, p in parameters_of(model).items()}
        slab, keeps, units = {}, {}, {}
        for index, group in enumerate(self.param_groups):
            for p in group["params"]:
                if id(p) not in names:
                    raise ValueError(f"{self._name(index, p)} is not in the model: pass the model that was optimised.")
                slab[names[id(p)]] = p.detach().clone()
                keep = self.keep_of(group, p)
                if keep is not None and p.requires_grad:
                    place, like = self._places[p], kernels.compute_dtype(p.dtype)
                    count = place.units.count(p.shape)
                    keeps[names[id(p)]] = torch.full((count,), keep, dtype=like, device=p.device)
                    units[names[id(p)]] = place.units
        return DropoutPosterior(slab, keeps, units, model)

    # --- groups and checkpoints ---

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters of the model."""
        (group,) = named_groups(self.model, [param_group])
        super().add_param_group(group)
        self.param_groups[-1].setdefault("draws", 0)

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        if isinstance(group["keep"], Mapping):
            known = {place.layer for place in self._places.values()}
            odd = next((name for name in group["keep"] if name not in known), None)
            if odd is not None:
                raise ValueError(f"keep names {odd!r}, which is none of the layers {sorted(known)}.")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "model": self.model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "model" in state:  # torch's load_state_dict comes here too, without one
            self._bind()
        self._reset_draws()


def _through(factor: Tensor) -> Callable[[Tensor], Tensor]:
    """The hook of a weight that was multiplied by a mask."""
    return lambda gradient: (gradient * factor).to(gradient.dtype)
