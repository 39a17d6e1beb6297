r"""Filters and smoothers of Gaussian chains that are accurate for vague, infinite and certain first states.

Time is cut into blocks. One loop runs through all blocks at once, with Kalman's recursion *given* the state s before
the block (the first state, or the last one of the previous block), so that means are affine in s:

.. math::
    x_t \mid s, y \sim N(C_t; A_t s + b_t), \quad p(y \mid s) \propto \exp(h^T s - s^T J s / 2)

Given all rows of its block, the precision of u in s = m + B u is Π + B'JB, where Π is the identity, or 0 for a diffuse
state. C does not contain the covariance of s. Therefore a large covariance of the first state costs no digits, and an
infinite one is a limit that exists. For the first block a square root of the precision is computed by QR from the rows.
After it, the blocks are linked by an associative scan. Smoothing is de Jong's recursion backwards, also given s. The
process noise may be singular.

Tensors are (blocks, steps, groups, ..., columns). Sequences are columns of one group if they share their covariances,
and otherwise groups with one column.

Reference: de Jong, 1989 and 1991; Durbin and Koopman, 2012, sections 4.4 and 5, for smoothing and diffuse states;
Särkkä and García-Fernández, 2021, for the scan.
Checked by: tests/equations/test_state_space.py; tests/equations/test_vague_starts.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesgrad.models.kalman import Chain, Elements, Rows, StateMoments, eye_like, scan, square_root

STEPS = 16  # of a block, at least
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
        X, M: see `Rows.weights`.
        pulled: M H [C, A, b], less X times the target in the last columns.
    """

    before: Tensor
    after: Tensor
    seen: Tensor
    spread: Tensor
    X: Tensor
    M: Tensor
    pulled: Tensor


class _Start(NamedTuple):
    """s = m + B u given the rows before a block; (..., D, columns) and (..., D, D)."""

    mean: Tensor
    root: Tensor


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
    """A chain and its rows, after the loop over time.

    Args:
        moves: F and Q from the state before each time, (blocks, steps, 1, D, D).
        rows: with time as (blocks, steps).
        prior: the diagonal of Π for the first block, (D,).
        length: T.
        steps: of the loop.
        information: h and J on s in each row, (blocks, steps, ...).
        starts: s for each block, given the rows before it.
        solved: u for each block, given also its own rows.
        log_likelihood: (sequences,).
    """

    moves: _Moves
    rows: Rows
    prior: Tensor
    length: int
    steps: list[_Step]
    information: tuple[Tensor, Tensor]
    starts: _Start
    solved: _Solved
    log_likelihood: Tensor

    @property
    def _size(self) -> int:
        return len(self.prior)

    @cached_property
    def _after(self) -> Given:
        return _split(torch.stack([step.after for step in self.steps], 1))

    def filtered(self) -> StateMoments:
        """Each state given the rows up to its time."""
        start = _picked(self.starts, 0)
        first = _solve_first(self.rows, self.steps, self.information, start, self.prior, every=True)
        mean, covariance = (part[None] for part in _total(_picked(self._after, 0), start, first))
        if len(self.starts.mean) > 1:
            start = _Start(*(part[1:, None] for part in self.starts))
            h, J = (part[1:].cumsum(1) for part in self.information)
            later = _total(Given(*(part[1:] for part in self._after)), start, _solve(start, h, J))
            mean, covariance = torch.cat([mean, later[0]]), torch.cat([covariance, later[1]])
        return self._moments(mean, covariance)

    def smoothed(self, *, pairs: bool = False) -> tuple[StateMoments, Tensor | None]:
        """Each state given all rows, and with `pairs` the covariances of x_t with x_{t+1}, (T - 1, ..., D, D)."""
        N, R, N_before, solved = self._backward()
        C, A, b = self._after
        size, start = self._size, _Start(*(part[:, None] for part in self.starts))
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
        size = self._size
        C, A, b = _split(self.steps[-1].after)
        h, J = (part.sum(1) for part in self.information)
        behind = scan(lambda later, earlier: _follow(earlier, later), tuple(part.flip(0) for part in (A, b, C, h, J)))
        h, J = (torch.cat([part.flip(0)[1:], torch.zeros_like(part[:1])]) for part in behind[3:])
        root = square_root(C)
        factor = torch.linalg.cholesky(eye_like(C) + root.mT @ J @ root)
        half = torch.linalg.solve_triangular(factor, root.mT @ torch.cat([J, h], -1), upper=False)
        N = _even(J - half[..., :size].mT @ half[..., :size])  # (I + J C)^-1 J
        h = h - half[..., :size].mT @ half[..., size:] - N @ b  # (I + J C)^-1 (h - J b)
        centre = _Start(self.starts.mean + self.starts.root @ self.solved.mean, self.starts.root @ self.solved.root)
        more, (mean, root, volume, null) = _solve(centre, A.mT @ h, A.mT @ N @ A), self.solved
        solved = _Solved(mean + root @ more.mean, root @ more.root, volume, null)
        R, found = torch.cat([-N @ A, h], -1), []
        for step, H, move in zip(self.steps[::-1], self.rows.H.unbind(1)[::-1], self.moves.transition.unbind(1)[::-1]):
            after, gain, rest = (N, R), step.pulled[..., :size], step.pulled[..., size:]
            N = N - (N @ gain.mT) @ H
            N = N - H.mT @ (gain @ N - step.M @ H)
            R = R - H.mT @ (gain @ R + rest)
            found.append((*after, N))
            N, R = move.mT @ N @ move, move.mT @ R
        N, R, before = (torch.stack(parts[::-1], 1) for parts in zip(*found))
        return N, R, before, _unsqueezed(solved, 1)

    def _moments(self, mean: Tensor, covariance: Tensor) -> StateMoments:
        """(T, sequences, D) and (T, groups, D, D)."""
        mean, covariance = (part.flatten(0, 1)[: self.length] for part in (mean, covariance))
        return StateMoments(mean.mT.flatten(1, 2), covariance)


