"""A binary network: every weight is -1 or 1, and BayesBiNN learns a probability for each sign.

python examples/binary_network.py
"""

from __future__ import annotations

import torch
from digits import loaders, small, tensors
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bayesgrad.metrics import classification
from bayesgrad.optim import BayesBiNN


class Scaled(nn.Module):
    """Normalised outputs have size one, which is too small for confident predictions."""

    def forward(self, x: Tensor) -> Tensor:
        return 10 * x


def binary() -> nn.Module:
    """Without biases, and without weights in BatchNorm: every parameter becomes binary."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 256, bias=False),
        nn.BatchNorm1d(256, affine=False),
        nn.ReLU(),
        nn.Linear(256, 10, bias=False),
        nn.BatchNorm1d(10, affine=False),
        Scaled(),
    )


def main(epochs: int) -> None:
    model, train = binary(), loaders()[0]
    x, _, x_test, y_test = tensors()
    optimizer = BayesBiNN(model.named_parameters(), lr=3e-3, num_data=len(x), seed=0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(train))
    for a, b in (batch for _ in range(epochs) for batch in train):
        optimizer.zero_grad()
        with optimizer.sampled():  # relaxed weights between -1 and 1
            cross_entropy(model(a), b).backward()
        optimizer.step()
        schedule.step()

    posterior = optimizer.posterior(model)  # statistics=x: BatchNorm's are estimated for the weights that predict
    for name, options in (("most probable network", {"method": "mode"}), ("average of 32", {"samples": 32, "seed": 0})):
        scores = classification(posterior.predict(x_test, statistics=x, **options).log(), y_test)
        print(f"{name}: NLL {scores['nll']:.3f}, accuracy {1 - scores['error']:.3f}")
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    print(f"{len(weights)} weights, values {sorted(set(weights.tolist()))}")


if __name__ == "__main__":
    main(epochs=5 if small() else 30)
