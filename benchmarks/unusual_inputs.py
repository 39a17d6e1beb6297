"""Unusual inputs by `posterior.ood_score`, and the coverage of conformal sets and intervals.

Run: python benchmarks/unusual_inputs.py --out runs/unusual [--resume] [--write docs/results/unusual-inputs.md]

Claim 1: a perceptron that AdamW trained on Fashion-MNIST, with `laplace(structure="kron").tune_prior()`, tells images
of MNIST from test images of Fashion-MNIST by `ood_score` with an AUROC of at least 0.95, as a mean over five seeds.
Claim 2: conformal sets and intervals of level 0.9, calibrated on half of the held-out examples, contain the labels of
the other half with a frequency that is within two standard errors of k/(n + 1), the expected one for n calibration
examples and rank k, on Fashion-MNIST, scikit-learn's digits (sets) and UCI concrete (intervals): means over twenty
random halves, each of the held-out data of another seed or split where there are so many.

Settings were fixed before the first run; nothing is chosen by test data. Finished runs are in the folder `--out`.
"""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from bayesgrad import conformal, laplace, metrics
from bayesgrad.posterior.prediction import SCORES
from bayesgrad.predictions import Interval
from bayesgrad_lab import datasets, uci
from bayesgrad_lab.benchmarks import page
from bayesgrad_lab.context import Context
from bayesgrad_lab.dataset import Dataset
from bayesgrad_lab.task import shuffled

SEEDS, HALVES, LEVEL, GOAL = 5, 20, 0.9, 0.95
EXAMPLES, EPOCHS, BATCH, IMAGES = 20_000, 5, 128, 5_000
WIDTHS = (256, 128)


def perceptron(inputs: int, outputs: int, widths: tuple[int, ...], seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    sizes = (inputs, *widths)
    hidden = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(sizes[-1], outputs))


