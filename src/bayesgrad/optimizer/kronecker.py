"""Base class of filters with a matrix normal belief about each layer: an input covariance and an error covariance."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bayesgrad.belief import Joint
from bayesgrad.curvature.gradients import average
from bayesgrad.layers.layer import Layer
from bayesgrad.layers.probe import estimated_factor
from bayesgrad.layers.statistics import KroneckerFisher
from bayesgrad.layers.statistics import LayerStatistics as LayerBatch
from bayesgrad.optimizer.constraints import COUNT, POSITIVE, one_of
from bayesgrad.optimizer.factored import MERGES
from bayesgrad.optimizer.sampled_labels import SampledLabels
from bayesgrad.precision import Precision
from bayesgrad.rule import NaturalGradient

DEFAULT_SGD_LR = 0.1  # initial learning rate for prior_std = inf, as in AdaBayes
MEAN_DECAY = 0.99  # decay of the average of errors, as in CentredGradient


class KroneckerOptimizer(SampledLabels):
    """What the Kronecker filters share: the options `fisher` and `prior_std`, and joint posteriors of layers.

    Inputs and errors that are not finite, or whose squares are not, do not change a layer's factors.
    """

    layer_curvature = KroneckerFisher()
    rule = NaturalGradient()
    accepts = {
        **SampledLabels.accepts,
        "batch_size": COUNT,
        "prior_std": POSITIVE,
        "fisher": one_of("sampled", "centered", "empirical"),
    }

    def checks_gradient(self) -> bool:
        return any(group["fisher"] != "sampled" for group in self.param_groups)

    def setting(self, group: Mapping[str, Any]) -> float:
        return 0.0

    def start(self, group: Mapping[str, Any]) -> float:
        """The variance before the first gradient."""
        prior = group["prior_std"] ** 2
        return prior if math.isfinite(prior) else DEFAULT_SGD_LR / group["batch_size"]

    # --- evidence ---

    def observe(self, outputs: Tensor, labels: Tensor | None = None) -> None:
        """As in `KFAC`; does nothing unless `fisher="sampled"`."""
        if any(group["fisher"] == "sampled" for group in self.param_groups):
            super().observe(outputs, labels)

    def statistics(
        self, current: list[Layer], settings: Mapping[Layer, Mapping[str, Any]], passes: Mapping[Layer, LayerBatch]
    ) -> Mapping[Layer, LayerBatch]:
        sampled = [layer for layer in current if settings[layer]["fisher"] == "sampled"]
        found = dict(super().statistics(sampled, {layer: settings[layer] for layer in sampled}, passes))
        from_backward = [layer for layer in current if layer not in sampled and self.due(layer, settings[layer])]
        if not passes and (names := [layer.names[0] for layer in self.with_nonzero_gradient(from_backward)]):
            raise self.missing_observation(
                f"no inputs were recorded for layers {names}", "run forward and backward passes"
            )
        for layer in from_backward:
            if layer in passes:
                scale = settings[layer]["batch_size"] * estimated_factor(layer, passes[layer])
                found[layer] = passes[layer].with_errors(passes[layer].errors * scale)
        if not found:
            return {}
        finite = torch.stack([batch.is_finite().cpu() for batch in found.values()]).tolist()
        found = {layer: batch for (layer, batch), good in zip(found.items(), finite) if good}
        for layer, batch in found.items():
            if settings[layer]["fisher"] == "centered":
                found[layer] = self._centred(layer, batch)
        return found

    def _centred(self, layer: Layer, batch: LayerBatch) -> LayerBatch:
        """The errors minus their mean over earlier batches; the first batch is not centred."""
        entry = self.state[layer.owner]
        here = batch.errors.mean(1)  # (groups, out)
        mean = entry.get("error_mean")
        if mean is None or mean.shape != here.shape:
            entry["error_mean"] = here
            return batch
        centred = batch.with_errors(batch.errors - mean[:, None].to(here))
        keep, take = average(MEAN_DECAY, 1 + int(entry["clock"][MERGES]) if "clock" in entry else 1)
        entry["error_mean"] = keep * mean.to(here) + take * here
        return centred

    # --- posterior ---

    @abstractmethod
    def covariance(self, layer: Layer, group: Mapping[str, Any]) -> Precision:
        """The belief about [W b], with the covariance that the last step used."""

    def _joint(self, names: Mapping[int, str], scale: float) -> list[tuple[str, Joint]]:
        groups = {p: group for group in self.param_groups for p in group["params"]}
        found = []
        for layer in self.layers:
            known = "damped" in self.state.get(layer.owner, {}) and layer.weight not in self._read_elsewhere
            if known and all(id(p) in names for p in layer.members):
                group = groups[layer.owner]
                then = {**group, "lr": group["last_lr"] or 1.0, "base_lr": group["base_lr"] or 1.0}
                shapes = {names[id(p)]: p.shape for p in layer.members}
                belief = Joint(layer.values(), self.covariance(layer, then).scale(1 / scale), shapes)
                found.append((names[id(layer.owner)], belief))
        return found

    def _variance(self, group: Mapping[str, Any], p: Tensor) -> Tensor:
        return super()._variance({**group, "preconditioned": False}, p)
