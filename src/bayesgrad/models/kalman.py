r"""Gaussian chains, x_t = F x_{t-1} + noise of covariance Q, with a site exp(h_t'x_t - x_t'J_t x_t/2) at each time.

All results are associative products over time, computed by `scan` in log2(T) rounds of batched small matrices: linear
in T and without a loop over it. Sites are given by their information (h, J), so that a missing observation is zero, a
site may have a negative precision, and Q may be singular. Tensors have time first, then any sequences, then the state;
parameters that sequences share have one entry.

Reference: Khan and Rue 2023, section 5.1, for the posterior as one conjugate step; Särkkä and García-Fernández, 2021,
for the scan.
Checked by: tests/equations/test_state_space.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Elements = tuple[Tensor, ...]


class Chain(NamedTuple):
    """The prior: F, Q, and mean m and covariance P of the first state; (D, D) and (D,)."""

    transition: Tensor
    noise: Tensor
    mean: Tensor
    covariance: Tensor


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


def filtered(chain: Chain, h: Tensor, J: Tensor) -> StateMoments:
    """The posterior of x_t given the sites up to t.

    Args:
        h: (T, ..., D).
        J: (T, ..., D, D).
    """
    F, Q, mean, covariance = chain
    J = J.expand(len(h), *J.shape[1:])
    inner = torch.linalg.inv(_eye(J) + Q @ J)  # (Q^-1 + J)^-1 = (I + Q J)^-1 Q
    A, C = inner @ F, inner @ Q
    pulled = F.mT @ inner.mT  # F'(I + J Q)^-1
    b, eta, info = _times(C, h), _times(pulled, h), pulled @ J @ F
    # The first state comes from nowhere: it is the prior, with its site.
    gain = torch.linalg.inv(_eye(J[0]) + covariance @ J[0])
    start = gain @ covariance
    first = _times(gain, mean.expand_as(h[0])) + _times(start, h[0])
    return _chained(StateMoments(first, start), (A, b, C, eta, info))


def observed(chain: Chain, H: Tensor, R: Tensor, y: Tensor) -> StateMoments:
    """The posterior of x_t given y up to t, where y_t = H x_t + N(0, R): `filtered` with the sites H'R^-1 y and
    H'R^-1 H, by Kalman gains, which remain accurate if R is small compared with the predicted covariance.

    Args:
        H: (T, ..., K, D), or one for all times.
        R: (T, ..., K, K), or one for all times.
        y: (T, ..., K).
    """
    F, Q, mean, covariance = chain
    gain, C, factor = _corrected(Q, H, R)
    seen = H @ F
    pulled = torch.cholesky_solve(seen, factor).mT
    moved = F - gain @ seen, C, pulled @ seen
    A, C, info = (part.expand(len(y), *part.shape[1:]) for part in moved)
    gain_0, start, _ = _corrected(covariance, H[0], R[0])
    first = mean + _times(gain_0, y[0] - _times(H[0], mean))
    return _chained(StateMoments(first, start), (A, _times(gain, y), C, _times(pulled, y), info))


def _corrected(covariance: Tensor, H: Tensor, R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The Kalman gain, the covariance after the update (Joseph form), and the Cholesky factor of the innovation."""
    crossed = H @ covariance
    factor = torch.linalg.cholesky(crossed @ H.mT + R)
    gain = torch.cholesky_solve(crossed, factor).mT
    rest = _eye(covariance) - gain @ H
    return gain, rest @ covariance @ rest.mT + gain @ R @ gain.mT, factor


def _chained(start: StateMoments, elements: Elements) -> StateMoments:
    """The product over time, with the distribution of the first state in place of the first element."""
    A, _, _, eta, info = elements
    first = torch.zeros_like(A[0]), *start, torch.zeros_like(eta[0]), torch.zeros_like(info[0])
    whole = [torch.cat([a[None].expand(1, *b.shape[1:]), b[1:]]) for a, b in zip(first, elements)]
    _, mean, covariance, _, _ = scan(_follow, tuple(whole))
    return StateMoments(mean, (covariance + covariance.mT) / 2)


