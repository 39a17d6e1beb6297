"""The Gaussian posterior over the weights of linear predictors, by the Bayesian learning rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesgrad.inference.engine import ProgressLine
from bayesgrad.inference.expectation import Delta, Expectation, Moments
from bayesgrad.models.designs import Design
from bayesgrad.models.multinomial import Multinomial
from bayesgrad.models.quadrature import Expected

HALVINGS = 40
ROUGH = 0.5  # nats that Newton's method may be below the mode, where a variational posterior starts
SLACK = 1e-12  # relative rounding errors of a bound
ZERO = torch.zeros(())
POINTS = 1 << 21  # numbers that a quadrature evaluates at a time


class Shape(NamedTuple):
    """A precision, its lower Cholesky factor and its inverse, (K P, K P), and the (co)variances of x'θ."""

    precision: Tensor
    factor: Tensor
    covariance: Tensor
    spread: Tensor


class Belief(NamedTuple):
    """N(mean, precision^-1), with what the next step needs.

    Shapes are those of K predictors for each row, of `Multinomial`; with one, all those of rows are (n,).

    Args:
        mean: (K P,).
        predictors: E[x'θ + o], (n, K).
        precision, factor: (K P, K P), and the lower Cholesky factor.
        pulled: Λ (mean - m_0), (K P,).
        first, second: E[l'], (n, K), and E[l''], (n, K, K), of the log-likelihood of each row.
        covariance, spread: of θ, (K P, K P), and of x'θ, (n, K, K); zero for `Delta`.
        third: E[l^(3)], (n,), of one predictor, where it is known.
        objective: what a step must not decrease: the log joint density at the mean for `Delta`, else the bound.
        elbo: the bound on the log evidence.
    """

    mean: Tensor
    predictors: Tensor
    precision: Tensor
    factor: Tensor
    pulled: Tensor
    first: Tensor
    second: Tensor
    objective: float
    elbo: float
    covariance: Tensor = ZERO
    spread: Tensor = ZERO
    third: Tensor | None = None


class Outcome(NamedTuple):
    """The last belief, the bound before the first step and after each, and whether it converged."""

    belief: Belief
    elbos: list[float]
    converged: bool


