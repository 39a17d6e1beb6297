"""Optimizers whose parameters are the predicted mean of the next step."""

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
    """A mixin for filters whose parameters are the predicted mean, where the next gradient is computed.

    A step updates the mean and then predicts the next one, so the training loop is that of any torch optimizer. Inside
    `with optimizer.posterior_mean():` the parameters are the posterior mean.

    It must be the first base class: `class DenseFilter(PredictedMean, LayerwiseOptimizer)`. A subclass defines
    `_posterior_means`.

    Reference: Aitchison 2018, section 2.1: the gradient is computed at the prior mean.
    Checked by: tests/contract/test_predicted_mean.py.
    """

    @abstractmethod
    def _posterior_means(self) -> dict[Tensor, Tensor]:
        """Parameter -> posterior mean; omitted parameters do not change inside `posterior_mean()`."""

    @contextmanager
    def posterior_mean(self) -> Iterator[None]:
        """A context in which weights are their posterior means; afterwards they are restored bit for bit.

        Use it to evaluate the model or to save its weights. Steps and checkpoints of the optimizer raise inside the
        context, because they need the predicted mean.
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
            raise RuntimeError(f"{what} needs the weights outside of posterior_mean(): leave the context first.")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As `BeliefOptimizer.step`; then predicts the weights at which the next gradient is computed."""
        self._refuse_inside("step()")
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        """As in `BeliefOptimizer`; save it together with the weights outside of `posterior_mean()`."""
        self._refuse_inside("state_dict()")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in `BeliefOptimizer`."""
        self._refuse_inside("load_state_dict()")
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_inside("a copy")
        return super().__getstate__()

    def posterior(self, model: nn.Module, scale: float = 1.0) -> Posterior:
        """As in `BeliefOptimizer`, with the posterior mean as its mean."""
        with nullcontext() if self._in_posterior_mean() else self.posterior_mean():
            return super().posterior(model, scale)
