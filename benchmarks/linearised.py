"""The cost of linearised predictions of a small convolutional network, beside dense Jacobians by torch.func.

Run: OMP_NUM_THREADS=1 python benchmarks/linearised.py [--rounds 5] [--write docs/results/linearised.md]

Conv 16, Conv 32, Linear 128, 28 x 28 images, 32 images at a time. Both ways take turns, and the ratio is the median
over rounds of old/new in the same round. Dense Jacobians are written 16 images at a time, and multiplied by the
covariance of each block of weights. Keep the machine idle meanwhile.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import bayesgrad
from bayesgrad.belief import Joint
from bayesgrad.layers.network import Network
from bayesgrad.posterior import LaplacePosterior
from bayesgrad_lab.benchmarks import page

IMAGES, SMALL, LARGE = 32, 10, 1000
STRUCTURES = ("diag", "kron", "input")


def network(classes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    ).eval()


def images(count: int) -> Tensor:
    return torch.rand(count, 1, 28, 28, generator=torch.Generator().manual_seed(0))


def fitted(structure: str, classes: int) -> LaplacePosterior:
    batches = [(images(IMAGES), torch.arange(IMAGES) % classes)]
    options: dict[str, Any] = dict(likelihood="categorical", structure=structure, fisher="sampled", progress=False)
    return bayesgrad.laplace(network(classes), batches, **options)


def ours(posterior: LaplacePosterior, x: Tensor, joint: bool) -> Tensor:
    assert posterior.model is not None
    with torch.no_grad():
        return posterior._linear_moments(Network(posterior.model, (x,)), joint)[1]


def dense(posterior: LaplacePosterior, x: Tensor, joint: bool) -> Tensor:
    """The same from Jacobians (examples, outputs, weights)."""
    model, mean = posterior.model, posterior.mean
    assert model is not None

    def one(example: Tensor) -> Tensor:
        rows = jacrev(lambda weights: functional_call(model, weights, (example[None],)).flatten())(mean)
        total = []
        for name, belief in posterior.beliefs.items():
            J = belief.join(rows) if isinstance(belief, Joint) else rows[name]
            JS = belief.precision.solve(J).flatten(1)
            total.append(JS @ J.flatten(1).T if joint else (JS * J.flatten(1)).sum(1))
        return torch.stack(total).sum(0)

    return vmap(one, chunk_size=16)(x).detach()


def seconds(way: Callable[..., Tensor], *arguments: object) -> float:
    start = time.perf_counter()
    way(*arguments)
    return time.perf_counter() - start


def compare(rounds: int) -> list[str]:
    lines, x = [], images(IMAGES)
    for structure in STRUCTURES:
        posterior = fitted(structure, SMALL)
        for joint in (False, True):
            found = [way(posterior, x, joint) for way in (dense, ours)]
            torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
            times = [[seconds(way, posterior, x, joint) for way in (dense, ours)] for _ in range(rounds)]
            old, new = (1e3 / IMAGES * statistics.median(column) for column in zip(*times))
            ratio = statistics.median(a / b for a, b in times)
            kind = "covariances" if joint else "variances"
            lines.append(f"| {structure} | {kind} | {old:.1f} | {new:.2f} | {ratio:.1f} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return lines


def large(rounds: int) -> list[str]:
    lines = []
    for structure in STRUCTURES:
        posterior = fitted(structure, LARGE)
        taken = [
            statistics.median(seconds(ours, posterior, images(2), joint) for _ in range(rounds)) / 2
            for joint in (False, True)
        ]
        lines.append(f"| {structure} | {taken[0]:.2f} | {taken[1]:.2f} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main() -> None:
    arguments = page.options(__doc__, rounds=5).parse_args()
    warnings.simplefilter("ignore")
    weights = sum(p.numel() for p in network(LARGE).parameters())
    lines = [
        "# Linearised predictions",
        "",
        f"`python benchmarks/linearised.py`: Conv 16, Conv 32, Linear 128, {SMALL} classes, 28 x 28 images, "
        f"{IMAGES} at a time, {page.setting()}. Milliseconds for each image, medians over rounds in which both "
        "ways take turns.",
        "",
        "| structure | | dense Jacobians | ours | ratio |",
        "|---|---|---|---|---|",
        *compare(arguments.rounds),
        "",
        f"With {LARGE:,} classes, where the Jacobian of one image would take {4e-6 * LARGE * weights:.0f} MB, seconds "
        "for each image:",
        "",
        "| structure | variances | covariances |",
        "|---|---|---|",
        *large(arguments.rounds),
    ]
    page.publish(lines, arguments.write)


if __name__ == "__main__":
    main()
