"""Optimizers with Kronecker factors that use labels sampled from the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bayesgrad import likelihoods
from bayesgrad.layers.fisher import check_outputs
from bayesgrad.layers.layer import Layer
from bayesgrad.layers.statistics import LayerStatistics as LayerBatch
from bayesgrad.optimizer.factored import FactoredOptimizer


class SampledLabels(FactoredOptimizer):
    """Base class: second moments of layer inputs and of errors for sampled labels, computed by `observe(outputs)`."""

    observes = True

    def observe(self, outputs: Tensor, labels: Tensor | None = None) -> None:
        """Samples a label for each output and stores the errors at the layers' outputs until the next step.

        Args:
            outputs: outputs of the model with their graph; neither the graph nor `.grad` is changed.
            labels: replace the sampled labels (the empirical Fisher matrix).
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
        self._read_elsewhere |= {
            layer.weight for layer in self.layers if layer.weight is not None and id(layer.weight) in elsewhere
        }
        self._marked = self._mark()

    def statistics(
        self, current: list[Layer], settings: Mapping[Layer, Mapping[str, Any]], passes: Mapping[Layer, LayerBatch]
    ) -> Mapping[Layer, LayerBatch]:
        observed = self.layer_batches(self._observed)
        self._observed = []
        ever = any("clock" in self.state.get(layer.owner, {}) for layer in current)
        if not observed and not ever and (names := [layer.names[0] for layer in self.with_nonzero_gradient(current)]):
            raise self.missing_observation(
                f"observe() was never called for layers {names}",
                "call observe(outputs), before loss.backward(), on outputs",
            )
        return {
            layer: batch for layer, batch in observed.items() if layer in settings and self.due(layer, settings[layer])
        }
