"""The cost of draws and predictions from the full-covariance Laplace posterior of a large network.

Run: python benchmarks/laplace.py [--peers] [--write docs/results/laplace.md]

A 784-1000-1000-1000-10 network with 2.8 million weights, and 1,000 Fisher points with labels drawn from the model: the
precision δ I + N F is a matrix of 8 trillion entries, of which nothing is written down. `one draw` is the first after
`laplace()`, with the Gram matrix and its factor; they are kept for all others. With --peers, laplace-torch's full and
low-rank structures beside ours on networks of growing size, each in a process of its own, for as long as it takes less
than `--limit` seconds and 8 GiB; the low-rank one needs asdfghjkl from its repository. Keep the machine idle meanwhile.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bayesgrad

POINTS, CLASSES = 1000, 10
LARGE = (784, 1000, 1000, 1000)
SIZES = ((784, 3), (784, 10), (784, 20), (784, 100), (784, 1000), LARGE)  # beside the peer
PEERS = {"laplace-torch, full": "full", "laplace-torch, low-rank": "lowrank"}
BYTES = 8 << 30  # that a process may ask for
FEW = 100  # Fisher points beside the peer


def network(sizes: tuple[int, ...]) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [module for a, b in pairwise(sizes) for module in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], CLASSES)).eval()


def data(points: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(points, 784, generator=generator), torch.randint(CLASSES, (points,), generator=generator)


def timed(call: Callable) -> tuple[float, object]:
    start = time.perf_counter()
    found = call()
    return time.perf_counter() - start, found


def memory() -> float:
    """The peak of this process in MiB; Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) / 1024


def posterior(sizes: tuple[int, ...], points: int, fisher: str) -> bayesgrad.posterior.LaplacePosterior:
    x, y = data(points)
    batches = list(zip(x.split(100), y.split(100)))
    options: dict[str, Any] = dict(
        structure="subsampled", fisher=fisher, num_data=60_000, prior_precision=100.0, progress=False
    )
    return bayesgrad.laplace(network(sizes), batches, likelihood="categorical", **options)


def large(variance: bool) -> list[tuple[str, float, float]]:
    """What was done, its seconds, and the peak memory of the process by then."""
    posterior((784, 20), 50, "sampled").sample(2)  # libraries are loaded on first use
    x, rows = data(100)[0], []

    def record(what: str, call: Callable) -> object:
        seconds, found = timed(call)
        rows.append((what, seconds, memory()))
        print(f"  {what}: {seconds:.2f} s", file=sys.stderr, flush=True)
        return found

    belief = record("`laplace()`: a pass over 1,000 points", lambda: posterior(LARGE, POINTS, "sampled"))
    assert isinstance(belief, bayesgrad.posterior.LaplacePosterior)
    record("one draw, with Gram matrix and factor", lambda: belief.sample(1))
    record("one more draw", lambda: belief.sample(1))
    record("100 draws", lambda: belief.sample(100))
    record("100 linearised predictions, with Gram matrix and factor", lambda: belief.predict(x, method="linear"))
    record("100 more", lambda: belief.predict(x, method="linear"))
    record("100 predictions, 32 draws", lambda: belief.predict(x))
    record("the evidence", belief.log_marginal_likelihood)
    if variance:
        record("the variance of every weight", belief.variance)
    return rows


def small(kind: str, sizes: tuple[int, ...]) -> tuple[float, float, float]:
    """Seconds of the fit and of ten draws, and the peak memory."""
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    if kind == "ours":
        fit, belief = timed(lambda: posterior(sizes, FEW, "exact"))
        draws, _ = timed(lambda: belief.sample(10))  # pyright: ignore[reportAttributeAccessIssue]
        return fit, draws, memory()
    from laplace import Laplace
    from laplace.curvature import CurvlinopsGGN
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(*data(FEW)), batch_size=FEW)
    options: dict[str, Any] = {"backend": CurvlinopsGGN} if PEERS[kind] == "full" else {}
    theirs = Laplace(network(sizes), "classification", "all", PEERS[kind], prior_precision=100.0, **options)
    fit, _ = timed(lambda: theirs.fit(loader))
    draws, _ = timed(lambda: theirs.sample(10))
    return fit, draws, memory()


def beside(limit: float) -> list[str]:
    """Rows of a table; a peer that was too slow or failed is not asked for more."""
    lines, alive = [], dict.fromkeys(("ours", *PEERS), True)
    for sizes in SIZES:
        weights = sum(p.numel() for p in network(sizes).parameters())
        for kind in alive:
            if not alive[kind]:
                continue
            print(f"  {kind}, {weights:,} weights", file=sys.stderr, flush=True)
            code = (
                "import sys, warnings; warnings.simplefilter('ignore'); from importlib.util import *;"
                "spec = spec_from_file_location('bench', sys.argv[1]); bench = module_from_spec(spec);"
                f"spec.loader.exec_module(bench); print(*bench.small({kind!r}, {sizes}))"
            )
            command = [sys.executable, "-c", code, __file__]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
            except subprocess.TimeoutExpired:
                done = None
            if done is None or done.returncode:
                alive[kind] = False
                why = f"more than {limit:g} s" if done is None else done.stderr.strip().splitlines()[-1][:80]
                lines.append(f"| {kind} | {weights:,} | {why} | | |")
                continue
            fit, draws, peak = map(float, done.stdout.split()[-3:])
            lines.append(f"| {kind} | {weights:,} | {fit:.2f} | {draws:.2f} | {peak:.0f} |")
    return lines


def main() -> None:
    from bayesgrad_lab.benchmarks import (
        page,  # not above: its other processes go without this folder, which would hide laplace-torch
    )

    parser = page.options(__doc__)
    parser.add_argument("--peers", action="store_true", help="also laplace-torch's low-rank structure")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each size beside the peer")
    parser.add_argument(
        "--variance", action="store_true", help="also the variance of every weight, which takes longest"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")

    rows = large(arguments.variance)
    seconds = {what: taken for what, taken, _ in rows}
    one, many = seconds["one draw, with Gram matrix and factor"], seconds["100 draws"]
    weights = sum(p.numel() for p in network(LARGE).parameters())
    lines = [
        "# Draws from a full covariance",
        "",
        f"`python benchmarks/laplace.py --peers --variance`: 784-1000-1000-1000-10, {weights:,} weights, {POINTS:,} "
        f"Fisher points with drawn labels, {page.setting()}. As a dense matrix the covariance would take "
        f"{4 * weights**2 / 1e12:.0f} TB.",
        "",
        "| | seconds | peak memory of the process, MiB |",
        "|---|---|---|",
        *[f"| {what} | {taken:.2f} | {peak:.0f} |" for what, taken, peak in rows],
        "",
        f"100 draws take {many / one:.0f} times as long as the first one alone.",
    ]
    if arguments.peers:
        lines += [
            "",
            "## Beside laplace-torch",
            "",
            f"{FEW} points. Ours and laplace-torch's full structure use the exact Fisher, of rank "
            f"{FEW * (CLASSES - 1)} at most; its low-rank structure uses ten eigenvectors of the Hessian by power "
            f"iterations. Peak memory includes torch itself; {BYTES >> 30} GiB and {arguments.limit:g} s are the "
            "limits.",
            "",
            "| | weights | fit, seconds | ten draws, seconds | peak, MiB |",
            "|---|---|---|---|---|",
            *beside(arguments.limit),
        ]
    page.publish(lines, arguments.write)


if __name__ == "__main__":
    main()
