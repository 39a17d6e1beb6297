"""How a target comes from a linear predictor: log densities with all constants, and predictions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from bayesgrad.families.gaussian import LOG_2PI
from bayesgrad.inference.expectation import Expectation, GaussHermite, QuasiMonteCarlo

Number = float | Tensor


@dataclass(frozen=True)
class Observation(ABC):
    """p(y | z), for predictors z and targets y.

    Checked by: tests/equations/test_glm.py.
    """

    classifies: ClassVar[bool] = False
    conjugate: ClassVar[bool] = False
    least_squares: ClassVar[bool] = False  # whether a linear regression is where to start

    @abstractmethod
    def log_density(self, z: Tensor, y: Tensor) -> Tensor:
        """log p(y | z), elementwise; z may have more dimensions in front."""

    @abstractmethod
    def information(self, z: Tensor) -> Tensor:
        """Fisher's information about each z."""

    @abstractmethod
    def mean(self, z: Tensor, variance: Tensor) -> Tensor:
        """E[y] for predictors N(z, variance); of classifiers the probability of class 1."""

    def variance(self, z: Tensor, variance: Tensor) -> Tensor:
        """Var[y] for predictors N(z, variance)."""
        raise NotImplementedError(f"{type(self).__name__} predicts probabilities, not a variance.")

    def start(self, y: Tensor) -> float:
        """A constant predictor that suits the targets."""
        return 0.0


@dataclass(frozen=True)
class Gaussian(Observation):
    """y = z + scale times normal noise."""

    conjugate = True
    least_squares = True
    scale: Number = 1.0

    def log_density(self, z: Tensor, y: Tensor) -> Tensor:
        scale = torch.as_tensor(self.scale, dtype=z.dtype, device=z.device)
        return -((y - z) / scale).square() / 2 - scale.log() - LOG_2PI / 2

    def information(self, z: Tensor) -> Tensor:
        return torch.full_like(z, 1 / float(self.scale) ** 2)

    def mean(self, z: Tensor, variance: Tensor) -> Tensor:
        return z

    def variance(self, z: Tensor, variance: Tensor) -> Tensor:
        return variance + float(self.scale) ** 2


@dataclass(frozen=True)
class StudentT(Observation):
    """y = z + scale times noise with Student's distribution: outliers count little. Not log-concave."""

    least_squares = True
    scale: Number = 1.0
    dof: Number = 4.0

    def log_density(self, z: Tensor, y: Tensor) -> Tensor:
        scale = torch.as_tensor(self.scale, dtype=z.dtype, device=z.device)
        dof = torch.as_tensor(self.dof, dtype=z.dtype, device=z.device)
        constant = ((dof + 1) / 2).lgamma() - (dof / 2).lgamma() - (dof * math.pi).log() / 2 - scale.log()
        return constant - (dof + 1) / 2 * (((y - z) / scale).square() / dof).log1p()

    def information(self, z: Tensor) -> Tensor:
        dof = float(self.dof)
        return torch.full_like(z, (dof + 1) / (dof + 3) / float(self.scale) ** 2)

    def mean(self, z: Tensor, variance: Tensor) -> Tensor:
        return z

    def variance(self, z: Tensor, variance: Tensor) -> Tensor:
        dof = float(self.dof)
        return variance + (float(self.scale) ** 2 * dof / (dof - 2) if dof > 2 else math.inf)


@dataclass(frozen=True)
class Poisson(Observation):
    """Counts with rate exp(z)."""

    def log_density(self, z: Tensor, y: Tensor) -> Tensor:
        return y * z - z.exp() - (y + 1).lgamma()

    def information(self, z: Tensor) -> Tensor:
        return z.exp()

    def mean(self, z: Tensor, variance: Tensor) -> Tensor:
        return (z + variance / 2).exp()

    def variance(self, z: Tensor, variance: Tensor) -> Tensor:
        rate = self.mean(z, variance)
        return rate + rate.square() * variance.expm1()

    def start(self, y: Tensor) -> float:
        return math.log(y.mean().item() + 1e-3)


@dataclass(frozen=True)
class Logistic(Observation):
    """P(y = 1) = 1/(1 + exp(-z)), y in {0, 1}."""

    classifies = True

    def log_density(self, z: Tensor, y: Tensor) -> Tensor:
        return logsigmoid((2 * y - 1) * z)

    def information(self, z: Tensor) -> Tensor:
        p = z.sigmoid()
        return p * (1 - p)

    def mean(self, z: Tensor, variance: Tensor) -> Tensor:
        return expected(torch.sigmoid, z, variance)


