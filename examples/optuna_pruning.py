"""Optuna: learning rates of AdaBayesFP, with trials that are pruned by their loss on held-out data."""

from __future__ import annotations

import optuna
import torch
from digits import loaders, network, small
from torch.nn.functional import cross_entropy

from bayesgrad.integrations import build_optimizer, report
from bayesgrad.optim import AdaBayesFP


def objective(trial: optuna.Trial, epochs: int) -> float:
    train, test = loaders()
    model = network()
    lr = trial.suggest_float("lr", 1e-5, 1.0, log=True)
    optimizer = build_optimizer(AdaBayesFP, model, train, lr=lr, weight_decay=0.01)
    loss = float("inf")
    for epoch in range(epochs):
        for x, y in train:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            loss = float(sum(cross_entropy(model(x), y) for x, y in test) / len(test))
        report(trial, {"loss": loss}, "loss", epoch)
    return loss


def main(trials: int, epochs: int) -> float:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0), pruner=optuna.pruners.MedianPruner(3, 1))
    study.optimize(lambda trial: objective(trial, epochs), n_trials=trials)
    pruned = sum(trial.state == optuna.trial.TrialState.PRUNED for trial in study.trials)
    print(f"{pruned} of {trials} trials pruned; best lr {study.best_params['lr']:.2g}, loss {study.best_value:.3f}")
    return study.best_value


if __name__ == "__main__":
    main(*((8, 3) if small() else (25, 10)))
