r"""Factors: the terms of a model's log joint density.

The log joint density of a model is a sum of terms, one for each prior and one for each set of observations:

.. math::
    \log p(\text{data}, x) = \sum_a \log f_a(x)

A `Factor` represents one term log f_a. The variables x are `Node`s. Each node has a distribution q of an exponential
family with natural parameters λ and expectation parameters μ = E_q[T(x)], the expectations of its sufficient
statistics T. A Gaussian, for example, has T(x) = (x, xx'), so μ = (m, V + mm') for mean m and covariance V. A node may
hold several independent variables of one family, called *plates*: leading dimensions of its parameters, like the batch
shape of torch.distributions.

The expected log density E_q[log f_a] is a function of the expectation parameters μ of the factor's nodes. A factor
computes two things:

- `value()`, the number E_q[log f_a], without `scale`. The ELBO is the sum of scale * value over factors and of the
  entropies of the nodes.
- `message(node)`, the gradient ∇_μ E_q[log f_a] with respect to the expectation parameters of one node. It has the
  shapes of natural parameters. The Bayesian learning rule (`step`) sets λ ← (1 - rho) λ + rho Σ_a message_a
  (for scales of 1; `inference.engine` has the general form).

Example: the term log N(y | x, 1) = -(x² - 2 y x)/2 + constant is linear in the statistics (x, x²). Its message is
therefore the constant (y, -1/2), for every q. If all factors of a node are like this, one step with rho = 1 gives the
exact posterior: with the prior N(0, 1) the messages sum to (y, -1), which is precision 2 and mean y/2. Such factors are
called conjugate (`Linear`, `Prior`). The message of any other factor depends on q, so the step must be repeated.

| factor | log f |
|---|---|
| `Prior` | the log density of a member of the node's own family |
| `Linear`, `linear_gaussian` | linear in the sufficient statistics |
| `Expected` | E_q[log f], written as a function of μ; autograd computes the message |
| `LinearPredictorFactor` | Σ_i log p(y_i given x_i'θ) of a generalised linear model |
| `LogDensity` | any differentiable function of a Gaussian vector |
| `LatentVariableFactor` | has latent variables of its own (mixtures, topics) |

A new factor subclasses `Factor` and defines `value` and `_message`. `Factor.check` compares them with Monte Carlo.

Reference: Khan and Rue 2023, Eqs. 3, 6 and 58.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from bayesgrad.families import DiagonalGaussian, FixedGaussian, Gaussian, Parameters
from bayesgrad.inference.check import Check, compare
from bayesgrad.inference.expectation import Expectation, Function, GaussHermite, Moments
from bayesgrad.inference.node import Node, check_finite, check_scale

GAUSSIANS = (Gaussian, DiagonalGaussian, FixedGaussian)


class Factor(ABC):
    """One term log f of the log joint density: E_q[log f] as a function of the nodes' expectation parameters.

    `value` computes E_q[log f]. `message` computes its gradient with respect to the expectation parameters of a node.

    Args:
        nodes: the nodes that f depends on.
        scale: weight of the factor in the ELBO, for example N/B for a batch of B out of N examples. `value` and
            `message` must not include it: `elbo` and `step` multiply by it.
    """

    def __init__(self, *nodes: Node, scale: float | Tensor = 1.0) -> None:
        if not nodes:
            raise ValueError("a factor needs at least one node, got none.")
        self.nodes, self.scale = nodes, check_scale("scale", scale, zero=True)

    @abstractmethod
    def value(self) -> Tensor:
        """E_q[log f] as a scalar, including all constants."""

    def value_at_mean(self) -> Tensor:
        """log f at the mode of each node (the mean of a Gaussian), in place of its expectation.

        The line search of `step(domain="search")` uses it if all nodes of the factor are evaluated with `Delta`. A
        factor that does not override it returns `value()`.
        """
        return self.value()

    @abstractmethod
    def _message(self, node: Node) -> Parameters:
        """∇_μ E_q[log f] for one of the factor's nodes."""

    def message(self, node: Node) -> Parameters:
        """∇_μ E_q[log f] with respect to the expectation parameters of `node`, in the shapes of natural parameters.

        Raises:
            ValueError: the factor does not depend on the node.
        """
        if not any(own is node for own in self.nodes):
            raise ValueError(f"this {type(self).__name__} factor depends on {list(self.nodes)}, not on {node}.")
        return node.family.symmetric(self._message(node))

    def log_density(self, *values: Tensor) -> Tensor:
        """log f at one value of each node, in place of its expectation; summed over plates.

        `check` uses it. A factor of your own may define it, or `check` takes it as an argument.
        """
        raise ValueError(f"{type(self).__name__} has no log_density: pass check a function of one value per node.")

    def check(
        self,
        log_density: Callable[..., Tensor] | None = None,
        *,
        samples: int = 20_000,
        seed: int = 0,
        deviations: float = 5.0,
    ) -> Check:
        """Compares `value` and each `message` with Monte Carlo estimates at the nodes' current distributions.

        A message is the regression of log f on the sufficient statistics of its node, so that draws of log f alone
        suffice. An approximation, such as a lower bound or `Delta`, differs from the expectation and is reported.

        Args:
            log_density: maps one value of each node, with its plates, to log f; None uses the method of this name.
            samples: number of draws.
            seed: for the draws.
            deviations: allowed number of standard errors.

        Returns:
            a report: `agrees`, `disagreements`, and as a string one line for each comparison.

        >>> from bayesgrad.families import Gaussian
        >>> x = Node(Gaussian(), Gaussian().of(torch.ones(1).double(), torch.eye(1).double()), name="x")
        >>> Expected(lambda mu: -mu[1][0, 0] / 2, x).check().agrees  # log N(0 | x, 1), without constants
        True
        >>> wrong = Expected(lambda mu: -mu[0][0] ** 2 / 2, x)  # E[x]² in place of E[x²]
        >>> [part.name for part in wrong.check().disagreements]
        ['value', 'message to x, part 0', 'message to x, part 1']
        """
        return compare(
            self.nodes,
            self.value(),
            [self.message(node) for node in self.nodes],
            self.log_density if log_density is None else log_density,
            samples=samples,
            seed=seed,
            deviations=deviations,
        )


