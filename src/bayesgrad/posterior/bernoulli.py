"""Posteriors over binary weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from bayesgrad.layers.network import clean_name
from bayesgrad.posterior.posterior import Posterior


class BernoulliPosterior(Posterior):
    r"""Independent weights in {-1, 1}, with P(w = 1) = 1/(1 + exp(-2 lambda)), mean tanh(lambda).

    `predict` accepts `method="mc"` (an average over binary networks), `"mode"` (the most probable binary network) or
    `"mean"` (the network with the real weights tanh(lambda)).

    >>> posterior = BernoulliPosterior({"w": torch.tensor([-20.0, 0.0, 20.0])})
    >>> posterior.mode["w"], posterior.mean["w"]
    (tensor([-1.,  1.,  1.]), tensor([-1.,  0.,  1.]))

    Reference: Khan and Rue 2023, section 4.5 (lambda = log(p/(1-p))/2).
    Checked by: tests/equations/test_binary.py.

    Args:
        natural: name -> lambda, half the log-odds of a weight being 1.
        model, seed: see `Posterior`.
    """

    kind = "bernoulli"
    methods = ("mc", "mean", "mode")
    central = ()  # training samples relaxed weights

    def __init__(self, natural: Mapping[str, Tensor], model: nn.Module | None = None, *, seed: int = 0) -> None:
        super().__init__(model, seed=seed)
        self.natural = {clean_name(name): value.detach() for name, value in natural.items()}

    @property
    def mean(self) -> dict[str, Tensor]:
        return {name: natural.tanh() for name, natural in self.natural.items()}

    @property
    def mode(self) -> dict[str, Tensor]:
        """Name -> the more probable of -1 and 1; 1 if both are equally probable."""
        return {name: torch.where(natural < 0, -1.0, 1.0).to(natural) for name, natural in self.natural.items()}

    def variance(self) -> dict[str, Tensor]:
        # 1/cosh^2, without the cancellation of 1 - mean^2.
        return {name: 4 * (2 * n).sigmoid() * (-2 * n).sigmoid() for name, n in self.natural.items()}

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """log P(w) = Σ log sigmoid(2 λ w) for weights in {-1, 1}."""
        total = torch.zeros((), dtype=torch.float64)
        for name, natural in self.natural.items():
            if not bool((weights[name].abs() == 1).all()):
                raise ValueError(f"{name} must have entries -1 and 1 alone: other weights have no probability.")
            each = logsigmoid(2 * natural.double() * weights[name].double())
            total = total.to(each.device) + each.reshape(*each.shape[: each.dim() - natural.dim()], -1).sum(-1)
        return total

    def _shapes(self) -> dict[str, torch.Size]:
        return {name: natural.shape for name, natural in self.natural.items()}

    def _draw(self, generators: list[torch.Generator]) -> Iterator[dict[str, Tensor]]:
        for generator in generators:
            yield {name: self._draw_one(natural, generator) for name, natural in self.natural.items()}

    @staticmethod
    def _draw_one(natural: Tensor, generator: torch.Generator) -> Tensor:
        # On the CPU, so that a seed gives the same weights on every device.
        u = torch.rand(natural.shape, dtype=natural.dtype, generator=generator, device="cpu").to(natural.device)
        return torch.where(u < (2 * natural).sigmoid(), 1.0, -1.0).to(natural)

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        return {"natural": self.natural}

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Mapping[str, Tensor]], model: nn.Module | None) -> BernoulliPosterior:
        return cls(tensors["natural"], model)
