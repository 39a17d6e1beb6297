"""Gaussian posteriors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesgrad import likelihoods
from bayesgrad.belief import Belief, Joint, joined
from bayesgrad.data_shards import data_of
from bayesgrad.kernels import compute_dtype
from bayesgrad.layers.batches import batches_on
from bayesgrad.layers.network import Network, evaluation_mode, unwrap
from bayesgrad.posterior.averages import FAR, Averages
from bayesgrad.posterior.posterior import Posterior
from bayesgrad.precision import Dense, Diagonal, Kronecker, LowRank, Precision, Rescaled, Spectral
from bayesgrad.structures.structure import check_prior
from bayesgrad.warning import warn

FACTORS = (
    (Kronecker, ("left", "right")),
    (Spectral, ("rows", "columns", "spectrum")),
    (Dense, ("covariance",)),
)


class Bound(NamedTuple):
    """A lower bound on the log evidence, estimated from samples: value = log_likelihood - divergence.

    Args:
        value: the bound.
        error: its standard error, nan for a single sample.
        log_likelihood: the expected log-likelihood of all data under the posterior.
        divergence: KL(posterior || prior), in closed form.
    """

    value: float
    error: float
    log_likelihood: float
    divergence: float


class GaussianPosterior(Posterior):
    """Gaussian posteriors of parameters, independent except for the parameters of a joint belief.

    >>> posterior = GaussianPosterior({"w": Belief(torch.zeros(2), Diagonal(torch.ones(2)))})
    >>> posterior.sample(3)["w"].shape
    torch.Size([3, 2])

    Args:
        beliefs: name -> belief; a joint belief has the name of one of its parameters.
        model, seed: see `Posterior`.
    """

    kind = "gaussian"

    def __init__(self, beliefs: Mapping[str, Belief], model: nn.Module | None = None, *, seed: int = 0) -> None:
        super().__init__(model, seed=seed)
        self.beliefs = dict(beliefs)
        self._compared = False  # whether a warning was given

    @property
    def mean(self) -> dict[str, Tensor]:
        return self._by_parameter({name: belief.mean for name, belief in self.beliefs.items()})

    def variance(self) -> dict[str, Tensor]:
        return self._by_parameter({name: belief.precision.variance() for name, belief in self.beliefs.items()})

    def _by_parameter(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Splits the values of beliefs by the names of parameters."""
        return {
            own: part for name, some in values.items() for own, part in self.beliefs[name].split(name, some).items()
        }

    def _shapes(self) -> dict[str, torch.Size]:
        return {name: mean.shape for name, mean in self.mean.items()}

    def _draw(self, generators: list[torch.Generator]) -> Iterator[dict[str, Tensor]]:
        for generator in generators:
            yield self._by_parameter({name: self._draw_one(belief, generator) for name, belief in self.beliefs.items()})

    @staticmethod
    def _draw_one(belief: Belief, generator: torch.Generator) -> Tensor:
        # On the CPU, so that a seed gives the same weights on every device.
        mean = belief.mean
        noise = torch.randn(mean.shape, dtype=compute_dtype(mean.dtype), generator=generator, device="cpu")
        if isinstance(belief.precision, LowRank | Rescaled):
            few = torch.randn(len(belief.precision.gram), dtype=noise.dtype, generator=generator, device="cpu")
            return belief.precision.draw(noise.to(mean.device), few.to(mean.device)).add_(mean)
        return belief.sample(noise.to(mean.device))

    def _average(self, network: Network, reading: likelihoods.Likelihood, samples: int, seed: int | None) -> Averages:
        found = super()._average(network, reading, samples, seed)
        if self._compared or torch.compiler.is_compiling():
            return found
        change = found.change(network(self._centre(network)))
        if change > FAR:
            self._compared = True
            share = f"{change:.0%}" if change < 100 else "more than 9999%"
            warn(
                f"the average over {samples} samples of the weights changes {share} of what the mean weights "
                f"predict, more than {FAR:.0%}: the Gaussian is too wide for the network, or for so few samples; use "
                "method='linear', or tune the prior.",
            )
        return found

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        if set(weights) != set(self._shapes()):
            odd = sorted(set(weights) ^ set(self._shapes()))
            raise ValueError(f"log_prob needs the weights of all parameters of the posterior; {odd[:3]} do not match.")
        total = torch.zeros((), dtype=torch.float64)
        for name, belief in self.beliefs.items():
            given = belief.join(weights) if isinstance(belief, Joint) else weights[name]
            rows = (given - belief.mean).reshape(-1, *belief.mean.shape)
            if isinstance(belief.precision, LowRank | Rescaled):
                product = torch.stack([belief.precision.multiply(row) for row in rows])
            else:
                product = belief.precision.multiply(rows)
            square = (
                (rows.double() * product.double())
                .reshape(len(rows), -1)
                .sum(1)
                .view(given.shape[: -belief.mean.dim() or None])
            )
            constant = belief.mean.numel() * math.log(2 * math.pi) - belief.precision.logdet().double()
            total = total.to(square.device) - (square + constant) / 2
        return total

    def _summary(self) -> dict[str, Any]:
        kinds = dict.fromkeys(type(belief.precision).__name__ for belief in self.beliefs.values())
        return {"precision": "+".join(kinds), **super()._summary()}

    def _beliefs(self) -> Mapping[str, Belief]:
        return self.beliefs

    @torch.no_grad()
    def elbo(
        self,
        loader: Iterable,
        *,
        prior_precision: float | Mapping[str, float],
        likelihood: str | likelihoods.Likelihood | None = None,
        noise_scale: float | None = None,
        num_data: float | None = None,
        samples: int = 32,
        model: nn.Module | None = None,
        seed: int | None = None,
    ) -> Bound:
        r"""The evidence lower bound (ELBO), which VOGN and IVON maximise.

        .. math::
            \log p(D) \ge \frac{N}{n} \sum_{j \le n} E_q[\log p(y_j | x_j, w)] - KL(q \,\|\, N(0, I/\delta))

        For a Laplace posterior it can be compared with `log_marginal_likelihood()`.

        Args:
            loader: batches (inputs, labels), iterated once for each sample; of the part of the data that belongs to a
                process, as for `bayesgrad.laplace`, in which case all processes call this.
            prior_precision: δ; one number for all, or one for each parameter by name.
            likelihood: of the labels; None uses the posterior's own, which is categorical by default.
            noise_scale: the standard deviation of Gaussian data; None uses the posterior's own.
            num_data: N, if the loader does not go through all data exactly once.
            samples: the number of samples of the expectation.
            model, seed: as in `predict`.

        Reference: Khan and Rue 2023, Eq. 2 and section 4.4.
        Checked by: tests/equations/test_elbo.py, in the linear-Gaussian case and by quadrature.
        """
        divergence = self.divergence(prior_precision, self.noise_scale if noise_scale is None else noise_scale)
        reading = self._reading(likelihood, noise_scale)
        if samples < 1:
            raise ValueError(f"samples must be at least 1, got {samples}.")
        data = data_of("elbo", loader, num_data)
        network = unwrap(self._model(model))
        counts: set[int] = set()
        values: list[float] = []
        with data.together(), evaluation_mode(network):
            for weights in self._draw(self._generators(samples, self._seed(seed))):
                cast, total, count = self._cast(weights, network), 0.0, 0
                for x, y in batches_on(data, self._device(model)):
                    outputs = self._network(x, network, 1, None)(cast)
                    total += float(reading.log_likelihood(outputs, y).double().sum())
                    count += len(outputs)
                counts.add(count)
                values.append(total)
            if len(counts) > 1 or 0 in counts:
                raise ValueError(
                    f"the loader gave {' and '.join(map(str, sorted(counts)))} examples in different passes: it is "
                    "iterated once for each sample, and must give the same examples each time."
                )
        *values, seen = data.total([*values, counts.pop()], next(network.parameters()).device)
        each = torch.tensor(values, dtype=torch.float64) * ((num_data or seen) / seen)
        expected = float(each.mean())
        error = float(each.std() / samples**0.5) if samples > 1 else math.nan
        return Bound(expected - divergence, error, expected, divergence)

    def divergence(self, prior_precision: float | Mapping[str, float], noise_scale: float = 1.0) -> float:
        """KL(q | N(0, I/δ)) = (δ (tr Σ + |m|²) - n - n log δ - log |Σ|)/2."""
        mean, variance = self.mean, self.variance()
        prior = check_prior(prior_precision, noise_scale, mean)
        total = sum(float(belief.precision.logdet()) for belief in self.beliefs.values())
        for name, delta in prior.items():
            second = float(variance[name].double().sum() + mean[name].double().square().sum())
            total += delta * second - mean[name].numel() * (1 + math.log(delta))
        return total / 2

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        """Means and variances; for joint beliefs the factors, and the place of each parameter in them."""
        tensors = {"mean": self.mean, "variance": {}}
        for name, belief in self.beliefs.items():
            if not isinstance(belief, Joint):
                tensors["variance"][name] = belief.precision.variance()
                continue
            tensors.setdefault("shape", {})[name] = torch.tensor(belief.mean.shape)
            tensors[f"columns of {name}"] = {own: torch.tensor(shape) for own, shape in belief.shapes.items()}
            for own in belief.turned:
                tensors.setdefault("turned", {})[own] = torch.ones(())
            for key, value in _stored(belief.precision).items():
                tensors.setdefault(key, {})[name] = value
        return tensors

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Mapping[str, Tensor]], model: nn.Module | None) -> GaussianPosterior:
        means, variance = tensors["mean"], tensors["variance"]
        joint = {name: list(tensors[f"columns of {name}"]) for name in tensors.get("shape", {})}
        owner = {own: name for name, members in joint.items() for own in members}
        beliefs: dict[str, Belief] = {}
        for name, mean in means.items():
            if name not in owner:
                beliefs[name] = Belief(mean, Diagonal(variance[name]))
            elif owner[name] == name:
                shapes = {own: means[own].shape for own in joint[name]}
                shape = tuple(tensors["shape"][name].tolist())
                turned = frozenset(shapes) & frozenset(tensors.get("turned", {}))
                matrix = joined(means, shapes, shape[:-1], turned)
                beliefs[name] = Joint(matrix, _restored(tensors, name, shape), shapes, turned)
        return cls(beliefs, model)


def _stored(precision: Precision) -> dict[str, Tensor]:
    """The tensors of a joint belief's precision."""
    for kind, fields in FACTORS:
        if isinstance(precision, kind):
            values = {field: getattr(precision, field) for field in fields}
            return {field: value for field, value in values.items() if value is not None}
    raise TypeError(f"a joint belief with a {type(precision).__name__} precision cannot be saved.")


def _restored(tensors: Mapping[str, Mapping[str, Tensor]], name: str, shape: tuple[int, ...]) -> Precision:
    found = {field: tensors.get(field, {}).get(name) for _, fields in FACTORS for field in fields}
    if found["spectrum"] is not None:
        return Spectral(found["rows"], found["columns"], found["spectrum"])
    if found["covariance"] is not None:
        return Dense(found["covariance"], shape)
    return Kronecker(found["left"], found["right"], shape)
