"""The preconditioners of FOOF and KFAC: inverse second moments of each layer's inputs, and of its errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bayesgrad import layers
from bayesgrad.distributed import Job
from bayesgrad.layers.call import LayerCall
from bayesgrad.layers.layout import ForwardPass
from bayesgrad.layers.modules import Layer
from bayesgrad.layers.moments import symmetric
from bayesgrad.layers.statistics import SIDES
from bayesgrad.precision import Precision, Spectral
from bayesgrad.precision.linalg import eigenvalues, not_invertible
from bayesgrad.preconditioners.layered import Entry, LayerPreconditioner
from bayesgrad.preconditioners.refresh import cost
from bayesgrad.preconditioners.stability import mean_eigenvalue


class InputFactor(LayerPreconditioner):
    """(A + damping I)^-1 for each layer, with the second moment A of its inputs, from backward passes.

    What a layer computes once for all examples (embeddings of positions) is an input of each of them. Such layers are
    found by two additional backward passes, once for each shape of the outputs, and again if a pass calls a layer that
    was frozen in these, or that they left out. A row that belongs to some of the examples alone (hidden layers that are
    mixed, nodes of one graph) counts as one of all of them, so that steps of this layer are shorter than they could be.
    What a layer computes counts as different for each example if it has another number of rows than in these passes, or
    if the model returns outputs of some tokens alone.
    """

    sides = ("input",)
    reads_outputs = True

    def returned(self, outputs: list[Tensor], arguments: Any) -> None:
        recorder = self.recorded.recorder
        self.layouts.tolerant = any(map(layers.mixes_examples, self.recorded.model.modules()))
        if (group := recorder.passes[recorder.current].rows_of_argument) is not None:
            what = arguments, self.layouts.tolerant
            self.layouts.search(outputs[:1], recorder.backpropagate, group, what, recorder.called(), once=True)

    def losses(self, call: LayerCall, forward: ForwardPass | None, group: Mapping[str, Any]) -> float | None:
        losses = super().losses(call, forward, group)
        rows = None if forward is None else forward.rows_of_argument
        if forward is None or losses is None or rows is None:
            return losses
        shared = self.layouts.is_shared(call, forward.outputs, rows)
        return losses / (forward.outputs[0] // rows) if shared else losses


class KroneckerFactors(LayerPreconditioner):
    """(A ⊗ E + damping)^-1 for each layer, with second moments of inputs and of errors for sampled labels.

    The damping is divided between the factors, or, with the option `exact_damping`, added to their product.
    """

    def from_labels(self, group: Mapping[str, Any]) -> bool:
        return True

    def is_kronecker(self, group: Mapping[str, Any]) -> bool:
        return not group["exact_damping"]

    def inversions(self, layer: Layer, entry: Entry, group: Mapping[str, Any]) -> list[Job]:
        if not group["exact_damping"]:
            return super().inversions(layer, entry, group)
        jobs = []
        for side in SIDES:
            moment = entry[f"{side}_moment"]
            like = {f"{side}_values": moment if moment.dim() == 2 else moment[..., 0]}
            like |= {f"{side}_basis": moment} if moment.dim() == 3 else {}
            jobs.append(Job(cost(moment), like, partial(self._eigenvalues, layer, side, moment, group["damping"])))
        return jobs

    @staticmethod
    def _eigenvalues(layer: Layer, side: str, moment: Tensor, damping: float) -> dict[str, Tensor]:
        moment = symmetric(moment)
        if not bool(torch.isfinite(moment).all()):
            raise not_invertible(moment, damping, f"the {side} factor of layer {layer.names[0]!r}")
        values, vectors = eigenvalues(moment)  # a diagonal needs no eigenvectors
        return {f"{side}_values": values} | ({} if vectors is None else {f"{side}_basis": vectors})

    def keep_inverses(self, layer: Layer, entry: Entry, group: Mapping[str, Any], found: Entry) -> None:
        if not group["exact_damping"]:
            super().keep_inverses(layer, entry, group, found)
            return
        spectra = {side: found.pop(f"{side}_values") for side in SIDES}
        left, right = ("input", "error") if layer.lookup else ("error", "input")
        damping = group["damping"]
        if group["damping_mode"] == "relative":
            # As in `split_damping`, 1 for a factor without data: that of the errors of dead units.
            damping *= math.prod(mean_eigenvalue(entry[f"{side}_moment"]) or 1.0 for side in SIDES)
        spectrum = spectra[left][..., :, None] * spectra[right][..., None, :] + damping
        if not bool((spectrum > 0).all()):
            raise not_invertible(spectrum, damping, f"the Fisher of layer {layer.names[0]!r}")
        super().keep_inverses(layer, entry, group, found | {"spectrum": spectrum})

    def precision(self, layer: Layer, group: Mapping[str, Any]) -> Precision:
        if not group["exact_damping"]:
            return super().precision(layer, group)
        entry = self.optimizer.state[layer.owner]
        left, right = ("input", "error") if layer.lookup else ("error", "input")
        return Spectral(entry.get(f"{left}_basis"), entry.get(f"{right}_basis"), entry["spectrum"])
