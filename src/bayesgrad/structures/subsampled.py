"""The Hessian of a few examples, as products with their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from bayesgrad.belief import Belief
from bayesgrad.distributed import Exchange
from bayesgrad.layers.combination import concatenated
from bayesgrad.layers.fisher import BatchGradients, Gradients, sum_terms
from bayesgrad.layers.output_covariance import BlockCovariance, Jacobian
from bayesgrad.layers.per_example import OuterProducts, PerExampleGradients, floating_tensor, restored
from bayesgrad.precision import LowRank, Precision, Rescaled, Scalar
from bayesgrad.precision.linalg import cholesky
from bayesgrad.structures.structure import Accumulator, Structure


@dataclass(frozen=True, eq=False)
class SubsampledStructure(Structure):
    """s² G G' for the gradients G of a few examples, which are stored as inputs and errors; vectors are flat, (1, n).

    Args:
        parts: the gradients of each parameter, in batches.
        scale: s.
    """

    parts: Mapping[str, list[PerExampleGradients]]
    scale: float
    name = "subsampled"
    kind = "SubsampledHessian"
    stores_gradients = True

    @classmethod
    def blocks(
        cls, params: Mapping[str, nn.Parameter], model: nn.Module, joint_bias: bool, first: BatchGradients
    ) -> list[Accumulator]:
        return [cls.empty(params)]

    @classmethod
    def empty(cls, params: Mapping[str, nn.Parameter]) -> Structure:
        return cls({name: p.shape for name, p in params.items()}, {name: [] for name in params}, 1.0)

    def add(self, seen: BatchGradients) -> None:
        for name, parts in self.parts.items():
            parts.append(seen.columns[name])

    def share(self, exchange: Exchange) -> None:
        for name, parts in self.parts.items():
            received: dict[str, list[Tensor]] = {}
            for key, part in concatenated(parts).tensors().items():
                exchange.gather(part, partial(received.__setitem__, key))
            exchange.after(partial(self._receive, name, received))

    def _receive(self, name: str, received: Mapping[str, list[Tensor]]) -> None:
        self.parts[name].clear()
        for of_process in zip(*received.values()):
            found = restored(dict(zip(received, of_process)), self.shapes[name])
            assert found is not None
            self.parts[name].append(found)

    @cached_property
    def columns(self) -> dict[str, PerExampleGradients]:
        """The gradients of each parameter."""
        return {name: concatenated(parts) for name, parts in self.parts.items()}

    @cached_property
    def gram(self) -> Tensor:
        return Gradients(self.columns, self.scale).gram()

    @cached_property
    def eigenvalues(self) -> Tensor:
        return torch.linalg.eigvalsh(self.gram.double()).clamp(min=0)

    @cached_property
    def _grams(self) -> Mapping[str, Tensor]:
        """The Gram matrix of each parameter; `gram` is their sum."""
        return {name: Gradients({name: own}, self.scale).gram() for name, own in self.columns.items()}

    def dense(self) -> Tensor:
        rows = torch.cat([self.scale * own.rows().reshape(own.count, -1) for own in self.columns.values()], 1)
        return rows.T @ rows

    def quadratic(self, change: Mapping[str, Tensor]) -> Tensor:
        return Gradients(self.columns, self.scale).project(change).square().sum()

    def times(self, factor: float) -> Structure:
        return replace(self, scale=math.sqrt(factor) * self.scale)

    def plus(self, other: Structure) -> None:
        return None

    def precision(self, prior: Mapping[str, float], scale: float) -> Precision:
        floors = {prior[name] for name in self.shapes}
        if len(floors) == 1:
            directions = FlatGradients(Gradients(self.columns, scale**0.5 * self.scale), lambda: scale * self.gram)
            return LowRank(floors.pop(), directions, self.shape)

        def square() -> Tensor:
            return torch.stack([scale / prior[name] * gram for name, gram in self._grams.items()]).sum(0)

        like = floating_tensor(next(iter(self.columns.values())))
        roots = {name: prior[name] ** 0.5 for name in self.shapes}
        scales = {name: (scale**0.5 / root) * self.scale for name, root in roots.items()}
        inner = LowRank(1.0, FlatGradients(Gradients(self.columns, scales), square), self.shape)
        return Rescaled(inner, _flat({name: like.new_full(s, roots[name]) for name, s in self.shapes.items()}))

    def logdet_by_name(self, prior: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        inner = torch.eye(len(self.gram), dtype=torch.float64, device=self.gram.device)
        for name, gram in self._grams.items():
            inner = inner + scale / prior[name] * gram.double()
        volume = 2 * torch.linalg.cholesky(inner).diagonal().log().sum()
        return volume + torch.stack([s.numel() * prior[name].log() for name, s in self.shapes.items()]).sum()

    def output_covariance(self, belief: Belief, prior: Mapping[str, float], scale: float) -> GradientProducts:
        return GradientProducts(self.columns, prior, scale * self.scale**2)

    def tensors(self) -> dict[str, Tensor]:
        return {f"{name} {key}": part for name, own in self.columns.items() for key, part in own.tensors().items()}

    def stored(self) -> dict[str, Tensor]:
        return {**self.tensors(), "scale": torch.tensor(self.scale, dtype=torch.float64)}

    @classmethod
    def restored(cls, shapes: Mapping[str, torch.Size], parts: Mapping[str, Tensor]) -> Structure:
        columns: dict[str, list[PerExampleGradients]] = {}
        for name, shape in shapes.items():
            own = {key.removeprefix(f"{name} "): part for key, part in parts.items() if key.startswith(f"{name} ")}
            found = restored(own, shape)
            if found is None or not found.fits():
                raise KeyError(f"the gradients of {name}")
            columns[name] = [found]
        return cls(shapes, columns, float(parts["scale"]))


@dataclass(frozen=True, eq=False)
class FlatGradients:
    """The gradients of all parameters, for flat vectors (1, n).

    Args:
        gradients: by name.
        gram: computes G'G.
    """

    gradients: Gradients
    gram: Callable[[], Tensor]

    def project(self, vector: Tensor) -> Tensor:
        columns = self.gradients.columns
        parts = vector.flatten().split([own.shape.numel() for own in columns.values()])
        return self.gradients.project({n: part.view(own.shape) for part, (n, own) in zip(parts, columns.items())})

    def combine(self, weights: Tensor) -> Tensor:
        return _flat(self.gradients.combine(weights))

    def weighted_diagonal(self, factor: Tensor) -> Tensor:
        return _flat(self.gradients.weighted_diagonal(factor))


def _flat(parts: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts.values()])[None]


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

    def _gram(self) -> Tensor:
        return sum_terms(c.double().gram().div_(self.prior[name]) for name, c in self.gradients.items())

    @cached_property
    def factor(self) -> Tensor:
        return cholesky(self._gram().mul_(self.scale), 1.0, "the Gram matrix of the gradients")

    def workspace(self, jacobian: Jacobian, count: int) -> int:
        written = [own.shape.numel() for own in self.gradients.values() if not _at_one_position(own)]
        return 2 * (len(self.factor) + sum(written))  # in float64

    def covariance(self, one: Jacobian, other: Jacobian, count: int, joint: bool) -> Tensor:
        first = {name: one[name].double() for name in self.gradients}
        second = first if other is one else {name: other[name].double() for name in self.gradients}
        alone = []
        for name, own in self.gradients.items():
            variance = floating_tensor(own).new_full((), 1 / self.prior[name], dtype=torch.float64)
            belief = Belief(variance.expand(own.shape), Scalar(variance, own.shape))
            alone.append(BlockCovariance(name, belief).covariance(first, second, count, joint))
        solved = [self._solved(rows, count) for rows in ((first,) if other is one else (first, second))]
        return sum_terms(alone) - torch.einsum("knc,knd->ncd" if joint else "knc,knc->nc", solved[0], solved[-1])

    def _solved(self, rows: Jacobian, count: int) -> Tensor:
        """L^-1 K for the factor L, (gradients, examples, outputs)."""
        root = math.sqrt(self.scale)
        pairs = ((self.prior[name], c.double(), rows[name]) for name, c in self.gradients.items())
        K = sum_terms(own.cross(other).mul_(root / prior) for prior, own, other in pairs)
        return torch.linalg.solve_triangular(self.factor, K, upper=False).unflatten(1, (count, -1))


def _at_one_position(columns: PerExampleGradients) -> bool:
    return isinstance(columns, OuterProducts) and columns.inputs.shape[2] == 1
