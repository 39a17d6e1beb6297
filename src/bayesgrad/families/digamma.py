"""log Γ and its derivatives with full precision, solvers for the inverse mean maps of families, and the Bregman
divergences that divergences of families are made of."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

EULER_GAMMA = 0.5772156649015329
MAX_STEPS = 200  # maximum number of Newton or bisection steps; about a dozen are needed


LOG_2PI = math.log(2 * math.pi)
POINTS, WEIGHTS = np.polynomial.legendre.leggauss(14)  # 14 points: 5.8^-28 for functions with a pole at distance b - a


def bregman(second: Callable[[Tensor], Tensor], start: Tensor, change: Tensor) -> Tensor:
    """F(b) - F(a) - (b - a) F'(a) = (b - a)² ∫ (1 - v) F''(a + v (b - a)) dv for a = `start`, b - a = `change`.

    Written as an integral of a positive function, a small divergence has all its digits. The quadrature is exact to
    rounding where F'' = `second` is smooth at the scale of `change`.
    """
    total = torch.zeros_like(start * change)
    for point, weight in zip(POINTS.tolist(), WEIGHTS.tolist()):
        at = (1 + point) / 2
        total = total + weight / 2 * (1 - at) * second(start + at * change)
    return change.square() * total


def log_ratio(value: Tensor, base: Tensor, difference: Tensor | None = None) -> Tensor:
    """log(value/base) for positive numbers, also if they are close; `difference` is value - base, if known better."""
    change, ratio = (value - base if difference is None else difference) / base, value / base
    small = ratio < 0.5
    return torch.where(small, torch.where(small, ratio, 1.0).log(), torch.log1p(change.clamp(min=-0.5)))


def relative_excess(value: Tensor, base: Tensor, difference: Tensor | None = None) -> Tensor:
    """r - 1 - log r for r = value/base, not negative; see `log_ratio`."""
    difference = value - base if difference is None else difference
    return difference / base - log_ratio(value, base, difference)


def stirling_remainder(x: Tensor) -> Tensor:
    """log Γ(x) - (x - 1/2) log x + x - log(2π)/2; a series for large x, where the difference would cancel."""
    r = 1 / x.clamp(min=20.0)
    s = r.square()
    series = r * (1 / 12 - s * (1 / 360 - s * (1 / 1260 - s * (1 / 1680 - s * (1 / 1188 - s * 691 / 360360)))))
    near = x.clamp(max=20.0)
    return torch.where(x > 20, series, torch.lgamma(near) - (near - 0.5) * near.log() + near - LOG_2PI / 2)


def stirling_divergence(start: Tensor, end: Tensor, change: Tensor) -> Tensor:
    """F(b) - F(a) - (b - a) F'(a) for F(x) = log Γ(x) - x log x + x, which is convex, a = `start` and b = `end`.

    The divergence of log Γ itself is this plus b log(b/a) - (b - a). The two are kept apart, because the second cancels
    against other terms of a divergence between distributions.
    """
    close = (change <= start) & (change >= -start / 2)
    near = bregman(lambda x: -log_minus_digamma_slope(x), start, torch.where(close, change, 0.0))
    far = stirling_remainder(end) - stirling_remainder(start) - (end / start).log() / 2
    far = far + change * log_minus_digamma(start)
    return torch.where(close, near, far)


def digamma_increase(start: Tensor, change: Tensor) -> Tensor:
    """ψ(a + r) - ψ(a) for r = `change` >= 0, by the integral of ψ' where r is small beside a."""
    close = change <= start
    near, total = torch.where(close, change, 0.0), torch.zeros_like(start * change)
    for point, weight in zip(POINTS.tolist(), WEIGHTS.tolist()):
        total = total + weight / 2 * trigamma(start + (1 + point) / 2 * near)
    return torch.where(close, change * total, torch.digamma(start + change) - torch.digamma(start))


def log_minus_digamma(x: Tensor) -> Tensor:
    """log x - ψ(x), positive and decreasing; a series for large x, where the difference would cancel."""
    r = 1 / x.clamp(min=20.0)
    s = r.square()
    series = r / 2 + s * (1 / 12 - s * (1 / 120 - s * (1 / 252 - s * (1 / 240 - s / 132))))
    return torch.where(x > 20, series, x.log() - torch.digamma(x))


