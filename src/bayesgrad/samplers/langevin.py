"""Langevin and SNGD: posterior sampling by natural gradients, with injected noise or with minibatch noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from bayesgrad.checkpoint import settings
from bayesgrad.likelihoods import Likelihood
from bayesgrad.samplers.arithmetic import warn_about_temperature
from bayesgrad.samplers.move import LangevinStep
from bayesgrad.samplers.sampler import Sampler


class Langevin(Sampler):
    r"""Preconditioned Langevin dynamics: samples weights from exp(-C/T), which is the posterior for T = 1.

    .. math::
        w &\leftarrow w - \epsilon\, G^{-1} \left(\bar g + \tfrac{\delta}{N} w\right) + \tfrac{\epsilon T}{N}\, c(w)
        + \sqrt{2 \epsilon T/N}\; G^{-1/2} \xi, \quad \xi \sim N(0, I) \\
        c_{flat} &= -V, \quad c_{jeffreys} = -V + \tfrac12 G^{-1} \nabla \log |G|, \quad
        V_i = -\textstyle\sum_j \partial_j (G^{-1})_{ij}

    with the gradient of the mean loss over all data or a large batch (`.grad`, without the prior), epsilon = `lr`,
    N = `num_data`, delta = `prior_precision`, T = `temperature`, and the metric G(w) = F(w) + `damping` I. C is the
    loss summed over all data plus delta |w|^2/2.

    | correction | stationary density for lr -> 0 |
    |---|---|
    | `"flat"` | exp(-C/T) |
    | `"jeffreys"` | exp(-C/T) abs(det G)^1/2; no function of the parameterisation if damping and prior are 0 |
    | `None` | exp(-C/T) if the metric is constant; else another density |

    A finite step multiplies the covariance by 1/(1 - lr/2) if G is the Hessian; see
    `bayesgrad.samplers.step_inflation`. The loss must be the mean negative log-likelihood of `likelihood`: a loss
    divided by 2 s^2 needs `Gaussian(noise_scale=s)`. If `observe` receives the loss, its curvature is compared with the
    metric at steps 1, 2, 4, 8, ... and every 1000th. A loss on another scale is warned of. Steps are shortened so that
    they stay stable: lr is divided by that scale if it is above 1.5, and is at most 1/lambda (or lr, if lr > 1, over
    lambda), with lambda the largest eigenvalue of G^-1 H for the Hessian H of the loss. The stationary density does
    not depend on lr. Without the loss, successive gradients show whether lr times the mean curvature is too large, and
    a warning says so.

    Args:
        model: the network; BatchNorm must be in evaluation mode.
        lr: epsilon. With a Fisher, a fraction of a natural-gradient step; with the identity, SGLD's step divided by
            2/N.
        params: groups or parameters of the model; None for all. Groups may have different lr and prior_precision.
        num_data: N, the number of losses of the training data whose mean is differentiated: examples, or tokens.
        temperature: T.
        prior_precision: delta, of the prior N(0, 1/delta), whose gradient the sampler adds.
        metric: `"kronecker"`, `"diagonal"`, `"fisher"`, `"empirical"`, `"identity"` (SGLD), or a function of the flat
            weights (n,) to a diagonal (n,), a matrix (n, n) or blocks (m, k, k), which `torch.func` can differentiate.
            All but the identity and functions need `observe(outputs)` before `loss.backward()`.
        damping: added to the metric, in step and noise. None for 0.1, and for 0 with the identity and functions.
        correction: for a metric that depends on the weights; see the table. It is computed in closed form for a linear
            model, by automatic differentiation for up to 100 weights, else by an unbiased estimate; see
            `correction_form`.
        likelihood: `"categorical"`, `"bernoulli"`, `"gaussian"` (noise of standard deviation 1) or `"poisson"`, or an
            object of `bayesgrad.likelihoods`.
        fisher: `"exact"`, or `"sampled"` with one sampled label for each example.
        ema: decay of the moving average of the metric; 0 uses the latest batch alone. For `"kronecker"` A and E are
            averaged separately, so that G is the product of their averages. A batch has its weight by the number of
            updates so far, of any weights: heads that are used in turn keep more of their first batches.
        update_every: steps between updates of metric and correction; `observe` does nothing in between.
        losses_per_example: the number of losses of an example in the mean loss. None follows from the outputs: 1, or
            the number of positions for classes with positions, (N, T, C).
        limit_step: whether steps are shortened where the loss is known. The largest of the eigenvalues of micro-batches
            counts, of losses as they are passed to `observe`: pass them before they are divided. A compiled model has
            no second derivatives, and its steps are not shortened.
        probes: the number of random directions of an estimated correction; None computes exact corrections for up to
            100 weights, and uses one direction beyond.
        seed: of noise, directions and sampled labels. Noise is a function of seed, step and a weight's position. None
            draws one from torch's global generator.
        nonfinite: what to do with a loss, gradient or step that is not finite: `"raise"` a `Diverged`, `"skip"` or
            `"ignore"`.
        fused: as in `AdaBayes`.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> sampler = Langevin(model, num_data=8)
        >>> x, y = torch.randn(8, 3), torch.zeros(8, dtype=torch.long)
        >>> for _ in range(10):
        ...     sampler.zero_grad()
        ...     outputs = model(x)
        ...     loss = torch.nn.functional.cross_entropy(outputs, y)
        ...     sampler.observe(outputs, loss=loss)
        ...     loss.backward()
        ...     sampler.step()

    lr = 0.1 with a Fisher is the value of the paper. With these defaults a network of 8-50-1 units samples the UCI data
    set concrete from its initial weights; with the identity, lr = 0.1 diverges there.

    Reference: Smith et al. 2018, Eq. 5 to 7, Theorems 1 to 3.
    Differs from the paper: its corrections have the wrong sign, and its noise is not damped.
    Checked by: tests/equations/test_samplers.py, tests/equations/test_sampler_steps.py,
    tests/statistics/test_samplers.py.
    """

    move = LangevinStep()

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.1,
        *,
        params: Any = None,
        num_data: float,
        temperature: float = 1.0,
        prior_precision: float = 1.0,
        metric: str | Callable[[Tensor], Tensor] = "kronecker",
        damping: float | None = None,
        correction: str | None = None,
        likelihood: str | Likelihood = "categorical",
        fisher: str = "exact",
        ema: float = 0.0,
        update_every: int = 1,
        losses_per_example: float | None = None,
        limit_step: bool = True,
        probes: int | None = None,
        seed: int | None = None,
        nonfinite: str = "raise",
        fused: bool | None = None,
    ) -> None:
        super().__init__(model, params, metric, settings(locals()))
        if self.metric.needs_observe:  # for other metrics the scale of lr is unknown
            warn_about_temperature(float(lr), num_data, None)

    def scaled_temperature(self, group: Mapping[str, Any]) -> float:
        return group["temperature"] / group["num_data"]


class SNGD(Sampler):
    r"""Stochastic natural gradient descent, which samples a posterior by the noise of minibatches.

    .. math::
        w \leftarrow w - \epsilon\, G^{-1} \left(\bar g_B + \tfrac{\delta}{N} w
        + \sqrt{2 T d/(\epsilon N)}\; \xi\right) + \tfrac{\epsilon^2}{2B} \left(1 - \tfrac BN\right) c(w), \quad
        T = \tfrac{\epsilon N}{2B} \left(1 - \tfrac BN\right)

    with the gradient over B = `batch_size` of N = `num_data` examples, drawn without replacement for every step, and
    corrections c as in `Langevin`; with `correction=None` it is plain minibatch natural gradient descent. It samples at
    temperature T if the covariance of per-example gradients equals the Fisher, that is, if the model predicts the data
    well. `temperature()` returns T; `bayesgrad.samplers.batch_size` computes the B for T = 1. With a metric that only
    approximates the Fisher (`"diagonal"`, and `"kronecker"` for several layers) the covariance is (T/N) G^-1 for
    damping 0, and not that of the posterior; `Langevin` has no such limit.

    Minibatches have the noise of the Fisher, and not of its damping d. Noise xi ~ N(0, I) is added to the gradient for
    that (`damping_noise`). Without it, variances are multiplied by f/(f + d) in directions of Fisher f.

    The loss must be the mean negative log-likelihood of `likelihood`: a loss with k times its curvature samples at k^2
    times the temperature. If `observe` receives outputs and their loss, it is compared with the likelihood at steps 1,
    2, 4, 8, ... and every 1000th: another scale is warned of, or refused if lr times it is at least 2.

    Args:
        model: the network; BatchNorm must be in evaluation mode.
        lr: epsilon.
        params: groups or parameters of the model; None for all.
        num_data: N, as in `Langevin`.
        batch_size: B, of the gradients.
        prior_precision: delta, of the prior N(0, 1/delta), whose gradient the sampler adds.
        metric, damping, correction, likelihood, fisher, losses_per_example, probes: as in `Langevin`. The Fisher is
            that of the observed outputs: of all data, of a batch that is independent of the gradients, or a moving
            average over such batches.
        damping_noise: whether noise for the damping is added to the gradient.
        ema: decay of that average; for `"kronecker"` it is the product of separate averages of A and E.
        update_every: steps between updates of metric and correction; `observe` does nothing in between.
        seed: of noise, sampled labels and random directions. Minibatches are up to the data loader. None draws one
            from torch's global generator.
        nonfinite, fused: as in `Langevin`.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> sampler = SNGD(model, lr=0.1, num_data=80, batch_size=4, metric="fisher", damping=0.1)
        >>> x, y = torch.randn(80, 3), torch.zeros(80, dtype=torch.long)
        >>> for _ in range(10):
        ...     sampler.zero_grad()
        ...     sampler.observe(model(x))
        ...     batch = torch.randperm(80)[:4]
        ...     torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        ...     sampler.step()
        >>> round(sampler.temperature(), 2)
        0.95

    lr = 0.1 is the value of the paper.

    Reference: Smith et al. 2018, Eq. 2 and 11, Theorems 4 and 5.
    Differs from the paper: its Eq. 2 has the wrong sign in the first term of the correction; there is no noise for the
    damping.
    Checked by: tests/equations/test_samplers.py, tests/equations/test_sampler_steps.py,
    tests/statistics/test_samplers.py.
    """

    move = LangevinStep(injected=False)

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.1,
        *,
        params: Any = None,
        num_data: float,
        batch_size: float,
        prior_precision: float = 1.0,
        metric: str | Callable[[Tensor], Tensor] = "fisher",
        damping: float | None = None,
        damping_noise: bool = True,
        correction: str | None = None,
        likelihood: str | Likelihood = "categorical",
        fisher: str = "exact",
        ema: float = 0.0,
        update_every: int = 1,
        losses_per_example: float | None = None,
        probes: int | None = None,
        seed: int | None = None,
        nonfinite: str = "raise",
        fused: bool | None = None,
    ) -> None:
        super().__init__(model, params, metric, settings(locals()))
        if batch_size > num_data:
            raise ValueError(f"batch_size must be at most num_data={num_data!r}, got {batch_size!r}.")
        if self.metric.needs_observe:
            warn_about_temperature(float(lr), num_data, batch_size)

    def scaled_temperature(self, group: Mapping[str, Any]) -> float:
        return float(group["lr"]) / (2 * group["batch_size"]) * (1 - group["batch_size"] / group["num_data"])