@dataclass(frozen=True)
class Probit(Observation):
    """P(y = 1) = Φ(z), y in {0, 1}, with log Φ that is right far out in the tail."""

    classifies = True

    def log_density(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.special.log_ndtr((2 * y - 1) * z)

    def information(self, z: Tensor) -> Tensor:
        ndtr = torch.special.log_ndtr
        return (-z.square() - LOG_2PI - ndtr(z) - ndtr(-z)).exp()

    def mean(self, z: Tensor, variance: Tensor) -> Tensor:
        return torch.special.ndtr(z / (1 + variance).sqrt())


@dataclass(frozen=True)
class Multinomial(Observation):
    """P(y = c) = softmax(B z)_c, y in {0, ..., C-1}, for C - 1 contrasts z and an orthonormal B whose columns sum to 0.

    A softmax does not see what all its logits have in common. With independent priors of one precision for the C
    logits' weights, the C - 1 contrasts z = B'f have those same priors, and what is common stays as the prior has it.

    Args:
        classes: C.
    """

    classifies = True
    classes: int = 3

    def basis(self, like: Tensor) -> Tensor:
        """B, (C, C-1): Helmert's contrasts."""
        rows = torch.arange(self.classes, dtype=like.dtype, device=like.device)[:, None]
        columns = torch.arange(1, self.classes, dtype=like.dtype, device=like.device)
        contrasts = (rows < columns).to(like) - (rows == columns).to(like) * columns
        return contrasts / (columns * (columns + 1)).sqrt()

    def log_density(self, z: Tensor, y: Tensor) -> Tensor:
        logits = (z @ self.basis(z).mT).log_softmax(-1)
        return logits.gather(-1, y.long()[..., None].expand(*logits.shape[:-1], 1))[..., 0]

    def derivatives(self, y: Tensor, at: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """log p, its gradient and its Hessian, -B'(diag(p) - pp')B, averaged over points (s, n, C-1)."""
        basis = self.basis(at)
        log_p = (at @ basis.mT).log_softmax(-1)
        p, labels = log_p.exp(), y.long()[:, None]
        mean = torch.einsum("s,snc->nc", weights, p)
        pairs = torch.einsum("snc,snd->ncd", weights[:, None, None] * p, p)
        value = torch.einsum("s,snc->nc", weights, log_p).gather(1, labels)[:, 0]
        first = torch.zeros_like(mean).scatter_(1, labels, 1.0) - mean
        return value, first @ basis, basis.mT @ (pairs - torch.diag_embed(mean)) @ basis

    def information(self, z: Tensor) -> Tensor:
        # Of equal probabilities: B'(I/C - 11'/C^2)B = I/C.
        return torch.full_like(z[..., 0], 1 / self.classes)

    def mean(self, z: Tensor, variance: Tensor) -> Tensor:
        """(n, C), for contrasts z (n, C-1) with covariances `variance` (n, C-1, C-1)."""
        at, _, weights = quadrature(self.classes - 1).points(z, torch.linalg.cholesky(variance))
        return torch.einsum("s,snc->nc", weights, (at @ self.basis(z).mT).softmax(-1))


@dataclass(frozen=True, eq=False)
class Given:
    """log p(y | z) as a function of z."""

    observation: Observation
    y: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        return self.observation.log_density(z, self.y)


class GivenLabels(Given):
    """The same of a multinomial model, with derivatives in closed form."""

    def derivatives(self, at: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.observation.derivatives(self.y, at, weights)  # pyright: ignore[reportAttributeAccessIssue]


NAMED: dict[str, type[Observation]] = {
    "gaussian": Gaussian,
    "logistic": Logistic,
    "multinomial": Multinomial,
    "probit": Probit,
    "poisson": Poisson,
    "student-t": StudentT,
}


def quadrature(size: int) -> Expectation:
    """For functions of `size` numbers: 32 Gauss-Hermite points, a grid of 20 x 20 for two, 256 fixed points beyond."""
    if size == 1:
        return GaussHermite(32, "reparameterised")
    return GaussHermite(20) if size == 2 else QuasiMonteCarlo(max(256, 4 * size))


def expected(function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor) -> Tensor:
    """E[f(z)], elementwise, for z ~ N(mean, variance)."""
    at, _, weights = GaussHermite(64).points(mean[..., None], variance.sqrt()[..., None, None])
    return torch.einsum("s,s...->...", weights, function(at[..., 0]))


def tuned(observation: Observation, names: list[str], z: Tensor, variance: Tensor, y: Tensor) -> Observation:
    """The numbers that maximise E[log p(y | z)], z ~ N(z, variance)."""
    at, _, weights = GaussHermite(16).points(z[:, None], variance.sqrt()[:, None, None])
    at = at[..., 0]  # (16, n)
    start = [math.log(float(getattr(observation, name))) for name in names]
    logs = torch.tensor(start, dtype=z.dtype, device=z.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([logs], max_iter=30, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        own = replace(observation, **dict(zip(names, logs.exp())))
        value = -(weights @ own.log_density(at, y)).mean()
        value.backward()
        return value

    optimizer.step(loss)  # pyright: ignore[reportArgumentType]
    return replace(observation, **{name: value.item() for name, value in zip(names, logs.exp())})
