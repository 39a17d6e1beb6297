"""Metrics of samplers: the matrix G that preconditions gradients and noise.

| name | G | stored |
|---|---|---|
| `"identity"` | I | nothing |
| `"diagonal"` | the diagonal of the Fisher | n |
| `"kronecker"` | A ⊗ E for each layer; the diagonal for parameters outside of layers | in² + out² |
| `"fisher"` | the Fisher, (1/N) Σ J'H J | n² |
| `"empirical"` | (1/N) Σ g g' of the gradients at the given labels | n² |
| a function | any positive G(w) | nothing |

δI is added to each as damping. A metric implements three things: statistics of a batch (`read`), precisions of blocks
of weights (`parts`), and the derivatives for corrections (`drift`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.composite import owners
from bayesgrad.layers.examples import RowLayouts
from bayesgrad.layers.fisher import gather_gradients
from bayesgrad.layers.functional import gradients_one_by_one
from bayesgrad.layers.modules import Layer
from bayesgrad.layers.per_example import PerExampleGradients, StoredGradients
from bayesgrad.layers.recorder import Trace
from bayesgrad.layers.statistics import LayerStatistics
from bayesgrad.precision import Blocks, Diagonal, Scalar, Spectral
from bayesgrad.precision.linalg import eigenvalues, not_invertible
from bayesgrad.samplers.correction import Batch, drift_by_autodiff, gauss_newton_drift, is_linear
from bayesgrad.samplers.factors import factors
from bayesgrad.samplers.metric_blocks import UNIT, MetricBlock, ParameterSpace
from bayesgrad.shards import owner

Statistics = dict[Tensor, dict[str, Tensor]]  # by the parameter whose state they are stored in
State = Mapping[Any, Mapping[str, Tensor]]
Mean = Callable[..., list[Tensor]]


@dataclass(frozen=True, eq=False)
class ObservedBatch:
    """The outputs of a batch with their graph, and the directions in which to differentiate them.

    Args:
        trace: of the outputs.
        directions: vectors s of the outputs with Σ s s' = H.
        params: in flat order.
        layers: the Linear, Conv and Embedding layers.
        layouts: which rows of layers belong to which example, as far as it is known.
    """

    trace: Trace
    directions: Iterable[Tensor]
    params: Sequence[Tensor]
    layers: Sequence[Layer]
    layouts: RowLayouts = field(default_factory=RowLayouts)

    def gradients(self) -> Iterator[dict[Tensor, PerExampleGradients]]:
        """For each direction the per-example gradients, from layers or one by one."""
        for direction in self.directions:
            found, _ = gather_gradients(self.trace, [direction], self.layouts)
            rest = [p for p in self.params if id(p) not in found and id(p) in self.trace.read_counts]
            several = gradients_one_by_one(self.trace.outputs, rest, [direction], self.params)
            for p, rows in zip(rest, several):
                found[id(p)] = StoredGradients(p.shape, rows.to(compute_dtype(p.dtype)))
            yield {p: found[id(p)] for p in self.params if id(p) in found}


class Metric(ABC):
    """The interface of metrics."""

    needs_observe: ClassVar[bool] = True  # whether it needs observe(outputs)
    joint: ClassVar[bool] = False  # whether the state of the first parameter has the statistics of all, frozen or not

    @abstractmethod
    def parts(self, state: State, space: ParameterSpace, damping: float) -> list[MetricBlock]:
        """The precisions of the parameters of a space, from the stored statistics."""

    def read(self, view: ObservedBatch) -> Statistics:
        """The statistics of a batch, as means over its examples."""
        return {}

    def weight(self, slot: str, losses: float, examples: int, used: bool) -> float:
        """The weight of a batch in the mean of a statistic over several batches.

        Args:
            slot: its name.
            losses, examples: of the batch.
            used: whether the batch has any.
        """
        return losses

    def shapes(self, space: ParameterSpace) -> dict[Tensor, dict[str, tuple[int, ...]]]:
        """The shapes of the statistics."""
        return {}

    def seen(self, state: State, space: ParameterSpace) -> set[Tensor]:
        """The parameters of which there are statistics; zeros are those of what no observed outputs depended on."""
        return {p for p in space.all_params if not self.needs_observe or _used(state.get(p, {}).get("fisher"))}

    def merge(
        self, entry: dict[str, Tensor], fresh: Mapping[str, Tensor], keep: float, take: float, space: ParameterSpace
    ) -> None:
        """Averages the statistics in the state of a parameter with those of a batch, if the batch uses it."""
        if not all(map(_used, fresh.values())):
            entry.update({slot: value for slot, value in fresh.items() if slot not in entry})
            return
        for slot, value in fresh.items():
            old = entry.get(slot)
            begins = not keep or old is None or old.shape != value.shape or not _used(old)
            entry[slot] = value if begins else keep * old + take * value  # pyright: ignore[reportOperatorIssue]

    def form(self, model: nn.Module) -> str:
        """How corrections are computed with all columns of R: "zero", "closed" or "exact"."""
        return "exact"

    def drift(self, batches: Sequence[Batch], space: ParameterSpace, roots: Tensor, kind: str, mean: Mean) -> Tensor:
        """G times the correction: -u, or -u + t/2; a mean over the losses of these batches.

        Args:
            mean: of such means over all processes.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Identity(Metric):
    """G = I: plain Langevin dynamics (SGLD)."""

    needs_observe = False

    def parts(self, state: State, space: ParameterSpace, damping: float) -> list[MetricBlock]:
        found = []
        for p in space.params:
            one = torch.ones((), dtype=compute_dtype(p.dtype), device=p.device)
            found.append(MetricBlock((p,), Scalar(one / (1 + damping), (p.numel(),))))
        return found

    def form(self, model: nn.Module) -> str:
        return "zero"


