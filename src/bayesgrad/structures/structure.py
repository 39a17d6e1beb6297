"""The interface of structures: Hessians of the loss at trained weights, for blocks of weights and without the prior.

The posterior of a block has the precision s H + δ I, with its Hessian H, the prior precision δ, and a factor s that
depends on the noise of the data. Prior and noise can therefore be changed, and the evidence can be differentiated by
them, without another pass over the data.

A structure is one subclass of `Structure` in one file. Its name is known to `bayesgrad.laplace` once it is defined.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayesgrad.belief import Belief, Joint
from bayesgrad.distributed import Exchange, Sum
from bayesgrad.layers.fisher import BatchGradients
from bayesgrad.layers.output_covariance import BlockCovariance, OutputCovariance
from bayesgrad.precision import Dense, Precision
from bayesgrad.precision.linalg import inverse

SINGLE = ("mps",)  # kinds of devices without float64
WIDE = 1 << 13  # weights up to which float32 matrices are inverted in float64, in 0.5 GB for each of a few copies


class Accumulator(ABC):
    """Sums the gradients of batches into the Hessian of one block of weights; most structures do it themselves."""

    one_direction: bool = False  # whether the first direction of the outputs suffices for a batch

    @abstractmethod
    def add(self, seen: BatchGradients) -> None:
        """Adds Σ g g' over the gradients of one batch to H, in place."""

    def share(self, exchange: Exchange) -> None:
        """Replaces what was added by that of all processes, where each has added some of the data."""
        raise NotImplementedError(f"{type(self).__name__} must define share() for data of several processes.")

    @abstractmethod
    def finish(self, total: float, count: int) -> Structure:
        """The Hessian for `total` examples, of which `count` were added."""