class Expected(Factor):
    """Any function of the nodes' expectation parameters, differentiated by autograd.

    Args:
        function: takes the expectation parameters of each node, one tuple per node, and returns E_q[log f]. The result
            is summed over plates.

    >>> from bayesgrad.families import Gaussian
    >>> weight = Node(Gaussian(), Gaussian().of(torch.zeros(1), torch.eye(1)))
    >>> # log N(10 | x, 1/4) = -2 (x² - 20 x + 100) + constant; its message is (4 * 10, -4/2)
    >>> observed = Expected(lambda mu: -2 * (mu[1][0, 0] - 20 * mu[0][0] + 100), weight)
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
                raise ValueError(f"the function of this factor does not depend on {node}: remove the node from it.")
            return torch.autograd.grad(value, own, allow_unused=True, materialize_grads=True)

    def log_density(self, *values: Tensor) -> Tensor:
        """The function of T(x): an expectation under a point mass at x is the value at x."""
        return self.function(*[node.family.statistics(x) for node, x in zip(self.nodes, values)])


class MomentsFactor(Factor):
    """A factor of one node that needs the expectations of its logarithm and of its first two derivatives."""

    _cached: tuple[Parameters, Moments] | None = None

    @abstractmethod
    def _expected(self) -> Moments:
        """The expectations for the node's current parameters."""

    def moments(self) -> Moments:
        """`_expected`, recomputed only after the node has changed."""
        natural = self.nodes[0].natural
        if self._cached is None or self._cached[0] is not natural:
            self._cached = natural, self._expected()
        return self._cached[1]

    def value(self) -> Tensor:
        return self.moments().value.sum()