@dataclass(frozen=True)
class DiagonalFisher(Metric):
    """G = diag F."""

    def read(self, view: ObservedBatch) -> Statistics:
        return {p: {"fisher": square} for p, square in squares(view).items()}

    def shapes(self, space: ParameterSpace) -> dict[Tensor, dict[str, tuple[int, ...]]]:
        return {p: {"fisher": tuple(p.shape)} for p in space.all_params}

    def parts(self, state: State, space: ParameterSpace, damping: float) -> list[MetricBlock]:
        return [MetricBlock((p,), diagonal(state[p]["fisher"], damping)) for p in space.params]

    def drift(self, batches: Sequence[Batch], space: ParameterSpace, roots: Tensor, kind: str, mean: Mean) -> Tensor:
        total = sum(batch.count for batch in batches)

        def product(w: Tensor, z: Tensor) -> Tensor:
            return z * sum(batch.squares(w) for batch in batches) / total

        return drift_by_autodiff(product, space.flat(), roots, kind)


@dataclass(frozen=True)
class KroneckerFactors(Metric):
    """G = A ⊗ E for each layer, with the damping added to the product."""

    def read(self, view: ObservedBatch) -> Statistics:
        directions = list(view.directions)
        passes = [view.trace.backpropagate(direction) for direction in directions]
        found: Statistics = {}
        for layer in view.layers:
            weight = owner(layer.module._parameters.get("weight"))
            own = [use for uses in passes for use in uses if owner(use.module._parameters.get("weight")) is weight]
            if layer.lookup:
                continue
            if not own:
                if not any(id(p) in view.trace.read_counts for p in layer.members):
                    found |= self.zeros(layer)
                continue
            statistics = LayerStatistics.of(layer, own, len(view.trace.outputs))
            means = {side: moment.mean() for side, moment in statistics.moments().items()}
            found[layer.owner] = {"input_moment": means["input"], "error_moment": means["error"] * len(directions)}
        members = {p for layer in view.layers if layer.owner in found for p in layer.members}
        rest = ObservedBatch(view.trace, directions, [p for p in view.params if p not in members], (), view.layouts)
        return found | {p: {"fisher": square} for p, square in squares(rest).items()}

    def weight(self, slot: str, losses: float, examples: int, used: bool) -> float:
        """Inputs are averaged over all examples, and errors over the losses of batches that use the layer."""
        return float(examples) if slot == "input_moment" else losses if used or slot != "error_moment" else 0.0

    def seen(self, state: State, space: ParameterSpace) -> set[Tensor]:
        known = super().seen(state, space)
        for layer in space.layers:
            moments = {slot: state.get(layer.owner, {}).get(slot) for slot in self.sizes(layer)}
            if all(_used(moments[slot], shape) for slot, shape in self.sizes(layer).items()):
                known |= set(layer.members)
        return known

    @staticmethod
    def sizes(layer: Layer) -> dict[str, tuple[int, ...]]:
        return {f"{side}_moment": (layer.shape[0], n, n) for side, n in layer.sizes.items()}

    def zeros(self, layer: Layer) -> Statistics:
        """The statistics of a layer that a batch does not use."""
        like: dict[str, Any] = {"dtype": compute_dtype(layer.owner.dtype), "device": layer.owner.device}
        return {layer.owner: {slot: torch.zeros(shape, **like) for slot, shape in self.sizes(layer).items()}}

    def shapes(self, space: ParameterSpace) -> dict[Tensor, dict[str, tuple[int, ...]]]:
        layers = [layer for layer in space.layers if not layer.lookup]
        found: dict[Tensor, dict[str, tuple[int, ...]]] = {layer.owner: self.sizes(layer) for layer in layers}
        members = {p for layer in layers for p in layer.members}
        return found | {p: {"fisher": tuple(p.shape)} for p in space.all_params if p not in members}

    def parts(self, state: State, space: ParameterSpace, damping: float) -> list[MetricBlock]:
        found, seen = [], set()
        for layer in space.layers:
            entry = state.get(layer.owner, {})
            absent = set(layer.members) - set(space.params)
            if len(absent) == len(layer.members) or "input_moment" not in entry:
                continue
            if absent:
                raise RuntimeError(
                    f"weight and bias of layer {layer.names[0]!r} have a common metric, but only one of them has a "
                    "gradient: call requires_grad_(False) of the other one before the forward pass."
                )
            seen |= set(layer.members)
            moments = [entry[f"{side}_moment"] for side in ("input", "error")]
            try:
                (inputs, columns), (errors, rows) = map(eigenvalues, moments)
            except torch.linalg.LinAlgError as error:  # also of entries that are not finite
                every = torch.cat([moment.flatten() for moment in moments])
                raise not_invertible(every, damping, f"the metric of layer {layer.names[0]!r}") from error
            spectrum = errors[..., :, None] * inputs[..., None, :] + damping
            if not bool((spectrum > 0).all() & torch.isfinite(spectrum).all()):
                raise not_invertible(spectrum, damping, f"the metric of layer {layer.names[0]!r}")
            found.append(MetricBlock(tuple(layer.members), Spectral(rows, columns, spectrum), layer))
        rest = [p for p in space.params if p not in seen]
        return found + [MetricBlock((p,), diagonal(state[p]["fisher"], damping)) for p in rest]

    def drift(self, batches: Sequence[Batch], space: ParameterSpace, roots: Tensor, kind: str, mean: Mean) -> Tensor:
        names: dict[Tensor, str] = {p: name for name, p in batches[0].model.named_parameters()}
        own = [layer for layer in space.layers if set(layer.members) & set(space.params)]
        layers = [layer for layer in own if not layer.lookup and not owners(layer.module)]
        lost = set(space.params) - {p for layer in layers for p in layer.members}
        if lost:
            raise ValueError(
                f"correction={kind!r} of metric='kronecker' supports parameters of Linear and Conv layers, got "
                f"{names[next(iter(lost))]}: leave it out of params=, or use another metric."
            )
        weights = space.flat()
        known = mean(*factors(batches, layers, weights))

        def product(w: Tensor, z: Tensor) -> Tensor:
            """Has the derivative of G z by w, E' z A + E z A', which is a mean over examples, as G is not."""
            vectors, pairs = batches[0].weights(z), zip(factors(batches, layers, w), known)
            for layer, (A, fixed_A), (E, fixed_E) in zip(layers, pairs, pairs):
                own = [names[p] for p in layer.members]
                joined = layer.join([vectors[name] for name in own])
                vectors |= dict(zip(own, layer.parted(E @ joined @ fixed_A + fixed_E @ joined @ A)))
            return torch.cat([vectors[name].flatten() for name in batches[0].names])

        return drift_by_autodiff(product, weights, roots, kind)


