"""The cost of filters with a momentum, beside AdamW, and of Kronecker-factored filters, beside SGD.

Run: python benchmarks/filters.py [--peers] [--write docs/results/filters.md]

Steps of optimizers alone as in elementwise.py; whole training steps of a 784-1000-1000-1000-10 network as in
layerwise.py. `its products` is the floor of any whitening with a momentum, (E P)'(A Q) for given P and Q and nothing
else; `its eigendecompositions` are those of all factors, once in a hundred steps. Keep the machine idle while it runs.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable

import torch

from bayesgrad.optim import AdaBayes, KalmanMomentum, KroneckerFilter, KroneckerFilterFP
from bayesgrad_lab.benchmarks import elementwise, layerwise, page


class TwoSided(layerwise.Products):
    """Whitening's products and a momentum, without statistics, decompositions or looking at gradients."""

    def __init__(self, model: torch.nn.Sequential, lr: float = 1e-5, momentum: float = 0.9) -> None:
        super().__init__(model, lr)
        self.momentum = momentum
        self.left = [torch.eye(layer.out_features) for layer in self.layers]
        self.velocities = [torch.zeros(layer.out_features, layer.in_features + 1) for layer in self.layers]

    @torch.no_grad()
    def step(self) -> None:
        for layer, right, left, velocity in zip(self.layers, self.inverses, self.left, self.velocities):
            errors, inputs = self.errors[layer] @ left, self.inputs[layer] @ right
            velocity.addmm_(errors.T, inputs, beta=self.momentum, alpha=1 - self.momentum)
            layer.weight.sub_(velocity[:, :-1], alpha=self.lr)
            layer.bias.sub_(velocity[:, -1], alpha=self.lr)


def decompositions(repeats: int = 5) -> float:
    """Seconds that the eigendecompositions of all factors of the network take."""
    layers = [module for module in layerwise.network() if isinstance(module, torch.nn.Linear)]
    sizes = [size for layer in layers for size in (layer.in_features + 1, layer.out_features)]
    factors = [rows.T @ rows for rows in (torch.rand(2 * size, size) for size in sizes)]
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for factor in factors:
            torch.linalg.eigh(factor)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


ALONE: dict[str, Callable] = {
    "torch AdamW(fused=True)": lambda params: torch.optim.AdamW(params, fused=True),
    "AdaBayes": lambda params: AdaBayes(params, batch_size=128),
    "KalmanMomentum": lambda params: KalmanMomentum(params, batch_size=128),
    "KalmanMomentum(steady_state=True)": lambda params: KalmanMomentum(params, batch_size=128, steady_state=True),
}
WHOLE: dict[str, Callable] = {
    "SGD(fused=True)": layerwise.OURS["SGD(fused=True)"],
    "its products (lower bound)": TwoSided,
    "KroneckerFilterFP(update_every=100, stats_every=10)": lambda m: KroneckerFilterFP(
        m, lr=1e-5, batch_size=100, update_every=100, stats_every=10, max_factor=8192
    ),
    "KroneckerFilterFP(update_every=100)": lambda m: KroneckerFilterFP(
        m, lr=1e-5, batch_size=100, update_every=100, stats_every=1, max_factor=8192
    ),
    "KroneckerFilterFP(update_every=100, fisher='empirical')": lambda m: KroneckerFilterFP(
        m, lr=1e-5, batch_size=100, update_every=100, stats_every=1, max_factor=8192, fisher="empirical"
    ),
    "KroneckerFilter(stats_every=10)": lambda m: KroneckerFilter(m, lr=1e-5, batch_size=100, stats_every=10),
}


def main() -> None:
    parser = page.options(__doc__, rounds=200)
    parser.add_argument("--seconds", type=float, default=6.0, help="of warming up before each case of steps alone")
    parser.add_argument("--warm", type=int, default=420, help="training steps of each before the clock starts")
    parser.add_argument("--peers", action="store_true", help="also other packages' second-order optimizers")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")

    command = "python benchmarks/filters.py" + " --peers" * arguments.peers
    lines = ["# The time of filters", "", f"`{command}`, {page.setting()}.", ""]
    for case, shapes in elementwise.CASES.items():
        print(case, file=sys.stderr)
        results = elementwise.measure(shapes, arguments.seconds, arguments.rounds, ALONE)
        lines += [f"## {case}: steps alone, medians of {arguments.rounds}, ratios to AdamW", ""]
        lines += elementwise.table(results)
    lines += [
        f"## 784-1000-1000-1000-10, batch 100: whole steps, {arguments.rounds} in turns of {layerwise.TURN}, "
        "ratios to SGD",
        "",
        "| optimizer | mean | median |",
        "|---|---|---|",
    ]
    tables = [(WHOLE, arguments.warm, arguments.rounds)]
    if arguments.peers:
        others = {name: make for name, make in layerwise.peers().items() if "SOAP" in name or "Shampoo" in name}
        tables.append(({"SGD(fused=True)": WHOLE["SGD(fused=True)"]} | others, 3, 20))
    for makers, warm, rounds in tables:
        times = layerwise.measure(makers, warm, rounds)
        base = times.pop("SGD(fused=True)")
        lines += [layerwise.row(name, own, base) for name, own in times.items()]
        if makers is WHOLE:
            lines.append(f"| its eigendecompositions alone | {decompositions() / 100 / statistics.mean(base):.2f} | |")
    page.publish(lines, arguments.write)


if __name__ == "__main__":
    main()
