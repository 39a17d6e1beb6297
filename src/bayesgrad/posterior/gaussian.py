"""Gaussian posteriors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from bayesgrad.belief import Belief
from bayesgrad.posterior.posterior import Posterior
from bayesgrad.precision import Diagonal


class GaussianPosterior(Posterior):
    """Independent Gaussians over the weights.

    >>> posterior = GaussianPosterior({"w": Belief(torch.zeros(2), Diagonal(torch.ones(2)))})
    >>> posterior.sample(3)["w"].shape
    torch.Size([3, 2])

    Args:
        beliefs: name -> belief.
        model, seed: see `Posterior`.
    """

    kind = "gaussian"

    def __init__(self, beliefs: Mapping[str, Belief], model: nn.Module | None = None, *, seed: int = 0) -> None:
        super().__init__(model, seed=seed)
        self.beliefs = dict(beliefs)

    @property
    def mean(self) -> dict[str, Tensor]:
        return {name: belief.mean for name, belief in self.beliefs.items()}

    def variance(self) -> dict[str, Tensor]:
        return {name: belief.precision.variance() for name, belief in self.beliefs.items()}

    def _shapes(self) -> dict[str, torch.Size]:
        return {name: belief.mean.shape for name, belief in self.beliefs.items()}

    def _draw(self, generators: list[torch.Generator]) -> Iterator[dict[str, Tensor]]:
        for generator in generators:
            yield {name: self._draw_one(belief, generator) for name, belief in self.beliefs.items()}

    @staticmethod
    def _draw_one(belief: Belief, generator: torch.Generator) -> Tensor:
        # Drawn on the CPU, so that a seed means the same weights on every device.
        variance = belief.precision.variance()
        noise = torch.randn(variance.shape, dtype=variance.dtype, generator=generator, device="cpu")
        return belief.sample(noise.to(variance.device))

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        return {"mean": self.mean, "variance": self.variance()}

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Mapping[str, Tensor]], model: nn.Module | None) -> GaussianPosterior:
        variance = tensors["variance"]
        return cls({name: Belief(mean, Diagonal(variance[name])) for name, mean in tensors["mean"].items()}, model)
