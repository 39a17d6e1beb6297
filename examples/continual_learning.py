"""Continual learning: the posterior of a task is the prior of the next one, here for digits whose pixels are permuted.

    python examples/continual_learning.py

Only the penalty goes from task to task, no data.
"""

from __future__ import annotations

import torch
from digits import accuracy, loaders, network, small
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import bayesgrad


def tasks(count: int) -> list[tuple[DataLoader, DataLoader]]:
    """Loaders of training and test data of each task, which has its own order of pixels."""
    found = []
    for task in range(count):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(task))
        pair = []
        for loader in loaders():
            x, y = loader.dataset.tensors
            pair.append(DataLoader(TensorDataset(x[:, order], y), 50, shuffle=True))
        found.append(tuple(pair))
    return found


def main(count: int, epochs: int) -> None:
    for name in ("without a prior", "posterior as prior"):
        model, penalty, size = network(), None, 1500
        for train, _ in tasks(count):
            optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
            for x, y in (batch for _ in range(epochs) for batch in train):
                optimizer.zero_grad()
                loss = cross_entropy(model(x), y)
                if penalty is not None:
                    loss = loss + penalty(model) / size
                loss.backward()
                optimizer.step()
            if name == "posterior as prior":
                posterior = bayesgrad.laplace(model, train, likelihood="categorical", structure="kron")
                penalty = bayesgrad.EWC(posterior, 4.0) if penalty is None else penalty.add(posterior, 4.0)
        found = [accuracy(model, test) for _, test in tasks(count)]
        each = ", ".join(f"{value:.3f}" for value in found)
        print(f"{name}: accuracy of each task {each}; mean accuracy {sum(found) / count:.3f}")


if __name__ == "__main__":
    main(*((3, 10) if small() else (5, 20)))
