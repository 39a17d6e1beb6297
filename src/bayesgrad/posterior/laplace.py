"""Laplace approximations: Gaussian posteriors from the curvature of the loss at trained weights, and a prior."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesgrad.data_shards import DataShard, data_of
from bayesgrad.layers.batches import ProgressLine, batches_on
from bayesgrad.layers.network import evaluation_mode, unwrap
from bayesgrad.layers.output_covariance import OutputCovariance
from bayesgrad.likelihoods import Gaussian, Likelihood, named
from bayesgrad.posterior.gaussian import GaussianPosterior
from bayesgrad.posterior.heldout import VarianceTable
from bayesgrad.posterior.tuning import maximise_by_gradient, maximise_by_search
from bayesgrad.structures.structure import Structure, check_prior, prior_by_name
from bayesgrad.warning import warn

GROUPS = ("model", "layer", "parameter")
METHODS = ("evidence", "heldout")
TOO_NOISY = 2  # times the root-mean-square error
COLUMNS = "columns"  # of the parameters of a block, in files; no structure has this kind


@dataclass(frozen=True)
class Fit:
    """The loss of the trained network on all data.

    Args:
        loss: the negative log-likelihood for unit noise, without its constant.
        outputs: the number of predicted values.
        power: the Hessian is proportional to noise_variance^-power; 0 for a likelihood without noise.
    """

    loss: float
    outputs: float
    power: int = 0

    @property
    def rmse(self) -> float:
        """The root-mean-square error, of a likelihood with noise."""
        return math.sqrt(2 * self.loss / self.outputs)

    def log_likelihood(self, noise_variance: Tensor) -> Tensor:
        if not self.power:
            return -self.loss + 0 * noise_variance
        return -self.loss / noise_variance - self.outputs / 2 * (2 * math.pi * noise_variance).log()


class LaplacePosterior(GaussianPosterior):
    r"""A Gaussian at trained weights whose precision is the Hessian of the loss plus the prior precision.

    .. math::
        \log p(D) \approx \log p(D | w) - \tfrac{\delta}{2} |w|^2 - \tfrac12 \log |s H + \delta I|
        + \tfrac{n}{2} \log \delta

    with n weights w, prior precision δ = `prior_precision`, and s a power of 1/`noise_scale`. `bayesgrad.laplace`
    creates it.

    With `temperature` T it is the Gaussian of exp(-loss/T), where the loss includes the prior: the covariance is
    T (s H + δ I)^-1. The evidence is for T = 1.

    Args:
        hessians: of the blocks of weights.
        mean: the trained weights by name.
        fit: the loss of the trained network.
        likelihood: the default of `predict`.
        prior_precision: a number, or one for each parameter by name.
        noise_scale: the standard deviation of the data, for the Gaussian likelihood.
        temperature: T.
        noise_known: whether the noise was given; else `tune_prior` tunes it.
        model, seed: see `Posterior`.

    Attributes:
        noise_chosen: whether the noise was given or tuned; else it is 1, of which `interval` warns.

    Reference: Benzing 2021, appendix A.1; MacKay, 1992, for the evidence.
    Checked by: tests/equations/test_laplace.py.
    """

    kind = "laplace"
    method = "linear"

    def __init__(
        self,
        hessians: Sequence[Structure],
        mean: Mapping[str, Tensor],
        fit: Fit,
        *,
        likelihood: str | Likelihood,
        prior_precision: float | Mapping[str, float] = 1.0,
        noise_scale: float = 1.0,
        temperature: float = 1.0,
        noise_known: bool = True,
        model: nn.Module | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__({}, model, seed=seed)
        self.noise_known = self.noise_chosen = noise_known
        self._warned = False  # of noise that was not chosen
        self.hessians, self.fit, self.likelihood = list(hessians), fit, likelihood
        self._weights = dict(mean)
        self._set(prior_precision, noise_scale, temperature)

    def set_prior(
        self,
        prior_precision: float | Mapping[str, float],
        noise_scale: float | None = None,
        temperature: float | None = None,
    ) -> LaplacePosterior:
        """Changes the prior, and optionally noise and temperature, in place. Mean and Hessians stay the same."""
        given = self.noise_scale if noise_scale is None else noise_scale
        self._set(prior_precision, given, self.temperature if temperature is None else temperature)
        self.noise_chosen |= noise_scale is not None
        return self

    def _set(self, prior_precision: float | Mapping[str, float], noise_scale: float, temperature: float) -> None:
        prior = check_prior(prior_precision, noise_scale, self._weights, temperature)
        prior = {name: value / temperature for name, value in prior.items()}
        scale = (float(noise_scale) ** 2) ** -self.fit.power / temperature
        beliefs = {next(iter(h.shapes)): h.belief(self._weights, prior, scale) for h in self.hessians}
        self.prior_precision, self.noise_scale, self.temperature = prior_precision, noise_scale, temperature
        self.beliefs = beliefs
        self._covariances = [
            h.output_covariance(belief, prior, scale) for h, belief in zip(self.hessians, beliefs.values(), strict=True)
        ]

    def _by_parameter(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parted = super()._by_parameter(values)
        return {name: parted[name] for name in self._weights}  # in the order of the model

    def _output_covariances(self) -> list[OutputCovariance]:
        return self._covariances

    def log_marginal_likelihood(self, prior_precision: Any = None, noise_scale: Any = None) -> Tensor:
        """The log evidence log p(D), in float64; differentiable in arguments that are tensors.

        Args:
            prior_precision: in place of the posterior's own: a number or tensor, or one for each parameter by name.
            noise_scale: in place of the posterior's own.
        """
        prior = self.prior_precision if prior_precision is None else prior_precision
        noise_scale = self.noise_scale if noise_scale is None else noise_scale
        noise_variance = torch.as_tensor(noise_scale, dtype=torch.float64) ** 2
        priors = prior_by_name(prior, self._weights, lambda value: torch.as_tensor(value, dtype=torch.float64))
        scale = noise_variance**-self.fit.power
        volume = torch.stack([h.logdet(priors, scale) for h in self.hessians]).sum()
        for name, weight in self._weights.items():
            delta = priors[name]
            volume = volume - weight.numel() * delta.log() + delta * weight.double().square().sum()
        return self.fit.log_likelihood(noise_variance) - volume / 2

    def tune_prior(
        self,
        per: str = "model",
        *,
        method: str = "evidence",
        heldout: Iterable | None = None,
        noise_scale: bool | None = None,
        temperature: bool = False,
        steps: int = 100,
        progress: bool | None = None,
    ) -> LaplacePosterior:
        """Sets the prior precision that maximises the evidence, or the log-density of held-out labels.

        The mean stays the same, although it was trained under another prior: train and tune again if that matters. The
        search starts at the current prior and finds a local optimum.

        Args:
            per: one precision for the `"model"`, for each `"layer"` or for each `"parameter"`.
            method: `"evidence"`, or `"heldout"` for the mean log-density of labels under linearised predictions.
            heldout: batches (inputs, labels) for `method="heldout"`; of the part of the data that belongs to a process,
                as for `bayesgrad.laplace`, in which case all processes call this.
            noise_scale: whether to tune the standard deviation of the data as well; None for whether it was not given.
            temperature: whether to tune the temperature as well; needs `method="heldout"`.
            steps: the maximal number of L-BFGS iterations, or of evaluations on held-out labels. All evaluations cost a
                few linearised predictions if one eigenbasis serves all priors (`"diag"`, `"kron"` and `"input"`, up to
                a million weights), and one each otherwise.
            progress: of `method="heldout"`: whether to print a progress line; None prints one in a terminal, after two
                seconds.
        """
        for name, value, known in (("per", per, GROUPS), ("method", method, METHODS)):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}.")
        noise_scale = bool(self.fit.power) and not self.noise_known if noise_scale is None else noise_scale
        if noise_scale and not self.fit.power:
            raise ValueError(
                f"a {named(self.likelihood).kind} likelihood has no noise to tune: leave noise_scale=False."
            )
        if temperature and method == "evidence":
            raise ValueError("the evidence does not depend on temperature: use method='heldout' for temperature=True.")
        if (heldout is None) != (method == "evidence"):
            raise ValueError(f"method={method!r} {'needs' if heldout is None else 'takes no'} heldout=.")
        key: Callable[[str], str] = {
            "model": lambda name: "",
            "layer": lambda name: name.rpartition(".")[0],
            "parameter": lambda name: name,
        }[per]
        groups = {key(name): value for name, value in prior_by_name(self.prior_precision, self._weights, float).items()}
        place = {group: i for i, group in enumerate(groups)}
        start = [*groups.values(), *[float(self.noise_scale) ** 2] * noise_scale, *[self.temperature] * temperature]

        def read(values: Sequence[Any]) -> tuple[Any, Any, Any]:
            """Prior, noise and temperature."""
            prior = {name: values[place[key(name)]] for name in self._weights}
            given = values[len(groups)] ** 0.5 if noise_scale else self.noise_scale  # the search is over the variance
            return values[0] if per == "model" else prior, given, values[-1] if temperature else self.temperature

        if method == "evidence":
            size = sum(weight.numel() for weight in self._weights.values())
            found = maximise_by_gradient(
                lambda values: self.log_marginal_likelihood(*read(values.unbind())[:2]) / size, start, steps
            )
        else:
            members = [[h for h in self.hessians if {key(name) for name in h.shapes} == {group}] for group in groups]
            found = self._search(() if heldout is None else heldout, members, read, start, steps, progress)
        if not all(1e-20 < value < 1e20 for value in found):
            raise ValueError(
                f"tune_prior found no optimum: the search diverged to prior_precision={found[: len(groups)]}."
            )
        self._set(*read(found))
        self.noise_chosen |= noise_scale
        if noise_scale and method == "evidence" and self.noise_scale > TOO_NOISY * self.fit.rmse:
            warn(
                f"tune_prior found a noise of {self.noise_scale:.4g}, more than {TOO_NOISY} times the root-mean-square "
                f"error on the data of laplace(), {self.fit.rmse:.4g}: the evidence of this structure may not suit the "
                "network, and intervals may be far too wide; use tune_prior(method='heldout', heldout=...).",
            )
        return self

    @torch.no_grad()
    def _search(
        self,
        heldout: Iterable,
        members: Sequence[Sequence[Structure]],
        read: Callable[[Sequence[float]], tuple[Any, float, float]],
        start: Sequence[float],
        steps: int,
        progress: bool | None,
    ) -> list[float]:
        """The values that maximise the log-density of held-out labels.

        Args:
            members: the blocks of each group of parameters with one prior precision, which come first in the values.
            read: prior, noise and temperature from values.
        """
        data, kept = data_of("tune_prior", heldout, None), (self.prior_precision, self.noise_scale, self.temperature)
        model = unwrap(self._model(None))
        with data.together(), evaluation_mode(model):
            batches = list(batches_on(data, self._device(None)))
            if not batches:
                raise ValueError("heldout gave no batches: pass a loader or a list of (inputs, labels).")
            pairs = [(self._network(x, None, 1, None), y) for x, y in batches]
            beliefs = dict(zip(map(id, self.hessians), self.beliefs.values(), strict=True))
            groups = [[(hessian, beliefs[id(hessian)]) for hessian in group] for group in members]
            table = VarianceTable(groups, pairs, self._centre(pairs[0][0]), progress)
            tabulated = sum(map(len, members)) == len(self.hessians) and table.fits()
        line, count = ProgressLine(progress, steps, "log-density"), 0

        def density(values: list[float]) -> float:
            nonlocal count
            prior, noise, temperature = read(values)
            if not tabulated:
                self._set(prior, noise, temperature)
                found = self._log_density(batches, data)
            else:
                check_prior(prior, noise, self._weights, temperature)
                self.noise_scale = noise
                unit = noise ** (2 * self.fit.power)
                ratios = [unit * value for value in values[: len(members)]]
                with data.together(), evaluation_mode(model):
                    sums = table.log_density(self._reading(), ratios, unit * temperature)
                total, examples = data.total(sums, next(model.parameters()).device)
                found = total / examples
            if not count and math.isnan(found):  # nothing is larger than it
                raise ValueError(
                    "the log-density of the held-out labels is NaN, as of labels that are NaN: leave out examples "
                    "without a label."
                )
            count += 1
            line.update(count, found)
            return found

        try:
            return maximise_by_search(density, start, steps)
        finally:
            line.close()
            self._set(*kept)

    @torch.no_grad()
    def _log_density(self, batches: Sequence[Any], data: DataShard | None = None) -> float:
        """The mean log-density of labels under linearised predictions, in batches that are those of `data`."""
        data = data_of("", batches, None) if data is None else data
        reading, total, count = self._reading(), 0.0, 0
        network = unwrap(self._model(None))
        with data.together(), evaluation_mode(network):
            for x, y in batches_on(batches, self._device(None)):
                mean, variance = self._linear_moments(self._network(x, None, 1, None), joint=False)
                total += float(reading.log_density(mean, variance.clamp(min=0), y).double().sum())
                count += len(mean)
        total, count = data.total([total, count], next(network.parameters()).device)
        return total / count

    def _reading_with_noise(self, likelihood: str | Likelihood | None) -> Likelihood:
        given = self.likelihood if likelihood is None else likelihood
        if not (self.noise_chosen or self._warned) and given == Gaussian.kind:
            self._warned = True
            warn(
                "the noise of the data was neither given nor tuned, so it has a standard deviation of "
                f"{self.noise_scale:.4g}: call tune_prior(), or pass noise_scale= to laplace().",
            )
        return super()._reading_with_noise(likelihood)

    def _summary(self) -> dict[str, Any]:
        structures = dict.fromkeys(getattr(h, "name", h.kind) for h in self.hessians)
        prior = self.prior_precision
        ends = (min(prior.values()), max(prior.values())) if isinstance(prior, Mapping) else (prior,)
        parts = {key: value for key, value in super()._summary().items() if key != "precision"}
        noise = {"noise_scale": f"{self.noise_scale:.4g}"} if self.fit.power else {}
        own = {
            "structure": "+".join(structures),
            **parts,
            "prior_precision": " to ".join(f"{end:.4g}" for end in ends),
            **noise,
        }
        return own | {"temperature": self.temperature}

    # --- storage ---

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        prior = prior_by_name(self.prior_precision, self._weights, float)
        numbers = {"loss": self.fit.loss, "outputs": self.fit.outputs, "power": self.fit.power}
        numbers |= {"noise_scale": self.noise_scale, "temperature": self.temperature, "noise_known": self.noise_known}
        numbers["noise_chosen"] = self.noise_chosen
        tensors = {
            "mean": self._weights,
            "prior": {name: torch.tensor(value, dtype=torch.float64) for name, value in prior.items()},
            "fit": {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()},
            "likelihood": {named(self.likelihood).name: torch.ones(())},
        }
        for hessian in self.hessians:
            owner = next(iter(hessian.shapes))
            tensors[f"{hessian.kind} of {owner}"] = hessian.stored()
            tensors[f"{COLUMNS} of {owner}"] = {name: torch.tensor(shape) for name, shape in hessian.shapes.items()}
        return tensors

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Mapping[str, Tensor]], model: nn.Module | None) -> LaplacePosterior:
        means, numbers = tensors["mean"], {name: float(value) for name, value in tensors["fit"].items()}
        hessians = []
        for group, parts in tensors.items():
            kind, of, owner = group.partition(" of ")
            if not of or kind == COLUMNS:
                continue
            if kind not in Structure.by_kind:
                raise ValueError(f"no structure stores blocks as {kind!r}: import the module that defines it.")
            shapes = {name: means[name].shape for name in tensors[f"{COLUMNS} of {owner}"]}
            hessians.append(Structure.by_kind[kind].restored(shapes, parts))
        prior = {name: float(value) for name, value in tensors["prior"].items()}
        found = cls(
            hessians,
            means,
            Fit(numbers["loss"], numbers["outputs"], int(numbers["power"])),
            likelihood=next(iter(tensors["likelihood"])),
            prior_precision=prior if len(set(prior.values())) > 1 else next(iter(prior.values())),
            noise_scale=numbers["noise_scale"],
            temperature=numbers["temperature"],
            noise_known=bool(numbers.get("noise_known", 1.0)),
            model=model,
        )
        found.noise_chosen = bool(numbers.get("noise_chosen", 1.0))
        return found