def _follow(i: Elements, j: Elements) -> Elements:
    """Combines two segments: the end given the start is N(A start + b, C); (eta, J) is the information on the start."""
    A_i, b_i, C_i, eta_i, J_i = i
    A_j, b_j, C_j, eta_j, J_j = j
    inner = torch.linalg.inv(_eye(C_i) + C_i @ J_j)
    left, right = A_j @ inner, (inner @ A_i).mT
    return (
        left @ A_i,
        _times(left, b_i + _times(C_i, eta_j)) + b_j,
        left @ C_i @ A_j.mT + C_j,
        _times(right, eta_j - _times(J_j, b_i)) + eta_i,
        right @ (J_j @ A_i) + J_i,
    )


def predicted(chain: Chain, filtered: StateMoments) -> StateMoments:
    """The distribution of x_t given the sites before t."""
    F, Q, mean, covariance = chain
    ahead = _times(F, filtered.mean[:-1]), F @ filtered.covariance[:-1] @ F.mT + Q
    first = mean.expand_as(filtered.mean[:1]), covariance.expand_as(filtered.covariance[:1])
    return StateMoments(torch.cat([first[0], ahead[0]]), torch.cat([first[1], ahead[1]]))


class Backward(NamedTuple):
    """x_t given x_{t+1} and the sites up to t: N(E x_{t+1} + g, L); E = 0 for the last state."""

    gain: Tensor
    mean: Tensor
    covariance: Tensor


def backward(chain: Chain, filtered: StateMoments) -> Backward:
    F, Q, *_ = chain
    mean, covariance = filtered.mean[:-1], filtered.covariance[:-1]
    ahead = F @ covariance @ F.mT + Q
    gain = _solve(ahead, F @ covariance).mT
    rest = _eye(covariance) - gain @ F
    g = mean - _times(gain, _times(F, mean))
    spread = rest @ covariance @ rest.mT + gain @ Q @ gain.mT
    last = filtered.covariance[-1:]
    return Backward(
        torch.cat([gain, torch.zeros_like(last)]), torch.cat([g, filtered.mean[-1:]]), torch.cat([spread, last])
    )


def smoothed(back: Backward) -> tuple[StateMoments, Tensor]:
    """The posterior of each x_t given all sites, and the covariances of x_t with x_{t+1}, (T - 1, ..., D, D)."""

    def before(later: Elements, earlier: Elements) -> Elements:
        E, _, L = earlier
        return *_moved(later, earlier), E @ later[2] @ E.mT + L

    _, mean, covariance = (part.flip(0) for part in scan(before, tuple(part.flip(0) for part in back)))
    covariance = (covariance + covariance.mT) / 2
    return StateMoments(mean, covariance), back.gain[:-1] @ covariance[1:]


def sampled(back: Backward, noise: Tensor) -> Tensor:
    """Paths given all sites, from standard normal noise (T, count, ..., D)."""
    root = square_root(back.covariance)[:, None]
    shift = back.mean[:, None] + _times(root, noise)
    return scan(_moved, (back.gain[:, None].flip(0), shift.flip(0)))[1].flip(0)


def simulated(chain: Chain, noise: Tensor) -> Tensor:
    """Paths of the prior, from standard normal noise (T, ..., D)."""
    F, Q, mean, covariance = chain
    first = mean + _times(square_root(covariance), noise[:1])
    shift = torch.cat([first, _times(square_root(Q), noise[1:])])
    moves = F.expand(len(noise), *[1] * (noise.dim() - 2), *F.shape)
    return scan(_moved, (moves, shift))[1]


def _moved(first: Elements, second: Elements) -> Elements:
    """The affine map A x + b of `first`, followed by that of `second`."""
    return second[0] @ first[0], _times(second[0], first[1]) + second[1]


def log_partition(ahead: StateMoments, filtered: StateMoments, h: Tensor, J: Tensor) -> Tensor:
    r"""The logarithm of the sites' expectation under the prior, (...,); NaN if the result is not a distribution.

    Each time adds log ∫ N(x; m, P) exp(h'x - x'Jx/2) = h'm - m'Jm/2 + e'Ve/2 - log|I + P J|/2, with e = h - J m and V
    the filtered covariance.
    """
    mean = ahead.mean
    pull = _times(J, mean)
    error = h - pull
    sign, volume = torch.linalg.slogdet(_eye(J) + ahead.covariance @ J)
    terms = ((h + error) * mean).sum(-1) + (error * _times(filtered.covariance, error)).sum(-1) - volume
    proper = (sign > 0).all(0) & (_least(filtered.covariance) >= 0).all(0)
    return torch.where(proper, terms.sum(0) / 2, torch.nan)


def _least(covariance: Tensor) -> Tensor:
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


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]


def _eye(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
