r"""Expectations under a Gaussian of one number, with as many points as its deviation needs.

A log-likelihood that is analytic in a strip of half-width d around the real axis needs points at distances in
proportion to d. Where the deviation s is a small part of d, a few Gauss-Hermite points are enough. Above that the
midpoint rule,

.. math::
    E[g] \approx \sum_k \tfrac{w_k}{2} \left(g(m + s z_k) + g(m - s z_k)\right), \quad
    z_k = \left(k + \tfrac12\right) h, \quad w_k \propto e^{-z_k^2/2},

needs fewer: its error decreases as exp(-2π d/(s h)), that of n Gauss-Hermite points as exp(-d sqrt(8 n)/s) only.

Reference: Trefethen and Weideman, 2014 (the exponentially convergent trapezoidal rule).
Checked by: tests/equations/test_quadrature.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import special
from torch import Tensor

from bayesgrad.families.gaussian import LOG_2PI
from bayesgrad.inference.expectation import GaussHermite, Moments

# The largest s/d for which the errors of a rule are below 1e-9: measured.
HERMITE = ((0.07, 6), (0.15, 10))
MIDPOINT = ((0.3, 11), (0.5, 18), (0.8, 27))
RANGE = 7.5  # of the midpoint rule, in standard deviations
MOST = 2000  # pairs of points
BLOCK = 1 << 14  # numbers that are evaluated at a time: they fit into the cache
POINTS = 1 << 20  # numbers that a function evaluates at a time
FEW = 2048  # rows for which one rule is faster than one for each range of deviations
WIDE = 2.5  # deviation of a logit above which the density is smoother than the log-likelihood


def pairs_for(ratio: float) -> tuple[np.ndarray, np.ndarray]:
    """Positive nodes z and weights w/2 of a symmetric rule for deviations up to `ratio` times d."""
    for limit, n in HERMITE:
        if ratio <= limit:
            return _hermite(n)
    for limit, pairs in MIDPOINT:
        if ratio <= limit:
            return midpoint(pairs)
    return midpoint(math.ceil(33 * ratio) if 33 * ratio < MOST else MOST)


@lru_cache
def _hermite(n: int) -> tuple[np.ndarray, np.ndarray]:
    one = torch.ones(1, dtype=torch.float64)
    at, _, weights = GaussHermite(n).points(0 * one, one)
    return at[n // 2 :, 0].numpy(), weights[n // 2 :].numpy()


@lru_cache
def midpoint(pairs: int) -> tuple[np.ndarray, np.ndarray]:
    """Positive nodes and weights of the midpoint rule, for a standard normal number."""
    nodes = (np.arange(pairs) + 0.5) * (RANGE / pairs)
    weights = np.exp(-(nodes**2) / 2)
    return nodes, weights / (2 * weights.sum())


class Expected(NamedTuple):
    """Moments of a function f of a Gaussian, and E[f^(3)], which is None where it is not known."""

    moments: Moments
    third: Tensor | None


def expected_derivatives(
    function: Callable[[Tensor], Moments], mean: Tensor, variance: Tensor, reach: float
) -> Expected:
    """The expectations of an elementwise function and of its derivatives, the third by E[f^(3)] = E[f'' ε]/s.

    Args:
        function: returns its value and the first two derivatives.
        reach: d, the half-width of the strip in which it is analytic.
    """
    deviation = variance.sqrt()
    nodes, weights = (torch.as_tensor(part).to(mean) for part in pairs_for(float(deviation.max()) / reach))
    found: list[Tensor] = []
    size = max(1, POINTS // mean.numel())
    for node, weight in zip(torch.cat([nodes, -nodes]).split(size), torch.cat([weights, weights]).split(size)):
        moments = function(mean + deviation * node.view(-1, *[1] * mean.dim()))
        weighted = [(weight, part) for part in moments] + [(weight * node, moments.second)]
        parts = [torch.tensordot(own, part.expand(len(node), *mean.shape), 1) for own, part in weighted]
        found = parts if not found else [whole + part for whole, part in zip(found, parts)]
    return Expected(Moments(*found[:3]), found[3] / deviation.clamp_min(torch.finfo(deviation.dtype).tiny ** 0.5))


def expected_log_sigmoid(mean: Tensor, variance: Tensor) -> Expected:
    r"""The expectations of log 1/(1 + e^-f) and of its first three derivatives, with errors below 1e-9.

    The poles of the derivatives are at ± iπ. Above a deviation of `WIDE` the density is smoother than the likelihood,
    and a closed form and a Gauss rule with the weight log(1 + e^-t) take over:

    .. math::
        \log \sigma(f) = \min(f, 0) - \log(1 + e^{-|f|}), \quad
        E[\log(1 + e^{-|f|})] = \int_0^\infty \log(1 + e^{-t}) \left(N(t) + N(-t)\right) dt
    """
    mean, variance = mean.detach(), variance.detach()
    if mean.is_cpu:  # NumPy's functions take a third of the time of torch's
        parts = _expected_log_sigmoid(np, mean.numpy().ravel(), variance.sqrt().numpy().ravel())
        value, first, second, third = (torch.from_numpy(part.reshape(mean.shape)) for part in parts)
    else:
        parts = _expected_log_sigmoid(torch, mean.flatten(), variance.sqrt().flatten())
        value, first, second, third = (part.view(mean.shape) for part in parts)
    return Expected(Moments(value, first, second), third)


def _expected_log_sigmoid(xp: Any, mean: Any, deviation: Any) -> Sequence[Any]:
    """The four expectations by the functions of an array library, numpy or torch, for vectors."""
    most, narrow = float(deviation.max()), HERMITE[-1][0] * math.pi
    if most <= narrow or (most <= WIDE and len(mean) <= FEW):
        return _by_pairs(xp, mean, deviation, most)
    large = ~(deviation <= WIDE)
    if len(mean) <= FEW:
        found, groups = _by_pairs(xp, mean, deviation.clip(max=WIDE), WIDE), [large]
    else:
        small = deviation <= narrow
        found, groups = [xp.empty_like(mean) for _ in range(4)], [large, small, ~small & ~large]
    for which in groups:
        if which.any():
            m, own = mean[which], deviation[which]
            parts = _by_weight(xp, m, own) if which is large else _by_pairs(xp, m, own, float(own.max()))
            for whole, part in zip(found, parts):
                whole[which] = part
    return found


def _by_pairs(xp: Any, mean: Any, deviation: Any, most: float) -> Sequence[Any]:
    """By one cosh, logarithm and reciprocal for two points.

    With b = e^-|m| and u, u' = b e^(± s z): (1 + u)(1 + u') = D = 1 + 2 b cosh(s z) + b², and sums over both points are
    log D of log(1 + u), 1 - (1 - b²)/D of u/(1 + u), and (1 + b²)/D - (1 - b²)²/D² of u/(1 + u)². The derivative of the
    last by |m| is (1 - b²)/D - 3 (1 - b⁴)/D² + 2 (1 - b²)³/D³.
    """
    nodes, weights = _like(xp, mean, *pairs_for(most / math.pi))
    b = xp.exp(-abs(mean))
    square, double = b * b, 2 * b
    found = [xp.empty_like(mean) for _ in range(4)]  # log D, 1/D, 1/D² and 1/D³
    size = max(1, BLOCK // len(nodes))
    for start in range(0, len(mean), size):
        rows = slice(start, start + size)
        part = nodes[:, None] * deviation[rows]
        xp.cosh(part, out=part)
        part *= double[rows]
        part += square[rows]  # D - 1
        found[0][rows] = weights @ xp.log1p(part)
        part += 1
        xp.reciprocal(part, out=part)
        power = part * part
        found[1][rows], found[2][rows] = weights @ part, weights @ power
        power *= part
        found[3][rows] = weights @ power
    value, once, twice, thrice = found
    rest, more = 1 - square, 1 + square
    twice = rest * twice
    tail, second = 0.5 - rest * once, rest * twice - more * once
    third = 3 * more * twice - rest * (once + 2 * rest * rest * thrice)
    negative = mean < 0
    first, third = xp.where(negative, 1 - tail, tail), xp.where(negative, -third, third)
    return xp.where(negative, mean - value, -value), first, second.clip(max=0), third


def _by_weight(xp: Any, mean: Any, deviation: Any) -> Sequence[Any]:
    t, weights = _like(xp, mean, *_log_rule(16))
    width = 1 / (deviation * deviation)
    height = xp.exp(-(mean * mean * width + LOG_2PI) / 2) / deviation  # the density at zero
    below = (special if xp is np else torch.special).ndtr(-mean / deviation)
    value, moments = mean * below - deviation * deviation * height, []
    scores = (t[:, None] - mean) * width  # (points, n)
    density = xp.exp(-(scores * scores / width + LOG_2PI) / 2) / deviation
    for _ in range(4):
        moments.append(weights @ density)
        density *= scores
    zeroth, once, twice, thrice = moments
    second = (zeroth * width - twice - height).clip(max=0)
    return value - zeroth, below - once, second, (height * mean + 3 * once) * width - thrice


def _like(xp: Any, other: Any, *parts: np.ndarray) -> list[Any]:
    """Arrays in the library, dtype and device of another one."""
    options = {"dtype": other.dtype} if xp is np else {"dtype": other.dtype, "device": other.device}
    return [xp.asarray(part, **options) for part in parts]


@lru_cache
def _log_rule(n: int) -> tuple[np.ndarray, np.ndarray]:
    """A Gauss rule for the weight log(1 + e^-|t|), n points on each side, by Lanczos' method on a fine grid."""
    nodes, weights = np.polynomial.legendre.leggauss(60)
    edges = np.array([0, 1, 2, 4, 8, 16, 32, 48])
    half, middle = np.diff(edges)[:, None] / 2, (edges[1:] + edges[:-1])[:, None] / 2
    t = (middle + half * nodes).ravel()
    mass = (half * weights).ravel() * np.log1p(np.exp(-t))
    basis = [np.sqrt(mass / mass.sum())]
    diagonal, beside = [], []
    for _ in range(n):
        following = t * basis[-1]
        diagonal.append(following @ basis[-1])
        for _ in range(2):  # once more for the digits that are lost the first time
            following = following - np.stack(basis).T @ (np.stack(basis) @ following)
        beside.append(np.linalg.norm(following))
        basis.append(following / beside[-1])
    jacobi = np.diag(diagonal) + np.diag(beside[:-1], 1) + np.diag(beside[:-1], -1)
    values, vectors = np.linalg.eigh(jacobi)
    return np.concatenate([values, -values]), np.tile(mass.sum() * vectors[0] ** 2, 2)
