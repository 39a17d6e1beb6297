"""Factors of a model's joint density, as functions of the expectations of its nodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import vmap

from bayesgrad.families import DiagonalGaussian, FixedGaussian, Gaussian, Parameters
from bayesgrad.families.gaussian import LOG_2PI
from bayesgrad.inference.expectation import Expectation, GaussHermite, Moments
from bayesgrad.inference.node import Node, positive

GAUSSIANS = (Gaussian, DiagonalGaussian, FixedGaussian)


class Factor(ABC):
    """log f in expectation under q, and its derivatives by the expectations of nodes: its messages.

    Args:
        nodes: that it mentions.
        scale: how often it counts, N/B for a batch of B out of N examples.
    """

    def __init__(self, *nodes: Node, scale: float | Tensor = 1.0) -> None:
        if not nodes:
            raise ValueError("a factor must mention at least one node.")
        self.nodes, self.scale = nodes, positive("scale", scale, zero=True)

    @abstractmethod
    def value(self) -> Tensor:
        """E_q[log f], a number, with all constants."""

    def at_mean(self) -> Tensor:
        """log f at the means of nodes, where that is more than `value` knows: what a search with Delta goes by."""
        return self.value()

    @abstractmethod
    def _message(self, node: Node) -> Parameters:
        """∇_μ E_q[log f] for one of its nodes."""

    def message(self, node: Node) -> Parameters:
        """∇_μ E_q[log f], in the form of natural parameters.

        Raises:
            ValueError: the factor does not mention the node.
        """
        if not any(own is node for own in self.nodes):
            raise ValueError(f"this {type(self).__name__} factor does not mention {node}, only {list(self.nodes)}.")
        return node.family.symmetric(self._message(node))


class Expected(Factor):
    """Any function of the nodes' expectation parameters, differentiated by autograd.

    Args:
        function: takes the expectation parameters of each node, a tuple for each, and gives E_q[log f]; it is summed
            where it has plates.

    >>> from bayesgrad.families import Gaussian
    >>> weight = Node(Gaussian(), Gaussian().of(torch.zeros(1), torch.eye(1)))
    >>> observed = Expected(lambda mean: -2 * (mean[1][0, 0] - 2 * 10 * mean[0][0] + 100), weight)
    >>> [part.tolist() for part in observed.message(weight)]
    [[40.0], [[-2.0]]]
    """

    def __init__(self, function: Callable[..., Tensor], *nodes: Node, scale: float | Tensor = 1.0) -> None:
        super().__init__(*nodes, scale=scale)
        self.function = function

    def value(self) -> Tensor:
        return self.function(*[node.mean for node in self.nodes]).sum()

    def _message(self, node: Node) -> Parameters:
        own = tuple(part.detach().requires_grad_() for part in node.mean)
        with torch.enable_grad():
            value = self.function(*[own if other is node else other.mean for other in self.nodes]).sum()
            if not value.requires_grad:
                raise ValueError(f"the function of this factor does not depend on {node}: leave the node out.")
            return torch.autograd.grad(value, own, allow_unused=True, materialize_grads=True)


class Linear(Factor):
    """⟨message, μ⟩ + constant: what a conjugate factor is, in closed form."""

    def __init__(self, node: Node, message: Parameters, constant: float | Tensor = 0.0, *, scale: float = 1.0) -> None:
        super().__init__(node, scale=scale)
        self._given, self.constant = _fitting(node, message, "message"), constant

    def value(self) -> Tensor:
        (node,) = self.nodes
        return (node.family.dot(self._given, node.mean) + self.constant).sum()

    def at_mean(self) -> Tensor:
        (node,) = self.nodes
        at = node.family.statistics(node.family.mode(node.natural))
        return (node.family.dot(self._given, at) + self.constant).sum()

    def _message(self, node: Node) -> Parameters:
        return tuple(part.expand_as(own) for part, own in zip(self._given, node.natural))


class Prior(Factor):
    """A member of the node's own family with the given natural parameters; one for each plate, or one for all."""

    def __init__(self, node: Node, natural: Parameters, *, scale: float | Tensor = 1.0) -> None:
        super().__init__(node, scale=scale)
        self.natural = _fitting(node, node.family.check(natural, "prior parameters"), "prior parameters")
        self._log_partition = node.family.log_partition(self.natural)

    def value(self) -> Tensor:
        (node,), family = self.nodes, self.nodes[0].family
        inner = family.dot(self.natural, node.mean) - self._log_partition
        return (inner if family.flat else inner + family.base(node.natural)).sum()

    def at_mean(self) -> Tensor:
        (node,) = self.nodes
        return node.family.log_density(self.natural, node.family.mode(node.natural)).sum()

    def _message(self, node: Node) -> Parameters:
        if node.family.flat:
            return tuple(part.expand_as(own) for part, own in zip(self.natural, node.natural))
        base = node.family.base_gradient(node.natural)
        return tuple(a + b for a, b in zip(self.natural, base))


