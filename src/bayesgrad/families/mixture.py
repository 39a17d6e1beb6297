"""Mixtures of Gaussians as a joint distribution with the component."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Distribution, MixtureSameFamily, MultivariateNormal

from bayesgrad.families.definite import cholesky
from bayesgrad.families.digamma import LOG_2PI
from bayesgrad.families.discrete import Categorical
from bayesgrad.families.family import Family, Parameters
from bayesgrad.families.gaussian import Gaussian

GAUSSIAN = Gaussian()


@dataclass(frozen=True, eq=False)
class MixtureOfGaussians(Family):
    r"""q(θ, z = k) = π_k N(θ | m_k, S_k^-1), the joint distribution of a vector θ and its component z, one of K.

    .. math::
        \lambda = (c_k,\ S_k m_k,\ -\tfrac12 S_k), \quad
        \mu = (\pi_k,\ \pi_k m_k,\ \pi_k (S_k^{-1} + m_k m_k^T)), \quad
        T = 1_{[z=k]} (1,\ \theta,\ \theta\theta^T)

    with A(λ) = log Σ_k exp(c_k + A_k) and π = softmax(c + A), where A_k is the log-partition of component k: c_k is
    log π_k - A_k, up to a constant. With fixed `weights` there is no c: it is an exponential family given z, with
    A(λ) = Σ_k π_k A_k, for which ∇A = μ and the formulas of entropy and divergence hold as well.

    `sample`, `log_density`, `score`, `hessian` and `to_distribution` refer to the marginal q(θ) = Σ_k π_k N(θ | m_k,
    S_k^-1). `entropy`, `divergence`, `statistics`, `log_joint` and `sample_joint` refer to the pair (θ, z), whose
    values are packed into one tensor, see `pack`. The entropy of the marginal is the entropy of the pair minus that
    of z given θ; it has no closed form.

    Args:
        weights: fixed weights π, (K,) or (plates, K); None for weights that are learnt.

    >>> mixture = MixtureOfGaussians(weights=torch.tensor([0.25, 0.75]))
    >>> natural = mixture.of(torch.tensor([[0.0], [4.0]]), torch.ones(2, 1, 1))
    >>> [part.flatten().tolist() for part in mixture.mean(natural)]
    [[0.0, 3.0], [0.25, 12.75]]

    Reference: Khan and Rue 2023, section 3.2, Eq. 27, and appendix E, Eqs. 69-71.
    Checked by: also tests/equations/test_mixture_family.py.
    """

    domain = ", with positive definite precisions"
    weights: Tensor | None = None

    @property
    def event_dims(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (1, 2, 3) if self.weights is None else (2, 3)

    def __post_init__(self) -> None:
        given = self.weights
        if given is not None and not isinstance(given, Tensor):
            raise TypeError(f"weights of components must be a tensor or None, got {given!r}.")
        if given is not None and not ((given > 0).all() and ((given.sum(-1) - 1).abs() < 1e-5).all()):
            raise ValueError(f"weights of components must be positive and sum to 1, got {given.tolist()}.")

    def of(self, means: Tensor, precisions: Tensor, weights: Tensor | None = None) -> Parameters:
        """Natural parameters of K components with means (..., K, P), precisions (..., K, P, P) and, unless the family
        has fixed weights, weights (..., K); equal weights by default."""
        components = GAUSSIAN.of(means, precisions)
        if self.weights is not None:
            return components
        volume = GAUSSIAN.log_partition(components)
        return (-volume if weights is None else weights.log() - volume), *components

    def moments(self, natural: Parameters) -> tuple[Tensor, Tensor, Tensor]:
        """Weights (..., K), means (..., K, P) and covariances (..., K, P, P)."""
        return self.log_weights(natural).exp(), *GAUSSIAN.moments(self.components(natural))

    def components(self, natural: Parameters) -> Parameters:
        """Natural parameters of the K Gaussians; the components are the last plate dimension."""
        return natural[-2:]

    def log_weights(self, natural: Parameters) -> Tensor:
        """log π, (..., K)."""
        if self.weights is None:
            return (natural[0] + GAUSSIAN.log_partition(self.components(natural))).log_softmax(-1)
        return self.weights.to(natural[0]).log().expand(natural[0].shape[:-1])

    def log_partition(self, natural: Parameters) -> Tensor:
        volume = GAUSSIAN.log_partition(self.components(natural))
        if self.weights is None:
            return (natural[0] + volume).logsumexp(-1)
        return (self.weights.to(volume) * volume).sum(-1)

    def mean(self, natural: Parameters) -> Parameters:
        weights = self.log_weights(natural).exp()
        first, second = GAUSSIAN.mean(self.components(natural))
        scaled = weights[..., None] * first, weights[..., None, None] * second
        return (weights, *scaled) if self.weights is None else scaled

    def natural(self, mean: Parameters) -> Parameters:
        weights = mean[0] if self.weights is None else self.weights.to(mean[0]).expand(mean[0].shape[:-1])
        first, second = self.components(mean)
        components = GAUSSIAN.natural((first / weights[..., None], second / weights[..., None, None]))
        if self.weights is not None:
            return components
        return weights.log() - GAUSSIAN.log_partition(components), *components

    def in_domain(self, natural: Parameters) -> Tensor:
        in_domain = GAUSSIAN.in_domain(self.components(natural))
        return (in_domain if self.weights is not None else in_domain & torch.isfinite(natural[0])).all(-1)

    def has_mode(self, natural: Parameters) -> Tensor:
        return torch.zeros_like(self.in_domain(natural))

    def symmetric(self, parameters: Parameters) -> Parameters:
        return *parameters[:-1], (parameters[-1] + parameters[-1].mT) / 2

    def expected_log_base(self, natural: Parameters) -> Tensor:
        """Σ_k π_k log π_k for fixed weights: minus the entropy of z, which A does not include then."""
        if self.weights is None:
            return torch.zeros_like(self.log_partition(natural))
        log_weights = self.log_weights(natural)
        return (log_weights.exp() * log_weights).sum(-1)

    def entropy(self, natural: Parameters, mean: Parameters | None = None) -> Tensor:
        """Σ_k π_k (H_k - log π_k), of the pair."""
        log_weights = self.log_weights(natural)
        own = (log_weights.exp() * GAUSSIAN.entropy(self.components(natural))).sum(-1)
        return own + Categorical().entropy((log_weights,))

    def divergence(self, natural: Parameters, other: Parameters) -> Tensor:
        """Σ_k π_k KL_k, plus the divergence of the weights, of the pair."""
        log_weights = self.log_weights(natural)
        own = GAUSSIAN.divergence(self.components(natural), self.components(other))
        between = Categorical().divergence((log_weights,), (self.log_weights(other),))
        return (log_weights.exp() * own).sum(-1) + between

    # --- the joint distribution of (θ, z) ---

    def pack(self, z: Tensor, theta: Tensor) -> Tensor:
        """K rows z_k [1 θ], all zero except that of the component, for a one-hot z (..., K) and θ (..., P)."""
        return z[..., None] * torch.cat([torch.ones_like(theta[..., :1]), theta], -1)[..., None, :]

    def statistics(self, x: Tensor) -> Parameters:
        """T of packed pairs (..., K, P + 1)."""
        z, first = x[..., 0], x[..., 1:]
        second = first[..., :, None] * first[..., None, :]
        return (first, second) if self.weights is not None else (z, first, second)

    def sample_joint(self, natural: Parameters, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Packed pairs, (count, plates, K, P + 1)."""
        z = Categorical().sample((self.log_weights(natural),), count, generator)
        drawn = GAUSSIAN.sample(self.components(natural), count, generator)  # (count, ..., K, P)
        return self.pack(z, (z[..., None] * drawn).sum(-2))

    def log_joint(self, natural: Parameters, theta: Tensor) -> Tensor:
        """log q(θ, z = k) for every k, (..., K)."""
        factor = cholesky(-2 * natural[-1])
        offset = theta[..., None, :] - GAUSSIAN.mode(self.components(natural))
        white = (offset[..., None, :] @ factor)[..., 0, :]
        volume = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) - theta.shape[-1] / 2 * LOG_2PI
        return self.log_weights(natural) + volume - white.square().sum(-1) / 2

    # --- the marginal distribution of θ ---

    def responsibilities(self, natural: Parameters, theta: Tensor) -> Tensor:
        """r_k(θ) = q(z = k | θ), (..., K): Khan and Rue 2023, Eq. 71."""
        return self.log_joint(natural, theta).softmax(-1)

    def log_density(self, natural: Parameters, x: Tensor) -> Tensor:
        """log q(θ) of θ = x, (..., P); its last plate dimensions match those of λ."""
        return self.log_joint(natural, x).logsumexp(-1)

    def score(self, natural: Parameters, theta: Tensor) -> Tensor:
        """∇ log q(θ) = Σ_j r_j S_j (m_j - θ), (..., P): Khan and Rue 2023, Eq. 69."""
        return (self.responsibilities(natural, theta)[..., None] * self._component_scores(natural, theta)).sum(-2)

    def hessian(self, natural: Parameters, theta: Tensor) -> Tensor:
        """∇² log q(θ) = Σ_j r_j (a_j a_j' - S_j) - s s', with a_j = S_j (m_j - θ) and s the score, (..., P, P).

        This is Eq. 70 of Khan and Rue 2023, with the double sum written as a product.
        """
        r, scores = self.responsibilities(natural, theta), self._component_scores(natural, theta)
        score = (r[..., None] * scores).sum(-2)
        within = torch.einsum("...k,...ki,...kj->...ij", r, scores, scores)
        precision = (r[..., None, None] * -2 * natural[-1]).sum(-3)
        return within - precision - score[..., :, None] * score[..., None, :]

    def _component_scores(self, natural: Parameters, theta: Tensor) -> Tensor:
        """S_k (m_k - θ), (..., K, P)."""
        first, second = self.components(natural)
        return first + 2 * (second @ theta[..., None, :, None])[..., 0]

    def to_distribution(self, natural: Parameters) -> Distribution:
        """The marginal distribution of θ."""
        components = MultivariateNormal(*GAUSSIAN.moments(self.components(natural)))
        return MixtureSameFamily(TorchCategorical(logits=self.log_weights(natural)), components)

    def sample(self, natural: Parameters, count: int, generator: torch.Generator | None = None) -> Tensor:
        """θ, (count, plates, P)."""
        return self.sample_joint(natural, count, generator)[..., 1:].sum(-2)

    def retract(self, natural: Parameters, direction: Parameters, rho: float | Tensor) -> Parameters:
        """A step after which every S_k is positive definite, see `Gaussian.retract`. log π_k changes by
        rho (d_c + ⟨d_k, ∇A_k⟩), the first-order change of the straight step."""
        old, along = self.components(natural), self.components(direction)
        components = GAUSSIAN.retract(old, along, rho)
        if self.weights is not None:
            return components
        push = direction[0] + GAUSSIAN.dot(along, GAUSSIAN.mean(old))
        log_weights = (self.log_weights(natural) + rho * push).log_softmax(-1)
        return log_weights - GAUSSIAN.log_partition(components), *components
