"""Through how many files one warm training step of an optimizer runs, and how often it changes from one to another.

A tracer notes the file of each call of a Python function of the package. "files" is the number of different files,
"switches" the number of times that a call leads into another file than the call before. The step is the 31st of a
model with one or two Linear layers, with the loop of the documentation: sampled, zero_grad, forward pass, observe,
backward, step.

Run: python benchmarks/call_trace.py [--list]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import bayesgrad
from bayesgrad import optim, samplers

HOME = str(Path(bayesgrad.__file__).parent)
CASES: dict[str, Callable[[nn.Module], Any]] = {
    "AdaBayes": lambda model: optim.AdaBayes(model.named_parameters(), batch_size=16),
    "FOOF": lambda model: optim.FOOF(model),
    "VOGN": lambda model: optim.VOGN(model, num_data=100),
    "KFAC": lambda model: optim.KFAC(model),
    "Langevin": lambda model: samplers.Langevin(model, num_data=100, metric="kronecker", damping=0.1),
}


def files_of(call: Callable[[], Any]) -> list[str]:
    """The files of the package through which a call runs, in order."""
    found: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            found.append(str(Path(frame.f_code.co_filename).relative_to(HOME)))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def train(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """One step by the loop of the documentation."""
    with optimizer.sampled():
        optimizer.zero_grad()
        outputs = model(x)
        loss = F.cross_entropy(outputs, y)
        optimizer.observe(outputs, loss=loss)
        loss.backward()
    optimizer.step()


def trace(build: Callable[[nn.Module], Any], widths: tuple[int, ...]) -> list[str]:
    """The files of one warm step."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(a, b) for a, b in pairwise(widths)])
    optimizer = build(model)
    x, y = torch.randn(16, widths[0]), torch.randint(0, widths[-1], (16,))
    for _ in range(30):
        train(model, optimizer, x, y)
    return files_of(lambda: train(model, optimizer, x, y))


def main() -> None:
    parser = argparse.ArgumentParser(description="Files and switches between files in one step.")
    parser.add_argument("--list", action="store_true", help="print the files, in order")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, build in CASES.items():
        counts = []
        for widths in ((10, 3), (10, 20, 3)):
            files = trace(build, widths)
            counts.append(f"{len(set(files))}/{sum(a != b for a, b in pairwise(files))}")
        print(f"{name:10} one layer {counts[0]:8} two layers {counts[1]}")
        if options.list:
            for file in trace(build, (10, 3)):
                print(f"    {file}")


if __name__ == "__main__":
    main()
