"""Quadratures of log-likelihoods of one number, beside adaptive integration and with 50 digits."""

from __future__ import annotations

import math
from itertools import pairwise

import mpmath
import numpy as np
import pytest
import torch
from scipy import integrate
from scipy.special import gammaln, log_ndtr
from torch.testing import assert_close

from bayesgrad.inference import GaussHermite
from bayesgrad.models import quadrature
from bayesgrad.models.observations import Logistic, Poisson, Probit, StudentT

MEANS = [0.0, 0.7, -3.0, 8.0, -30.0]
VARIANCES = [1e-2, 0.3, 4.0, 30.0, 1e3]


def integral(function, mean: float, variance: float, kinks: tuple[float, ...] = (0.0,)) -> float:
    """E[function(f)] under N(mean, variance) by adaptive integration between marks."""
    s = variance**0.5
    marks = [mean + k * s for k in (-10, -6, -3, -1, 0, 1, 3, 6, 10)]
    marks = sorted({*marks, *[m for k in kinks for m in (k - 5, k, k + 5) if marks[0] < m < marks[-1]]})
    density = lambda f: math.exp(-(((f - mean) / s) ** 2) / 2) / s / math.sqrt(2 * math.pi)  # noqa: E731
    parts = [
        integrate.quad(lambda f: function(f) * density(f), a, b, epsabs=1e-15, epsrel=1e-12, limit=200)[0]
        for a, b in pairwise(marks)
    ]
    return math.fsum(parts)


def log_student(y: float, scale: float, dof: float):
    constant = gammaln((dof + 1) / 2) - gammaln(dof / 2) - math.log(dof * math.pi) / 2 - math.log(scale)
    return lambda f: constant - (dof + 1) / 2 * math.log1p(((y - f) / scale) ** 2 / dof)


CASES = {
    "logistic": (Logistic(), 1.0, lambda f: -float(np.logaddexp(0, -f))),
    "probit": (Probit(), 1.0, lambda f: float(log_ndtr(f))),
    "student-t": (StudentT(0.8, 4.0), 0.4, log_student(0.4, 0.8, 4.0)),
    "poisson": (Poisson(), 3.0, lambda f: 3 * f - math.exp(f) - math.lgamma(4)),
}


@pytest.mark.parametrize("name", list(CASES))
def test_expected_log_likelihoods_are_right_to_1e_8(name: str) -> None:
    """32 Gauss-Hermite points are 9e-5 too high for heavy tails at a variance of 4; 8e-4 wrong for logits at 30."""
    observation, y, function = CASES[name]
    variances = VARIANCES[:3] if name == "poisson" else VARIANCES  # E[e^f] overflows
    pairs = [(m, v) for m in MEANS for v in variances]
    want = torch.tensor([integral(function, m, v, (0.0, 1.9, 0.4)) for m, v in pairs], dtype=torch.float64)
    mean, variance = torch.tensor(pairs, dtype=torch.float64).T
    moments = [  # one at a time, since the largest deviation decides about the points
        observation.expected(m[None], v[None], torch.full((1,), y, dtype=torch.float64), GaussHermite(32))
        for m, v in zip(mean, variance)
    ]
    assert_close(torch.cat([own.value for own in moments]), want, rtol=1e-8, atol=1e-9)
    together = observation.expected(mean, variance, torch.full_like(mean, y), GaussHermite(32))
    assert_close(together.value, want, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", list(CASES))
def test_derivatives_are_those_of_the_value(name: str) -> None:
    """By the mean: E[l'], E[l''] and E[l^(3)] are derivatives of E[l], E[l'] and E[l'']."""
    observation, y, _ = CASES[name]
    mean = torch.tensor([0.0, 0.7, -3.0, 5.0, 0.3, -1.0], dtype=torch.float64)
    variance = torch.tensor([0.04, 0.3, 1.0, 4.0, 5.0, 0.7], dtype=torch.float64)
    target, step = torch.full_like(mean, y), 1e-3
    at = [observation.expected_to_third(mean + k * step, variance, target, GaussHermite(32)) for k in (-2, -1, 0, 1, 2)]
    orders = [[*own.moments, own.third] for own in at]
    for order in range(3):
        below, low, _, high, above = (own[order] for own in orders)
        slope = (below - 8 * low + 8 * high - above) / (12 * step)
        assert_close(orders[2][order + 1], slope, rtol=1e-7, atol=1e-7)


def test_third_derivatives_of_logits() -> None:
    f = torch.linspace(-5, 5, 11, dtype=torch.float64)
    at = f.clone().requires_grad_()
    (found,) = torch.autograd.grad(Logistic().derivatives(at, torch.ones_like(f)).second.sum(), at)
    assert_close(Logistic().third_derivative(f), found)


@pytest.mark.parametrize("most", [0.2, 0.47, 0.94, 1.57, 2.5])
def test_rules_at_the_ends_of_their_ranges(most: float) -> None:
    """With 50 digits: the value and three derivatives of the logit, for every rule at its largest deviation."""
    mpmath.mp.dps = 30
    means = np.array([0.0, 1.3, -4.0])
    found = quadrature._by_pairs(np, means, np.full(3, most), most)
    functions = [
        lambda f: -mpmath.log1p(mpmath.exp(-f)),
        lambda f: 1 / (1 + mpmath.exp(f)),
        lambda f: -1 / (2 * mpmath.cosh(f / 2)) ** 2,
        lambda f: mpmath.tanh(f / 2) / (2 * mpmath.cosh(f / 2)) ** 2,
    ]
    for function, own in zip(functions, found):
        for mean, value in zip(means.tolist(), own):
            points = [mpmath.mpf(k) for k in (-12, -6, 0, 6, 12)]
            want = mpmath.quad(lambda z: function(mean + most * z) * mpmath.npdf(z), points)  # noqa: B023
            assert abs(value - float(want)) < 1e-9


def test_arrays_of_torch_are_those_of_numpy() -> None:
    """The formulas run with either library; torch's is for other devices. Many rows are divided by their deviation."""
    rng = np.random.default_rng(0)
    for rows in (50, quadrature.FEW + 10):
        mean, deviation = 5 * rng.normal(size=rows), rng.uniform(0.01, 4.0, size=rows)
        ours = quadrature._expected_log_sigmoid(np, mean, deviation)
        theirs = quadrature._expected_log_sigmoid(torch, torch.as_tensor(mean), torch.as_tensor(deviation))
        alone = [quadrature._expected_log_sigmoid(np, mean[i : i + 1], deviation[i : i + 1]) for i in range(50)]
        for own, other, single in zip(ours, theirs, zip(*alone)):
            assert_close(torch.as_tensor(own), other, rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(own[:50], np.concatenate(single), rtol=0, atol=2e-9)
