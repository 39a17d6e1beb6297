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
from torch.func import vmap

from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.composite import owners
from bayesgrad.layers.examples import RowLayouts
from bayesgrad.layers.fisher import gather_gradients
from bayesgrad.layers.functional import gradients_one_by_one
from bayesgrad.layers.modules import Layer
from bayesgrad.layers.per_example import PerExampleGradients, StoredGradients
from bayesgrad.layers.recorder import Trace
from bayesgrad.layers.statistics import LayerStatistics
from bayesgrad.precision import Blocks, Diagonal, Precision, Scalar, Spectral
from bayesgrad.precision.linalg import eigenvalues, not_invertible
from bayesgrad.samplers.correction import Batch, drift_by_autodiff, gauss_newton_drift, is_linear
from bayesgrad.samplers.factors import factors
from bayesgrad.shards import owner, whole

Statistics = dict[Tensor, dict[str, Tensor]]  # by the parameter whose state they are stored in
State = Mapping[Any, Mapping[str, Tensor]]
Mean = Callable[..., list[Tensor]]


@dataclass(frozen=True, eq=False)
class ParameterSpace:
    """The parameters of a step.

    Args:
        params: the parameters with gradients, in flat order.
        all_params: all parameters of the sampler, in flat order.
        layers: the Linear, Conv and Embedding layers.
    """

    params: tuple[Tensor, ...]
    all_params: tuple[Tensor, ...]
    layers: tuple[Layer, ...]

    def flat(self) -> Tensor:
        """The current weights, (n,)."""
        return MetricBlock(self.params, UNIT).join({p: whole(p.detach()) for p in self.params})


@dataclass(frozen=True, eq=False)
class MetricBlock:
    """Some parameters and the precision of their concatenation to one vector.

    Args:
        members: the parameters.
        precision: of the concatenated vector.
        layer: of which they are [W b], if the precision is that of a matrix.
        block: the number of weights in each of several independent blocks.
    """

    members: tuple[Tensor, ...]
    precision: Precision
    layer: Layer | None = None
    block: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        kinds = {compute_dtype(p.dtype) for p in self.members}
        return torch.float64 if torch.float64 in kinds else torch.float32

    def join(self, values: Mapping[Tensor, Tensor]) -> Tensor:
        device = self.members[0].device
        parts = [values[p].to(device, self.dtype) for p in self.members]
        if self.layer is None:
            return torch.cat([part.reshape(-1) for part in parts]) if len(parts) > 1 else parts[0].reshape(-1)
        return self.layer.join(parts)

    def parted(self, joined: Tensor) -> dict[Tensor, Tensor]:
        if self.layer is None:
            pieces = joined.split([p.numel() for p in self.members])
        else:
            pieces = self.layer.parted(joined)
        return {p: piece.reshape(p.shape).to(p.device) for p, piece in zip(self.members, pieces)}

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.members)

    @property
    def columns(self) -> int:
        """The number of columns of R."""
        return self.size if self.block is None else self.block

    def basis(self) -> Tensor:
        """Vectors z, (columns, size), for which `samples` are the columns of R."""
        eye = torch.eye(self.columns, dtype=self.dtype, device=self.members[0].device)
        return eye.repeat(1, self.size // self.columns)

    def samples(self, noise: Tensor) -> tuple[Tensor, ...]:
        """R times each row of noise (rows, size), as a flat (rows, n) for each member."""

        def one(row: Tensor) -> tuple[Tensor, ...]:
            pieces = zip(self.members, row.split([p.numel() for p in self.members]))
            sample = self.precision.sample(self.join({p: piece.view(p.shape) for p, piece in pieces}))
            return tuple(piece.flatten() for piece in self.parted(sample).values())

        return vmap(one)(noise)


UNIT = Scalar(torch.ones(()), ())


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

    def shapes(self, space: ParameterSpace) -> dict[Tensor, dict[str, tuple[int, ...]]]:
        """The shapes of the statistics."""
        return {}

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
            if not own or layer.lookup:
                continue
            statistics = LayerStatistics.of(layer, own, len(view.trace.outputs))
            means = {side: moment.mean() for side, moment in statistics.moments().items()}
            found[layer.owner] = {"input_moment": means["input"], "error_moment": means["error"] * len(directions)}
        members = {p for layer in view.layers if layer.owner in found for p in layer.members}
        rest = ObservedBatch(view.trace, directions, [p for p in view.params if p not in members], (), view.layouts)
        return found | {p: {"fisher": square} for p, square in squares(rest).items()}

    def shapes(self, space: ParameterSpace) -> dict[Tensor, dict[str, tuple[int, ...]]]:
        layers = [layer for layer in space.layers if not layer.lookup]
        sizes = {layer: {side: (layer.shape[0], n, n) for side, n in layer.sizes.items()} for layer in layers}
        found = {one.owner: {f"{side}_moment": shape for side, shape in sizes[one].items()} for one in layers}
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


def solve_blocks(parts: Sequence[MetricBlock], vectors: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """G^-1 v, by parameter."""
    found: dict[Tensor, Tensor] = {}
    for part in parts:
        found |= part.parted(part.precision.solve(part.join(vectors)))
    return found


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


def root_columns(
    parts: Sequence[MetricBlock], params: Sequence[Tensor], signs: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """The columns of R as flat vectors (columns, n), or R z for random signs z of each parameter, (rows, *shape)."""
    pieces: dict[Tensor, list[Tensor]] = {p: [] for p in params}
    for part in parts:
        noise = part.basis() if signs is None else torch.cat([_flat_rows(signs(p)) for p in part.members], 1)
        for p, samples in zip(part.members, part.samples(noise.to(part.dtype))):
            pieces[p].append(samples)
    if signs is None and len(parts) > 1:  # the columns of a block are zero in other blocks
        total, start = sum(part.columns for part in parts), 0
        for part in parts:
            for p in part.members:
                (own,) = pieces[p]
                padded = own.new_zeros(total, own.shape[1])
                padded[start : start + len(own)] = own
                pieces[p] = [padded]
            start += part.columns
    flat = [pieces[p][0] for p in params]
    return torch.cat([rows.to(flat[0].device, MetricBlock(tuple(params), UNIT).dtype) for rows in flat], 1)


def _flat_rows(values: Tensor) -> Tensor:
    """(rows, *shape) -> (rows, n), with n = 1 for the values of a scalar parameter."""
    return values.reshape(len(values), values[0].numel())