def linear_gaussian(node: Node, design: Tensor, targets: Tensor, precision: float | Tensor = 1.0) -> Linear:
    """y = X θ + noise of the given precision, for a Gaussian node θ.

    Args:
        design: X, (n, P).
        targets: y, (n,).
        precision: of the noise, one or (n,).
    """
    if not isinstance(node.family, Gaussian):
        raise TypeError(f"linear_gaussian takes a Gaussian node, got {node}: use LinearPredictorFactor.")
    _check_design(node, design)
    check_finite(targets=targets)
    weights = torch.as_tensor(precision, dtype=design.dtype, device=design.device)
    weights = weights.reshape(()) if weights.numel() == 1 else weights
    if targets.shape != design.shape[:1] or weights.shape not in ((), targets.shape):
        shapes = ", ".join(str(tuple(part.shape)) for part in (design, targets, weights))
        raise ValueError(f"design must be (n, P), targets (n,), precision one number or (n,), got {shapes}.")
    if not (weights > 0).all():
        raise ValueError(f"precision must be positive, got {weights.min().item():g}.")
    weights = weights.expand(len(targets))
    weighted = weights[:, None] * design
    first, constant = weighted.mT @ targets, (weights.log() - LOG_2PI).sum() / 2
    constant = constant - (weights * targets.square()).sum() / 2
    return Linear(node, (first, -weighted.mT @ design / 2), constant)


