"""The cost of a whole training step of variational rules, beside SGD and ivon-opt.

Run: python benchmarks/variational.py [--write docs/results/variational.md]

A 784-1000-1000-1000-10 network, batches of 100: draw, forward, backward, step. All optimizers take turns;
figures are ratios of medians over rounds. Keep the machine idle meanwhile.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F

from bayesgrad import optim
from bayesgrad_lab.benchmarks import page
from bayesgrad_lab.benchmarks.layerwise import Data, network

N = 6000
OURS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD(fused=True)": lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, fused=True),
    "Adam(fused=True)": lambda m: torch.optim.Adam(m.parameters(), lr=1e-4, fused=True),
    "IVON": lambda m: optim.IVON(m.parameters(), 1e-3, num_data=N),
    "OGN": lambda m: optim.OGN(m, 1e-3, num_data=N),
    "VOGN": lambda m: optim.VOGN(m, 1e-3, num_data=N),
    "BayesBiNN": lambda m: optim.BayesBiNN(m.parameters(), 1e-5, num_data=N),
    "SpikeSlab": lambda m: optim.SpikeSlab(m, 1e-4),
}


def peers() -> dict[str, Callable[[nn.Module], torch.optim.Optimizer]]:
    try:
        import ivon
    except ImportError as error:
        print(f"  no ivon-opt: {error}", file=sys.stderr)
        return {}
    return {"ivon-opt": lambda m: ivon.IVON(m.parameters(), lr=1e-3, ess=N)}


def stepper(model: nn.Module, optimizer, data: Data) -> Callable[[], None]:
    index = 0

    def context():
        if hasattr(optimizer, "sampled_params"):
            return optimizer.sampled_params(train=True)
        return getattr(optimizer, "sampled", nullcontext)()

    def step() -> None:
        nonlocal index
        x, y = data.batch(index)
        with context():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        index += 1

    return step


def main() -> None:
    parser = page.options(__doc__, rounds=200)
    parser.add_argument("--warm", type=int, default=100, help="steps of each optimizer before the clock starts")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    data, steps = Data(), {}
    for name, make in {**OURS, **peers()}.items():
        print(f"  warming up {name}", file=sys.stderr)
        model = network()
        steps[name] = stepper(model, make(model), data)
        for _ in range(arguments.warm):
            steps[name]()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(arguments.rounds):
        print(f"\r  round {i + 1}/{arguments.rounds}", end="", file=sys.stderr, flush=True)
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    print(file=sys.stderr)
    base = times["SGD(fused=True)"]
    lines = [
        "# The time of a variational step",
        "",
        f"`python benchmarks/variational.py`: 784-1000-1000-1000-10, batch 100, whole steps, {page.setting()}.",
        f"Ratios to SGD's median and mean over {arguments.rounds} interleaved rounds.",
        "",
        "| optimizer | median | mean |",
        "|---|---|---|",
    ]
    for name, own in times.items():
        median = statistics.median(own) / statistics.median(base)
        lines.append(f"| {name} | {median:.2f} | {statistics.mean(own) / statistics.mean(base):.2f} |")
    page.publish(lines, arguments.write)


if __name__ == "__main__":
    main()
