"""Factors of nodes whose distribution is a mixture of Gaussians: several minima from one run."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesgrad.families import Gaussian, MixtureOfGaussians, Parameters
from bayesgrad.inference.expectation import Expectation, Function, Moments
from bayesgrad.inference.factor import MomentsFactor
from bayesgrad.inference.node import Node

GAUSSIAN = Gaussian()


class MixtureLogDensity(MomentsFactor):
    r"""log f(θ) of a mixture's θ, with a correction that replaces the entropy of (θ, z) by the entropy of θ alone.

    The entropy of a mixture node is H(θ, z), where z is the component. The entropy that keeps the components apart is
    that of the marginal q(θ). This factor adds the difference: its value is E_q[log f - log q] - H(θ, z), its message

    .. math::
        \nabla_{\mu_k} = \left(E_k[\nabla F] - E_k[\nabla^2 F]\, m_k,\ \tfrac12 E_k[\nabla^2 F]\right) + \lambda_k,
        \quad F = \log f - \log q

    with E_k under component k. The probabilities π_k cancel. The message to learnt weights is E_k[F] - ⟨∇_k, μ_k/π_k⟩.

    Args:
        function: log f of one vector (P,).
        expectation: computes E_k.

    Reference: Khan and Rue 2023, Eqs. 28 to 30, 67 to 71.
    Checked by: tests/equations/test_multimodal.py.
    """

    def __init__(self, node: Node, function: Function, expectation: Expectation, *, scale: float = 1.0) -> None:
        super().__init__(node, scale=scale)
        if not isinstance(node.family, MixtureOfGaussians) or node.family.plates(node.natural):
            raise TypeError(f"this factor needs a MixtureOfGaussians node without plates, got {node}.")
        if scale != 1.0 or node.scale != 1.0:
            raise ValueError(f"the scale of a mixture must be 1, got {scale!r}: multiply the function instead.")
        self.family, self.function, self.expectation = node.family, function, expectation

    def _expected(self) -> Moments:
        """Expectations of log f - log q and its derivatives under each component."""
        natural = self.nodes[0].natural
        _, means, covariances = self.family.moments(natural)

        def difference(theta: Tensor) -> Tensor:
            return self.function(theta) - self.family.log_density(natural, theta)

        return self.expectation.vector(difference, means, torch.linalg.cholesky(covariances))

    def value(self) -> Tensor:
        natural = self.nodes[0].natural
        weights = self.family.log_weights(natural).exp()
        return (weights * self.moments().value).sum() - self.family.entropy(natural)

    def _message(self, node: Node) -> Parameters:
        value, first, second = self.moments()
        components = self.family.components(node.natural)
        means = GAUSSIAN.moments(components)[0]
        found = first - (second @ means[..., None])[..., 0], second / 2
        if self.family.weights is None:
            found = value - GAUSSIAN.dot(found, GAUSSIAN.mean(components)), *found
        return tuple(a + b for a, b in zip(found, node.natural))