class LinearPredictorFactor(Factor):
    r"""Σ_i log p_i(x_i'θ) for a Gaussian node θ: through one-dimensional expectations, whatever the likelihood.

    .. math::
        \nabla_m = X^T E[\ell'], \quad \nabla_V = \tfrac12 X^T \mathrm{diag}(E[\ell'']) X

    Args:
        node: Gaussian, diagonal or full, or with a fixed covariance.
        design: X, (n, P).
        log_likelihood: elementwise in its first argument, (..., n), with the data inside.
        expectation: how E is taken.

    Reference: 002, Eqs. 58 and 59.
    """

    def __init__(
        self,
        node: Node,
        design: Tensor,
        log_likelihood: Callable[[Tensor], Tensor],
        expectation: Expectation | None = None,
        *,
        scale: float | Tensor = 1.0,
    ) -> None:
        super().__init__(node, scale=scale)
        _gaussian(node)
        _check_design(node, design)
        self.design, self.log_likelihood = design, log_likelihood
        self.expectation = _expectation(GaussHermite() if expectation is None else expectation)
        self._seen: tuple[Parameters, Moments] | None = None

    def projections(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of each x_i'θ, (n,)."""
        (node,) = self.nodes
        mean, covariance = node.moments
        if covariance.shape == mean.shape:
            return self.design @ mean, self.design.square() @ covariance
        return self.design @ mean, ((self.design @ covariance) * self.design).sum(-1)

    def moments(self) -> Moments:
        """Of the log-likelihood of each example, at the node as it is."""
        natural = self.nodes[0].natural
        if self._seen is None or self._seen[0] is not natural:
            self._seen = natural, self._expected()
        return self._seen[1]

    def _expected(self) -> Moments:
        return self.expectation.scalar(self.log_likelihood, *self.projections())

    def value(self) -> Tensor:
        return self.moments().value.sum()

    def at_mean(self) -> Tensor:
        return self.log_likelihood(self.projections()[0]).sum()

    def _message(self, node: Node) -> Parameters:
        _, first, second = self.moments()
        gradient = self.design.mT @ first
        if isinstance(node.family, FixedGaussian):
            return (gradient,)
        if isinstance(node.family, DiagonalGaussian):
            return bonnet(node, gradient, self.design.square().mT @ second)
        return bonnet(node, gradient, self.design.mT @ (second[:, None] * self.design))


class MultiLinearPredictorFactor(LinearPredictorFactor):
    r"""Σ_i log p_i(f_i) with f_ik = x_i'θ_k, for a full Gaussian node that holds K vectors, θ = (θ_1, ..., θ_K).

    .. math::
        \nabla_m = \sum_i E[\nabla\ell_i] \otimes x_i, \quad
        \nabla_V = \tfrac12 \sum_i E[\nabla^2\ell_i] \otimes x_i x_i^T

    Args:
        node: Gaussian over K P numbers.
        design: X, (n, P).
        log_likelihood: (..., n, K) in, (..., n) out, with the data inside.
        expectation: how E is taken over K numbers.
    """

    def __init__(
        self,
        node: Node,
        design: Tensor,
        log_likelihood: Callable[[Tensor], Tensor],
        expectation: Expectation,
        *,
        scale: float | Tensor = 1.0,
    ) -> None:
        Factor.__init__(self, node, scale=scale)
        check_finite(design=design)
        size = node.natural[0].shape[-1]
        if not isinstance(node.family, Gaussian) or size % design.shape[1]:
            raise ValueError(f"node must be a Gaussian of K times {design.shape[1]} weights, got {size} of {node}.")
        self.design, self.log_likelihood, self.expectation = design, log_likelihood, _expectation(expectation)
        self.outputs = size // design.shape[1]
        self._seen = None

    def projections(self) -> tuple[Tensor, Tensor]:
        """Mean (n, K) and covariance (n, K, K) of each f_i."""
        (node,) = self.nodes
        mean, covariance = node.moments
        return project(self.design, mean, covariance, self.outputs)

    def _expected(self) -> Moments:
        mean, covariance = self.projections()
        return self.expectation.rows(self.log_likelihood, mean, torch.linalg.cholesky(covariance))

    def _message(self, node: Node) -> Parameters:
        _, first, second = self.moments()
        size, K = self.design.shape[1], self.outputs
        hessian = first.new_zeros(K, size, K, size)
        for j in range(K):
            for k in range(j + 1):
                block = self.design.mT @ (second[:, j, k, None] * self.design)
                hessian[j, :, k], hessian[k, :, j] = block, block
        return bonnet(node, (first.mT @ self.design).flatten(), hessian.view(K * size, K * size))


def project(design: Tensor, mean: Tensor, covariance: Tensor, outputs: int) -> tuple[Tensor, Tensor]:
    """Mean (n, K) and covariance (n, K, K) of x_i'θ_k for θ of mean (K P,) and covariance (K P, K P)."""
    size = design.shape[1]
    blocks = covariance.view(outputs, size, outputs, size)
    spread = design.new_empty(len(design), outputs, outputs)
    for j in range(outputs):
        for k in range(j + 1):
            spread[:, j, k] = spread[:, k, j] = ((design @ blocks[j, :, k]) * design).sum(-1)
    return design @ mean.view(outputs, size).mT, spread


class LogDensity(Factor):
    """Any log f(θ) of a Gaussian node, through its gradients and Hessians.

    Args:
        function: of one vector (P,); gives a number.
        expectation: how E is taken.
    """

    def __init__(
        self,
        node: Node,
        function: Callable[[Tensor], Tensor],
        expectation: Expectation,
        *,
        scale: float | Tensor = 1.0,
    ) -> None:
        super().__init__(node, scale=scale)
        _gaussian(node)
        self.function, self.expectation = function, _expectation(expectation)
        self._seen: tuple[Parameters, Moments] | None = None

    def moments(self) -> Moments:
        (node,) = self.nodes
        if self._seen is None or self._seen[0] is not node.natural:
            mean, covariance = node.moments
            if covariance.shape == mean.shape:
                root = torch.diag_embed(covariance.sqrt())
            else:
                root = torch.linalg.cholesky(covariance)
            self._seen = node.natural, self.expectation.vector(self.function, mean, root)
        return self._seen[1]

    def value(self) -> Tensor:
        return self.moments().value.sum()

    def at_mean(self) -> Tensor:
        (node,) = self.nodes
        mean = node.family.mode(node.natural)
        return vmap(self.function)(mean.view(-1, mean.shape[-1])).sum()

    def _message(self, node: Node) -> Parameters:
        _, first, second = self.moments()
        if isinstance(node.family, FixedGaussian):
            return (first,)
        if isinstance(node.family, DiagonalGaussian):
            second = second.diagonal(dim1=-2, dim2=-1)
        return bonnet(node, first, second)


def bonnet(node: Node, gradient: Tensor, hessian: Tensor) -> Parameters:
    """(E[∇f] - E[∇² f] m, E[∇² f]/2): the derivatives by (m, V + mm') from those by m and V (002, Eqs. 10, 11)."""
    mean = node.moments[0]
    if hessian.dim() == mean.dim():
        return gradient - hessian * mean, hessian / 2
    return gradient - (hessian @ mean[..., None])[..., 0], hessian / 2


def check_finite(**values: Tensor) -> None:
    """Raises a ValueError for NaN, infinity or emptiness."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}.")
        if not value.numel():
            raise ValueError(f"{name} is empty, of shape {tuple(value.shape)}.")
        if not torch.isfinite(value).all():
            raise ValueError(f"{name} holds NaN or infinity: remove or impute such rows first.")


def _check_design(node: Node, design: Tensor) -> None:
    check_finite(design=design)
    size, kind = node.natural[0].shape[-1], node.natural[0].dtype
    if node.family.plates(node.natural):
        raise ValueError(f"this factor takes one vector of weights, without plates, got {node}.")
    if design.dim() != 2 or design.shape[1] != size:
        raise ValueError(f"design must have {size} columns, as the node has weights, got {tuple(design.shape)}.")
    if design.dtype != kind:
        raise ValueError(f"design must be of the node's dtype, {kind}, got {design.dtype}: convert it by .to().")


def _fitting(node: Node, parameters: Parameters, what: str) -> Parameters:
    """Parameters that can be those of a node."""
    try:
        for part, own in zip(parameters, node.natural, strict=True):
            part.expand_as(own)
    except (RuntimeError, ValueError):
        shapes = [[tuple(part.shape) for part in own] for own in (parameters, node.natural)]
        raise ValueError(f"{what} of shapes {shapes[0]} do not fit {node}, of shapes {shapes[1]}.") from None
    return parameters


def _expectation(given: Expectation) -> Expectation:
    if not isinstance(given, Expectation):
        raise TypeError(f"expectation must be one of GaussHermite(), MonteCarlo() and Delta(), got {given!r}.")
    return given


def _gaussian(node: Node) -> None:
    if not isinstance(node.family, GAUSSIANS):
        raise TypeError(f"this factor takes a Gaussian node, got {node}.")
