"""KalmanMomentum: a Kalman filter of each weight and its momentum."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bayesgrad.checkpoint import settings
from bayesgrad.constraints import BOOLEAN, COUNT, DEVIATION, FRACTION, NONNEGATIVE, Constraint
from bayesgrad.directions import Directions
from bayesgrad.kernels import compute_dtype
from bayesgrad.likelihoods import Likelihood
from bayesgrad.optim.adabayes import FISHER_OPTIONS, check_centred, fisher_sources
from bayesgrad.optimizer import BeliefOptimizer
from bayesgrad.packing import Block
from bayesgrad.parts import Groups, Source, entries
from bayesgrad.precision import Pair, Precision
from bayesgrad.rules import (
    CentredGradient,
    Move,
    OrnsteinUhlenbeckPair,
    SquaredGradient,
    SteadyState,
    UpdateRule,
)
from bayesgrad.rules.transition import Memory, Scalars
from bayesgrad.rules.update import MOMENTUM
from bayesgrad.schedule import relative_lr, state_unit, unit_lr

INITIAL_SGD_LR = 0.1  # SGD's learning rate that gives the first step if prior_std = inf
AHEAD = "ahead"  # in the state: the coefficients of the last prediction
MAX_CORRELATION = 0.7  # bound of the initial correlation of weight and momentum


@dataclass(frozen=True)
class PredictedStep(Move):
    """Updates weight and momentum, then predicts the weight at the next step, where the next gradient is taken.

    m = w - step_scale a g, p <- keep p - pull b g, w <- ahead m + eta p, with a the variance of the weight and b its
    covariance with the momentum. Gradients are taken at w, ahead of the posterior mean m: this is Nesterov's
    acceleration.

    Reference: Aitchison 2018, Eq. 15-18.
    Checked by: tests/equations/test_momentum_filter.py.
    """

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return (MOMENTUM,)

    def scalars(self, group: Mapping[str, Any], step: int, step_scale: float) -> dict[str, float]:
        """The optimizer adds `momentum` (keep), `pull`, `ahead` and `eta`."""
        return {"step_scale": step_scale}

    def move(self, mean: Tensor, gradient: Tensor, precision: Precision, memory: Memory, n: Scalars) -> Tensor:
        if not isinstance(precision, Pair):
            raise TypeError(f"PredictedStep needs a precision of type Pair, got {type(precision).__name__}.")
        posterior = mean - n["step_scale"] * (precision.weight * gradient)
        memory[MOMENTUM] = n["momentum"] * memory[MOMENTUM] - n["pull"] * (precision.cross * gradient)
        return n["ahead"] * posterior + n["eta"] * memory[MOMENTUM]


class KalmanMomentum(BeliefOptimizer):
    r"""The Kalman filter of weights that are driven by a momentum: between Adam and RMSprop.

    .. math::
        S_{prior} &= \begin{pmatrix} c_w & \eta \\ 0 & 1-\eta_p \end{pmatrix} S
            \begin{pmatrix} c_w & 0 \\ \eta & 1-\eta_p \end{pmatrix}
            + \begin{pmatrix} \eta_w^2 & 0 \\ 0 & \eta_p^2 \end{pmatrix} \\
        S &= \left(S_{prior}^{-1} + \begin{pmatrix} (B g)^2 & 0 \\ 0 & 0 \end{pmatrix}\right)^{-1} \\
        m &= w - S_{ww} B g, \quad p \leftarrow (1-\eta_p)\, p - S_{wp} B g, \quad
        w \leftarrow c_w (1 - \eta\lambda)\, m + \eta\, p

    with g the gradient of the mean loss (`.grad`) at w, B = `batch_size`, eta = `lr`, eta_p = `momentum_decay`,
    eta_w = `weight_noise`, lambda = `weight_decay` and c_w = 1 - (eta^2 + eta_w^2)/(2 sigma^2), sigma = `prior_std`.

    The parameters are w, the *predicted* mean, where the next gradient is taken; this is Nesterov's acceleration.
    After `optimizer.eval()` they are m, for evaluation.

    The part of a step that goes through the momentum depends on r = eta_p/(eta B rms(g)): nearly all for r << 1 (Adam
    with beta_1 = 1 - eta_p), nearly none for r >> 1 (RMSprop). In both limits the displacement per step is that of Adam
    with learning rate eta, if eta B rms(g) is below about 1/eta_p.

    Args:
        params: parameters, named parameters or param groups.
        lr: eta; lr = 0 changes neither weights and momenta nor their covariances; averages of gradients go on. When lr
            changes by a factor, variances of weights are multiplied by it.
        batch_size: B, the number of losses whose mean is differentiated, over all micro-batches (and tokens).
        momentum_decay: eta_p, in (0, 1].
        weight_noise: eta_w, the standard deviation of noise that acts on weights directly; larger values are closer to
            RMSprop. A schedule multiplies it by the factor of lr.
        prior_std: sigma; with `inf` the initial variance is that for which the first step is SGD with learning rate
            0.1.
        weight_decay: decoupled, as in AdamW.
        nesterov_decay: apply the weight decay before the gradient is computed, as part of the prediction; else after.
        fisher: the estimate of the Fisher information: the square of the gradient (`"empirical"`), its variance
            (`"centered"`), or its square for labels sampled from the model (`"sampled"`), which needs
            `observe(outputs)` in every step.
        steady_state: use the steady state of the filter for a moving average of the information, in closed form: two
            state tensors in place of four. Requires prior_std = inf and weight_noise = 0. The error is a few per cent
            if eta_p <= 0.1 and B^2 <g^2> S_ww <= 0.1.
        beta2: decay of that moving average.
        likelihood: from which labels are sampled: "categorical", "bernoulli", "gaussian", or an object of
            `bayesgrad.likelihoods`.
        sample_weights: compute gradients at weights sampled from the belief, inside `with optimizer.sampled():`.
        samples: number of weight samples that `step(closure)` averages over, with sample_weights.
        seed: seed of sampled weights and labels; None draws one from torch's global generator.
        nonfinite, fused: as in `AdaBayes`.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = KalmanMomentum([weight], lr=1e-3, batch_size=100)
        >>> weight.grad = torch.tensor([1e-6])
        >>> optimizer.step()
        >>> round((1 - weight.item()) / 1e-6, 1)  # a weak gradient at the start: SGD's learning rate
        0.1

    The defaults of lr and momentum_decay are those of Adam; a small MLP on digits trains with them.

    Reference: Aitchison 2018, Eq. 15-21 and section 2.2.
    Differs from the paper: Eq. 21 holds for r << 1 only, the closed form here for any r; variances are rescaled with
    lr.
    Checked by: tests/equations/test_momentum_filter.py.
    """

    rule = UpdateRule(SquaredGradient(), OrnsteinUhlenbeckPair(), PredictedStep())
    common = ("fisher", "sample_weights", "steady_state")
    scaled_by_lr = ("weight_noise",)
    accepts = {
        **BeliefOptimizer.accepts,
        **FISHER_OPTIONS,
        "batch_size": COUNT,
        "momentum_decay": Constraint("in (0, 1]", lambda x: 0 < x <= 1),
        "weight_noise": NONNEGATIVE,
        "prior_std": DEVIATION,
        "nesterov_decay": BOOLEAN,
        "steady_state": BOOLEAN,
        "beta2": FRACTION,
    }

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        batch_size: float,
        momentum_decay: float = 0.1,
        weight_noise: float = 0.0,
        prior_std: float = math.inf,
        weight_decay: float = 0.0,
        nesterov_decay: bool = True,
        fisher: str = "empirical",
        steady_state: bool = False,
        beta2: float = 0.999,
        likelihood: str | Likelihood = "categorical",
        sample_weights: bool = False,
        samples: int = 1,
        seed: int | None = None,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, settings(locals()))

    def check_options(self, group: Mapping[str, Any]) -> None:
        check_centred(group, "prior_std")
        lr, std, noise = float(group["lr"]), group["prior_std"], self._weight_noise(group)
        if group["steady_state"] and (not math.isinf(std) or group["weight_noise"] or group["sample_weights"]):
            raise ValueError(
                "steady_state=True needs prior_std=inf, weight_noise=0 and sample_weights=False, "
                f"got prior_std={std!r}, weight_noise={group['weight_noise']!r}, "
                f"sample_weights={group['sample_weights']!r}."
            )
        if lr * lr + noise**2 >= std * std:
            raise ValueError(
                f"prior_std={std!r} must be larger than lr={lr!r} and weight_noise={noise!r}, the "
                "distance that a weight's optimum moves in a single step."
            )

    # The state is the variance of weights divided by unit = lr/unit_lr, and covariances divided by sqrt(unit). So it
    # need not be rescaled when lr changes, even to zero and back. (See AdaBayes.)

    def _unit(self, group: Mapping[str, Any]) -> float:
        return 1.0 if group["steady_state"] else state_unit(group)

    def _retain(self, group: Mapping[str, Any]) -> float:
        """c_w."""
        noise = float(group["lr"]) ** 2 + self._weight_noise(group) ** 2
        return 1 - noise / (2 * group["prior_std"] ** 2)

    def _weight_noise(self, group: Mapping[str, Any]) -> float:
        return group["weight_noise"] * relative_lr(group)

    def build_sources(self) -> Iterator[Source]:
        return fisher_sources(self.param_groups[0], self._sampling_scalars)

    def rule_of(self, group: Mapping[str, Any]) -> UpdateRule:
        rule = type(self).rule
        if group["steady_state"]:
            rule = replace(rule, transition=SteadyState(OrnsteinUhlenbeckPair()))
        return replace(rule, curvature=CentredGradient()) if group["fisher"] == "centered" else rule

    def dynamics(self, group: Mapping[str, Any]) -> dict[str, float]:
        lr, unit, eta_p = float(group["lr"]), self._unit(group), group["momentum_decay"]
        if group["steady_state"]:
            eta = lr or group["last_lr"] or 1.0
            return {"beta": group["beta2"], "eta": eta, "eta_p": eta_p, "count": group["batch_size"]}
        if lr == 0:
            return {"eta": 0.0, "eta_p": 0.0, "eta_w": 0.0, "retain": 1.0}
        root = math.sqrt(unit)
        eta_w = self._weight_noise(group) / root
        return {"eta": lr / root, "eta_p": eta_p, "eta_w": eta_w, "retain": self._retain(group)}

    def step_scale(self, group: Mapping[str, Any]) -> float:
        return (self._unit(group) if group["lr"] else 0.0) * group["batch_size"]

    def gradient_scale(self, group: Mapping[str, Any]) -> float | None:
        if group["steady_state"]:  # which averages squares of the mean gradient without a factor
            return None
        return math.sqrt(self._unit(group)) * group["batch_size"]

    def _sampling_scalars(self, group: Mapping[str, Any]) -> list[float]:
        return [self._unit({**group, "lr": float(group["lr"]) or group["last_lr"] or 1.0})]

    def scalars(self, group: Mapping[str, Any], step: int) -> dict[str, float]:
        n = super().scalars(group, step)
        lr = float(group["lr"])
        moves = lr > 0
        n["momentum"] = 1 - group["momentum_decay"] if moves else 1.0
        n["pull"] = math.sqrt(self._unit(group)) * group["batch_size"] if moves else 0.0
        n["eta"] = lr
        n["ahead"] = self._retain(group) if moves else 1.0
        if "shrink" in n and group["nesterov_decay"]:
            n["ahead"] *= n.pop("shrink")
        return n

    def prior_variance(self, group: Mapping[str, Any]) -> float:
        std = group["prior_std"]
        return INITIAL_SGD_LR / group["batch_size"] if math.isinf(std) else std**2

    def initial(self, slot: str, group: Mapping[str, Any], p: Tensor) -> float | Tensor:
        eta_p, eta = group["momentum_decay"], unit_lr(group)
        spread = eta_p / (2 - eta_p)
        if slot == "momentum_variance":
            return spread
        if slot == "cross":
            return min(
                eta * (1 - eta_p) / (2 - eta_p), MAX_CORRELATION * math.sqrt(spread * self.prior_variance(group))
            )
        return super().initial(slot, group, p)

    def _build(self) -> None:
        super()._build()
        # The coefficients before the first prediction: one tensor, so that no step has to read them.
        self._still = torch.tensor([1.0, 0.0], dtype=torch.float64, device="cpu")
        for _, entry in entries(self):
            if AHEAD in entry and torch.equal(entry[AHEAD], self._still):
                entry[AHEAD] = self._still

    def initialise(self, group: Mapping[str, Any], params: list[Tensor], preconditioner: Any = None) -> None:
        super().initialise(group, params, preconditioner)
        for p in params:
            self.state[p].setdefault(AHEAD, self._still)

    def _layout(
        self, groups: Groups, active: list[list[Tensor]], directions: Directions
    ) -> list[tuple[Any, dict[str, Any], list[Block]]]:
        layout = super()._layout(groups, active, directions)
        for group, params in zip(groups, active):
            for p in params if group["lr"] > 0 else ():
                if self.state[p][AHEAD] is self._still and "cross" in self.state[p]:  # began at lr = 0
                    self.state[p]["cross"].fill_(self.initial("cross", group, p))
        return layout

    def _update(self, groups: Groups, active: list[list[Tensor]]) -> None:
        super()._update(groups, active)
        for group, params in zip(groups, active):  # parameters without a gradient are not predicted
            if params and group["lr"] > 0:
                n = self.scalars(group, 1)
                ahead = torch.tensor([n["ahead"], n["eta"]], dtype=torch.float64, device="cpu")
                for p in params:
                    self.state[p][AHEAD] = ahead

    def evaluation_weights(self) -> dict[Tensor, Tensor]:
        means = {}
        for p, entry in entries(self):
            if AHEAD in entry and entry[AHEAD] is not self._still:
                ahead, eta = entry[AHEAD].tolist()
                means[p] = (p.detach().to(compute_dtype(p.dtype)) - eta * entry[MOMENTUM]) / ahead
        return means

    def on_cpu(self) -> set[str]:
        return {*super().on_cpu(), AHEAD}
