"""Hyperparameters of generalised linear models that maximise the bound on the evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bayesgrad.models.designs import Design
from bayesgrad.models.linear_posterior import Belief, LinearPosterior, Outcome
from bayesgrad.models.observations import fit_hyperparameters

OFF = 1e10  # precision of a prior, in units of that of the data, at which a column is switched off
FLAT = 1e-6  # precision of the prior of an intercept, for targets of unit size
Fit = Callable[[LinearPosterior, Belief | None], Outcome]


def maximise_evidence(
    posterior: LinearPosterior,
    fit: Fit,
    *,
    prior: str | None,
    names: Sequence[str],
    features: int,
    max_iter: int,
    tol: float,
) -> tuple[LinearPosterior, Outcome]:
    r"""Alternates between the posterior and its hyperparameters, until the relative change of the bound is below tol.

    MacKay's fixed point for the precisions of a prior and for Gaussian noise,

    .. math::
        \gamma_j = 1 - \alpha_j V_{jj}, \quad \alpha_j \leftarrow \gamma_j / m_j^2, \quad
        s^2 \leftarrow |y - Xm|^2 / (n - \textstyle\sum_j \gamma_j)

    takes few iterations. Where it would decrease the bound, the slower step of EM replaces it, which never does.
    A column of zeros, on which the bound does not depend, is switched off.

    Args:
        fit: the outcome of a posterior, from the last belief.
        prior: `"one"` precision for all columns, or `"each"` column its own; None if it is given.
        names: the hyperparameters of the observation model to learn.
        features: number of columns of X without the intercept.

    Reference: MacKay, 1992; Tipping, 2001; Bishop, 2006, section 3.5.2.
    Checked by: tests/equations/test_linear_posterior.py.
    """
    outcome = fit(posterior, None)
    elbos = [outcome.elbos[-1]]
    for _ in range(max_iter):
        for candidate in _candidates(posterior, outcome.belief, prior, list(names), features):
            found = fit(candidate, outcome.belief)
            if found.elbos[-1] >= elbos[-1] - 1e-10 * max(1.0, abs(elbos[-1])):
                break
        else:
            return posterior, Outcome(outcome.belief, elbos, True)  # to rounding
        posterior, outcome = candidate, found
        elbos.append(max(elbos[-1], found.elbos[-1]))
        if elbos[-1] - elbos[-2] <= tol * max(1.0, abs(elbos[-1])) and tol:
            return posterior, Outcome(outcome.belief, elbos, True)
    return posterior, Outcome(outcome.belief, elbos, False)


def first_precision(
    prior: str, design: Design, y: Tensor, weights: Tensor | None, observation: Any, features: int
) -> Tensor:
    """A prior of the coefficients that is worth one row, (P, P), where the search for a better one starts.

    A column of zeros, about which the data say nothing, has that of the mean of the others.
    """
    ones = torch.ones_like(y) if weights is None else weights
    total = ones.sum()
    squares, sums = design.gram(ones).diagonal(), design.pull(ones)
    least = 1e-12 * squares.max() / total + torch.finfo(y.dtype).tiny
    spread = (squares / total - (sums / total).square())[:features].clamp(min=float(least))
    seen = squares[:features] > 0
    spread = torch.where(seen, spread, spread[seen].mean() if seen.any() else 1.0)
    if observation.classifies:
        spread = spread / 4  # at most the information of a label about its logit
    elif observation.least_squares:
        spread = spread / max(float(y.var(correction=0)), torch.finfo(y.dtype).tiny)
    return torch.diag(spread if prior == "each" else spread.mean().expand(features))


def flat_precision(y: Tensor, weights: Tensor | None, offsets: Tensor | None, observation: Any) -> float:
    """The precision of a nearly flat prior of the intercept, in units of targets that are numbers and above 1."""
    if not observation.least_squares:
        return FLAT
    squares = (y if offsets is None else y - offsets).square()
    size = float(squares.mean() if weights is None else weights @ squares / weights.sum())
    return max(FLAT / max(1.0, size), torch.finfo(y.dtype).tiny)


def _candidates(
    posterior: LinearPosterior, belief: Belief, prior: str | None, names: list[str], features: int
) -> Iterator[LinearPosterior]:
    """The posterior with the hyperparameters of MacKay's step, and with those of EM."""
    covariance = torch.cholesky_inverse(belief.factor)
    for mackay in (True, False):
        precision, observation = posterior.precision, posterior.observation
        if prior is not None:
            precision = _prior_precision(posterior, belief, covariance, prior, features, mackay)
        if names:
            observation = _noise(posterior, belief, covariance, names, mackay)
        yield posterior.with_hyperparameters(observation, precision)


def _prior_precision(
    posterior: LinearPosterior, belief: Belief, covariance: Tensor, prior: str, features: int, mackay: bool
) -> Tensor:
    K = posterior.outputs
    alpha, variance, data, mean = (
        part.view(K, -1)[:, :features]
        for part in (
            posterior.precision.diagonal(),
            covariance.diagonal(),
            (belief.precision - posterior.precision).diagonal(),
            belief.mean,
        )
    )
    dims = (0, 1) if prior == "one" else 0
    if mackay:
        found = (1 - alpha * variance).clamp(min=0).sum(dims) / mean.square().sum(dims)
    else:
        found = torch.ones_like(mean).sum(dims) / (mean.square() + variance).sum(dims)
    scale = data.clamp(min=torch.finfo(data.dtype).tiny).mean(dims)
    known = scale.max()  # columns without data are switched off in units of the others, if there are any
    most = OFF * torch.where(scale > torch.finfo(data.dtype).eps ** 2 * known, scale, known)
    found = torch.minimum(torch.nan_to_num(found, nan=torch.inf, posinf=torch.inf), most)
    if not bool((data > 0).any()):
        found = alpha.mean(dims)
    diagonal = posterior.precision.diagonal().clone().view(K, -1)
    diagonal[:, :features] = found
    return torch.diag(diagonal.flatten())


def _noise(posterior: LinearPosterior, belief: Belief, covariance: Tensor, names: list[str], mackay: bool) -> Any:
    observation, y = posterior.observation, posterior.y
    z, weights = belief.predictors, posterior.weights
    if not observation.conjugate:
        found: Any = fit_hyperparameters(observation, names, z, posterior.spread(covariance), y, weights)
    else:
        errors, count = (y - z).square(), float(len(y) if weights is None else weights.sum())
        total = float(errors.sum() if weights is None else weights @ errors)
        gamma = len(belief.mean) - float((posterior.precision * covariance).sum())
        scale = float(observation.scale)
        square = total / (count - gamma) if mackay and count > gamma else (total + gamma * scale**2) / count
        found = replace(observation, scale=max(square, torch.finfo(y.dtype).tiny) ** 0.5)
    if not float(found.scale) > 1e-8 * float(y.abs().max()):
        raise ValueError("noise_scale cannot be learned because X explains y without noise: pass a number.")
    return found