class _Moves(NamedTuple):
    transition: Tensor
    noise: Tensor


def run_filter(chain: Chain, rows: Rows, length: int) -> Filter:
    """Runs through T = `length` times."""
    steps = max(STEPS, 4 * chain.mean.shape[-1])
    if 2 * steps < length:
        try:
            return _run(chain, rows, length, steps)
        except _Unresolved:
            pass  # a single block takes longer, and is always accurate
    return _run(chain, rows, length, length)


def _run(chain: Chain, rows: Rows, length: int, steps: int) -> Filter:
    blocks, size = -(-length // steps), len(chain.mean)

    def cut(part: Tensor) -> Tensor:
        """(T or 1, ...) as (blocks or 1, steps, ...), filled up with the last entry."""
        if len(part) == 1:
            return part[None].expand(1, steps, *part.shape[1:])
        gap = blocks * steps - length
        filled = [part[:length], part[length - 1 : length].expand(gap, *part.shape[1:])]
        return torch.cat(filled).unflatten(0, (blocks, steps))

    rows, moves = rows.take(cut), _Moves(*map(cut, _moves(chain, length)))
    found = _run_blocks(moves, rows, (blocks, steps, length))
    start, prior = _first(chain)
    information = _information(found, size)
    starts, solved = _link(rows, found, information, start, prior)
    seen, spread, X = (torch.stack(parts, 1) for parts in zip(*((s.seen, s.spread, s.X) for s in found)))
    centre = (starts.mean + starts.root @ solved.mean)[:, None]
    value = rows.value(seen[..., size : 2 * size] @ centre + seen[..., 2 * size :], spread, X)
    weights = torch.cat([prior[None], torch.ones_like(prior).expand(blocks - 1, -1)])[:, None, :, None]
    spent = (weights * solved.mean.square()).sum(-2) + solved.volume[..., None]
    total = value.flatten(0, 1)[:length].sum(0) - spent.sum(0) / 2
    return Filter(moves, rows, prior, length, found, information, starts, solved, total.flatten())


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
    size = moves.noise.shape[-1]
    eye, empty = eye_like(moves.noise), torch.zeros(size, columns).to(moves.noise)
    state = torch.cat([torch.zeros_like(eye), eye, empty], -1).expand(blocks, groups, -1, -1)  # [C, A, b]
    targets = torch.nn.functional.pad(rows.target, (2 * size, 0))
    full, found = length - (blocks - 1) * steps, []  # rows in the last block
    each = zip(*(part.unbind(1) for part in (moves.transition, moves.noise, targets, *rows)))
    for index, (F, Q, target, *parts) in enumerate(each):
        here = type(rows)(*parts)
        moved = F @ state
        state = torch.cat([moved[..., :size] @ F.mT + Q, moved[..., size:]], -1)
        seen = here.H @ state
        spread = seen[..., :size] @ here.H.mT
        X, M = here.weights(spread)
        pulled = X @ (here.scaled(seen) - target)
        if index >= full:
            there = (torch.arange(blocks) < blocks - 1).to(M)[:, None, None, None]
            M, pulled = M * there, pulled * there
        after = state - seen[..., :size].mT @ pulled
        found.append(_Step(state, after, seen, spread, X, M, pulled))
        state = after
    return found


def _information(steps: list[_Step], size: int) -> tuple[Tensor, Tensor]:
    """h and J, the information on s in each row, (blocks, steps, ...)."""
    G, pulled = (torch.stack(parts, 1) for parts in zip(*((s.seen[..., size : 2 * size], s.pulled) for s in steps)))
    found = G.mT @ pulled[..., size:]
    return -found[..., size:], found[..., :size]


def _link(
    rows: Rows, steps: list[_Step], information: tuple[Tensor, Tensor], start: _Start, prior: Tensor
) -> tuple[_Start, _Solved]:
    """s for all blocks given the rows before them, and u given also the rows of the block."""
    ends, solved = _split(steps[-1].after), _solve_first(rows, steps, information, start, prior)
    if len(ends.A) == 1:
        return _Start(*(part[None] for part in start)), _unsqueezed(solved, 0)
    h, J = (part[1:].sum(1) for part in information)
    mean, covariance = _total(_picked(ends, 0), start, solved)
    if solved.null is not None or _costs_digits(covariance, ends.C[0], rows):
        raise _Unresolved
    zero = torch.zeros_like(covariance)
    first = zero, mean, covariance, torch.zeros_like(mean), zero
    C, A, b = (part[1:-1] for part in ends)
    elements = (torch.cat([one[None], rest]) for one, rest in zip(first, (A, b, C, h[:-1], J[:-1])))
    _, mean, covariance, _, _ = scan(_follow, tuple(elements))
    later = _Start(mean, _root(_even(covariance)))
    whole = _solve(later, h, J)
    starts = _Start(*(torch.cat([one.expand_as(rest[0])[None], rest]) for one, rest in zip(start, later)))
    pairs = (solved.mean, whole.mean), (solved.root, whole.root), (solved.volume, whole.volume)
    return starts, _Solved(*(torch.cat([one.expand_as(rest[0])[None], rest]) for one, rest in pairs))


def _follow(i: Elements, j: Elements) -> Elements:
    """Two segments of time in succession: (A, b, C) of the end given the start, and (h, J) about the start."""
    A_i, b_i, C_i, h_i, J_i = i
    A_j, b_j, C_j, h_j, J_j = j
    inner = torch.linalg.inv(eye_like(C_i) + C_i @ J_j)
    left, right = A_j @ inner, (inner @ A_i).mT
    return (
        left @ A_i,
        left @ (b_i + C_i @ h_j) + b_j,
        left @ C_i @ A_j.mT + C_j,
        right @ (h_j - J_j @ b_i) + h_i,
        right @ (J_j @ A_i) + J_i,
    )


def _first(chain: Chain) -> tuple[_Start, Tensor]:
    """The first state, (1, D, 1) and (1, D, D), and the diagonal of Π."""
    mean, covariance, prior = chain.mean[None, :, None], chain.covariance, torch.ones_like(chain.mean)
    if chain.diffuse is None:
        return _Start(mean, _root(covariance)[None]), prior
    known, root = (~chain.diffuse).nonzero()[:, 0], torch.diag(chain.diffuse.to(mean))
    if len(known):  # a finite covariance of and with diffuse states has no effect
        root = root.index_put((known[:, None], known), _root(covariance[known[:, None], known]))
    return _Start(mean, root[None]), prior * ~chain.diffuse


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
    m, B = start
    factor, info = torch.linalg.cholesky_ex(eye_like(J) + B.mT @ (J @ B))
    volume = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    root = torch.linalg.solve_triangular(factor, eye_like(J).expand_as(factor), upper=False).mT
    mean = root @ (root.mT @ (B.mT @ (h - J @ m)))
    return _Solved(mean, root, torch.where(info == 0, volume, torch.nan))


def _solve_first(
    rows: Rows,
    steps: list[_Step],
    information: tuple[Tensor, Tensor],
    start: _Start,
    prior: Tensor,
    *,
    every: bool = False,
) -> _Solved:
    """u given the rows of the first block, or with `every` given the rows up to each step.

    A square root R of the precision of u and z = R u come from QR: the rows may determine some states much more
    accurately than others, and the sum of their information would lose the difference.
    """
    (m, B), size = start, len(prior)
    seen, M = (torch.stack(parts) for parts in zip(*((s.seen[0], s.M[0]) for s in steps)))
    root = rows.root(M)
    if root is None:  # precisions may be negative
        found = (part[0] for part in information)
        return _solve(start, *(part.cumsum(0) if every else part.sum(0) for part in found))
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
        begin = torch.cat(_triangular(torch.cat([begin, row], -2), size), -1)
        found.append(begin)
    R, z = torch.stack(found).split([size, both.shape[-1] - size], -1)
    return _from_root(R, z, bool((prior == 0).any()))


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


def _unsqueezed(solved: _Solved, dim: int) -> _Solved:
    null = None if solved.null is None else solved.null.unsqueeze(dim)
    return _Solved(solved.mean.unsqueeze(dim), solved.root.unsqueeze(dim), solved.volume.unsqueeze(dim), null)


def _split(state: Tensor) -> Given:
    size = state.shape[-2]
    return Given(state[..., :size], state[..., size : 2 * size], state[..., 2 * size :])


def _picked(parts: Any, index: int) -> Any:
    """One block."""
    return type(parts)(*(part[index] for part in parts))


def _even(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2
