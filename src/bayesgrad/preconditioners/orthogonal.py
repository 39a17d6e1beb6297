"""The preconditioner of SpectralFOOF: orthogonalised averages of gradients, where the inputs of layers are white."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bayesgrad.directions import Direction, Directions
from bayesgrad.distributed import Job
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.modules import Layer
from bayesgrad.layers.moments import symmetric
from bayesgrad.precision.linalg import eigenvalues, orthogonalised
from bayesgrad.preconditioners.kronecker_factors import InputFactor
from bayesgrad.preconditioners.layered import Entry, Settings
from bayesgrad.preconditioners.refresh import AVERAGE, cost, store
from bayesgrad.rules.transition import LARGEST, Static
from bayesgrad.rules.update import NaturalStep, UpdateRule
from bayesgrad.shards import part_of, placed, whole

ROOT = "input_root"


class OrthogonalSteps(InputFactor):
    """U V' R for each layer, with <g> R = U S V', R = (A/a + damping I)^-1/2, and a the mean eigenvalue of A.

    Embedding layers, and layers of which both sides are larger than `max_factor`, are not covered.
    """

    rule = UpdateRule(None, Static(), NaturalStep(averaged=True))

    def uses(self, layer: Layer) -> bool:
        limit = {p: group["max_factor"] for group in self.optimizer.param_groups for p in group["params"]}
        return not layer.lookup and min(layer.shape[1:]) <= limit[layer.owner]

    def layer_options(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return (*super().layer_options(group), "momentum")  # of the average of [W b]

    def is_kronecker(self, group: Mapping[str, Any]) -> bool:
        return False  # the average of gradients is needed, not rows

    def inversions(self, layer: Layer, entry: Entry, group: Mapping[str, Any]) -> list[Job]:
        moment = entry["input_moment"]
        return [Job(cost(moment), {ROOT: moment}, partial(self._root, moment, float(group["damping"])))]

    @staticmethod
    def _root(moment: Tensor, damping: float) -> dict[str, Tensor]:
        values, vectors = eigenvalues(symmetric(moment))
        tiny = torch.finfo(values.dtype).tiny
        mean = values.mean(1, keepdim=True)
        damped = values / mean.clamp(min=tiny) + damping
        known = damped > torch.finfo(values.dtype).eps * damped.amax(1, keepdim=True)
        root = torch.where(known, damped.clamp(min=tiny).rsqrt(), 0.0)  # 0: no data, and no damping
        return {ROOT: root if vectors is None else (vectors * root[:, None]) @ vectors.mT}

    def _directions(self, known: list[Layer], settings: Settings) -> Directions:
        found: dict[Any, Direction] = {}
        for layer in known:
            entry, momentum = self.optimizer.state[layer.owner], settings[layer]["momentum"]
            # Each process has the average of whole layers, so that all of them have the same state.
            parts = zip(layer.gradients(), layer.members)
            gradient = layer.join([whole(placed(part, p)) for part, p in parts])
            largest = LARGEST[gradient.dtype]  # an average that is infinite once stays infinite
            gradient = gradient.clamp(-largest, largest)
            if momentum:
                # The direction does not depend on the size of the average, which is not debiased.
                before = entry.get(AVERAGE)
                store(
                    entry, AVERAGE, gradient * (1 - momentum) if before is None else before.lerp(gradient, 1 - momentum)
                )
                gradient = gradient.lerp(entry[AVERAGE], momentum)
            else:
                entry.pop(AVERAGE, None)
            white = orthogonalised(self._whiten(entry, gradient))
            _, fan_out, fan_in = layer.shape
            direction = self._whiten(entry, white) * math.sqrt(max(1.0, fan_out / fan_in))
            found |= {p: part_of(values, p) for p, values in layer.split(direction).items()}
        return found

    @staticmethod
    def _whiten(entry: Mapping[str, Tensor], matrix: Tensor) -> Tensor:
        root = entry[ROOT]
        return matrix * root[:, None] if root.dim() == 2 else matrix @ root

    def initialise_state(self) -> None:
        super().initialise_state()
        for layer in self.recorded.layers:
            if self.groups[layer.owner]["momentum"]:
                like = {"dtype": compute_dtype(layer.owner.dtype), "device": layer.owner.device}
                self.optimizer.state[layer.owner][AVERAGE] = torch.zeros(layer.shape, **like)
