"""Distributions over finite sets."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import Bernoulli as TorchBernoulli
from torch.distributions import Distribution, OneHotCategorical

from bayesgrad.families.family import Family, Parameters


class Bernoulli(Family):
    r"""x in {-1, +1}: λ is half the log-odds of +1, μ = E[x] = tanh λ, T(x) = x.

    .. math::
        A(\lambda) = \log 2\cosh\lambda

    >>> coin = Bernoulli()
    >>> natural = coin.of(torch.tensor(0.75))
    >>> round(coin.mean(natural)[0].item(), 4)
    0.5

    Reference: Khan and Rue 2023, section 4.5.
    Differs from the paper: Table 2 prints 2·1[θ=k] - 1 instead of 2·1[θ=1] - 1 = θ.
    """

    event_dims = (0,)

    def of(self, probability: Tensor) -> Parameters:
        """Natural parameters for a given probability of x = +1."""
        return (torch.logit(probability) / 2,)

    def standard_parameters(self, natural: Parameters) -> tuple[Tensor]:
        """The probability of +1."""
        return (torch.sigmoid(2 * natural[0]),)

    def log_partition(self, natural: Parameters) -> Tensor:
        return torch.logaddexp(natural[0], -natural[0])

    def mean(self, natural: Parameters) -> Parameters:
        return (natural[0].tanh(),)

    def natural(self, mean: Parameters) -> Parameters:
        """
        Raises:
            ValueError: E[x] is not in [-1, 1].
        """
        if not (mean[0].abs() <= 1).all():
            raise ValueError("not the expectations of a Bernoulli: E[x] must be in [-1, 1].")
        return (mean[0].atanh(),)

    def in_domain(self, natural: Parameters) -> Tensor:
        return torch.isfinite(natural[0])

    def statistics(self, x: Tensor) -> Parameters:
        return (x,)

    def mode(self, natural: Parameters) -> Tensor:
        """The sign of λ; +1 for λ = 0."""
        return torch.where(natural[0] < 0, -1.0, 1.0).to(natural[0])

    def to_distribution(self, natural: Parameters) -> Distribution:
        """The distribution of (x + 1)/2, which is 0 or 1, because torch's Bernoulli has these values."""
        return TorchBernoulli(logits=2 * natural[0])

    def sample(self, natural: Parameters, count: int, generator: torch.Generator | None = None) -> Tensor:
        uniform = torch.rand((count, *natural[0].shape), dtype=natural[0].dtype, generator=generator)
        up = uniform.to(natural[0].device) < self.standard_parameters(natural)[0]
        return torch.where(up, 1.0, -1.0).to(natural[0])


class Categorical(Family):
    r"""One of K outcomes, as a one-hot vector x: λ are logits, μ = softmax λ, T(x) = x.

    .. math::
        A(\lambda) = \log \sum_k e^{\lambda_k}

    Logits are defined up to a constant, and so are messages and ∇_μ H = -λ; only A depends on it. `natural` returns
    normalised logits, log μ.

    >>> die = Categorical()
    >>> die.mean(die.of(torch.tensor([0.5, 0.25, 0.25])))[0].tolist()
    [0.5, 0.25, 0.25]
    """

    event_dims = (1,)

    def of(self, probabilities: Tensor) -> Parameters:
        """Natural parameters for given probabilities, which need not be normalised."""
        return (probabilities.log(),)

    def standard_parameters(self, natural: Parameters) -> tuple[Tensor]:
        """The probabilities."""
        return (natural[0].softmax(-1),)

    def log_partition(self, natural: Parameters) -> Tensor:
        return natural[0].logsumexp(-1)

    def mean(self, natural: Parameters) -> Parameters:
        return (natural[0].softmax(-1),)

    def natural(self, mean: Parameters) -> Parameters:
        """
        Raises:
            ValueError: these are not probabilities.
        """
        error = (mean[0].sum(-1) - 1).abs()
        if not ((mean[0] >= 0).all(-1) & (error < torch.finfo(error.dtype).eps ** 0.5)).all():
            raise ValueError("not the expectations of a Categorical: probabilities must be non-negative and sum to 1.")
        return (mean[0].log(),)

    def in_domain(self, natural: Parameters) -> Tensor:
        return torch.isfinite(natural[0]).all(-1)

    def statistics(self, x: Tensor) -> Parameters:
        return (x,)

    def mode(self, natural: Parameters) -> Tensor:
        return torch.nn.functional.one_hot(natural[0].argmax(-1), natural[0].shape[-1]).to(natural[0])

    def to_distribution(self, natural: Parameters) -> Distribution:
        return OneHotCategorical(logits=natural[0])

    def sample(self, natural: Parameters, count: int, generator: torch.Generator | None = None) -> Tensor:
        probabilities = natural[0].softmax(-1)
        K = probabilities.shape[-1]
        drawn = torch.multinomial(probabilities.reshape(-1, K).cpu(), count, replacement=True, generator=generator)
        one_hot = torch.nn.functional.one_hot(drawn.mT, K).to(natural[0])
        return one_hot.reshape(count, *probabilities.shape)
