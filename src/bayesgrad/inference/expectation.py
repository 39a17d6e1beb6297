r"""Expectations of a function and of its first two derivatives under a Gaussian.

They are all that the message to a Gaussian node needs (theorems of Bonnet and Price):

.. math::
    \nabla_m E[f] = E[\nabla f], \quad \nabla_V E[f] = \tfrac12 E[\nabla^2 f]

Reference: Khan and Rue 2023, appendices C and D.
Differs from the paper: the factor is 1/2 everywhere, including off the diagonal.
Checked by: tests/equations/test_inference.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Integral
from types import FunctionType
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, jacrev, vjp, vmap

from bayesgrad.noise import generator_of, randn, seed32

Function = Callable[[Tensor], Tensor]
HESSIANS = ("exact", "gauss-newton", "reparameterised")


class Moments(NamedTuple):
    """E[f], E[f'] and E[f'']."""

    value: Tensor
    first: Tensor
    second: Tensor


class Expectation(ABC):
    """Computes expectations under a Gaussian."""

    @abstractmethod
    def points(self, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluation points (points, *plates, P), their standard noise of the same shape, and their weights (points,).

        Args:
            mean: (*plates, P).
            root: R with RR' the covariance, (*plates, P, P); standard deviations (*plates, P) if it is diagonal.
        """

    hessian: str = "exact"

    def scalar(self, function: Function, mean: Tensor, variance: Tensor) -> Moments:
        """Moments of an elementwise function; all tensors have the same shape."""
        deviation = variance.sqrt()
        at, noise, weights = self.points(mean[..., None], deviation[..., None, None])
        at, noise, weights = at[..., 0], noise[..., 0], weights.view(-1, *[1] * mean.dim())
        value, first, second = derivatives(function, at, second=self.hessian == "exact")
        if self.hessian == "gauss-newton":
            second = -first.square()
        elif self.hessian == "reparameterised":
            second = first * noise / deviation.clamp_min(torch.finfo(deviation.dtype).tiny ** 0.5)
        return Moments(*[(weights * part).sum(0) for part in (value, first, second)])

    def rows(self, function: Function, mean: Tensor, root: Tensor) -> Moments:
        """Moments of a function that maps (..., n, K) to (..., n), with exact Hessians.

        Args:
            function: may define `derivatives(at, weights)`, which returns the averages over points in closed form,
                where K backward passes would be slow.
            mean: (n, K).
            root: (n, K, K).

        Returns:
            (n,), (n, K) and (n, K, K).
        """
        at, _, weights = self.points(mean, root)
        if hasattr(function, "derivatives"):
            return Moments(*function.derivatives(at, weights))  # pyright: ignore[reportFunctionMemberAccess]
        with torch.enable_grad():
            at = at.detach().requires_grad_()
            value = function(at)
            (first,) = torch.autograd.grad(value.sum(), at, create_graph=True)
            columns = [torch.autograd.grad(part.sum(), at, retain_graph=True)[0] for part in first.unbind(-1)]
        parts = value.detach(), first.detach(), torch.stack(columns, -2)
        return Moments(*[torch.einsum("s,s...->...", weights, part) for part in parts])

    def vector(self, function: Function, mean: Tensor, root: Tensor, *, second: bool = True) -> Moments:
        """Moments of a function from one vector (P,) to a scalar; vectorised over plates and points.

        Args:
            root: see `points`. If it has standard deviations, only the diagonals of Hessians are computed.
            second: whether the Hessian is needed; it is zero otherwise.

        Returns:
            (*plates), (*plates, P) and (*plates, P, P), or the diagonals (*plates, P).
        """
        at, noise, weights = self.points(mean, root)
        rows, diagonal = at.flatten(0, -2), root.dim() == mean.dim()
        each = _vectorise(function, rows[0])
        value, first = _value_and_gradient(function, rows, each)
        shape, size = at.shape[:-1], at.shape[-1]
        parts = [value.view(shape), first.view(*shape, size)]
        if second:
            parts.append(
                self._hessians(function, rows, each, first, noise, root, diagonal).view(
                    *shape, *root.shape[mean.dim() - 1 :]
                )
            )
        averages = [part[0] if len(weights) == 1 else torch.einsum("s,s...->...", weights, part) for part in parts]
        return Moments(averages[0], averages[1], averages[2] if second else mean.new_zeros(()))

    def _hessians(
        self,
        function: Function,
        rows: Tensor,
        each: Callable[..., Function],
        first: Tensor,
        noise: Tensor,
        root: Tensor,
        diagonal: bool,
    ) -> Tensor:
        """The Hessian at each row, or what stands for it: (rows, P, P), or (rows, P)."""
        if self.hessian == "exact":
            return each(_hessian_diagonal(function, len(rows)) if diagonal else jacrev(grad(function)))(rows)
        if self.hessian == "gauss-newton":
            return -first.square() if diagonal else -first[:, :, None] * first[:, None, :]
        if diagonal:  # E[f''] = E[f' noise]/deviation
            return (first.view_as(noise) * noise).div_(root).flatten(0, -2)
        # E[∇² f] = E[∇f (R'^-1 noise)']
        pulled = torch.linalg.solve_triangular(root.mT, noise[..., None], upper=True)[..., 0].flatten(0, -2)
        hessians = first[:, :, None] * pulled[:, None, :]
        return (hessians + hessians.mT) / 2


@dataclass(frozen=True)
class Delta(Expectation):
    """The delta method: derivatives at the mean, and f(m) + tr(V ∇² f(m))/2 as the value.

    With it, the bound is the Laplace approximation of the log evidence. A `FixedGaussian` node uses no Hessian, and the
    value is f(m).

    Args:
        hessian: `"exact"`, or `"gauss-newton"`, -∇f ∇f', which is negative semi-definite.

    Reference: Khan and Rue 2023, appendix C.
    """

    hessian: str = "exact"

    def __post_init__(self) -> None:
        _check_hessian(self.hessian, HESSIANS[:2])

    def points(self, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return mean[None], mean.new_zeros(()).expand_as(mean)[None], mean.new_ones(1)

    def scalar(self, function: Function, mean: Tensor, variance: Tensor) -> Moments:
        found = super().scalar(function, mean, variance)
        return found._replace(value=found.value + variance * found.second / 2)

    def rows(self, function: Function, mean: Tensor, root: Tensor) -> Moments:
        found = super().rows(function, mean, root)
        return found._replace(value=found.value + (root * (found.second @ root)).sum((-2, -1)) / 2)

    def vector(self, function: Function, mean: Tensor, root: Tensor, *, second: bool = True) -> Moments:
        found = super().vector(function, mean, root, second=second)
        if not second:
            return found
        if root.dim() == mean.dim():
            trace = (root.square() * found.second).sum(-1)
        else:
            trace = (root * (found.second @ root)).sum((-2, -1))
        return found._replace(value=found.value + trace / 2)


@dataclass(frozen=True)
class GaussHermite(Expectation):
    """Gauss-Hermite quadrature with n points per dimension, n^P points for vectors; exact up to degree 2 n - 1.

    Args:
        n: number of points per dimension, at most 2000.
        hessian: `"exact"`, or `"reparameterised"`, E[f' ε] divided by the standard deviation. The latter is the
            derivative of the quadrature with respect to the variance. For scalar functions the message is then the
            exact gradient of the computed bound, also for functions with kinks.
    """

    n: int = 32
    hessian: str = "exact"

    def __post_init__(self) -> None:
        if not (isinstance(self.n, Integral) and 1 <= int(self.n) <= 2000):
            raise ValueError(f"n must be a positive integer, at most 2000, got {self.n!r}.")
        _check_hessian(self.hessian, HESSIANS[::2])

    def points(self, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        size = mean.shape[-1]
        if self.n**size > 1 << 20:
            raise ValueError(
                f"a grid of {self.n} points in each of {size} dimensions is too large: use MonteCarlo or Delta."
            )
        nodes, weights = (part.to(mean) for part in _hermite(self.n))
        grid = torch.cartesian_prod(*[nodes] * size).view(-1, size)
        weight = torch.cartesian_prod(*[weights] * size).view(-1, size).prod(-1)
        noise = grid.view(-1, *[1] * (mean.dim() - 1), size).expand(-1, *mean.shape)
        return displaced(mean, root, noise), noise, weight


@dataclass(frozen=True)
class QuasiMonteCarlo(Expectation):
    """A fixed quasi-random point set, for functions of a few numbers where a quadrature grid would be too large.

    Sobol points, mapped to normal deviates, in pairs of opposite sign and with an exact covariance: polynomials up to
    degree 3 have no error.

    Args:
        samples: number of points, even.
        seed: for the scrambling of the sequence.
    """

    samples: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 2 or self.samples % 2:
            raise ValueError(f"samples must be a positive even number, got {self.samples}.")

    def points(self, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        size = mean.shape[-1]
        if self.samples < 4 * size:
            raise ValueError(f"samples must be at least 4 per dimension, {4 * size} here, got {self.samples}.")
        noise = _sobol(self.samples, size, self.seed).to(mean)
        noise = noise.view(-1, *[1] * (mean.dim() - 1), size).expand(-1, *mean.shape)
        return displaced(mean, root, noise), noise, mean.new_full((self.samples,), 1 / self.samples)


@dataclass(eq=False)
class MonteCarlo(Expectation):
    """Monte Carlo samples, new ones in each call or always the same.

    Args:
        samples: number of samples, in pairs of opposite sign if it is even.
        hessian: `"exact"`; `"gauss-newton"`, -E[∇f ∇f'], which is negative semi-definite; or `"reparameterised"`,
            computed from gradients and noise only.
        fixed: uses the same noise in each call, which makes a run deterministic.
        seed: for the noise.
    """

    samples: int = 32
    hessian: str = "exact"
    fixed: bool = False
    seed: int = 0
    calls: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not (isinstance(self.samples, Integral) and int(self.samples) >= 1):
            raise ValueError(f"samples must be a positive integer, got {self.samples!r}.")
        _check_hessian(self.hessian, HESSIANS)

    def points(self, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        generator = generator_of(self.seed, self.calls)
        if not self.fixed:
            self.calls += 1
        pairs = self.samples % 2 == 0
        count = self.samples // 2 if pairs else self.samples
        noise = randn((count, *mean.shape), mean, generator)
        noise = torch.cat([noise, -noise]) if pairs else noise
        weights = mean.new_full((self.samples,), 1 / self.samples)
        return displaced(mean, root, noise), noise, weights


def _vectorise(function: Function, row: Tensor) -> Callable[..., Function]:
    """`vmap`, or a loop with the same interface for functions that vmap does not support.

    Raises:
        TypeError, ValueError: the function does not return a scalar tensor.
    """
    known = _VECTORISED.get(function) if isinstance(function, FunctionType) else None
    if known is None:
        found = function(row)
        if not isinstance(found, Tensor):
            raise TypeError(f"the function must return a tensor, got {found!r}: use torch operations.")
        if found.dim():
            raise ValueError(f"the function must return a scalar for a vector, got shape {tuple(found.shape)}: sum it.")
        try:
            vmap(function)(row[None])
            known = True
        except RuntimeError:
            known = False
        if isinstance(function, FunctionType):  # other objects may have no hash
            _VECTORISED[function] = known
    return vmap if known else lambda own: lambda rows: torch.stack([own(one) for one in rows])


_VECTORISED: WeakKeyDictionary[Function, bool] = WeakKeyDictionary()  # whether vmap supports a function


def _value_and_gradient(function: Function, rows: Tensor, each: Callable[..., Function]) -> tuple[Tensor, Tensor]:
    """f and ∇f of each row by one backward pass."""
    single = len(rows) == 1
    with torch.enable_grad():  # the row itself: the gradient of an index would be written into zeros
        at = (rows[0] if single else rows).detach().requires_grad_()
        value = function(at) if single else each(function)(at)
        if not value.requires_grad:  # a constant
            return value.view(len(rows)), torch.zeros_like(rows)
        (gradient,) = torch.autograd.grad(value.sum(), at)
    return value.detach().view(len(rows)), gradient.view_as(rows)


def _hessian_diagonal(function: Function, rows: int) -> Function:
    """The diagonal of the Hessian of a function, by P Hessian products, in memory for at most 64 of them at a time."""

    def diagonal(row: Tensor) -> Tensor:
        size = len(row)
        pull = vjp(grad(function), row)[1]
        places, found = torch.arange(size, device=row.device), torch.zeros_like(row)
        for some in places.split(max(1, min(64, (1 << 22) // (size * rows)))):
            units = (some[:, None] == places).to(row.dtype)
            # small results that stay between large ones that are freed would leave the heap with P x P numbers
            found[some] = (vmap(pull)(units)[0] * units).sum(-1)
        return found

    return diagonal


def displaced(mean: Tensor, root: Tensor, noise: Tensor) -> Tensor:
    """m + R ε for each point and plate."""
    if root.dim() < noise.dim():  # standard deviations
        return torch.addcmul(mean, root, noise)
    return mean + times_root(root, noise)


def times_root(root: Tensor, noise: Tensor) -> Tensor:
    """R ε for each point and plate, without copying R for each point."""
    if root.dim() < noise.dim():  # standard deviations
        return root * noise
    if noise.shape[-1] == 1:
        return root[..., 0] * noise
    return torch.einsum("...ij,s...j->s...i", root, noise)


@lru_cache
def _hermite(n: int) -> tuple[Tensor, Tensor]:
    """Nodes, the eigenvalues of the Jacobi matrix with one step of Newton's method, and weights."""
    off = np.sqrt(np.arange(1.0, n))
    nodes = np.linalg.eigvalsh(np.diag(off, 1) + np.diag(off, -1))
    nodes = nodes - _christoffel(nodes)[1]
    nodes = (nodes - nodes[::-1]) / 2
    weights = _christoffel(nodes)[0]
    return torch.as_tensor(nodes), torch.as_tensor(weights / weights.sum())


def _christoffel(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """1/Σ_k h_k(x)² and h_n(x)/h_n'(x), with h_k the normalised Hermite polynomials up to n = len(x).

    They are divided by a power of two when they become large: at the outer nodes of n = 380 their squares exceed the
    largest float64, which makes the weights of `numpy.polynomial.hermite_e.hermegauss` NaN.
    """
    n = len(x)
    older, newest, total, exponent = np.zeros(n), np.ones(n), np.ones(n), np.zeros(n)
    for k in range(1, n):
        older, newest = newest, (x * newest - math.sqrt(k - 1) * older) / math.sqrt(k)
        total = total + newest**2
        scale = np.where(total > 2.0**200, 2.0**-100, 1.0)
        older, newest, total, exponent = older * scale, newest * scale, total * scale**2, exponent + np.log2(scale)
    with np.errstate(under="ignore"):
        weights = np.exp2(2 * exponent) / total
    return weights, (x * newest - math.sqrt(n - 1) * older) / (n * newest)


@lru_cache
def _sobol(samples: int, size: int, seed: int) -> Tensor:
    engine = torch.quasirandom.SobolEngine(size, scramble=True, seed=seed32(seed))
    half = torch.special.ndtri(engine.draw(samples // 2, dtype=torch.float64).clamp(1e-12, 1 - 1e-12))
    factor = torch.linalg.cholesky(half.mT @ half / len(half))
    half = torch.linalg.solve_triangular(factor, half.mT, upper=False).mT
    return torch.cat([half, -half])


def _check_hessian(hessian: str, known: tuple[str, ...]) -> None:
    if hessian not in known:
        raise ValueError(f"hessian must be one of {', '.join(map(repr, known))}, got {hessian!r}.")


def derivatives(function: Function, at: Tensor, *, second: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """f, f' and f'' of an elementwise function; f'' = 0 if `second` is False."""
    with torch.enable_grad():
        at = at.detach().requires_grad_()
        value = function(at)
        if value.shape != at.shape:
            raise ValueError(f"the function must be elementwise, got shape {tuple(value.shape)} for {tuple(at.shape)}.")
        if not value.requires_grad:  # a constant
            return value, torch.zeros_like(at), torch.zeros_like(at)
        (first,) = torch.autograd.grad(value.sum(), at, create_graph=second)
        curvature = torch.zeros_like(at)
        if first.requires_grad:
            (curvature,) = torch.autograd.grad(first.sum(), at, allow_unused=True, materialize_grads=True)
    return value.detach(), first.detach(), curvature.detach()
