"""The preconditioners of FOOF and KFAC: inverse second moments of each layer's inputs, and of its errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bayesgrad import layers
from bayesgrad.layers.call import LayerCall
from bayesgrad.layers.layout import ForwardPass
from bayesgrad.layers.modules import Layer
from bayesgrad.layers.statistics import SIDES, symmetric
from bayesgrad.precision import Precision, Spectral
from bayesgrad.precision.linalg import eigenvalues, not_invertible
from bayesgrad.preconditioners.layered import LayerPreconditioner
from bayesgrad.preconditioners.refresh import store
from bayesgrad.preconditioners.stability import mean_eigenvalue


class InputFactor(LayerPreconditioner):
    """(A + damping I)^-1 for each layer, with the second moment A of its inputs, from backward passes.

    What a layer computes once for all examples (embeddings of positions) is an input of each of them. Such layers are
    found by two additional backward passes, once for each shape of the outputs.
    """

    sides = ("input",)
    reads_outputs = True

    def returned(self, outputs: list[Tensor], arguments: Any) -> None:
        recorder = self.recorded.recorder
        self.layouts.tolerant = any(map(layers.mixes_examples, self.recorded.model.modules()))
        if (batch := recorder.passes[recorder.current].batch) is not None and batch == len(outputs[0]):
            self.layouts.search(outputs[:1], recorder.backpropagate, 1, (arguments, self.layouts.tolerant))

    def losses(self, call: LayerCall, forward: ForwardPass | None, group: Mapping[str, Any]) -> float | None:
        losses = super().losses(call, forward, group)
        batch = None if forward is None else forward.batch
        if forward is None or losses is None or batch is None:
            return losses
        return losses / batch if self.layouts.is_shared(call, forward.outputs, batch) else losses


class KroneckerFactors(LayerPreconditioner):
    """(A ⊗ E + damping)^-1 for each layer, with second moments of inputs and of errors for sampled labels.

    The damping is divided between the factors, or, with the option `exact_damping`, added to their product.
    """

    def from_labels(self, group: Mapping[str, Any]) -> bool:
        return True

    def is_kronecker(self, group: Mapping[str, Any]) -> bool:
        return not group["exact_damping"]

    def invert(self, layer: Layer, entry: dict[str, Tensor], group: Mapping[str, Any]) -> None:
        if not group["exact_damping"]:
            super().invert(layer, entry, group)
            return
        spectra = {}
        for side in SIDES:
            moment = symmetric(entry[f"{side}_moment"])
            if not bool(torch.isfinite(moment).all()):
                raise not_invertible(moment, group["damping"], f"the {side} factor of layer {layer.names[0]!r}")
            if moment.dim() == 2:  # a diagonal needs no eigenvectors
                spectra[side] = moment
            else:
                spectra[side], vectors = eigenvalues(moment)
                store(entry, f"{side}_basis", vectors)  # pyright: ignore[reportArgumentType]
        left, right = ("input", "error") if layer.lookup else ("error", "input")
        damping = group["damping"]
        if group["damping_mode"] == "relative":
            # As in `split_damping`, 1 for a factor without data: that of the errors of dead units.
            damping *= math.prod(mean_eigenvalue(entry[f"{side}_moment"]) or 1.0 for side in SIDES)
        spectrum = spectra[left][..., :, None] * spectra[right][..., None, :] + damping
        if not bool((spectrum > 0).all()):
            raise not_invertible(spectrum, damping, f"the Fisher of layer {layer.names[0]!r}")
        store(entry, "spectrum", spectrum)

    def precision(self, layer: Layer, group: Mapping[str, Any]) -> Precision:
        if not group["exact_damping"]:
            return super().precision(layer, group)
        entry = self.optimizer.state[layer.owner]
        left, right = ("input", "error") if layer.lookup else ("error", "input")
        return Spectral(entry.get(f"{left}_basis"), entry.get(f"{right}_basis"), entry["spectrum"])
