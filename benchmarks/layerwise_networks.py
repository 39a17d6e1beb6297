"""The time of a step of layer-wise optimizers on a GPT and on a ResNet, beside AdamW.

Run: python benchmarks/layerwise_networks.py [--write docs/results/layerwise-networks.md]

A GPT of width 256 with 4 blocks, context 128 and batches of 4,096 tokens, and a ResNet of 3x3 convolutions with 16, 32
and 64 channels and batches of 128 images of 32x32, both with random data: forward pass, observe, backward pass, step.
Optimizers take turns of ten steps in one process; figures are ratios of means and medians, because refreshes come only
now and then. Statistics are gathered every ten steps. Keep the machine idle meanwhile.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesgrad.optim import FOOF, KFAC, KroneckerFilterFP
from bayesgrad_lab import networks
from bayesgrad_lab.benchmarks import page

TURN, CONTEXT, VOCABULARY = 10, 128, 65


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by five Newton-Schulz iterations in float32; AdamW's step for what is not a matrix."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        params = list(params)
        super().__init__([p for p in params if p.dim() == 2], {"lr": lr, "momentum": 0.95})
        self.rest = torch.optim.AdamW([p for p in params if p.dim() != 2], lr=lr, fused=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                buffer = state.setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(buffer, group["momentum"])
                x = x.T if len(x) > x.shape[1] else x
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    a = x @ x.T
                    x = torch.addmm(x, torch.addmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
                p.add_(x.T if x.shape != p.shape else x, alpha=-group["lr"])
        self.rest.step()


def gpt() -> tuple[nn.Module, Tensor, Tensor]:
    model = networks.GPT(VOCABULARY, CONTEXT, width=256, depth=4)
    x = torch.randint(0, VOCABULARY, (4096 // CONTEXT, CONTEXT))
    return model, x, torch.randint(0, VOCABULARY, x.shape)


def resnet() -> tuple[nn.Module, Tensor, Tensor]:
    return networks.ResNet(3, 10, (1, 1, 1), width=16), torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,))


OPTIMIZERS: dict[str, Callable[[nn.Module, int, int], Any]] = {
    "AdamW(fused=True)": lambda m, n, t: torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True),
    "SGD(fused=True)": lambda m, n, t: torch.optim.SGD(m.parameters(), lr=1e-4, fused=True),
    "FOOF": lambda m, n, t: FOOF(m, lr=1e-4, stats_every=10, losses_per_example=t),
    "KFAC": lambda m, n, t: KFAC(m, lr=1e-4, stats_every=10, losses_per_example=t),
    "KroneckerFilterFP": lambda m, n, t: KroneckerFilterFP(
        m, lr=1e-5, batch_size=n, stats_every=10, losses_per_example=t
    ),
    "Muon, float32": lambda m, n, t: Muon(m.parameters(), lr=1e-5),
}


def soap() -> dict[str, Callable[[nn.Module, int, int], Any]]:
    """SOAP of pytorch_optimizer, if it is installed."""
    try:
        from pytorch_optimizer import SOAP
    except ImportError as error:
        print(f"  no SOAP (pytorch_optimizer): {error}", file=sys.stderr)
        return {}
    return {"SOAP (pytorch_optimizer)": lambda m, n, t: SOAP(m.parameters(), lr=1e-5, precondition_frequency=10)}


def steps(build: Callable[[], tuple[nn.Module, Tensor, Tensor]], make: Callable[..., Any]) -> Iterator[float]:
    torch.manual_seed(0)
    model, x, y = build()
    positions = y[0].numel()
    optimizer = make(model, y.numel(), positions)
    observe = getattr(optimizer, "observe", None)
    while True:
        start = time.perf_counter()
        optimizer.zero_grad()
        outputs = model(x)
        loss = F.cross_entropy(outputs.flatten(0, -2), y.flatten())
        if observe is not None:
            observe(outputs, loss=loss)
        loss.backward()
        optimizer.step()
        yield time.perf_counter() - start


def measure(
    build: Callable[[], tuple[nn.Module, Tensor, Tensor]], makers: dict[str, Callable], warm: int, rounds: int
) -> dict[str, list[float]]:
    loops = {name: steps(build, make) for name, make in makers.items()}
    for name, loop in loops.items():
        print(f"  warming up {name}", file=sys.stderr)
        for _ in range(warm):
            next(loop)
    times: dict[str, list[float]] = {name: [] for name in loops}
    for done in range(0, rounds, TURN):
        print(f"\r  step {done + TURN}/{rounds}", end="", file=sys.stderr, flush=True)
        for name, loop in loops.items():
            times[name] += [next(loop) for _ in range(TURN)]
    print(file=sys.stderr)
    return times


def main() -> None:
    parser = page.options(__doc__, rounds=100)
    parser.add_argument("--warm", type=int, default=20, help="steps of each optimizer before the clock starts")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    lines = [
        "# The time of a step of layer-wise optimizers on larger networks",
        "",
        f"`python benchmarks/layerwise_networks.py`: whole steps, {page.setting()}. Ratios to fused AdamW's mean and",
        f"median over {arguments.rounds} steps after {arguments.warm}, in turns of {TURN} steps. Statistics every ten "
        "steps.",
    ]
    makers = OPTIMIZERS | soap()
    for title, build in (("GPT, 4,096 tokens a batch", gpt), ("ResNet, 128 images a batch", resnet)):
        times = measure(build, makers, arguments.warm, arguments.rounds)
        base = times["AdamW(fused=True)"]
        lines += ["", f"## {title}", "", "| optimizer | mean | median |", "|---|---|---|"]
        for name, own in times.items():
            mean = statistics.mean(own) / statistics.mean(base)
            lines.append(f"| {name} | {mean:.2f} | {statistics.median(own) / statistics.median(base):.2f} |")
    page.publish(lines, arguments.write)


if __name__ == "__main__":
    main()
