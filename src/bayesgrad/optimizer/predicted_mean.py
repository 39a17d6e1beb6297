"""Filters whose parameters are one step ahead of what is believed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from bayesgrad.optimizer.base import BeliefOptimizer
from bayesgrad.posterior import Posterior


class PredictedMean(BeliefOptimizer):
    """A filter whose parameters hold the predicted mean, where the next gradient is to be taken.

    At the end of a step the next propagation is applied at once, so that a training loop needs nothing new. What is
    believed after the evidence so far, the posterior mean, is shown by `with optimizer.posterior_mean():`.

    To stand before the class it extends: `class DenseFilter(PredictedMean, LayerwiseOptimizer)`. All it asks for is
    `_posterior_means`.

    Reference: 000, section 2.1: the gradient is taken at the prior mean.
    Checked by: tests/contract/test_looking_ahead.py.
    """

    @abstractmethod
    def _posterior_means(self) -> dict[Tensor, Tensor]:
        """Parameter -> posterior mean; parameters that are left out are shown as they are."""

    @contextmanager
    def posterior_mean(self) -> Iterator[None]:
        """Within, weights are their posterior means; afterwards they are what they were, bit for bit.

        To evaluate or to save the weights of a model. Steps and checkpoints of the optimizer are refused inside: they
        are about the weights outside.
        """
        if self._in_posterior_mean():
            raise RuntimeError("posterior_mean() is already active: leave the context before entering it again.")
        means = self._posterior_means()
        saved = {p: p.detach().clone() for p in means}
        self._showing_mean = True
        try:
            with torch.no_grad():
                for p, mean in means.items():
                    p.copy_(mean)
            yield
        finally:
            with torch.no_grad():
                for p, value in saved.items():
                    p.copy_(value)
            self._showing_mean = False

    def _in_posterior_mean(self) -> bool:
        return self.__dict__.get("_showing_mean", False)

    def _refuse_inside(self, what: str) -> None:
        if self._in_posterior_mean():
            raise RuntimeError(f"{what} is about the weights outside of posterior_mean(): leave the context first.")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As for any filter; at the end weights are propagated to where the next gradient is to be taken."""
        self._refuse_inside("step()")
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        """As for any filter; to be saved with the weights outside of `posterior_mean()`."""
        self._refuse_inside("state_dict()")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As for any filter."""
        self._refuse_inside("load_state_dict()")
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_inside("a copy")
        return super().__getstate__()

    def posterior(self, model: nn.Module, scale: float = 1.0) -> Posterior:
        """As for any filter, around the posterior mean."""
        with nullcontext() if self._in_posterior_mean() else self.posterior_mean():
            return super().posterior(model, scale)
