r"""Temperature, batch size, learning rate and stationary covariance of samplers.

Notation: N data, C the summed cost (prior included), F its mean Hessian at the optimum, G = F + δI the metric, ε the
learning rate, B the batch size. A sampler at temperature T draws from exp(-C/T); T = 1 is the posterior.

| fact | function |
|---|---|
| minibatches of B without replacement add noise of temperature T = (εN/2B)(1 - B/N) | `temperature` |
| B = N/(2T/ε + 1), or ε = 2TB/(N - B), gives T | `batch_size`, `learning_rate` |
| a finite step widens the covariance by 1/(1 - ε/2) | `step_inflation` |
| the mean gradient of a batch has the covariance Σ (N - B)/(B (N - 1)) | `batch_noise` |
| damping of the step alone multiplies the variance in a direction of curvature f by f/(f + δ) | `damping_bias` |
| gradient noise of covariance (2Tδ/εN) I removes that factor; `SNGD` adds it | `minibatch_covariance` |
| the stationary covariance near an optimum, with all of these | `langevin_covariance`, `minibatch_covariance` |

Reference: Smith et al. 2018, Theorem 4 and section 6, corrected and extended to finite steps and N.
Checked by: tests/equations/test_samplers.py, tests/statistics/test_samplers.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayesgrad.precision.linalg import cholesky
from bayesgrad.warning import warn

TEMPERATURE_FACTOR = 2.0  # warn if T differs from 1 by more than this factor
LARGE_LR = 0.2  # warn above this learning rate: variances are 11 % too large


def temperature(lr: float, num_data: float, batch_size: float, *, exact: bool = False) -> float:
    """T = (εN/2B)(1 - B/N): minibatch natural gradients sample exp(-cost/T).

    Args:
        lr: ε.
        num_data: N.
        batch_size: B, drawn without replacement.
        exact: whether to use the exact factor (N - B)/(N - 1) instead of 1 - B/N.

    Example:
        >>> temperature(0.1, 1000, 50)
        0.95
    """
    _check(lr=lr, num_data=num_data, batch_size=batch_size)
    if batch_size > num_data:
        raise ValueError(f"batch_size must be at most num_data={num_data!r}, got {batch_size!r}.")
    if exact:
        return lr * num_data / 2 * batch_noise(num_data, batch_size)
    return lr * num_data / (2 * batch_size) * (1 - batch_size / num_data)


def batch_size(temperature: float, lr: float, num_data: float) -> int:
    """The whole B nearest to N/(2T/ε + 1), at least 1: about εN/2 for T = 1.

    Example:
        >>> batch_size(1.0, lr=0.1, num_data=1000)
        48
    """
    _check(temperature=temperature, lr=lr, num_data=num_data)
    return max(1, round(num_data / (2 * temperature / lr + 1)))


def learning_rate(temperature: float, num_data: float, batch_size: float) -> float:
    """ε = 2TB/(N - B): batches of B sample at temperature T."""
    _check(temperature=temperature, num_data=num_data, batch_size=batch_size)
    if batch_size >= num_data:
        raise ValueError(f"batch_size must be less than num_data={num_data!r}, got {batch_size!r}: there is no noise.")
    return 2 * temperature * batch_size / (num_data - batch_size)


def step_inflation(lr: float) -> float:
    """1/(1 - ε/2): the covariance of samples divided by that of the target, for a quadratic cost with G = F."""
    _check(lr=lr)
    if lr >= 2:
        raise ValueError(f"lr must be below 2, got {lr!r}: natural gradients diverge on a quadratic cost.")
    return 1 / (1 - lr / 2)


def batch_noise(num_data: float, batch_size: float) -> float:
    """(N - B)/(B (N - 1)): the covariance of a batch's mean gradient divided by that of per-example gradients."""
    _check(num_data=num_data, batch_size=batch_size)
    return (num_data - batch_size) / (batch_size * max(num_data - 1, 1))


def damping_bias(curvature: float | Tensor, damping: float) -> float | Tensor:
    """f/(f + δ): the factor by which damping reduces the variance of `SNGD` without damping noise, at curvature f."""
    return curvature / (curvature + damping)


def langevin_covariance(
    hessian: Tensor,
    *,
    lr: float,
    num_data: float,
    temperature: float = 1.0,
    metric: Tensor | None = None,
    damping: float = 0.0,
) -> Tensor:
    """The stationary covariance of `Langevin` around an optimum, at a finite step.

    Solves S = K S K' + 2 ε (T/N) G^-1 with K = I - ε G^-1 H.

    Args:
        hessian: H, (n, n), of the cost divided by N, including the prior.
        lr, num_data, temperature: ε, N, T.
        metric: G without damping, (n, n); None for the Hessian.
        damping: δ, added to the metric.
    """
    _check(lr=lr, num_data=num_data, temperature=temperature)
    metric = hessian if metric is None else metric
    noise = metric + damping * torch.eye(len(metric), dtype=metric.dtype, device=metric.device)
    return _stationary(hessian, noise, 2 * temperature / (lr * num_data) * noise, lr)


