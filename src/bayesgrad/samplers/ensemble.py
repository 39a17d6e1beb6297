"""What becomes of a chain: burn-in, thinning, a bag of samples, and predictions averaged as it goes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bayesgrad import likelihoods
from bayesgrad.posterior.posterior import evaluation_mode
from bayesgrad.posterior.samples import SampledPosterior, posterior_of
from bayesgrad.posterior.store import LIMIT, Samples
from bayesgrad.samplers.chains import Chains, finite, weights_of
from bayesgrad.samplers.sampler import Diverged, Sampler


class Ensemble:
    """The states of a chain, after a burn-in, every so many steps.

    Call `collect` after each `sampler.step()`. Step t (from 1) is kept where t > burn_in and thin divides t - burn_in.
    Several chains are several ensembles, or one of `Chains`. `state_dict` beside those of model and sampler resumes a
    killed run: it keeps the samples it would have kept.

    >>> model = torch.nn.Linear(2, 1)
    >>> ensemble = Ensemble(model, burn_in=10, thin=2)
    >>> sum(ensemble.collect() for _ in range(20))
    5

    Args:
        model: whose weights are sampled, or `Chains` of it.
        burn_in: steps that are forgotten.
        thin: one of how many steps is kept.
        sampler: what samples, if its temperature is to be named when a chain diverges.
        keep: whether weights are kept; without, steps are counted and losses noted.
        limit: bytes of samples in memory; older ones go to files.
        folder: for those files; None is a temporary one.

    Checked by: tests/equations/test_ensemble.py
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        burn_in: int = 0,
        thin: int = 1,
        sampler: torch.optim.Optimizer | None = None,
        keep: bool = True,
        limit: int | None = LIMIT,
        folder: str | os.PathLike | None = None,
    ) -> None:
        if burn_in < 0:
            raise ValueError(f"burn_in must not be negative, got {burn_in}.")
        if thin < 1:
            raise ValueError(f"thin must be at least 1, got {thin}.")
        self.model, self.sampler, self.keep = model, sampler, keep
        self.burn_in, self.thin = burn_in, thin
        self.chains = model.count if isinstance(model, Chains) else 1
        self.samples = Samples(limit, folder)
        self.steps = 0
        self._last = math.nan
        self.losses: list[float] = []  # of each sample; nan where none was given

    def __len__(self) -> int:
        return len(self.samples)

    def collect(self, loss: Tensor | float | None = None) -> bool:
        """Counts a step; whether its weights are a sample.

        Args:
            loss: of this step. Noted for each sample, and the first sign of a chain that diverges.

        Raises:
            Diverged: a loss, or a weight that would be kept, is not finite.
        """
        self.steps += 1
        value = math.nan if loss is None else float(torch.as_tensor(loss).detach())
        if loss is not None and not math.isfinite(value):
            raise self._diverged("The loss")
        due = self.steps > self.burn_in and (self.steps - self.burn_in) % self.thin == 0
        if due:
            weights = weights_of(self.model)
            if not finite(weights):
                raise self._diverged("A weight")
            if self.keep:
                self.samples.append(weights)
            self.losses.append(value)
        self._last = value
        return due

    def _diverged(self, what: str) -> Diverged:
        heat = self.sampler.temperature() if isinstance(self.sampler, Sampler) else math.nan
        at = "" if math.isnan(heat) else f", temperature {heat:g}"
        last = f"last finite loss {self._last:g}" if math.isfinite(self._last) else "no finite loss was seen"
        words = (
            f"the chain diverged at step {self.steps}{at}, {last}. {what} is not finite. {len(self)} samples are kept."
        )
        return Diverged(words, self.steps, heat, self._last if math.isfinite(self._last) else None)

    def posterior(self, model: nn.Module | None = None, *, seed: int = 0) -> SampledPosterior:
        """The samples so far, of all chains: samples of one step follow one another.

        Args:
            model: to predict with. Left out it is the sampled one; `Chains` need theirs to be given here or later.
        """
        if not self.keep:
            raise ValueError("no weights were kept: build the ensemble with keep=True, or use Predictive.")
        if model is None and not isinstance(self.model, Chains):
            model = self.model
        return posterior_of(self.samples, model, seed=seed)

    def draws(self, weights: int | None = None) -> dict[str, Tensor]:
        """Name -> (chains, samples, *shape); with `weights`, that many of each tensor, evenly spaced and flat."""
        if not len(self):
            raise ValueError(f"no sample has been kept in {self.steps} steps: burn_in is {self.burn_in}.")
        parts: dict[str, list[Tensor]] = {}
        for block in self.samples.blocks():
            for name, rows in block.items():
                rows = rows.view(-1, self.chains, *rows.shape[1:])
                if weights is not None:
                    flat = rows.flatten(2) if rows.dim() > 2 else rows[..., None]
                    rows = flat[..., :: -(-flat.shape[2] // weights)].clone()
                parts.setdefault(name, []).append(rows)
        return {name: torch.cat(some).transpose(0, 1) for name, some in parts.items()}

    def state_dict(self) -> dict[str, Any]:
        """Counters, losses and the samples in memory; those in files stay there."""
        return {
            "steps": self.steps,
            "last": self._last,
            "losses": list(self.losses),
            "samples": self.samples.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.samples.load_state_dict(state["samples"])
        self.steps, self._last, self.losses = state["steps"], state["last"], list(state["losses"])


class Predictive:
    """A prediction averaged over the states of a chain, which are not kept.

    Call `collect` at each sample (`if ensemble.collect(): predictive.collect()`).

    Args:
        model: whose weights are sampled, or `Chains` of it: their samples count alike.
        inputs: a batch, or a tuple of them where the model takes several.
        likelihood: how outputs are read; see `bayesgrad.likelihoods`.

    Checked by: tests/equations/test_ensemble.py::test_running_predictions_are_those_of_the_bag
    """

    def __init__(
        self, model: nn.Module, inputs: Tensor | tuple[Tensor, ...], *, likelihood: str = "categorical"
    ) -> None:
        self.model = model
        self.inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        self.reading = likelihoods.named(likelihood)
        self.count = 0
        self._mean: Tensor | None = None
        self._squares: Tensor | None = None

    @torch.no_grad()
    def collect(self) -> Tensor:
        """Adds the prediction of the current weights; returns it, (batch, ...), or (chains, batch, ...)."""
        with evaluation_mode(self.model):
            value = self.reading.link(self.model(*self.inputs))
        for one in value if isinstance(self.model, Chains) else value[None]:
            self.count += 1
            mean = torch.zeros_like(one) if self._mean is None else self._mean
            squares = torch.zeros_like(one) if self._squares is None else self._squares
            deviation = one - mean
            mean = mean + deviation / self.count
            self._mean, self._squares = mean, squares + deviation * (one - mean)
        return value

    def prediction(self) -> Tensor | likelihoods.Moments:
        """The average so far, as `Posterior.predict` gives it."""
        if self._mean is None or self._squares is None:
            raise ValueError("nothing has been averaged yet: call collect() at each sample.")
        return self.reading.from_moments(self._mean, self._squares / self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self._mean, "squares": self._squares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self._mean, self._squares = state["count"], state["mean"], state["squares"]
