"""The cost of a whole training step with rules that look at layers, beside SGD, and the memory of a Fisher solve.

Run: python -m bayesgrad_lab.benchmarks.layerwise [--peers] [--write docs/results/layerwise.md]

A 784-1000-1000-1000-10 network, batches of 100: forward, backward, step. All optimizers take turns in one process, ten
steps each, so that caches are as warm as in training; figures are ratios of means over rounds, because inversions come
only now and then. `FOOF's products` are E'(A P) for a given P and nothing else, beside an ordinary backward pass.
Keep the machine idle meanwhile.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bayesgrad import SubsampledFisher
from bayesgrad.optim import FOOF, KFAC, KroneckerFilterFP, NaturalGradient
from bayesgrad_lab.benchmarks import page
from bayesgrad_lab.networks import perceptron, seeded
from bayesgrad_lab.training import Step, steps

BATCH, BATCHES = 100, 60
TURN = 10  # steps of one optimizer before it is another's turn


def network() -> nn.Sequential:
    with seeded(0):
        return perceptron((784, 1000, 1000, 1000, 10))


class Data:
    """Random images with labels that a network can learn slowly, so that nothing converges into denormal numbers."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.rand(BATCH * BATCHES, 784, generator=generator)
        self.y = torch.randint(0, 10, (BATCH * BATCHES,), generator=generator)

    def batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index % BATCHES * BATCH
        return self.x[start : start + BATCH], self.y[start : start + BATCH]


class Products:
    """The two matrix products that each layer of FOOF takes, without statistics, inversions or looking at gradients."""

    def __init__(self, model: nn.Sequential, lr: float = 1e-3) -> None:
        self.lr = lr
        self.layers = [module for module in model if isinstance(module, nn.Linear)]
        self.inverses = [torch.eye(layer.in_features + 1) for layer in self.layers]
        self.inputs: dict[nn.Module, torch.Tensor] = {}
        self.errors: dict[nn.Module, torch.Tensor] = {}
        for layer in self.layers:
            layer.register_forward_hook(self.hook)

    def hook(self, layer: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        self.inputs[layer] = F.pad(inputs[0].detach(), (0, 1), value=1.0)
        output.register_hook(lambda error: self.errors.update({layer: error}))

    def zero_grad(self) -> None:
        for layer in self.layers:
            layer.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        for layer, inverse in zip(self.layers, self.inverses):
            a, e = self.inputs[layer], self.errors[layer]
            if len(a) < layer.out_features:
                a = a @ inverse
                layer.weight.addmm_(e.T, a[:, :-1], alpha=-self.lr)
                layer.bias.addmv_(e.T, a[:, -1], alpha=-self.lr)
            else:
                step = _whole(layer) @ inverse
                layer.weight.sub_(step[:, :-1], alpha=self.lr)
                layer.bias.sub_(step[:, -1], alpha=self.lr)


def _whole(layer: nn.Linear) -> torch.Tensor:
    """The gradient of [W b]."""
    return torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)  # pyright: ignore


BACKWARD: dict[str, Any] = {"precondition": "backward"}
WIDE: dict[str, Any] = {"batch_size": BATCH, "max_factor": 8192, **BACKWARD}  # factors of all sides
OURS: dict[str, Callable] = {
    "SGD(fused=True)": lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, fused=True),
    "FOOF's products": Products,
    "FOOF": lambda m: FOOF(m, lr=1e-3),
    "FOOF, backward, stats_every=1": lambda m: FOOF(m, lr=1e-3, stats_every=1, **BACKWARD),
    "FOOF, backward": lambda m: FOOF(m, lr=1e-3, **BACKWARD),
    "FOOF, backward, max_norm=inf": lambda m: FOOF(m, lr=1e-3, max_norm=math.inf, **BACKWARD),
    "KFAC, backward": lambda m: KFAC(m, lr=1e-4, **BACKWARD),
    "KFAC, backward, max_norm=inf": lambda m: KFAC(m, lr=1e-4, max_norm=math.inf, **BACKWARD),
    "KroneckerFilterFP, backward": lambda m: KroneckerFilterFP(m, lr=1e-5, **WIDE),
    "KroneckerFilterFP, backward, one-sided": lambda m: KroneckerFilterFP(m, lr=1e-5, whiten="input", **WIDE),
    "NaturalGradient(update_every=100)": lambda m: NaturalGradient(m, lr=1e-4, update_every=100),
}


def peers() -> dict[str, Callable]:
    """Other second-order optimizers, where they are installed."""
    found: dict[str, Callable] = {}
    try:
        import pytorch_optimizer as other

        found["Shampoo (pytorch_optimizer)"] = lambda m: other.Shampoo(m.parameters(), lr=1e-4)
        found["SOAP (pytorch_optimizer)"] = lambda m: other.SOAP(m.parameters(), lr=1e-4)
    except ImportError as error:
        print(f"  no Shampoo and no SOAP (pytorch_optimizer): {error}", file=sys.stderr)
    try:
        from singd.optim.optimizer import SINGD

        found["SINGD"] = lambda m: SINGD(m, lr=1e-4, T=1, loss_average="batch")
        found["SINGD(T=10)"] = lambda m: SINGD(m, lr=1e-4, T=10, loss_average="batch")
    except ImportError as error:
        print(f"  no SINGD: {error}", file=sys.stderr)

    def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
        """For matrices; SGD for biases."""
        matrices, vectors = ([p for p in model.parameters() if (p.dim() == 2) == wanted] for wanted in (True, False))
        return [torch.optim.Muon(matrices, lr=1e-4), torch.optim.SGD(vectors, lr=1e-4)]

    found["Muon (torch)"] = muon
    return found