@dataclass(frozen=True)
class DenseFisher(Metric):
    """G = F as a dense matrix; at given labels with `empirical`."""

    joint = True
    empirical: bool = False

    def read(self, view: ObservedBatch) -> Statistics:
        first = view.params[0]
        dtype = MetricBlock(tuple(view.params), UNIT).dtype
        size = sum(p.numel() for p in view.params)
        total = torch.zeros(size, size, dtype=dtype, device=first.device)
        count = len(view.trace.outputs)
        for found in view.gradients():
            rows = torch.zeros(count, size, dtype=dtype, device=first.device)
            for p, part in zip(view.params, rows.split([p.numel() for p in view.params], 1)):
                if p in found:
                    part.copy_(found[p].rows().detach().reshape(count, -1))
            total.addmm_(rows.mT, rows, alpha=1 / count)
        return {first: {"fisher": total}}

    def shapes(self, space: ParameterSpace) -> dict[Tensor, dict[str, tuple[int, ...]]]:
        size = sum(p.numel() for p in space.all_params)
        return {space.all_params[0]: {"fisher": (size, size)}}

    def seen(self, state: State, space: ParameterSpace) -> set[Tensor]:
        matrix = state.get(space.all_params[0], {}).get("fisher")
        if matrix is None or len(matrix) != sum(p.numel() for p in space.all_params):
            return set()
        return {p for p, used in zip(space.all_params, self._used(matrix, space)) if used}

    @staticmethod
    def _used(matrix: Tensor, space: ParameterSpace) -> list[bool]:
        """Of each parameter, whether the diagonal is not zero."""
        parts = matrix.diagonal().split([p.numel() for p in space.all_params])
        return torch.stack([part.any() for part in parts]).tolist()

    def merge(
        self, entry: dict[str, Tensor], fresh: Mapping[str, Tensor], keep: float, take: float, space: ParameterSpace
    ) -> None:
        """As of other metrics; what a batch does not use keeps its block, and loses its products with the rest."""
        new, old = fresh["fisher"], entry.get("fisher")
        if old is None or old.shape != new.shape:
            entry["fisher"] = new
            return
        used, known = self._used(new, space), self._used(old, space)
        begins = not keep or any(now and not before for now, before in zip(used, known))
        mixed = new if begins else keep * old + take * new
        sizes = torch.tensor([p.numel() for p in space.all_params])
        mine = torch.tensor(used).repeat_interleave(sizes).to(new.device)
        kept = torch.where(mine[:, None] | mine, torch.zeros_like(old), old)
        entry["fisher"] = mixed if all(used) else torch.where(mine[:, None] & mine, mixed, kept)

    def parts(self, state: State, space: ParameterSpace, damping: float) -> list[MetricBlock]:
        matrix = state[space.all_params[0]]["fisher"]
        if len(space.params) < len(space.all_params):
            sizes = torch.tensor([p.numel() for p in space.all_params])
            chosen = torch.tensor([p in set(space.params) for p in space.all_params]).repeat_interleave(sizes)
            index = chosen.nonzero()[:, 0].to(matrix.device)
            matrix = matrix[index[:, None], index]
        return [MetricBlock(space.params, Blocks.of(matrix, damping, "the Fisher"))]

    def form(self, model: nn.Module) -> str:
        return "closed" if is_linear(model) else "exact"

    def drift(self, batches: Sequence[Batch], space: ParameterSpace, roots: Tensor, kind: str, mean: Mean) -> Tensor:
        return gauss_newton_drift(batches, space.flat(), roots, kind, is_linear(batches[0].model))


