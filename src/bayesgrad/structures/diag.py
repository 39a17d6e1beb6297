"""The diagonal of the Hessian."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from bayesgrad.belief import Belief
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.fisher import BatchGradients
from bayesgrad.precision import Diagonal
from bayesgrad.structures.structure import Structure


@dataclass(frozen=True, eq=False)
class DiagonalStructure(Structure):
    """The diagonal Σ g² for one parameter.

    Args:
        values: in the shape of the parameter.
    """

    values: Tensor
    name = "diag"
    kind = "DiagonalHessian"

    @property
    def _name(self) -> str:
        return next(iter(self.shapes))

    @classmethod
    def empty(cls, params: Mapping[str, nn.Parameter]) -> Structure:
        ((name, p),) = params.items()
        return cls({name: p.shape}, torch.zeros_like(p, dtype=compute_dtype(p.dtype), requires_grad=False))

    def add(self, seen: BatchGradients) -> None:
        self.values.add_(seen.columns[self._name].squares())

    def dense(self) -> Tensor:
        return torch.diag(self.values.flatten())

    def quadratic(self, change: Mapping[str, Tensor]) -> Tensor:
        return (self.values * change[self._name].square()).sum()

    def precision(self, prior: Mapping[str, float], scale: float) -> Diagonal:
        return Diagonal(1 / (scale * self.values + prior[self._name]))

    def belief(self, mean: Mapping[str, Tensor], prior: Mapping[str, float], scale: float) -> Belief:
        return Belief(mean[self._name], self.precision(prior, scale))

    @cached_property
    def eigenvalues(self) -> Tensor:
        return self.values.double().flatten()
