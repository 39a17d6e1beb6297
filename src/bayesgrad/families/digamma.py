"""The digamma function ψ where torch's loses digits, its inverse, and equations in it that mean maps leave to solve."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EULER = 0.5772156649015329
STEPS = 200  # of Newton's method, of which bisection takes what Newton's cannot; a dozen is what is needed


def gap(x: Tensor) -> Tensor:
    """log x - ψ(x), positive and falling; as a series for large x, where the difference would have no digits."""
    r = 1 / x.clamp(min=20.0)
    s = r.square()
    series = r / 2 + s * (1 / 12 - s * (1 / 120 - s * (1 / 252 - s * (1 / 240 - s / 132))))
    return torch.where(x > 20, series, x.log() - torch.digamma(x))


def gap_slope(x: Tensor) -> Tensor:
    """1/x - ψ'(x), the derivative of `gap`."""
    return torch.where(x > 20, -_tail(1 / x.clamp(min=20.0)), 1 / x - trigamma(x))


def trigamma(x: Tensor) -> Tensor:
    """ψ'(x), by ψ'(x) = x^-2 + ψ'(x + 1) until its series is exact: torch's has nine digits only."""
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
    """The x > 0 at which ψ(x) = y, by Newton's method. ψ is concave, so that steps are short of it after the first.

    Reference: Minka, Estimating a Dirichlet distribution, appendix C.
    """
    x = torch.where(y > -2.22, y.exp() + 0.5, -1 / (y.clamp(max=-1.0) + EULER))
    for _ in range(6):
        x = x - (torch.digamma(x) - y) / trigamma(x)
    return x


def solve_falling(function: Callable[[Tensor], tuple[Tensor, Tensor]], target: Tensor, start: Tensor) -> Tensor:
    """The x > 0 at which a positive function that falls like a power of x takes its target: Newton's method for the
    logarithm of one by that of the other, in which such functions are almost straight lines.

    `function` returns value and derivative. The result is differentiable by `target`, once.
    """
    with torch.no_grad():
        x, small = start, 0.1 * torch.finfo(start.dtype).eps ** 0.5
        for _ in range(STEPS):
            value, slope = function(x)
            change = (target.log() - value.log()) * value / (slope * x)
            x = x * change.clamp(-20, 20).exp()
            if (change.abs() <= small).all():  # its square is what is left
                break
        value, slope = function(x)
    return x + (target - value) / slope


def solve_dirichlet(mean: Tensor) -> Tensor:
    """The concentrations alpha, (..., K), at which ψ(alpha_k) - ψ(Σ alpha) is the given E[log x_k].

    Given s = Σ alpha, every alpha_k is ψ^-1(E[log x_k] + ψ(s)); their sum must be s. That is one equation
    in one unknown, whose sides cross once: Newton's method in log s, with bisection where it would leave the bracket.
    The last step is Newton's in all alpha, and makes the result differentiable by `mean`, once.
    """
    with torch.no_grad():
        K, small = mean.shape[-1], 0.1 * torch.finfo(mean.dtype).eps ** 0.5
        wide = (K - 1) / (2 * -torch.expm1(mean.logsumexp(-1)))  # where all alpha are large
        u = torch.where(wide > K, wide, (K - 1) / mean.neg().mean(-1)).log()
        bound = torch.finfo(mean.dtype).max ** 0.5
        low, high = torch.full_like(u, bound).log().neg(), torch.full_like(u, bound).log()
        for _ in range(STEPS):
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
        shared = 1 / trigamma(total) - inverse.sum(-1, keepdim=True)  # Sherman and Morrison's denominator
        known = torch.digamma(alpha) - torch.digamma(total)
    error = mean - known
    return alpha + inverse * (error + (inverse * error).sum(-1, keepdim=True) / shared)
