"""Densities of counts whose rate is lognormal, and of numbers whose noise variance is."""

from __future__ import annotations

import math

import torch
from torch import Tensor

POINTS = 1 << 20  # numbers that are evaluated at a time
NODES, REACH = 129, 8.0  # of `log_normal_lognormal`: points, and deviations beyond the modes of both factors


def log_poisson_lognormal(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    r"""log E[exp(y f - e^f)] for f ~ N(m, v), elementwise: log y! plus the log-probability of a count of rate e^f.

    The trapezoidal rule around the mode f* of the integrand, with a = e^f* and the slope r that rounding leaves there:

    .. math::
        y f - e^f - \frac{(f - m)^2}{2 v} = y f_* - a - \frac{(f_* - m)^2}{2 v}
            + r t - \frac{t^2}{2 v} - a (e^t - 1 - t), \quad t = f - f_*

    Its points are as dense as the integrand needs, which may be far narrower than N(m, v).
    """
    # A smaller variance has no effect on f in this precision.
    v = variance.maximum((100 * torch.finfo(mean.dtype).eps * (1 + mean.abs())).square())
    f = _root(v.log() + mean + v * y) - v.log()  # with e^u = v e^f*, the mode is where u + e^u = log v + m + v y
    a, offset = f.exp(), f - mean
    slope, width = y - a - offset / v, (1 / v + a).rsqrt()
    # Outside of this range the integrand is below e^-40 of its height: e^t - 1 - t is at least t^2/2 and, from log 4,
    # e^t/4 above zero, and at least min(t^2, |t|)/3 below.
    low = -(80 * v).sqrt().minimum((120 / a).maximum((120 / a).sqrt()))
    high = (9 * width).minimum((160 / a + 4).log())
    count = math.ceil(float(((high - low) / (width / 2).clamp(max=0.2)).nan_to_num().max())) + 1 if mean.numel() else 1
    gap, total = (high - low) / count, torch.zeros_like(mean)
    for steps in torch.arange(count + 1).to(mean).split(max(1, POINTS // max(1, mean.numel()))):
        t = low + gap * steps.view(-1, *[1] * mean.dim())
        total += (t * (slope - t / v / 2) - a * (t.clamp(max=700).expm1() - t)).exp().sum(0)
    return y * f - a - offset * offset / v / 2 + total.log() + gap.log() - (v.log() + math.log(2 * math.pi)) / 2


def log_normal_lognormal(error: Tensor, variance: Tensor, log_mean: Tensor, log_variance: Tensor) -> Tensor:
    r"""log E[N(r | 0, a + e^s)] for s ~ N(m, v), elementwise: the log-density of an error r with uncertain noise.

    The trapezoidal rule from below m to above the mode of the integrand, which is far above m for an outlier. For
    a = 0, the mode is s = m + d with d + v/2 = (v/2) r^2 e^(-m-d); for other a it is lower.

    Args:
        error: r.
        variance: a.
        log_mean, log_variance: m and v.
    """
    v = log_variance.clamp(min=torch.finfo(log_variance.dtype).tiny)
    level = (v * error.square() / 2).clamp(min=torch.finfo(v.dtype).tiny).log() + v / 2 - log_mean
    offset = (_root(level).exp() - v / 2).clamp(min=0) / v.sqrt()
    gap = (offset + 2 * REACH) / (NODES - 1)
    z = gap[..., None] * torch.arange(NODES, dtype=v.dtype, device=v.device) - REACH
    total = variance[..., None] + (log_mean[..., None] + v.sqrt()[..., None] * z).exp()
    each = z.square() + error.square()[..., None] / total + total.log()
    return (-each / 2).logsumexp(-1) + gap.log() - math.log(2 * math.pi)


def _root(level: Tensor) -> Tensor:
    """The u with u + e^u = level: Newton's method descends to it from above."""
    u = torch.where(level > 1, level.clamp(min=1).log(), level)
    for _ in range(8):
        u = u - (u + u.exp() - level) / (1 + u.exp())
    return u
