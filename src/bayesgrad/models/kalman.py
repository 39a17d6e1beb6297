"""Gaussian chains, x_{t+1} = F x_t + noise of covariance Q, and what is observed of them; paths of chains.

Paths are associative products over time, computed by `scan` in log2(T) rounds of batched small matrices. Q may be
singular. Tensors have time first, then any sequences, then the state; what sequences share has one entry. The filter
is in `filtering`.

Reference: Särkkä and García-Fernández, 2021, for the scan.
Checked by: tests/equations/test_state_space.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bayesgrad.families.gaussian import LOG_2PI

Elements = tuple[Tensor, ...]


class Chain(NamedTuple):
    """The prior: F and Q, from x_t to x_{t+1}, and mean m and covariance P of the first state.

    Args:
        transition, noise: (D, D), or (T, D, D) if they vary.
        mean, covariance: (D,) and (D, D).
        diffuse: (D,), True for states with an infinite variance; None if no state has one.
    """

    transition: Tensor
    noise: Tensor
    mean: Tensor
    covariance: Tensor
    diffuse: Tensor | None = None


class StateMoments(NamedTuple):
    """Means (T, ..., D) and covariances (T, ..., D, D) of the states."""

    mean: Tensor
    covariance: Tensor


def scan(combine: Callable[[Elements, Elements], Elements], elements: Elements) -> Elements:
    """All products a_1, a_1 a_2, a_1 a_2 a_3, ... of an associative operation, along the first dimension."""
    count = len(elements[0])
    if count < 2:
        return elements
    pairs = scan(combine, combine(tuple(e[:-1:2] for e in elements), tuple(e[1::2] for e in elements)))
    before = pairs if count % 2 else tuple(e[:-1] for e in pairs)
    odd = combine(before, tuple(e[2::2] for e in elements)) if count > 2 else None
    found = []
    for k, (first, second) in enumerate(zip(elements, pairs)):
        whole = second.new_empty(count, *second.shape[1:])
        whole[0] = first[0]
        whole[1::2] = second
        if odd is not None:
            whole[2::2] = odd[k]
        found.append(whole)
    return tuple(found)


class Rows(Protocol):
    """What is observed of z = H x, (T or 1, groups or 1, K, D), as a target (T, groups, K, columns).

    Sequences are columns of one group if they share their covariances, and otherwise groups with one column.
    """

    @property
    def H(self) -> Tensor: ...

    @property
    def target(self) -> Tensor: ...

    def __iter__(self) -> Iterator[Tensor]: ...

    def take(self, pick: Callable[[Tensor], Tensor]) -> Rows:
        """Some of the rows, or all in another layout of time."""
        ...

    def weights(self, spread: Tensor) -> tuple[Tensor, Tensor]:
        """X and M such that, for z ~ N(m, spread), X (target - scaled(m)) and -M are the first and second derivatives
        of the log-likelihood by m."""
        ...

    def scaled(self, m: Tensor) -> Tensor: ...

    def root(self, M: Tensor) -> Tensor | None:
        """r with r'r = M, if X = M is positive for all rows."""
        ...

    def value(self, m: Tensor, spread: Tensor, X: Tensor) -> Tensor:
        """The log-likelihood of each row, (..., columns)."""
        ...

    def precision(self) -> float:
        """The largest information in one number on one state."""
        ...


class GaussianRows(NamedTuple):
    """y = z + N(0, R)."""

    H: Tensor
    target: Tensor
    R: Tensor
    known: Tensor

    @staticmethod
    def of(H: Tensor, R: Tensor, y: Tensor) -> GaussianRows:
        """Rows of y, (T, sequences, K), NaN for missing numbers; H and R may have a dimension of time."""
        H, R = (part[:, None] if part.dim() == 3 else part[None, None] for part in (H, R))
        known = ~y.isnan()
        shared = bool((known == known[:, :1]).all())
        y, known = (part.mT[:, None] if shared else part[..., None] for part in (torch.where(known, y, 0), known))
        if not known.all():  # a missing number gets unit noise and a row of zeros in H
            there = known[..., :1]
            R = torch.where(there & there.mT, R[: len(y)], eye_like(R))
            H = torch.where(there, H[: len(y)], 0)
        return GaussianRows(H, y, R, known)

    def take(self, pick: Callable[[Tensor], Tensor]) -> GaussianRows:
        return GaussianRows(*map(pick, self))

    def weights(self, spread: Tensor) -> tuple[Tensor, Tensor]:
        total = spread + self.R
        one = total.shape[-1] == 1
        inverse = total.reciprocal() if one else torch.cholesky_inverse(torch.linalg.cholesky(total))
        return inverse, inverse

    def scaled(self, m: Tensor) -> Tensor:
        return m

    def root(self, M: Tensor) -> Tensor | None:
        return M.sqrt() if M.shape[-1] == 1 else torch.linalg.cholesky(M).mT

    def value(self, m: Tensor, spread: Tensor, X: Tensor) -> Tensor:
        error, volume = self.target - m, torch.linalg.slogdet(spread + self.R)[1]
        return -((error * (X @ error)).sum(-2) + volume[..., None] + LOG_2PI * self.known.sum(-2).to(m)) / 2

    def precision(self) -> float:
        return float((self.H.square().sum(-1) / self.R.diagonal(dim1=-2, dim2=-1)).detach().max())


