r"""Markov chains of states z_t in 1..K: weights π_j of the first, A_ij of transitions, b_j(t) of observations.

.. math::
    p(z) \propto \pi_{z_1} b_{z_1}(1) \prod_{t > 1} A_{z_{t-1} z_t} b_{z_t}(t)

There is no loop over time. Sequences are cut into pieces of about √T/3 steps, and all pieces are processed at once:
first their K x K products, which a scan over pieces combines into the messages at all cuts, then the forward and
backward recursions from there. Weights are logarithms and need not be normalised: exp(E[log A]) is not.

Sums use plain numbers, which are rescaled every few steps. This is exact up to rounding as long as no transition
weight is very small, because terms that underflow are then negligible. Transitions of weight below 1e-30 get that
weight; the expected number of such transitions bounds the error, and if it is not negligible the computation is
repeated with logarithms.

Reference: Rabiner, 1989; Särkkä and García-Fernández, 2021, for scans over time.
Checked by: tests/equations/test_markov.py: sums over all paths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayesgrad.models.kalman import Elements, scan

RARE = 1e-30  # smallest transition weight in plain arithmetic
FAINT = -200.0  # b below e^-200 of the largest is set to 0: less than RARE^2 eps
NEGLIGIBLE = 1e-13  # acceptable expected number of transitions below RARE


class Layout:
    """The layout of rows: pieces sorted by length, longest first, and for each step one row of each piece.

    Args:
        lengths: of the sequences.
        size: maximum length of a piece; None chooses a fast one.

    Attributes:
        rows: the row of the data at each packed position, (N,).
        widths: number of pieces at each step.
    """

    def __init__(self, lengths: Sequence[int], size: int | None = None) -> None:
        whole = np.asarray(lengths, dtype=np.int64)
        if size is None:
            size = max(16, math.isqrt(int(whole.sum())) // 3)
        pieces = -(-whole // size)
        owner = np.repeat(np.arange(len(whole)), pieces)  # the sequence of each piece, in time
        place = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        length = whole[owner] // pieces[owner] + (place < whole[owner] % pieces[owner])
        order = np.argsort(-length, kind="stable")
        begin, length = (np.cumsum(length) - length)[order], length[order]
        width = len(order) - np.searchsorted(length[::-1], np.arange(length[0]), side="right")
        offset = np.cumsum(width) - width
        step = np.repeat(np.arange(len(width)), width)  # of each place
        column = np.arange(len(step)) - offset[step]
        self.lengths = whole.tolist()
        self.widths: list[int] = width.tolist()
        self.rows = torch.as_tensor(begin[column] + step)
        self.column = torch.as_tensor(column)  # of each place its piece
        self.before = torch.as_tensor(offset[step[width[0] :] - 1] + column[width[0] :])  # places one step earlier
        self.last = torch.as_tensor(offset[length - 1] + np.arange(len(order)))  # of each piece
        self.first = torch.as_tensor(place[order] == 0)  # pieces that begin a sequence
        self.owner = torch.as_tensor(owner[order])
        self.order = torch.as_tensor(order)  # of packed pieces, their places in time
        self.rank = torch.as_tensor(np.argsort(order))  # of pieces in time, where they are packed
        self.cut = len(owner) > len(whole)
        self._buffers: dict[str, Tensor] = {}
        self.shifted = bool((self.before == torch.arange(len(self.before))).all())

    def buffer(self, name: str, states: int) -> Tensor:
        """A buffer (K, N), the same at each call, because allocating memory would take longer than the computation."""
        found = self._buffers.get(name)
        if found is None or len(found) != states:
            found = self._buffers[name] = torch.empty(states, len(self.rows), dtype=torch.float64)
        return found

    def unpacked(self, values: Tensor) -> Tensor:
        """(..., N) in the order of the data."""
        found = torch.empty_like(values)
        found[..., self.rows] = values
        return found

    def summed(self, values: Tensor, pieces: Tensor) -> Tensor:
        """Sums for each sequence of values at its positions, (N,), and of its pieces."""
        total = torch.zeros(len(self.lengths), dtype=values.dtype)
        if len(total) == 1:
            return total + values.sum() + pieces.sum()
        total.index_add_(0, self.owner, pieces)
        return total + torch.bincount(self.owner[self.column], values, minlength=len(total))


class Smoothed(NamedTuple):
    """The posterior of the states.

    Args:
        log_weight: log Σ_z p(z) of each sequence, its log-likelihood; -inf if no path is possible.
        shares: P(z_t = k), (K, N), packed; overwritten when the layout is used again.
        pairs: the expected number of each transition, (K, K).
        first: the expected number of sequences that start in each state, (K,).
    """

    log_weight: Tensor
    shares: Tensor
    pairs: Tensor
    first: Tensor


@dataclass(frozen=True)
class Plain:
    """Plain arithmetic with rescaling every `every` steps."""

    every: int
    one: ClassVar[float] = 1.0

    def push(self, matrix: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Σ_k M_jk x_k, along the first dimension."""
        if x.dim() == 2:
            return torch.mm(matrix, x, out=out)
        return torch.mm(matrix, x.flatten(1), out=None if out is None else out.flatten(1)).view(x.shape)

    def weigh(self, x: Tensor, emissions: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mul(x, emissions, out=out)

    def rescale_(self, x: Tensor, scale: Tensor, step: int) -> None:
        """Normalises columns of x, every few steps, and adds the logarithms of their sums to `scale`."""
        if step % self.every == 0:
            total = x.sum(0)
            x /= total
            scale += total.log_()

    def total(self, x: Tensor, scale: Tensor) -> Tensor:
        """The logarithms of sums over the first dimension."""
        return x.sum(0).log_().add_(scale)

    def messages(self, products: Tensor, scale: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
        """Messages from the past and from the future of each piece, (pieces, K), up to a factor.

        Args:
            products: (pieces, K from, K to), each row with its scale, (pieces, K).
            begins: which pieces begin a sequence: their rows are equal, so that they do not depend on earlier pieces.
        """
        return _halved(products * (scale - scale.amax(-1, keepdim=True)).exp()[..., None])


@dataclass(frozen=True)
class Logs:
    """Arithmetic of logarithms, with sums (`torch.logsumexp`) or maxima (`torch.amax`)."""

    reduce: Callable[..., Tensor]
    one: ClassVar[float] = 0.0

    def push(self, matrix: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        found = self.reduce(matrix.view(*matrix.shape, *[1] * (x.dim() - 1)) + x, 1)
        return found if out is None else out.copy_(found)

    def weigh(self, x: Tensor, emissions: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.add(x, emissions, out=out)

    def rescale_(self, x: Tensor, scale: Tensor, step: int) -> None:
        """Does nothing."""

    def total(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.reduce(x, 0)

    def messages(self, products: Tensor, scale: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
        """Impossible sequences must not affect others: messages are reset at the ends of sequences."""
        ends = torch.cat([begins[1:], begins[:1]])

        def join(left: Tensor, right: Tensor) -> Tensor:
            return self.reduce(left[..., :, :, None] + right[..., None, :, :], -2)

        def ahead(left: Elements, right: Elements) -> Elements:
            return torch.where(right[1][:, None, None], right[0], join(left[0], right[0])), left[1] | right[1]

        def behind(right: Elements, left: Elements) -> Elements:
            return torch.where(left[1][:, None, None], left[0], join(left[0], right[0])), left[1] | right[1]

        past = scan(ahead, (products, begins))[0][:, 0]
        future = self.reduce(scan(behind, (products.flip(0), ends.flip(0)))[0], -1).flip(0)
        past, future = past.roll(1, 0), future.roll(-1, 0)
        top = self.reduce(past, -1)[:, None]
        past -= torch.where(torch.isinf(top), 0, top)
        return past, torch.where(ends[:, None], 0, future)


Arithmetic = Plain | Logs


def smoothed(initial: Tensor, transitions: Tensor, emissions: Tensor, layout: Layout) -> Smoothed:
    """The posterior of states.

    Args:
        initial: log π, (K,).
        transitions: log A, (K, K), from rows to columns; -inf for impossible transitions.
        emissions: log b, (K, N), packed; modified in place.
    """
    top = _begin_(initial, emissions, layout)
    found, odd = _plain(transitions, emissions, top, layout)
    return found if odd <= NEGLIGIBLE else _logarithmic(transitions, emissions, top, layout)


def _begin_(initial: Tensor, emissions: Tensor, layout: Layout) -> Tensor:
    """Adds log π to the first positions; returns the maximum of each column, -inf if no state is possible."""
    count = len(layout.first)
    emissions[:, :count] += torch.where(layout.first, initial[:, None], 0)
    top = emissions.amax(0)
    never = torch.isneginf(top)
    if never.any():
        emissions[:, never] = 0
    return top


def _plain(transitions: Tensor, emissions: Tensor, top: Tensor, layout: Layout) -> tuple[Smoothed, float]:
    """Also returns the expected number of transitions below RARE."""
    finite = torch.where(torch.isneginf(top), 0, top)
    weights = torch.sub(emissions, finite, out=layout.buffer("weights", len(transitions)))
    weights = torch.threshold_(weights, FAINT, -math.inf).exp_()
    A = transitions.exp()
    floored = A.clamp(min=RARE)
    every = int(100 / max(1, -math.log10(float(floored.min()))))
    arithmetic = Plain(min(every, 32))
    entering, leaving = _cuts(arithmetic, floored, weights, layout)
    alpha, ahead, total = _forward(arithmetic, floored, weights, entering, layout)
    after = _backward(arithmetic, floored, weights, leaving, layout)
    shares = ahead.mul_(after)
    z = shares.sum(0)
    shares /= z
    after /= z
    count = len(layout.first)
    earlier = alpha[:, : len(layout.before)] if layout.shifted else alpha[:, layout.before]
    pairs = earlier @ after[:, count:].mT
    if layout.cut:
        pairs += torch.where(layout.first, 0, entering) @ after[:, :count].mT
    odd = torch.where(A < RARE, floored * pairs, 0).sum()
    first = shares[:, :count] @ layout.first.to(shares)
    return Smoothed(layout.summed(top, total), shares, A * pairs, first), float(odd)


def _logarithmic(transitions: Tensor, emissions: Tensor, top: Tensor, layout: Layout) -> Smoothed:
    arithmetic = Logs(torch.logsumexp)
    entering, leaving = _cuts(arithmetic, transitions, emissions, layout)
    alpha, ahead, total = _forward(arithmetic, transitions, emissions, entering, layout)
    after = _backward(arithmetic, transitions, emissions, leaving, layout)
    after -= torch.logsumexp(ahead + after, 0)
    shares = (ahead + after).exp_()
    count = len(layout.first)
    earlier = torch.cat([torch.where(layout.first, -math.inf, entering), alpha[:, layout.before]], 1)
    pairs = torch.stack([(earlier[i] + after + transitions[i, :, None]).exp_().sum(1) for i in range(len(transitions))])
    first = shares[:, :count] @ layout.first.to(shares)
    return Smoothed(layout.summed(torch.where(torch.isneginf(top), top, 0), total), shares, pairs, first)


def best(initial: Tensor, transitions: Tensor, emissions: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The Viterbi path: its log weight for each sequence, and its states (N,), packed. See `smoothed`."""
    top = _begin_(initial, emissions, layout)
    arithmetic, count = Logs(torch.amax), len(layout.first)
    entering, _ = _cuts(arithmetic, transitions, emissions, layout)
    alpha, _, total = _forward(arithmetic, transitions, emissions, entering, layout)
    earlier = torch.cat([entering, alpha[:, layout.before]], 1)
    pointers = _origins(earlier, transitions)
    paths = torch.empty_like(pointers)  # for each piece one path per final state
    now = torch.arange(len(transitions))[:, None].repeat(1, count)
    for path, pointer in reversed(list(zip(paths.split(layout.widths, 1), pointers.split(layout.widths, 1)))):
        width = path.shape[1]
        path[:] = now[:, :width]
        now[:, :width] = pointer.gather(0, now[:, :width])
    ends, links, firsts = (x.tolist() for x in (alpha[:, layout.last].argmax(0), now.mT, layout.first))
    chosen, later = [0] * count, -1
    for place in reversed(layout.rank.tolist()):
        chosen[place] = ends[place] if later < 0 else later
        later = -1 if firsts[place] else links[place][chosen[place]]
    states = paths.gather(0, torch.tensor(chosen)[layout.column][None])[0].long()
    return layout.summed(torch.where(torch.isneginf(top), top, 0), total), states


def _origins(earlier: Tensor, transitions: Tensor) -> Tensor:
    """The best previous state of each state, (K, N). A loop, because argmax along a short dimension is slow."""
    height = earlier[0] + transitions[0, :, None]
    found = torch.zeros_like(height, dtype=torch.int16)
    for i in range(1, len(transitions)):
        other = earlier[i] + transitions[i, :, None]
        found.masked_fill_(other > height, i)
        torch.maximum(height, other, out=height)
    return found


def _cuts(arithmetic: Arithmetic, transitions: Tensor, weights: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Messages at the cuts between pieces, from the past and from the future, (K, pieces)."""
    K, count = len(transitions), len(layout.first)
    if not layout.cut:
        neutral = torch.full((K, count), arithmetic.one, dtype=transitions.dtype)
        return neutral, neutral
    emissions = weights[:, None].split(layout.widths, -1)
    x = torch.where(layout.first, arithmetic.one, transitions.mT[:, :, None])  # (K to, K from, pieces)
    x = arithmetic.weigh(x, emissions[0]).contiguous()
    scale = torch.zeros(K, count, dtype=transitions.dtype)
    spare, onward = torch.empty_like(x), transitions.mT.contiguous()
    for step, width in enumerate(layout.widths[1:], 1):
        if width == count:
            x, spare = arithmetic.push(onward, x, out=spare), x
            part = x
        else:
            part = arithmetic.push(onward, x[..., :width])
        arithmetic.weigh(part, emissions[step], out=part)
        arithmetic.rescale_(part, scale[:, :width], step)
        if width < count:
            x[..., :width] = part
    arithmetic.rescale_(x, scale, 0)
    found = arithmetic.messages(x.permute(2, 1, 0)[layout.rank], scale.mT[layout.rank], layout.first[layout.rank])
    past, future = (part[layout.order].mT.contiguous() for part in found)
    return past, future


def _halved(products: Tensor) -> tuple[Tensor, Tensor]:
    """Messages from both sides to each of a chain of matrices, by recursion on products of pairs."""
    count = len(products)
    past, future = torch.ones_like(products[..., 0]), torch.ones_like(products[..., 0])
    if count == 1:
        return past / past.shape[-1], future
    even, odd = products[: count - 1 : 2], products[1::2]
    pairs = even @ odd
    pairs /= pairs.amax((1, 2), keepdim=True)
    outer_past, outer_future = _halved(torch.cat([pairs, products[-1:]]) if count % 2 else pairs)
    past[::2], half = outer_past, len(odd)
    future[1::2] = outer_future[:half]
    if count % 2:
        future[-1] = outer_future[-1]
    moved = (outer_past[:half, None] @ even)[:, 0]
    past[1::2] = moved / moved.sum(-1, keepdim=True)
    moved = (odd @ outer_future[:half, :, None])[..., 0]
    future[: count - 1 : 2] = moved / moved.amax(-1, keepdim=True)
    return past, future


def _forward(
    arithmetic: Arithmetic, transitions: Tensor, weights: Tensor, entering: Tensor, layout: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    """Messages from the past, with and without the observation at t, (K, N), and the log weight added by each piece."""
    alpha, ahead = (layout.buffer(name, len(transitions)) for name in ("alpha", "ahead"))
    scale, onward = torch.zeros(len(layout.first), dtype=weights.dtype), transitions.mT.contiguous()
    emissions, found, plain = (part.split(layout.widths, 1) for part in (weights, alpha, ahead))
    plain[0][:] = torch.where(layout.first, arithmetic.one, arithmetic.push(onward, entering))
    now = arithmetic.weigh(plain[0], emissions[0], out=found[0])
    for step, width in enumerate(layout.widths[1:], 1):
        arithmetic.push(onward, now if now.shape[1] == width else now[:, :width], out=plain[step])
        now = arithmetic.weigh(plain[step], emissions[step], out=found[step])
        arithmetic.rescale_(now, scale[:width], step)
    return alpha, ahead, arithmetic.total(alpha[:, layout.last], scale)


def _backward(arithmetic: Arithmetic, transitions: Tensor, weights: Tensor, leaving: Tensor, layout: Layout) -> Tensor:
    """Messages from the future, with the observation at t, (K, N)."""
    after, now, idle = layout.buffer("after", len(transitions)), leaving.clone(), torch.zeros_like(leaving[0])
    emissions, found = weights.split(layout.widths, 1), after.split(layout.widths, 1)
    for step in range(len(layout.widths) - 1, -1, -1):
        width = layout.widths[step]
        part = now if width == now.shape[1] else now[:, :width]
        arithmetic.weigh(part, emissions[step], out=found[step])
        if step:
            arithmetic.push(transitions, found[step], out=part)
            arithmetic.rescale_(part, idle[:width], step)
    return after
