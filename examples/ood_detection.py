"""Out-of-distribution detection: a network that knows the digits 0 to 4 is shown 5 to 9, and noise.

    python examples/ood_detection.py

AUROC is the probability that an unknown image has a higher score than a known one.
"""

from __future__ import annotations

import torch
from digits import small, tensors
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import bayesgrad
from bayesgrad.metrics import auroc


def main(epochs: int) -> None:
    x, y, x_test, y_test = tensors()
    train = TensorDataset(x[y < 5], y[y < 5])
    loader = DataLoader(train, 50, shuffle=True, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for a, b in (batch for _ in range(epochs) for batch in loader):
        optimizer.zero_grad()
        cross_entropy(model(a), b).backward()
        optimizer.step()

    known, unknown = x_test[y_test < 5], x_test[y_test >= 5]
    noise = torch.rand(len(known), 64, generator=torch.Generator().manual_seed(0))
    # By evidence: held-out tuning is for probabilities, and may lower the AUROC.
    posterior = bayesgrad.laplace(model, loader, likelihood="categorical", structure="kron").tune_prior()
    scores = {
        "network, entropy": lambda a: posterior.ood_score(a, "entropy", method="mean"),
        "posterior, entropy": lambda a: posterior.ood_score(a, "entropy"),
        "posterior, epistemic": posterior.ood_score,
    }
    for name, score in scores.items():
        inside = score(known)
        print(
            f"{name}: noise {auroc(inside, score(noise)):.3f}, other digits: AUROC {auroc(inside, score(unknown)):.3f}"
        )


if __name__ == "__main__":
    main(epochs=10 if small() else 15)