def minibatch_covariance(
    hessian: Tensor,
    gradient_covariance: Tensor,
    *,
    lr: float,
    num_data: float,
    batch_size: float,
    metric: Tensor | None = None,
    damping: float = 0.0,
    damping_noise: bool = True,
) -> Tensor:
    """The stationary covariance of minibatch natural gradients (`SNGD`) around an optimum, at a finite step.

    Solves S = K S K' + ε² G^-1 (Σ (N - B)/(B (N - 1)) + (2Tδ/εN) I) G^-1 with K = I - ε G^-1 H.

    Args:
        hessian: H, (n, n), of the cost divided by N, including the prior.
        gradient_covariance: Σ, (n, n), of per-example gradients at the optimum.
        lr, num_data, batch_size: ε, N, B.
        metric: G without damping, (n, n); None for the Hessian.
        damping: δ, added to the metric.
        damping_noise: whether noise is added to gradients for the damping, with T = `temperature`.
    """
    _check(lr=lr)
    metric = hessian if metric is None else metric
    eye = torch.eye(len(metric), dtype=metric.dtype, device=metric.device)
    noise = gradient_covariance * batch_noise(num_data, batch_size)
    if damping_noise:
        noise = noise + 2 * damping * temperature(lr, num_data, batch_size) / (lr * num_data) * eye
    return _stationary(hessian, metric + damping * eye, noise, lr)


def _stationary(hessian: Tensor, metric: Tensor, noise: Tensor, lr: float) -> Tensor:
    """S = K S K' + ε² G^-1 Q G^-1 with K = I - ε G^-1 H, in closed form.

    With G = LL', M = L^-1 H L^-T = V diag(m) V' and S = L^-T V Z V' L^-1:
    Z_ij (1 - (1 - ε m_i)(1 - ε m_j)) = ε² (V'L^-1 Q L^-T V)_ij.
    """
    root = cholesky(metric, 0.0, "the metric")
    curved, pushed = (_between(root, matrix) for matrix in (hessian, noise))
    values, basis = torch.linalg.eigh((curved + curved.mT) / 2)
    if not bool((values > 0).all() & (lr * values < 2).all()):
        low, high = float(values[0]), float(values[-1])
        raise ValueError(
            f"lr={lr!r} times the eigenvalues of G^-1 H, {low:g} to {high:g}, must be in (0, 2) for a stationary "
            "covariance: lower lr, or use the Hessian at an optimum."
        )
    keep = 1 - lr * values
    inner = lr**2 * (basis.mT @ pushed @ basis) / (1 - keep[:, None] * keep)
    half = torch.linalg.solve_triangular(root.mT, basis, upper=True)  # L^-T V
    return half @ inner @ half.mT


def _between(root: Tensor, matrix: Tensor) -> Tensor:
    """L^-1 A L^-T."""
    left = torch.linalg.solve_triangular(root, matrix, upper=False)
    return torch.linalg.solve_triangular(root, left.mT, upper=False).mT


def warn_about_temperature(lr: float, num_data: float, batch_size: float | None) -> None:
    """Warns if T is far from 1 or if the step is large.

    Args:
        batch_size: None if the temperature does not depend on it.
    """
    if batch_size is not None:
        drawn = temperature(lr, num_data, batch_size) if lr > 0 else 1.0
        if not 1 / TEMPERATURE_FACTOR <= drawn <= TEMPERATURE_FACTOR:
            better = 2 * batch_size / (num_data - batch_size) if batch_size < num_data else math.nan
            warn(
                f"lr={lr:g} with batch_size={batch_size:g} of num_data={num_data:g} samples at temperature "
                f"{drawn:.3g}, not 1: to sample the posterior use batch_size={_nearest(lr, num_data)} or "
                f"lr={better:.3g}.",
            )
    if lr > LARGE_LR:
        wider = f"variances are {step_inflation(lr) - 1:.0%} too large" if lr < 2 else "the chain diverges"
        warn(f"lr={lr:g} is not small: {wider} in units of the metric.")


def _nearest(lr: float, num_data: float) -> int:
    return batch_size(1.0, lr, num_data)


def _check(**values: float) -> None:
    for name, value in values.items():
        least = name in ("num_data", "batch_size")
        if not (value >= 1 if least else value > 0) or math.isinf(value):
            raise ValueError(
                f"{name} must be {'a number >= 1' if least else 'a finite positive number'}, got {value!r}."
            )
