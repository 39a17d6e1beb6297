"""The cost of one optimizer step beside torch.optim.AdamW(fused=True), and the memory of its state.

Run: python -m bayesgrad_lab.benchmarks.elementwise [--write docs/results/elementwise.md]

All optimizers of a case take turns in one process, so that whatever disturbs one disturbs all; figures are ratios of
medians. Keep the machine idle while it runs.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch

from bayesgrad.optim import AdaBayes, AdaBayesFP, AdaBound, AMSBound
from bayesgrad_lab.benchmarks import page

CASES = {
    "12 tensors of 1000x1000": [(1000, 1000)] * 12,
    "200 small tensors (64x64 and 64)": [(64, 64), (64,)] * 100,
}
OPTIMIZERS: dict[str, Callable] = {
    "torch AdamW(fused=True)": lambda params: torch.optim.AdamW(params, fused=True),
    "AdaBayes": lambda params: AdaBayes(params, batch_size=128),
    "AdaBayesFP": lambda params: AdaBayesFP(params),
    "AdaBound": lambda params: AdaBound(params),
    "AMSBound": lambda params: AMSBound(params),
    "AdaBayes(fused=False)": lambda params: AdaBayes(params, batch_size=128, fused=False),
    "torch AdamW(foreach=True)": lambda params: torch.optim.AdamW(params, foreach=True),
}


def optimizer_for(make: Callable, shapes: list) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(0.01 * torch.randn(shape)) for shape in shapes]
    for p in params:
        p.grad = 0.01 * torch.randn_like(p)
    return make(params)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [value for entry in optimizer.state.values() for value in entry.values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def optimizers_for(shapes: list, makers: dict[str, Callable] = OPTIMIZERS) -> dict[str, torch.optim.Optimizer]:
    return {name: optimizer_for(make, shapes) for name, make in makers.items()}


def times_of(optimizers: dict[str, torch.optim.Optimizer], seconds: float, rounds: int) -> dict[str, list[float]]:
    """Seconds of steps that optimizers take in turns, after some that are not counted."""
    for optimizer in optimizers.values():
        optimizer.step()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for optimizer in optimizers.values():
            optimizer.step()
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for i in range(rounds):
        print(f"\r  round {i + 1}/{rounds}", end="", file=sys.stderr, flush=True)
        for name, optimizer in optimizers.items():
            start = time.perf_counter()
            optimizer.step()
            times[name].append(time.perf_counter() - start)
    print(file=sys.stderr)
    return times


def measure(
    shapes: list, seconds: float, rounds: int, makers: dict[str, Callable] = OPTIMIZERS
) -> dict[str, dict[str, float]]:
    optimizers = optimizers_for(shapes, makers)
    times = times_of(optimizers, seconds, rounds)
    return {
        name: {"median": statistics.median(values), "bytes": state_bytes(optimizers[name])}
        for name, values in times.items()
    }


def table(results: dict[str, dict[str, float]]) -> list[str]:
    """Ratios to AdamW's."""
    reference = results["torch AdamW(fused=True)"]
    lines = ["| optimizer | time of a step | state memory |", "|---|---|---|"]
    for name, result in results.items():
        time_ratio = result["median"] / reference["median"]
        lines.append(f"| {name} | {time_ratio:.2f} | {result['bytes'] / reference['bytes']:.2f} |")
    return [*lines, ""]


def compile_seconds(name: str) -> float:
    """The first step in a fresh process with an empty compilation cache, less a second step."""
    code = (
        "import time, torch; import bayesgrad_lab.benchmarks.elementwise as e;"
        f"o = e.optimizer_for(e.OPTIMIZERS[{name!r}], e.CASES['12 tensors of 1000x1000']);"
        "a = time.perf_counter(); o.step(); b = time.perf_counter(); o.step(); c = time.perf_counter();"
        "print((b - a) - (c - b))"
    )
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = page.options(__doc__, rounds=200)
    parser.add_argument("--seconds", type=float, default=6.0, help="of warming up before each case")
    arguments = parser.parse_args()

    lines = [
        "# The time of a step",
        "",
        f"`python -m bayesgrad_lab.benchmarks.elementwise`: medians of {arguments.rounds} interleaved steps, "
        f"{page.setting()}.",
        "Ratios to `torch.optim.AdamW(fused=True)`.",
        "",
    ]
    for case, shapes in CASES.items():
        print(case, file=sys.stderr)
        results = measure(shapes, arguments.seconds, arguments.rounds)
        lines += [f"## {case}", "", *table(results)]
    lines += ["## First step", "", "Seconds of compilation, fresh process, empty cache.", ""]
    lines += ["| optimizer | seconds |", "|---|---|"]
    lines += [f"| {name} | {compile_seconds(name):.1f} |" for name in ("AdaBayes", "AdaBayesFP", "AdaBound")]
    page.publish(lines, arguments.write)


if __name__ == "__main__":
    main()
