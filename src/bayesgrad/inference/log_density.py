"""A factor of any differentiable log density of a Gaussian vector."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from bayesgrad.families import FixedGaussian, Parameters
from bayesgrad.inference.expectation import Expectation, Function, Moments
from bayesgrad.inference.factor import MomentsFactor, check_expectation, check_gaussian, gaussian_message
from bayesgrad.inference.node import Node


class LogDensity(MomentsFactor):
    """Any log f(θ) of a Gaussian node, by its gradients and Hessians.

    No P x P matrix is formed unless the covariance is one. A `FixedGaussian` node needs gradients only. A
    `DiagonalGaussian` node needs the diagonal of the Hessian: P Hessian products at each point of the expectation if it
    is exact, and no more than the gradient with `hessian="gauss-newton"` or `"reparameterised"`.

    Args:
        function: maps one vector (P,) to a scalar.
        expectation: computes E.
    """

    def __init__(
        self, node: Node, function: Function, expectation: Expectation, *, scale: float | Tensor = 1.0
    ) -> None:
        super().__init__(node, scale=scale)
        check_gaussian(node)
        self.function, self.expectation = function, check_expectation(expectation)

    def _expected(self) -> Moments:
        (node,) = self.nodes
        mean, covariance = node.moments
        if covariance.shape != mean.shape:
            root = torch.linalg.cholesky(covariance)
        elif covariance.stride(-1):
            root = covariance.rsqrt().reciprocal_()  # in less time than torch.sqrt of float64 on the CPU
        else:  # one number for all, as of FixedGaussian(1)
            root = covariance[..., :1].sqrt().expand_as(mean)
        needed = not isinstance(node.family, FixedGaussian)
        return self.expectation.vector(self.function, mean, root, second=needed)

    def value_at_mean(self) -> Tensor:
        (node,) = self.nodes
        mean = node.family.mode(node.natural)
        return vmap(self.function)(mean.view(-1, mean.shape[-1])).sum()

    def log_density(self, *values: Tensor) -> Tensor:
        (theta,) = values
        return self.function(theta) if theta.dim() == 1 else vmap(self.function)(theta.flatten(0, -2)).sum()

    def _message(self, node: Node) -> Parameters:
        _, first, second = self.moments()
        return (first,) if isinstance(node.family, FixedGaussian) else gaussian_message(node, first, second)
