"""Filters with Kronecker factors that ask for labels drawn from the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bayesgrad import likelihoods
from bayesgrad.block.layer import Layer, LayerBatch
from bayesgrad.curvature.fisher import check_outputs
from bayesgrad.optimizer.factored import FactoredOptimizer


class SampledLabels(FactoredOptimizer):
    """Moments of a layer's inputs and of the errors at its outputs, from outputs that are shown to it."""

    observes = True

    def observe(self, outputs: Tensor, labels: Tensor | None = None) -> None:
        """Draws a label for each output and keeps the errors it brings back to the layers, until the next step.

        Args:
            outputs: of the model, with their graph; which is left as it is, and so is `.grad`.
            labels: to be used in place of drawn ones (the empirical Fisher).
        """
        check_outputs(outputs)
        groups = {p: group for group in self.param_groups for p in group["params"]}
        if not any(self.due(layer, groups[layer.owner]) for layer in self.layers):
            return
        trace = self.recorder.trace(outputs)
        labels = self.draw(outputs) if labels is None else labels
        residual = likelihoods.named(self.param_groups[0]["likelihood"]).residual(outputs, labels)
        self._observed.append(trace.backpropagate(residual))
        elsewhere = trace.used_elsewhere()
        self._strangers |= {
            layer.weight for layer in self.layers if layer.weight is not None and id(layer.weight) in elsewhere
        }
        self._marked = self._mark()

    def statistics(
        self, current: list[Layer], settings: Mapping[Layer, Mapping[str, Any]], passes: Mapping[Layer, LayerBatch]
    ) -> Mapping[Layer, LayerBatch]:
        observed = self.sheets(self._observed)
        self._observed = []
        ever = any("clock" in self.state.get(layer.owner, {}) for layer in current)
        if not observed and not ever and (names := [layer.names[0] for layer in self.touched(current)]):
            raise self.missing_observation(
                f"nothing was ever observed of layers {names}",
                "call observe(outputs), before loss.backward(), on outputs",
            )
        return {
            layer: sheet for layer, sheet in observed.items() if layer in settings and self.due(layer, settings[layer])
        }
