"""The digamma function ψ with full precision, its inverse, and solvers for the inverse mean maps of families."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EULER_GAMMA = 0.5772156649015329
MAX_STEPS = 200  # maximum number of Newton or bisection steps; about a dozen are needed


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
