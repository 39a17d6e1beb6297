"""AdaBayes: Kalman filtering of weights whose optimum drifts while the others are trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from bayesgrad.checkpoint import settings
from bayesgrad.constraints import (
    BOOLEAN,
    COUNT,
    OPTIONAL_COUNT,
    OPTIONAL_INTEGER,
    POSITIVE,
    POSITIVE_INTEGER,
    likelihood_of,
    one_of,
)
from bayesgrad.likelihoods import Likelihood
from bayesgrad.optimizer import BeliefOptimizer
from bayesgrad.parts import Source
from bayesgrad.rules import (
    CentredGradient,
    NaturalStep,
    OrnsteinUhlenbeck,
    SquaredGradient,
    SteadyState,
    UpdateRule,
)
from bayesgrad.schedule import reference_lr, relative_lr, state_unit, unit_lr
from bayesgrad.sources import SampledLabels, WeightSampling

DEFAULT_SGD_LR = 0.1


FISHER_OPTIONS = {
    "fisher": one_of("empirical", "centered", "sampled"),
    "likelihood": likelihood_of("categorical", "bernoulli", "gaussian"),
    "sample_weights": BOOLEAN,
    "samples": POSITIVE_INTEGER,
    "seed": OPTIONAL_INTEGER,
}


def fisher_sources(
    group: Mapping[str, Any], scalars: Callable[[Mapping[str, Any]], list[float]] | None
) -> Iterator[Source]:
    """The sources for the options `fisher` and `sample_weights`.

    Reference: Aitchison 2018, sections 2.2.2 and 2.2.8.
    Checked by: tests/contract/test_evidence.py.

    Args:
        group: the first param group.
        scalars: param group -> scalars of the sampling kernel; None if weights are never sampled.
    """
    if scalars is not None and group["sample_weights"]:
        yield WeightSampling(None, scalars)
    if group["fisher"] == "sampled":
        yield SampledLabels()


def check_centred(group: Mapping[str, Any], name: str) -> None:
    """Raises if the step for a gradient of zero variance would be unbounded; `name` is the option that bounds it."""
    if group["fisher"] == "centered" and math.isinf(group[name]):
        raise ValueError(
            f"fisher='centered' needs a finite {name}, got inf: the step for a gradient of zero variance would be "
            "unbounded."
        )


class AdaBayes(BeliefOptimizer):
    r"""Bayesian filtering of each weight: SGD for weights with weak gradients, Adam for those with strong ones.

    .. math::
        \sigma^2_{prior} &= r\,\sigma^2_{post} + \sigma^2 (1 - r), \quad r = e^{-\eta^2/\sigma^2} \\
        1/\sigma^2_{post} &= 1/\sigma^2_{prior} + (B g)^2 \\
        w &\leftarrow (1 - \eta\lambda)\, w - \sigma^2_{post}\, B \langle g \rangle

    with g the gradient of the mean loss (`.grad`), <g> its debiased moving average, eta = `lr`, lambda =
    `weight_decay`, B = `batch_size` and sigma^2 = `sgd_lr`/B.

    For weak gradients the step is that of SGD with learning rate `sgd_lr`. For strong gradients it is that of Adam with
    `lr` if lr B rms(g) is small, and smaller otherwise. Without momentum no step exceeds sqrt(sigma^2_prior)/2.

    Args:
        params: parameters, named parameters or param groups.
        lr: eta, Adam's learning rate; lr = 0 changes neither weights nor variances, and averages of gradients go on.
        batch_size: B, the number of losses whose mean is differentiated, over all micro-batches (and tokens).
        sgd_lr: SGD's learning rate for averaged gradients: ten times the learning rate of torch.optim.SGD with
            momentum 0.9. A schedule multiplies it by the factor of lr. `inf` removes the SGD limit; the initial
            variance is then that of sgd_lr = 0.1.
        momentum: decay of the gradient's moving average.
        weight_decay: decoupled, as in AdamW.
        fisher: the estimate of the Fisher information: the square of the gradient (`"empirical"`), its variance
            (`"centered"`), or its square for labels sampled from the model (`"sampled"`), which needs
            `observe(outputs)` in every step.
        likelihood: from which labels are sampled: "categorical", "bernoulli", "gaussian", or an object of
            `bayesgrad.likelihoods`.
        sample_weights: compute gradients at weights sampled from the belief, inside `with optimizer.sampled():`.
        samples: number of weight samples that `step(closure)` averages over, with sample_weights.
        seed: seed of sampled weights and labels; None draws one from torch's global generator.
        follow_lr: when lr changes by a factor, multiply sigma^2_post by it. `False` is the paper's filter, which needs
            thousands of steps to adapt to a new lr. It cannot change during a run.
        nonfinite: what to do if a gradient has infinite or NaN entries: `"ignore"` them as torch.optim does,
            with a warning, `"raise"`, or `"skip"` the step. The last two then change neither weights nor state.
        fused: compile the step (`True`), run it eagerly (`False`), or compile it for large models only (`None`).

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = AdaBayes([weight], lr=1e-3, batch_size=100)
        >>> weight.grad = torch.tensor([1e-6])
        >>> optimizer.step()
        >>> round((1 - weight.item()) / 1e-6, 1)  # a weak gradient: SGD's learning rate
        0.1

    The defaults are the paper's, which were chosen for a ResNet-34 on CIFAR-10; a small MLP on digits trains with them.

    Reference: Aitchison 2020, Eq. 17-19 and Algorithm 1.
    Differs from the paper: Algorithm 1 prints 1/(sigma^2_prior + g^2) for sigma^2_post, without the reciprocal of
    sigma^2_prior; the Ornstein-Uhlenbeck step is exact, not first order, so sigma^2 is invariant for any lr; follow_lr.
    Checked by: tests/equations/test_adabayes.py.
    """

    rule = UpdateRule(SquaredGradient(), OrnsteinUhlenbeck(), NaturalStep())
    centred_rule = replace(rule, curvature=CentredGradient())
    common = ("fisher", "sample_weights")
    fixed = ("follow_lr",)
    scaled_by_lr = ("sgd_lr",)
    accepts = {
        **BeliefOptimizer.accepts,
        **FISHER_OPTIONS,
        "sgd_lr": POSITIVE,
        "batch_size": COUNT,
        "follow_lr": BOOLEAN,
    }

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        batch_size: float,
        sgd_lr: float = DEFAULT_SGD_LR,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        fisher: str = "empirical",
        likelihood: str | Likelihood = "categorical",
        sample_weights: bool = False,
        samples: int = 1,
        seed: int | None = None,
        follow_lr: bool = True,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, settings(locals()))

    def check_options(self, group: Mapping[str, Any]) -> None:
        check_centred(group, "sgd_lr")

    def build_sources(self) -> Iterator[Source]:
        return fisher_sources(self.param_groups[0], self._sampling_scalars)

    def rule_of(self, group: Mapping[str, Any]) -> UpdateRule:
        return self.centred_rule if group["fisher"] == "centered" else type(self).rule

    # The state is u = sigma^2_post / unit. With follow_lr, unit = lr/unit_lr: process noise and information are
    # proportional to it and the stationary variance is constant, so the state need not be rescaled when lr changes,
    # even to zero and back.

    def _unit(self, group: Mapping[str, Any]) -> float:
        return state_unit(group) if group["follow_lr"] else float(group["lr"] > 0)

    def dynamics(self, group: Mapping[str, Any]) -> dict[str, float]:
        lr, unit = float(group["lr"]), self._unit(group)
        if unit == 0:
            return {"process": 0.0, "stationary": math.inf}
        sigma2 = group["sgd_lr"] * relative_lr(group) / group["batch_size"]
        return {"process": lr * lr / unit, "stationary": sigma2 / unit}

    def step_scale(self, group: Mapping[str, Any]) -> float:
        return self._unit(group) * group["batch_size"]

    def gradient_scale(self, group: Mapping[str, Any]) -> float:
        return math.sqrt(self._unit(group)) * group["batch_size"]

    def _sampling_scalars(self, group: Mapping[str, Any]) -> list[float]:
        return [self._unit({**group, "lr": float(group["lr"]) or group["last_lr"] or 1.0})]

    def prior_variance(self, group: Mapping[str, Any]) -> float:
        sgd_lr = DEFAULT_SGD_LR if math.isinf(group["sgd_lr"]) else group["sgd_lr"]
        lr = unit_lr(group) if group["follow_lr"] else group["last_lr"]
        relative = relative_lr({**group, "lr": lr}) or 1.0
        return relative * sgd_lr / group["batch_size"]


class AdaBayesFP(BeliefOptimizer):
    r"""AdaBayes at its fixed point: exactly AdamW for sgd_lr = inf, SGD for weak gradients.

    .. math::
        s &= \beta_2 s + (1 - \beta_2) g^2, \quad \hat s = s / (1 - \beta_2^t) \\
        w &\leftarrow (1 - \eta\lambda)\, w - \frac{\eta}{k + \sqrt{k^2 + \hat s}} \langle g \rangle,
        \quad k = \frac{\eta_0}{2 \eta_{SGD}}

    with g the gradient of the mean loss (`.grad`), <g> its debiased moving average with decay beta_1, eta = `lr`, eta_0
    the lr given to the constructor (or `max_lr` of OneCycleLR), eta_SGD = `sgd_lr` and lambda = `weight_decay`. The
    batch size cancels.

    Args:
        params: parameters, named parameters or param groups.
        lr: eta, Adam's learning rate; lr = 0 does not change the weights.
        sgd_lr: SGD's learning rate for averaged gradients: ten times the learning rate of torch.optim.SGD with
            momentum 0.9. A schedule multiplies it by the factor of lr. `inf` gives AdamW with eps = 0.
        betas: decays of the moving averages of gradient and squared gradient.
        weight_decay: decoupled, as in AdamW.
        batch_size: B, needed for `posterior()`: sigma^2_post = eta / (B (k + sqrt(k^2 + s))). With `fisher="sampled"`,
            s is that of a mean over B losses; None for the number of those that were observed.
        fisher: what s averages: the square of the gradient (`"empirical"`), its variance (`"centered"`), or its square
            for labels sampled from the model (`"sampled"`), which needs `observe(outputs)` in every step.
        likelihood: from which labels are sampled: "categorical", "bernoulli", "gaussian", or an object of
            `bayesgrad.likelihoods`.
        seed: seed of the sampled labels; None draws one from torch's global generator.
        nonfinite: what to do if a gradient has infinite or NaN entries: `"ignore"` them as torch.optim does,
            with a warning, `"raise"`, or `"skip"` the step. The last two then change neither weights nor state.
        fused: compile the step (`True`), run it eagerly (`False`), or compile it for large models only (`None`).

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = AdaBayesFP([weight], lr=1e-3)
        >>> weight.grad = torch.tensor([1e3])
        >>> optimizer.step()
        >>> round(1 - weight.item(), 4)  # a strong gradient: Adam's step
        0.001

    The defaults are the paper's, which were chosen for a ResNet-34 on CIFAR-10; a small MLP on digits trains with them.

    Reference: Aitchison 2020, Eq. 21 and Algorithm 2.
    Differs from the paper: line 11 of the algorithm prints the inverse of what it assigns.
    Checked by: tests/equations/test_adabayes.py.
    """

    rule = UpdateRule(SquaredGradient(), SteadyState(OrnsteinUhlenbeck()), NaturalStep())
    centred_rule = replace(rule, curvature=CentredGradient())
    common = ("fisher",)
    scaled_by_lr = ("sgd_lr",)
    accepts = {**BeliefOptimizer.accepts, **FISHER_OPTIONS, "sgd_lr": POSITIVE, "batch_size": OPTIONAL_COUNT}

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        sgd_lr: float = DEFAULT_SGD_LR,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        batch_size: float | None = None,
        fisher: str = "empirical",
        likelihood: str | Likelihood = "categorical",
        seed: int | None = None,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, settings(locals()))

    def check_options(self, group: Mapping[str, Any]) -> None:
        check_centred(group, "sgd_lr")

    def build_sources(self) -> Iterator[Source]:
        return fisher_sources(self.param_groups[0], None)

    def rule_of(self, group: Mapping[str, Any]) -> UpdateRule:
        return self.centred_rule if group["fisher"] == "centered" else type(self).rule

    def dynamics(self, group: Mapping[str, Any]) -> dict[str, float]:
        return {"beta": group["betas"][1], "half": reference_lr(group) / (2 * group["sgd_lr"])}

    def prior_variance(self, group: Mapping[str, Any]) -> float:
        sgd_lr = DEFAULT_SGD_LR if math.isinf(group["sgd_lr"]) else group["sgd_lr"]
        return sgd_lr / (reference_lr(group) or math.inf)
