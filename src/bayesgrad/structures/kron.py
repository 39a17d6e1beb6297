"""Kronecker products of the second moments of inputs and errors of each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayesgrad import layers
from bayesgrad.distributed import Exchange, Sum
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.fisher import BatchGradients
from bayesgrad.layers.modules import Layer
from bayesgrad.layers.per_example import EmbeddingGradients, OuterProducts
from bayesgrad.layers.statistics import LayerStatistics
from bayesgrad.precision import Kronecker, Spectral
from bayesgrad.precision.kronecker import block_kron
from bayesgrad.precision.linalg import eigenvalues
from bayesgrad.structures.diag import DiagonalStructure
from bayesgrad.structures.structure import Accumulator, Structure, quadratic_form
from bayesgrad.warning import warn


@dataclass(frozen=True, eq=False)
class KroneckerStructure(Structure):
    """L ⊗ R for a matrix [W b] (groups, out, in); the prior is added in the eigenbasis, in which this is exact.

    For a layer, L = E are the second moments of errors and R = A those of inputs. The weight of an Embedding is the
    transpose, as is that of a transposed convolution, whose bias is a block by itself. All parameters that are not in a
    layer get a diagonal.

    Args:
        left, right: (groups, out, out) and (groups, in, in), the diagonals of these, or None for the identity. At least
            one is not None.

    Reference: Benzing 2021, appendix C; Ritter et al., 2018.
    """

    left: Tensor | None
    right: Tensor | None
    name = "kron"
    kind = "FactoredHessian"
    sides: ClassVar[tuple[str, ...]] = ("input", "error")

    @classmethod
    def blocks(
        cls, params: Mapping[str, nn.Parameter], model: nn.Module, joint_bias: bool, first: BatchGradients
    ) -> list[Accumulator]:
        known, biases = _plan(model, params, joint_bias)
        supported = {n for n in known if isinstance(first.columns[n], (OuterProducts, EmbeddingGradients))}
        factors = {name: LayerFactors(cls, known[name], params) for name in known if name in supported}
        if "error" not in cls.sides:  # then a bias needs the positions of its weight
            biases = {name: weight for name, weight in biases.items() if weight in factors}
        taken = {name for block in factors.values() for name in block.shapes} | set(biases)
        rest = [name for name in params if name not in taken]
        if rest:
            warn(f"structure={cls.name!r} does not support {', '.join(rest)}: they get a diagonal.")
        return [
            *factors.values(),
            *(BiasFactor(cls, name, params[name], factors.get(weight or "")) for name, weight in biases.items()),
            *(DiagonalStructure.empty({name: params[name]}) for name in rest),
        ]

    @property
    def leading(self) -> tuple[int, ...]:
        if self.left is not None:
            return tuple(self.left.shape[:2])
        assert self.right is not None
        groups, fan_in = self.right.shape[:2]
        return groups, self.size // (groups * fan_in)

    @property
    def _product(self) -> Kronecker:
        """Products with H: V -> L V R."""
        return Kronecker(self.left, self.right, self.shape)

    @cached_property
    def spectral(self) -> Spectral:
        """H in its eigenbasis."""
        groups, fan_out, fan_in = self.shape
        ones = (self.left if self.left is not None else self.right).new_ones(())  # pyright: ignore
        e, rows = (ones.expand(groups, fan_out), None) if self.left is None else eigenvalues(self.left)
        a, columns = (ones.expand(groups, fan_in), None) if self.right is None else eigenvalues(self.right)
        return Spectral(rows, columns, e[..., :, None] * a[..., None, :])

    def dense(self) -> Tensor:
        return block_kron(*self._product.matrices())

    def quadratic(self, change: Mapping[str, Tensor]) -> Tensor:
        return quadratic_form(self.joined(change), self._product.solve)

    def times(self, factor: float) -> Structure:
        if self.right is None:
            return replace(self, left=factor * self.left)  # pyright: ignore[reportOperatorIssue]
        return replace(self, right=factor * self.right)

    def plus(self, other: Structure) -> Structure | None:
        """The sum of both if one factor of each is the identity, the left one or the right one."""
        alone = isinstance(other, KroneckerStructure) and len(self.tensors()) == len(other.tensors()) == 1
        return super().plus(other) if alone else None

    def precision(self, prior: Mapping[str, float], scale: float) -> Spectral:
        return self.spectral.scale(scale).add(self._single(prior))

    def logdet_by_name(self, prior: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        shared: Tensor = self._single(prior)
        return self.logdet(dict.fromkeys(self.shapes, shared), scale)

    @cached_property
    def eigenvalues(self) -> Tensor:
        return self.spectral.spectrum.double().flatten()

    def _single(self, prior: Mapping[str, Any]) -> Any:
        """The prior precision of all parameters, which must have the same one."""
        values = [prior[name] for name in self.shapes]
        if any(value is not values[0] and value != values[0] for value in values):
            raise ValueError(
                f"{list(self.shapes)} are one block and need the same prior precision, got different ones: pass one "
                "number for both, or bias='separate' to laplace()."
            )
        return values[0]

    def stored(self) -> dict[str, Tensor]:
        found = self.spectral
        parts = {"rows": found.rows, "columns": found.columns, "spectrum": found.spectrum}
        return {name: part for name, part in parts.items() if part is not None}

    @classmethod
    def restored(cls, shapes: Mapping[str, torch.Size], parts: Mapping[str, Tensor]) -> Structure:
        rows, columns, spectrum = parts.get("rows"), parts.get("columns"), parts["spectrum"]
        left, right = spectrum.sum(2), spectrum.sum(1)
        if rows is None and torch.equal(spectrum, spectrum[:, :1].expand_as(spectrum)):
            made = cls(shapes, None, _moment(columns, spectrum[:, 0]))
        elif columns is None and torch.equal(spectrum, spectrum[:, :, :1].expand_as(spectrum)):
            made = cls(shapes, _moment(rows, spectrum[:, :, 0]), None)
        else:
            total = left.sum(1, keepdim=True).clamp(min=torch.finfo(spectrum.dtype).tiny)
            made = cls(shapes, _moment(rows, left), _moment(columns, right / total))
        vars(made)["spectral"] = Spectral(rows, columns, spectrum)  # bit for bit
        return made


def _moment(basis: Tensor | None, values: Tensor) -> Tensor:
    """The matrix of these eigenvectors (groups, n, n) and eigenvalues (groups, n); a diagonal without the former."""
    return values if basis is None else basis * values[:, None] @ basis.mT


# --- from gradients ---


class LayerFactors(Accumulator):
    """Sums the second moments of one layer's inputs and errors.

    Args:
        structure: whose `sides` are summed; the error factor is the identity if it has none.
        layer: its bias is None if that is not part of the block.
        params: of the posterior, by name.
    """

    def __init__(self, structure: type[KroneckerStructure], layer: Layer, params: Mapping[str, nn.Parameter]) -> None:
        self.structure, self.layer, self.one_direction = structure, layer, structure.one_direction
        names = {id(p): name for name, p in params.items()}
        self.shapes = {names[id(p)]: p.shape for p in layer.members}
        self.sums: dict[str, Any] = dict.fromkeys(structure.sides, 0)
        self.positions: Any = 0  # of all examples
        self.padding: int | None = getattr(layer.module, "padding_idx", None)  # its row of an Embedding has no gradient

    def add(self, seen: BatchGradients) -> None:
        weight = next(iter(self.shapes))
        columns = seen.columns[weight]
        if not isinstance(columns, (OuterProducts, EmbeddingGradients)):
            raise ValueError(
                f"the layer of {weight} mixes the examples of a later batch, but not of the first one: begin with a "
                "batch of several examples, or use structure='diag'."
            )
        examples = len(seen.outputs) if seen.first else 0
        statistics = LayerStatistics.from_gradients(self.layer, columns, examples, self.structure.sides)
        self.positions += statistics.rows
        for side, moment in statistics.moments().items():
            self.sums[side] = self.sums[side] + moment.sum()

    def share(self, exchange: Exchange) -> None:
        def receive(side: str, found: Sum) -> None:
            self.sums[side], self.positions = found

        for side, moment in self.sums.items():
            exchange.add(Sum(moment, self.positions), partial(receive, side))

    def finish(self, total: float, count: int) -> Structure:
        inputs = total / count * self.sums["input"].to(compute_dtype(self.layer.owner.dtype))
        if self.padding is not None:
            inputs[:, self.padding] = 0
        rows = max(1, self.positions)  # none if all lookups were padding
        errors = self.sums["error"] / rows if "error" in self.sums else None
        left, right = (inputs, errors) if self.layer.lookup or self.layer.transposed else (errors, inputs)
        return self.structure(self.shapes, left, right)


class BiasFactor(Accumulator):
    """Sums the second moments of a bias that is a block by itself; without errors they are the identity.

    Args:
        structure: whose `sides` are summed.
        name, p: the bias.
        layer: of its weight, if that is a block and no other bias goes with it; needed without errors.
    """

    def __init__(
        self, structure: type[KroneckerStructure], name: str, p: nn.Parameter, layer: LayerFactors | None
    ) -> None:
        self.structure, self.name, self.layer, self.one_direction = structure, name, layer, structure.one_direction
        self.shapes = {name: p.shape}
        self.total = torch.zeros(len(p), len(p), dtype=compute_dtype(p.dtype), device=p.device)

    def add(self, seen: BatchGradients) -> None:
        if "error" in self.structure.sides:
            rows = seen.columns[self.name].rows().flatten(1)
            self.total += rows.T @ rows

    def share(self, exchange: Exchange) -> None:
        exchange.add(Sum(self.total), lambda found: self.total.copy_(found.total))

    def finish(self, total: float, count: int) -> Structure:
        if "error" in self.structure.sides:
            return self.structure(self.shapes, (total / count * self.total)[None], None)
        assert self.layer is not None
        return self.structure(self.shapes, None, self.total.new_full((1, 1), total * self.layer.positions / count))


def _plan(
    model: nn.Module, params: Mapping[str, nn.Parameter], joint_bias: bool
) -> tuple[dict[str, Layer], dict[str, str | None]]:
    """The layers by the name of their weight, and the biases that are blocks by themselves, with their own weight."""
    names = {id(p): name for name, p in params.items()}
    modules = [module for _, module in layers.known_layers(model) if layers.is_matrix(module)]
    owners = Counter(id(p) for module in modules for p in layers.own_parameters(module).values())
    kinds: dict[int, set[bool]] = {}
    for module in modules:
        kinds.setdefault(id(layers.weight_of(module)), set()).add(layers.is_lookup(module))
    known: dict[str, Layer] = {}
    biases: dict[str, str | None] = {}
    for module in modules:
        own = {key: names[id(p)] for key, p in layers.own_parameters(module).items() if id(p) in names}
        weight, shift = own.get("weight"), own.get("bias")
        if len(kinds[id(layers.weight_of(module))]) > 1:
            weight = None  # a weight that is shared by an Embedding and a Linear
        alone = all(owners[id(p)] == 1 for p in layers.own_parameters(module).values())
        together = joint_bias and alone and weight is not None and not layers.is_transposed(module)
        if weight is not None and weight not in known:
            inside = params[shift] if together and shift is not None else None
            known[weight] = Layer((weight,), module, params[weight], inside)
        if shift is not None and not together:
            biases[shift] = weight if alone and layers.joins_bias(module) else None
    return known, biases