def trained(data: Dataset, outputs: int, widths: tuple[int, ...], epochs: int, seed: int) -> nn.Module:
    """By AdamW with its defaults."""
    model = perceptron(data.train_x[0].numel(), outputs, widths, seed).to(data.train_x.dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = cross_entropy if data.classes > 1 else mse_loss
    for rows in shuffled(len(data.train_x), BATCH, torch.Generator().manual_seed(seed), epochs):
        optimizer.zero_grad()
        loss(model(data.train_x[rows]), data.train_y[rows]).backward()
        optimizer.step()
    return model.eval()


def fitted(data: Dataset, model: nn.Module, likelihood: str) -> Any:
    loader = DataLoader(TensorDataset(data.train_x, data.train_y), 500)
    return laplace(model, loader, likelihood=likelihood, structure="kron", seed=0).tune_prior()


def images(context: Context, seed: int, examples: int, count: int) -> dict[str, Tensor]:
    """Scores of known and unknown images, and predictions for the known ones."""
    known, unknown = (datasets.load(name, context.data_dir) for name in ("fashion-mnist", "mnist"))
    known = known.part(examples, seed)
    model = trained(known, 10, WIDTHS, EPOCHS, seed)
    posterior = fitted(known, model, "categorical")
    loaders = [DataLoader(TensorDataset(data.test_x[:count]), 250) for data in (known, unknown)]
    found = {f"{s} {i}": posterior.ood_score(loader, s) for s in SCORES for i, loader in enumerate(loaders)}
    for i, data in enumerate((known, unknown)):
        with torch.no_grad():
            found[f"network {i}"] = metrics.entropy(model(data.test_x[:count]).softmax(-1))
    return found | {"p": posterior.predict(loaders[0]), "labels": known.test_y[:count]}


def digits(seed: int) -> dict[str, Tensor]:
    data = datasets.load("digits").held_out(0.4, seed)
    posterior = fitted(data, trained(data, 10, (64,), 30, seed), "categorical")
    return {"p": posterior.predict(data.test_x), "labels": data.test_y}


def concrete(context: Context, number: int) -> dict[str, Tensor]:
    data = uci.read("concrete", number, context.data_dir)
    data = data.held_out(0.4, number)
    posterior = fitted(data, trained(data, 1, (50,), 300, number), "gaussian")
    lower, upper = posterior.interval(data.test_x)
    return {"lower": lower, "upper": upper, "labels": data.test_y}


def coverage(found: dict[str, Tensor], half: int) -> tuple[float, float]:
    """The frequency of labels inside, for one random half, and its expectation."""
    labels = found["labels"]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(half))
    a, b = order[: len(order) // 2], order[len(order) // 2 :]
    expected = math.ceil((len(a) + 1) * LEVEL) / (len(a) + 1)
    if "p" in found:
        inside = conformal.calibrate_sets(found["p"][a], labels[a], LEVEL)(found["p"][b]).gather(1, labels[b][:, None])
    else:
        ends = [Interval(found["lower"][rows], found["upper"][rows]) for rows in (a, b)]
        lower, upper = conformal.calibrate_intervals(ends[0], labels[a], LEVEL)(ends[1])
        inside = (lower <= labels[b]) & (labels[b] <= upper)
    return float(inside.double().mean()), expected


def mean_and_error(values: list[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


SETTING = """\
The network is a perceptron 784-256-128-10 with ReLU, trained by AdamW with its defaults for 5 epochs on 20,000 images
in batches of 128. Scores are of 5,000 test images of each data set. The posterior is
`laplace(model, loader, likelihood="categorical", structure="kron", seed=0).tune_prior()`: Kronecker factors, and the
prior precision with the most evidence.
"""


def tables(runs: list[dict[str, Tensor]], covered: dict[str, list[tuple[float, float]]]) -> list[str]:
    rows = {name: [metrics.auroc(run[f"{name} 0"], run[f"{name} 1"]) for run in runs] for name in (*SCORES, "network")}
    own = statistics.fmean(rows["epistemic"])
    words = {"network": "the network's entropy, without a posterior"}
    lines = [
        "# Unusual inputs, and conformal prediction",
        "",
        f"`python benchmarks/unusual_inputs.py`, {page.setting()}. The script has the claims and settings, which were "
        "fixed before the first run.",
        "",
        f"**Unusual inputs.** {'Holds' if own >= GOAL else 'Does not hold'}: the mean AUROC of the epistemic score "
        f"is {own:.3f}, goal {GOAL}. Known: test images of Fashion-MNIST, unknown: those of MNIST; seeds: {len(runs)}.",
        "",
        SETTING,
        "| score | AUROC |",
        "|---|---|",
    ]
    for name, values in rows.items():
        mean, error = mean_and_error(values)
        lines.append(f"| {words.get(name, f'`ood_score(x, {name!r})`')} | {mean:.3f} ± {error:.3f} |")
    lines += ["", "**Coverage** of conformal sets and intervals of level 0.9:", ""]
    lines += ["| data | frequency of labels inside | expected | within two standard errors |", "|---|---|---|---|"]
    for name, values in covered.items():
        mean, error = mean_and_error([one for one, _ in values])
        expected = values[0][1]
        near = "yes" if abs(mean - expected) <= 2 * error else "no"
        lines.append(f"| {name} | {mean:.4f} ± {error:.4f} | {expected:.4f} | {near} |")
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = page.options(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder, in which finished runs are kept")
    parser.add_argument("--resume", action="store_true", help="continue in a folder that has runs")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--examples", type=int, default=EXAMPLES)
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--data-dir", help="where data files are; else $BAYESGRAD_DATA")
    given: Any = parser.parse_args(arguments)
    if given.out.exists() and any(given.out.iterdir()) and not given.resume:
        parser.error(f"{given.out} has runs: pass --resume to continue with them, or another folder.")
    torch.set_num_threads(1)
    (given.out / "trials").mkdir(parents=True, exist_ok=True)
    context = Context(given.out, data_dir=given.data_dir, say=lambda words: print(words, flush=True))
    runs = []
    for seed in range(given.seeds):
        key = f"images-{given.examples}-{given.images}-{seed}"
        runs.append(context.once(key, lambda seed=seed: images(context, seed, given.examples, given.images)))
        own = metrics.auroc(runs[-1]["epistemic 0"], runs[-1]["epistemic 1"])
        context.say(f"seed {seed}: AUROC of the epistemic score {own:.3f}")
    small = [context.once(f"digits-{k}", lambda k=k: digits(k)) for k in range(HALVES)]
    numbers = [context.once(f"concrete-{k}", lambda k=k: concrete(context, k)) for k in range(HALVES)]
    covered = {
        "Fashion-MNIST": [coverage(runs[k % len(runs)], k) for k in range(HALVES)],
        "digits": [coverage(found, k) for k, found in enumerate(small)],
        "UCI concrete": [coverage(found, k) for k, found in enumerate(numbers)],
    }
    page.publish(tables(runs, covered), given.write)


if __name__ == "__main__":
    main()
