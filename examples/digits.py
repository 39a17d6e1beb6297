"""scikit-learn's digits, and a network for them: shared by examples."""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def small() -> bool:
    """Whether the script was started with --small, as the tests do."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true", help="a shorter run")
    return parser.parse_args().small


def tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs and labels for training, and for testing."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return x[:1500], y[:1500], x[1500:], y[1500:]


def loaders(batch_size: int = 50) -> tuple[DataLoader, DataLoader]:
    x, y, x_test, y_test = tensors()
    shuffled = torch.Generator().manual_seed(0)
    train = DataLoader(TensorDataset(x, y), batch_size, shuffle=True, generator=shuffled)
    return train, DataLoader(TensorDataset(x_test, y_test), 300)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def accuracy(model: nn.Module, loader: DataLoader) -> float:
    """In evaluation mode; the optimizer has switched to the weights to evaluate with."""
    model.eval()
    with torch.no_grad():
        right = [(model(x).argmax(1) == y).float() for x, y in loader]
    return float(torch.cat(right).mean())
