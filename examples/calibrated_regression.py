"""Calibrated regression on scikit-learn's diabetes data: intervals by Laplace's method, and conformal ones.

    python examples/calibrated_regression.py

Prior and noise are those with the most evidence, for which no held-out data are needed. Conformal intervals have the
right coverage for any model, by means of labelled data that were not trained on: 0.9 on average over such data, with a
deviation of 0.03 for 100 of them and as much again for 150 test rows.
"""

from __future__ import annotations

import torch
from digits import small
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import bayesgrad
from bayesgrad import conformal, metrics

TRAINED = 192  # rows; a hundred to calibrate with, and the rest to test


def standardised() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = (torch.tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order, None]
    known_x, known_y = x[:TRAINED], y[:TRAINED]
    # Back in the units of y: predictions and ends of intervals times the deviation, plus the mean.
    return (x - known_x.mean(0)) / known_x.std(0), (y - known_y.mean()) / known_y.std()


def inside(interval: tuple[torch.Tensor, torch.Tensor], y: torch.Tensor) -> str:
    lower, upper = interval
    covered = ((y >= lower) & (y <= upper)).float().mean()
    return f"width {float((upper - lower).mean()):.2f}, coverage {float(covered):.2f}"


def main(epochs: int) -> None:
    x, y = standardised()
    train = DataLoader(
        TensorDataset(x[:TRAINED], y[:TRAINED]), 32, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    held_x, held_y, test_x, test_y = x[TRAINED:292], y[TRAINED:292], x[292:], y[292:]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for a, b in (batch for _ in range(epochs) for batch in train):
        optimizer.zero_grad()
        mse_loss(model(a), b).backward()
        optimizer.step()

    with torch.no_grad():
        noise = (model(x[:TRAINED]) - y[:TRAINED]).square().mean()  # too small, if the network is overfitted
        plain = metrics.regression(model(test_x), noise.expand_as(test_y), test_y, level=0.9)
    print("nominal coverage 0.90")
    print(f"network: NLL {plain['nll']:.2f}, coverage {plain['coverage']:.2f}")
    posterior = bayesgrad.laplace(model, train, likelihood="gaussian").tune_prior()
    mean, variance = posterior.predict(test_x)
    nll = metrics.regression(mean, variance + posterior.noise_scale**2, test_y)["nll"]
    print(f"Laplace: NLL {nll:.2f}, {inside(posterior.interval(test_x, level=0.9), test_y)}")
    calibrated = conformal.calibrate_intervals(posterior.interval(held_x), held_y, level=0.9)
    print(f"conformal: {inside(calibrated(posterior.interval(test_x)), test_y)}")


if __name__ == "__main__":
    main(epochs=20 if small() else 40)
