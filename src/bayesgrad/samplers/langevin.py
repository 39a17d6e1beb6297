"""Langevin and SNGD: posterior sampling by natural gradients, with injected noise or with minibatch noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from bayesgrad.checkpoint import settings
from bayesgrad.likelihoods import Likelihood
from bayesgrad.samplers.arithmetic import warn_about_temperature
from bayesgrad.samplers.preconditioner import LangevinStep
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
    | `"jeffreys"` | exp(-C/T) abs(det G)^1/2, which does not depend on the parameterisation of the model |
    | `None` | exp(-C/T) if the metric is constant; else another density |

    A finite step multiplies the covariance by 1/(1 - lr/2) if G is the Hessian; see
    `bayesgrad.samplers.step_inflation`.

    Args:
        model: the network; BatchNorm must be in evaluation mode.
        lr: epsilon. With a Fisher, a fraction of a natural-gradient step; with the identity, SGLD's step divided by
            2/N.
        params: groups or parameters of the model; None for all. Groups may have different lr and prior_precision.
        num_data: N, the number of training examples (terms of the mean loss).
        temperature: T.
        prior_precision: delta, of the prior N(0, 1/delta), whose gradient the sampler adds.
        metric: `"identity"` (SGLD), `"diagonal"`, `"kronecker"`, `"fisher"`, `"empirical"`, or a function of the flat
            weights (n,) to a diagonal (n,), a matrix (n, n) or blocks (m, k, k), which `torch.func` can differentiate.
            All but the identity and functions need `observe(outputs)` before `loss.backward()`.
        damping: added to the metric, in step and noise.
        correction: for a metric that depends on the weights; see the table. It is computed in closed form for a linear
            model, by automatic differentiation for up to 100 weights, else by an unbiased estimate; see
            `correction_form`.
        likelihood: `"categorical"`, `"bernoulli"`, `"gaussian"` or `"poisson"`.
        fisher: `"exact"`, or `"sampled"` with one sampled label for each example.
        ema: decay of the moving average of the metric; 0 uses the latest batch alone.
        update_every: steps between updates of metric and correction; `observe` does nothing in between.
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
        >>> sampler = Langevin(model, lr=0.1, num_data=8, prior_precision=1.0, metric="fisher", damping=0.1)
        >>> x, y = torch.randn(8, 3), torch.zeros(8, dtype=torch.long)
        >>> for _ in range(10):
        ...     sampler.zero_grad()
        ...     outputs = model(x)
        ...     sampler.observe(outputs)
        ...     torch.nn.functional.cross_entropy(outputs, y).backward()
        ...     sampler.step()

    lr = 0.1 with a Fisher is the value of the paper.

    Reference: Smith et al. 2018, Eq. 5 to 7, Theorems 1 to 3.
    Differs from the paper: its corrections have the wrong sign, and its noise is not damped.
    Checked by: tests/equations/test_samplers.py, tests/statistics/test_samplers.py.
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
        prior_precision: float = 0.0,
        metric: str | Callable[[Tensor], Tensor] = "identity",
        damping: float = 0.0,
        correction: str | None = None,
        likelihood: str | Likelihood = "categorical",
        fisher: str = "exact",
        ema: float = 0.0,
        update_every: int = 1,
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
        w \leftarrow w - \epsilon\, G^{-1} \left(\bar g_B + \tfrac{\delta}{N} w\right)
        + \tfrac{\epsilon^2}{2B} \left(1 - \tfrac BN\right) c(w), \quad
        T = \tfrac{\epsilon N}{2B} \left(1 - \tfrac BN\right)

    with the gradient over B = `batch_size` of N = `num_data` examples, drawn without replacement for every step, and
    corrections c as in `Langevin`; with `correction=None` it is plain minibatch natural gradient descent. It samples at
    temperature T if the covariance of per-example gradients equals the Fisher, that is, if the model predicts the data
    well. `temperature()` returns T; `bayesgrad.samplers.batch_size` computes the B for T = 1.

    Damping is in the step and not in the noise, and multiplies variances by f/(f + damping) in directions of Fisher f.

    Args:
        model: the network; BatchNorm must be in evaluation mode.
        lr: epsilon.
        params: groups or parameters of the model; None for all.
        num_data: N.
        batch_size: B, of the gradients.
        prior_precision: delta, of the prior N(0, 1/delta), whose gradient the sampler adds.
        metric, damping, correction, likelihood, fisher, probes: as in `Langevin`. The Fisher is that of the observed
            outputs: of all data, of a batch that is independent of the gradients, or a moving average over such
                batches.
        ema: decay of that average.
        update_every: steps between updates of metric and correction; `observe` does nothing in between.
        seed: of sampled labels and random directions. Minibatches are up to the data loader. None draws one from
            torch's global generator.
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
    Differs from the paper: its Eq. 2 has the wrong sign in the first term of the correction.
    Checked by: tests/equations/test_samplers.py, tests/statistics/test_samplers.py.
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
        prior_precision: float = 0.0,
        metric: str | Callable[[Tensor], Tensor] = "fisher",
        damping: float = 0.0,
        correction: str | None = None,
        likelihood: str | Likelihood = "categorical",
        fisher: str = "exact",
        ema: float = 0.0,
        update_every: int = 1,
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
