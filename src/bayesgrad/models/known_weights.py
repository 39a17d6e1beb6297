"""Known weights of linear predictors as a Gaussian posterior."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesgrad.families import Gaussian, Parameters
from bayesgrad.models import checks

KNOWN = 1e-10  # standard deviations of weights without a variance, relative to the largest weight


class KnownWeights(NamedTuple):
    """Means, (C, P), and covariances, (C, P, C, P), of the weights of C outputs, the intercept last."""

    mean: Tensor
    covariance: Tensor

    def contrasts(self, basis: Tensor) -> tuple[Parameters, Tensor]:
        """Natural parameters of B'θ, for B (C, K), and the precision of the weights that all outputs have in common."""
        outputs, size = self.mean.shape
        width = basis.shape[1] * size
        covariance = torch.einsum("cj,cpdq,dk->jpkq", basis, self.covariance, basis).reshape(width, width)
        common = self.covariance.sum((0, 2)) / outputs
        mean = (basis.mT @ self.mean).flatten()
        return Gaussian().of(mean, torch.cholesky_inverse(_root(covariance))), torch.cholesky_inverse(_root(common))

    def expanded(self, basis: Tensor, common: Tensor) -> KnownWeights:
        """The weights of all outputs, for those of contrasts and the precision of what outputs have in common."""
        share = torch.full_like(basis @ basis.mT, 1 / len(basis))
        covariance = torch.einsum("cj,jpkq,dk->cpdq", basis, self.covariance, basis)
        covariance += torch.einsum("cd,pq->cpdq", share, torch.linalg.inv(common))
        return KnownWeights(basis @ self.mean, covariance)


def _root(covariance: Tensor) -> Tensor:
    root, failed = torch.linalg.cholesky_ex((covariance + covariance.mT) / 2)
    if failed:
        raise ValueError("coef_covariance must be a symmetric positive definite matrix, got one that is not.")
    return root


def known_weights(coef: Any, intercept: Any, coef_covariance: Any, intercept_variance: Any) -> KnownWeights:
    """Coefficients (P,) or (C, P), and intercepts (C,), a number or None, which are independent of them.

    Raises:
        ValueError: shapes do not match, numbers are not finite, or variances are not positive.
    """
    mean = torch.atleast_2d(checks.require_numbers("coef", coef))
    if mean.dim() != 2 or not mean.numel() or not torch.isfinite(mean).all():
        raise ValueError(f"coef must be finite numbers of shape (P,) or (C, P), got shape {tuple(mean.shape)}.")
    outputs, features = mean.shape
    least = (KNOWN * max(1.0, float(mean.abs().max()))) ** 2
    wide = outputs * features
    given = least * torch.eye(wide).to(mean) if coef_covariance is None else coef_covariance
    covariance = checks.require_covariance("coef_covariance", given, wide).to(mean)
    covariance = covariance.view(outputs, features, outputs, features)
    if intercept is None:
        if intercept_variance is not None:
            raise ValueError("intercept_variance needs an intercept, got None.")
        return KnownWeights(mean, covariance)
    shifts, variances = (
        torch.atleast_1d(checks.require_numbers(name, value)).to(mean)
        for name, value in (
            ("intercept", intercept),
            ("intercept_variance", torch.full((outputs,), least) if intercept_variance is None else intercept_variance),
        )
    )
    for name, part in (("intercept", shifts), ("intercept_variance", variances)):
        if part.shape != (outputs,) or not torch.isfinite(part).all():
            raise ValueError(f"{name} must be {outputs} finite numbers, one per row of coef, got {part.tolist()}.")
    if not (variances > 0).all():
        raise ValueError(f"intercept_variance must be positive, got {variances.min().item():g}.")
    whole = mean.new_zeros(outputs, features + 1, outputs, features + 1)
    whole[:, :-1, :, :-1] = covariance
    whole[:, -1, :, -1] = torch.diag(variances)
    return KnownWeights(torch.cat([mean, shifts[:, None]], 1), whole)
