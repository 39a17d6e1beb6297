"""What is known of some weights: a mean and how sure it is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bayesgrad.precision import Precision


@dataclass(frozen=True, eq=False)
class Belief:
    """The Gaussian N(mean, precision^-1) over one block of weights.

    While an optimizer runs, the mean is the parameter itself and the precision its state; a `Belief` is made of
    the two on demand, as a copy, when someone asks for a posterior.
    """

    mean: Tensor
    precision: Precision

    def sample(self, noise: Tensor) -> Tensor:
        """One draw for each leading index of standard normal `noise` (..., *mean.shape)."""
        return self.mean + self.precision.sample(noise)
