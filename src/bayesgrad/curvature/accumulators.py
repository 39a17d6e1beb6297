"""Accumulators over the batches of a loader: the Hessian of the total loss in each structure of `laplace`."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from bayesgrad import layers, likelihoods
from bayesgrad.layers.fisher import BatchGradients, Gradients, batch_gradients, sum_terms
from bayesgrad.layers.layer import Layer
from bayesgrad.layers.network import parameters_of, requires_grad_only
from bayesgrad.layers.per_example import (
    EmbeddingGradients,
    OuterProducts,
    PerExampleGradients,
    concatenated,
    restored,
)
from bayesgrad.layers.statistics import LayerStatistics, MomentSum
from bayesgrad.posterior.hessian import DenseHessian, DiagonalHessian, FactoredHessian, Hessian, LowRankHessian
from bayesgrad.precision.linalg import cholesky, eigenvalues

MAX_DENSE_WEIGHTS = 1 << 15  # of a dense Hessian
MAX_ROWS = 512  # of a Jacobian, processed at once
MAX_ELEMENTS = 1 << 27  # of the stored part of a Jacobian


class CurvatureAccumulator(ABC):
    """Sums per-example gradients over batches into Hessians of one structure."""

    def __init__(self, model: nn.Module, chosen: Mapping[str, nn.Parameter], structure: str, bias: str) -> None:
        self.shapes = {name: p.shape for name, p in chosen.items()}

    @abstractmethod
    def add(self, seen: BatchGradients) -> None:
        """Adds the gradients of one batch."""

    @property
    def complete(self) -> bool:
        """Whether the first direction of the outputs suffices for a batch."""
        return False

    @abstractmethod
    def hessians(self, total: float, count: int) -> list[Hessian]:
        """The Hessians for `total` examples, of which `count` were added."""


class DiagonalAccumulator(CurvatureAccumulator):
    """Σ g_j^2."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.squares: dict[str, Tensor] = {}

    def add(self, seen: BatchGradients) -> None:
        for name, columns in seen.columns.items():
            squares = columns.squares()
            self.squares[name] = self.squares[name] + squares if name in self.squares else squares

    def hessians(self, total: float, count: int) -> list[Hessian]:
        return [DiagonalHessian({n: self.shapes[n]}, total / count * s) for n, s in self.squares.items()]


class FullAccumulator(CurvatureAccumulator):
    """Σ g_j g_j' over all parameters."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        size = sum(shape.numel() for shape in self.shapes.values())
        if size > MAX_DENSE_WEIGHTS:
            raise ValueError(f"structure='full' needs a dense {size} x {size} matrix: use 'subsampled' or 'kron'.")
        self.matrix: Tensor | None = None

    def add(self, seen: BatchGradients) -> None:
        rows = torch.cat([columns.rows().reshape(columns.count, -1) for columns in seen.columns.values()], 1)
        self.matrix = rows.T @ rows if self.matrix is None else self.matrix.addmm_(rows.T, rows)

    def hessians(self, total: float, count: int) -> list[Hessian]:
        assert self.matrix is not None
        return [DenseHessian(self.shapes, total / count * self.matrix)]


class LowRankAccumulator(CurvatureAccumulator):
    """Stores the g_j themselves."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.parts: dict[str, list[PerExampleGradients]] = {name: [] for name in self.shapes}

    def add(self, seen: BatchGradients) -> None:
        for name, columns in seen.columns.items():
            self.parts[name].append(columns)

    def hessians(self, total: float, count: int) -> list[Hessian]:
        columns = {name: concatenated(parts) for name, parts in self.parts.items()}
        return [
            SubsampledHessian(self.shapes, FlatGradients(Gradients(columns, math.sqrt(total / count)), self.shapes))
        ]


@dataclass(frozen=True, eq=False)
class FlatGradients:
    """The gradients of all parameters, for flat vectors (1, n)."""

    gradients: Gradients
    shapes: Mapping[str, torch.Size]

    def project(self, vector: Tensor) -> Tensor:
        parts = vector.flatten().split([shape.numel() for shape in self.shapes.values()])
        return self.gradients.project({n: part.view(s) for part, (n, s) in zip(parts, self.shapes.items())})

    def combine(self, weights: Tensor) -> Tensor:
        parts = self.gradients.combine(weights)
        return torch.cat([parts[name].flatten() for name in self.shapes])[None]

    def gram(self) -> Tensor:
        return self.gradients.gram()

    def grams(self) -> dict[str, Tensor]:
        """The Gram matrix of each parameter; `gram` is their sum."""
        alone = {name: {name: columns} for name, columns in self.gradients.columns.items()}
        return {name: Gradients(columns, self.gradients.scale).gram() for name, columns in alone.items()}

    def weighted_diagonal(self, factor: Tensor) -> Tensor:
        parts = self.gradients.weighted_diagonal(factor)
        return torch.cat([parts[name].flatten() for name in self.shapes])[None]


