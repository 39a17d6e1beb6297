"""Golden hashes: what every optimizer and sampler computes, to the bit, while the code around it is rearranged.

Each run trains a small network for 50 steps on one thread. It is recorded as two SHA-256 sums: of the weights, and of
the tensors in the optimizer's state. Values are hashed, not names, so a rename leaves them equal. Bits depend on the
processor, on torch and on the compiler. The record names those it was made with;
where they differ, nothing is compared.

Run: python tests/hashes.py            compare all runs with the record, tests/hashes.json
     python tests/hashes.py --record   write the record anew, in a commit of its own that says why
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cases
from bayesgrad import optim, samplers

RECORD = Path(__file__).parent / "hashes.json"
STEPS = 50
EXAMPLES = 16


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))


class Tokens(nn.Module):
    """An embedding, averaged over positions; the head is a layer of its own or the embedding again."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(tokens).mean(1))))


def tokens(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 11, (EXAMPLES, 5), generator=generator), torch.randint(
        0, 11, (EXAMPLES,), generator=generator
    )


def inputs(*shape: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """Batches of random inputs of this shape, with labels of three classes."""

    def batch(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = torch.randn(EXAMPLES, *shape, generator=generator, dtype=torch.float64).to(dtype)
        return x, torch.randint(0, 3, (EXAMPLES,), generator=generator)

    return batch


class CNN(nn.Sequential):
    """Strided and grouped convolutions, and a LayerNorm that no layer rule models."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(4, 6, 2, groups=2, bias=False),
            nn.Flatten(),
            nn.LayerNorm(24),
            nn.Linear(24, 3),
        )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[..., tuple[Tensor, Tensor]]]] = {
    "mlp": (mlp, inputs(10)),
    "cnn": (CNN, inputs(1, 8, 8)),
    "tied": (lambda: Tokens(True), tokens),
    "embedding": (lambda: Tokens(False), tokens),
    "wide": (cases.small_model, inputs(40)),
}
MORE = (
    cases.Case("DenseFilter", optim.DenseFilter, {"batch_size": EXAMPLES}, (), layers=True),
    cases.Case(
        "DenseFilter-sampled",
        optim.DenseFilter,
        {"batch_size": EXAMPLES, "prior_std": 0.5, "fisher": "sampled", "weight_decay": 0.1},
        (),
        layers=True,
    ),
    *(
        cases.Case(f"{make.__name__}-{metric}-{correction}", make, options, (), layers=True, decays=False)
        for make, own in ((samplers.Langevin, {}), (samplers.SNGD, {"batch_size": 64}))
        for metric in ("identity", "kronecker", "fisher", "empirical")
        for correction in (None, "flat", "jeffreys")
        if correction is None or (make is samplers.Langevin and metric == "fisher")
        for options in [{"num_data": 1344, "metric": metric, "correction": correction, "damping": 0.1, **own}]
    ),
)
BY_NAME = {case.name: case for case in (*cases.CASES, *MORE)}
ELEMENTWISE = {case.name for case in cases.ELEMENTWISE}
NEVER_FUSED = {"DenseFilter", "DenseFilter-sampled"}  # they take no option `fused`
NEEDS_LABELS = {case.name for case in MORE if case.options.get("metric") == "empirical"}


@dataclass(frozen=True)
class Run:
    """One optimizer on one network, in one way of training."""

    case: str
    network: str = "mlp"
    dtype: str = "float32"
    fused: bool = False
    way: str = "plain"  # plain, groups, accumulation, resume

    @property
    def key(self) -> str:
        return " ".join((self.case, self.network, self.dtype, "fused" if self.fused else "eager", self.way))


def runs() -> Iterator[Run]:
    """All runs of the record."""
    for case in BY_NAME:
        for dtype in ("float32", "float64"):
            for fused in (False,) if case in NEVER_FUSED else (False, True):
                yield Run(case, "mlp", dtype, fused)
            for network in ("cnn", "tied", "embedding"):
                yield Run(case, network, dtype)
        for way in ("groups", "accumulation", "resume"):
            yield Run(case, way=way)
        if case in ELEMENTWISE:
            yield Run(case, "wide", fused=True)


def _build(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    case = BY_NAME[run.case]
    options = {} if run.case in NEVER_FUSED else {"fused": run.fused}
    if run.way != "groups":
        return case.of(model, **options)
    named = list(model.named_parameters())
    groups = [{"params": named[i::3], "lr": (1 + i) * 1e-3} for i in range(3)]
    if not case.layers:
        return case(groups, **options)
    return case(model, params=groups, **options)


def _train(run: Run, model: nn.Module, optimizer: Any, steps: range, dtype: torch.dtype) -> None:
    data = NETWORKS[run.network][1]
    for index in steps:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 + index)
        parts = 2 if run.way == "accumulation" else 1
        with cases.drawn(optimizer) if parts > 1 else nullcontext():
            for _ in range(parts):
                x, y = data(generator, dtype)
                with cases.drawn(optimizer):
                    outputs = model(x)
                    loss = F.cross_entropy(outputs, y) / parts
                    cases.observe(optimizer, outputs, y if run.case in NEEDS_LABELS else None, loss)
                    loss.backward()
        optimizer.step()


def _digest(tensors: list[Tensor], in_order: bool) -> str:
    digests = [
        hashlib.sha256(f"{t.dtype} {tuple(t.shape)} ".encode() + t.detach().contiguous().numpy().tobytes()).hexdigest()
        for t in tensors
    ]
    return hashlib.sha256(" ".join(digests if in_order else sorted(digests)).encode()).hexdigest()


def carry_out(run: Run) -> list[str]:
    """The hashes of weights and of state, or the name of the error that refuses this combination."""
    torch.manual_seed(0)
    dtype = getattr(torch, run.dtype)

    def fresh() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = NETWORKS[run.network][0]().to(dtype)
        return model, _build(run, model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", "compiling the optimizer step")  # eager steps have the same bits
        try:
            model, optimizer = fresh()
            if run.way == "resume":
                _train(run, model, optimizer, range(STEPS // 2), dtype)
                weights, state = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
                model, optimizer = fresh()
                model.load_state_dict(weights)
                optimizer.load_state_dict(state)
                _train(run, model, optimizer, range(STEPS // 2, STEPS), dtype)
            else:
                _train(run, model, optimizer, range(STEPS), dtype)
        except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
            return [type(error).__name__]
    state = [t for entry in optimizer.state_dict()["state"].values() for t in entry.values() if isinstance(t, Tensor)]
    return [_digest([p for _, p in model.named_parameters()], True), _digest(state, False)]


def fingerprint() -> dict[str, str]:
    """What bits depend on beside the code."""
    model = platform.processor()
    if (info := Path("/proc/cpuinfo")).exists():
        model = next((line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line), "")
    try:
        compiler = subprocess.run(["c++", "--version"], capture_output=True, text=True, check=True).stdout.split("\n")[
            0
        ]
    except (OSError, subprocess.CalledProcessError):
        compiler = "none"
    capability = torch.backends.cpu.get_cpu_capability()
    return {"cpu": model, "capability": capability, "torch": str(torch.__version__), "compiler": compiler}


def recorded() -> tuple[dict[str, list[str]], str]:
    """The record, and in what this machine differs from the one it was made on ("" where it does not)."""
    record = json.loads(RECORD.read_text())
    here = fingerprint()
    differs = [f"{k} is {here[k]!r}, not {v!r}" for k, v in record["machine"].items() if here[k] != v]
    return record["hashes"], "; ".join(differs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--only", default="", help="runs whose key contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    known, differs = ({}, "") if arguments.record else recorded()
    if differs:
        print(f"nothing is compared: {differs}.")
        return 0
    chosen = [run for run in runs() if arguments.only in run.key]
    found, changed = {}, []
    for i, run in enumerate(chosen):
        found[run.key] = carry_out(run)
        if not arguments.record and found[run.key] != known.get(run.key):
            changed.append(run.key)
            print(f"\nchanged: {run.key}: {known.get(run.key)} -> {found[run.key]}")
        print(f"\r{i + 1}/{len(chosen)} {run.key:70}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if arguments.record:
        RECORD.write_text(json.dumps({"machine": fingerprint(), "hashes": found}, indent=1) + "\n")
    print(f"{len(chosen) - len(changed)} runs as recorded, {len(changed)} changed.")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
