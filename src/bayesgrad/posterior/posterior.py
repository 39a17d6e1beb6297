"""The interface of all posteriors: samples, predictions, storage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import torch
from torch import Tensor, nn

from bayesgrad import likelihoods
from bayesgrad.belief import Belief
from bayesgrad.layers.batches import Call, Inputs
from bayesgrad.layers.network import Network, evaluation_mode, unwrap
from bayesgrad.layers.output_covariance import BlockCovariance, OutputCovariance, output_covariance
from bayesgrad.layers.running_statistics import spread, warn_of_statistics
from bayesgrad.likelihoods import Likelihood
from bayesgrad.posterior.averages import REMEDY, RUNNING, Averages, Options, Statistics, check_link
from bayesgrad.posterior.linearised import gaussian_outputs, linearised_outputs, warn_of_samples
from bayesgrad.posterior.prediction import SCORES, interval_of, is_loader, score_of, stream, with_noise
from bayesgrad.posterior.traced import traced_average, traced_linear
from bayesgrad.posterior.weights import WeightDistribution
from bayesgrad.precision import Diagonal
from bayesgrad.predictions import Decomposed, Interval, Moments, NoisyMoments

if TYPE_CHECKING:
    from typing_extensions import Unpack

METHODS = ("mc", "linear", "mean")
UNSUPPORTED = (RuntimeError, ValueError, TypeError, NotImplementedError)  # what a backward pass may raise


class Posterior(WeightDistribution):
    """A distribution over the named parameters of a model, and what it predicts; see `WeightDistribution`."""

    methods: ClassVar[tuple[str, ...]] = METHODS
    central: ClassVar[tuple[str, ...]] = ("linear", "mean")  # those with weights that running statistics fit
    method: ClassVar[str] = "mc"  # of `predict`, if none is given

    def _reading(self, likelihood: str | Likelihood | None = None, noise_scale: float | None = None) -> Likelihood:
        """The likelihood; names stand for the noise of this posterior if no other is given."""
        given = self.likelihood if likelihood is None else likelihood
        if noise_scale is None and isinstance(given, str) and given == likelihoods.Gaussian.kind:
            noise_scale = float(self.noise_scale)
        return likelihoods.named(given, noise_scale)

    def _summary(self) -> dict[str, Any]:
        own = {"method": self.method, "model": None if self.model is None else type(self.model).__name__}
        return super()._summary() | own

    @overload
    def predict(
        self,
        x: Inputs | Iterable,
        samples: int = 32,
        method: str | None = None,
        *,
        likelihood: Literal["categorical", "bernoulli", "poisson"] | None = None,
        decompose: Literal[False] = False,
        noise: Literal[False] = False,
        **options: Unpack[Options],
    ) -> Tensor: ...

    @overload
    def predict(
        self,
        x: Inputs | Iterable,
        samples: int = 32,
        method: str | None = None,
        *,
        likelihood: Literal["gaussian"] | likelihoods.Gaussian,
        decompose: Literal[False] = False,
        noise: Literal[False] = False,
        **options: Unpack[Options],
    ) -> Moments: ...

    @overload
    def predict(
        self,
        x: Inputs | Iterable,
        samples: int = 32,
        method: str | None = None,
        *,
        likelihood: str | Likelihood | None = None,
        decompose: Literal[True],
        noise: Literal[False] = False,
        **options: Unpack[Options],
    ) -> Decomposed: ...

    @overload
    def predict(
        self,
        x: Inputs | Iterable,
        samples: int = 32,
        method: str | None = None,
        *,
        likelihood: str | Likelihood | None = None,
        decompose: Literal[False] = False,
        noise: Literal[True],
        **options: Unpack[Options],
    ) -> Moments: ...

    @torch.no_grad()
    def predict(
        self,
        x: Inputs | Iterable,
        samples: int = 32,
        method: str | None = None,
        *,
        likelihood: str | Likelihood | None = None,
        decompose: bool = False,
        noise: bool = False,
        link: str | None = None,
        model: nn.Module | None = None,
        seed: int | None = None,
        statistics: Statistics = None,
        chunk: int | None = None,
        progress: bool | None = None,
    ) -> Tensor | Moments | NoisyMoments | Decomposed:
        """Predictions averaged over the posterior.

        The model runs in evaluation mode, so normalisation statistics do not change; afterwards its modes are restored.
        The same posterior, inputs and seed give the same prediction.

        Args:
            x: a batch of inputs; a tuple if the model takes several arguments, a mapping for keyword arguments (its key
                `"labels"` is left out). Or a loader of batches, whose labels are not used: inputs, pairs (inputs,
                labels), or mappings. All batches are predicted with the same samples of the weights.
            samples: the number n of samples that `method="mc"` and `link="mc"` average over. Variances of `"mc"` are
                those among the samples: on average (n - 1)/n of the posterior's.
            method: `"mc"` averages over samples of the weights; `"linear"` is exact for the network linearised at the
                mean; `"mean"` uses the mean weights alone. None is `"linear"` for Laplace posteriors (`"mc"` with a
                warning, if the model cannot be linearised), and `"mc"` for all others.
            likelihood: `"categorical"` and `"bernoulli"` return probabilities, `"poisson"` rates, `"gaussian"` mean and
                variance of the outputs, without the noise of the data. An object of `bayesgrad.likelihoods` brings its
                own noise. None uses the likelihood of the posterior, which is categorical by default.
            decompose: whether to return aleatoric and epistemic uncertainty separately; see `Decomposed`.
            noise: for numbers with Gaussian noise: whether to add its variance, so that the variance is that of a new
                label, as `metrics.regression` expects it.
            link: how `"linear"` turns Gaussian outputs into probabilities: `"probit"` for MacKay's approximation, or
                `"mc"` for an average over samples from the joint Gaussian of each example's outputs. None uses
                `"probit"`, or `"mc"` if `decompose` needs samples. Means, variances and rates need neither.
            model: another copy of the network, in place of the posterior's own.
            seed: of the samples, in place of the posterior's own.
            statistics: a batch of training inputs, or a loader as for torch.optim.swa_utils.update_bn, from which
                BatchNorm's statistics are estimated for each sample. `"running"` uses the model's running statistics;
                None does so too, and warns once if the model has any and its weights vary much.
            chunk: the number of inputs that go through the network at once, to limit memory; None for all.
            progress: whether to show a progress bar for a loader (needs rich); None shows it in a terminal.
        """
        options: Any = dict(link=link, model=model, seed=seed, statistics=statistics, chunk=chunk)

        def one(batch: Any) -> Any:
            return self._predict(batch, samples, method, likelihood, decompose, **options)

        if noise and decompose:
            raise ValueError("noise=True and decompose=True exclude each other: `total` of the latter has the noise.")
        reading = self._reading_with_noise(likelihood) if noise else None
        found = stream(x, one, self._device(model), progress) if is_loader(x) else one(x)
        return found if reading is None else with_noise(found, reading)

    def _reading_with_noise(self, likelihood: str | Likelihood | None) -> Likelihood:
        """The likelihood whose noise is added to predicted variances."""
        return self._reading(likelihood)

    def _predict(
        self,
        x: Inputs,
        samples: int,
        method: str | None,
        likelihood: str | Likelihood | None,
        decompose: bool,
        *,
        link: str | None,
        model: nn.Module | None,
        seed: int | None,
        statistics: Statistics,
        chunk: int | None,
    ) -> Tensor | Moments | NoisyMoments | Decomposed:
        """`predict` for one batch."""
        chosen = self.method if method is None else method
        if chosen not in self.methods:
            raise ValueError(f"method must be one of {', '.join(map(repr, self.methods))}, got {method!r}.")
        reading = self._reading(likelihood)
        check_link(link, reading, decompose)
        network = self._network(x, model, samples, chunk, statistics)
        self._warn_of_statistics(chosen, model, statistics)
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

    def _warn_of_statistics(self, method: str, model: nn.Module | None, statistics: Statistics) -> None:
        if statistics is None and method not in self.central:
            warn_of_statistics(unwrap(self._model(model)), lambda: spread(self.mean, self.variance()), REMEDY)

    def interval(self, x: Inputs | Iterable, level: float = 0.9, **options: Any) -> Interval:
        """The interval of a new label with probability `level`: mean ± z s, where s² has the noise of the data too.

        Args:
            x: inputs, or a loader, as in `predict`, to which `options` are passed.
            level: of the central interval. `bayesgrad.conformal` gives intervals that hold without a Gaussian.

        Raises:
            ValueError: the likelihood has no Gaussian noise.
        """
        return interval_of(self.predict(x, noise=True, **options), level)

    def ood_score(self, x: Inputs | Iterable, score: str = "epistemic", **options: Any) -> Tensor:
        """How unusual each input is, (examples,): larger for inputs that are unlike the training data.

        | score | what it is |
        |---|---|
        | `"epistemic"` | the mutual information of label and weights; of numbers, the variance of the outputs |
        | `"entropy"` | the entropy of the predicted probabilities |
        | `"max_probability"` | 1 - the probability of the most probable class |

        Of several outputs or positions it is the mean. `metrics.auroc(inside=..., outside=...)` compares the scores
        of two data sets.

        Args:
            x: inputs, or a loader, as in `predict`, to which `options` are passed.
        """
        if score not in SCORES:
            raise ValueError(f"score must be one of {', '.join(map(repr, SCORES))}, got {score!r}.")
        reading = self._reading(options.get("likelihood"))
        return score_of(self.predict(x, decompose=True, **options), reading, score)

    def to_module(
        self,
        x: Inputs,
        samples: int = 32,
        method: str | None = None,
        *,
        likelihood: str | Likelihood | None = None,
        model: nn.Module | None = None,
        seed: int | None = None,
        statistics: Statistics = None,
    ) -> nn.Module:
        """The prediction as a module of tensors alone, which `torch.export` accepts: `module(x)` is `predict(x)`.

        With `"mc"`, weights are sampled once and kept. With `"linear"`, variances come from Jacobians (examples,
        outputs, weights), which must fit into memory: restrict large posteriors to the last layer. The number of inputs
        may vary; where torch cannot trace that (`"linear"` and convolutions), it is that of `x`, which the module
        checks.

        Args:
            x: inputs to trace with, of the shapes that the module will receive.
            samples, method, likelihood, model, seed, statistics: as in `predict`. Estimated statistics are kept.
        """
        chosen = self.method if method is None else method
        network = self._network(x, model, samples, None, statistics)
        self._warn_of_statistics(chosen, model, statistics)
        reading = self._reading(likelihood)
        with evaluation_mode(network.model):
            if chosen == "linear":
                return traced_linear(network, self._centre(network), self._beliefs(), reading)
            weights = list(self._choose(samples, self._seed(seed))) if chosen == "mc" else [getattr(self, chosen)]
            return traced_average(network, [self._cast(w, network.model) for w in weights], reading)

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
        """As `predictive_samples`, for the network linearised at the mean m: f(m) + J (w - m) for samples w.

        They are in float32 if the model is in half precision.
        """
        network = self._network(x, model, samples, chunk)
        centre, mean = self._centre(network), self.mean
        draws = self._choose(samples, self._seed(seed))
        with evaluation_mode(network.model):
            # If the model has half precision, changes are rounded: weights may be rounded to their mean.
            changes = ({name: weight - mean[name] for name, weight in w.items()} for w in draws)
            return torch.stack(list(linearised_outputs(network, centre, changes)))

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

    def _beliefs(self) -> Mapping[str, Belief]:
        """Independent Gaussians of blocks of weights."""
        return {name: Belief(self.mean[name], Diagonal(v)) for name, v in self.variance().items()}

    def _output_covariances(self) -> Sequence[OutputCovariance]:
        """The covariances of linearised outputs for independent blocks of weights."""
        return [BlockCovariance(name, belief) for name, belief in self._beliefs().items()]


load = Posterior.load
