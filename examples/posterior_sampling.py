"""Samples from the posterior of a logistic regression: chains of Langevin and SNGD, their diagnostics and predictions.

    python examples/posterior_sampling.py

The weights of a chain do not converge: after a burn-in they are samples. R-hat near 1 says that chains with different
starts agree; the effective sample size says how many independent samples they are worth.
"""

from __future__ import annotations

import torch
from digits import small
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn.functional import cross_entropy

from bayesgrad import samplers
from bayesgrad.metrics import classification


def main(steps: int, chains: int) -> None:
    data = load_breast_cancer()
    x, y = torch.tensor(data.data[:, :10], dtype=torch.float32), torch.tensor(data.target)
    x = (x - x.mean(0)) / x.std(0)
    x_test, y_test, x, y = x[400:], y[400:], x[:400], y[:400]
    size = samplers.batch_size(temperature=1.0, lr=0.1, num_data=len(x))  # whose gradient noise has temperature 1
    options = dict(lr=0.1, num_data=len(x), prior_precision=1.0, metric="fisher", damping=1 / len(x), update_every=10)
    kinds = {
        "Langevin": (len(x), lambda model, seed: samplers.Langevin(model, seed=seed, **options)),
        "SNGD": (size, lambda model, seed: samplers.SNGD(model, batch_size=size, seed=seed, **options)),
    }
    for name, (batch, build) in kinds.items():
        ensembles = []
        for seed in range(chains):
            torch.manual_seed(seed)
            model = nn.Linear(10, 2)
            sampler = build(model, seed)
            ensemble = samplers.Ensemble(model, burn_in=steps // 5, thin=5, sampler=sampler)
            for _ in range(steps):
                rows = torch.randperm(len(x))[:batch]
                sampler.observe(model(x))  # the metric is the Fisher matrix of all data
                sampler.zero_grad()
                cross_entropy(model(x[rows]), y[rows]).backward()
                sampler.step()
                ensemble.collect()
            ensembles.append(ensemble)
        found = samplers.diagnose(ensembles)
        effective = min(float(value.min()) for value in found.ess.values())
        worst = max(float(value.max()) for value in found.rhat.values())
        scores = classification(ensembles[0].posterior().predict(x_test).log(), y_test)
        print(f"{name}: {found.samples} samples, effective {effective:.0f}; NLL {scores['nll']:.3f}; R-hat {worst:.3f}")


if __name__ == "__main__":
    main(*((1500, 2) if small() else (2000, 3)))
