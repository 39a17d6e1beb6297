"""Benzing 2021: KFAC and FOOF beat the exact natural gradient that KFAC approximates.

All train the same perceptron on the same 1,500 digits for 100 steps. Were KFAC good because it approximates natural
gradients, the exact ones would be better. FOOF, which has the factor of the inputs alone, explains why they are not:
what helps is a step in the outputs of neurons. (One seed and one setting each;
[results](../../docs/results/README.md) has searches and seeds.)
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from bayesgrad.optim import FOOF, KFAC, NaturalGradient

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images[:1500], dtype=torch.float32) / 16, torch.tensor(labels[:1500])
rules = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "exact natural gradients": lambda model: NaturalGradient(model, lr=0.1, momentum=0, update_every=10, seed=0),
    "KFAC": lambda model: KFAC(model, lr=0.1, seed=0),
    "FOOF": lambda model: FOOF(model, lr=0.1),
}
for name, rule in rules.items():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = rule(model)
    for _ in range(100):
        rows = torch.randint(1500, (100,))
        optimizer.zero_grad()
        outputs = model(x[rows])
        if hasattr(optimizer, "observe"):
            optimizer.observe(outputs)
        cross_entropy(outputs, y[rows]).backward()
        optimizer.step()
    print(f"{name}: training loss {cross_entropy(model(x), y).item():.3f}")