class ElementwiseFactor(MomentsFactor):
    """Σ_i log p_i(x_i) for a node whose family has marginals: one term for each value.

    Args:
        node: of a family whose `moments` are means and variances of the same shape.
        expected: maps these to E[log p_i] and the expectations of its first two derivatives, elementwise.

    Reference: Khan and Rue 2023, Eqs. 58 to 60.
    """

    def __init__(
        self, node: Node, expected: Callable[[Tensor, Tensor], Moments], *, scale: float | Tensor = 1.0
    ) -> None:
        super().__init__(node, scale=scale)
        self.expected = expected

    def _expected(self) -> Moments:
        """Expectations of each log-likelihood and its derivatives, for the node's current parameters."""
        return self.expected(*self.nodes[0].moments)

    def _message(self, node: Node) -> Parameters:
        _, first, second = self.moments()
        return gaussian_message(node, first, second)


class LinearPredictorFactor(MomentsFactor):
    r"""Σ_i log p_i(x_i'θ) for a Gaussian node θ and any likelihood, by one-dimensional expectations.

    .. math::
        \nabla_m = X^T E[\ell'], \quad \nabla_V = \tfrac12 X^T \mathrm{diag}(E[\ell'']) X

    with the derivatives of l_i = log p_i; `gaussian_message` converts them to the message.

    Args:
        node: Gaussian with a full, diagonal or fixed covariance.
        design: X, (n, P).
        log_likelihood: maps linear predictors (..., n) to log p(y_i | predictor_i) of the same shape; it holds the
            targets.
        expectation: computes E.

    Reference: Khan and Rue 2023, Eqs. 58 and 59.
    """

    def __init__(
        self,
        node: Node,
        design: Tensor,
        log_likelihood: Function,
        expectation: Expectation | None = None,
        *,
        scale: float | Tensor = 1.0,
    ) -> None:
        super().__init__(node, scale=scale)
        self._check(node, design)
        self.design, self.log_likelihood = design, log_likelihood
        self.expectation = check_expectation(GaussHermite() if expectation is None else expectation)

    def _check(self, node: Node, design: Tensor) -> None:
        check_gaussian(node)
        check_design(node, design)

    def predictor_moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of each x_i'θ, (n,)."""
        (node,) = self.nodes
        mean, covariance = node.moments
        if covariance.shape == mean.shape:
            return self.design @ mean, self.design.square() @ covariance
        return self.design @ mean, ((self.design @ covariance) * self.design).sum(-1)

    def _expected(self) -> Moments:
        """E[l_i], E[l_i'] and E[l_i''] of each example's log-likelihood l_i, for the node's current parameters."""
        return self.expectation.scalar(self.log_likelihood, *self.predictor_moments())

    def value_at_mean(self) -> Tensor:
        return self.log_likelihood(self.predictor_moments()[0]).sum()

    def log_density(self, *values: Tensor) -> Tensor:
        return self.log_likelihood(self.design @ values[0])

    def _message(self, node: Node) -> Parameters:
        _, first, second = self.moments()
        gradient = self.design.mT @ first
        if isinstance(node.family, FixedGaussian):
            return (gradient,)
        if isinstance(node.family, DiagonalGaussian):
            return gaussian_message(node, gradient, self.design.square().mT @ second)
        return gaussian_message(node, gradient, self.design.mT @ (second[:, None] * self.design))


