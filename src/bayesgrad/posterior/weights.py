"""Distributions over the weights of a model: samples and storage."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from bayesgrad import likelihoods
from bayesgrad.layers.batches import Forward, Output
from bayesgrad.layers.network import architecture, check_architecture, matching_parameters, temporary_weights, unwrap
from bayesgrad.likelihoods import Likelihood
from bayesgrad.noise import generator_of
from bayesgrad.posterior import storage
from bayesgrad.posterior.linearised import refuse_export

if TYPE_CHECKING:
    from bayesgrad.posterior.posterior import Posterior


class WeightDistribution(ABC):
    """A distribution over the named parameters of a model.

    Other parameters of the model keep the model's values. Sampling does not use torch's global generator: sample k of a
    posterior is a function of (seed, k) alone.

    Args:
        model: the network to predict with; if None, pass it to `predict` and `sampled`.
        seed: of `sample` and `sampled`.

    Attributes:
        likelihood: what `predict` assumes.
        forward, output: how the model is called, and which of its outputs is meant; see `bayesgrad.laplace`. They are
            not saved.
    """

    kind: ClassVar[str]
    likelihood: str | Likelihood = "categorical"
    forward: Forward | None = None
    output: Output | None = None
    noise_scale: float = 1.0  # the standard deviation of Gaussian data
    _kinds: ClassVar[dict[str, type[Any]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "kind"):
            WeightDistribution._kinds[cls.kind] = cls

    def __init__(self, model: nn.Module | None = None, *, seed: int = 0) -> None:
        self.model = model
        self.seed = seed
        self._draws = 0

    @property
    @abstractmethod
    def mean(self) -> dict[str, Tensor]:
        """Name -> mean weight."""

    @abstractmethod
    def variance(self) -> dict[str, Tensor]:
        """Name -> variance of each weight, in its shape."""

    @abstractmethod
    def _shapes(self) -> dict[str, torch.Size]:
        """Name -> shape of the parameters of this posterior."""

    @abstractmethod
    def _draw(self, generators: list[torch.Generator]) -> Iterator[dict[str, Tensor]]:
        """One sample of all weights for each generator."""

    @abstractmethod
    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        """What `state_dict` stores: group -> name -> tensor."""

    @classmethod
    @abstractmethod
    def _from_tensors(cls, tensors: Mapping[str, Mapping[str, Tensor]], model: nn.Module | None) -> Posterior:
        """The inverse of `_tensors`."""

    # --- sampling ---

    def sample(self, n: int = 1, *, seed: int | None = None) -> dict[str, Tensor]:
        """Name -> (n, *shape) samples. Each call returns new ones, unless `seed` is given."""
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}.")
        found: dict[str, Tensor] = {}
        for k, draw in enumerate(self._draw(self._generators(n, seed))):
            for name, weight in draw.items():
                if not k:
                    found[name] = weight.new_empty(n, *weight.shape)
                found[name][k] = weight
        return found

    @contextmanager
    def sampled(self, model: nn.Module | None = None, *, seed: int | None = None) -> Iterator[nn.Module]:
        """Within the context the model's weights are one sample; afterwards they are restored bit for bit."""
        model = self._model(model)
        parameters = self._parameters(model)
        (draw,) = self._draw(self._generators(1, seed))
        with temporary_weights(parameters, draw):
            yield model

    def _generators(self, n: int, seed: int | None) -> list[torch.Generator]:
        refuse_export()
        first = 0
        if seed is None:
            seed, first = self.seed, self._draws
            self._draws += n
        return [generator_of(seed, first + k) for k in range(n)]

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """The log density of weights by name, in float64; weights (..., *shape), as of `sample`, give one for each."""
        raise TypeError(f"{type(self).__name__} has no density: only Gaussian and Bernoulli posteriors have one.")

    def _seed(self, seed: int | None) -> int:
        return self.seed if seed is None else seed

    def _cast(self, weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        like = self._parameters(model)
        return {name: weight.to(like[name]) for name, weight in weights.items()}

    def _model(self, model: nn.Module | None) -> nn.Module:
        model = self.model if model is None else model
        if model is None:
            raise ValueError("the posterior has no model: pass model= to this call or to load().")
        return model

    def _parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters of the model that this posterior describes, checked by name and shape."""
        return matching_parameters(model, self._shapes(), "posterior")

    def _device(self, model: nn.Module | None) -> torch.device:
        return next(iter(self._parameters(unwrap(self._model(model))).values())).device

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Posterior:
        """A copy whose tensors are on another device, or have another dtype. The model is the same and is not moved.

        Args:
            device: a device, or a dtype.
            dtype: float32 or float64.
        """
        state = {**self.state_dict(), "tensors": storage.converted(self._tensors(), device, dtype)}
        found = WeightDistribution.from_state_dict(state, self.model)
        found.likelihood, found.noise_scale = self.likelihood, self.noise_scale
        found.forward, found.output = self.forward, self.output
        return found

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value}' for key, value in self._summary().items())})"

    def _summary(self) -> dict[str, Any]:
        """What `repr` shows."""
        shapes = self._shapes()
        size = sum(shape.numel() for shape in shapes.values())
        name = likelihoods.named(self.likelihood).name
        return {"weights": f"{size:,}", "parameters": len(shapes), "likelihood": name}

    # --- storage ---

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and strings that define the posterior, with names and shapes of the model's parameters."""
        tensors = {"likelihood": {likelihoods.named(self.likelihood).name: torch.ones(())}, **self._tensors()}
        parts = {"kind": self.kind, "seed": self.seed, "draws": self._draws, "tensors": tensors}
        parts["noise_scale"] = float(self.noise_scale)
        return parts if self.model is None else {**parts, "model": architecture(self.model)}

    def save(self, path: str | os.PathLike) -> None:
        """Writes `state_dict()` to a safetensors file, atomically; needs `bayesgrad[posterior]`."""
        storage.write(path, self.state_dict())

    @staticmethod
    def load(path: str | os.PathLike, model: nn.Module | None = None) -> Posterior:
        """Reads a posterior that `Posterior.save` wrote, onto the CPU, without pickle.

        Raises:
            ValueError: the file is damaged, truncated, altered or of another format, or the model has other
                parameters than the one that the posterior was saved with.
        """
        state = storage.read(path)
        try:
            return WeightDistribution.from_state_dict(state, model)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error
        except Exception as error:  # a state that was altered by hand can fail in any way
            raise ValueError(f"{os.fspath(path)} is damaged ({error!r}); save the posterior again.") from error

    @staticmethod
    def from_state_dict(state: Mapping[str, Any], model: nn.Module | None = None) -> Posterior:
        """The posterior of which `state` is the `state_dict()`, of any class.

        Raises:
            ValueError: the state is incomplete, or the model has other parameters than the saved one.
        """
        storage.check_state(state, WeightDistribution._kinds)
        if model is not None and "model" in state:
            check_architecture(model, state["model"])
        try:
            posterior = WeightDistribution._kinds[state["kind"]]._from_tensors(state["tensors"], model)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the state of the posterior is incomplete: it lacks {error}; save it again.") from error
        posterior.seed, posterior._draws = state["seed"], state["draws"]
        posterior.likelihood = next(iter(state["tensors"].get("likelihood", {})), posterior.likelihood)
        posterior.noise_scale = float(state.get("noise_scale", posterior.noise_scale))  # older files have none
        if model is not None:
            posterior._parameters(model)
        return posterior