def loop(make: Callable, data: Data) -> Iterator[Step]:
    """Steps of the optimizer, or of those that step together, that `make` builds for a network."""
    model = network()
    found = make(model)
    optimizers = found if isinstance(found, list) else [found]

    def observed(index: int, outputs: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(found, NaturalGradient):
            return outputs
        due = index % found.param_groups[0]["update_every"] == 0
        return model(data.batch(index + 7)[0]) if due else None  # its Fisher batch is another one

    return steps(model, optimizers, map(data.batch, count()), observed=observed, limit=None)


def measure(makers: dict[str, Callable], warm: int, rounds: int) -> dict[str, list[float]]:
    data = Data()
    loops = {name: loop(make, data) for name, make in makers.items()}
    for name, own in loops.items():  # early in a run inversions are more frequent than they will be
        print(f"  warming up {name}", file=sys.stderr)
        for _ in range(warm):
            next(own)
    times: dict[str, list[float]] = {name: [] for name in loops}
    for i in range(0, rounds, TURN):
        print(f"\r  round {i + TURN}/{rounds}", end="", file=sys.stderr, flush=True)
        for name, own in loops.items():
            times[name] += [next(own).seconds for _ in range(min(TURN, rounds - i))]
    print(file=sys.stderr)
    return times


def row(name: str, own: list[float], base: list[float]) -> str:
    """The ratios of means and medians."""
    mean = statistics.mean(own) / statistics.mean(base)
    return f"| {name} | {mean:.2f} | {statistics.median(own) / statistics.median(base):.2f} |"


def fisher(kind: str, points: int = 1000) -> tuple[float, float]:
    """Seconds and extra peak memory (MiB) of a pass or of a Fisher solve, in this process."""
    model, x = network(), torch.rand(points, 784)
    y, v = torch.randint(0, 10, (points,)), torch.randn(sum(p.numel() for p in model.parameters()))
    F.cross_entropy(model(x[:10]), y[:10]).backward()
    model.zero_grad()
    SubsampledFisher(model, x[:10]).solve(v, damping=0.1)  # libraries are loaded on first use
    before, start = _memory("VmRSS"), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    if kind == "pass":
        F.cross_entropy(model(x), y).backward()
    else:
        SubsampledFisher(model, x).solve(v, damping=0.1)
    return time.perf_counter() - start, _memory("VmHWM") - before


def _memory(field: str) -> float:
    """MiB, of this process; Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(field))) / 1024


def memory() -> dict[str, tuple[float, float]]:
    """Each in a process of its own, because a peak is the peak of a process."""
    found = {}
    for kind in ("pass", "solve"):
        code = f"from bayesgrad_lab.benchmarks import layerwise; print(*layerwise.fisher({kind!r}))"
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        seconds, extra = done.stdout.split()[-2:]
        found[kind] = float(seconds), float(extra)
    return found


PEERS_NOTE = (
    "Optimizers of other packages were measured for 20 steps after 3 steps of warm-up, Muon for 2 steps after 1.",
    "torch's Muon orthogonalises in bfloat16, which this kind of CPU emulates in software. Its time in this table is",
    "therefore no measure of a float32 form of Muon, nor of Muon on a GPU.",
)


def main() -> None:
    parser = page.options(__doc__, rounds=400)
    parser.add_argument("--warm", type=int, default=420, help="steps of each optimizer before the clock starts")
    parser.add_argument("--peers", action="store_true", help="also other packages' second-order optimizers")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")

    times = measure(OURS, arguments.warm, arguments.rounds)
    reference = times["SGD(fused=True)"]
    lines = [
        "# The time of a step of layer-wise optimizers",
        "",
        "`python -m bayesgrad_lab.benchmarks.layerwise --peers`: 784-1000-1000-1000-10, batch 100, whole steps, "
        f"{page.setting()}.",
        f"Ratios to SGD's mean and median over {arguments.rounds} steps, measured in turns of {TURN} steps. Inversions "
        "and refreshes are included. Settings are the defaults, so statistics are gathered every ten steps, except for "
        'those that are named; "backward" is `precondition="backward"`, and KroneckerFilterFP has full factors '
        '(`max_factor=8192`) and momentum. "FOOF\'s products" are those of FOOF beside an ordinary backward pass: '
        "E'(A P) for a given P.",
        "",
        "| optimizer | mean | median |",
        "|---|---|---|",
    ]
    lines += [row(name, own, reference) for name, own in times.items()]
    if arguments.peers:
        muon = peers()
        others = {name: muon.pop(name) for name in list(muon) if "Muon" not in name}
        for makers, warm, rounds in ((others, 3, 20), (muon, 1, 2)):  # Muon takes long where bfloat16 is emulated
            found = measure({"SGD(fused=True)": OURS["SGD(fused=True)"]} | makers, warm, rounds)
            base = found.pop("SGD(fused=True)")
            lines += [row(name, own, base) for name, own in found.items()]
        lines += ["", *PEERS_NOTE]
    found = memory()
    ratio = found["solve"][1] / found["pass"][1]
    lines += [
        "",
        "## A Fisher solve",
        "",
        f"2.8 million weights, 1,000 Fisher points: building `SubsampledFisher` and one `solve` take "
        f"{found['solve'][0]:.1f} s and {ratio:.1f} times the extra peak memory of one forward and backward pass",
        f"on these points ({found['solve'][1]:.0f} MiB and {found['pass'][1]:.0f} MiB).",
    ]
    page.publish(lines, arguments.write)


if __name__ == "__main__":
    main()
