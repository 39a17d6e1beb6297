"""Which gradients are preconditioned already, with the option precondition="backward"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import torch
from torch import Tensor

from bayesgrad.distributed import Exchange, Sum
from bayesgrad.layers.call import LayerCall
from bayesgrad.layers.gradients import GradientMarks
from bayesgrad.layers.modules import Layer
from bayesgrad.preconditioners.rows import InnerProduct
from bayesgrad.shards import any_process, gradient_of, local


class PreconditionedGradients:
    """The layers whose `.grad` is preconditioned, and inner products of directions and gradients, for their norm.

    A gradient remains preconditioned after a step, until it is set to zero or replaced: another step uses it as it is.

    Attributes:
        used: whether there was a backward pass with this option.
        layers: these.
    """

    def __init__(self) -> None:
        self.used = False
        self.layers: set[Layer] = set()
        self._raw: set[Layer] = set()  # layers of which a pass has returned the gradient itself
        self._used: set[Layer] = set()  # layers without a pass since the last step
        self._calls: tuple[int, Counter[Layer]] = -1, Counter()  # the latest backward pass, and its calls by layer
        # By backward pass, and for the first calls of layers in it, the second, ...
        self._products: dict[tuple[int, int], dict[Layer, InnerProduct]] = {}
        self._joint: InnerProduct | None = None  # of all processes

    def restart(self, layer: Layer) -> None:
        """Called if earlier passes of a layer belong to a gradient that was discarded."""
        for some in (self.layers, self._raw, self._used):
            some.discard(layer)
        for turn in list(self._products):
            self._products[turn].pop(layer, None)
            if not self._products[turn]:
                del self._products[turn]

    def add(self, layer: Layer, call: LayerCall, needed: bool) -> InnerProduct:
        """Called if a backward pass preconditions; returns where to add the inner product, if it is needed."""
        self.used = True
        self.layers.add(layer)
        self._used.discard(layer)
        if call.backward_id != self._calls[0]:
            self._calls = call.backward_id, Counter()
        self._calls[1][layer] += 1
        turn = call.backward_id, self._calls[1][layer]
        return self._products.setdefault(turn, {}).setdefault(layer, InnerProduct(needed))

    def add_raw(self, layer: Layer) -> None:
        """Called if a backward pass does not precondition."""
        self.used = True
        self._raw.add(layer)

    def stepped(self) -> None:
        self._used = set(self.layers)
        self._joint = None

    def check(self, layers: Collection[Layer], marks: GradientMarks) -> None:
        """Called before a step: forgets gradients that were replaced since an earlier one.

        Raises:
            RuntimeError: the gradient of a layer is a sum of terms that are preconditioned and of others.
        """
        for layer in [one for one in self._used if not all(map(marks.is_marked, one.members))]:
            self.restart(layer)
        for layer in (one for one in layers if one in self.layers):
            beside = marks.foreign | marks.extended | marks.unexplained
            if layer in self._raw or not beside.isdisjoint(layer.members):
                raise RuntimeError(
                    f"the gradient of layer {layer.names[0]!r} is a sum of terms of which precondition='backward' has "
                    "preconditioned some: use precondition='step' if penalties of weights, or of gradients, have "
                    "backward passes of their own, or are added to the loss after the first step."
                )

    def share(self, exchange: Exchange, marks: GradientMarks) -> None:
        if (root := self._root(self.layers, marks)) is not None:
            exchange.add(Sum(root), self._receive)

    def _receive(self, found: Sum) -> None:
        self._joint = InnerProduct(True, (found.total / found.count).square())

    def _root(self, layers: Collection[Layer], marks: GradientMarks) -> Tensor | None:
        """The sum, over backward passes and repeated calls, of the roots of d·g of these layers.

        The root of d·g is at most that, for sums d and g of these parts. Both are multiplied by what the gradient of
        their layer was multiplied by since.
        """
        roots, squares = [], None
        for products in self._products.values():
            own = {one: i.total for one, i in products.items() if one in layers and i.total is not None}
            squares = _squared_factors(layers, marks) if own and squares is None else squares
            if own and squares is not None:
                first = next(iter(own.values()))
                parts = [(total * squares[one].to(total)).to(first) for one, total in own.items()]
                roots.append(torch.stack(parts).sum().clamp(min=0).sqrt())
        return torch.stack([root.to(roots[0]) for root in roots]).sum() if roots else None

    def join(self, inner: InnerProduct, layers: Collection[Layer], marks: GradientMarks) -> None:
        """Adds d·g of these layers."""
        root = self._root(layers, marks) if self._joint is None else self._joint.root()
        if inner.needed and root is not None:
            inner.include(root.square())


def _squared_factors(layers: Collection[Layer], marks: GradientMarks) -> dict[Layer, Tensor]:
    """Layer -> the square of the factor of its gradients since they were computed, 0 if they were set to zero."""
    every = [p for layer in layers for p in layer.members]
    if marks.untouched(every):  # by a `GradScaler` at most, which multiplies all of them by one number
        common = marks.factor(every)
        return dict.fromkeys(layers, torch.ones(()) if common is None else common.square())
    found = {}
    for layer in layers:
        some = [p for p in layer.members if p.grad is not None]
        kept = torch.stack([any_process(local(gradient_of(p)).any(), [p]) for p in some]).any() if some else None
        factor = marks.factor(some)
        found[layer] = torch.ones(()) if factor is None or kept is None else factor.square() * kept.to(factor)
    return found
