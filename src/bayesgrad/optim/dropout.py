"""SpikeSlab: dropout as variational inference with a spike-and-slab distribution over the weights of each unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from bayesgrad.checkpoint import TRAINING_WEIGHT, fingerprint, settings
from bayesgrad.constraints import BOOLEAN, FINITE, NONNEGATIVE, OPTIONAL_INTEGER, POSITIVE_INTEGER, Constraint, one_of
from bayesgrad.kernels import compute_dtype
from bayesgrad.optimizer import BeliefOptimizer
from bayesgrad.parts import Source
from bayesgrad.posterior import DropoutPosterior
from bayesgrad.posterior.filtered import is_constant, names_in
from bayesgrad.rules import AbsoluteHessian, MovingAverage, NaturalStep, SquaredGradient, SteadyState, UpdateRule
from bayesgrad.rules.transition import FLOOR
from bayesgrad.sources import HessianDiagonal, UnitDropout
from bayesgrad.sources.hessian_diagonal import HESSIAN
from bayesgrad.sources.unit_dropout import MaskedUnits, masked_units

KEEP = Constraint(
    "in (0, 1], or a dict from names of layers to such numbers",
    lambda x: all(0 < k <= 1 for k in (x.values() if isinstance(x, Mapping) else [x])),
)
# Default (lr, betas, eps) of each update.
DEFAULTS = {
    "adam": (1e-3, (0.9, 0.999), 1e-8),
    "rmsprop": (1e-3, (0.0, 0.99), 1e-8),
    "newton": (0.05, (0.9, 0.0), 0.01),
}


@dataclass(frozen=True)
class BiasedMovingAverage(MovingAverage):
    """s <- decay s + (1 - decay) h, starting from a prior: `Forget` with the precision as state, as it may be zero."""

    def scalars(self, step: int = 1, *, decay: float) -> dict[str, float]:
        return {"keep": decay, "take": 1 - decay, "floor": FLOOR}


class SpikeSlab(BeliefOptimizer):
    r"""Dropout as the Bayesian learning rule for a distribution in which whole units may be absent.

    .. math::
        q(\theta_j) = \pi_1 N(\theta_j | m_j, S_j^{-1}) + (1-\pi_1) N(\theta_j | 0, s_0^{-1} I), \quad
        \tilde\theta_j = z_j m_j, \quad z_j \sim \mathrm{Bernoulli}(\pi_1)

    for the weights theta_j that leave unit j, with

    .. math::
        g = z \odot \nabla \ell(\tilde\theta)/\pi_1, \quad h = z^2 \odot \nabla^2_{diag} \ell(\tilde\theta)/\pi_1

    | update | precision | mean |
    |---|---|---|
    | `"newton"` | s <- (1 - eta) s + eta abs(h) | m <- m - eta <g>/(s + eps) |
    | `"adam"` | s = sqrt(<g^2>) | m <- m - eta <g>/(s + eps) |
    | `"rmsprop"` | v <- beta_2 v + (1-beta_2) g^2, s = sqrt(v) | m <- m - eta <g>/(s + eps) |

    where pi_1 = `keep`, eta = `lr` and <> are debiased moving averages with decays `betas`. Because of the factor z,
    E[g] is exactly the expected gradient given that unit j is kept. Activations are not rescaled, so predictions by a
    single network use pi_1 m: `posterior(model).predict(x, method="mean")`.

    Compute gradients inside `sampled()`; there `.grad` becomes g. Clipping acts on g.

        >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> optimizer = SpikeSlab(model, keep=0.8)
        >>> with optimizer.sampled():
        ...     optimizer.zero_grad()
        ...     model(torch.ones(4, 2)).square().mean().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.posterior(model).keep)
        ['2.weight']

    Units are the inputs of Linear layers and the input channels of convolutions. Biases and all other parameters are
    trained without masks, and so are weights that are shared with a layer of another type. Frozen weights are constants
    without masks if they were never trained; those that were keep their masks and pi_1, also in evaluation.

    Args:
        model: the network.
        lr: eta. None is 1e-3, for `"newton"` 0.05. At most 1 for `"newton"`, where it is the rate of both updates.
        params: parameters, named parameters or param groups of the model; None for all.
        keep: pi_1, the probability to keep a unit, for all layers but the first; or a dict from names of layers to
            probabilities, where other layers drop nothing.
        drop_inputs: whether to drop units of the first layer in the order of `model.modules()`, which are the data. If
            data enter at other layers too, name the layers in `keep`.
        update: see the table.
        betas: None is (0.9, 0.999), for `"rmsprop"` (0, 0.99), for `"newton"` (0.9, 0), whose second is not used.
        eps: added to s. None is 1e-8, for `"newton"` 0.01, because s may be zero where the loss is flat.
        hess_init: the initial s of `"newton"`.
        hessian: how `observe(loss=loss)` computes the diagonal of the Hessian: `"hutchinson"`, v * (H v) for random
            signs v, or `"exact"`, with a backward pass for each weight; `"auto"` is exact for up to 1000 weights.
        probes: the number of vectors v to average over.
        weight_decay: decoupled, as in AdamW.
        samples: number of weight samples that `step(closure)` averages over.
        seed: masks are a function of the seed, the number of earlier draws and the position of a unit; None draws one
            from torch's global generator.
        nonfinite: what to do if a gradient has infinite or NaN entries: `"ignore"`, `"raise"`, or `"skip"`.
        fused: compile the step (`True`), run it eagerly (`False`), or compile it for large models only (`None`).

    With the defaults a small MLP on digits reaches 96 %, with `"newton"` 97 %; learning rates were chosen on it.

    Reference: Khan and Rue 2023, section 4.3, Eq. 39-43, and appendix G.
    Differs from the paper: gradient and Hessian are multiplied by z and z z^T, without which (1/pi_1) E[g] is biased;
    s_0 is large. |h| is the absolute value of the batch's Hessian, not the sum over examples of absolute values
    (after Eq. 36).
    Checked by: tests/equations/test_dropout.py.
    """

    takes_model = True
    rule = UpdateRule(SquaredGradient(), SteadyState(), NaturalStep())
    undebiased_rule = UpdateRule(SquaredGradient(), SteadyState(debias=False), NaturalStep())
    newton_rule = UpdateRule(AbsoluteHessian(), BiasedMovingAverage(), NaturalStep())
    common = ("update",)
    accepts = {
        **BeliefOptimizer.accepts,
        "keep": KEEP,
        "drop_inputs": BOOLEAN,
        "samples": POSITIVE_INTEGER,
        "seed": OPTIONAL_INTEGER,
        "update": one_of(*DEFAULTS),
        "eps": NONNEGATIVE,
        "hess_init": FINITE,
        **HESSIAN,
    }

    def __init__(
        self,
        model: nn.Module,
        lr: float | None = None,
        *,
        params: Any = None,
        keep: float | Mapping[str, float] = 0.9,
        drop_inputs: bool = False,
        update: str = "adam",
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        hess_init: float = 1.0,
        hessian: str = "hutchinson",
        probes: int = 1,
        weight_decay: float = 0.0,
        samples: int = 1,
        seed: int | None = None,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        defaults = settings(locals())
        usual = DEFAULTS.get(update, DEFAULTS["adam"]) if isinstance(update, str) else DEFAULTS["adam"]
        defaults |= {name: value for name, value in zip(("lr", "betas", "eps"), usual) if defaults[name] is None}
        defaults["keep"] = dict(keep) if isinstance(keep, Mapping) else keep
        super().__init__(params, defaults, model)

    def check_options(self, group: Mapping[str, Any]) -> None:
        if group["update"] == "newton" and float(group["lr"]) > 1:
            raise ValueError(
                f"lr must be at most 1 with update='newton', got {group['lr']!r}: 1 - lr is the decay of an average."
            )
        if isinstance(group["keep"], Mapping):
            known = {masked.layer for masked in self._masked.values()}
            odd = next((name for name in group["keep"] if name not in known), None)
            if odd is not None:
                raise ValueError(f"keys of keep must be among the layers {sorted(known)}, got {odd!r}.")

    def build_sources(self) -> Iterator[Source]:
        yield UnitDropout(self._masked, self.keep_of)
        if self.param_groups[0]["update"] == "newton":
            yield HessianDiagonal(self._hessian_factor)

    def _hessian_factor(self, group: Mapping[str, Any], p: Tensor) -> float:
        # The mask's hook divided by keep for each of the two derivatives; h needs only one division.
        return self.keep_of(group, p) or 1.0

    @cached_property
    def _masked(self) -> dict[Tensor, MaskedUnits]:
        assert self.model is not None
        return masked_units(self.model)

    def keep_of(self, group: Mapping[str, Any], p: Tensor) -> float | None:
        """The probability to keep each unit that this weight multiplies; None if units are never dropped.

        They are dropped too if the weight is frozen, once it was trained: it is a weight for dropped units.
        """
        keep = group["keep"]
        if p not in self._masked or is_constant(self, p):
            return None
        if isinstance(keep, Mapping):
            return keep.get(self._masked[p].layer)
        return None if p is next(iter(self._masked)) and not group["drop_inputs"] else keep

    def rule_of(self, group: Mapping[str, Any]) -> UpdateRule:
        if group["update"] == "newton":
            return self.newton_rule
        return type(self).rule if group["update"] == "adam" else self.undebiased_rule

    def dynamics(self, group: Mapping[str, Any]) -> dict[str, float]:
        if group["update"] == "newton":
            return {"decay": 1 - float(group["lr"])}
        return {"beta": group["betas"][1]}

    def scalars(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        return super().scalars({**group, "damping": group["eps"]}, step)

    def initial(self, slot: str, group: Mapping[str, Any], p: Tensor) -> float | Tensor:
        if slot == "moment" and group["update"] == "newton":
            return group["hess_init"]
        return super().initial(slot, group, p)

    def evaluation_weights(self) -> Mapping[Tensor, Tensor]:
        """keep times the weights whose units are dropped: their mean."""
        found = {}
        for group in self.param_groups:
            for p in group["params"]:
                if (keep := self.keep_of(group, p)) is not None:
                    found[p] = keep * p.detach()
        return found

    def spread_in_training(self) -> float:
        keeps = [self.keep_of(group, p) for group in self.param_groups for p in group["params"]]
        return max((1 - keep for keep in keeps if keep is not None), default=0.0)

    def build_posterior(self, model: nn.Module, scale: float) -> DropoutPosterior:
        """The variance is that of the masks, keep (1 - keep) m^2, so that scale must be 1."""
        if scale != 1:
            raise ValueError(f"scale must be 1, got {scale!r}: the variance is that of the masks, which has no scale.")
        names = names_in(self, model)
        slab, keeps, units = {}, {}, {}
        # In evaluation mode, those of training are in the state; a change of mode would lose estimated statistics.
        changed = {id(p) for p, seen in self._evaluated if seen != fingerprint(p)}
        for group in self.param_groups:
            for p in group["params"]:
                name, trained = names[id(p)], self.state.get(p, {}).get(TRAINING_WEIGHT, p)
                slab[name] = (p if id(p) in changed else trained).detach().clone()
                keep = self.keep_of(group, p)
                if keep is not None:
                    masked = self._masked[p].units
                    size, like = (masked.count(p.shape),), {"dtype": compute_dtype(p.dtype), "device": p.device}
                    keeps[name] = torch.full(size, keep, **like)
                    units[name] = masked
        return DropoutPosterior(slab, keeps, units, model)
