"""Nodes: the variables of a model and their approximate posteriors."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from bayesgrad.families import Family, Parameters


def check_scale(name: str, scale: Any, *, zero: bool = False) -> Any:
    """Returns `scale` if it is a positive number or a tensor of positive numbers.

    Raises:
        ValueError: it is not.
    """
    known = isinstance(scale, (Real, Tensor))
    lowest = float(scale.min() if isinstance(scale, Tensor) else scale) if known else math.nan
    if not (lowest > 0 or (zero and lowest == 0)) or lowest == math.inf:
        words = "finite and not negative" if zero else "positive"
        raise ValueError(f"{name} must be {words}, got {f'{lowest:g}' if known else repr(scale)}.")
    return scale


def is_one(scale: float | Tensor) -> bool:
    """Whether multiplying by a scale changes nothing; the values of a tensor are not read."""
    return isinstance(scale, float) and scale == 1


def check_finite(**values: Tensor) -> None:
    """Raises a ValueError for tensors that are empty or contain NaN or infinity."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}.")
        if not value.numel():
            raise ValueError(f"{name} must not be empty, got shape {tuple(value.shape)}.")
        if not torch.isfinite(value).all():
            raise ValueError(f"{name} contains NaN or infinity: remove or impute these rows first.")


class Node:
    r"""One variable x of a model, or a plate of them, with its distribution q(x) in an exponential family.

    `step` updates its natural parameters, `natural`. Its expectation parameters, `mean`, are the expectations of the
    sufficient statistics.

    Args:
        family: the exponential family of q.
        natural: initial natural parameters.
        scale: weight of the entropy in the ELBO: N/B for the local variables of a batch of B out of N examples, or the
            number of tokens that share a variable. A number, or a tensor over plates.
        name: shown in error messages.

    >>> from bayesgrad.families import Gaussian
    >>> node = Node(Gaussian(), Gaussian().of(torch.zeros(1), torch.eye(1)), name="weights")
    >>> node
    Node(weights, Gaussian, plates=())
    """

    def __init__(
        self, family: Family, natural: Parameters, scale: float | Tensor = 1.0, *, name: str | None = None
    ) -> None:
        if not isinstance(family, Family):
            raise TypeError(f"family must be an instance from bayesgrad.families, such as Gaussian(), got {family!r}.")
        self.family, self.name = family, name
        self.scale = check_scale("scale", scale)
        self._natural = tuple(part.detach() for part in family.check(natural))
        self._mean: Parameters | None = None
        self._moments: tuple[Tensor, Tensor] | None = None
        self.previous: Parameters | None = None  # for natural momentum

    @property
    def natural(self) -> Parameters:
        return self._natural

    @natural.setter
    def natural(self, value: Parameters) -> None:
        self._natural = tuple(part.detach() if part.requires_grad else part for part in value)
        self._mean = self._moments = None

    @property
    def mean(self) -> Parameters:
        """μ = E_q[T(x)], one tensor per sufficient statistic; for a Gaussian (m, V + mm'), not the mean of x alone."""
        if self._mean is None:
            self._mean = self.family.mean(self._natural)
        return self._mean

    @property
    def moments(self) -> tuple[Tensor, Tensor]:
        """The mean of a Gaussian, and its covariance or variances."""
        found = self._moments
        if found is None:
            found = self._moments = self.family.moments(self._natural)  # pyright: ignore[reportAttributeAccessIssue]
        return found

    @property
    def entropy(self) -> Tensor:
        """The entropy of q times `scale`, summed over plates."""
        entropy = self.family.entropy(self._natural, self._mean)
        return (entropy if is_one(self.scale) else self.scale * entropy).sum()

    def distribution(self) -> torch.distributions.Distribution:
        return self.family.to_distribution(self._natural)

    def scale_by_plate(self, scale: float | Tensor, parameters: Parameters) -> Parameters:
        """Multiplies parameters by a number, or by one number per plate."""
        if not isinstance(scale, Tensor) or not scale.dim():
            return tuple(scale * part for part in parameters)
        return tuple(scale[(...,) + (None,) * n] * part for part, n in zip(parameters, self.family.event_dims))

    def state_dict(self) -> dict[str, Any]:
        return {"natural": self._natural, "previous": self.previous, "scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.natural = self.family.check(tuple(state["natural"]))
        self.previous, self.scale = state["previous"], state["scale"]

    def __repr__(self) -> str:
        plates = tuple(self.family.plates(self._natural))
        return f"Node({self.name or hex(id(self))}, {type(self.family).__name__}, plates={plates})"
