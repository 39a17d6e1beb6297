"""Replace AdamW: a small CNN on images of digits, trained by AdamW, FOOF and IVON in the same loop.

    python examples/replace_adamw.py

IVON trains a posterior, so that its predictions are averages over sampled weights.
"""

from __future__ import annotations

import torch
from digits import loaders, small, tensors
from torch import nn
from torch.nn.functional import cross_entropy

from bayesgrad.integrations import attach, build_optimizer
from bayesgrad.metrics import classification
from bayesgrad.optim import FOOF, IVON


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def main(epochs: int) -> None:
    _, _, x_test, y_test = tensors()
    rules = [
        (torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.01}),
        (FOOF, {"lr": 0.3}),
        (IVON, {"lr": 0.5, "betas": (0.9, 0.995), "seed": 0}),
    ]
    for kind, options in rules:
        model, train = cnn(), loaders()[0]
        if kind is torch.optim.AdamW:
            optimizer = kind(model.parameters(), **options)
        else:
            optimizer = build_optimizer(kind, model, train, **options)
            attach(optimizer, model)  # draws of weights, where a rule needs them
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(train))
        for x, y in (batch for _ in range(epochs) for batch in train):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
        model.eval()
        logs = model(x_test).detach().log_softmax(1)
        if kind is IVON:
            logs = optimizer.posterior(model).predict(x_test, samples=32).log()
        scores = classification(logs, y_test)
        print(f"{kind.__name__}: NLL {scores['nll']:.3f}, accuracy {1 - scores['error']:.3f}")


if __name__ == "__main__":
    main(epochs=3 if small() else 15)
