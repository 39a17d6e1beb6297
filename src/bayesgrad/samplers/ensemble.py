"""Collects the samples of a chain, with burn-in and thinning, and averages predictions during sampling."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bayesgrad import likelihoods
from bayesgrad.posterior.posterior import evaluation_mode
from bayesgrad.posterior.samples import SampledPosterior, posterior_of
from bayesgrad.posterior.store import LIMIT, Samples
from bayesgrad.samplers.chains import Chains, finite, weights_of
from bayesgrad.samplers.sampler import Diverged, Sampler
from bayesgrad.shards import refuse_posterior


class Ensemble:
    """The samples of a chain, with burn-in and thinning.

    Call `collect` after each `sampler.step()`. Step t (from 1) is kept if t > burn_in and thin divides t - burn_in. For
    several chains, use several ensembles or one of `Chains`. To resume a run, save `state_dict` with those of model and
    sampler: the resumed run keeps the same samples.

    >>> model = torch.nn.Linear(2, 1)
    >>> ensemble = Ensemble(model, burn_in=10, thin=2)
    >>> sum(ensemble.collect() for _ in range(20))
    5

    Args:
        model: whose weights are sampled, or `Chains` of it.
        burn_in: the number of initial steps that are discarded.
        thin: keeps one of this many steps.
        sampler: for its temperature in the message when a chain diverges.
        keep: whether to store weights; if False, only steps and losses are recorded.
        limit: bytes of samples in memory; older ones are written to files.
        folder: for those files; None for a temporary one.

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
        refuse_posterior(model.parameters(), "Ensemble")
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
        """Counts a step; returns whether its weights were kept as a sample.

        Args:
            loss: of this step; stored for each sample and checked for divergence.

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
        last = f"last finite loss {self._last:g}" if math.isfinite(self._last) else "no finite loss before"
        words = (
            f"the chain diverged at step {self.steps}{at}, {last}. {what} is not finite. {len(self)} samples are kept."
        )
        return Diverged(words, self.steps, heat, self._last if math.isfinite(self._last) else None)

    def posterior(self, model: nn.Module | None = None, *, seed: int = 0) -> SampledPosterior:
        """The posterior of all samples so far; samples of one step are consecutive.

        Args:
            model: to predict with; None for the sampled one. For `Chains`, pass the original model here or to
                `predict`.
        """
        if not self.keep:
            raise ValueError("the ensemble stored no weights: build it with keep=True, or use Predictive.")
        if model is None and not isinstance(self.model, Chains):
            model = self.model
        return posterior_of(self.samples, model, seed=seed)

    def draws(self, weights: int | None = None) -> dict[str, Tensor]:
        """Name -> (chains, samples, *shape); with `weights`, only that many of each tensor, evenly spaced and flat."""
        if not len(self):
            raise ValueError(f"no sample was kept in {self.steps} steps with burn_in={self.burn_in}: sample longer.")
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
        """Counters, losses and the samples in memory; files are not copied."""
        return {
            "steps": self.steps,
            "last": self._last,
            "losses": list(self.losses),
            "samples": self.samples.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.samples.load_state_dict(state["samples"])
        self.steps, self._last, self.losses = state["steps"], state["last"], list(state["losses"])

    def header(self) -> dict[str, Any]:
        """Everything but model, sampler and samples."""
        own = ("burn_in", "thin", "keep", "chains", "steps", "losses", "_last")
        return {name: getattr(self, name) for name in own}

    @classmethod
    def received(cls, model: nn.Module, header: Mapping[str, Any], blocks: Iterable[Mapping[str, Tensor]]) -> Ensemble:
        """The ensemble of another process, which has this header and these samples."""
        found = cls(model)
        vars(found).update(header)
        for block in blocks:
            found.samples.append(block)
        return found


class Predictive:
    """A prediction averaged over the samples of a chain, which are not stored.

    Call `collect` at each sample (`if ensemble.collect(): predictive.collect()`).

    Args:
        model: whose weights are sampled, or `Chains` of it, with equal weights.
        inputs: a batch; a tuple if the model takes several arguments.
        likelihood: see `bayesgrad.likelihoods`.

    Checked by: tests/equations/test_ensemble.py::test_running_predictions_are_those_of_the_bag
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Tensor | tuple[Tensor, ...],
        *,
        likelihood: str | likelihoods.Likelihood = "categorical",
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

    def prediction(self) -> Tensor | likelihoods.Moments | likelihoods.NoisyMoments:
        """The average so far, as `Posterior.predict` returns it."""
        if self._mean is None or self._squares is None:
            raise ValueError("there is no prediction yet: call collect() at each sample.")
        return self.reading.from_moments(self._mean, self._squares / self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self._mean, "squares": self._squares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self._mean, self._squares = state["count"], state["mean"], state["squares"]
