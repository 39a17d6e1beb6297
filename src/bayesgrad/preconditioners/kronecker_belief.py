"""The preconditioners of the Kronecker filters: matrix normal beliefs about layers, filtered or at steady state."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bayesgrad.directions import Direction, Directions
from bayesgrad.distributed import Job
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.call import LayerCall, Pair
from bayesgrad.layers.layout import ForwardPass
from bayesgrad.layers.modules import Layer
from bayesgrad.layers.moments import symmetric
from bayesgrad.layers.observed import ObservedShares
from bayesgrad.layers.statistics import SIDES, LayerStatistics
from bayesgrad.parts import Groups, Host, weak
from bayesgrad.precision import Kronecker, Precision, Spectral
from bayesgrad.precision.linalg import eigenvalues
from bayesgrad.precision.projection import Factors
from bayesgrad.preconditioners.collected import Collected
from bayesgrad.preconditioners.layered import Entry, LayerPreconditioner, Settings
from bayesgrad.preconditioners.refresh import (
    INVERTED,
    MERGED,
    MERGES,
    SQUARED,
    SQUARES,
    cost,
    has_merged,
    next_step,
    store,
)
from bayesgrad.preconditioners.stability import limit_size
from bayesgrad.rules.transition import LARGEST, OrnsteinUhlenbeck, Static, average
from bayesgrad.rules.update import MOMENTUM, NaturalStep, UpdateRule
from bayesgrad.shards import part_of, placed, whole

MEAN_DECAY = 0.99  # decay of the average of errors, as in CentredGradient
FLOOR = 1e-4  # of a moment's eigenvalues, relative to the largest


class LayerBelief(LayerPreconditioner):
    """Base class: an input covariance and an error covariance for each layer.

    The option `fisher` says how errors are computed: for labels sampled from the model by `observe(outputs)`
    ("sampled"), or from the backward passes of the loss, without ("empirical") or minus ("centered") their mean over
    earlier batches.
    """

    rule = UpdateRule(None, Static(), NaturalStep())

    def from_labels(self, group: Mapping[str, Any]) -> bool:
        return group["fisher"] == "sampled"

    def setting(self, group: Mapping[str, Any]) -> float:
        return 0.0

    def bind(self, optimizer: Host) -> None:
        super().bind(optimizer)
        self.counts_losses = not all(map(self.from_labels, optimizer.param_groups))

    def forget(self, observed: bool) -> None:
        super().forget(observed)
        if observed:
            self.shares = ObservedShares()

    def observe(self, outputs: Any, loss: Any, labels: Any, weights: Any) -> None:
        super().observe(outputs, loss, labels, weights)
        groups = self.optimizer.param_groups
        if not all(map(self.from_labels, groups)):
            self.shares.note(self.recorded.recorder, groups[0]["likelihood"], outputs, labels, weights)

    def _add(
        self, found: Collected, layer: Layer, call: LayerCall, forward: ForwardPass | None, share: float = 1
    ) -> None:
        if found is self.from_passes and self.due(layer, self.groups[layer.owner]):
            share = self.shares.number_of(call)
        super()._add(found, layer, call, forward, share)

    @abstractmethod
    def belief(self, layer: Layer, group: Mapping[str, Any]) -> Precision:
        """The belief about [W b], with the covariance that the last step used."""

    def believed_layers(self) -> list[Layer]:
        """The layers that have taken a step with a direction."""
        state, elsewhere = self.optimizer.state, self.recorded.read_elsewhere
        return [
            layer
            for layer in self.recorded.layers
            if has_merged(state.get(layer.owner, {})) and layer.weight not in elsewhere
        ]

    def keeps_rows(self, group: Mapping[str, Any]) -> bool:
        return group["fisher"] == "centered"

    def statistics(self, current: list[Layer], settings: Settings) -> dict[Layer, LayerStatistics]:
        found = super().statistics(current, settings)
        if not found:
            return {}
        own = [layer for layer in found if not self.from_labels(settings[layer])]
        factors = self.recorded.marks.factors([layer.members for layer in own], "errors of layers")
        self.factors_of_gradients = dict(zip(own, factors))
        for layer, batch in found.items():
            if batch.keeps and layer in self.factors_of_gradients:
                batch.errors = batch.errors * self._scale(layer, settings[layer])
                if settings[layer]["fisher"] == "centered":
                    self._centre(layer, batch)
        return found

    def _scale(self, layer: Layer, group: Mapping[str, Any]) -> Tensor:
        """What errors of the mean loss, perhaps scaled by a `GradScaler`, are multiplied by to be those of examples.

        In several processes, errors are those of the mean loss of one of them.
        """
        factor = self.factors_of_gradients[layer]
        return group["batch_size"] / self.processes * (torch.ones(()) if factor is None else factor)

    def _centre(self, layer: Layer, batch: LayerStatistics) -> None:
        """Subtracts from the errors their mean over earlier batches; the first batch is not centred."""
        entry = self.optimizer.state[layer.owner]
        here = batch.errors.mean(1)  # (groups, out)
        mean = entry.get("error_mean")
        if mean is None or mean.shape != here.shape or ("clock" in entry and not has_merged(entry)):
            entry["error_mean"] = here
            return
        batch.errors = batch.errors - mean[:, None].to(here)
        keep, take = average(MEAN_DECAY, 1 + int(entry["clock"][MERGES]) if "clock" in entry else 1)
        entry["error_mean"] = keep * mean.to(here) + take * here

    def initialise_state(self) -> None:
        super().initialise_state()
        for layer in self.recorded.layers:
            if self.groups[layer.owner]["fisher"] == "centered":
                like = {"dtype": compute_dtype(layer.owner.dtype), "device": layer.owner.device}
                self.optimizer.state[layer.owner]["error_mean"] = torch.zeros(layer.shape[:2], **like)

    def merge(self, layer: Layer, entry: Entry, statistics: LayerStatistics, group: Mapping[str, Any]) -> None:
        keep, take = average(group["ema"], int(entry["clock"][MERGES]))
        own = statistics.keeps or self.from_labels(group)  # errors of single examples
        for side, moment in statistics.moments().items():
            scale = None if own or side == "input" else self._scale(layer, group).square()
            moment.into(entry[f"{side}_moment"], keep, take, scale)


class KroneckerBelief(LayerBelief):
    """A covariance Σ_x ⊗ Σ_δ for each layer, as filtered by `KroneckerFilter`.

    Layers with a larger side than `max_factor`, and Embedding layers, are not covered.

    Args:
        fallback: by what other parameters are trained.
        unit: param group -> what the state is a multiple of.
        drift: param group and number of steps -> arguments of the Ornstein-Uhlenbeck transition.
        start: param group -> the variance before the first gradient.
    """

    factor = "covariance"

    def keeps_rows(self, group: Mapping[str, Any]) -> bool:
        return True

    def __init__(
        self,
        fallback: str,
        unit: Callable[[Mapping[str, Any]], float],
        drift: Callable[[Mapping[str, Any], int], dict[str, float]],
        start: Callable[[Mapping[str, Any]], float],
    ) -> None:
        super().__init__(fallback)
        self.unit, self.drift, self.start = weak(unit), weak(drift), weak(start)

    def uses(self, layer: Layer) -> bool:
        limit = {p: group["max_factor"] for group in self.optimizer.param_groups for p in group["params"]}
        return not layer.lookup and max(layer.shape[1:]) <= limit[layer.owner]

    def layer_options(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return (*super().layer_options(group), "lr", "base_lr", "max_lr")  # the unit of the covariance

    @staticmethod
    def stats_interval(layer: Layer, every: int) -> int:
        """As given, also for large layers: a filter with fewer observations is another filter."""
        return every

    def step_scale(self, group: Mapping[str, Any]) -> float:
        return self.unit(group) * group["batch_size"]

    def initial_factor(self, zeros: Tensor, group: Mapping[str, Any]) -> Tensor:
        zeros.diagonal(dim1=1, dim2=2).fill_(math.sqrt(self.start(group)))
        return zeros

    def merge(self, layer: Layer, entry: Entry, statistics: LayerStatistics, group: Mapping[str, Any]) -> None:
        unit, steps = self.unit(group), next_step(entry) - int(entry["clock"][MERGED])
        if unit == 0:
            return
        drift = OrnsteinUhlenbeck().scalars(**self.drift(group, steps))
        losses = statistics.losses * (statistics.observed / statistics.rows)
        share = unit * steps * group["batch_size"] / losses
        errors = statistics.errors * math.sqrt(share)
        self._keep(entry, self._factors(entry).propagate(**drift).observe(statistics.inputs, errors))

    def inversions(self, layer: Layer, entry: Entry, group: Mapping[str, Any]) -> list[Job]:
        factors = self._factors(entry)
        both = cost(factors.inputs) + cost(factors.errors)
        return [Job(both, {"traces": factors.traces}, lambda: {"traces": factors.with_exact_traces().traces})]

    def keep_inverses(self, layer: Layer, entry: Entry, group: Mapping[str, Any], found: Entry) -> None:
        factors = self._factors(entry).balanced()
        self._keep(entry, Factors(factors.inputs, factors.errors, found["traces"]))

    def initialise_state(self) -> None:
        super().initialise_state()
        for layer in self.recorded.layers:
            entry = self.optimizer.state[layer.owner]
            del entry["traces"]
            entry["traces"] = self._factors(entry).traces

    def _factors(self, entry: Mapping[str, Tensor]) -> Factors:
        sides = entry["input_covariance"], entry["error_covariance"]
        if "traces" in entry:
            return Factors(*sides, entry["traces"])
        return Factors(*sides, torch.stack([(1 / side[:, 0, 0]).double().cpu() for side in sides]))

    def _keep(self, entry: dict[str, Tensor], belief: Factors) -> None:
        entry["input_covariance"], entry["error_covariance"] = belief.inputs, belief.errors
        entry["traces"] = belief.traces

    def precision(self, layer: Layer, group: Mapping[str, Any]) -> Precision:
        entry = self.optimizer.state[layer.owner]
        return Kronecker(entry["error_covariance"], entry["input_covariance"], layer.shape)

    def belief(self, layer: Layer, group: Mapping[str, Any]) -> Precision:
        return self.precision(layer, group).scale(1 / self.unit(group))


class Whitening(LayerBelief):
    """The steady state of `KroneckerBelief`: gradients whitened by the second moments of inputs and errors.

    With a finite `prior_std`, or with eigenvalues="gradients", the steady state is computed in the eigenbasis of the
    moments. Else it is the product of their inverse square roots.
    """

    def bind(self, optimizer: Host) -> None:
        if any(self._squares_gradients(g) and g["precondition"] == "backward" for g in optimizer.param_groups):
            raise ValueError(
                "eigenvalues='gradients' squares gradients, which precondition='backward' does not form: use "
                "precondition='step'."
            )
        super().bind(optimizer)

    def is_kronecker(self, group: Mapping[str, Any]) -> bool:
        return not self.setting(group)

    def shapes(self, layer: Layer, group: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        found = super().shapes(layer, group)
        return found if group["whiten"] == "both" else {**found, "error": found["error"][:2]}

    @staticmethod
    def _squares_gradients(group: Mapping[str, Any]) -> bool:
        return group["eigenvalues"] == "gradients"

    def setting(self, group: Mapping[str, Any]) -> float:
        """1 if the steady state is computed in the eigenbasis, else 0."""
        return float(math.isfinite(group["prior_std"]) or self._squares_gradients(group))

    def layer_options(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return (*super().layer_options(group), *(("lr",) if math.isfinite(group["prior_std"]) else ()))

    def _is_current(self, entry: Mapping[str, Tensor], group: Mapping[str, Any]) -> bool:
        """Whether a layer has what `precision` reads; not if a finite prior was given or taken away since."""
        return float(entry["damped"]) == self.setting(group)

    def _precondition(self, layer: Layer, call: LayerCall, group: Mapping[str, Any]) -> Pair | None:
        if self._has_factors(layer, group) and not self._is_current(self.optimizer.state[layer.owner], group):
            self.done.add_raw(layer)  # the step inverts and preconditions
            return None
        return super()._precondition(layer, call, group)

    def step_scale(self, group: Mapping[str, Any]) -> float:
        lr, batch = float(group["lr"]), group["batch_size"]
        return lr * batch if self.setting(group) else lr * math.sqrt(batch)

    def directions(self, groups: Groups, active: list[list[Tensor]]) -> Directions:
        owners = {p: group for group in groups for p in group["params"]}
        limits = []
        self._find_layers()
        for layer in self.recorded.layers:
            group = owners[layer.owner]
            batch = group["batch_size"]
            limits.append((layer.members, group["max_step"] / (batch if self.setting(group) else math.sqrt(batch))))
        return limit_size(super().directions(groups, active), limits)

    def _directions(self, known: list[Layer], settings: Settings) -> Directions:
        squared = [layer for layer in known if self._squares_gradients(settings[layer])]
        if not squared:
            return super()._directions(known, settings)
        found: dict[Any, Direction] = {**super()._directions([one for one in known if one not in squared], settings)}
        for layer in squared:
            entry, group = self.optimizer.state[layer.owner], settings[layer]
            basis = self._in_basis(layer, entry, torch.ones(()))
            # Each process has the squares of whole layers, so that all of them have the same state.
            parts = zip(layer.gradients(), layer.members)
            gradient = basis.into(layer.join([whole(placed(part, p)) for part, p in parts]))
            largest = LARGEST[gradient.dtype]  # an average of squares that is infinite once stays infinite
            squares = gradient.clamp(-largest, largest).square_()
            step = next_step(entry)
            if not int(entry["clock"][SQUARED]):
                entry["clock"][SQUARED] = step
            keep, take = average(group["ema"], step + 1 - int(entry["clock"][SQUARED]))
            if keep:
                entry[SQUARES].mul_(keep).add_(squares, alpha=take)
            else:
                store(entry, SQUARES, squares)
            direction = layer.split(basis.out(gradient / self._spectrum(layer, entry, group)))
            found |= {p: part_of(values, p) for p, values in direction.items()}
        return found

    @staticmethod
    def _in_basis(layer: Layer, bases: Mapping[str, Tensor], spectrum: Tensor) -> Spectral:
        left, right = ("input", "error") if layer.lookup else ("error", "input")
        return Spectral(bases.get(f"{left}_basis"), bases.get(f"{right}_basis"), spectrum)

    def inversions(self, layer: Layer, entry: Entry, group: Mapping[str, Any]) -> list[Job]:
        jobs = []
        for side in SIDES:
            moment = entry[f"{side}_moment"]
            like = {f"{side}_root": moment}
            if self.setting(group):
                like = {f"{side}_values": moment if moment.dim() == 2 else moment[..., 0]}
                like |= {f"{side}_basis": moment} if moment.dim() == 3 else {}
            jobs.append(Job(cost(moment), like, partial(self._root, side, moment, group)))
        return jobs

    def _root(self, side: str, moment: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """The inverse square root of a moment, or its eigenvalues and eigenvectors."""
        values, vectors = eigenvalues(symmetric(moment))
        if side == "error" and group["whiten"] == "input":
            values = values.mean(1, keepdim=True).expand_as(values).clone()  # the state is written in place
        if self.setting(group):
            return {f"{side}_values": values} | ({} if vectors is None else {f"{side}_basis": vectors})
        largest = values.amax(1, keepdim=True)
        tiny = torch.finfo(values.dtype).tiny
        root = torch.where(largest > 0, values.maximum(FLOOR * largest).clamp(min=tiny).rsqrt(), 0.0)  # 0: no data
        return {f"{side}_root": root if vectors is None else (vectors * root[:, None]) @ vectors.mT}

    def keep_inverses(self, layer: Layer, entry: Entry, group: Mapping[str, Any], found: Entry) -> None:
        if int(entry["clock"][INVERTED]) and not self._is_current(entry, group):
            # The average of directions is in the units of `step_scale`.
            for kept in (self.optimizer.state[p] for p in layer.members if MOMENTUM in self.optimizer.state.get(p, {})):
                kept[MOMENTUM].mul_(math.sqrt(group["batch_size"]) ** (1 if float(entry["damped"]) else -1))
        if SQUARES in entry:
            # Squares of entries that are independent in the old basis U become, in the basis V, (V'U)^2 times them.
            names = [name for name in found if name.endswith("_basis") and name in entry]
            turns = {name: (found[name].mT @ entry[name]).square() for name in names}
            entry[SQUARES] = self._in_basis(layer, turns, torch.ones(())).out(entry[SQUARES])
        super().keep_inverses(layer, entry, group, found)

    def initialise_state(self) -> None:
        super().initialise_state()
        for layer in self.recorded.layers:
            if self._squares_gradients(self.groups[layer.owner]):
                like = {"dtype": compute_dtype(layer.owner.dtype), "device": layer.owner.device}
                self.optimizer.state[layer.owner][SQUARES] = torch.zeros(layer.shape, **like)

    def precision(self, layer: Layer, group: Mapping[str, Any]) -> Precision:
        entry = self.optimizer.state[layer.owner]
        if self.setting(group):
            return self._in_basis(layer, entry, self._spectrum(layer, entry, group))
        left, right = ("input", "error") if layer.lookup else ("error", "input")
        return Kronecker(entry[f"{left}_root"], entry[f"{right}_root"], layer.shape)

    def _spectrum(self, layer: Layer, entry: Mapping[str, Tensor], group: Mapping[str, Any]) -> Tensor:
        """The precision in the eigenbasis."""
        if self._squares_gradients(group):
            squares = entry[SQUARES]
            floor = (FLOOR**2 * squares.amax()).clamp(min=torch.finfo(squares.dtype).tiny)
            information = group["batch_size"] * squares.maximum(floor)
        else:
            left, right = ("input", "error") if layer.lookup else ("error", "input")
            information = entry[f"{left}_values"][..., :, None] * entry[f"{right}_values"][..., None, :]
        # At lr = 0 the weights are constant, but the average of directions is still updated.
        lr = float(group["lr"]) or group["last_lr"] or 1.0
        half = lr / (2 * group["prior_std"] ** 2)
        return half + (half * half + group["batch_size"] * information).sqrt()

    def belief(self, layer: Layer, group: Mapping[str, Any]) -> Precision:
        if not self._is_current(self.optimizer.state[layer.owner], group):
            raise RuntimeError(
                f"prior_std was changed to {group['prior_std']:g} since the last step, whose belief this is: take a "
                "step, or set the prior_std of that step."
            )
        return self.precision(layer, group).scale(group["batch_size"] / self.step_scale(group))
