"""Per-example gradients of one parameter: the columns of a matrix G that is usually not formed.

For a parameter of n elements and N examples, G is the (n, N) matrix of per-example gradients g_j. Second-order methods
need products with G: `project` is G'u, `combine` is G w, `gram` is G'G, `cross` is G'H, `squares` is the sum of the
g_j^2, `weighted_diagonal` is the diagonal of G M G'. Each class computes them without forming G where that is cheaper:

| class | gradient | parameters |
|---|---|---|
| `OuterProducts` | g_j = sum_t e_jt a_jt' over positions t | weights of Linear and Conv (in groups) |
| `EmbeddingGradients` | g_j = sum_t 1[x_jt] e_jt', one-hot rows | weights of Embedding |
| `StoredGradients` | g_j itself is stored | biases, normalisation layers, parameters outside of these layers |

Reference: Benzing 2021, Eq. 19-21, corrected: sums over positions come before any product of two gradients.
Checked by: tests/algebra/test_per_example.py, each product against the matrix itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

CHUNK = 1 << 22  # elements of a temporary tensor: limits the memory of products


@dataclass(frozen=True, eq=False)
class PerExampleGradients(ABC):
    """Per-example gradients of one parameter."""

    shape: torch.Size
    kinds: ClassVar[dict[str, type[PerExampleGradients]]] = {}
    example_dim: ClassVar[int] = 0  # of its tensors; the next one is that of positions, if there are any

    def __init_subclass__(cls) -> None:
        PerExampleGradients.kinds[cls.__name__.lower()] = cls

    @property
    @abstractmethod
    def count(self) -> int:
        """N."""

    @abstractmethod
    def project(self, u: Tensor) -> Tensor:
        """G'u, (N,), for u in the parameter's shape."""

    @abstractmethod
    def combine(self, w: Tensor) -> Tensor:
        """G w in the parameter's shape, for w (N,)."""

    def combine_onto(self, u: Tensor, w: Tensor, beta: float) -> Tensor:
        """beta u + G w."""
        return self.combine(w).add_(u, alpha=beta)

    @abstractmethod
    def gram(self) -> Tensor:
        """G'G, (N, N)."""

    def cross(self, others: PerExampleGradients) -> Tensor:
        """G'H, (N, M), for the gradients H of other examples."""
        return torch.stack([self.project(row) for row in others.rows()], 1)

    @abstractmethod
    def squares(self) -> Tensor:
        """The sum of g_j^2 in the parameter's shape."""

    def weighted_diagonal(self, factor: Tensor) -> Tensor:
        """The diagonal of G (L L')^-1 G' in the parameter's shape, for a lower factor L (N, N)."""
        parts = self.rows().reshape(self.count, -1).split(max(1, CHUNK // self.count), 1)
        return torch.cat([_lengths(factor, part) for part in parts]).view(self.shape)

    @abstractmethod
    def rows(self) -> Tensor:
        """G' as a tensor (N, *shape)."""

    @abstractmethod
    def fits(self) -> bool:
        """Whether the tensors fit a parameter of this shape."""

    def double(self) -> PerExampleGradients:
        """The same gradients in float64."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        wide = {
            name: part.double() for name, part in own.items() if isinstance(part, Tensor) and part.is_floating_point()
        }
        return type(self)(**{**own, **wide})

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name, for a checkpoint; `restored` is the inverse."""
        kind = type(self).__name__.lower()
        own = [field.name for field in fields(self) if field.name != "shape"]
        return {f"{kind}_{name}": getattr(self, name) for name in own}


def floating_tensor(columns: PerExampleGradients) -> Tensor:
    """One of their floating-point tensors, for its dtype and device."""
    return next(t for t in columns.tensors().values() if t.is_floating_point())


def is_stored(name: str) -> bool:
    """Whether a state tensor of this name is one of `PerExampleGradients.tensors`."""
    return any(name.startswith(f"{kind}_") for kind in PerExampleGradients.kinds)


def restored(tensors: Mapping[str, Tensor], shape: torch.Size) -> PerExampleGradients | None:
    """The inverse of `PerExampleGradients.tensors`; other entries are ignored. None if no class matches."""
    for kind, cls in PerExampleGradients.kinds.items():
        own = {field.name: tensors.get(f"{kind}_{field.name}") for field in fields(cls) if field.name != "shape"}
        if all(value is not None for value in own.values()):
            return cls(shape, **own)
    return None


@dataclass(frozen=True, eq=False)
class OuterProducts(PerExampleGradients):
    """g_j = sum_t e_jt a_jt', for each group of channels.

    Args:
        inputs: a, (groups, N, positions, in).
        errors: e, (groups, N, positions, out).
    """

    inputs: Tensor
    errors: Tensor
    example_dim = 1

    @property
    def count(self) -> int:
        return self.inputs.shape[1]

    def fits(self) -> bool:
        return len(self.errors) * self.errors.shape[-1] * self.inputs.shape[-1] == self.shape.numel()

    def project(self, u: Tensor) -> Tensor:
        groups, _, _, fan_out = self.errors.shape
        matrix = u.reshape(groups, fan_out, -1)
        a, e = self.inputs, self.errors
        if a.shape[-1] <= fan_out:
            return (matmul(e, matrix) * a).sum((0, 2, 3))
        return (matmul(a, matrix.mT) * e).sum((0, 2, 3))

    def combine(self, w: Tensor) -> Tensor:
        a, e, w = self.inputs, self.errors, w.view(1, -1, 1, 1)
        a, e = (a * w, e) if a.shape[-1] <= e.shape[-1] else (a, e * w)
        return matmul(e.flatten(1, 2).mT, a.flatten(1, 2)).reshape(self.shape)

    def combine_onto(self, u: Tensor, w: Tensor, beta: float) -> Tensor:
        if len(self.inputs) > 1:
            return super().combine_onto(u, w, beta)
        a, e, w = self.inputs[0], self.errors[0], w.view(-1, 1, 1)
        a, e = (a * w, e) if a.shape[-1] <= e.shape[-1] else (a, e * w)
        a, e = a.flatten(0, 1), e.flatten(0, 1)
        return torch.addmm(u.reshape(e.shape[1], -1), e.T, a, beta=beta).view(self.shape)

    def gram(self) -> Tensor:
        _, count, positions, fan_in = self.inputs.shape
        fan_out = self.errors.shape[-1]
        if positions == 1:
            a, e = self.inputs.squeeze(2), self.errors.squeeze(2)
            product = matmul(a, a.mT).mul_(matmul(e, e.mT))
            return product[0] if len(product) == 1 else product.sum(0)
        # The costs of both algorithms, without their common factor.
        if positions**2 * (fan_in + fan_out) < fan_in * fan_out * (1 + positions / count):
            return _pairs(count, positions, self._overlap)
        return self._explicit_gram()

    def _overlap(self, some: slice, others: slice) -> Tensor:
        a, e = self.inputs, self.errors
        pairs = [torch.einsum("gnsi,gmti->gnsmt", x[:, some], x[:, others]) for x in (a, e)]
        return (pairs[0] * pairs[1]).sum((0, 2, 4))

    def _explicit_gram(self) -> Tensor:
        groups, count, _, fan_in = self.inputs.shape
        gram = self.inputs.new_zeros(count, count)
        step = max(1, CHUNK // (count * fan_in))
        for g in range(groups):
            for part in self.errors[g].split(step, -1):
                rows = torch.bmm(part.mT, self.inputs[g]).flatten(1)
                gram.addmm_(rows, rows.T)
        return gram

    def cross(self, others: PerExampleGradients) -> Tensor:
        if not isinstance(others, OuterProducts) or self.inputs.shape[2] > 1 or others.inputs.shape[2] > 1:
            return super().cross(others)
        sides = ((self.inputs, others.inputs), (self.errors, others.errors))
        a, e = (matmul(one.squeeze(2), other.squeeze(2).mT) for one, other in sides)
        return a.mul_(e).sum(0)

    def weighted_diagonal(self, factor: Tensor) -> Tensor:
        groups, count, _, fan_in = self.inputs.shape
        parts = [
            _lengths(factor, torch.bmm(part.mT, self.inputs[g]).flatten(1))
            for g in range(groups)
            for part in self.errors[g].split(max(1, CHUNK // (count * fan_in)), -1)
        ]
        return torch.cat(parts).view(self.shape)

    def squares(self) -> Tensor:
        _, count, positions, _ = self.inputs.shape
        if positions == 1:
            a, e = self.inputs.squeeze(2).square(), self.errors.squeeze(2).square()
            return matmul(e.mT, a).reshape(self.shape)
        total = self.inputs.new_zeros(self.shape)
        for chosen in torch.arange(count, device=total.device).split(max(1, CHUNK // total.numel())):
            total += self._rows(chosen).square().sum(0)
        return total

    def rows(self) -> Tensor:
        return self._rows(slice(None))

    def _rows(self, chosen: Tensor | slice) -> Tensor:
        rows = self.errors[:, chosen].mT @ self.inputs[:, chosen]  # (groups, n, out, in)
        return rows.transpose(0, 1).reshape(-1, *self.shape)


@dataclass(frozen=True, eq=False)
class EmbeddingGradients(PerExampleGradients):
    """g_j = sum_t 1[x_jt] e_jt': each position has a gradient for one row of the table.

    Args:
        indices: x, (N, positions).
        errors: e, (N, positions, features); zero at the padding index.
    """

    indices: Tensor
    errors: Tensor

    @property
    def count(self) -> int:
        return self.indices.shape[0]

    def fits(self) -> bool:
        return self.errors.shape[-1:] == self.shape[1:] and int(self.indices.max()) < self.shape[0]

    def project(self, u: Tensor) -> Tensor:
        return (u[self.indices] * self.errors).sum((1, 2))

    def combine(self, w: Tensor) -> Tensor:
        total = self.errors.new_zeros(self.shape)
        return total.index_add_(0, self.indices.flatten(), (self.errors * w.view(-1, 1, 1)).flatten(0, 1))

    def gram(self) -> Tensor:
        return _pairs(self.count, self.indices.shape[1], self._overlap)

    def _overlap(self, some: slice, others: slice) -> Tensor:
        e, x = self.errors, self.indices
        same = x[some, :, None, None] == x[others]
        return (torch.einsum("nsi,mti->nsmt", e[some], e[others]) * same).sum((1, 3))

    def weighted_diagonal(self, factor: Tensor) -> Tensor:
        step = max(1, CHUNK // (self.count * self.shape[0]))
        parts = [
            EmbeddingGradients(torch.Size((self.shape[0], e.shape[-1])), self.indices, e)
            for e in self.errors.split(step, -1)
        ]
        return torch.cat([super(EmbeddingGradients, part).weighted_diagonal(factor) for part in parts], 1)

    def squares(self) -> Tensor:
        # Sum over the positions of an example with the same row before squaring.
        example = torch.arange(self.count, device=self.indices.device)[:, None]
        keys, place = (example * self.shape[0] + self.indices).unique(return_inverse=True)
        sums = self.errors.new_zeros(len(keys), self.shape[1]).index_add_(0, place.flatten(), self.errors.flatten(0, 1))
        return self.errors.new_zeros(self.shape).index_add_(0, keys % self.shape[0], sums.square())

    def rows(self) -> Tensor:
        example = torch.arange(self.count, device=self.indices.device)[:, None].expand_as(self.indices)
        rows = self.errors.new_zeros(self.count, *self.shape)
        return rows.index_put_((example, self.indices), self.errors, accumulate=True)

    def as_outer(self) -> OuterProducts:
        """The same with explicit one-hot vectors, to be summed with other uses of the table."""
        hot = torch.nn.functional.one_hot(self.indices, self.shape[0]).to(self.errors.dtype)
        return OuterProducts(self.shape, self.errors[None], hot[None])


@dataclass(frozen=True, eq=False)
class StoredGradients(PerExampleGradients):
    """Gradients that are stored as they are.

    Args:
        values: g_j, (N, *shape).
    """

    values: Tensor

    @property
    def count(self) -> int:
        return self.values.shape[0]

    def fits(self) -> bool:
        return self.values.shape[1:] == self.shape

    def project(self, u: Tensor) -> Tensor:
        return self._flat() @ u.flatten()

    def combine(self, w: Tensor) -> Tensor:
        return (w @ self._flat()).view(self.shape)

    def gram(self) -> Tensor:
        rows = self._flat()
        return rows @ rows.T

    def cross(self, others: PerExampleGradients) -> Tensor:
        return self._flat() @ others.rows().reshape(others.count, -1).T

    def squares(self) -> Tensor:
        return self.values.square().sum(0)

    def rows(self) -> Tensor:
        return self.values

    def _flat(self) -> Tensor:
        return self.values.reshape(self.count, -1)  # works for parameters without dimensions too


def summed(parts: Sequence[PerExampleGradients]) -> PerExampleGradients:
    """The per-example gradients of a parameter that is used several times: the sum over its uses."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if len(counts := sorted({part.count for part in parts})) > 1:
        raise ValueError(
            f"a parameter of shape {tuple(first.shape)} was used with {' and '.join(map(str, counts))} examples in one "
            "forward pass, so its per-example gradients are not known: use the same number in all calls of its layers."
        )
    if any(isinstance(part, OuterProducts) for part in parts):
        parts = [part.as_outer() if isinstance(part, EmbeddingGradients) else part for part in parts]
    if not isinstance(parts[0], StoredGradients) and _alike(parts, positions=True):
        return _joined(parts, 1 + parts[0].example_dim)  # a sum over more positions
    return StoredGradients(first.shape, torch.stack([part.rows() for part in parts]).sum(0))


def concatenated(parts: Sequence[PerExampleGradients]) -> PerExampleGradients:
    """The per-example gradients of several batches, concatenated along the examples."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if not _alike(parts):
        raise ValueError(
            "batches that were observed together must have the same shape but for the number of examples: "
            "observe batches of one length, or call step() in between."
        )
    return _joined(parts, first.example_dim)


def _joined(parts: Sequence[PerExampleGradients], dim: int) -> PerExampleGradients:
    own = [field.name for field in fields(parts[0]) if field.name != "shape"]
    return type(parts[0])(parts[0].shape, *(torch.cat([getattr(p, name) for p in parts], dim) for name in own))


def _alike(parts: Sequence[PerExampleGradients], positions: bool = False) -> bool:
    """Whether all are of one class, with tensors of one shape but for examples, and for `positions`."""
    dims = {parts[0].example_dim, 1 + parts[0].example_dim} if positions else {parts[0].example_dim}
    shapes = {
        tuple(tuple(size for dim, size in enumerate(t.shape) if dim not in dims) for t in part.tensors().values())
        for part in parts
    }
    return len({type(part) for part in parts}) == 1 and len(shapes) == 1


def gradients_one_by_one(outputs: Tensor, params: Sequence[Tensor], directions: Sequence[Tensor]) -> list[Tensor]:
    """Per-example gradients by one backward pass for each example, (columns, *shape) for each parameter."""
    if not params:
        return []
    rows: list[list[Tensor]] = [[] for _ in params]
    for direction in directions:
        for example in range(len(outputs)):
            alone = torch.zeros_like(direction)
            alone[example] = direction[example]
            for row, gradient in zip(rows, torch.autograd.grad(outputs, params, alone, retain_graph=True)):
                row.append(gradient)
    return [torch.stack(row) for row in rows]


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """(groups, ..., k) times (groups, k, m); a single group uses a plain matrix product, which is faster."""
    rows = a.flatten(1, -2) if a.dim() > 3 else a
    product = (rows[0] @ b[0])[None] if a.shape[0] == 1 else torch.bmm(rows, b)
    return product.view(*a.shape[:-1], b.shape[-1]) if a.dim() > 3 else product


def _lengths(factor: Tensor, rows: Tensor) -> Tensor:
    """|L^-1 r|^2 for each column r of `rows` (N, n)."""
    return torch.linalg.solve_triangular(factor, rows.to(factor), upper=False).square().sum(0)


def _pairs(count: int, positions: int, overlap) -> Tensor:
    """A symmetric (N, N) matrix from `overlap(some, others)`, whose temporaries have positions^2 entries per pair."""
    step = max(1, CHUNK // (positions**2 * count))
    blocks = [slice(i, min(i + step, count)) for i in range(0, count, step)]
    strips = [overlap(block, slice(block.start, count)) for block in blocks]
    gram = strips[0].new_zeros(count, count)
    for block, strip in zip(blocks, strips):
        gram[block, block.start :] = strip
    return gram.triu() + gram.triu(1).T
