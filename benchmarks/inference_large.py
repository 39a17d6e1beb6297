"""A step and its bound for 10^5 weights with a diagonal Gaussian, beside a plain autograd loop.

Run: python benchmarks/inference_large.py [--rounds 60]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bayesgrad.families import DiagonalGaussian
from bayesgrad.inference import Delta, Factor, LogDensity, MonteCarlo, Node, Prior, elbo, step

SIZE = 100_000
EXPECTATIONS = {
    "Delta, Gauss-Newton": lambda: Delta("gauss-newton"),
    "one sample, reparameterised": lambda: MonteCarlo(1, "reparameterised"),
}


def functions(dtype: torch.dtype) -> dict[str, Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    place, design, targets = torch.randn(SIZE), torch.randn(20, SIZE) / SIZE**0.5, torch.randn(20)
    inputs, labels = torch.randn(64, 300).to(dtype), torch.randint(10, (64,))
    place, design, targets = (part.to(dtype) for part in (place, design, targets))

    def network(theta: Tensor) -> Tensor:
        first, second, bias = theta[:90_000].view(300, 300), theta[90_000:93_000].view(300, 10), theta[93_000:93_010]
        return -cross_entropy((inputs @ first).tanh() @ second + bias, labels, reduction="sum")

    return {
        "elementwise": lambda theta: -(theta - place).square().sum() / 2 - theta.pow(4).sum() / 4,
        "regression, 20 rows": lambda theta: -(design @ theta - targets).square().sum() / 2,
        "network, 64 rows": network,
    }


def ratios(function: Callable[[Tensor], Tensor], dtype: torch.dtype, rounds: int) -> dict[str, str]:
    """Ratios of medians of CPU time, of runs in turn, with those of means in brackets."""
    family, like = DiagonalGaussian(), torch.ones(SIZE, dtype=dtype)

    def engine(name: str) -> Callable[[], object]:
        node = Node(family, family.of(0.01 * like, 10 * like))
        factors: list[Factor] = [
            Prior(node, family.of(0 * like, like)),
            LogDensity(node, function, EXPECTATIONS[name]()),
        ]
        return lambda: (step(node, factors, 1e-3), float(elbo([node], factors)))

    theta = 0.01 * like

    def plain() -> None:
        nonlocal theta
        at = theta.detach().requires_grad_()
        value = function(at) - at.square().sum() / 2
        theta = theta + 1e-3 * torch.autograd.grad(value, at)[0]
        float(value.detach())

    runs = {"plain": plain, **{name: engine(name) for name in EXPECTATIONS}}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, one in runs.items():
            start = time.process_time()
            one()
            times[name].append(time.process_time() - start)
    kept = {name: some[rounds // 6 :] for name, some in times.items()}

    def ratio(average: Callable[[list[float]], float], name: str) -> float:
        return average(kept[name]) / average(kept["plain"])

    return {name: f"{ratio(statistics.median, name):.2f} ({ratio(statistics.mean, name):.2f})" for name in EXPECTATIONS}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    print(f"| log density | dtype | {' | '.join(EXPECTATIONS)} |\n|---|---|{'---|' * len(EXPECTATIONS)}")
    for dtype in (torch.float32, torch.float64):
        for name, function in functions(dtype).items():
            found = ratios(function, dtype, rounds)
            print(f"| {name} | {str(dtype)[6:]} | {' | '.join(found.values())} |")


if __name__ == "__main__":
    main()
