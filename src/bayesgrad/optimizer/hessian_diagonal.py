"""Optimizers whose curvature is the diagonal of the Hessian."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bayesgrad import noise
from bayesgrad.curvature import hessian
from bayesgrad.kernels import compute_dtype
from bayesgrad.optimizer.base import BeliefOptimizer
from bayesgrad.optimizer.constraints import POSITIVE_INTEGER, Constraint, one_of

EXACT_LIMIT = 1000  # weights up to which "auto" is "exact"
HESSIAN: Mapping[str, Constraint] = {"hessian": one_of("auto", "exact", "hutchinson"), "probes": POSITIVE_INTEGER}


class HessianDiagonal(BeliefOptimizer):
    """A mixin for optimizers whose curvature is the diagonal of the loss's Hessian, computed by `observe(loss)`.

    It must be the first base class: `class VON(HessianDiagonal, SampledVariational)`. `hessian`, `probes`, `seed` and
    the number of `draws` are those of the first param group.
    """

    accepts = {**BeliefOptimizer.accepts, **HESSIAN}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reset_hessians()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset_hessians()

    def _reset_hessians(self) -> None:
        """Discards what was observed since the last step."""
        self._hessians: dict[Tensor, Tensor] = {}

    def needs_hessian(self, group: Mapping[str, Any]) -> bool:
        """Whether the parameters of this group need second derivatives."""
        return True

    def hessian_factor(self, group: Mapping[str, Any], p: Tensor) -> float:
        """The factor of second derivatives."""
        return 1.0

    def _begin_observing(self) -> None:
        """Counts a draw of probes; raises if observe() is called in the wrong place."""
        if not self._hessians:
            self.param_groups[0]["draws"] += 1

    def observe(self, loss: Tensor) -> None:
        """Computes the diagonal of the Hessian from the graph of a loss; neither the graph nor `.grad` is changed.

        Call it after `zero_grad()` and before `loss.backward()`. With micro-batches, pass the loss divided by their
        number, because Hessians add up like gradients. With a `GradScaler`, pass the loss before `scale`. Clipping
        gradients does not change the Hessian. If a parameter has no gradient yet, an earlier observation of it belongs
        to an abandoned pass and is replaced.

        Probes are a function of seed, step (or draw) and position: the micro-batches of a step share them.

        Args:
            loss: a tensor with one element.
        """
        wanted, start = [], 0
        for group in self.param_groups:
            for p in group["params"]:
                if self.needs_hessian(group) and p.requires_grad and p.numel():
                    wanted.append((group, p, start))
                start += p.numel()
        if not wanted:
            return
        _, params, starts = zip(*wanted)
        gradients = hessian.gradients_of(loss, params)
        self._begin_observing()
        first = self.param_groups[0]
        few = sum(p.numel() for p in params) <= EXACT_LIMIT
        if first["hessian"] == "exact" or (first["hessian"] == "auto" and few):
            found = [hessian.exact(gradient, p) for gradient, p in zip(gradients, params)]
        else:
            keys = [noise.key(first["seed"], first["draws"], 0, probe) for probe in range(int(first["probes"]))]
            found = hessian.hutchinson(gradients, params, starts, keys)
        for (group, p, _), diagonal in zip(wanted, found):
            diagonal = diagonal.detach().to(compute_dtype(p.dtype)) * self.hessian_factor(group, p)
            known = self._hessians.get(p) if p.grad is not None else None
            self._hessians[p] = diagonal if known is None else known + diagonal

    # --- steps ---

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim; discards what was observed."""
        super().zero_grad(set_to_none)
        self._reset_hessians()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As `BeliefOptimizer.step`; the closure must call `observe(loss)` before `loss.backward()`.

        Args:
            closure: re-evaluates the model, observes, calls backward and returns the loss.
        """
        self._stored_draws: dict[Tensor, Tensor] = {}
        loss = super().step(closure)
        self._reset_hessians()
        return loss

    def _store_draw(self, samples: int) -> None:
        """Stores the Hessian of one of several draws of a closure."""
        for p, diagonal in self._hessians.items():
            self._stored_draws[p] = (
                self._stored_draws[p] + diagonal / samples if p in self._stored_draws else diagonal / samples
            )

    def _diagonals(self) -> dict[Tensor, Tensor]:
        return self._stored_draws or self._hessians

    def evidence(self, groups: list[dict[str, Any]], active: list[list[Tensor]]) -> dict[str, Mapping[Tensor, Tensor]]:
        evidence = super().evidence(groups, active)
        wanting = [p for group, some in zip(groups, active) if self.needs_hessian(group) for p in some]
        if not wanting:
            return evidence
        known = self._diagonals()
        if any(p.numel() and p not in known for p in wanting):
            raise RuntimeError(
                f"{type(self).__name__} needs second derivatives: call optimizer.observe(loss) after zero_grad() and "
                "before loss.backward(), where the loss is computed."
            )
        none = {p: torch.zeros_like(p) for some in active for p in some if p not in known}
        return {**evidence, "hessian": {p: known.get(p, none.get(p, p)) for some in active for p in some}}

    def _skips(self, active: list[list[Tensor]]) -> bool:
        if super()._skips(active):
            return True
        for index, (group, params) in enumerate(zip(self.param_groups, active)):
            if group["nonfinite"] == "ignore":
                continue
            for p in params:
                diagonal = self._diagonals().get(p)
                if diagonal is None or bool(torch.isfinite(diagonal).all()):
                    continue
                if group["nonfinite"] == "skip":
                    return True
                raise FloatingPointError(
                    f"the Hessian of {self._name(index, p)} has {int((~torch.isfinite(diagonal)).sum())} entries of "
                    f"{p.numel()} that are not finite; nothing was changed. Lower lr, or pass nonfinite='skip'."
                )
        return False