@dataclass(frozen=True, eq=False)
class GradientProducts:
    r"""J (s G G' + D)^-1 J' by Woodbury's identity, from inner products of gradients alone.

    .. math::
        J D^{-1} J' - K' (I + s G' D^{-1} G)^{-1} K, \quad K = \sqrt{s} G' D^{-1} J'

    Rows of the Jacobian J are gradients of outputs, stored as inputs and errors like the gradients G, so no tensor of
    the size of the weights is needed. In float64, because the difference may be much smaller than its terms.

    Args:
        gradients: G by the names of parameters.
        prior: the diagonal D, one number for each parameter by name.
        scale: s.

    Checked by: tests/equations/test_laplace.py, against dense matrices.
    """

    gradients: Mapping[str, PerExampleGradients]
    prior: Mapping[str, float]
    scale: float

    def _gram(self, columns: Mapping[str, PerExampleGradients]) -> Tensor:
        return sum_terms(c.double().gram().div_(self.prior[name]) for name, c in columns.items())

    def _cross(self, jacobian: Mapping[str, PerExampleGradients]) -> Tensor:
        root = math.sqrt(self.scale)
        pairs = ((self.prior[name], c.double(), jacobian[name].double()) for name, c in self.gradients.items())
        return sum_terms(own.cross(other).mul_(root / prior) for prior, own, other in pairs)

    @cached_property
    def factor(self) -> Tensor:
        return cholesky(self._gram(self.gradients).mul_(self.scale), 1.0, "the Gram matrix of the gradients")

    def covariance(self, model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        with torch.no_grad():
            width = model(*[x[:1] for x in inputs]).numel()
        implicit = {
            name for name, c in self.gradients.items() if isinstance(c, OuterProducts) and c.inputs.shape[2] == 1
        }
        written = sum(c.shape.numel() for name, c in self.gradients.items() if name not in implicit)
        step = max(1, min(MAX_ROWS, MAX_ELEMENTS // max(1, written)) // width)
        kind = likelihoods.named("gaussian")  # its Hessian roots are the single outputs
        spread = []
        with requires_grad_only(model, {name: parameters_of(model)[name] for name in self.prior}):
            for parts in zip(*[x.split(step) for x in inputs]):
                (seen,) = batch_gradients(model, parts, kind, "exact", None, torch.Generator())
                spread.append(self._output_covariance(seen.columns, width))
        return torch.cat(spread)

    def _output_covariance(self, jacobian: Mapping[str, PerExampleGradients], width: int) -> Tensor:
        own, K = self._gram(jacobian), self._cross(jacobian)
        solved = torch.linalg.solve_triangular(self.factor, K, upper=False).view(len(K), width, -1)
        count = solved.shape[-1]  # number of examples; rows are ordered by output, then by example
        terms = own.view(width, count, width, count).diagonal(dim1=1, dim2=3).permute(2, 0, 1)
        return terms - torch.einsum("kcn,kdn->ncd", solved, solved)


@dataclass(frozen=True, eq=False)
class SubsampledHessian(LowRankHessian):
    """A low-rank Hessian whose gradients are stored as inputs and errors."""

    directions: FlatGradients

    def output_covariance(self, prior: Mapping[str, float], scale: float) -> GradientProducts:
        gradients = self.directions.gradients
        assert isinstance(gradients.scale, float)
        return GradientProducts(gradients.columns, prior, scale * gradients.scale**2)

    def stored(self) -> dict[str, Tensor]:
        gradients = self.directions.gradients
        parts = {f"{name} {key}": t for name, c in gradients.columns.items() for key, t in c.tensors().items()}
        return {**parts, "scale": torch.tensor(gradients.scale, dtype=torch.float64)}

    @classmethod
    def restored(cls, shapes: Mapping[str, torch.Size], parts: Mapping[str, Tensor]) -> Hessian:
        columns: dict[str, PerExampleGradients] = {}
        for name, shape in shapes.items():
            own = {key.removeprefix(f"{name} "): part for key, part in parts.items() if key.startswith(f"{name} ")}
            found = restored(own, shape)
            if found is None or not found.fits():
                raise KeyError(f"the gradients of {name}")
            columns[name] = found
        return cls(shapes, FlatGradients(Gradients(columns, float(parts["scale"])), shapes))


class LayerFactors:
    """The second moments of one layer's inputs and errors.

    Args:
        layer: its bias is None if that is not part of the block.
        names: of the layer's parameters.
        use_errors: whether the error factor is computed, or the identity.
    """

    def __init__(self, layer: Layer, names: Sequence[str], use_errors: bool) -> None:
        self.layer, self.names = layer, names
        sides = ("input", "error") if use_errors else ("input",)
        self.sums = {side: MomentSum.of(layer, side) for side in sides}
        self.rows = 0

    def add(self, columns: PerExampleGradients, count: int) -> None:
        """Adds a batch. Its inputs are in the first `count` columns (0: added before); directions differ in errors."""
        if not isinstance(columns, (OuterProducts, EmbeddingGradients)):
            raise ValueError(
                f"the layer of {self.names[0]} mixes the examples of a later batch, but not of the first one: begin "
                "with a batch of several examples, or use structure='diag'."
            )
        statistics = LayerStatistics.from_gradients(self.layer, columns, count)
        self.rows += statistics.rows
        for side, moment in statistics.moments(tuple(self.sums)).items():
            self.sums[side].add(moment)

    def hessian(self, shapes: Mapping[str, torch.Size], total: float) -> Hessian:
        a, columns = eigenvalues(total * self.sums["input"].mean())
        if "error" in self.sums:
            e, rows = eigenvalues(self.sums["error"].mean())
        else:
            e, rows = a.new_ones(self.layer.shape[0], self.layer.sizes["error"]), None
        own = {name: shapes[name] for name in self.names}
        if self.layer.lookup:
            return FactoredHessian(own, None, rows, a[..., :, None] * e[..., None, :])
        return FactoredHessian(own, rows, columns, e[..., :, None] * a[..., None, :])


class FactorAccumulator(CurvatureAccumulator):
    """Kronecker factors of layers, blocks of their biases, and the diagonal of all other parameters."""

    def __init__(self, model: nn.Module, chosen: Mapping[str, nn.Parameter], structure: str, bias: str) -> None:
        super().__init__(model, chosen, structure, bias)
        self.structure, self.use_errors, self.checked = structure, structure == "kron", False
        names = {id(p): name for name, p in chosen.items()}
        modules = [module for module in model.modules() if layers.is_matrix(module)]
        owners = Counter(id(p) for module in modules for p in layers.own_parameters(module).values())
        kinds = {id(layers.weight_of(m)): {layers.is_lookup(o) for o in modules if _shares(m, o)} for m in modules}
        self.layers: dict[str, LayerFactors] = {}
        self.biases: dict[str, str | None] = {}  # bias -> the weight of its layer
        for module in modules:
            own = {key: names[id(p)] for key, p in layers.own_parameters(module).items() if id(p) in names}
            weight, shift = own.get("weight"), own.get("bias")
            if weight is not None and len(kinds[id(layers.weight_of(module))]) > 1:
                weight = None  # a weight that is shared by an Embedding and a Linear
            alone = all(owners[id(p)] == 1 for p in layers.own_parameters(module).values())
            together = bias == "joint" and alone and weight is not None
            if weight is not None and weight not in self.layers:
                members = [weight, shift] if together and shift is not None else [weight]
                layer = Layer((weight,), module, *(chosen[name] for name in members), *[None] * (2 - len(members)))
                self.layers[weight] = LayerFactors(layer, members, self.use_errors)
            if shift is not None and not together:
                self.biases[shift] = weight
        self.moments: dict[str, Tensor] = {}
        self.rest = DiagonalAccumulator(model, chosen, structure, bias)

    def add(self, seen: BatchGradients) -> None:
        left = dict(seen.columns)
        if not self.checked:
            self._check_layers(seen.columns)
        for name, layer in self.layers.items():
            layer.add(left.pop(name), len(seen.outputs) if seen.first else 0)
            for own in layer.names[1:]:
                left.pop(own)
        for name in self.biases:
            rows = left.pop(name).rows().flatten(1)
            moment = rows.T @ rows if self.use_errors else torch.ones_like(rows[0])
            self.moments[name] = self.moments[name] + moment if name in self.moments else moment
        self.rest.add(BatchGradients(left, seen.outputs, seen.labels))

    @property
    def complete(self) -> bool:
        return not self.use_errors and not self.rest.squares

    def _check_layers(self, columns: Mapping[str, PerExampleGradients]) -> None:
        """Removes layers whose gradients are not outer products, and warns of all parameters that get a diagonal."""
        self.checked = True
        for name in [
            name for name in self.layers if not isinstance(columns[name], (OuterProducts, EmbeddingGradients))
        ]:
            del self.layers[name]
        kept = {name for layer in self.layers.values() for name in layer.names} | set(self.biases)
        rest = [name for name in columns if name not in kept]
        if rest:
            warnings.warn(
                f"structure={self.structure!r} does not support {', '.join(rest)}: they get a diagonal.", stacklevel=5
            )

    def hessians(self, total: float, count: int) -> list[Hessian]:
        found = [layer.hessian(self.shapes, total) for layer in self.layers.values()]
        for name, moment in self.moments.items():
            if self.use_errors:
                values, rows = eigenvalues((total / count * moment)[None])
                spectrum = values[..., None]
            else:
                layer = self.layers.get(self.biases[name] or "")
                positions = layer.rows / count if layer is not None else 1.0
                rows, spectrum = None, moment.new_full((1, len(moment), 1), total * positions)
            found.append(FactoredHessian({name: self.shapes[name]}, rows, None, spectrum))
        return [*found, *self.rest.hessians(total, count)]


def _shares(module: nn.Module, other: nn.Module) -> bool:
    return layers.weight_of(module) is layers.weight_of(other)


STRUCTURES: Mapping[str, Callable[..., CurvatureAccumulator]] = {
    "diag": DiagonalAccumulator,
    "kron": FactorAccumulator,
    "input": FactorAccumulator,
    "full": FullAccumulator,
    "subsampled": LowRankAccumulator,
}