@dataclass(frozen=True, eq=False)
class LinearPosterior:
    r"""log N(θ | m_0, Λ^-1) + Σ_i w_i log p(y_i | x_i'θ + o_i), and the steps to its best Gaussian:

    .. math::
        S \leftarrow (1-\rho) S + \rho\left(\Lambda - X^T E_{m, S}[w \ell''] X\right), \quad
        m \leftarrow m + \rho S^{-1} \left(X^T E_{m, S}[w \ell'] - \Lambda (m - m_0)\right)

    The second uses the S of the first, also in its expectation: it is Newton's method for the bound as a function of m.
    With the old S in it, as in `inference.step`, the mean follows the variances by a step, and three times as many are
    needed. With `Delta` and rho = 1 both are Newton's method.

    Args:
        design: X.
        y: (n,).
        observation: p(y | f); `Multinomial` has K predictors for each row, others one.
        expectation: makes an Expectation for each chunk of rows, from its number.
        mean, precision: m_0 and Λ.
        weights: w, (n,), or None.
        offset: o, (n, K), or (n,) for one predictor, or None.
        progress: is updated after each step.

    Checked by: tests/equations/test_linear_posterior.py.
    """

    design: Design
    y: Tensor
    observation: Any  # an Observation, or Multinomial
    expectation: Callable[[int], Expectation]
    mean: Tensor
    precision: Tensor
    weights: Tensor | None = None
    offset: Tensor | None = None
    progress: ProgressLine | None = None

    @property
    def outputs(self) -> int:
        return len(self.mean) // self.design.shape[1]

    @cached_property
    def many(self) -> bool:
        """Whether rows have vectors of predictors."""
        return isinstance(self.observation, Multinomial)

    @property
    def at_mean(self) -> bool:
        """Whether expectations are evaluated at the mean: with `Delta`, and where that is exact."""
        return self.observation.conjugate or isinstance(self.expectation(0), Delta)

    def with_hyperparameters(self, observation: Any, precision: Tensor) -> LinearPosterior:
        """The same data with another observation model and another prior precision."""
        found = replace(self, observation=observation, precision=precision)
        if self.observation.conjugate:
            vars(found)["_unit_gram"] = self._unit_gram
        return found

    # --- beliefs ---

    def predictors(self, mean: Tensor) -> Tensor:
        """E[x'θ + o]."""
        z = self.design.predict(mean.view(self.outputs, -1).mT if self.many else mean)
        return z if self.offset is None else z + self.offset

    def laplace(self, mean: Tensor) -> Belief | None:
        """The Laplace approximation at a mean; None if its precision is not positive definite.

        Where log p is not concave, Fisher's information replaces a curvature that is not positive definite.
        """
        z = self.predictors(mean)
        if self.many:
            value, first, second = self.observation.derivatives(self.y, z[None], z.new_ones(1))
        else:
            value, first, second = self.observation.derivatives(z, self.y)
        precision = self.curvature(second)
        factor, failed = torch.linalg.cholesky_ex(precision)
        if failed and not self.observation.concave:
            precision = self.curvature(-self.observation.information(z))
            factor, failed = torch.linalg.cholesky_ex(precision)
        if failed:
            return None
        joint, pulled = self._log_joint(mean, value)
        return Belief(mean, z, precision, factor, pulled, first, second, joint, joint - _half_volume(factor))

    def variational(self, mean: Tensor, shape: Shape) -> Belief:
        z = self.predictors(mean)
        (value, first, second), third = self._expected(z, shape.spread)
        joint, pulled = self._log_joint(mean, value)
        width = (len(mean) - float((self.precision * shape.covariance).sum())) / 2
        elbo = joint + width - _half_volume(shape.factor)
        found = (mean, z, shape.precision, shape.factor, pulled, first, second, elbo, elbo)
        return Belief(*found, shape.covariance, shape.spread, third)

    def _shape(self, precision: Tensor) -> Shape | None:
        """None if the precision is not positive definite."""
        factor, failed = torch.linalg.cholesky_ex(precision)
        if failed:
            return None
        covariance = torch.cholesky_inverse(factor)
        return Shape(precision, factor, covariance, self.spread(covariance))

    def spread(self, covariance: Tensor) -> Tensor:
        """The variances of x'θ, (n,), or the covariances, (n, K, K), for that of θ."""
        if self.many:
            return predictor_covariances(self.design, covariance, self.outputs)
        return self.design.quadratic(covariance)

    def _log_joint(self, mean: Tensor, value: Tensor) -> tuple[float, Tensor]:
        """Without the factor (2π)^(-D/2) of the prior, which that of the posterior cancels; and Λ (mean - m_0)."""
        away = mean - self.mean
        pulled = self.precision @ away
        likelihood = value.sum() if self.weights is None else self.weights @ value
        return float(likelihood) + self._prior_volume - float(away @ pulled) / 2, pulled

    @cached_property
    def _prior_volume(self) -> float:
        return _half_volume(torch.linalg.cholesky(self.precision))

    @cached_property
    def _unit_gram(self) -> Tensor:
        """X' diag(w) X, of noise of scale 1."""
        return self.design.gram(torch.ones_like(self.y) if self.weights is None else self.weights)

    def _expected(self, z: Tensor, spread: Tensor) -> Expected:
        size = max(1, POINTS // (512 * self.outputs if self.many else 32))
        if len(z) <= size:
            return self._chunk(z, spread, self.y, self.expectation(0))
        parts = [part.split(size) for part in (z, spread, self.y)]
        chunks = enumerate(zip(*parts))
        found = [self._chunk(z, own, y, self.expectation(place)) for place, (z, own, y) in chunks]
        moments = Moments(*[torch.cat(part) for part in zip(*[one.moments for one in found])])
        thirds = [one.third for one in found if one.third is not None]
        return Expected(moments, torch.cat(thirds) if thirds else None)

    def _chunk(self, z: Tensor, spread: Tensor, y: Tensor, expectation: Expectation) -> Expected:
        if self.many:
            return Expected(self.observation.expected(z, spread, y, expectation), None)
        return self.observation.expected_to_third(z, spread, y, expectation)

    def curvature(self, second: Tensor) -> Tensor:
        """Λ - X' E[w l''] X, for E[l'']."""
        if self.observation.conjugate:
            return torch.add(self.precision, self._unit_gram, alpha=1 / float(self.observation.scale) ** 2)
        second = -self._weighted(second)
        if not self.many:
            return self.precision + self.design.gram(second)
        K, P = self.outputs, self.design.shape[1]
        found = second.new_zeros(K, P, K, P)
        for j in range(K):
            for k in range(j + 1):
                found[j, :, k] = found[k, :, j] = self.design.gram(second[:, j, k])
        return self.precision + found.view(K * P, K * P)

    def _weighted(self, rows: Tensor) -> Tensor:
        return rows if self.weights is None else self.weights.view(-1, *[1] * (rows.dim() - 1)) * rows

    def _gradient(self, belief: Belief, first: Tensor) -> Tensor:
        found = self.design.pull(self._weighted(first))
        return (found.mT.flatten() if self.many else found) - belief.pulled

    # --- steps ---

    def guess(self, *, intercept: bool, new: bool) -> Tensor:
        """The prior mean, with an intercept for the mean of the targets; a linear regression for heavy tails."""
        observation, y, mean = self.observation, self.y, self.mean.clone()
        if not new or observation.classifies or observation.conjugate:
            return mean
        weights = torch.ones_like(y) if self.weights is None else self.weights
        shifts = observation.start(y) - (0 if self.offset is None else self.offset)
        if observation.least_squares:
            weights = weights * observation.information(y)
            precision = self.precision + self.design.gram(weights)
            return torch.linalg.solve(precision, self.design.pull(weights * shifts))
        if intercept:
            mean[-1] = (weights * shifts).sum() / weights.sum()
        return mean

    def start(self, mean: Tensor) -> Belief:
        """The first belief: for `Delta` at this mean, else near the mode, where few steps of full cost are left.

        Raises:
            ValueError: the bound is infinite or NaN.
        """
        found = self.laplace(mean)
        if found is not None and not self.at_mean:
            found = self._newton(found, max_iter=20, tol=ROUGH, relative=False, rho=1.0).belief
            third = None if self.many else self.observation.third_derivative(found.predictors)
            mode, precision = found._replace(third=third), found.precision
            for _ in range(HALVINGS):  # under a broad prior E[exp(x'θ)] overflows
                found = self._moved(mode, precision, 1.0)
                if found is not None and math.isfinite(found.elbo):
                    break
                precision = 4 * precision
        if found is None or not math.isfinite(found.elbo):
            raise ValueError(
                "the log-likelihood of the first step is infinite or NaN: check for numbers of very different sizes "
                "in X and y, scale the columns of X, or use a larger prior_precision."
            )
        return found

    def run(self, belief: Belief, *, max_iter: int, tol: float, rho: float) -> Outcome:
        """Steps until the bound would still change by less than tol, relative to its size."""
        if self.at_mean:
            return self._newton(belief, max_iter=max_iter, tol=1e-3 * tol, relative=True, rho=rho)
        elbos, before = [belief.elbo], None
        for _ in range(max_iter):
            target = self.curvature(belief.second)
            change = target - belief.precision
            latest = target, belief.covariance @ change
            faster = change if before is None else change - _anderson(before, latest)
            before, found = latest, self._step(belief, change, faster, rho, tol)
            if found is None:
                return Outcome(belief, elbos, True)
            belief = found
            elbos.append(self._report(belief, len(elbos)))
            if tol and _rest(elbos) <= tol * max(1.0, abs(elbos[-1])):
                return Outcome(belief, elbos, True)
        return Outcome(belief, elbos, False)

    def _newton(self, belief: Belief, *, max_iter: int, tol: float, relative: bool, rho: float) -> Outcome:
        """Newton's method, until a step would increase the log joint density by less than tol."""
        elbos = [belief.elbo]
        for _ in range(max_iter):
            gradient = self._gradient(belief, belief.first)
            direction, size = _solve(belief.factor, gradient), rho
            if float(gradient @ direction) / 2 <= tol * (max(1.0, abs(elbos[-1])) if relative else 1):
                return Outcome(belief, elbos, True)
            for _ in range(HALVINGS):
                found = self.laplace(torch.add(belief.mean, direction, alpha=size))
                if found is not None and _not_below(found, belief):
                    break
                size /= 2
            else:
                return Outcome(belief, elbos, True)  # to rounding
            belief = found
            elbos.append(self._report(belief, len(elbos)))
        return Outcome(belief, elbos, False)

    def _report(self, belief: Belief, step: int) -> float:
        if self.progress is not None:
            self.progress.update(step, belief.elbo)
        return belief.elbo

    def _moved(self, belief: Belief, precision: Tensor, size: float) -> Belief | None:
        """This precision, and a step of the mean given it; None if it is not positive definite."""
        shape = self._shape(precision)
        if shape is None:
            return None
        if belief.third is None:
            first = self._expected(belief.predictors, shape.spread).moments.first
        else:  # the derivative of E[l'] by the variance is E[l^(3)]/2
            first = belief.first + belief.third * (shape.spread - belief.spread) / 2
        direction = _solve(shape.factor, self._gradient(belief, first))
        return self.variational(torch.add(belief.mean, direction, alpha=size), shape)

    def _step(self, belief: Belief, change: Tensor, faster: Tensor, rho: float, tol: float) -> Belief | None:
        """One step, halved until the bound does not decrease; None if no step is left.

        Args:
            change: of the precision, in a full step.
            faster: the one to try first.
            tol: how much of the bound is not worth another try.
        """
        for goal, size in chain([(faster, rho)], ((change, rho / 2**k) for k in range(HALVINGS))):
            found = self._moved(belief, torch.add(belief.precision, goal, alpha=size), size)
            if found is not None and _not_below(found, belief):
                return found
            if found is not None and goal is change and abs(found.elbo - belief.elbo) <= tol * abs(belief.elbo):
                return None
        return None


def _rest(elbos: list[float]) -> float:
    """What further steps would add if each added the same fraction of the one before, at most the last change."""
    changes = [abs(b - a) for a, b in zip(elbos[-3:], elbos[-3:][1:])]
    ratio = changes[-1] / changes[-2] if len(changes) == 2 and changes[-2] > 0 else 1.0
    return changes[-1] * (ratio / (1 - ratio) if ratio < 0.5 else 1.0)


def _anderson(before: tuple[Tensor, Tensor], latest: tuple[Tensor, Tensor]) -> Tensor:
    """What Anderson's method with one step of memory subtracts from the next change of the precision.

    Args:
        before, latest: targets of the last two steps and V times their distances from the precision. Distances that
            shrink by a constant factor, or alternate in sign, vanish with it.
    """
    turn = latest[1] - before[1]
    mirrored = turn.mT
    square = float((turn * mirrored).sum())
    share = float((latest[1] * mirrored).sum()) / square if square > 0 else 0.0
    return min(max(share, -1.0), 0.75) * (latest[0] - before[0])


def predictor_covariances(design: Design, covariance: Tensor, outputs: int) -> Tensor:
    """The covariance of the K predictors x'θ_k of each row, (n, K, K), for that of θ, (K P, K P)."""
    size = design.shape[1]
    blocks = covariance.view(outputs, size, outputs, size)
    found = covariance.new_empty(design.shape[0], outputs, outputs)
    for j in range(outputs):
        for k in range(j + 1):
            found[:, j, k] = found[:, k, j] = design.quadratic(blocks[j, :, k])
    return found


def _half_volume(factor: Tensor) -> float:
    """log |S| / 2, for the Cholesky factor of S."""
    return float(factor.diagonal().log().sum())


def _solve(factor: Tensor, vector: Tensor) -> Tensor:
    return torch.cholesky_solve(vector[:, None], factor)[:, 0]


def _not_below(found: Belief, before: Belief) -> bool:
    return found.objective >= before.objective - SLACK * abs(before.objective)
