"""Laplace's method for data with padding: labels that are ignored, tokens without a gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bayesgrad.likelihoods import Categorical
from equations.test_laplace import OUT, PRIOR, N, batches, data, dense, eye, fitted, gauss_newton, mlp

close = torch.testing.assert_close


def test_the_padding_of_an_embedding_does_not_count() -> None:
    """Its row has no gradient: A and the number of positions are those without it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 3, padding_idx=0), nn.Flatten(), nn.Linear(9, OUT)).double()
    x, y = torch.tensor([[0, 2, 1], [0, 0, 2], [0, 0, 0]]), torch.arange(3)
    total = gauss_newton(model, x, y, "categorical")[:12, :12].view(4, 3, 4, 3)
    errors = torch.einsum("kakb->ab", total) / 3  # three lookups of different examples, or of different tokens
    between = total[1, :, 2] + total[2, :, 1]  # of the two tokens in the first example, for which factors have no entry
    assert between.abs().max() > 0
    counts = torch.diag(torch.tensor([0.0, 1, 2, 0], dtype=torch.float64))
    options: dict[str, Any] = dict(params=["0"], loader=[(x, y)])
    close(dense(fitted(model, "kron", **options)), torch.kron(counts, errors) + PRIOR * eye(12))
    close(dense(fitted(model, "input", **options)), torch.kron(counts, eye(3)) + PRIOR * eye(12))
    only = dense(fitted(model, "kron", params=["0"], loader=[(torch.zeros_like(x), y)]))
    close(only, PRIOR * eye(12))


@pytest.mark.parametrize("structure", ["diag", "full"])
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_ignored_labels_have_no_loss(fisher: str, structure: str) -> None:
    """The posterior is that of the other examples, and so are bounds and scores of held-out data."""
    x, y = data()
    ignored = y.where(torch.arange(N) % 3 > 0, -100)
    some = [(x[ignored >= 0], y[ignored >= 0])]
    mine, expected = (
        fitted(mlp(), structure, loader=loader, fisher=fisher, seed=0) for loader in (batches(x, ignored), some)
    )
    close(dense(mine), dense(expected))
    close(mine.log_marginal_likelihood(), expected.log_marginal_likelihood())
    bounds = [mine.elbo(loader, prior_precision=1.0, samples=2).value for loader in ([(x, ignored)], some)]
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-10)
    outputs = mlp()(x).detach()
    scores = [
        Categorical().log_density(outputs, outputs.square(), labels) for labels in (ignored, y)
    ]  # of held-out data
    close(scores[0], scores[1] * (ignored >= 0))
    drawn = fitted(mlp(), "full", loader=[(x, torch.full_like(y, -100))], fisher="sampled")
    close(dense(drawn), PRIOR * eye(drawn.mean["0.weight"].numel() + 23))
