"""Finds out which rows of a layer belong to which example, by backpropagation of random weights.

If the outputs of example j are multiplied by a weight w_j, the errors of its rows must be multiplied by w_j. Weights
are powers of two, which change no rounding, so this holds exactly in any precision, but for sums in random order. All
layouts (outer, N, inner) of a layer's rows are compared; see `layers.layout`. A layer that none of them fits mixes
examples, or has them in another order, which may depend on the data: it has no per-example gradients.

A layout holds for all passes with the same shapes, unless the graph has an operation above the layer that selects or
moves rows (an index, `scatter`, `sort`). Then the layouts of rows without further dimensions are searched in each pass,
and others whenever the number of passes has doubled. A layer whose layout has changed has none from then on. A pass is
also searched if it calls a layer that earlier ones with the same shapes did not record: it was frozen, or left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from bayesgrad import layers
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.call import SITE, LayerCall, RecordedLayer
from bayesgrad.layers.graph import COMPILED_GRAPH, below
from bayesgrad.layers.layout import MIXED, RowLayout

ATTEMPTS = 8  # with other data, if rows without an error leave several possibilities
CLEARLY = 8.0  # the ratio of differences from which one layout fits better than another
SELECTIONS = ("Index", "Gather", "Scatter", "MaskedSelect", "MaskedScatter", "Take", "Sort", "Topk", "Embedding")
Backpropagate = Callable[[Tensor, Tensor], list[LayerCall]]
Shapes = tuple[tuple[torch.Size, ...], int]


class RowLayouts:
    """The layouts of a model's layers, found once for each shape of the outputs and of the layers' errors.

    Args:
        tolerant: whether modules that are known to mix examples (BatchNorm in training mode) are allowed. Layouts are
            then those with batch statistics that do not depend on the examples.
        anywhere: whether a flag is true in any process, if all of them have to run the same passes.
    """

    def __init__(self, tolerant: bool = False, anywhere: Callable[[bool], bool] = bool) -> None:
        self.tolerant, self.anywhere = tolerant, anywhere
        self._found: dict[tuple[Shapes, str, torch.Size], RowLayout] = {}
        self._shared: set[tuple[Shapes, str, torch.Size]] = set()  # layers whose rows belong to several examples
        self._hidden: set[Shapes] = set()  # outputs of models that cannot be searched
        self._attempts: Counter[Any] = Counter()
        self._settled: set[Any] = set()
        self._searched: dict[Any, set[str]] = {}  # layers that passes which were searched have called, if that is known
        self._moving: dict[Any, bool] = {}  # passes whose layouts may depend on data, and whether each is searched
        self._later: Counter[Any] = Counter()  # how many of them came after the first search

    def attach(
        self, calls: Sequence[LayerCall], outputs: Tensor, backpropagate: Backpropagate, group: int = 1
    ) -> list[LayerCall]:
        """The calls of one pass with their layouts.

        Args:
            calls: from some direction of the outputs.
            outputs: of the model, with their graph.
            backpropagate: as in `LayerRecorder`.
            group: the number of rows of the outputs that are one example.
        """
        what = tuple((call.name, call.error.shape) for call in calls)
        self.search([outputs], backpropagate, group, what, {call.name for call in calls})
        return [self.of(call, (outputs.shape,), group) for call in calls]

    def of(self, call: LayerCall, outputs: tuple[torch.Size, ...], group: int) -> LayerCall:
        """A call with its layout; if that is not known, the first dimension must have one index for each example.

        The number of rows of a layer that was searched with another number of them may depend on data. If the graph
        is hidden, no other dimension must have as many indices: it may be that of examples.
        """
        key, shape = (outputs, group), call.error.shape
        layout = self._found.get((key, call.name, shape))
        if layout is None:
            examples = outputs[0][0] // group
            others = [other for where, name, other in self._found if (where, name) == (key, call.name)]
            fits = layers.examples_in(call.module, call.input) == examples
            selected = any(_is_flat(call) or other[:1] != shape[:1] for other in others)
            anywhere = isinstance(call.module, (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm))
            square = key in self._hidden and anywhere and shape[:-1].count(examples) > 1
            layout = RowLayout(1, examples) if fits and not (selected or square) else MIXED
        return replace(call, layout=layout)

    def is_shared(self, call: LayerCall, outputs: torch.Size, group: int) -> bool:
        """Whether a layer computes something once for all examples, as far as a search has shown it.

        If no search was possible, the number of rows decides.
        """
        key = (outputs,), group
        if key in self._hidden:
            return layers.leading_rows(call.module, call.error) % (outputs[0] // group) != 0
        return (key, call.name, call.error.shape) in self._shared

    def search(
        self,
        outputs: Sequence[Tensor],
        backpropagate: Backpropagate,
        group: int,
        what: Any,
        called: Iterable[str] = (),
        once: bool = False,
    ) -> None:
        """Finds the layouts of the layers that the outputs depend on, unless it was done before.

        Args:
            outputs: with the same number of examples.
            what: distinguishes passes with outputs of the same shapes.
            called: the names of layers that the pass has called, if they may be others than in the pass before.
            once: whether it does not matter if layouts depend on data.
        """
        key = tuple(t.shape for t in outputs), group
        known = self._searched.get((key, what), set())
        due = (key, what) not in self._settled or not known.issuperset(called)
        if not self.anywhere(due or (not once and self._is_due((key, what)))):
            return
        self._searched[key, what] = known.union(called)
        if self.tolerant and COMPILED_GRAPH in {node.name() for node in below(t.grad_fn for t in outputs)}:
            self._settled.add((key, what))  # statistics of a normalisation that is compiled cannot be held constant
            self._hidden.add(key)
            return
        self._attempts[key, what] += 1
        generator = torch.Generator().manual_seed(self._attempts[key, what] - 1)
        directions = [torch.randn(t.shape, dtype=torch.float64, generator=generator).to(t) for t in outputs]
        weights = 2.0 ** (torch.randperm(len(outputs[0]) // group, generator=generator) % 4)
        rows = weights.repeat_interleave(group)
        with _constant_statistics(outputs) if self.tolerant else nullcontext():
            try:
                plain = _calls(outputs, directions, backpropagate)
            except RuntimeError as error:
                if "checkpoint" not in str(error):
                    raise
                self._settled.add((key, what))  # reentrant checkpointing allows backward() alone
                self._hidden.add(key)
                return
            directions = [d * rows.to(d).view(-1, *[1] * (d.dim() - 1)) for d in directions]
            weighted = _calls(outputs, directions, backpropagate)
        eps = max(torch.finfo(dtype).eps for dtype in {*[t.dtype for t in outputs], *[c.error.dtype for c in plain]})
        found: dict[Any, RowLayout] = {}
        shared = set()
        unclear = set()
        moving, searched = _moving(outputs), (key, what) in self._settled
        each: set[bool] = set()  # whether layers with a layout that may change are searched in each pass
        for one, other in zip(plain, weighted, strict=True):
            place = key, one.name, one.error.shape
            layout, clear = _best(one, other, weights, eps)
            moves = one.module.__dict__[SITE].handle in moving
            if one.name in known and not (clear or moves):  # it was clear before, and errors of this pass say less
                layout, clear = self._found.get(place, layout), True
            before = self._found.get(place, layout) if moves and searched else layout
            found[place] = layout if found.get(place, layout) == layout == before else MIXED
            each |= {_is_flat(one)} if moves and len(weights) > 1 and found[place] != MIXED else set()
            if layout == MIXED and _is_shared(one, other, eps):
                shared.add(place)
            unclear |= set() if clear else {one.name}
        self._moving.pop((key, what), None)
        self._moving |= {(key, what): any(each)} if each else {}
        self._found |= found
        if any(layout != MIXED for layout in found.values()):  # else the model itself mixes examples
            self._shared |= shared
        if not unclear or self._attempts[key, what] >= ATTEMPTS:
            self._settled.add((key, what))
        else:
            self._searched[key, what] -= unclear - known

    def _is_due(self, which: Any) -> bool:
        """Whether the layouts of a pass that was searched are searched again: they may depend on data."""
        if which not in self._moving:
            return False
        self._later[which] += 1
        return self._moving[which] or self._later[which].bit_count() == 1


def _is_flat(call: LayerCall) -> bool:
    """Whether rows have no dimensions of their own, so that their number may be that of selected ones."""
    return call.error.dim() < 3


def _moving(outputs: Iterable[Tensor]) -> set[int]:
    """The handles of recorded layers below an operation that selects or moves rows, perhaps as data tell."""
    above = [node for node in below(t.grad_fn for t in outputs) if node.name().startswith(SELECTIONS)]
    recorded = f"{RecordedLayer.__name__}Backward"
    return {node.handle for node in below(above) if node.name() == recorded}


class _Constant:
    """A hook of batch normalisation: the error of its inputs is that of its outputs, times a constant."""

    def __init__(self) -> None:
        self.factor: Tensor | None = None

    def __call__(self, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None]) -> tuple | None:
        error, given = inputs[0], outputs[0]
        if error is None or given is None:
            return None
        if self.factor is None:  # keeps the size of errors, also in deep networks
            ratio = error.float().norm() / given.float().norm()
            self.factor = torch.where((ratio > 0) & ratio.isfinite(), ratio, 1.0)
        return given * self.factor.to(given), *inputs[1:]


@contextmanager
def _constant_statistics(outputs: Iterable[Tensor]) -> Iterator[None]:
    """A context in which backward passes treat the statistics of batch normalisation as constants, but for factors."""
    nodes = [node for node in below(t.grad_fn for t in outputs) if "BatchNorm" in node.name()]
    handles = [node.register_hook(_Constant()) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_shared(one: LayerCall, other: LayerCall, eps: float) -> bool:
    """Whether there is a row whose error is no multiple of that without weights."""
    rows = layers.leading_rows(one.module, one.error)
    # Half precision would round the ratios, by as much as half of this bound.
    plain, weighted = (call.error.reshape(rows, -1).to(compute_dtype(call.error.dtype)) for call in (one, other))
    ratios = (plain * weighted).sum(1, keepdim=True) / plain.square().sum(1, keepdim=True)
    gap = (weighted - ratios.nan_to_num() * plain).abs().max()
    return bool(gap > min(1e3 * eps, 0.05) * plain.abs().max())


def _calls(outputs: Sequence[Tensor], directions: Sequence[Tensor], backpropagate: Backpropagate) -> list[LayerCall]:
    # Inside a checkpointed function, what is saved here must not count as saved by that function.
    with torch.enable_grad(), saved_tensors_hooks(lambda t: t, lambda t: t):
        total = torch.stack([(t * d).sum().float() for t, d in zip(outputs, directions)]).sum()
    return backpropagate(total, torch.ones_like(total))


def _best(one: LayerCall, other: LayerCall, weights: Tensor, eps: float) -> tuple[RowLayout, bool]:
    """The layout that fits best, and whether no other fits as well.

    Args:
        one, other: the same call, with errors of outputs without and with weights of examples.
        eps: the precision of the backward pass.
    """
    examples, rows = len(weights), layers.leading_rows(one.module, one.error)
    if rows % examples:
        return MIXED, True
    if examples == 1:
        return RowLayout(1, 1), True
    plain, weighted = one.error.reshape(rows, -1), other.error.reshape(rows, -1)
    share = rows // examples
    outer = [a for a in range(1, share + 1) if share % a == 0]
    gaps = []
    for a in outer:
        expected = weights.to(plain).view(1, -1, 1).expand(a, -1, share // a).reshape(-1, 1) * plain
        gaps.append((weighted - expected).abs().max())
    *values, largest = torch.stack([*gaps, plain.abs().max()]).tolist()
    if not all(map(math.isfinite, values)):
        return MIXED, False
    least = min(values)
    layout = RowLayout(outer[values.index(least)], examples)
    clear = sum(value <= CLEARLY * least for value in values) == 1
    fits = least <= min(1e3 * eps, 0.05) * largest
    return (layout, clear) if fits else (MIXED, True)
