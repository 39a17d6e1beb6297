"""OGN and VOGN: online Gauss-Newton, at the mean and at weights sampled from the belief."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from bayesgrad.checkpoint import settings
from bayesgrad.constraints import LAYER_OPTIONS, one_of
from bayesgrad.likelihoods import Likelihood
from bayesgrad.optim.variational import VariationalOptimizer
from bayesgrad.parts import Source
from bayesgrad.posterior import Posterior
from bayesgrad.rules import Forget, NaturalStep, PerExampleSquare, UpdateRule
from bayesgrad.sources import PerExampleSquares

OPTIONS = {**VariationalOptimizer.accepts, **LAYER_OPTIONS, "fisher": one_of("empirical", "sampled", "exact")}


class OGN(VariationalOptimizer):
    r"""Online Gauss-Newton with squared per-example gradients; at convergence the belief is a Laplace approximation.

    .. math::
        h &\leftarrow \beta_2 h + (1-\beta_2)\, \tfrac1B \textstyle\sum_i (\nabla \ell_i(m))^2 \\
        m &\leftarrow m - \eta\, (\langle \bar g \rangle + \tfrac{\tau\delta}{N} m)/(h + \tfrac{\tau\delta}{N}),
        \quad \sigma^2 = \tau/(N (h + \tfrac{\tau\delta}{N}))

    with N = `num_data`, delta = `prior_precision`, tau = `kl_weight`, <> a debiased moving average with decay beta_1.
    The squares of per-example gradients cost one more matrix product for each layer. At convergence the posterior is
    the diagonal Laplace approximation with the empirical Fisher matrix.

        >>> model = nn.Linear(3, 2)
        >>> optimizer = OGN(model, num_data=100)
        >>> nn.functional.cross_entropy(model(torch.randn(8, 3)), torch.zeros(8, dtype=torch.long)).backward()
        >>> optimizer.step()

    Args:
        model: the network. BatchNorm in training mode is allowed, although examples are then not independent: the
            gradients that are squared are the shares of examples in the gradient of the batch, which contains the
            derivatives of the batch statistics.
        lr: eta, in units of a Newton step. Chosen on digits and Fashion-MNIST with a small MLP.
        params: parameters, named parameters or param groups of the model; None for all.
        num_data: N, the number of training examples (times `losses_per_example`).
        prior_precision: delta, of the prior N(0, 1/delta).
        hess_init: the initial h.
        betas: decays of the averages of gradient and squares.
        kl_weight: tau, the weight of KL(q, prior) in mean loss + tau KL/N, the same as N/tau in place of N. Keep
            tau, N and delta constant during a run: h + tau delta/N is averaged as a whole.
        samples: number of weight samples that `step(closure)` averages over; VOGN only.
        fisher: which gradients are squared: those of the loss (`"empirical"`), or those for labels that the model
            predicts, `"sampled"` or `"exact"` (OGGN). The latter two need `observe(outputs)` before `loss.backward()`.
        likelihood: of the outputs, for `observe`: "categorical", "bernoulli", "gaussian", or an object of
            `bayesgrad.likelihoods`.
        losses_per_example: the number of losses of an example (the length of a sequence with a loss for each token).
            None follows from the outputs, as in `FOOF`. B is the number of losses, and i an example: one index of the
            first dimension of the outputs. For ignored labels, call `observe(outputs, labels=labels)`.
        natural_momentum: gamma, momentum of the natural parameters of the Gaussian (Khan and Rue 2023, appendix F,
            Eq. 79-81), in place of or in addition to beta_1. Checked by tests/equations/test_ivon.py,
            test_natural_momentum_is_momentum_of_natural_parameters.
        prior: the posterior of an earlier task, used as the prior of this one. Parameters that it does not contain
            have the prior N(0, 1/prior_precision).
        seed: seed of sampled weights and labels; None draws one from torch's global generator.
        nonfinite: what to do if a gradient has infinite or NaN entries: `"ignore"`, `"raise"`, or `"skip"`.
        fused: compile the step (`True`), run it eagerly (`False`), or compile it for large models only (`None`).

    Parameters outside of known layers use the squares of mean gradients, times the batch size; a warning names them.

    Reference: Khan and Rue 2023, section 4.4, Eq. 44 with the squares of Eq. 45 for the Hessian.
    Checked by: tests/equations/test_vogn.py, squares against BackPACK.
    """

    takes_model = True
    rule = UpdateRule(PerExampleSquare(), Forget(), NaturalStep())
    common = ("fisher", "natural_momentum")
    of_all_groups = (*VariationalOptimizer.of_all_groups, "losses_per_example")
    accepts = OPTIONS

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.03,
        *,
        params: Any = None,
        num_data: float,
        prior_precision: float = 1.0,
        hess_init: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        kl_weight: float = 1.0,
        samples: int = 1,
        fisher: str = "empirical",
        likelihood: str | Likelihood = "categorical",
        losses_per_example: int | None = None,
        natural_momentum: float = 0.0,
        prior: Posterior | None = None,
        seed: int | None = None,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, settings(locals()), model)
        self.load_prior(prior)

    def build_sources(self) -> Iterator[Source]:
        yield PerExampleSquares()


class VOGN(VariationalOptimizer):
    r"""Variational online Gauss-Newton: OGN with gradients and squares at weights sampled from the belief.

    .. math::
        \theta &= m + \epsilon \sigma, \quad \sigma^2 = \tau/(N (h + \tfrac{\tau\delta}{N})) \\
        h &\leftarrow \beta_2 h + (1-\beta_2)\, \tfrac1B \textstyle\sum_i (\nabla \ell_i(\theta))^2 \\
        m &\leftarrow m - \eta\, (\langle \bar g(\theta) \rangle + \tfrac{\tau\delta}{N} m)/(h + \tfrac{\tau\delta}{N})

    Its arguments are those of `OGN`; with `fisher="sampled"` or `"exact"` it is VOGGN. Run passes inside `sampled()`:

        >>> model = nn.Linear(3, 2)
        >>> optimizer = VOGN(model, num_data=100)
        >>> with optimizer.sampled():
        ...     optimizer.zero_grad()
        ...     nn.functional.cross_entropy(model(torch.randn(8, 3)), torch.zeros(8, dtype=torch.long)).backward()
        >>> optimizer.step()

    Its fixed point differs slightly from the optimal Gaussian, because squares replace the Hessian.

    Reference: Khan and Rue 2023, section 4.4, Eq. 46 with the squares of Eq. 45 for the Hessian.
    Differs from the paper: the noise has variance 1/s; the text prints s.
    Checked by: tests/equations/test_vogn.py.
    """

    takes_model = True
    rule = UpdateRule(PerExampleSquare(), Forget(), NaturalStep())
    common = ("fisher", "natural_momentum")
    of_all_groups = (*VariationalOptimizer.of_all_groups, "losses_per_example")
    accepts = OPTIONS

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.03,
        *,
        params: Any = None,
        num_data: float,
        prior_precision: float = 1.0,
        hess_init: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        kl_weight: float = 1.0,
        samples: int = 1,
        fisher: str = "empirical",
        likelihood: str | Likelihood = "categorical",
        losses_per_example: int | None = None,
        natural_momentum: float = 0.0,
        prior: Posterior | None = None,
        seed: int | None = None,
        nonfinite: str = "ignore",
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, settings(locals()), model)
        self.load_prior(prior)

    def build_sources(self) -> Iterator[Source]:
        yield self.weight_sampling(None)
        yield PerExampleSquares()
