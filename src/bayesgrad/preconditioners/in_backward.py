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

    def share(self, exchange: Exchange) -> None:
        if (root := self._root(self.layers)) is not None:
            exchange.add(Sum(root), self._receive)

    def _receive(self, found: Sum) -> None:
        self._joint = InnerProduct(True, (found.total / found.count).square())

    def _root(self, layers: Collection[Layer]) -> Tensor | None:
        """The sum, over backward passes and repeated calls, of the roots of d·g of these layers.

        The root of d·g is at most that, for sums d and g of these parts.
        """
        roots = []
        for products in self._products.values():
            own = [one.total for layer, one in products.items() if layer in layers and one.total is not None]
            if own:
                roots.append(torch.stack([value.to(own[0]) for value in own]).sum().clamp(min=0).sqrt())
        return torch.stack([root.to(roots[0]) for root in roots]).sum() if roots else None

    def join(self, inner: InnerProduct, layers: Collection[Layer], factor: Tensor | None) -> None:
        """Adds d·g of these layers, whose gradients were multiplied by a factor since."""
        root = self._root(layers) if self._joint is None else self._joint.root()
        if inner.needed and root is not None:
            inner.include(root.square() if factor is None else (root * factor.to(root)).square())
