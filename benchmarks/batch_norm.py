"""What BatchNorm's statistics are worth in predictions: those of training, and those of the weights that predict.

Run: python benchmarks/batch_norm.py [--write docs/results/batch-norm.md] [--epochs 15] [--seeds 2]

A perceptron (64-256-10) and a small convolutional network with BatchNorm are trained on 1344 images of scikit-learn's
digits with batches of 32 and a cosine schedule, and tested on the other 453. Predictions of the weights that
`optimizer.eval()` leaves and averages over 32 samples are computed twice: with the running statistics of training, and
with those of the weights that predict, estimated from the training images. Binary networks have no biases, BatchNorm
without weights, and outputs that are multiplied by 10.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bayesgrad import metrics, optim
from bayesgrad_lab import networks
from bayesgrad_lab.benchmarks import page

TRAIN, BATCH = 1344, 32


class Scale(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 10 * x


def mlp(binary: bool) -> nn.Sequential:
    norms = [nn.BatchNorm1d(width, affine=not binary) for width in (256, 10)]
    layers = nn.Linear(64, 256, bias=False), norms[0], nn.ReLU(), nn.Linear(256, 10, bias=False), norms[1]
    return nn.Sequential(*layers, *([Scale()] if binary else []))


def cnn(binary: bool) -> nn.Sequential:
    norms = nn.BatchNorm2d(16, affine=not binary), nn.BatchNorm1d(10, affine=not binary)
    first = nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, bias=False), norms[0], nn.ReLU(), nn.MaxPool2d(2)
    last = nn.Flatten(), nn.Linear(144, 10, bias=False), norms[1]
    return nn.Sequential(*first, *last, *([Scale()] if binary else []))


NETWORKS: dict[str, Callable[[bool], nn.Sequential]] = {"MLP": mlp, "CNN": cnn}
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "Adam, real weights, lr 3e-3": lambda m: torch.optim.Adam(m.parameters(), 3e-3),
    "STE": lambda m: optim.STE(m.parameters()),
    "BayesBiNN": lambda m: optim.BayesBiNN(m.parameters(), num_data=TRAIN),
    "BayesBiNN, relaxation 1": lambda m: optim.BayesBiNN(m.parameters(), num_data=TRAIN, relaxation=1.0),
    "BayesBiNN, `num_data` ten times as large": lambda m: optim.BayesBiNN(m.parameters(), num_data=10 * TRAIN),
    "SpikeSlab, keep 0.99": lambda m: optim.SpikeSlab(m, keep=0.99),
    "SpikeSlab, keep 0.9": lambda m: optim.SpikeSlab(m, keep=0.9),
    "SpikeSlab, keep 0.5": lambda m: optim.SpikeSlab(m, keep=0.5),
    "IVON": lambda m: optim.IVON(m.parameters(), num_data=TRAIN, hess_init=0.3, betas=(0.9, 0.9995)),
}
COLUMNS = ("`eval()`, statistics of training", "of its weights", "32 samples, statistics of training", "of each sample")


def run(network: str, name: str, seed: int, epochs: int) -> dict[str, tuple[float, float]]:
    """Column -> accuracy in per cent and log loss on the test images."""
    digits: Any = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:TRAIN], order[TRAIN:]
    binary = name.startswith(("STE", "BayesBiNN"))
    with networks.seeded(seed):
        model = NETWORKS[network](binary)
    optimizer, generator = OPTIMIZERS[name](model), torch.Generator().manual_seed(seed)
    ours = hasattr(optimizer, "sampled")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * TRAIN // BATCH)
    for _ in range(epochs):
        for rows in train[torch.randperm(TRAIN, generator=generator)].split(BATCH):
            optimizer.zero_grad()
            with optimizer.sampled() if ours else warnings.catch_warnings():
                cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()

    def scores(probabilities: Tensor) -> tuple[float, float]:
        found = metrics.classification(probabilities.detach().log(), y[test])
        return 100 * (1 - found["error"]), found["nll"]

    found = {}
    if ours:
        optimizer.eval()
    found[COLUMNS[0]] = scores(model.eval()(x[test]).softmax(1))
    if not ours:
        return found
    optimizer.eval(model, statistics=x[train])
    found[COLUMNS[1]] = scores(model(x[test]).softmax(1))
    optimizer.train()
    if name != "STE":
        posterior = optimizer.posterior(model)
        found[COLUMNS[2]] = scores(posterior.predict(x[test], statistics="running"))
        found[COLUMNS[3]] = scores(posterior.predict(x[test], statistics=x[train]))
    return found


def table(epochs: int, seeds: int) -> list[str]:
    lines = [
        "# BatchNorm in predictions",
        "",
        f"`python benchmarks/batch_norm.py`, {page.setting()}. Accuracy and log loss on 453 images of scikit-learn's "
        f"digits after {epochs} epochs, means of {seeds} seeds. The script says how this is measured.",
    ]
    for network in NETWORKS:
        lines += ["", f"## {network}", "", f"| optimizer | {' | '.join(COLUMNS)} |", "|---|---|---|---|---|"]
        for name in OPTIMIZERS:
            runs = [run(network, name, seed, epochs) for seed in range(seeds)]
            cells = []
            for column in COLUMNS:
                own = [one[column] for one in runs if column in one]
                means = [statistics.fmean(values) for values in zip(*own)]
                cells.append(f"{means[0]:.1f} %, {means[1]:.2f}" if own else "")
            lines.append(f"| {name} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = page.options(__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    page.publish(table(arguments.epochs, arguments.seeds), arguments.write)


if __name__ == "__main__":
    main()
