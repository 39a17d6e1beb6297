"""The interface of all posteriors: samples, predictions, storage."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import torch
from torch import Tensor, nn

from bayesgrad import likelihoods
from bayesgrad.belief import Belief
from bayesgrad.layers.batches import Call, Forward, Inputs, Output
from bayesgrad.layers.network import (
    Network,
    architecture,
    check_architecture,
    evaluation_mode,
    matching_parameters,
    temporary_weights,
    unwrap,
)
from bayesgrad.layers.output_covariance import BlockCovariance, OutputCovariance, output_covariance
from bayesgrad.layers.running_statistics import spread, warn_of_statistics
from bayesgrad.likelihoods import Likelihood
from bayesgrad.noise import generator_of
from bayesgrad.posterior import storage
from bayesgrad.posterior.averages import REMEDY, RUNNING, Averages, Options, Statistics, check_link
from bayesgrad.posterior.linearised import gaussian_outputs, linearised_outputs, refuse_export, warn_of_samples
from bayesgrad.precision import Diagonal
from bayesgrad.predictions import Decomposed, Moments, NoisyMoments

if TYPE_CHECKING:
    from typing_extensions import Unpack

METHODS = ("mc", "linear", "mean")
UNSUPPORTED = (RuntimeError, ValueError, TypeError, NotImplementedError)  # what a backward pass may raise


class Posterior(ABC):
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
    methods: ClassVar[tuple[str, ...]] = METHODS
    central: ClassVar[tuple[str, ...]] = ("linear", "mean")  # those with weights that running statistics fit
    method: ClassVar[str] = "mc"  # of `predict`, if none is given
    likelihood: str | Likelihood = "categorical"
    forward: Forward | None = None
    output: Output | None = None
    noise_scale: float = 1.0  # the standard deviation of Gaussian data
    _kinds: ClassVar[dict[str, type[Posterior]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Posterior._kinds[cls.kind] = cls

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

    # --- prediction ---

    def _reading(self, likelihood: str | Likelihood | None = None, noise_scale: float | None = None) -> Likelihood:
        """The likelihood; names stand for the noise of this posterior if no other is given."""
        given = self.likelihood if likelihood is None else likelihood
        if noise_scale is None and isinstance(given, str) and given == likelihoods.Gaussian.kind:
            noise_scale = float(self.noise_scale)
        return likelihoods.named(given, noise_scale)

    @overload
    def predict(
        self,
        x: Inputs,
        samples: int = 32,
        method: str | None = None,
        *,
        likelihood: Literal["categorical", "bernoulli", "poisson"] | None = None,
        decompose: Literal[False] = False,
        **options: Unpack[Options],
    ) -> Tensor: ...

    @overload
    def predict(
        self,
        x: Inputs,
        samples: int = 32,
        method: str | None = None,
        *,
        likelihood: Literal["gaussian"] | likelihoods.Gaussian,
        decompose: Literal[False] = False,
        **options: Unpack[Options],
    ) -> Moments: ...

    @overload
    def predict(
        self,
        x: Inputs,
        samples: int = 32,
        method: str | None = None,
        *,
        likelihood: str | Likelihood | None = None,
        decompose: Literal[True],
        **options: Unpack[Options],
    ) -> Decomposed: ...

    @torch.no_grad()
    def predict(
        self,
        x: Inputs,
        samples: int = 32,
        method: str | None = None,
        *,
        likelihood: str | Likelihood | None = None,
        decompose: bool = False,
        link: str | None = None,
        model: nn.Module | None = None,
        seed: int | None = None,
        statistics: Statistics = None,
        chunk: int | None = None,
    ) -> Tensor | Moments | NoisyMoments | Decomposed:
        """Predictions averaged over the posterior.

        The model runs in evaluation mode, so normalisation statistics do not change; afterwards its modes are restored.
        The same posterior, inputs and seed give the same prediction.

        Args:
            x: a batch of inputs; a tuple if the model takes several arguments, a mapping for keyword arguments (its key
                `"labels"` is left out).
            samples: the number of samples that `method="mc"` and `link="mc"` average over.
            method: `"mc"` averages over samples of the weights; `"linear"` is exact for the network linearised at the
                mean; `"mean"` uses the mean weights alone. None is `"linear"` for Laplace posteriors (`"mc"` with a
                warning, if the model cannot be linearised), and `"mc"` for all others.
            likelihood: `"categorical"` and `"bernoulli"` return probabilities, `"poisson"` rates, `"gaussian"` mean and
                variance of the outputs; the variance of a new label is that plus `noise_scale**2`. An object of
                `bayesgrad.likelihoods` brings its own noise. None uses the likelihood of the posterior, which is
                categorical by default.
            decompose: whether to return aleatoric and epistemic uncertainty separately; see `Decomposed`.
            link: how `"linear"` turns Gaussian outputs into probabilities: `"probit"` for MacKay's approximation, or
                `"mc"` for an average over samples from the joint Gaussian of each example's outputs. None uses
                `"probit"`, or `"mc"` if `decompose` needs samples. Means, variances and rates need neither.
            model: another copy of the network, in place of the posterior's own.
            seed: of the samples, in place of the posterior's own.
            statistics: a batch of training inputs, or a loader as for torch.optim.swa_utils.update_bn, from which
                BatchNorm's statistics are estimated for each sample. `"running"` uses the model's running statistics;
                None does so too, and warns once if the model has any and its weights vary much.
            chunk: the number of inputs that go through the network at once, to limit memory; None for all.
        """
        chosen = self.method if method is None else method
        if chosen not in self.methods:
            raise ValueError(f"method must be one of {', '.join(map(repr, self.methods))}, got {method!r}.")
        reading = self._reading(likelihood)
        check_link(link, reading, decompose)
        network = self._network(x, model, samples, chunk, statistics)
        if statistics is None and chosen not in self.central:
            warn_of_statistics(unwrap(self._model(model)), lambda: spread(self.mean, self.variance()), REMEDY)
        with evaluation_mode(network.model):
            if chosen == "linear":
                closed = reading.closed_form or (link != "mc" and not decompose and not reading.needs_samples)
                try:
                    mean, covariance = self._linear_moments(network, joint=not closed)
                except UNSUPPORTED as error:
                    if method is not None:
                        raise
                    found = self._average(network, reading, samples, seed)  # raises where the inputs are wrong
                    warn_of_samples(error)
                else:
                    if closed:
                        return (reading.decompose_gaussian if decompose else reading.from_gaussian)(mean, covariance)
                    found = Averages(reading)
                    for outputs in gaussian_outputs(mean, covariance, self._generators(samples, self._seed(seed))):
                        found.add(outputs)
            elif chosen == "mc":
                found = self._average(network, reading, samples, seed)
            else:
                found = Averages(reading)
                found.add(network(self._cast(getattr(self, chosen), network.model)))
        return found.decomposed() if decompose else found.prediction()

    @torch.no_grad()
    def predictive_samples(
        self,
        x: Inputs,
        samples: int = 32,
        *,
        model: nn.Module | None = None,
        seed: int | None = None,
        statistics: Statistics = None,
        chunk: int | None = None,
    ) -> Tensor:
        """The outputs f for samples of the weights, (samples, examples, *outputs); arguments as in `predict`."""
        network = self._network(x, model, samples, chunk, statistics)
        with evaluation_mode(network.model):
            return torch.stack(list(self._outputs(network, samples, seed)))

    @torch.no_grad()
    def functional_samples(
        self,
        x: Inputs,
        samples: int = 32,
        *,
        model: nn.Module | None = None,
        seed: int | None = None,
        chunk: int | None = None,
    ) -> Tensor:
        """As `predictive_samples`, for the network linearised at the mean m: f(m) + J (w - m) for samples w."""
        network = self._network(x, model, samples, chunk)
        mean = self._centre(network)
        draws = (self._cast(w, network.model) for w in self._choose(samples, self._seed(seed)))
        with evaluation_mode(network.model):
            changes = ({name: weight - mean[name] for name, weight in w.items()} for w in draws)
            return torch.stack(list(linearised_outputs(network, mean, changes)))

    @torch.no_grad()
    def functional_variance(
        self, x: Inputs, *, joint: bool = False, model: nn.Module | None = None, chunk: int | None = None
    ) -> Tensor:
        """The variance J Σ J' of the linearised network's outputs, in their shape.

        Args:
            joint: whether to return the covariance of each example's outputs, (examples, outputs, outputs).
            x, model, chunk: as in `predict`.
        """
        network = self._network(x, model, 1, chunk)
        with evaluation_mode(network.model):
            return self._linear_moments(network, joint)[1]

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """The log density of weights by name, in float64; weights (..., *shape), as of `sample`, give one for each."""
        raise TypeError(f"{type(self).__name__} has no density: only Gaussian and Bernoulli posteriors have one.")

    def _network(
        self,
        x: Inputs,
        model: nn.Module | None,
        samples: int,
        chunk: int | None,
        statistics: Statistics = None,
    ) -> Network:
        for name, value in (("samples", samples), ("chunk", 1 if chunk is None else chunk)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        call = Call(self.forward, self.output)
        called, inputs = call(self._model(model), x)
        given: Any = None if isinstance(statistics, str) and statistics == RUNNING else statistics
        given = call(self._model(model), given)[1] if isinstance(given, Mapping) else given
        self._parameters(called)
        return Network(called, inputs, given, chunk)

    def _average(self, network: Network, reading: Likelihood, samples: int, seed: int | None) -> Averages:
        """Averages predictions over samples, which are not stored."""
        found = Averages(reading)
        for outputs in self._outputs(network, samples, seed):
            found.add(outputs)
        return found

    def _outputs(self, network: Network, samples: int, seed: int | None) -> Iterator[Tensor]:
        """The outputs for samples of the weights."""
        for weights in self._choose(samples, self._seed(seed)):
            yield network(self._cast(weights, network.model))

    def _seed(self, seed: int | None) -> int:
        return self.seed if seed is None else seed

    def _choose(self, samples: int, seed: int) -> Iterator[dict[str, Tensor]]:
        """The samples that a prediction averages over."""
        return self._draw(self._generators(samples, seed))

    def _linear_moments(self, network: Network, joint: bool) -> tuple[Tensor, Tensor]:
        """Outputs at the mean, and their variance J Σ J' for the Jacobian J of each example.

        Args:
            joint: whether to return the covariance of each example's outputs, (examples, outputs, outputs).
        """
        mean = self._centre(network)
        centre = network(mean)
        count = centre[:1].numel()
        if not len(centre):
            return centre, centre.new_zeros(0, count, count) if joint else torch.zeros_like(centre)
        spread = output_covariance(network, mean, self._output_covariances(), joint).to(centre)
        return centre, spread if joint else spread.view_as(centre)

    def _centre(self, network: Network) -> dict[str, Tensor]:
        """The weights at which the network is linearised."""
        return self._cast(self.mean, network.model)

    def _output_covariances(self) -> Sequence[OutputCovariance]:
        """The covariances of linearised outputs for independent blocks of weights."""
        return [BlockCovariance(name, Belief(v, Diagonal(v))) for name, v in self.variance().items()]

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

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Posterior:
        """A copy whose tensors are on another device, or have another dtype. The model is the same and is not moved.

        Args:
            device: a device, or a dtype.
            dtype: float32 or float64.
        """
        state = {**self.state_dict(), "tensors": storage.converted(self._tensors(), device, dtype)}
        found = Posterior.from_state_dict(state, self.model)
        found.likelihood, found.noise_scale = self.likelihood, self.noise_scale
        found.forward, found.output = self.forward, self.output
        return found

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value}' for key, value in self._summary().items())})"

    def _summary(self) -> dict[str, Any]:
        """What `repr` shows."""
        shapes = self._shapes()
        parts: dict[str, Any] = {"weights": f"{sum(shape.numel() for shape in shapes.values()):,}"}
        parts |= {"parameters": len(shapes), "likelihood": likelihoods.named(self.likelihood).name}
        return parts | {"method": self.method, "model": None if self.model is None else type(self.model).__name__}

    # --- storage ---

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and strings that define the posterior, with names and shapes of the model's parameters."""
        parts = {"kind": self.kind, "seed": self.seed, "draws": self._draws, "tensors": self._tensors()}
        return parts if self.model is None else {**parts, "model": architecture(self.model)}

    def save(self, path: str | os.PathLike) -> None:
        """Writes `state_dict()` to a safetensors file, atomically; needs `bayesgrad[posterior]`."""
        storage.write(path, self.state_dict())

    @staticmethod
    def load(path: str | os.PathLike, model: nn.Module | None = None) -> Posterior:
        """Reads a file that `save` wrote; see `bayesgrad.posterior.load`."""
        return load(path, model)

    @staticmethod
    def from_state_dict(state: Mapping[str, Any], model: nn.Module | None = None) -> Posterior:
        """The posterior of which `state` is the `state_dict()`, of any class.

        Raises:
            ValueError: the state is incomplete, or the model has other parameters than the saved one.
        """
        storage.check_state(state, Posterior._kinds)
        if model is not None and "model" in state:
            check_architecture(model, state["model"])
        try:
            posterior = Posterior._kinds[state["kind"]]._from_tensors(state["tensors"], model)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the state of the posterior is incomplete: it lacks {error}; save it again.") from error
        posterior.seed, posterior._draws = state["seed"], state["draws"]
        if model is not None:
            posterior._parameters(model)
        return posterior


def load(path: str | os.PathLike, model: nn.Module | None = None) -> Posterior:
    """Reads a posterior that `Posterior.save` wrote, onto the CPU, without pickle.

    Raises:
        ValueError: the file is damaged, truncated, altered or of another format, or the model has other parameters than
            the one that the posterior was saved with.
    """
    state = storage.read(path)
    try:
        return Posterior.from_state_dict(state, model)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error
    except Exception as error:  # a state that was altered by hand can fail in any way
        raise ValueError(f"{os.fspath(path)} is damaged ({error!r}); save the posterior again.") from error
