"""Per-example gradients of one parameter: the columns of a matrix G that is usually not formed.

For a parameter of n elements and N examples, G is the (n, N) matrix of per-example gradients g_j. Second-order methods
need products with G: `project` is G'u, `combine` is G w, `gram` is G'G, `cross` is G'H, `squares` is the sum of the
g_j^2, `weighted_diagonal` is the diagonal of G M G'. Each class computes them without forming G where that is cheaper:

| class | gradient | parameters |
|---|---|---|
| `OuterProducts` | g_j = sum_t e_jt a_jt' over positions t | weights of Linear and Conv (in groups) |
| `EmbeddingGradients` | g_j = sum_t 1[x_jt] e_jt', one-hot rows | weights of Embedding |
| `StoredGradients` | g_j itself is stored | biases, normalisation layers, parameters outside of these layers |

An example may have several gradients, one for each of some directions of the model's outputs. They are consecutive
columns of G, and have the same inputs, which are stored once.

Reference: Benzing 2021, Eq. 19-21, corrected: sums over positions come before any product of two gradients.
Checked by: tests/algebra/test_per_example.py, each product against the matrix itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from bayesgrad.directions import Product
from bayesgrad.products import mm

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

    def combination(self, w: Tensor) -> Tensor | Product:
        """G w, as a `Product` where there is one."""
        return self.combine(w)

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

    @property
    def directions(self) -> int:
        """The number of gradients of each example, which share its inputs."""
        return 1

    def repeated(self) -> PerExampleGradients:
        """The same gradients, each with inputs of its own."""
        return self

    def of_examples(self, count: int, chosen: slice) -> PerExampleGradients:
        """The gradients of some of `count` examples."""
        parts = {}
        for field in fields(self):
            part = getattr(self, field.name)
            if isinstance(part, Tensor):
                each = part.shape[self.example_dim] // count
                size = (chosen.stop - chosen.start) * each
                parts[field.name] = part.narrow(self.example_dim, chosen.start * each, size)
        return replace(self, **parts)

    def double(self) -> PerExampleGradients:
        """The same gradients in float64."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        wide = {
            name: part.double() for name, part in own.items() if isinstance(part, Tensor) and part.is_floating_point()
        }
        return type(self)(**{**own, **wide})

    def scale(self, factor: float) -> PerExampleGradients:
        """factor G."""
        *_, last = fields(self)  # errors, or the gradients themselves
        return replace(self, **{last.name: factor * getattr(self, last.name)})

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
        inputs: a, (groups, examples, positions, in).
        errors: e, (groups, N, positions, out), with N/examples directions for each example.
    """

    inputs: Tensor
    errors: Tensor
    example_dim = 1

    @property
    def count(self) -> int:
        return self.errors.shape[1]

    @property
    def directions(self) -> int:
        return self.errors.shape[1] // max(1, self.inputs.shape[1])

    def by_direction(self) -> Tensor:
        """Errors as (groups, examples, directions, positions, out)."""
        return self.errors.unflatten(1, (self.inputs.shape[1], -1))

    def repeated(self) -> OuterProducts:
        return replace(self, inputs=self.inputs.repeat_interleave(self.directions, 1))

    def fits(self) -> bool:
        whole = self.inputs.shape[1] * self.directions == self.count
        return whole and len(self.errors) * self.errors.shape[-1] * self.inputs.shape[-1] == self.shape.numel()

    def project(self, u: Tensor) -> Tensor:
        groups, _, _, fan_out = self.errors.shape
        matrix = u.reshape(groups, fan_out, -1)
        a, e = self.inputs, self.errors
        if self.directions > 1:
            return (matmul(a, matrix.mT)[:, :, None] * self.by_direction()).sum((0, 3, 4)).flatten()
        if a.shape[-1] <= fan_out:
            return (matmul(e, matrix) * a).sum((0, 2, 3))
        return (matmul(a, matrix.mT) * e).sum((0, 2, 3))

    def combine(self, w: Tensor) -> Tensor:
        a, e = self._weighted(w)
        return matmul(e.mT, a).reshape(self.shape)

    def combination(self, w: Tensor) -> Tensor | Product:
        a, e = self._weighted(w)
        return Product(e[0], a[0], self.shape) if len(a) == 1 else matmul(e.mT, a).reshape(self.shape)

    def _weighted(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of inputs and errors, (groups, rows, features), whose outer products add up to G w."""
        a, e = self.inputs, self.errors
        if self.directions > 1:
            e = torch.einsum("gndto,nd->gnto", self.by_direction(), w.view(a.shape[1], -1))
        else:
            w = w.view(1, -1, 1, 1)
            a, e = (a * w, e) if a.shape[-1] <= e.shape[-1] else (a, e * w)
        return a.flatten(1, 2), e.flatten(1, 2)

    def gram(self) -> Tensor:
        positions, fan_in = self.inputs.shape[2:]
        fan_out = self.errors.shape[-1]
        if positions == 1:
            return self._simple_cross(self)
        # The costs of both algorithms, without their common factor.
        shared = positions**2 * (fan_in / self.directions**2 + fan_out)
        if shared < fan_in * fan_out * (1 + positions / self.count):
            return _pairs(self.count, positions, self._overlap)
        return self._explicit_gram()

    def _overlap(self, some: slice, others: slice) -> Tensor:
        a, e, each = self.inputs, self.errors, self.directions
        first, second = (slice(s.start // each, (s.stop - 1) // each + 1) for s in (some, others))
        pairs = torch.einsum("gnsi,gmti->gnsmt", a[:, first], a[:, second])
        if each > 1:
            for dim, own in ((1, some), (3, others)):
                columns = torch.arange(own.start, own.stop, device=a.device) // each
                pairs = pairs.index_select(dim, columns - own.start // each)
        return (pairs * torch.einsum("gnsi,gmti->gnsmt", e[:, some], e[:, others])).sum((0, 2, 4))

    def _explicit_gram(self) -> Tensor:
        groups, _, _, fan_in = self.inputs.shape
        gram = self.inputs.new_zeros(self.count, self.count)
        step = max(1, CHUNK // (self.count * fan_in))
        for g in range(groups):
            for part in self.errors[g].split(step, -1):
                rows = outer_sums(part, self.inputs[g]).flatten(1)
                gram.addmm_(rows, rows.T)
        return gram

    def cross(self, others: PerExampleGradients) -> Tensor:
        if not isinstance(others, OuterProducts) or self.inputs.shape[2] > 1 or others.inputs.shape[2] > 1:
            return super().cross(others)
        return self._simple_cross(others)

    def _simple_cross(self, others: OuterProducts) -> Tensor:
        """G'H if there is one position."""
        sides = ((self.inputs, others.inputs), (self.errors, others.errors))
        a, e = (matmul(one.squeeze(2), other.squeeze(2).mT) for one, other in sides)
        each = e.view(len(a), a.shape[1], self.directions, a.shape[2], others.directions)
        each.mul_(a[:, :, None, :, None])
        return e[0] if len(e) == 1 else e.sum(0)

    def weighted_diagonal(self, factor: Tensor) -> Tensor:
        groups, _, _, fan_in = self.inputs.shape
        parts = [
            _lengths(factor, outer_sums(part, self.inputs[g]).flatten(1))
            for g in range(groups)
            for part in self.errors[g].split(max(1, CHUNK // (self.count * fan_in)), -1)
        ]
        return torch.cat(parts).view(self.shape)

    def squares(self) -> Tensor:
        groups, examples, positions, fan_in = self.inputs.shape
        each = self.directions
        if positions == 1:
            a, e = self.inputs.squeeze(2).square(), self.errors.squeeze(2).square()
            e = e if each == 1 else e.unflatten(1, (examples, each)).sum(2)
            return matmul(e.mT, a).reshape(self.shape)
        total = self.inputs.new_zeros(groups, self.errors.shape[-1], fan_in)
        step = max(1, CHUNK // (total.numel() * each))
        width = max(1, CHUNK // (groups * step * each * fan_in))
        for chosen in torch.arange(examples, device=total.device).split(step):
            a, e = self.inputs[:, chosen], self.by_direction()[:, chosen].flatten(1, 2)
            for into, part in zip(total.split(width, 1), e.split(width, 3)):
                into += outer_sums(part, a).transpose(0, 1).flatten(1).square().sum(0).view(into.shape)
        return total.view(self.shape)

    def rows(self) -> Tensor:
        return outer_sums(self.errors, self.inputs).transpose(0, 1).reshape(-1, *self.shape)


def outer_sums(errors: Tensor, inputs: Tensor) -> Tensor:
    """The sums over positions of e a', (..., N, out, in), for errors (..., N, positions, out). Repeats no inputs."""
    *groups, examples, positions, fan_in = inputs.shape
    if errors.shape[-3] == examples:
        return errors.mT @ inputs
    tall = errors.unflatten(-3, (examples, -1)).mT.reshape(*groups, examples, -1, positions)  # all directions
    return (tall @ inputs).view(*groups, -1, errors.shape[-1], fan_in)


@dataclass(frozen=True, eq=False)
class EmbeddingGradients(PerExampleGradients):
    """g_j = sum_t 1[x_jt] e_jt': each position has a gradient for one row of the table.

    Args:
        indices: x, (examples, positions).
        errors: e, (N, positions, features), with N/examples directions for each example; zero at the padding index.
    """

    indices: Tensor
    errors: Tensor

    @property
    def count(self) -> int:
        return self.errors.shape[0]

    @property
    def directions(self) -> int:
        return self.count // max(1, len(self.indices))

    @property
    def _each(self) -> Tensor:
        """x of each gradient, (N, positions)."""
        return self.indices if self.directions == 1 else self.indices.repeat_interleave(self.directions, 0)

    def repeated(self) -> EmbeddingGradients:
        return replace(self, indices=self._each)

    def fits(self) -> bool:
        return (
            self.errors.shape[-1:] == self.shape[1:]
            and int(self.indices.max()) < self.shape[0]
            and len(self._each) == self.count
        )

    def project(self, u: Tensor) -> Tensor:
        return (u[self._each] * self.errors).sum((1, 2))

    def combine(self, w: Tensor) -> Tensor:
        total = self.errors.new_zeros(self.shape)
        return total.index_add_(0, self._each.flatten(), (self.errors * w.view(-1, 1, 1)).flatten(0, 1))

    def gram(self) -> Tensor:
        return _pairs(self.count, self.indices.shape[1], self._overlap)

    def _overlap(self, some: slice, others: slice) -> Tensor:
        e, x = self.errors, self._each
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
        keys, place = (example * self.shape[0] + self._each).unique(return_inverse=True)
        sums = self.errors.new_zeros(len(keys), self.shape[1]).index_add_(0, place.flatten(), self.errors.flatten(0, 1))
        return self.errors.new_zeros(self.shape).index_add_(0, keys % self.shape[0], sums.square())

    def rows(self) -> Tensor:
        example = torch.arange(self.count, device=self.indices.device)[:, None].expand_as(self._each)
        rows = self.errors.new_zeros(self.count, *self.shape)
        return rows.index_put_((example, self._each), self.errors, accumulate=True)

    def as_outer(self) -> OuterProducts:
        """The same with explicit one-hot vectors, to be summed with other uses of the table."""
        hot = torch.nn.functional.one_hot(self._each, self.shape[0]).to(self.errors.dtype)
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


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """(groups, ..., k) times (groups, k, m); a single group uses a plain matrix product, which is faster."""
    rows = a.flatten(1, -2) if a.dim() > 3 else a
    found = mm(rows[0], b[0])[None] if a.shape[0] == 1 else torch.bmm(rows, b)
    return found.view(*a.shape[:-1], b.shape[-1]) if a.dim() > 3 else found


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