@dataclass(frozen=True)
class CallableMetric(Metric):
    """G(w) as a function of the flat weights (n,): a diagonal (n,), a matrix (n, n), or blocks (m, k, k) with m k = n.

    Block b belongs to the weights b k to (b + 1) k and must depend on them alone; this supports m parallel chains.
    """

    needs_observe = False
    function: Callable[[Tensor], Tensor]

    def parts(self, state: State, space: ParameterSpace, damping: float) -> list[MetricBlock]:
        w = space.flat()
        matrix = self.function(w).detach()
        if matrix.dim() == 1 and matrix.shape == w.shape:
            return [MetricBlock(space.params, diagonal(matrix, damping))]
        if matrix.dim() in (2, 3) and matrix.shape[:-1].numel() == len(w) and matrix.shape[-1] == matrix.shape[-2]:
            block = matrix.shape[-1]
            precision = diagonal(matrix, damping) if block == 1 else Blocks.of(matrix, damping, "the metric")
            return [MetricBlock(space.params, precision, block=block)]
        raise ValueError(
            f"a metric of {len(w)} weights must have shape ({len(w)},), ({len(w)}, {len(w)}) or (m, k, k) with "
            f"m k = {len(w)}, got {tuple(matrix.shape)}."
        )

    def drift(self, batches: Sequence[Batch], space: ParameterSpace, roots: Tensor, kind: str, mean: Mean) -> Tensor:
        def product(w: Tensor, z: Tensor) -> Tensor:
            matrix = self.function(w)
            if matrix.dim() == 1:
                return matrix * z
            blocks = matrix.reshape(-1, *matrix.shape[-2:])
            return (blocks @ z.reshape(len(blocks), -1, 1)).flatten()

        return drift_by_autodiff(product, space.flat(), roots, kind)


