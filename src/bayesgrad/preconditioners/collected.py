"""Statistics of layers that the passes of a step have given so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bayesgrad.layers.call import COMPILED, LayerCall
from bayesgrad.layers.gradients import GradientMarks
from bayesgrad.layers.modules import Layer
from bayesgrad.layers.statistics import LayerStatistics


class Collected(dict[Layer, LayerStatistics]):
    """Layer -> its statistics, and the losses of all passes, of which a layer may have a part: one of several heads."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[tuple[int, int], float] = {}  # of each pass
        self.used: dict[Layer, set[tuple[int, int]]] = {}  # passes in which a layer was called
        self.unknown = False  # whether it is not known which calls belong to one pass

    def note(self, layer: Layer, call: LayerCall, losses: Callable[[], float | None]) -> None:
        """Notes a call of a layer, also if its statistics are not due."""
        if (key := call.loss_id) not in self.losses:
            found = losses()
            self.unknown |= found is None or call.forward_id >= COMPILED
            self.losses[key] = found or 0.0
        self.used.setdefault(layer, set()).add(key)

    def pop(self, layer: Layer, default: Any = None) -> Any:
        """Forgets a layer, whose gradient is zero."""
        self.used.pop(layer, None)
        return super().pop(layer, default)

    def complete(self, marks: GradientMarks) -> None:
        """Tells the statistics of each layer how many losses the other passes have that made gradients.

        Not in compiled models, and for layers that are called outside of the model.
        """
        if self.unknown or len(set(map(frozenset, self.used.values()))) == 1:  # all layers have all passes
            return
        for layer in [one for one in self.used if marks.restarted(one.members)]:
            del self.used[layer]  # of a pass that was given up
        alive = set[tuple[int, int]]().union(*self.used.values())
        for statistics in self.values():
            statistics.count_others({key: self.losses[key] for key in alive})

    def drop_empty(self) -> None:
        """Forgets layers that no process has called."""
        for layer in [layer for layer, statistics in self.items() if statistics.empty]:
            del self[layer]
