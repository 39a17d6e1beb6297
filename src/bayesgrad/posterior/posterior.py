"""The interface of every posterior, whichever rule it came from."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, overload

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from bayesgrad import likelihoods
from bayesgrad._kernels import compute_dtype
from bayesgrad.posterior import storage

METHODS = ("mc", "linear", "mean")
JACOBIAN = 1 << 27  # elements of the Jacobians that are held at once


class Posterior(ABC):
    """A distribution over the named parameters of a model.

    Parameters of the model that it does not name stay as they are in the model. Sampling never touches the
    global generator: draw k of a posterior is a function of (seed, k) alone.

    Args:
        model: the network to predict with; may be left out and given to `predict` and `sampled` instead.
        seed: where the draws of `sample` and `sampled` start.
    """

    kind: ClassVar[str]
    methods: ClassVar[tuple[str, ...]] = METHODS
    likelihood = "categorical"  # what `predict` assumes
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
        """Name -> shape of the weights this posterior is about."""

    @abstractmethod
    def _draw(self, generators: list[torch.Generator]) -> Iterator[dict[str, Tensor]]:
        """One draw of all weights for each generator."""

    @abstractmethod
    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        """What `state_dict` stores: group -> name -> tensor."""

    @classmethod
    @abstractmethod
    def _from_tensors(cls, tensors: Mapping[str, Mapping[str, Tensor]], model: nn.Module | None) -> Posterior:
        """The inverse of `_tensors`."""

    # --- sampling ---

    def sample(self, n: int = 1, *, seed: int | None = None) -> dict[str, Tensor]:
        """Name -> (n, *shape) draws. Each call goes on where the last one ended, unless `seed` is given."""
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}.")
        draws = list(self._draw(self._generators(n, seed)))
        return {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}

    @contextmanager
    def sampled(self, model: nn.Module | None = None, *, seed: int | None = None) -> Iterator[nn.Module]:
        """Within the context the model's weights are one draw; afterwards they are what they were, bit for bit."""
        model = self._model(model)
        parameters = self._parameters(model)
        (draw,) = self._draw(self._generators(1, seed))
        saved = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        try:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(draw[name])
            yield model
        finally:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(saved[name])

    def _generators(self, n: int, seed: int | None) -> list[torch.Generator]:
        first = 0
        if seed is None:
            seed, first = self.seed, self._draws
            self._draws += n
        # Consecutive seeds of the Mersenne twister are independent streams; the odd factor keeps users' seeds apart.
        return [torch.Generator("cpu").manual_seed((seed * 0x9E3779B97F4A7C15 + first + k) % 2**63) for k in range(n)]

    # --- prediction ---

    @overload
    def predict(
        self,
        x: Tensor | tuple[Tensor, ...],
        samples: int = 32,
        method: str = "mc",
        *,
        likelihood: Literal["categorical", "bernoulli", "poisson"] | None = None,
        model: nn.Module | None = None,
        seed: int | None = None,
        statistics: Tensor | tuple[Tensor, ...] | None = None,
    ) -> Tensor: ...

    @overload
    def predict(
        self,
        x: Tensor | tuple[Tensor, ...],
        samples: int = 32,
        method: str = "mc",
        *,
        likelihood: Literal["gaussian"],
        model: nn.Module | None = None,
        seed: int | None = None,
        statistics: Tensor | tuple[Tensor, ...] | None = None,
    ) -> likelihoods.Moments: ...

    @torch.no_grad()
    def predict(
        self,
        x: Tensor | tuple[Tensor, ...],
        samples: int = 32,
        method: str = "mc",
        *,
        likelihood: str | None = None,
        model: nn.Module | None = None,
        seed: int | None = None,
        statistics: Tensor | tuple[Tensor, ...] | None = None,
    ) -> Tensor | likelihoods.Moments:
        """Predictions averaged over the belief.

        The model runs in evaluation mode, so normalisation statistics do not move, and is left in the mode it was in.
        The same posterior, inputs and seed give the same prediction.

        Args:
            x: a batch of inputs; a tuple of them where the model takes several.
            samples: how many draws `method="mc"` averages.
            method: `"mc"` averages over draws of the weights; `"linear"` is exact for the network linearised at the
                mean; `"mean"` uses the mean weights alone.
            likelihood: `"categorical"` and `"bernoulli"` give probabilities, `"poisson"` rates, `"gaussian"` a (mean,
                variance) pair. None is the one that the posterior was made with, or else categorical.
            model: another copy of the network, if not the one the posterior was built with.
            seed: another set of draws.
            statistics: a batch of training inputs, from which BatchNorm's statistics are estimated anew for each draw.
                Left out, they are those of training, at whichever weights it saw.
        """
        if method not in self.methods:
            raise ValueError(f"method must be one of {', '.join(map(repr, self.methods))}, got {method!r}.")
        if samples < 1:
            raise ValueError(f"samples must be at least 1, got {samples}.")
        reading = likelihoods.named(self.likelihood if likelihood is None else likelihood)
        network = unwrapped(self._model(model))
        inputs = x if isinstance(x, tuple) else (x,)
        names = {_clean(name): name for name, _ in network.named_parameters()}
        self._parameters(network)

        def outputs(weights: Mapping[str, Tensor], inputs: tuple[Tensor, ...] = inputs) -> Tensor:
            values = {names[name]: weight for name, weight in weights.items()}
            if statistics is not None:
                values |= _estimated(network, values, statistics if isinstance(statistics, tuple) else (statistics,))
            found = functional_call(network, values, inputs)
            return found.to(compute_dtype(found.dtype))  # averages of half-precision numbers would not be averages

        with evaluating(network):
            if method == "linear":
                return reading.expected(*self._linear(outputs, inputs, network))
            if method in ("mean", "mode"):
                value = reading.link(outputs(self._cast(getattr(self, method), network)))
                return reading.averaged(value, torch.zeros_like(value))
            return reading.averaged(*self._average(outputs, reading.link, samples, seed, network))

    def _average(
        self, outputs: Callable, link: Callable, samples: int, seed: int | None, model: nn.Module
    ) -> tuple[Tensor, Tensor]:
        """Mean and variance of link(outputs) over draws, without keeping them."""
        mean = squares = count = 0
        for count, weights in enumerate(self._choose(samples, self.seed if seed is None else seed), 1):
            value = link(outputs(self._cast(weights, model)))
            deviation = value - mean
            mean = mean + deviation / count
            squares = squares + deviation * (value - mean)
        return mean, squares / count  # pyright: ignore[reportReturnType]

    def _choose(self, samples: int, seed: int) -> Iterator[dict[str, Tensor]]:
        """The draws that a prediction averages over."""
        return self._draw(self._generators(samples, seed))

    def _linear(self, outputs: Callable, inputs: tuple[Tensor, ...], model: nn.Module) -> tuple[Tensor, Tensor]:
        """Outputs at the mean, and their variance J Σ J' for a Jacobian J, one example at a time in a batched pass."""
        mean, variance = self._cast(self.mean, model), self._cast(self._marginals(), model)
        centre = outputs(mean)
        if not len(centre):
            return centre, torch.zeros_like(centre)

        def one(*example: Tensor) -> Tensor:
            alone = tuple(part[None] for part in example)
            jacobian = jacrev(lambda weights: outputs(weights, alone).flatten())(mean)
            return self._output_variance(jacobian, variance)

        with torch.enable_grad():
            size = sum(weight.numel() for weight in mean.values()) * (centre.numel() // len(centre))
            spread = vmap(one, chunk_size=min(16, max(1, JACOBIAN // size)))(*inputs)
        return centre, spread.detach().view_as(centre)

    def _marginals(self) -> dict[str, Tensor]:
        """The variances that `_output_variance` asks for."""
        return self.variance()

    def _output_variance(self, jacobian: Mapping[str, Tensor], variance: Mapping[str, Tensor]) -> Tensor:
        """sum_j J_j^2 v_j, (outputs,), for a Jacobian (outputs, *shape) of each parameter."""
        parts = [(jacobian[name].square() * variance[name]).flatten(1) for name in variance]
        return torch.cat(parts, 1).sum(1)

    def _cast(self, weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        like = self._parameters(model)
        return {name: weight.to(like[name]) for name, weight in weights.items()}

    def _model(self, model: nn.Module | None) -> nn.Module:
        model = self.model if model is None else model
        if model is None:
            raise ValueError("this posterior has no model: pass model= to the call or to load().")
        return model

    def _parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters of the model that this posterior is about, checked by name and shape."""
        found = parameters_of(model)
        shapes = self._shapes()
        for name, shape in shapes.items():
            if name not in found:
                raise ValueError(f"the model has no parameter {name!r}, which this posterior is about.")
            if found[name].shape != shape:
                raise ValueError(
                    f"parameter {name!r} has shape {tuple(found[name].shape)} in the model and "
                    f"{tuple(shape)} in the posterior: build the same architecture."
                )
        return {name: found[name] for name in shapes}

    # --- storage ---

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model, of which there are names and shapes: plain tensors, numbers and strings."""
        parts = {"kind": self.kind, "seed": self.seed, "draws": self._draws, "tensors": self._tensors()}
        return parts if self.model is None else {**parts, "model": _architecture(self.model)}

    def save(self, path: str | os.PathLike) -> None:
        """Writes `state_dict()` to a safetensors file, whole or not at all; needs `bayesgrad[posterior]`."""
        storage.write(path, self.state_dict())

    @staticmethod
    def load(path: str | os.PathLike, model: nn.Module | None = None) -> Posterior:
        """Reads what `save` wrote; see `bayesgrad.posterior.load`."""
        return load(path, model)

    @staticmethod
    def from_state_dict(state: Mapping[str, Any], model: nn.Module | None = None) -> Posterior:
        """The posterior that `state_dict()` came from, of whichever kind.

        Raises:
            ValueError: something is missing, or the model is another than the one it was made with.
        """
        missing = [key for key in ("kind", "seed", "draws", "tensors") if key not in state]
        if missing:
            raise ValueError(f"this is not a posterior's state: it lacks {', '.join(map(repr, missing))}.")
        if state["kind"] not in Posterior._kinds:
            known = ", ".join(map(repr, Posterior._kinds))
            raise ValueError(f"a posterior of kind {state['kind']!r} is not known, only {known}.")
        if model is not None and "model" in state:
            _refuse_others(_architecture(model), state["model"])
        try:
            posterior = Posterior._kinds[state["kind"]]._from_tensors(state["tensors"], model)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this posterior's state is damaged or cut short: it lacks {error}.") from error
        posterior.seed, posterior._draws = state["seed"], state["draws"]
        if model is not None:
            posterior._parameters(model)
        return posterior


def load(path: str | os.PathLike, model: nn.Module | None = None) -> Posterior:
    """Reads a posterior that `Posterior.save` wrote, onto the CPU; nothing is unpickled.

    Raises:
        ValueError: the file is damaged, cut short, altered or not a posterior's, or the model has other parameters than
            the one that the posterior was saved with.
    """
    return Posterior.from_state_dict(storage.read(path), model)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own model inside of what torch.compile and data parallelism wrap around it."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while isinstance(model, wrappers) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, wrappers) else model._orig_mod  # pyright: ignore
    return model


def _clean(name: str) -> str:
    return name.replace("_orig_mod.", "")  # of compiled modules inside the model


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's parameters by the names they have without any wrapper."""
    return {_clean(name): parameter for name, parameter in unwrapped(model).named_parameters()}


def _architecture(model: nn.Module) -> dict[str, list[int]]:
    """The shape of each parameter."""
    return {name: list(p.shape) for name, p in parameters_of(model).items()}


def _refuse_others(found: Mapping[str, list[int]], expected: Mapping[str, list[int]]) -> None:
    """Raises where a model's parameters have other names or shapes."""
    shapes = [f"{n!r} with shape {found[n]} for {s}" for n, s in expected.items() if n in found and found[n] != s]
    wrong = [
        *[f"lacks {name!r}" for name in expected if name not in found],
        *[f"has {name!r} besides" for name in found if name not in expected],
        *[f"has {shape}" for shape in shapes],
    ]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"the model is not of the architecture this posterior is about: it {', '.join(wrong[:3])}{more}."
        )


def _estimated(model: nn.Module, weights: Mapping[str, Tensor], inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The buffers of BatchNorm layers after one pass of these inputs alone, by name."""
    norms = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    buffers = {f"{name}.{key}": b.clone() for name, norm in norms.items() for key, b in norm.named_buffers()}
    momenta = {norm: norm.momentum for norm in norms.values()}
    try:
        for norm in norms.values():
            norm.train()
            norm.momentum = 1.0  # the new statistics, nothing of the old
        functional_call(model, {**weights, **buffers}, inputs)
    finally:
        for norm, momentum in momenta.items():
            norm.eval()
            norm.momentum = momentum
    return buffers


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode within; each module's own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
