"""Bayesian filtering of a weight matrix whose covariance is approximated by a Kronecker product.

For W (M, N) = (out, in) and an example with input x and error d, the likelihood adds (x ⊗ d)(x ⊗ d)' to the precision,
and the transition adds noise to the covariance. The result of either is not a Kronecker product, so each step is
followed by a projection to the Kronecker product that minimises KL(exact || approximation).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesgrad.precision.linalg import inverse_factor

CHUNKS = 8  # the largest number of chunks of a batch; each costs a pass over the factors


def projection_weight(sizes: tuple[int, int], product: Tensor) -> Tensor:
    """The weight t of one example in the projected update.

    With a = x'S_x x, b = d'S_d d and p = ab, the `product`, the projection of (Σ^-1 + (x ⊗ d)(x ⊗ d)')^-1 is

        S_x <- sqrt(1+t) (S_x^-1 + N t xx'/a)^-1,    S_d <- sqrt(1+t) (S_d^-1 + M t dd'/b)^-1

    where t is the positive root of MN t^2 + (MN + (MN-M-N) p) t = p, for updates of any size. It is exact, with
    t = p/(MN), for N = 1 and for M = 1.

    Reference: Aitchison 2018, Eq. 24.
    Differs from the paper: its Eq. 24 is of first order in p, lacks 1/N and 1/M and has Δ for X in the second line.
    Checked by: tests/equations/test_kronecker_filter.py, against a converged flip-flop and a minimiser of the KL.
    """
    m, n = sizes
    if min(sizes) == 1:
        return product / (m * n)
    linear = m * n + (m * n - m - n) * product
    return 2 * product / (linear + (linear * linear + 4 * m * n * product).sqrt())


@dataclass(frozen=True, eq=False)
class Factors:
    """S_x ⊗ S_d, the covariance of W in each group. Every operation returns a new object.

    Args:
        inputs: S_x, (groups, N, N).
        errors: S_d, (groups, M, M).
        traces: tr(S_x^-1)/N and tr(S_d^-1)/M, (2, groups) in float64 on the CPU. Every operation
            updates them, with an approximation in `propagate`; `with_exact_traces` computes them.
    """

    inputs: Tensor
    errors: Tensor
    traces: Tensor

    def propagate(self, retain: float, noise: float) -> Factors:
        """r Σ + q I, projected: (r S_x + q l_d I) ⊗ (r S_d + q l_x I) / (r + q l_x l_d), for traces l_x and l_d.

        To first order in q this is Eq. 28; it is exact where one of the factors is a multiple of the identity, and
        positive for any q.

        Reference: Aitchison 2018, Eq. 28.
        """
        l_x, l_d = self.traces
        total = retain + noise * l_x * l_d  # (groups,)
        inputs = _affine(self.inputs, torch.full_like(total, retain), noise * l_d)
        errors = _affine(self.errors, retain / total, noise * l_x / total)
        return Factors(inputs, errors, torch.stack([l_x / total, l_d]))

    def observe(self, x: Tensor, d: Tensor, chunks: int = CHUNKS) -> Factors:
        """The factors after some examples: rows of x (groups, rows, N) and of d (groups, rows, M).

        With t_b as in `projection_weight`, all computed from the old factors,

            S_x <- sqrt(1 + Σ t_b) (S_x^-1 + N Σ t_b x_b x_b'/a_b)^-1

        and likewise S_d. It is the projection for one row, and for any number of them where N = 1 or M = 1; else it is
        so to first order, and always positive definite. Chunks of min(M, N) rows are processed in sequence, or larger
        chunks if there would be too many. Rows are sorted by a_b b_b, so their order does not matter.
        """
        rows = x.shape[1]
        size = max(min(x.shape[2], d.shape[2]), math.ceil(rows / chunks))
        if size < rows:
            a, b = (_squares(rows, rows @ factor) for rows, factor in ((x, self.inputs), (d, self.errors)))
            order = (a * b).argsort(1)[..., None]
            x, d = (part.take_along_dim(order, 1) for part in (x, d))
        belief = self
        for start in range(0, rows, size):
            belief = belief._observe(x[:, start : start + size], d[:, start : start + size])
        return belief

    def _observe(self, x: Tensor, d: Tensor) -> Factors:
        products = x @ self.inputs, d @ self.errors
        squares = [_squares(rows, product) for rows, product in zip((x, d), products)]
        t = projection_weight((d.shape[2], x.shape[2]), squares[0] * squares[1])  # (groups, rows)
        if d.shape[2] == x.shape[2] == 2:  # only then t is unbounded, and could exceed the resolution of the dtype
            t = t.clamp(max=1 / (32 * _rounding(x)))
        weights = [torch.where(own > 0, t / own, 0.0) for own in squares]
        sides = [
            _ReducedCovariance(factor, rows, product, rows.shape[2] * weight)
            for factor, rows, product, weight in zip((self.inputs, self.errors), (x, d), products, weights)
        ]
        growth = (1 + t.sum(1)).sqrt()
        balance = (sides[1].mean / sides[0].mean).sqrt()  # equal mean variances on both sides
        scales = growth * balance, growth / balance
        added = [(weight * rows.double().square().sum(2)).sum(1).cpu() for weight, rows in zip(weights, (x, d))]
        traces = [torch.minimum(old + new, side.most.cpu()) for old, new, side in zip(self.traces, added, sides)]
        inputs, errors = (side.scaled(scale) for side, scale in zip(sides, scales))
        return Factors(inputs, errors, torch.stack(traces) / torch.stack(scales).cpu())

    def balanced(self) -> Factors:
        """The same belief, with equal mean variances on both sides."""
        inputs, errors = ((factor + factor.mT) / 2 for factor in (self.inputs, self.errors))
        means = [factor.diagonal(dim1=1, dim2=2).double().mean(1) for factor in (inputs, errors)]
        balance = (means[1] / means[0]).sqrt()
        traces = torch.stack([self.traces[0] / balance.cpu(), self.traces[1] * balance.cpu()])
        return Factors(_affine(inputs, balance), _affine(errors, 1 / balance), traces)

    def with_exact_traces(self) -> Factors:
        """The same factors with balanced scales and with computed traces, where rounding permits."""
        own = self.balanced()
        traces = [_mean_precision(factor, trace) for factor, trace in zip((own.inputs, own.errors), own.traces)]
        return Factors(own.inputs, own.errors, torch.stack(traces))


class _ReducedCovariance:
    """(S^-1 + Σ_b w_b r_b r_b')^-1 = S - T'T for rows r_b, products S r_b and weights w_b, up to a scale.

    To keep small eigenvalues positive under rounding, the diagonal is increased in proportion to what is subtracted
    from it, and correlations are reduced.
    """

    def __init__(self, factor: Tensor, rows: Tensor, products: Tensor, weights: Tensor) -> None:
        self.factor = factor
        size = factor.shape[-1]
        roots = weights.sqrt().to(rows)[..., None]
        rows, products = rows * roots, products * roots
        if rows.shape[1] > size:
            rows = torch.linalg.qr(rows, mode="r")[1]
            products = rows @ factor
        gram = products @ rows.mT
        eps = torch.finfo(factor.dtype).eps
        trace = gram.diagonal(dim1=1, dim2=2).sum(1, keepdim=True)
        gram.diagonal(dim1=1, dim2=2).add_(1 + 8 * eps * trace)
        self.removed = torch.linalg.solve_triangular(torch.linalg.cholesky_ex(gram)[0], products, upper=False)
        self.rounding = _rounding(factor)
        before, lost = factor.diagonal(dim1=1, dim2=2), self.removed.square().sum(1)
        self.diagonal = (before - lost).clamp(min=0) + self.rounding * lost
        if size == 1:  # without the cancellation
            self.diagonal = before / (1 + trace)
        self.mean = self.diagonal.double().mean(1)  # (groups,)
        self.most = (1 / self.diagonal.double()).mean(1) / (
            self.rounding if size > 1 else 1
        )  # an upper bound of the trace

    def scaled(self, scale: Tensor) -> Tensor:
        removed, keep = self.removed, scale * (1 - self.rounding)
        if len(scale) == 1:
            alike = {"beta": keep.item(), "alpha": -keep.item()}
            shrunk = torch.addmm(self.factor[0], removed[0].T, removed[0], **alike)[None]
        else:
            shrunk = (self.factor - removed.mT @ removed) * keep.to(removed)[:, None, None]
        shrunk.diagonal(dim1=1, dim2=2).copy_(self.diagonal.double() * scale[:, None])
        return shrunk


def _squares(rows: Tensor, products: Tensor) -> Tensor:
    """r'S r of each row, (groups, rows)."""
    return torch.linalg.vecdot(products, rows).double().clamp(min=0)


def _rounding(rows: Tensor) -> float:
    """The smallest eigenvalue of a correlation matrix that differs from zero beyond rounding."""
    return 8 * torch.finfo(rows.dtype).eps * rows.shape[-1] ** 0.5


def _affine(factor: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
    """scale * factor + shift * I in each group."""
    result = factor * scale.to(factor)[:, None, None]
    if shift is not None:
        result.diagonal(dim1=1, dim2=2).add_(shift.to(factor)[:, None])
    return result


def _mean_precision(factor: Tensor, otherwise: Tensor) -> Tensor:
    """tr(S^-1)/n, (groups,), or `otherwise` if there is no Cholesky factor."""
    root, info = torch.linalg.cholesky_ex(factor)
    found = inverse_factor(root).double().square().sum((1, 2)).div(factor.shape[-1]).cpu()
    return torch.where((info == 0).cpu() & found.isfinite(), found, otherwise)
