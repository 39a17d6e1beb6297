"""Newton and VON: online Newton's method, at the mean and at weights that are drawn from the belief."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bayesgrad.curvature import AbsoluteHessian, ExpectedHessian
from bayesgrad.optimizer import Parts
from bayesgrad.optimizer.base import settings
from bayesgrad.optimizer.constraints import BOOLEAN
from bayesgrad.optimizer.hessian_diagonal import HESSIAN, HessianDiagonal
from bayesgrad.optimizer.variational import SampledVariational, VariationalOptimizer
from bayesgrad.posterior import Posterior
from bayesgrad.rule import NaturalGradient
from bayesgrad.transition import Forget


class Newton(HessianDiagonal, VariationalOptimizer):
    r"""Online Newton's method with a diagonal Hessian; at convergence the belief is a Laplace approximation.

    .. math::
        h &\leftarrow \beta_2 h + (1-\beta_2)\, |\mathrm{diag}\, \nabla^2 \bar\ell(m)| \\
        m &\leftarrow m - \eta\, (\langle \nabla \bar\ell(m) \rangle + \tfrac{\delta}{N} m)/(h + \tfrac{\delta}{N}),
        \quad \sigma^2 = 1/(N (h + \tfrac{\delta}{N}))

    with the mean loss l of a batch, N = `num_data`, delta = `prior_precision`, eta = `lr`, <> a debiased moving average
    with decay beta_1, and h = `hess_init` at the start. The precision of the paper is s = N h + delta. The Hessian is
    taken from the loss, before the backward pass:

        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = Newton([weight], lr=1.0, num_data=1, prior_precision=0.0, betas=(0.0, 0.0))
        >>> optimizer.zero_grad()
        >>> loss = (torch.tensor([1.0, 10.0]) * (weight - 3) ** 2).sum()
        >>> optimizer.observe(loss)
        >>> loss.backward()
        >>> optimizer.step()
        >>> weight.data
        tensor([3., 3.])

    `observe` costs about two backward passes with `"hutchinson"`, one for each weight with `"exact"`. It needs the loss
    itself: without the factor of a `GradScaler`, with that of accumulation. Clipping shortens the step only.

    Args:
        params: parameters, named parameters or param groups.
        lr: eta, in units of a Newton step.
        num_data: N, the number of training examples (of losses that the mean is over). 1, for a loss that is a sum.
        prior_precision: delta, of the prior N(0, 1/delta); delta/N is what bounds steps where the loss is flat.
        hess_init: h at the start.
        betas: decays of the averages of gradient and Hessian; (0, 0) is Newton's method without a memory.
        hessian: how `observe(loss)` finds the diagonal: `"exact"`, by a backward pass for each weight, `"hutchinson"`,
            the mean of v * (H v) over random signs v, or `"auto"`, exact for up to 1000 weights.
        probes: how many v are averaged.
        natural_momentum: gamma of momentum in the belief's natural parameters (paper 002, appendix F), in place of or
            beside beta_1.
        prior: a posterior of an earlier task to be the prior of this one, in place of prior_precision, which is left
            to parameters that it does not name.
        seed: probes are a function of it, of how many steps there were, and of a weight's position.
        nonfinite: what to do about a gradient or Hessian with infinite or NaN entries: `"ignore"`, `"raise"`, `"skip"`.
        fused: compile the step (`True`), run it eagerly (`False`), or whichever pays (`None`).

    With the defaults a small MLP on digits trains to 97 %; they were chosen on it, with `"hutchinson"`.

    Reference: 002, Eq. 36, 37 and 44.
    Differs from the paper: |h| is of the batch's Hessian, not the sum of absolute values of each example's. With
    `"hutchinson"` the absolute value is of a noisy estimate, and h is too large rather than too small for it.
    Checked by: tests/equations/test_newton.py.
    """

    curvature = AbsoluteHessian()
    transition = Forget()
    rule = NaturalGradient()
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
        hessian: str = "auto",
        probes: int = 1,
        natural_momentum: float = 0.0,
        prior: Posterior | None = None,
        seed: int = 0,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, settings(locals(), kl_weight=1.0))
        self._load_prior(prior)

    def parts(self, group: Mapping[str, Any]) -> Parts:
        natural = group["natural_momentum"] > 0
        return Parts(self.curvature, Forget(natural_momentum=natural), NaturalGradient(natural_momentum=natural))

    def gradient_scale(self, group: Mapping[str, Any]) -> None:
        return None


class VON(HessianDiagonal, SampledVariational):
    r"""Variational online Newton: gradients and Hessians at weights drawn from the belief.

    .. math::
        \theta &= m + \sigma \epsilon, \quad \sigma^2 = 1/(N (h + \tfrac{\delta}{N})), \quad
        \hat h = \mathrm{diag}\, \nabla^2 \bar\ell(\theta) \\
        h &\leftarrow \beta_2 h + (1-\beta_2) \hat h + \tfrac12 (1-\beta_2)^2 (h - \hat h)^2/(h + \tfrac{\delta}{N}) \\
        m &\leftarrow m - \eta\, (\langle \nabla \bar\ell(\theta) \rangle + \tfrac{\delta}{N} m)/(h + \tfrac{\delta}{N})

    in the notation of `Newton`. Its fixed point is the Gaussian that is best, with a diagonal covariance. The last term
    of h keeps h + delta/N positive, at least half of what it was; with `improved=False` there is none, and where
    the observed Hessian is negative, the prior's part included, h + delta/N is at least half of what it was.

    Passes run inside `sampled()`; the Hessians of several draws add up like gradients:

        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = VON([weight], num_data=100)
        >>> with optimizer.sampled():
        ...     optimizer.zero_grad()
        ...     loss = ((weight - 1) ** 2).sum()
        ...     optimizer.observe(loss)
        ...     loss.backward()
        >>> optimizer.step()

    Args:
        params: parameters, named parameters or param groups.
        lr: eta, in units of a Newton step.
        num_data: N, the number of training examples (of losses that the mean is over).
        prior_precision: delta, of the prior N(0, 1/delta).
        hess_init: h at the start: too small a value begins with too much noise.
        betas: decays of the averages of gradient and Hessian.
        improved: which of the two forms.
        hessian, probes: as for `Newton`.
        samples: draws that `step(closure)` averages.
        natural_momentum: gamma of momentum in the belief's natural parameters (paper 002, appendix F).
        prior: a posterior of an earlier task to be the prior of this one, in place of prior_precision, which is left
            to parameters that it does not name.
        seed: draws and probes are a function of it, of how many draws there were, and of a weight's position.
        nonfinite: what to do about a gradient or Hessian with infinite or NaN entries: `"ignore"`, `"raise"`, `"skip"`.
        fused: compile the step (`True`), run it eagerly (`False`), or whichever pays (`None`).

    With the defaults a small MLP on digits trains to 97 %; they were chosen on it, with `"hutchinson"`.

    Reference: 002, Eq. 46, Eq. 12 for beta_1 = 0; Khan et al., 2018; Lin et al., 2020, for the improved form.
    Differs from the paper: whose form, `improved=False`, need not stay positive.
    Checked by: tests/equations/test_newton.py, against the exact optimum of a logistic regression.
    """

    curvature = ExpectedHessian()
    transition = Forget(retract=True)
    rule = NaturalGradient()
    draw_evidence = None
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
        improved: bool = True,
        hessian: str = "auto",
        probes: int = 1,
        samples: int = 1,
        natural_momentum: float = 0.0,
        prior: Posterior | None = None,
        seed: int = 0,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, settings(locals(), kl_weight=1.0))
        self._load_prior(prior)

    def parts(self, group: Mapping[str, Any]) -> Parts:
        natural, improved = group["natural_momentum"] > 0, group["improved"]
        transition = Forget(retract=improved, natural_momentum=natural, bounded=not improved)
        return Parts(self.curvature, transition, NaturalGradient(natural_momentum=natural))

    def gradient_scale(self, group: Mapping[str, Any]) -> None:
        return None

    def _begin_observing(self) -> None:
        if not self.__dict__.get("_active_draw"):
            raise RuntimeError("observe(loss) belongs inside of `with optimizer.sampled():`, before loss.backward().")
