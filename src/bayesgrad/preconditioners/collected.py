"""Statistics of layers that the passes of a step have given so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bayesgrad.distributed import Exchange
from bayesgrad.layers.call import LayerCall
from bayesgrad.layers.gradients import GradientMarks
from bayesgrad.layers.modules import Layer
from bayesgrad.layers.pass_losses import PassLosses
from bayesgrad.layers.statistics import LayerStatistics


class Collected(dict[Layer, LayerStatistics]):
    """Layer -> its statistics, and the losses of all passes."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = PassLosses()

    def note(self, layer: Layer, call: LayerCall, losses: Callable[[], float | None]) -> None:
        """Notes a call of a layer, also if its statistics are not due."""
        known = self.losses.counts.get(call.loss_id)
        found = losses() if known is None else known
        self.losses.note(layer, call, found or 0.0, found is not None)

    def pop(self, layer: Layer, default: Any = None) -> Any:
        """Forgets a layer, whose gradient is zero."""
        self.losses.forget(layer)
        return super().pop(layer, default)

    def complete(self, marks: GradientMarks) -> None:
        """Tells the statistics of each layer how many losses the other passes have that made gradients.

        Not in compiled models, and for layers that are called outside of the model.
        """
        if self.losses.unknown or not self.losses.differ(self):
            return
        self.losses.forget_lost(lambda layer: marks.restarted(layer.members))
        for statistics in self.values():
            statistics.count_others(self.losses)

    def share(self, exchange: Exchange, marks: GradientMarks, empty: Mapping[Layer, LayerStatistics]) -> None:
        """Adds what other processes have: losses of a process count also for layers that it has not called.

        Args:
            empty: the statistics to begin with, of all layers that take part.
        """
        for layer, statistics in empty.items():
            self.setdefault(layer, statistics)
        self.complete(marks)
        for layer in empty:
            self[layer].share(exchange)
        exchange.after(self.drop_empty)

    def drop_empty(self) -> None:
        """Forgets layers that no process has called."""
        for layer in [layer for layer, statistics in self.items() if statistics.empty]:
            del self[layer]
