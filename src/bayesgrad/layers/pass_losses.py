"""The losses of the passes whose gradients a step uses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any

from bayesgrad.layers.call import COMPILED, LayerCall


class PassLosses:
    """How many losses each pass has, and which layers it called: one of several heads has a part of the passes.

    Attributes:
        counts: of losses, by `LayerCall.loss_id`.
        unknown: whether it is not known which calls belong to one pass: in compiled models, and outside of the model.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[int, int], Any] = {}
        self.unknown = False
        self._passes: dict[Hashable, set[tuple[int, int]]] = {}  # of each layer, since its gradients were zero

    def note(self, layer: Hashable, call: LayerCall, count: Any, known: bool) -> None:
        """Notes a call of a layer in a pass with this many losses; `known` if the pass is one of the model."""
        self.unknown |= not known or call.forward_id >= COMPILED
        self.counts[call.loss_id] = count
        self._passes.setdefault(layer, set()).add(call.loss_id)

    def forget(self, layer: Hashable) -> None:
        """Forgets that a layer was called."""
        self._passes.pop(layer, None)

    def differ(self, layers: Iterable[Hashable] = ()) -> bool:
        """Whether layers were called in different passes; these too, which may have been called in none."""
        return len({frozenset(self._passes.get(layer, ())) for layer in {*layers, *self._passes}}) > 1

    def forget_lost(self, lost: Callable[[Any], bool]) -> None:
        """Forgets layers for which this is True, and passes that no other layer has: they were given up."""
        for layer in [layer for layer in self._passes if lost(layer)]:
            del self._passes[layer]
        alive = set[tuple[int, int]]().union(*self._passes.values())
        self.counts = {key: count for key, count in self.counts.items() if key in alive}

    def beside(self, own: Collection[tuple[int, int]]) -> Any:
        """The number of losses of passes that are not among these."""
        return 0 if self.unknown else sum(count for key, count in self.counts.items() if key not in own)

    def total(self) -> Any:
        return sum(self.counts.values())