class SiteRows(NamedTuple):
    """Factors exp(λ'z - z'W z/2) with a diagonal W, (..., K, 1), which may be zero or negative."""

    H: Tensor
    target: Tensor
    W: Tensor

    def take(self, pick: Callable[[Tensor], Tensor]) -> SiteRows:
        return SiteRows(*map(pick, self))

    def weights(self, spread: Tensor) -> tuple[Tensor, Tensor]:
        inside = eye_like(spread) + self.W * spread
        X = inside.reciprocal() if inside.shape[-1] == 1 else torch.linalg.inv(inside)
        return X, X * self.W.mT

    def scaled(self, m: Tensor) -> Tensor:
        return self.W * m

    def root(self, M: Tensor) -> Tensor | None:
        return None

    def value(self, m: Tensor, spread: Tensor, X: Tensor) -> Tensor:
        error = self.target - self.W * m
        sign, volume = torch.linalg.slogdet(eye_like(spread) + self.W * spread)
        volume = torch.where(sign > 0, volume, torch.nan)
        return (((self.target + error) * m + error * (spread @ X @ error)).sum(-2) - volume[..., None]) / 2

    def precision(self) -> float:
        return float((self.H.square().sum(-1, keepdim=True) * self.W.abs()).detach().max())


class Backward(NamedTuple):
    """x_t given x_{t+1} and the sites up to t: N(E x_{t+1} + g, L); E = 0 for the last state."""

    gain: Tensor
    mean: Tensor
    covariance: Tensor


def backward(chain: Chain, filtered: StateMoments) -> Backward:
    mean, covariance = filtered.mean[:-1], filtered.covariance[:-1]
    F, Q = (part[: len(mean), None] if part.dim() == 3 else part for part in chain[:2])
    ahead = F @ covariance @ F.mT + Q
    gain = _solve(ahead, F @ covariance).mT
    rest = eye_like(covariance) - gain @ F
    g = mean - times(gain, times(F, mean))
    spread = rest @ covariance @ rest.mT + gain @ Q @ gain.mT
    last = filtered.covariance[-1:]
    return Backward(
        torch.cat([gain, torch.zeros_like(last)]), torch.cat([g, filtered.mean[-1:]]), torch.cat([spread, last])
    )


def sampled(back: Backward, noise: Tensor) -> Tensor:
    """Paths given all sites, from standard normal noise (T, count, ..., D)."""
    root = square_root(back.covariance)[:, None]
    shift = back.mean[:, None] + times(root, noise)
    return scan(_moved, (back.gain[:, None].flip(0), shift.flip(0)))[1].flip(0)


def simulated(chain: Chain, noise: Tensor) -> Tensor:
    """Paths of the prior, from standard normal noise (T, ..., D)."""
    length = len(noise)
    F, root = (part[:, None] if part.dim() == 3 else part.expand(length, 1, -1, -1) for part in chain[:2])
    first = chain.mean + times(square_root(chain.covariance), noise[:1])
    shift = torch.cat([first, times(square_root(root[: length - 1]), noise[1:])])
    moves = torch.cat([torch.zeros_like(F[:1]), F[: length - 1]])
    return scan(_moved, (moves, shift))[1]


def _moved(first: Elements, second: Elements) -> Elements:
    """The affine map A x + b of `first`, followed by that of `second`."""
    return second[0] @ first[0], times(second[0], first[1]) + second[1]


def least(covariance: Tensor) -> Tensor:
    """The smallest eigenvalue of matrices scaled to a unit diagonal; 0 if it is zero up to rounding."""
    scale = covariance.diagonal(dim1=-2, dim2=-1)
    if bool((scale < 0).any()):
        return scale.amin(-1)
    scale = torch.where(scale > 0, scale, 1).rsqrt()
    size = covariance.shape[-1]
    if size == 1:
        return torch.ones_like(scale[..., 0])
    least = torch.linalg.eigvalsh(scale[..., :, None] * covariance * scale[..., None, :])[..., 0]
    return torch.where(least.abs() < 1e3 * size * torch.finfo(least.dtype).eps, 0, least)


def square_root(covariance: Tensor) -> Tensor:
    """R with R R' the matrix, which may be singular."""
    factor, info = torch.linalg.cholesky_ex(covariance)
    if not info.any():
        return factor
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp(min=0).sqrt()[..., None, :]


def _solve(covariance: Tensor, other: Tensor) -> Tensor:
    """covariance^-1 other; the pseudo-inverse if the covariance is singular."""
    factor, info = torch.linalg.cholesky_ex(covariance)
    if not info.any():
        return torch.cholesky_solve(other, factor)
    return torch.linalg.pinv(covariance, hermitian=True) @ other


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]


def eye_like(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