@dataclass(frozen=True, eq=False)
class Structure(Accumulator):
    """The Hessian H of the total loss for one block of weights, or an approximation of it.

    The parameters of a block are side by side in a matrix (*leading, columns); `leading` is (1,) for a flat vector.

    A subclass must define `dense`, and either `empty` and `add`, or `blocks` with other accumulators. Everything else
    follows from the dense matrix, and from the tensors of the dataclass, in which H is linear. Override what can be
    computed at a lower cost.

    Args:
        shapes: of the block's parameters by name.

    Class attributes:
        name: of the structure in `bayesgrad.laplace`; a subclass that defines it is registered.
        kind: of its blocks in files. A subclass without tensors of its own inherits it; its blocks are loaded as
            blocks of the base. Else the default is the name of the class.
        stores_gradients: whether it stores the gradients that it adds. It then receives all directions of a batch at
            once, which share the inputs of layers.

    Checked by: tests/contract/test_structures.py, each operation against the dense matrix, for all registered ones.
    """

    shapes: Mapping[str, torch.Size]
    name: ClassVar[str]
    kind: ClassVar[str]
    stores_gradients: ClassVar[bool] = False
    by_name: ClassVar[dict[str, type[Structure]]] = {}
    by_kind: ClassVar[dict[str, type[Structure]]] = {}

    def __init_subclass__(cls) -> None:
        own = {name for name, kind in inspect.get_annotations(cls).items() if "ClassVar" not in str(kind)}
        if not hasattr(cls, "kind") or (own and "kind" not in cls.__dict__):
            cls.kind = cls.__name__
        Structure.by_kind.setdefault(cls.kind, cls)
        if "name" in cls.__dict__:
            known = Structure.by_name.setdefault(cls.name, cls)
            if known.__qualname__ != cls.__qualname__:
                raise TypeError(f"{cls.__name__} needs another name: {cls.name!r} is that of {known.__name__}.")
            Structure.by_name[cls.name] = cls

    # --- from gradients ---

    @classmethod
    def check(cls, params: Mapping[str, nn.Parameter]) -> None:
        """Raises ValueError if the structure cannot represent these parameters; called before any batch is read."""

    @classmethod
    def blocks(
        cls, params: Mapping[str, nn.Parameter], model: nn.Module, joint_bias: bool, first: BatchGradients
    ) -> list[Accumulator]:
        """Empty blocks for all parameters; by default one for each parameter.

        Args:
            params: of the posterior, by name.
            model: to which they belong.
            joint_bias: whether weight and bias of a layer are one block, for structures of layers.
            first: the first batch, which is not added here.
        """
        return [cls.empty({name: p}) for name, p in params.items()]

    @classmethod
    def empty(cls, params: Mapping[str, nn.Parameter]) -> Structure:
        """H = 0 for a block of these parameters."""
        raise NotImplementedError(f"{cls.__name__} must define empty() and add(), or blocks() with other accumulators.")

    def add(self, seen: BatchGradients) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define add(), or blocks() with other accumulators.")

    def share(self, exchange: Exchange) -> None:
        for part in self.tensors().values():
            exchange.add(Sum(part), lambda found, part=part: part.copy_(found.total))

    def finish(self, total: float, count: int) -> Structure:
        return self.times(total / count)

    # --- the matrix ---

    @abstractmethod
    def dense(self) -> Tensor:
        """H as a matrix (n, n), in the order of `joined`."""

    @property
    def leading(self) -> tuple[int, ...]:
        """The leading dimensions of `joined`."""
        return (1,)

    @property
    def size(self) -> int:
        """n, the number of weights."""
        return sum(shape.numel() for shape in self.shapes.values())

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `joined`."""
        return *self.leading, self.size // math.prod(self.leading)

    def joined(self, values: Mapping[str, Tensor]) -> Tensor:
        """Values by name as one matrix (*leading, columns)."""
        parts = [values[name].reshape(*self.leading, -1) for name in self.shapes]
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def quadratic(self, change: Mapping[str, Tensor]) -> Tensor:
        """v'H v for v by name; can be differentiated twice."""
        matrix = self._matrix
        return quadratic_form(self.joined(change), lambda v: v @ matrix)

    def times(self, factor: float) -> Structure:
        """factor H."""
        return replace(self, **{name: factor * part for name, part in self.tensors().items()})

    def plus(self, other: Structure) -> Structure | None:
        """The sum of both, if it has the structure and needs no more memory than one of them; else None."""
        mine, given = self.tensors(), other.tensors()
        if other.kind != self.kind or dict(other.shapes) != dict(self.shapes):
            return None
        if {name: part.shape for name, part in mine.items()} != {name: part.shape for name, part in given.items()}:
            return None
        return replace(self, **{name: part + given[name].to(part) for name, part in mine.items()})

    # --- with a prior ---

    def precision(self, prior: Mapping[str, float], scale: float) -> Precision:
        """P = scale H + prior, for weights in the shape of `joined`."""
        narrow = self.size > WIDE or self._matrix.device.type in SINGLE
        wide = self._matrix.dtype if narrow else torch.float64
        matrix = scale * self._matrix.to(wide)  # in which a small prior is not rounded away
        matrix.diagonal().add_(self._prior_diagonal(prior).to(matrix))
        return Dense(inverse(matrix, 0.0, "the posterior precision").to(self._matrix), self.shape)

    def belief(self, mean: Mapping[str, Tensor], prior: Mapping[str, float], scale: float) -> Belief:
        """N(mean, (scale H + prior)^-1)."""
        return Joint(self.joined(mean), self.precision(prior, scale), self.shapes)

    def logdet(self, prior: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """log |scale H + prior|, differentiable in both."""
        floor = prior[next(iter(self.shapes))]
        if any(prior[name] is not floor for name in self.shapes):
            return self.logdet_by_name(prior, scale)
        rest = self.size - len(self.eigenvalues)  # negative where there are more gradients than weights
        return (scale * self.eigenvalues + floor).log().sum() + rest * floor.log()

    def logdet_by_name(self, prior: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """As `logdet`, if the parameters of the block have different prior precisions."""
        precision = scale * self._matrix.double() + torch.diag(self._prior_diagonal(prior))
        return 2 * torch.linalg.cholesky(precision).diagonal().log().sum()

    @cached_property
    def eigenvalues(self) -> Tensor:
        """Of H, in float64; zeros may be left out."""
        return torch.linalg.eigvalsh(self._matrix.double()).clamp(min=0)

    def output_covariance(self, belief: Belief, prior: Mapping[str, float], scale: float) -> OutputCovariance:
        """The covariance of linearised outputs, for the `belief` with this prior and scale."""
        return BlockCovariance(next(iter(self.shapes)), belief)

    @cached_property
    def _matrix(self) -> Tensor:
        return self.dense()

    def _prior_diagonal(self, prior: Mapping[str, Any]) -> Tensor:
        device = self._matrix.device
        like: dict[str, Any] = dict(dtype=torch.float32 if device.type in SINGLE else torch.float64, device=device)
        values = {n: torch.as_tensor(prior[n], **like).expand(shape) for n, shape in self.shapes.items()}
        return self.joined(values).flatten()

    # --- files ---

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that define it, by name."""
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "shapes"}
        return {name: part for name, part in parts.items() if part is not None}

    def stored(self) -> dict[str, Tensor]:
        """Its tensors by name, for a file; `restored` is the inverse."""
        return self.tensors()

    @classmethod
    def restored(cls, shapes: Mapping[str, torch.Size], parts: Mapping[str, Tensor]) -> Structure:
        own = [f.name for f in fields(cls) if f.name != "shapes"]
        return cls(shapes, **{key: parts[key] for key in own})  # pyright: ignore[reportCallIssue]


class QuadraticForm(torch.autograd.Function):
    """v'H v. Its gradient 2 H v reuses the product of the forward pass."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
        product = multiply(vector)
        ctx.multiply = multiply
        ctx.save_for_backward(vector, product)
        return (vector * product).sum()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        vector, product = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives
            product = ctx.multiply(vector)
        return 2 * slopes[0] * product, None


def quadratic_form(vector: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """v'H v for a symmetric H, which `multiply` applies to v."""
    return QuadraticForm.apply(vector, multiply)  # pyright: ignore[reportReturnType]


def check_prior(
    prior_precision: Any, noise_scale: Any, names: Mapping[str, Any], temperature: Any = 1.0
) -> dict[str, float]:
    """The prior precision of each parameter.

    Raises:
        ValueError: a number is not positive and finite, or the names are not those of the parameters.
    """
    if isinstance(prior_precision, Mapping) and set(prior_precision) != set(names):
        odd = sorted(set(prior_precision) ^ set(names))
        raise ValueError(f"prior_precision must have the names of the posterior's parameters; {odd[:3]} do not match.")
    prior = prior_by_name(prior_precision, names, lambda value: value)
    for what, value in [
        *[("prior_precision", value) for value in prior.values()],
        ("noise_scale", noise_scale),
        ("temperature", temperature),
    ]:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ValueError(f"{what} must be a finite positive number, got {value!r}.")
    return {name: float(value) for name, value in prior.items()}


def prior_by_name(prior: Any, names: Mapping[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """A value for each name. A single number becomes one shared object, which `logdet` detects by identity."""
    if isinstance(prior, Mapping):
        return {name: convert(prior[name]) for name in names}
    value = convert(prior)
    return dict.fromkeys(names, value)