def log_minus_digamma_slope(x: Tensor) -> Tensor:
    """1/x - ψ'(x), the derivative of `log_minus_digamma`."""
    return torch.where(x > 20, -_tail(1 / x.clamp(min=20.0)), 1 / x - trigamma(x))


def trigamma(x: Tensor) -> Tensor:
    """ψ'(x), by ψ'(x) = x^-2 + ψ'(x + 1) and a series for large x: torch.polygamma has only nine digits."""
    head = torch.zeros_like(x)
    for i in range(12):
        head = head + (x + i).square().reciprocal()
    r = 1 / (x + 12)
    return head + r + _tail(r)


def _tail(r: Tensor) -> Tensor:
    """ψ'(x) - 1/x for large x = 1/r: r²/2 + r³/6 - r⁵/30 + r⁷/42 - r⁹/30 + 5 r¹¹/66."""
    s = r.square()
    return s * (1 / 2 + r * (1 / 6 - s * (1 / 30 - s * (1 / 42 - s * (1 / 30 - s * (5 / 66))))))


def inverse_digamma(y: Tensor) -> Tensor:
    """The x > 0 with ψ(x) = y, by Newton's method. ψ is concave, so steps after the first do not overshoot.

    Reference: Minka, Estimating a Dirichlet distribution, appendix C.
    """
    x = torch.where(y > -2.22, y.exp() + 0.5, -1 / (y.clamp(max=-1.0) + EULER_GAMMA))
    for _ in range(6):
        x = x - (torch.digamma(x) - y) / trigamma(x)
    return x


def solve_decreasing(function: Callable[[Tensor], tuple[Tensor, Tensor]], target: Tensor, start: Tensor) -> Tensor:
    """The x > 0 at which a positive function, which decreases like a power of x, equals `target`.

    Newton's method for the logarithm of the function as a function of log x, where it is almost linear. `function`
    returns the value and the derivative. The result is differentiable once with respect to `target`.
    """
    with torch.no_grad():
        x, small = start, 0.1 * torch.finfo(start.dtype).eps ** 0.5
        for _ in range(MAX_STEPS):
            value, slope = function(x)
            change = (target.log() - value.log()) * value / (slope * x)
            x = x * change.clamp(-20, 20).exp()
            if (change.abs() <= small).all():  # the remaining error is its square
                break
        value, slope = function(x)
    return x + (target - value) / slope


def solve_dirichlet(mean: Tensor) -> Tensor:
    """The concentrations alpha, (..., K), with ψ(alpha_k) - ψ(Σ alpha) = E[log x_k] for the given E[log x_k].

    Given s = Σ alpha, every alpha_k is ψ^-1(E[log x_k] + ψ(s)); their sum must be s. This is one equation in one
    unknown with one solution, solved by Newton's method in log s, with bisection where a step would leave the bracket.
    The last step is a Newton step in all alpha, which makes the result differentiable once with respect to `mean`.
    """
    with torch.no_grad():
        K, small = mean.shape[-1], 0.1 * torch.finfo(mean.dtype).eps ** 0.5
        wide = (K - 1) / (2 * -torch.expm1(mean.logsumexp(-1)))  # where all alpha are large
        u = torch.where(wide > K, wide, (K - 1) / mean.neg().mean(-1)).log()
        bound = torch.finfo(mean.dtype).max ** 0.5
        low, high = torch.full_like(u, bound).log().neg(), torch.full_like(u, bound).log()
        for _ in range(MAX_STEPS):
            s = u.exp()
            alpha = inverse_digamma(mean + torch.digamma(s)[..., None])
            excess = alpha.sum(-1).log() - u
            low, high = torch.where(excess >= 0, u, low), torch.where(excess <= 0, u, high)
            slope = s * trigamma(s) * trigamma(alpha).reciprocal().sum(-1) / alpha.sum(-1) - 1
            step = u - excess / slope
            step = torch.where((step > low) & (step < high), step, (low + high) / 2)
            change, u = (step - u).abs(), step
            if (change <= small).all():
                break
        alpha = inverse_digamma(mean + torch.digamma(u.exp())[..., None])
        total = alpha.sum(-1, keepdim=True)
        inverse = 1 / trigamma(alpha)
        shared = 1 / trigamma(total) - inverse.sum(-1, keepdim=True)  # denominator of the Sherman-Morrison formula
        known = torch.digamma(alpha) - torch.digamma(total)
    error = mean - known
    return alpha + inverse * (error + (inverse * error).sum(-1, keepdim=True) / shared)
