"""Distributions over finite sets."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli as TorchBernoulli
from torch.distributions import Distribution, OneHotCategorical

from bayesgrad.families.digamma import bregman
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

    def entropy(self, natural: Parameters, mean: Parameters | None = None) -> Tensor:
        """log(1 + e^-u) + u/(1 + e^u) with u = 2|λ|; A(λ) - λ tanh λ would cancel."""
        odds = 2 * natural[0].abs()
        return (-odds).exp().log1p() + odds * torch.sigmoid(-odds)

    def divergence(self, natural: Parameters, other: Parameters) -> Tensor:
        """p log(p/p') + q log(q/q'), or an integral of 1/cosh² if λ and λ' are close to each other."""
        change = other[0] - natural[0]
        close = change.abs() < 1
        near = bregman(_sech_squared, natural[0], torch.where(close, change, 0.0))
        log_up, log_down = (nn.functional.logsigmoid(sign * 2 * natural[0]) for sign in (1, -1))
        far_up, far_down = (nn.functional.logsigmoid(sign * 2 * other[0]) for sign in (1, -1))
        far = log_up.exp() * (log_up - far_up) + log_down.exp() * (log_down - far_down)
        return torch.where(close, near, far)

    def log_density(self, natural: Parameters, x: Tensor) -> Tensor:
        return nn.functional.logsigmoid(2 * natural[0] * x)

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
    normalised logits, log μ. A logit of -inf is a probability of exactly zero, and steps keep it: an outcome that is
    impossible stays impossible.

    >>> die = Categorical()
    >>> die.mean(die.of(torch.tensor([0.5, 0.25, 0.25])))[0].tolist()
    [0.5, 0.25, 0.25]
    """

    event_dims = (1,)
    domain = ", with a logit above -inf for at least one outcome"
    minus_infinity = True

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

    def dot(self, natural: Parameters, mean: Parameters) -> Tensor:
        """⟨λ, μ⟩ with 0 · (-inf) = 0."""
        return (natural[0].masked_fill((mean[0] == 0) & (natural[0] == -torch.inf), 0.0) * mean[0]).sum(-1)

    def entropy_gradient(self, natural: Parameters) -> Parameters:
        """-λ, and 0 where a probability is zero and stays zero."""
        return (-natural[0].masked_fill(natural[0] == -torch.inf, 0.0),)

    def part_step(self, natural: Parameters, target: Parameters, rho: float | Tensor) -> Parameters:
        """See `Family`; a logit of -inf stays, and one that a message sets to -inf becomes that at once."""
        change = (rho[..., None] if isinstance(rho, Tensor) else rho) * (target[0] - natural[0])
        return (torch.where(natural[0] == -torch.inf, natural[0], natural[0] + change),)

    def entropy(self, natural: Parameters, mean: Parameters | None = None) -> Tensor:
        """-Σ p_k log p_k, with all digits also where one probability is almost 1."""
        below, log_total = _below_largest(natural[0])
        p = (below - log_total).exp()
        return log_total[..., 0] - (below.masked_fill(p == 0, 0.0) * p).sum(-1)

    def divergence(self, natural: Parameters, other: Parameters) -> Tensor:
        """log Σ p_k e^d_k with d = λ_p - λ_q minus its mean under q; infinite if p excludes an outcome of q."""
        below, log_total = _below_largest(natural[0])
        log_p = below - log_total
        p = log_p.exp()
        change = (other[0] - natural[0]).masked_fill(p == 0, 0.0)
        change = change - (p * change).sum(-1, keepdim=True)
        near = torch.log1p((p * _expm1_minus(change.clamp(max=1.0))).sum(-1))
        other_below, other_total = _below_largest(other[0])
        far = (p * (log_p - (other_below - other_total)).masked_fill(p == 0, 0.0)).sum(-1)
        return torch.where((change.abs() <= 1).all(-1), near, far)

    def log_density(self, natural: Parameters, x: Tensor) -> Tensor:
        below, log_total = _below_largest(natural[0])
        return self.dot((below - log_total,), (x,))

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
        return (natural[0] < torch.inf).all(-1) & (natural[0] > -torch.inf).any(-1)

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


def _below_largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """λ - max λ, and log Σ exp of it as log(1 + sum of the others), which keeps a sum that is small beside 1."""
    place = logits.argmax(-1, keepdim=True)
    below = logits - logits.gather(-1, place)
    others = below.exp().scatter(-1, place, 0.0)
    return below, others.sum(-1, keepdim=True).log1p()


def _sech_squared(x: Tensor) -> Tensor:
    """1/cosh² x."""
    small = (-2 * x.abs()).exp()
    return 4 * small / (1 + small).square()


def _expm1_minus(x: Tensor) -> Tensor:
    """e^x - 1 - x for |x| <= 1, by its series, with all digits for small x."""
    total = torch.ones_like(x)
    for k in range(20, 2, -1):
        total = 1 + x / k * total
    return x.square() / 2 * total
