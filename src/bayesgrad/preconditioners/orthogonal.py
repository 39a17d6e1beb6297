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
from bayesgrad.precision.linalg import eigenvalues, polar_factor
from bayesgrad.preconditioners.layered import Entry, LayerPreconditioner, Settings
from bayesgrad.preconditioners.refresh import AVERAGE, check_factor, cost, store
from bayesgrad.preconditioners.stability import damped_inverse, mean_eigenvalue
from bayesgrad.products import mm
from bayesgrad.rules.transition import LARGEST, Static
from bayesgrad.rules.update import NaturalStep, UpdateRule
from bayesgrad.saved_state import saved_entry
from bayesgrad.shards import part_of, placed, whole

INVERSE = "input_inverse"
SMALL = 0.05  # damping below which P M'M loses too many digits in float32


class OrthogonalSteps(LayerPreconditioner):
    """U V' R for each layer, with <g> R = U S V', R = (A/a + damping I)^-1/2, and a the mean eigenvalue of A.

    No root is formed: U V' R is a polynomial of <g> P <g>' times <g> P, with P = R R, and so is the one of P <g>'<g>,
    which is used where outputs are more than inputs. A is divided by a, so that the number of losses does not matter.

    Embedding layers, and layers of which both sides are larger than `max_factor`, are not covered.
    """

    sides = ("input",)
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
        return [Job(cost(moment), {INVERSE: moment}, partial(self._inverse, layer, moment, float(group["damping"])))]

    def _inverse(self, layer: Layer, moment: Tensor, damping: float) -> dict[str, Tensor]:
        """P, without directions that have no data if damping is too small to tell them from rounding."""
        moment = moment / (mean_eigenvalue(moment) or 1.0)
        eps = torch.finfo(moment.dtype).eps
        if damping > math.sqrt(eps):
            return damped_inverse("input", moment, damping, layer.names[0], self.warned)
        values, vectors = eigenvalues(symmetric(moment))
        damped = values + damping
        # Eigenvalues of a matrix have rounding errors, which damping would make positive; a diagonal has none.
        found, errors = (damped, eps) if vectors is None else (values, eps * moment.shape[-1])
        known = found > errors * found.amax(1, keepdim=True)
        inverse = torch.where(known, damped.clamp(min=torch.finfo(values.dtype).tiny).reciprocal(), 0.0)
        return {INVERSE: inverse if vectors is None else (vectors * inverse[:, None]) @ vectors.mT}

    def _directions(self, known: list[Layer], settings: Settings) -> Directions:
        found: dict[Any, Direction] = {}
        for layer in known:
            entry, momentum = self.optimizer.state[layer.owner], settings[layer]["momentum"]
            # Each process has the average of whole layers, so that all of them have the same state.
            parts = zip(layer.gradients(), layer.members)
            gradient = layer.join([whole(placed(part, p)) for part, p in parts])
            largest = LARGEST[gradient.dtype]  # an average that is infinite once stays infinite
            gradient = gradient.clamp(-largest, largest)
            moves = gradient.any()  # on its device
            if momentum:
                # The direction does not depend on the size of the average, which is not debiased.
                before = entry.get(AVERAGE)
                store(
                    entry, AVERAGE, gradient * (1 - momentum) if before is None else before.lerp(gradient, 1 - momentum)
                )
                gradient = gradient.lerp(entry[AVERAGE], momentum)
            else:
                entry.pop(AVERAGE, None)
            # A direction has the size of a step however small the average has become.
            exact = float(settings[layer]["damping"]) < SMALL
            direction = torch.where(moves, self._steepest(gradient, entry[INVERSE], exact), 0.0)
            found |= {p: part_of(values, p) for p, values in layer.split(direction).items()}
        return found

    @staticmethod
    def _steepest(matrix: Tensor, inverse: Tensor, exact: bool) -> Tensor:
        """U V' R, of (groups, out, in), times the square root of out/in where that is more than one.

        P M'M is not symmetric. Rounding errors of M'M are multiplied by the condition number of P, which can be more
        than there is in other directions: with `exact`, they are those of float64.
        """
        matrix = matrix / matrix.abs().amax((1, 2), keepdim=True).clamp(min=torch.finfo(matrix.dtype).tiny)
        _, fan_out, fan_in = matrix.shape
        if fan_out <= fan_in or inverse.dim() == 2:
            right = matrix * inverse[:, None] if inverse.dim() == 2 else mm(matrix, inverse)
            return mm(polar_factor(mm(right, matrix.mT)), right)
        wide = torch.float64 if exact and matrix.device.type != "mps" else matrix.dtype  # which has no float64
        matrix, inverse, given = matrix.to(wide), inverse.to(wide), matrix.dtype
        factor = polar_factor(mm(inverse, mm(matrix.mT, matrix)))
        return mm(matrix, mm(factor, inverse) * math.sqrt(fan_out / fan_in)).to(given)

    def check_loaded(self, saved: Mapping[str, Any]) -> None:
        super().check_loaded(saved)
        for layer in self.recorded.layers:
            entry, _ = saved_entry(self.optimizer, saved, layer.owner)
            if AVERAGE in entry:  # not without momentum
                check_factor(entry, AVERAGE, layer.shape, layer.names[0], self.optimizer.__class__.__name__)

    def initialise_state(self) -> None:
        super().initialise_state()
        for layer in self.recorded.layers:
            if self.groups[layer.owner]["momentum"]:
                like = {"dtype": compute_dtype(layer.owner.dtype), "device": layer.owner.device}
                self.optimizer.state[layer.owner][AVERAGE] = torch.zeros(layer.shape, **like)
