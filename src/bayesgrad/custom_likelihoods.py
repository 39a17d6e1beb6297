"""Likelihoods that users define, by a loss and its expected Hessian, and Gaussian data whose noise is an output."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from bayesgrad.likelihoods import Likelihood, one_by_one
from bayesgrad.lognormal import log_normal_lognormal
from bayesgrad.noise import generator_of
from bayesgrad.predictions import Decomposed, Moments, NoisyMoments

DRAWS = 256  # samples of Gaussian outputs, for densities without a closed form


class CustomLikelihood(Likelihood):
    r"""A likelihood defined by its loss, the expected Hessian of the loss, and what is predicted.

    A subclass sets `kind`, a name for files, and defines `loss`, `hessian` and `link`. It may define `sample`, which
    `fisher="sampled"` needs, and `aleatoric`, which `decompose=True` needs. Everything else follows: the gradient of
    the loss by autograd, and predictions for Gaussian outputs from samples of them. Parameters are fields of a frozen
    dataclass, which are numbers, so that posteriors can be saved. It is accepted by `laplace`, `SubsampledFisher`,
    `predict` and `elbo`.

        >>> class StudentT(CustomLikelihood):
        ...     '''Student's t with 4 degrees of freedom: the expected Hessian is (4 + 1)/(4 + 3).'''
        ...
        ...     kind = "student_t"
        ...
        ...     def loss(self, outputs, labels):
        ...         return -torch.distributions.StudentT(4.0, outputs).log_prob(labels).flatten(1).sum(1)
        ...
        ...     def hessian(self, outputs):
        ...         return 5 / 7 * torch.eye(outputs[0].numel()).to(outputs).expand(len(outputs), -1, -1)
        ...
        ...     def link(self, outputs):
        ...         return outputs
        >>> StudentT().residual(torch.zeros(1, 1), torch.ones(1, 1))
        tensor([[-1.]])

    Checked by: tests/equations/test_custom_likelihoods.py, against built-in likelihoods and explicit Jacobians.
    """

    needs_samples: ClassVar[bool] = True

    @abstractmethod
    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """-log p(labels | outputs) of each example, (N,), differentiable in the outputs (N, ...)."""

    @abstractmethod
    def hessian(self, outputs: Tensor) -> Tensor:
        """The Hessian of each loss by the outputs, expected over labels: (N, K, K) for K outputs of an example.

        It is positive semi-definite (the Fisher information), unlike the Hessian at a label.
        """

    @abstractmethod
    def link(self, outputs: Tensor) -> Tensor:
        """What predictions average over samples of the outputs."""

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        raise TypeError(f"{self.kind} must define sample(outputs, generator) for fisher='sampled': use 'exact'.")

    def aleatoric(self, value: Tensor) -> Tensor:
        return torch.zeros_like(value)  # not used; see `decompose`

    def decompose(self, mean: Tensor, variance: Tensor, aleatoric: Tensor) -> Decomposed:
        if type(self).aleatoric is CustomLikelihood.aleatoric:
            raise TypeError(f"{self.kind} must define aleatoric(value), the noise of labels, for decompose=True.")
        return super().decompose(mean, variance, aleatoric)

    def residual(self, outputs: Tensor, labels: Tensor, check: bool = True) -> Tensor:
        with torch.enable_grad():
            given = outputs.detach().requires_grad_()
            return torch.autograd.grad(self.each_loss(given, labels).sum(), given)[0]

    def hessian_roots(self, outputs: Tensor) -> Iterator[Tensor]:
        matrix, count = self.hessian(outputs.detach()), outputs[0].numel()
        if matrix.shape != (len(outputs), count, count):
            raise ValueError(
                f"hessian() must return shape {(len(outputs), count, count)} for outputs of shape "
                f"{tuple(outputs.shape)}, got {tuple(matrix.shape)}."
            )
        if not bool((matrix - matrix.mT).abs().amax() <= 1e-6 * matrix.abs().amax()):
            raise ValueError("hessian() must be finite and symmetric.")
        values, vectors = torch.linalg.eigh(matrix)
        if bool((values[:, 0] < -1e-5 * values[:, -1].abs()).any()):
            raise ValueError("hessian() must be positive semi-definite: return the Hessian expected over labels.")
        yield from (vectors * values.clamp(min=0).sqrt()[:, None]).movedim(-1, 0).reshape(count, *outputs.shape)

    def hessian_product(self, outputs: Tensor, vector: Tensor) -> Tensor:
        return torch.einsum("nij,...nj->...ni", self.hessian(outputs), self._flat(outputs, vector)).view(vector.shape)

    def third_product(self, outputs: Tensor, vector: Tensor) -> Tensor:
        with torch.enable_grad():
            given = outputs.detach().expand(vector.shape).clone().requires_grad_()
            rows, own = given.flatten(0, vector.dim() - outputs.dim()), vector.detach().reshape(-1, *outputs.shape[1:])
            square = (own * self.hessian_product(rows, own)).sum()
            if not square.requires_grad:  # the Hessian is constant
                return torch.zeros_like(vector)
            return torch.autograd.grad(square, given)[0]

    @staticmethod
    def _flat(outputs: Tensor, vector: Tensor) -> Tensor:
        return vector.reshape(*vector.shape[: vector.dim() - outputs.dim() + 1], -1)

    def from_gaussian(self, mean: Tensor, variance: Tensor) -> Tensor | Moments | NoisyMoments:
        draws = [self.link(outputs) for outputs in _draws(mean, variance)]
        values = torch.stack(draws)
        return self.from_moments(values.mean(0), values.var(0, correction=0))

    def log_density(self, mean: Tensor, variance: Tensor, labels: Tensor) -> Tensor:
        """From samples of the outputs, always with the same noise."""
        each = torch.stack([self.log_likelihood(outputs, labels) for outputs in _draws(mean, variance)])
        return each.logsumexp(0) - math.log(DRAWS)


def _draws(mean: Tensor, variance: Tensor) -> Iterator[Tensor]:
    generator, root = generator_of(0, 0), variance.sqrt()
    for _ in range(DRAWS):
        yield mean + root * torch.randn(mean.shape, dtype=mean.dtype, generator=generator, device="cpu").to(mean.device)


class HeteroscedasticGaussian(CustomLikelihood):
    r"""Gaussian data with a noise variance that depends on the input: outputs are means, then logarithms of variances.

    .. math::
        \ell = \tfrac12 \sum_k \left(s_k + (y_k - \mu_k)^2 e^{-s_k} + \log 2\pi\right), \quad f = (\mu, s)

    Outputs have 2 K entries in the last dimension for K targets. The Hessian is the Fisher information, diagonal with
    e^-s for means and 1/2 for log variances; the Hessian at a label need not be positive. `predict` returns
    `NoisyMoments`: the mean of the label, the variance of that mean under the posterior, and the expected noise
    variance E e^s, which is exp(s + Var s/2) for Gaussian s.

        >>> loss = HeteroscedasticGaussian().loss(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0]]))
        >>> round(float(loss), 4)  # (1 + log 2 pi)/2
        1.4189

    Reference: Nix and Weigend, 1994.
    Checked by: tests/equations/test_custom_likelihoods.py.
    """

    kind = "heteroscedastic_gaussian"
    closed_form: ClassVar[bool] = True
    needs_samples: ClassVar[bool] = False

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        mean, log_variance = self._parts(outputs)
        self._check(mean, labels)
        square = (labels.to(mean) - mean).square() * (-log_variance).exp()
        return (log_variance + square + math.log(2 * math.pi)).reshape(len(outputs), -1).sum(1) / 2

    def hessian(self, outputs: Tensor) -> Tensor:
        return torch.diag_embed(self._diagonal(outputs).flatten(1))

    def _diagonal(self, outputs: Tensor) -> Tensor:
        _, log_variance = self._parts(outputs)
        return torch.cat([(-log_variance).exp(), torch.full_like(log_variance, 0.5)], -1)

    @staticmethod
    def _parts(outputs: Tensor) -> tuple[Tensor, Tensor]:
        if outputs.dim() < 2 or outputs.shape[-1] % 2:
            raise ValueError(
                "a heteroscedastic Gaussian needs outputs (N, ..., 2 K), means and then logarithms of variances, got "
                f"shape {tuple(outputs.shape)}."
            )
        mean, log_variance = outputs.chunk(2, -1)
        return mean, log_variance

    @staticmethod
    def _check(mean: Tensor, labels: Tensor) -> None:
        if labels.shape != mean.shape:
            raise ValueError(f"labels must have the shape {tuple(mean.shape)} of means, got {tuple(labels.shape)}.")

    def link(self, outputs: Tensor) -> Tensor:
        """Means and variances."""
        mean, log_variance = self._parts(outputs)
        return torch.cat([mean, log_variance.exp()], -1)

    def from_moments(self, mean: Tensor, variance: Tensor) -> NoisyMoments:
        (centre, noise), (spread, _) = self._parts(mean), self._parts(variance)
        return NoisyMoments(centre, spread, noise)

    def from_gaussian(self, mean: Tensor, variance: Tensor) -> NoisyMoments:
        (centre, s), (spread, v) = self._parts(mean), self._parts(variance)
        return NoisyMoments(centre, spread, (s + v / 2).exp())

    def aleatoric(self, value: Tensor) -> Tensor:
        return self._parts(value)[1]

    def decompose(self, mean: Tensor, variance: Tensor, aleatoric: Tensor) -> Decomposed:
        found = self.from_moments(mean, variance)
        return Decomposed(found, found.noise, found.variance)

    def decompose_gaussian(self, mean: Tensor, variance: Tensor) -> Decomposed:
        found = self.from_gaussian(mean, variance)
        return Decomposed(found, found.noise, found.variance)

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        mean, log_variance = self._parts(outputs.detach())
        noise = torch.randn(mean.shape, dtype=torch.float64, generator=generator).to(mean)
        return mean + (log_variance / 2).exp() * noise

    def hessian_roots(self, outputs: Tensor) -> Iterator[Tensor]:
        yield from one_by_one(self._diagonal(outputs.detach()).sqrt())

    def log_density(self, mean: Tensor, variance: Tensor, labels: Tensor) -> Tensor:
        """By quadrature over each log variance."""
        (centre, s), (spread, v) = self._parts(mean), self._parts(variance)
        self._check(centre, labels)
        each = log_normal_lognormal(labels.to(mean) - centre, spread, s, v)
        return each.reshape(len(mean), -1).sum(1)