class MultiLinearPredictorFactor(LinearPredictorFactor):
    r"""Σ_i log p_i(f_i) with f_ik = x_i'θ_k, for a full Gaussian node of K concatenated vectors, θ = (θ_1, ..., θ_K).

    .. math::
        \nabla_m = \sum_i E[\nabla\ell_i] \otimes x_i, \quad
        \nabla_V = \tfrac12 \sum_i E[\nabla^2\ell_i] \otimes x_i x_i^T

    Args:
        node: Gaussian over K P numbers.
        design: X, (n, P).
        log_likelihood: maps (..., n, K) to (..., n) and contains the data.
        expectation: computes E over K numbers.
    """

    def _check(self, node: Node, design: Tensor) -> None:
        check_finite(design=design)
        size = node.natural[0].shape[-1]
        if not isinstance(node.family, Gaussian) or size % design.shape[1]:
            raise ValueError(f"node must be a Gaussian over K * {design.shape[1]} weights, got {size} in {node}.")
        self.outputs = size // design.shape[1]

    def predictor_moments(self) -> tuple[Tensor, Tensor]:
        """Mean (n, K) and covariance (n, K, K) of each f_i."""
        (node,) = self.nodes
        mean, covariance = node.moments
        return predictor_moments(self.design, mean, covariance, self.outputs)

    def _expected(self) -> Moments:
        mean, covariance = self.predictor_moments()
        return self.expectation.rows(self.log_likelihood, mean, torch.linalg.cholesky(covariance))

    def log_density(self, *values: Tensor) -> Tensor:
        return self.log_likelihood(self.design @ values[0].view(self.outputs, -1).mT)

    def _message(self, node: Node) -> Parameters:
        _, first, second = self.moments()
        size, K = self.design.shape[1], self.outputs
        hessian = first.new_zeros(K, size, K, size)
        for j in range(K):
            for k in range(j + 1):
                block = self.design.mT @ (second[:, j, k, None] * self.design)
                hessian[j, :, k], hessian[k, :, j] = block, block
        return gaussian_message(node, (first.mT @ self.design).flatten(), hessian.view(K * size, K * size))


def predictor_moments(design: Tensor, mean: Tensor, covariance: Tensor, outputs: int) -> tuple[Tensor, Tensor]:
    """Mean (n, K) and covariance (n, K, K) of x_i'θ_k for θ of mean (K P,) and covariance (K P, K P)."""
    size = design.shape[1]
    blocks = covariance.view(outputs, size, outputs, size)
    result = design.new_empty(len(design), outputs, outputs)
    for j in range(outputs):
        for k in range(j + 1):
            result[:, j, k] = result[:, k, j] = ((design @ blocks[j, :, k]) * design).sum(-1)
    return design @ mean.view(outputs, size).mT, result


def gaussian_message(node: Node, gradient: Tensor, hessian: Tensor) -> Parameters:
    """The message to a Gaussian node, (g - H m, H/2): the derivative with respect to (m, V + mm').

    Args:
        gradient: g = E_q[∇ log f].
        hessian: H = E_q[∇² log f], or its diagonal for a diagonal Gaussian.

    Reference: Khan and Rue 2023, Eqs. 10 and 11.
    """
    mean = node.moments[0]
    if hessian.dim() == mean.dim():
        return torch.addcmul(gradient, hessian, mean, value=-1), hessian / 2
    return gradient - (hessian @ mean[..., None])[..., 0], hessian / 2


def check_design(node: Node, design: Tensor) -> None:
    check_finite(design=design)
    size, kind = node.natural[0].shape[-1], node.natural[0].dtype
    if node.family.plates(node.natural):
        raise ValueError(f"this factor needs a node of one vector, without plates, got {node}.")
    if design.dim() != 2 or design.shape[1] != size:
        raise ValueError(f"design must have {size} columns, one per weight of the node, got {tuple(design.shape)}.")
    if design.dtype != kind:
        raise ValueError(f"design must have the node's dtype, {kind}, got {design.dtype}: convert it with .to().")


def check_expectation(given: Expectation) -> Expectation:
    if not isinstance(given, Expectation):
        raise TypeError(f"expectation must be GaussHermite(), MonteCarlo() or Delta(), got {given!r}.")
    return given


def check_gaussian(node: Node) -> None:
    if not isinstance(node.family, GAUSSIANS):
        raise TypeError(f"this factor needs a Gaussian node, got {node}.")
