"""Observation models p(y | f) of a latent value f with a Gaussian posterior."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from bayesgrad.families import Parameters
from bayesgrad.families.gaussian import LOG_2PI
from bayesgrad.inference.expectation import Delta, Expectation, GaussHermite, Moments, derivatives
from bayesgrad.lognormal import log_poisson_lognormal
from bayesgrad.models.quadrature import Expected, expected_derivatives, expected_log_sigmoid
from bayesgrad.models.tunable import Number, Tunable, like

QUADRATURE = GaussHermite(32, "reparameterised")
FINE = GaussHermite(64)  # for predictions


class Prediction(NamedTuple):
    """E[y], the variance of E[y | f], and the mean of Var[y | f]; elementwise."""

    mean: Tensor
    variance: Tensor
    noise: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Observation(Tunable):
    """p(y | f), elementwise.

    `classifies`: whether y is 0 or 1; `concave`: whether log p(y | f) is concave in f, so that no site has a negative
    precision; `conjugate`: whether it is quadratic; `least_squares`: whether a linear regression is a good start.
    """

    classifies: ClassVar[bool] = False
    concave: ClassVar[bool] = True
    conjugate: ClassVar[bool] = False
    least_squares: ClassVar[bool] = False

    @property
    def reach(self) -> float | None:
        """How far from the real axis log p(y | f) is analytic, which tells how many points a quadrature needs."""
        return None

    @abstractmethod
    def log_density(self, f: Tensor, y: Tensor) -> Tensor:
        """log p(y | f), with all constants."""

    def derivatives(self, f: Tensor, y: Tensor) -> Moments:
        """log p(y | f) and its first two derivatives by f."""
        return Moments(*derivatives(lambda at: self.log_density(at, y), f))

    def third_derivative(self, f: Tensor) -> Tensor | None:
        """That of log p(y | f) by f, where it does not depend on y and costs little."""
        return None

    def expected(self, mean: Tensor, variance: Tensor, y: Tensor, expectation: Expectation) -> Moments:
        """E[log p(y | f)] under N(mean, variance), and the expectations of its first two derivatives by f."""
        return self.expected_to_third(mean, variance, y, expectation).moments

    def expected_to_third(self, mean: Tensor, variance: Tensor, y: Tensor, expectation: Expectation) -> Expected:
        """As `expected`, with the expectation of the third derivative where it costs little."""
        if isinstance(expectation, Delta) and expectation.hessian == "exact":
            value, first, second = self.derivatives(mean, y)
            return Expected(Moments(value + variance * second / 2, first, second), None)
        if isinstance(expectation, GaussHermite) and self.reach is not None:
            return expected_derivatives(lambda f: self.derivatives(f, y), mean, variance, self.reach)
        return Expected(expectation.scalar(lambda f: self.log_density(f, y), mean, variance), None)

    def sites(self, y: Tensor) -> Parameters:
        """Natural parameters of the initial sites: log p(y | f) to second order at `start`."""
        at = self.start(y)
        _, first, second = self.expected(at, torch.zeros_like(at), y, Delta())
        return first - second * at, second / 2

    @abstractmethod
    def information(self, f: Tensor) -> Tensor:
        """The Fisher information about f."""

    @abstractmethod
    def mean(self, f: Tensor) -> Tensor:
        """E[y | f]."""

    @abstractmethod
    def variance(self, f: Tensor) -> Tensor:
        """Var[y | f]."""

    def predict(self, mean: Tensor, variance: Tensor) -> Prediction:
        """The prediction of y for f ~ N(mean, variance)."""
        at, weights = self._points(mean, variance)
        values = self.mean(at)
        first = (weights * values).sum(0)
        spread = (weights * (values - first).square()).sum(0)
        return Prediction(first, spread, (weights * self.variance(at)).sum(0))

    def log_predictive(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        """log E[p(y | f)] for f ~ N(mean, variance)."""
        at, weights = self._points(mean, variance)
        return (self.log_density(at, y) + weights.log()).logsumexp(0)

    @staticmethod
    def _points(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        at, _, weights = FINE.points(mean[..., None], variance.sqrt()[..., None, None])
        return at[..., 0], weights.view(-1, *[1] * mean.dim())

    def start(self, y: Tensor) -> Tensor:
        """Values of f that match the targets, at which the initial sites are computed."""
        return torch.zeros_like(y)

    @abstractmethod
    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        """Samples of y given f."""

    def check(self, y: Tensor) -> None:
        """Raises a ValueError for invalid targets; ignores NaN."""


@dataclass(frozen=True, eq=False, repr=False)
class _Noisy(Observation):
    """y = f + noise of a given scale."""

    hyperparameter_names = ("scale",)
    least_squares = True
    scale: Number = 1.0

    def mean(self, f: Tensor) -> Tensor:
        return f

    def predict(self, mean: Tensor, variance: Tensor) -> Prediction:
        return Prediction(mean, variance, self.variance(mean))


class Gaussian(_Noisy):
    """y = f + scale times standard normal noise."""

    conjugate = True

    def log_density(self, f: Tensor, y: Tensor) -> Tensor:
        noise = like(self.scale, f).square()
        return -((y - f).square() / noise + noise.log() + LOG_2PI) / 2

    def expected_to_third(self, mean: Tensor, variance: Tensor, y: Tensor, expectation: Expectation) -> Expected:
        noise = like(self.scale, mean).square()
        first, second = (y - mean) / noise, (-1 / noise).expand_as(mean)
        return Expected(Moments(self.log_density(mean, y) - variance / noise / 2, first, second), None)

    def information(self, f: Tensor) -> Tensor:
        return like(self.scale, f).square().reciprocal().expand_as(f)

    def variance(self, f: Tensor) -> Tensor:
        return like(self.scale, f).square().expand_as(f)

    def log_predictive(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        total = variance + like(self.scale, mean).square()
        return -((y - mean).square() / total + total.log() + LOG_2PI) / 2

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(f.shape, dtype=f.dtype, generator=generator).to(f.device)
        return f + self.variance(f).sqrt() * noise


@dataclass(frozen=True, eq=False, repr=False)
class StudentT(_Noisy):
    """y = f + noise with heavy tails, for data with outliers. Not log-concave: a site may have a negative precision.

    Args:
        scale: of the noise.
        dof: degrees of freedom; fixed.
    """

    concave = False
    dof: Number = 4.0

    @property
    def reach(self) -> float:
        return float(self.scale) * float(self.dof) ** 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.dof > 0:
            raise ValueError(f"dof must be positive, got {self.dof!r}.")

    def log_density(self, f: Tensor, y: Tensor) -> Tensor:
        n, scale = like(self.dof, f), like(self.scale, f)
        constant = ((n + 1) / 2).lgamma() - (n / 2).lgamma() - (n * math.pi).log() / 2 - scale.log()
        return constant - (n + 1) / 2 * (((y - f) / scale).square() / n).log1p()

    def derivatives(self, f: Tensor, y: Tensor) -> Moments:
        n, scale = like(self.dof, f), like(self.scale, f)
        error = (y - f) / scale
        square = n + error.square()
        first = (n + 1) / scale * error / square
        return Moments(self.log_density(f, y), first, (n + 1) * (error.square() - n) / (scale * square).square())

    def variance(self, f: Tensor) -> Tensor:
        dof = float(self.dof)
        factor = dof / (dof - 2) if dof > 2 else math.inf
        return (like(self.scale, f).square() * factor).expand_as(f)

    def information(self, f: Tensor) -> Tensor:
        dof = float(self.dof)
        return ((dof + 1) / (dof + 3) / like(self.scale, f).square()).expand_as(f)

    def log_predictive(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        # Gaussians of variance v + scale²/u, u ~ Gamma(n/2, n/2): smooth in log u, even where the noise is far below v.
        n, error, square = like(self.dof, mean), (y - mean).square(), like(self.scale, mean).square()
        low = ((n + 1) / (n + error / square)).log() - 80 / n - 13 / n.sqrt()
        gap = min(0.25, 0.7 * math.sqrt(2 / (float(n) + 1)))
        count = (math.log(80 / float(n) + 10) - float(low.nan_to_num().min())) / gap
        logs = low + gap * torch.arange(math.ceil(count)).to(mean).view(-1, *[1] * mean.dim())
        total = variance + square / logs.exp()
        found = (n * (logs - logs.exp()) - error / total - total.log() - LOG_2PI + n * (n / 2).log()) / 2
        return found.logsumexp(0) + math.log(gap) - (n / 2).lgamma()

    def start(self, y: Tensor) -> Tensor:
        return y

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        shape, n = f.shape, float(self.dof)
        normal = torch.randn(shape, dtype=f.dtype, generator=generator)
        halves = torch.full(shape, n / 2, dtype=f.dtype)
        chi = 2 * torch._standard_gamma(halves, generator=generator)
        return f + like(self.scale, f) * (normal / (chi / n).sqrt()).to(f.device)


class Bernoulli(Observation):
    """y is 1 with a probability that increases with f."""

    classifies = True

    def variance(self, f: Tensor) -> Tensor:
        p = self.mean(f)
        return p * (1 - p)

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        uniform = torch.rand(f.shape, dtype=torch.float64, generator=generator).to(f.device)
        return (uniform < self.mean(f)).to(f)

    def check(self, y: Tensor) -> None:
        known = y[~y.isnan()]
        if bool(((known != 0) & (known != 1)).any()):
            raise ValueError(f"targets must be 0 or 1, got {known[(known != 0) & (known != 1)][0]:g}.")


class Logistic(Bernoulli):
    """p(y = 1 | f) = 1/(1 + e^-f)."""

    def log_density(self, f: Tensor, y: Tensor) -> Tensor:
        return logsigmoid((2 * y - 1) * f)

    def derivatives(self, f: Tensor, y: Tensor) -> Moments:
        p = f.sigmoid()
        return Moments(self.log_density(f, y), y - p, p * (p - 1))

    def third_derivative(self, f: Tensor) -> Tensor:
        p = f.sigmoid()
        return p * (p - 1) * (1 - 2 * p)

    def expected_to_third(self, mean: Tensor, variance: Tensor, y: Tensor, expectation: Expectation) -> Expected:
        if not isinstance(expectation, GaussHermite):
            return super().expected_to_third(mean, variance, y, expectation)
        (value, first, second), third = expected_log_sigmoid(mean, variance)
        lower = y - 1
        return Expected(Moments(value + lower * mean, first + lower, second), third)

    def information(self, f: Tensor) -> Tensor:
        return self.variance(f)

    def mean(self, f: Tensor) -> Tensor:
        return f.sigmoid()

    def predict(self, mean: Tensor, variance: Tensor) -> Prediction:
        _, first, second = expected_log_sigmoid(mean, variance).moments
        p = (1 - first).clamp(0, 1)
        return Prediction(p, (p * (1 - p) + second).clamp(min=0), -second)


class Probit(Bernoulli):
    """p(y = 1 | f) = Φ(f), the normal distribution function."""

    @property
    def reach(self) -> float:
        return 2.8163  # Φ(1.9160 ± 2.8163 i) = 0

    def log_density(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.special.log_ndtr((2 * y - 1) * f)

    def information(self, f: Tensor) -> Tensor:
        return (-f.square() - LOG_2PI - torch.special.log_ndtr(f) - torch.special.log_ndtr(-f)).exp()

    def mean(self, f: Tensor) -> Tensor:
        return torch.special.ndtr(f)

    def derivatives(self, f: Tensor, y: Tensor) -> Moments:
        sign = 2 * y - 1
        value = self.log_density(f, y)
        ratio = (-(f.square() + LOG_2PI) / 2 - value).exp()
        return Moments(value, sign * ratio, -ratio * (ratio + sign * f))

    def predict(self, mean: Tensor, variance: Tensor) -> Prediction:
        found = super().predict(mean, variance)
        p = torch.special.ndtr(mean / (1 + variance).sqrt())
        return Prediction(p, found.variance, (p * (1 - p) - found.variance).clamp(min=0))

    def log_predictive(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        return torch.special.log_ndtr((2 * y - 1) * mean / (1 + variance).sqrt())


class Poisson(Observation):
    """y counts events of rate e^f."""

    def log_density(self, f: Tensor, y: Tensor) -> Tensor:
        return y * f - f.exp() - (y + 1).lgamma()

    def derivatives(self, f: Tensor, y: Tensor) -> Moments:
        rate = f.exp()
        return Moments(y * f - rate - (y + 1).lgamma(), y - rate, -rate)

    def expected_to_third(self, mean: Tensor, variance: Tensor, y: Tensor, expectation: Expectation) -> Expected:
        if not isinstance(expectation, GaussHermite):
            return super().expected_to_third(mean, variance, y, expectation)
        rate = (mean + variance / 2).exp()
        return Expected(Moments(y * mean - rate - (y + 1).lgamma(), y - rate, -rate), -rate)

    def mean(self, f: Tensor) -> Tensor:
        return f.exp()

    variance = information = mean

    def predict(self, mean: Tensor, variance: Tensor) -> Prediction:
        rate = (mean + variance / 2).exp()
        return Prediction(rate, rate.square() * variance.expm1(), rate)

    def log_predictive(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        known = y.nan_to_num()
        return torch.where(y.isnan(), y, log_poisson_lognormal(mean, variance, known)) - (known + 1).lgamma()

    def start(self, y: Tensor) -> Tensor:
        return (y + 0.5).log()

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        return torch.poisson(f.exp().cpu(), generator).to(f)

    def check(self, y: Tensor) -> None:
        known = y[~y.isnan()]
        wrong = (known < 0) | (known != known.round())
        if bool(wrong.any()):
            raise ValueError(f"targets must be counts, 0, 1, 2, ..., got {known[wrong][0]:g}.")


NAMES = {
    "gaussian": Gaussian,
    "logistic": Logistic,
    "bernoulli": Logistic,
    "probit": Probit,
    "poisson": Poisson,
    "student-t": StudentT,
}


def get_observation(likelihood: str | Observation) -> Observation:
    """Returns an Observation unchanged; converts a name to one with default hyperparameters."""
    if isinstance(likelihood, Observation):
        return likelihood
    if not (isinstance(likelihood, str) and likelihood in NAMES):
        raise ValueError(f"likelihood must be one of {', '.join(map(repr, NAMES))}, got {likelihood!r}.")
    return NAMES[likelihood]()


@dataclass(frozen=True, eq=False)
class CallableLikelihood:
    """log p(y | f) as a function of f."""

    observation: Any  # an Observation, or Multinomial
    y: Tensor

    def __call__(self, f: Tensor) -> Tensor:
        return self.observation.log_density(f, self.y)


def fit_hyperparameters(
    observation: Observation,
    names: list[str],
    mean: Tensor,
    variance: Tensor,
    y: Tensor,
    sample_weight: Tensor | None = None,
) -> Observation:
    """The observation model with the hyperparameters that maximise E[log p(y | f)] for f ~ N(mean, variance)."""
    at, _, weights = GaussHermite(16).points(mean[:, None], variance.sqrt()[:, None, None])
    at = at[..., 0]  # (16, n)
    start = [math.log(float(getattr(observation, name))) for name in names]
    logs = torch.tensor(start, dtype=mean.dtype, device=mean.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([logs], max_iter=30, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        own = replace(observation, **dict(zip(names, logs.exp())))
        each = weights @ own.log_density(at, y)
        value = -(each.mean() if sample_weight is None else sample_weight @ each / sample_weight.sum())
        value.backward()
        return value

    optimizer.step(loss)  # pyright: ignore[reportArgumentType]
    return replace(observation, **{name: value.item() for name, value in zip(names, logs.exp())})
