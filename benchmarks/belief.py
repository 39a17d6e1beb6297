"""What AdaBayes believes: how its variance follows the learning rate, and what its samples are worth.

Run: python benchmarks/belief.py [--seeds 5] [--write docs/results/adabayes.md]

The first table is deterministic. The second trains a small MLP on scikit-learn's digits and predicts with the mean
weights, with samples of the filter's own variance, and with samples whose variance is scaled by a factor that was
chosen on validation likelihood; the test set is read once, at the end.
"""

from __future__ import annotations

import math
import statistics
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

from bayesgrad.optim import AdaBayes
from bayesgrad_lab.benchmarks import page

BATCH = 32
SCALES = [10 ** (k / 4) for k in range(-20, 5)]


def follow_table() -> list[str]:
    """sigma_post^2 after lr has fallen tenfold, relative to before; a constant gradient in every step."""
    checkpoints = (1, 100, 1000, 10_000)
    lines = ["| gradient of the summed loss | follow_lr | " + " | ".join(f"{t:,} steps" for t in checkpoints) + " |"]
    lines.append("|---" * (2 + len(checkpoints)) + "|")
    for rms in (0.1, 1.0, 10.0):
        for follow in (True, False):
            model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
            optimizer = AdaBayes(model.parameters(), lr=1e-3, batch_size=128, follow_lr=follow)
            model.weight.grad = torch.full_like(model.weight, rms / 128)
            for _ in range(8000):
                optimizer.step()
            before = optimizer.posterior(model).variance()["weight"].item()
            optimizer.param_groups[0]["lr"] = 1e-4
            ratios = {}
            for t in range(1, checkpoints[-1] + 1):
                optimizer.step()
                if t in checkpoints:
                    ratios[t] = optimizer.posterior(model).variance()["weight"].item() / before
            cells = " | ".join(f"{ratios[t]:.3f}" for t in checkpoints)
            lines.append(f"| {rms:g} | {follow} | {cells} |")
    return lines


def scores(probabilities: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Accuracy, negative log-likelihood and expected calibration error in 15 equal bins."""
    confidence, predicted = probabilities.max(1)
    correct = (predicted == labels).double()
    bins = (confidence * 15).long().clamp(max=14)
    gaps = [
        (bins == b).double().mean() * (correct[bins == b].mean() - confidence[bins == b].mean()).abs()
        for b in bins.unique()
    ]
    likelihood = probabilities.gather(1, labels[:, None]).clamp(min=1e-12).log()
    return {"accuracy": correct.mean().item(), "NLL": -likelihood.mean().item(), "ECE": float(sum(gaps))}


def posterior_scores(seed: int, epochs: int) -> dict[str, dict[str, float]]:
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, validation, test = order[:1000], order[1000:1350], order[1350:]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = AdaBayes(model.parameters(), batch_size=BATCH)
    for _ in range(epochs):
        for part in train[torch.randperm(len(train))].split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()

    def nll(scale: float) -> float:
        return scores(optimizer.posterior(model, scale).predict(x[validation], 32), y[validation])["NLL"]

    best = min(SCALES, key=nll)
    raw, tuned = optimizer.posterior(model), optimizer.posterior(model, best)
    return {
        "mean weights": scores(raw.predict(x[test], method="mean"), y[test]),
        "samples, scale 1": scores(raw.predict(x[test], 32), y[test]),
        "samples, tuned scale": scores(tuned.predict(x[test], 32), y[test]) | {"scale": best},
    }


def posterior_table(seeds: int, epochs: int) -> list[str]:
    runs = []
    for seed in range(seeds):
        print(f"\r  seed {seed + 1}/{seeds}", end="", file=sys.stderr, flush=True)
        runs.append(posterior_scores(seed, epochs))
    print(file=sys.stderr)
    lines = ["| prediction | accuracy | NLL | ECE | scale |", "|---|---|---|---|---|"]
    for kind in runs[0]:
        cells = []
        for metric in ("accuracy", "NLL", "ECE"):
            values = [run[kind][metric] for run in runs]
            error = statistics.stdev(values) / math.sqrt(seeds) if seeds > 1 else math.nan
            cells.append(f"{statistics.mean(values):.4f} ± {error:.4f}")
        chosen = sorted(run[kind]["scale"] for run in runs) if "scale" in runs[0][kind] else []
        cells.append(f"{chosen[0]:.1e} to {chosen[-1]:.1e}" if chosen else "")
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = page.options(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=100)
    arguments = parser.parse_args()
    lines = [
        "# AdaBayes' variance and samples",
        "",
        "`python benchmarks/belief.py`",
        "",
        "## The variance follows the learning rate",
        "",
        "sigma_post^2 relative to its value before lr fell from 1e-3 to 1e-4 (sgd_lr 0.1, batch size 128, the same",
        "gradient in every step). The target is 0.1. `follow_lr=True` reaches it at once. The paper's filter relaxes",
        "at a rate of 2 lr rms + lr^2/sigma^2 per step, which for weak gradients is slower than most schedules.",
        "",
        *follow_table(),
        "",
        "## Predictions with samples",
        "",
        f"An MLP (64-100-10) on scikit-learn's digits, {arguments.epochs} epochs of 1000 examples, 350 examples",
        f"for validation, 447 for testing; mean and standard error over {arguments.seeds} seeds; 32 samples.",
        "",
        *posterior_table(arguments.seeds, arguments.epochs),
        "",
        "A first run of 20 epochs gave the same order: NLL 0.1797 (mean), 0.1972 (scale 1), 0.1797 (tuned).",
    ]
    page.publish(lines, arguments.write)


if __name__ == "__main__":
    main()
