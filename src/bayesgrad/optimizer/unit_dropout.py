"""Optimizers whose gradients are computed with dropped units."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesgrad import kernels, noise
from bayesgrad.block import gradient_of
from bayesgrad.layers.network import parameters_of
from bayesgrad.optimizer.base import BeliefOptimizer
from bayesgrad.optimizer.constraints import BOOLEAN, INTEGER, POSITIVE_INTEGER, Constraint
from bayesgrad.optimizer.layerwise import model_of, named_groups
from bayesgrad.optimizer.variational import Mark, WeightSampling, _mark, _same
from bayesgrad.posterior import DropoutPosterior, Posterior
from bayesgrad.posterior.units import Units, units_of

Masks = Mapping[Any, Tensor] | Callable[[Tensor], Tensor]

KEEP = Constraint(
    "in (0, 1], or a dict from names of layers to such numbers",
    lambda x: all(0 < k <= 1 for k in (x.values() if isinstance(x, Mapping) else [x])),
)


class MaskedUnits(NamedTuple):
    """The units that the mask of a weight drops."""

    layer: str
    units: Units
    start: int  # position of the first unit among the units of all layers, which determines the mask


class UnitDropout(BeliefOptimizer):
    """Base class of optimizers whose gradients are computed with dropped units, in a `sampled()` context.

    Inside the context, the weights that multiply a dropped unit are zero. Gradients are multiplied by the mask z and
    divided by the probability to keep a unit: `.grad` is z grad/keep, whose expectation is that of the gradient given
    that the unit is kept.

    Args:
        model: a network with Linear layers or convolutions, whose inputs are the units.
        params: parameters, named parameters or param groups of the model; None for all.
        defaults: hyperparameters, among them `keep`, `drop_inputs`, `samples` and `seed`.
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
        """Finds the weights to mask; a weight that is shared with a module of another type is never masked."""
        self._masked_units: dict[Tensor, MaskedUnits] = {}
        self._first = None  # the weight whose inputs are the data
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
            self._masked_units[p] = MaskedUnits(name.replace("_orig_mod.", "").removesuffix("_orig_mod"), units, start)
            self._first = p if self._first is None else self._first
            start += units.count(p.shape)
        self._key: noise.Key | None = None  # key of the current draw in training
        self._reset_draws()

    def _reset_draws(self) -> None:
        """Discards the record of draws since the last step."""
        self._sampled_params: set[Tensor] = set()  # parameters whose gradients were computed in sampled()
        self._before: dict[Tensor, Mark] = {}  # gradients at the beginning of the current context

    def keep_of(self, group: Mapping[str, Any], p: Tensor) -> float | None:
        """The probability to keep each unit that this weight multiplies; None if units are never dropped."""
        masked, keep = self._masked_units.get(p), group["keep"]
        if masked is None:
            return None
        if isinstance(keep, Mapping):
            return keep.get(masked.layer)
        return None if p is self._first and not group["drop_inputs"] else keep

    # --- sampling ---

    @property
    def takes_draws(self) -> bool:
        """Whether gradients must be computed inside `sampled()`."""
        return True

    @contextmanager
    def sampled(self, masks: Masks | None = None) -> Iterator[None]:
        """A context in which weights are z m for one draw of masks z; afterwards they are m again, bit for bit.

        Run forward and backward passes inside. Call `zero_grad` inside or before it; clip and unscale gradients between
        the context and `step()`. Micro-batches inside one context share the draw; a context for each draws new masks.
        Divide losses by the number of micro-batches and draws, as for any gradient accumulation. Parameters that do not
        require gradients are not masked. Draws under `torch.no_grad()` do not affect training.

        Args:
            masks: values for the units in place of drawn ones, as a dict by weight or as a function of the weight.
        """
        if self.__dict__.get("_active_draw"):
            raise RuntimeError("sampled() is already active: leave the context before entering it again.")
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
        """A buffer for the weight during a draw; reused, because an allocation costs more than the copy."""
        buffers: dict[Tensor, Tensor] = self.__dict__.setdefault("_buffers", {})
        old = buffers.get(p)
        if old is None or (old.shape, old.dtype, old.device) != (p.shape, p.dtype, p.device):
            old = buffers[p] = torch.empty_like(p)
        return old

    def _mask(self, p: Tensor, keep: float, key: noise.Key, masks: Masks | None) -> Tensor:
        """z in the shape of the weight and the dtype of the state."""
        masked, dtype = self._masked_units[p], kernels.compute_dtype(p.dtype)
        count = masked.units.count(p.shape)
        if masks is not None:
            z = masks(p) if callable(masks) else masks[p]
            if z.shape != (count,):
                raise ValueError(f"the mask of {masked.layer!r} must have shape {(count,)}, got {tuple(z.shape)}.")
        else:
            position = torch.arange(count, dtype=torch.int32, device=p.device) + noise.signed(masked.start)
            z = noise.fraction(noise.bits(position, *key)[0]) <= keep
        return masked.units.spread(z.to(p.device, dtype), p.shape)

    _next_key = WeightSampling._next_key

    # --- gradients of draws ---

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim; discards the record of draws."""
        super().zero_grad(set_to_none)
        self._reset_draws()
        if self._key is not None:
            self._before = {p: _mark(p) for group in self.param_groups for p in group["params"]}

    def evidence(self, groups: list[dict[str, Any]], active: list[list[Tensor]]) -> dict[str, Mapping[Tensor, Tensor]]:
        missing = next((p for some in active for p in some if p not in self._sampled_params), None)
        if missing is not None:
            raise RuntimeError(
                f"a gradient of shape {tuple(missing.shape)} was not computed at sampled weights: run forward and "
                f"backward passes inside `with optimizer.sampled():`, then call {type(self).__name__}.step()."
            )
        return {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As `BeliefOptimizer.step`; a closure is called for each of `samples` draws, and the gradients are averaged.

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
        """Stores what one of several draws of a closure gives beside gradients."""

    # --- posterior ---

    def posterior(self, model: nn.Module, scale: float = 1.0) -> Posterior:
        """A copy of the belief about the model's weights, as a `DropoutPosterior`.

        Args:
            model: the model that was optimised. Its other parameters are constants.
            scale: must be 1: the variance is that of the masks, keep (1 - keep) m^2.
        """
        if scale != 1:
            raise ValueError(f"scale must be 1, got {scale!r}: the variance is that of the masks, which has no scale.")
        names = {id(p): name for name, p in parameters_of(model).items()}
        slab, keeps, units = {}, {}, {}
        for index, group in enumerate(self.param_groups):
            for p in group["params"]:
                if id(p) not in names:
                    raise ValueError(f"{self._name(index, p)} is not in the model: pass the model that was optimised.")
                slab[names[id(p)]] = p.detach().clone()
                keep = self.keep_of(group, p)
                if keep is not None and p.requires_grad:
                    masked, like = self._masked_units[p], kernels.compute_dtype(p.dtype)
                    count = masked.units.count(p.shape)
                    keeps[names[id(p)]] = torch.full((count,), keep, dtype=like, device=p.device)
                    units[names[id(p)]] = masked.units
        return DropoutPosterior(slab, keeps, units, model)

    # --- groups and checkpoints ---

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group of the model's parameters."""
        (group,) = named_groups(self.model, [param_group])
        super().add_param_group(group)
        self.param_groups[-1].setdefault("draws", 0)

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        if isinstance(group["keep"], Mapping):
            known = {masked.layer for masked in self._masked_units.values()}
            odd = next((name for name in group["keep"] if name not in known), None)
            if odd is not None:
                raise ValueError(f"keys of keep must be among the layers {sorted(known)}, got {odd!r}.")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "model": self.model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "model" in state:  # torch's load_state_dict calls this without a model
            self._bind()
        self._reset_draws()


def _through(factor: Tensor) -> Callable[[Tensor], Tensor]:
    """A hook that multiplies the gradient of a masked weight by `factor`."""
    return lambda gradient: (gradient * factor).to(gradient.dtype)
