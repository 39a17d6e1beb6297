"""Laplace's method beside laplace-torch, in float64, where both have the same blocks: separate ones for biases."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import bayesgrad
from equations.test_laplace import OUT, data, dense, mlp

close = torch.testing.assert_close
pytestmark = pytest.mark.filterwarnings("ignore")  # the peer's own
PRIOR, NOISE = 0.6, 0.25
TASKS = {"categorical": "classification", "gaussian": "regression"}


def peer(structure: str, likelihood: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        laplace = pytest.importorskip("laplace")
    noise = {"sigma_noise": NOISE**0.5} if likelihood == "gaussian" else {}
    kind = dict(subset_of_weights="all", hessian_structure=structure, backend=laplace.curvature.CurvlinopsGGN)
    found = laplace.Laplace(mlp(), TASKS[likelihood], prior_precision=PRIOR, **noise, **kind)
    found.fit(DataLoader(TensorDataset(*data(likelihood)), batch_size=5))
    return found


def ours(structure: str, likelihood: str) -> Any:
    loader = DataLoader(TensorDataset(*data(likelihood)), batch_size=5)
    noise = NOISE**0.5 if likelihood == "gaussian" else 1.0
    options = dict(
        likelihood=likelihood, structure=structure, bias="separate", prior_precision=PRIOR, noise_scale=noise
    )
    return bayesgrad.laplace(mlp(), loader, **options)


@pytest.mark.parametrize("likelihood", TASKS)
@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_laplace_torch(structure: str, likelihood: str) -> None:
    """Posterior precision, evidence with its derivatives, and the variance of linearised outputs."""
    theirs, mine = peer(structure, likelihood), ours(structure, likelihood)
    precision = theirs.posterior_precision
    if structure == "kron":
        precision = precision.to_matrix()
    elif structure == "diag":
        precision = torch.diag(precision)
    close(dense(mine), precision, rtol=1e-5, atol=1e-7)

    prior, sigma = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.9, 0.5))
    given = {"sigma_noise": sigma} if likelihood == "gaussian" else {}
    expected = theirs.log_marginal_likelihood(prior_precision=prior, **given)
    found = mine.log_marginal_likelihood(prior, sigma)
    close(found, expected, rtol=1e-5, atol=0.0)
    (slope,) = torch.autograd.grad(expected, prior)
    close(torch.autograd.grad(found, prior, retain_graph=True)[0], slope, rtol=1e-5, atol=1e-8)
    if given:  # by differences, with which its own derivative (0.3) does not agree for Kronecker factors
        values = [
            theirs.log_marginal_likelihood(0.9 * torch.ones(1).double(), sigma.detach() + h) for h in (1e-4, -1e-4)
        ]
        close(torch.autograd.grad(found, sigma)[0], (values[0] - values[1]) / 2e-4, rtol=1e-5, atol=1e-8)

    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    theirs.prior_precision = PRIOR
    if given:
        theirs.sigma_noise = NOISE**0.5
    mean, covariance = theirs._glm_predictive_distribution(x)
    prediction = mine.predict(x, method="linear", likelihood="gaussian")
    close(prediction.mean, mean.detach(), rtol=1e-10, atol=1e-12)
    close(prediction.variance, covariance.detach().diagonal(dim1=1, dim2=2), rtol=1e-5, atol=1e-10)
    assert prediction.mean.shape == (4, OUT)
