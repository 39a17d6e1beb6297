"""IVON: variational inference at the cost of Adam."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from bayesgrad import shards
from bayesgrad.checkpoint import settings
from bayesgrad.constraints import BOOLEAN, Constraint, one_of
from bayesgrad.optim.variational import CHECK_AT_STEP, VariationalOptimizer
from bayesgrad.packing import VARIANCE
from bayesgrad.parts import Source
from bayesgrad.posterior import Posterior
from bayesgrad.rules import Forget, NaturalStep, Reparameterised, SquaredGradient, UpdateRule
from bayesgrad.warning import warn

MAX_STEP = 0.3  # in units of lr, of each weight
ROUNDED = 0.1  # the share of weights whose samples may be lost in rounding
OPTIONAL_POSITIVE = Constraint("None or a positive number", lambda x: x is None or x > 0)


class IVON(VariationalOptimizer):
    r"""The improved variational online Newton method: a Gaussian posterior from gradients at sampled weights.

    .. math::
        \theta &= m + \sigma \epsilon, \quad \sigma^2 = \tau/(N (h + \tfrac{\tau\delta}{N})), \quad
        \hat g = \nabla \bar\ell(\theta), \quad \hat h = \hat g\, \epsilon/\sigma \\
        h &\leftarrow \beta_2 h + (1-\beta_2) \hat h
        + \tfrac12 (1-\beta_2)^2 (h - \hat h)^2/(h + \tfrac{\tau\delta}{N}) \\
        m &\leftarrow m - \eta\, (\langle \hat g \rangle + \tfrac{\tau\delta}{N} m)/(h + \tfrac{\tau\delta}{N})

    with the mean loss l of a batch, N = `num_data`, delta = `prior_precision`, tau = `kl_weight`, <> a debiased moving
    average with decay beta_1, and eta = `lr`, times (`hess_init` + tau delta/N) with `rescale_lr`. h starts at
    `hess_init`. h^ estimates the expected Hessian without bias and without second derivatives. The last term keeps
    h + tau delta/N positive for any gradients.

    The last term also makes h too large: the stationary mean of h + tau delta/N is multiplied by about
    1 + (1-beta_2) V/2, with V = Var(h^)/(h + tau delta/N)^2. V is 2 for one weight and all data, and grows by about
    N/(B tau) for batches of B. This is not corrected, because the stationary mean of the variance sigma^2, and so of a
    step, is right to first order in 1-beta_2; without the last term it would be multiplied by the same factor.

    Compute gradients inside `sampled()`:

        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = IVON([weight], lr=0.1, num_data=100)
        >>> with optimizer.sampled():
        ...     optimizer.zero_grad()
        ...     ((weight - 1) ** 2).sum().backward()
        >>> optimizer.step()

    Args:
        params: parameters, named parameters or param groups.
        lr: eta. With `rescale_lr`, use about the learning rate of SGD with momentum: the first steps are lr <g>.
        num_data: N, the number of training examples (for a language model with a mean loss over tokens, of tokens).
        prior_precision: delta, of the prior N(0, 1/delta); prior_precision/num_data is the usual weight decay.
        hess_init: the initial h. The initial variance is tau/(N (hess_init + tau delta/N)), so a small value means much
            noise at the start.
        betas: decays of the averages of gradient and Hessian. h changes over about 1/(1-beta_2) steps: see below.
        kl_weight: tau, the weight of KL(q, prior) in mean loss + tau KL/N, the same as N/tau in place of N (except for
            `"gradsq"`). Keep tau, N and delta constant during a run: h + tau delta/N is averaged as a whole.
        samples: number of weight samples that `step(closure)` averages over.
        rescale_lr: multiply lr by (hess_init + tau delta/N).
        clip_radius: bound of each coordinate of the step, before it is multiplied by eta. None bounds it so that no
            weight moves by more than 0.3 lr in a step; inf for no bound.
        curvature: `"reparameterised"` as above, or `"gradsq"`, h^ = N g^2 for any tau, which is never negative but is
            not the Hessian.
        natural_momentum: gamma, momentum of the natural parameters of the Gaussian (Khan and Rue 2023, appendix F,
            Eq. 79-81), in place of or in addition to beta_1. Checked by tests/equations/test_ivon.py,
            test_natural_momentum_is_momentum_of_natural_parameters.
        prior: the posterior of an earlier task, used as the prior of this one. Parameters that it does not contain
            have the prior N(0, 1/prior_precision).
        seed: noise is a function of the seed, the number of earlier draws and the position of a weight; None draws one
            from torch's global generator.
        nonfinite: what to do if a gradient has infinite or NaN entries: `"ignore"`, `"raise"`, or `"skip"`.
        fused: compile the step (`True`), run it eagerly (`False`), or compile it for large models only (`None`).

    Presets: the defaults are for runs of 2,000 to 10^5 steps; on UCI concrete they predict as well as Adam's
    network (docs/results/concrete.md). For longer runs, betas[1] = 0.99999; for fewer steps, betas[1] = 1 - 5/steps, so
    that h follows within a fifth of the run. For small data sets and 10^3 steps: lr = 0.5 and rescale_lr = False
    (Newton steps), clip_radius = 0.1, betas = (0.9, 0.995), num_data = 3 N, and hess_init 0.3 times the second
    derivative of the loss by the output, 0.3/noise for squared errors divided by twice their variance `noise`; measured
    in docs/results/ivon-settings.md. For fine-tuning, hess_init = 1e-3 and lr = 0.03. A warning is given if h has not
    changed after a thousand steps, and if half-precision weights round the noise away. See docs/choosing.md.

    Reference: Khan and Rue 2023, Eq. 11-12 and section 4.4; Lin et al., 2020; Shen et al., 2024.
    Differs from the paper: steps are bounded by default, and the default beta_2 is 0.9995 instead of 0.99999. With
    those of the paper, regressions whose loss is divided by a noise below 0.06 diverge.
    Checked by: tests/equations/test_ivon.py, against ivon-opt and closed forms.
    """

    rule = UpdateRule(Reparameterised(), Forget(retract=True), NaturalStep())
    common = ("curvature", "natural_momentum")
    accepts = {
        **VariationalOptimizer.accepts,
        "rescale_lr": BOOLEAN,
        "curvature": one_of("reparameterised", "gradsq"),
        "clip_radius": OPTIONAL_POSITIVE,
    }

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        *,
        num_data: float,
        prior_precision: float = 1.0,
        hess_init: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.9995),
        kl_weight: float = 1.0,
        samples: int = 1,
        rescale_lr: bool = True,
        clip_radius: float | None = None,
        curvature: str = "reparameterised",
        natural_momentum: float = 0.0,
        prior: Posterior | None = None,
        seed: int | None = None,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, settings(locals()))
        self.load_prior(prior)

    def build_sources(self) -> Iterator[Source]:
        yield self.weight_sampling("squares" if self.param_groups[0]["curvature"] == "gradsq" else "offset")

    def rule_of(self, group: Mapping[str, Any]) -> UpdateRule:
        rule = super().rule_of(group)
        return replace(rule, curvature=SquaredGradient()) if group["curvature"] == "gradsq" else rule

    def gradient_scale(self, group: Mapping[str, Any]) -> float:
        size = group["num_data"]
        return math.sqrt(size) if group["curvature"] == "gradsq" else size / group["kl_weight"]

    def step_scale(self, group: Mapping[str, Any]) -> float:
        return float(group["lr"]) * self._rescaling(group)

    def clip_radius(self, group: Mapping[str, Any]) -> float:
        radius = group["clip_radius"]
        return MAX_STEP / self._rescaling(group) if radius is None else radius

    @staticmethod
    def _rescaling(group: Mapping[str, Any]) -> float:
        """eta/lr."""
        if not group["rescale_lr"]:
            return 1.0
        return group["hess_init"] + group["kl_weight"] * group["prior_precision"] / group["num_data"]

    def finished(self) -> None:
        """Warns once, at the first step or later, if half-precision weights cannot hold the noise of the samples."""
        super().finished()
        for group in self.param_groups if self.param_groups[0]["curvature"] == "reparameterised" else ():
            for p in (p for p in group["params"] if p.dtype.itemsize < 4 and p.numel() and p.dtype not in self.warned):
                if (entry := self.state.get(p)) and int(entry["step"]) in (1, CHECK_AT_STEP):
                    spacing = torch.finfo(p.dtype).eps * p.detach().to(entry[VARIANCE].dtype).abs()
                    lost = self.variance_of(group, p).sqrt() < spacing / 2
                    share = float(shards.whole(lost.to(entry[VARIANCE].dtype).mean()))
                    if share > ROUNDED:
                        self.warned.add(p.dtype)
                        warn(
                            f"the standard deviation of {share:.0%} of the weights of {self.name_of(p)} is below the "
                            f"spacing of {p.dtype} numbers: samples are rounded to the mean, and h is estimated from "
                            "rounding. Keep float32 weights, with torch.autocast in the forward pass.",
                        )
