"""skorch: scikit-learn's grid search over the learning rate of FOOF, which takes the model."""

from __future__ import annotations

import torch
from digits import small, tensors
from sklearn.model_selection import GridSearchCV
from torch import nn

from bayesgrad.integrations.skorch import BeliefClassifier
from bayesgrad.optim import FOOF


class Network(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        return self.layers(X)


def main(epochs: int) -> float:
    x, y, x_test, y_test = (tensor.numpy() for tensor in tensors())
    net = BeliefClassifier(
        Network,
        criterion=nn.CrossEntropyLoss,
        optimizer=FOOF,
        max_epochs=epochs,
        batch_size=50,
        verbose=0,
        train_split=None,
    )
    search = GridSearchCV(net, {"lr": [0.03, 0.3], "optimizer__damping": [1.0]}, cv=2, scoring="accuracy")
    search.fit(x, y)
    score = search.score(x_test, y_test)
    print(search.best_params_, f"accuracy {score:.3f}")
    return score


if __name__ == "__main__":
    main(epochs=3 if small() else 15)
