"""Newton and VON: online Newton's method, at the mean and at weights sampled from the belief."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from bayesgrad.checkpoint import settings
from bayesgrad.constraints import BOOLEAN
from bayesgrad.optim.variational import VariationalOptimizer
from bayesgrad.parts import Source
from bayesgrad.posterior import Posterior
from bayesgrad.rules import AbsoluteHessian, ExpectedHessian, Forget, NaturalStep, UpdateRule
from bayesgrad.sources import HessianDiagonal
from bayesgrad.sources.hessian_diagonal import HESSIAN


class Newton(VariationalOptimizer):
    r"""Online Newton's method with a diagonal Hessian; at convergence the belief is a Laplace approximation.

    .. math::
        h &\leftarrow \beta_2 h + (1-\beta_2)\, |\mathrm{diag}\, \nabla^2 \bar\ell(m)| \\
        m &\leftarrow m - \eta\, (\langle \nabla \bar\ell(m) \rangle + \tfrac{\tau\delta}{N} m)
        /(h + \tfrac{\tau\delta}{N}), \quad \sigma^2 = \tau/(N (h + \tfrac{\tau\delta}{N}))

    with the mean loss l of a batch, N = `num_data`, delta = `prior_precision`, tau = `kl_weight`, eta = `lr`, <> a
    debiased moving average with decay beta_1, and the initial h = `hess_init`. The precision of the paper is
    s = N h + delta, for tau = 1; in general it is N h/tau + delta.
    `observe(loss=loss)` computes the Hessian, before the backward pass:

        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = Newton([weight], lr=1.0, num_data=1, prior_precision=0.0, betas=(0.0, 0.0))
        >>> optimizer.zero_grad()
        >>> loss = (torch.tensor([1.0, 10.0]) * (weight - 3) ** 2).sum()
        >>> optimizer.observe(loss=loss)
        >>> loss.backward()
        >>> optimizer.step()
        >>> weight.data
        tensor([3., 3.])

    `observe` costs about two backward passes with `"hutchinson"`, and one for each weight with `"exact"`. Pass the loss
    before `GradScaler.scale`, but divided by the number of micro-batches. Clipping gradients does not change the
    Hessian.

    Args:
        params: parameters, named parameters or param groups.
        lr: eta, in units of a Newton step.
        num_data: N, the number of training examples (of losses in the mean loss). 1 if the loss is a sum.
        prior_precision: delta, of the prior N(0, 1/delta); delta/N bounds steps where the loss is flat.
        hess_init: the initial h.
        betas: decays of the averages of gradient and Hessian; (0, 0) is Newton's method without averages.
        kl_weight: tau, the weight of KL(q, prior) in mean loss + tau KL/N, the same as N/tau in place of N. Keep
            tau, N and delta constant during a run: h + tau delta/N is averaged as a whole.
        hessian: how `observe(loss=loss)` computes the diagonal: `"exact"`, with a backward pass for each weight,
            `"hutchinson"`, the mean of v * (H v) over random signs v, or `"auto"`, exact for up to 1000 weights.
        probes: the number of vectors v to average over.
        natural_momentum: gamma, momentum of the natural parameters of the Gaussian (Khan and Rue 2023, appendix F,
            Eq. 79-81), in place of or in addition to beta_1. Checked by tests/equations/test_ivon.py,
            test_natural_momentum_is_momentum_of_natural_parameters.
        prior: the posterior of an earlier task, used as the prior of this one. Parameters that it does not contain
            have the prior N(0, 1/prior_precision).
        seed: probes are a function of the seed, the number of earlier steps and the position of a weight; None draws
            one from torch's global generator.
        nonfinite: what to do if a gradient or Hessian has infinite or NaN entries: `"ignore"`, `"raise"`, `"skip"`.
        fused: compile the step (`True`), run it eagerly (`False`), or compile it for large models only (`None`).

    With the defaults a small MLP on digits reaches 97 %; they were chosen on it, with `"hutchinson"`.

    Reference: Khan and Rue 2023, Eq. 36, 37 and 44.
    Differs from the paper: |h| is the absolute value of the batch's Hessian, not the sum over examples of absolute
    values. With `"hutchinson"` it is the absolute value of a noisy estimate, which overestimates |h|.
    Checked by: tests/equations/test_newton.py.
    """

    rule = UpdateRule(AbsoluteHessian(), Forget(), NaturalStep())
    common = ("natural_momentum",)
    accepts = {**VariationalOptimizer.accepts, **HESSIAN}

    def __init__(
        self,
        params: Any,
        lr: float = 0.03,
        *,
        num_data: float,
        prior_precision: float = 1.0,
        hess_init: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        kl_weight: float = 1.0,
        hessian: str = "auto",
        probes: int = 1,
        natural_momentum: float = 0.0,
        prior: Posterior | None = None,
        seed: int | None = None,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, settings(locals()))
        self.load_prior(prior)

    def build_sources(self) -> Iterator[Source]:
        yield HessianDiagonal()


class VON(VariationalOptimizer):
    r"""Variational online Newton: gradients and Hessians at weights sampled from the belief.

    .. math::
        \theta &= m + \sigma \epsilon, \quad \sigma^2 = \tau/(N (h + \tfrac{\tau\delta}{N})), \quad
        \hat h = \mathrm{diag}\, \nabla^2 \bar\ell(\theta) \\
        h &\leftarrow \beta_2 h + (1-\beta_2) \hat h
        + \tfrac12 (1-\beta_2)^2 (h - \hat h)^2/(h + \tfrac{\tau\delta}{N}) \\
        m &\leftarrow m - \eta\, (\langle \nabla \bar\ell(\theta) \rangle + \tfrac{\tau\delta}{N} m)
        /(h + \tfrac{\tau\delta}{N})

    in the notation of `Newton`. Its fixed point is the optimal Gaussian with a diagonal covariance. The last term of h
    keeps h + tau delta/N positive: it never falls below half of its last value. It also makes h too large where h^ is
    noisy; `IVON` says by how much. With `improved=False` there is no such term, and this lower bound is applied where
    the observed Hessian plus tau delta/N is negative.

    Run forward and backward passes inside `sampled()`; the Hessians of several draws add up like gradients:

        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = VON([weight], num_data=100)
        >>> with optimizer.sampled():
        ...     optimizer.zero_grad()
        ...     loss = ((weight - 1) ** 2).sum()
        ...     optimizer.observe(loss=loss)
        ...     loss.backward()
        >>> optimizer.step()

    Args:
        params: parameters, named parameters or param groups.
        lr: eta, in units of a Newton step.
        num_data: N, the number of training examples (of losses in the mean loss).
        prior_precision: delta, of the prior N(0, 1/delta).
        hess_init: the initial h; a small value means much noise at the start.
        betas: decays of the averages of gradient and Hessian.
        kl_weight: tau, the weight of KL(q, prior) in mean loss + tau KL/N, the same as N/tau in place of N. Keep
            tau, N and delta constant during a run: h + tau delta/N is averaged as a whole.
        improved: use the last term of h.
        hessian, probes: as for `Newton`.
        samples: number of weight samples that `step(closure)` averages over.
        natural_momentum: gamma, momentum of the natural parameters of the Gaussian (Khan and Rue 2023, appendix F,
            Eq. 79-81), in place of or in addition to beta_1. Checked by tests/equations/test_ivon.py,
            test_natural_momentum_is_momentum_of_natural_parameters.
        prior: the posterior of an earlier task, used as the prior of this one. Parameters that it does not contain
            have the prior N(0, 1/prior_precision).
        seed: noise and probes are functions of the seed, the number of earlier draws and the position of a weight;
            None draws one from torch's global generator.
        nonfinite: what to do if a gradient or Hessian has infinite or NaN entries: `"ignore"`, `"raise"`, `"skip"`.
        fused: compile the step (`True`), run it eagerly (`False`), or compile it for large models only (`None`).

    With the defaults a small MLP on digits reaches 97 %; they were chosen on it, with `"hutchinson"`.

    Reference: Khan and Rue 2023, Eq. 46, Eq. 12 for beta_1 = 0; Khan et al., 2018; Lin et al., 2020, for the improved
    form.
    Differs from the paper: h of the paper's form, `improved=False` without the bound, can become negative.
    Checked by: tests/equations/test_newton.py, against the exact optimum of a logistic regression.
    """

    rule = UpdateRule(ExpectedHessian(), Forget(retract=True), NaturalStep())
    common = ("natural_momentum", "improved")
    accepts = {**VariationalOptimizer.accepts, **HESSIAN, "improved": BOOLEAN}

    def __init__(
        self,
        params: Any,
        lr: float = 0.03,
        *,
        num_data: float,
        prior_precision: float = 1.0,
        hess_init: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        kl_weight: float = 1.0,
        improved: bool = True,
        hessian: str = "auto",
        probes: int = 1,
        samples: int = 1,
        natural_momentum: float = 0.0,
        prior: Posterior | None = None,
        seed: int | None = None,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, settings(locals()))
        self.load_prior(prior)

    def build_sources(self) -> Iterator[Source]:
        yield self.weight_sampling(None)
        yield HessianDiagonal()

    def rule_of(self, group: Mapping[str, Any]) -> UpdateRule:
        rule = super().rule_of(group)
        if group["improved"]:
            return rule
        bounded = Forget(bounded=True, natural_momentum=group["natural_momentum"] > 0)
        return replace(rule, transition=bounded)