METRICS: dict[str, Metric] = {
    "identity": Identity(),
    "diagonal": DiagonalFisher(),
    "kronecker": KroneckerFactors(),
    "fisher": DenseFisher(),
    "empirical": DenseFisher(empirical=True),
}


def metric_by_name(metric: str | Callable[[Tensor], Tensor]) -> tuple[str, Metric]:
    """The name and the metric; the name of a function is "callable"."""
    if callable(metric):
        return "callable", CallableMetric(metric)
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(map(repr, METRICS))}, or a function, got {metric!r}.")
    return metric, METRICS[metric]


def _used(statistics: Tensor | None, shape: tuple[int, ...] | None = None) -> bool:
    """Whether statistics are there, in this shape, and not zero."""
    return statistics is not None and shape in (None, statistics.shape) and bool(statistics.any())


def diagonal(square: Tensor, damping: float) -> Diagonal:
    damped = square.flatten() + damping
    if not bool((damped > 0).all() & torch.isfinite(damped).all()):
        raise not_invertible(square, damping, "a diagonal of the metric")
    return Diagonal(1 / damped)


def squares(view: ObservedBatch) -> dict[Tensor, Tensor]:
    """The diagonal of F, for each parameter in its shape."""
    total = {p: torch.zeros(p.shape, dtype=compute_dtype(p.dtype), device=p.device) for p in view.params}
    count = len(view.trace.outputs)
    for found in view.gradients() if view.params else ():
        for p, columns in found.items():
            total[p] += columns.squares().to(total[p]) / count
    return total
