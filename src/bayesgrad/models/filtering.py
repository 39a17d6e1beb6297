r"""Filters and smoothers of Gaussian chains that are accurate for vague, infinite and certain first states.

Time is cut into blocks. One loop runs through all blocks at once, with Kalman's recursion *given* the state s before
the block (the first state, or the last one of the previous block), so that means are affine in s:

.. math::
    x_t \mid s, y \sim N(C_t; A_t s + b_t), \quad p(y \mid s) \propto \exp(h^T s - s^T J s / 2)

A second loop passes the distribution of s from block to block: with s = m + B u, the precision of u is Π + B'JB, where
Π is the identity, or 0 for a diffuse state. C does not contain the covariance of s. Therefore a large covariance of the
first state costs no digits, and an infinite one is a limit that exists. For the first block a square root of the
precision is computed by QR from the rows. Smoothing is de Jong's recursion backwards, also given s. The process noise
may be singular. There are about 2 √(2T) steps of batched products of small matrices.

Tensors are (blocks, steps, groups, ..., columns). Sequences are columns of one group if they share their covariances,
and otherwise groups with one column.

Reference: de Jong, 1989 and 1991; Durbin and Koopman, 2012, sections 4.4 and 5, for smoothing and diffuse states.
Checked by: tests/equations/test_state_space.py; tests/equations/test_vague_starts.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from bayesgrad.models.kalman import Chain, Rows, StateMoments, eye_like, square_root

DIGITS = 1e-11  # the relative accuracy that a large covariance between two blocks may cost


class Given(NamedTuple):
    """States given s: N(A s + b, C); (..., D, D), (..., D, D) and (..., D, columns)."""

    C: Tensor
    A: Tensor
    b: Tensor


class _Step(NamedTuple):
    """One step of all blocks.

    Args:
        before, after: [C, A, b] without and with the row of this step.
        seen: H [C, A, b].
        spread: H C H'.
        X, M, volume: see `Rows.weights`.
        pulled: M H [C, A, b], less X times the target in the last columns.
    """

    before: Tensor
    after: Tensor
    seen: Tensor
    spread: Tensor
    X: Tensor
    M: Tensor
    pulled: Tensor
    volume: Tensor


class _Start(NamedTuple):
    """s = m + B u with u ~ N(0, diag(prior)^-1); (groups, D, columns), (groups, D, D) and (D,)."""

    mean: Tensor
    root: Tensor
    prior: Tensor


class _Solved(NamedTuple):
    """u ~ N(mean, root root'), with log|precision|; along the columns of `null`, if any, the variance is infinite."""

    mean: Tensor
    root: Tensor
    volume: Tensor
    null: Tensor | None = None


class _Unresolved(Exception):
    """Between blocks, a covariance is infinite, costs digits, or has no differentiable root."""


@dataclass
class Filter:
    """A chain and its rows, after the loops over time.

    Args:
        moves: F and Q from the state before each time, (blocks or 1, steps or 1, 1, D, D).
        rows: with time as (blocks, steps).
        length: T.
        steps: of the loop.
        starts: s for each block, given the rows before it.
        solved: u for each block, given also its own rows.
        log_likelihood: (sequences,).
    """

    moves: _Moves
    rows: Rows
    length: int
    steps: list[_Step]
    starts: list[_Start]
    solved: list[_Solved]
    log_likelihood: Tensor

    @property
    def _size(self) -> int:
        return self.steps[0].after.shape[-2]

    @cached_property
    def _after(self) -> Given:
        return _split(torch.stack([step.after for step in self.steps], 1))

    def filtered(self) -> StateMoments:
        """Each state given the rows up to its time."""
        start, rest = self.starts[0], self.starts[1:]
        first = _solve_first(self.rows, self.steps, start, every=True)
        mean, covariance = (part[None] for part in _total(Given(*(part[0] for part in self._after)), start, first))
        if rest:
            start = _stacked(rest)
            seen, pulled = (torch.stack(parts, 1)[1:] for parts in zip(*((s.seen, s.pulled) for s in self.steps)))
            h, J = (part.cumsum(1) for part in _information(seen, pulled, self._size))
            later = _total(Given(*(part[1:] for part in self._after)), start, _solve(start, h, J))
            mean, covariance = torch.cat([mean, later[0]]), torch.cat([covariance, later[1]])
        return self._moments(mean, covariance)

    def smoothed(self, *, pairs: bool = False) -> tuple[StateMoments, Tensor | None]:
        """Each state given all rows, and with `pairs` the covariances of x_t with x_{t+1}, (T - 1, ..., D, D)."""
        N, R, N_before, solved = self._backward()
        C, A, b = self._after
        size, start = C.shape[-1], _stacked(self.starts)
        moved = C @ R
        inside = Given(_even(C - C @ N @ C), A + moved[..., :size], b + moved[..., size:])
        states = self._moments(*_total(inside, start, solved))
        if not pairs:
            return states, None
        # Of the state before each time, which is s at the first step of a block.
        first = torch.zeros_like(C[:, :1]), eye_like(C).expand_as(C[:, :1])
        C, A = (torch.cat([at, part[:, :-1]], 1) for at, part in zip(first, (C, inside.A)))
        ahead = _split(torch.stack([step.before for step in self.steps], 1)).C
        across = C @ self.moves.transition.mT
        spread = start.root @ solved.root
        found = across - across @ (N_before @ ahead) + (A @ spread) @ (inside.A @ spread).mT
        return states, found.flatten(0, 1)[1 : self.length]

    def _backward(self) -> tuple[Tensor, Tensor, Tensor, _Solved]:
        """De Jong's recursion, and u given all rows.

        N and R = [R_1, R_2], after each row, such that the rows from there on change a state N(A s + b, C) by
        C (R_1 s + R_2) and -C N C; N also before each row.
        """
        seen, pulled = (torch.stack(parts, 1) for parts in zip(*((step.seen, step.pulled) for step in self.steps)))
        size = self._size
        h_own, J_own = (part.sum(1) for part in _information(seen, pulled, size))
        ends = _split(self.steps[-1].after)
        h, N = torch.zeros_like(h_own[-1]), torch.zeros_like(J_own[-1])
        last, solved = [], []
        for k in reversed(range(len(self.starts))):
            C, A, b = (part[k] for part in ends)
            root = square_root(C)
            factor = torch.linalg.cholesky(eye_like(C) + root.mT @ N @ root)
            half = torch.linalg.solve_triangular(factor, root.mT @ torch.cat([N, h], -1), upper=False)
            h = h - half[..., :size].mT @ half[..., size:]
            N = _even(N - half[..., :size].mT @ half[..., :size])  # (I + N C)^-1 N
            h = h - N @ b  # (I + N C)^-1 (h - N b)
            last.append((N, torch.cat([-N @ A, h], -1)))
            start, own = self.starts[k], self.solved[k]
            centre = _Start(start.mean + start.root @ own.mean, start.root @ own.root, torch.ones_like(start.prior))
            more = _solve(centre, A.mT @ h, A.mT @ N @ A)
            solved.append(_Solved(own.mean + own.root @ more.mean, own.root @ more.root, more.volume, own.null))
            h, N = h_own[k] + A.mT @ h, _even(J_own[k] + A.mT @ N @ A)
        N, R = (torch.stack(torch.broadcast_tensors(*parts[::-1])) for parts in zip(*last))
        found = []
        for index in reversed(range(len(self.steps))):
            step, after = self.steps[index], (N, R)
            H, move = _at(self.rows.H, index), _at(self.moves.transition, index)
            gain, rest = step.pulled[..., :size], step.pulled[..., size:]
            N = N - (N @ gain.mT) @ H
            N = N - H.mT @ (gain @ N - step.M @ H)
            R = R - H.mT @ (gain @ R + rest)
            found.append((*after, N))
            N, R = move.mT @ N @ move, move.mT @ R
        N, R, before = (torch.stack(torch.broadcast_tensors(*parts[::-1]), 1) for parts in zip(*found))
        parts = [torch.stack(torch.broadcast_tensors(*part))[:, None] for part in [*zip(*solved[::-1])][:3]]
        return N, R, before, _Solved(*parts, None if solved[0].null is None else solved[0].null[None, None])

    def _moments(self, mean: Tensor, covariance: Tensor) -> StateMoments:
        """(T, sequences, D) and (T, groups, D, D)."""
        mean, covariance = (part.flatten(0, 1)[: self.length] for part in (mean, covariance))
        return StateMoments(mean.mT.flatten(1, 2), covariance)


class _Moves(NamedTuple):
    transition: Tensor
    noise: Tensor


def run_filter(chain: Chain, rows: Rows, length: int) -> Filter:
    """Runs through T = `length` times."""
    steps = max(math.isqrt(2 * length) + 1, 4 * chain.mean.shape[-1], 16)
    if 2 * steps < length:
        try:
            return _run(chain, rows, length, steps)
        except _Unresolved:
            pass  # a single block takes longer, and is always accurate
    return _run(chain, rows, length, length)


def _run(chain: Chain, rows: Rows, length: int, steps: int) -> Filter:
    blocks, size = -(-length // steps), len(chain.mean)

    def cut(part: Tensor) -> Tensor:
        """(T or 1, ...) as (blocks or 1, steps or 1, ...), filled up with the last entry."""
        if len(part) == 1:
            return part[None]
        gap = blocks * steps - length
        filled = [part[:length], part[length - 1 : length].expand(gap, *part.shape[1:])]
        return torch.cat(filled).unflatten(0, (blocks, steps))

    rows, moves = rows.take(cut), _Moves(*map(cut, _moves(chain, length)))
    found = _run_blocks(moves, rows, (blocks, steps, length))
    seen, spread, X, pulled, volume = (
        torch.stack(parts, 1) for parts in zip(*((s.seen, s.spread, s.X, s.pulled, s.volume) for s in found))
    )
    starts, solved = _link(chain, rows, found, *(part.sum(1) for part in _information(seen, pulled, size)))
    centre = torch.stack([s.mean + s.root @ u.mean for s, u in zip(starts, solved)])[:, None]
    value = rows.value(seen[..., size : 2 * size] @ centre + seen[..., 2 * size :], spread, X, volume)
    total = value.flatten(0, 1)[:length].sum(0)
    for start, own in zip(starts, solved):
        total = total - ((start.prior[..., None] * own.mean.square()).sum(-2) + own.volume[..., None]) / 2
    return Filter(moves, rows, length, found, starts, solved, total.flatten())


def _moves(chain: Chain, length: int) -> tuple[Tensor, Tensor]:
    """F and Q from the state before each time to its state; nothing moves to the first time."""
    first = torch.eye(len(chain.mean)).to(chain.mean), torch.zeros_like(chain.covariance)
    F, Q = (
        torch.cat([at[None], part[: length - 1] if part.dim() == 3 else part.expand(length - 1, -1, -1)])
        for at, part in zip(first, chain[:2])
    )
    return F[:, None], Q[:, None]


def _run_blocks(moves: _Moves, rows: Rows, layout: tuple[int, int, int]) -> list[_Step]:
    """Kalman's recursion given s, for all blocks at once."""
    blocks, steps, length = layout
    groups, _, columns = rows.target.shape[-3:]
    F = moves.transition
    size = F.shape[-1]
    eye, empty = eye_like(F), torch.zeros(size, columns).to(F)
    state = torch.cat([torch.zeros_like(eye), eye, empty], -1).expand(blocks, groups, -1, -1)  # [C, A, b]
    full, found = length - (blocks - 1) * steps, []  # rows in the last block
    for index in range(steps):
        move, here = _at(F, index), rows.take(lambda part: _at(part, index))  # noqa: B023
        state = move @ state
        state = torch.cat([state[..., :size] @ move.mT + _at(moves.noise, index), state[..., size:]], -1)
        seen = here.H @ state
        spread = seen[..., :size] @ here.H.mT
        X, M, volume = here.weights(spread)
        pulled = M @ seen - torch.nn.functional.pad(X @ here.target, (2 * size, 0))
        if index >= full:
            there = (torch.arange(blocks) < blocks - 1).to(M)[:, None, None, None]
            M, pulled = M * there, pulled * there
        after = state - seen[..., :size].mT @ pulled
        found.append(_Step(state, after, seen, spread, X, M, pulled, volume))
        state = after
    return found


def _information(seen: Tensor, pulled: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """h and J, the information on s in each row."""
    found = seen[..., size : 2 * size].mT @ pulled[..., size:]
    return -found[..., size:], found[..., :size]


def _link(chain: Chain, rows: Rows, steps: list[_Step], h: Tensor, J: Tensor) -> tuple[list[_Start], list[_Solved]]:
    """The starts of all blocks given the rows before them, and u given also the rows of the block."""
    start, ends = _first(chain), _split(steps[-1].after)
    starts, found = [start], [_solve_first(rows, steps, start)]
    for k in range(1, len(h)):
        C, A, b = (part[k - 1] for part in ends)
        own = found[-1]
        half = A @ start.root @ own.root
        covariance = _even(C + half @ half.mT)
        if k == 1 and (own.null is not None or _costs_digits(covariance, C, rows)):
            raise _Unresolved
        mean = A @ (start.mean + start.root @ own.mean) + b
        start = _Start(mean, _root(covariance), torch.ones_like(chain.mean))
        starts.append(start)
        found.append(_solve(start, h[k], J[k]))
    return starts, found


def _first(chain: Chain) -> _Start:
    mean, covariance, prior = chain.mean[None, :, None], chain.covariance, torch.ones_like(chain.mean)
    if chain.diffuse is None:
        return _Start(mean, _root(covariance)[None], prior)
    known, root = (~chain.diffuse).nonzero()[:, 0], torch.diag(chain.diffuse.to(mean))
    if len(known):  # a finite covariance of and with diffuse states has no effect
        root = root.index_put((known[:, None], known), _root(covariance[known[:, None], known]))
    return _Start(mean, root[None], prior * ~chain.diffuse)


def _costs_digits(covariance: Tensor, new: Tensor, rows: Rows) -> bool:
    """Whether what is left of the covariance of the first state is too large beside the noise of rows."""
    large, new = (part.detach().diagonal(dim1=-2, dim2=-1) for part in (covariance, new))
    left = torch.where(large > 1e3 * new, large, 0).amax()
    return bool(torch.finfo(left.dtype).eps * left * rows.precision() > DIGITS)


def _root(covariance: Tensor) -> Tensor:
    factor, info = torch.linalg.cholesky_ex(covariance)
    if not info.any():
        return factor
    if covariance.requires_grad:
        raise _Unresolved
    return square_root(covariance)


def _solve(start: _Start, h: Tensor, J: Tensor) -> _Solved:
    """u given information on s = m + B u, for Π = I."""
    m, B, _ = start
    factor, info = torch.linalg.cholesky_ex(eye_like(J) + _even(B.mT @ J @ B))
    volume = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    root = torch.linalg.solve_triangular(factor, eye_like(J).expand_as(factor), upper=False).mT
    mean = root @ (root.mT @ (B.mT @ (h - J @ m)))
    return _Solved(mean, root, torch.where(info == 0, volume, torch.nan))


def _solve_first(rows: Rows, steps: list[_Step], start: _Start, *, every: bool = False) -> _Solved:
    """u given the rows of the first block, or with `every` given the rows up to each step.

    A square root R of the precision of u and z = R u come from QR: the rows may determine some states much more
    accurately than others, and the sum of their information would lose the difference.
    """
    m, B, prior = start
    size = B.shape[-1]
    seen, pulled, M = (
        torch.stack([part[0] for part in parts]) for parts in zip(*((s.seen, s.pulled, s.M) for s in steps))
    )
    root = rows.root(M)
    if root is None:  # precisions may be negative
        h, J = _information(seen, pulled, size)
        return _solve(start, *(part.cumsum(0) if every else part.sum(0) for part in (h, J)))
    here = rows.take(lambda part: part[0])
    G = seen[..., size : 2 * size]
    both = torch.cat([G @ B, here.target - seen[..., 2 * size :] - G @ m], -1)
    both = root @ both.expand(*torch.broadcast_shapes(both.shape[:-2], root.shape[:-2]), *both.shape[-2:])
    begin = torch.cat([torch.diag(prior.sqrt()), torch.zeros_like(both[0, 0, :1]).expand(size, -1)[:, size:]], -1)
    begin = begin.expand(both.shape[1], -1, -1)
    if not every:
        whole = torch.cat([begin, both.transpose(0, 1).flatten(1, 2)], -2)
        return _from_root(*_triangular(whole, size), bool((prior == 0).any()))
    found = []
    for row in both:
        R, z = _triangular(torch.cat([begin, row], -2), size)
        found.append((R, z))
        begin = torch.cat([R, z], -1)
    return _from_root(*(torch.stack(parts) for parts in zip(*found)), bool((prior == 0).any()))


def _triangular(whole: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """R and z of the least squares problem R u = z, for rows [design, target]."""
    Q, R = torch.linalg.qr(whole[..., :size])
    return R, Q.mT @ whole[..., size:]


def _from_root(R: Tensor, z: Tensor, diffuse: bool) -> _Solved:
    """u for R u ~ N(z, I). Where R is singular, the limit for precisions that vanish there, and infinite variances."""
    size, null = R.shape[-1], None
    count = unit = torch.zeros(()).to(R)
    if diffuse:
        scale = R.detach().square().sum(-2, keepdim=True).sqrt()
        scale = torch.where(scale > 0, scale, 1)
        _, values, vectors = torch.linalg.svd(R.detach() / scale)
        small = values < 64 * size * torch.finfo(R.dtype).eps
        if bool(small.any()):
            basis, _, _ = torch.linalg.svd(torch.where(small[..., None, :], vectors.mT / scale.mT, 0))
            count, unit = small.sum(-1), scale.amax((-2, -1))
            null = torch.where((torch.arange(size) < count[..., None])[..., None, :], basis, 0)
            rows = torch.cat([R, unit[..., None, None] * null.mT], -2)
            R, z = _triangular(torch.cat([rows, torch.cat([z, torch.zeros_like(z)], -2)], -1), size)
            count, unit = count.to(R), 2 * unit.log()
    root = torch.linalg.solve_triangular(R, eye_like(R).expand_as(R), upper=True)
    mean, volume = root @ z, 2 * R.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1) - count * unit
    if null is not None:
        mean, root = (part - null @ (null.mT @ part) for part in (mean, root))
    return _Solved(mean, root, volume, null)


def _total(given: Given, start: _Start, solved: _Solved) -> tuple[Tensor, Tensor]:
    """Mean and covariance of A s + b + N(0, C) for s = m + B u."""
    C, A, b = given
    spread = A @ start.root
    half = spread @ solved.root
    mean, covariance = A @ start.mean + spread @ solved.mean + b, _even(C + half @ half.mT)
    if solved.null is not None:
        free = spread @ solved.null
        free = free @ free.mT
        limit = 1e-12 * free.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None].clamp(min=1e-12)
        covariance = torch.where(free.abs() > limit, torch.sign(free) * math.inf, covariance)
    return mean, covariance


def _split(state: Tensor) -> Given:
    size = state.shape[-2]
    return Given(state[..., :size], state[..., size : 2 * size], state[..., 2 * size :])


def _stacked(starts: Sequence[_Start]) -> _Start:
    """Starts of blocks, with a dimension for the steps of a block."""
    mean, root, _ = (torch.stack(torch.broadcast_tensors(*parts))[:, None] for parts in zip(*starts))
    return _Start(mean, root, starts[-1].prior)


def _at(part: Tensor, step: int) -> Tensor:
    """One step of all blocks."""
    return part[:, step if part.shape[1] > 1 else 0]


def _even(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2
