"""Through how many files one warm training step of an optimizer runs, and how often it changes from one to another.

A tracer notes the file of each call of a Python function of the package, and of each return to one. "files" is the
number of different files, "switches" the number of times that a call or a return leads into another file than the one
before. The step is the third of a small MLP: zero_grad, the forward pass, observe, backward and step.

Run: python benchmarks/call_trace.py [--list]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
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


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 3))


def files_of(call: Callable[[], Any], returns: bool) -> list[str]:
    """The files of the package through which a call runs, in order."""
    found: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            found.append(frame.f_code.co_filename)
        if returns and event == "return" and frame.f_code.co_filename.startswith(HOME):
            caller = frame.f_back
            while caller is not None and not caller.f_code.co_filename.startswith(HOME):
                caller = caller.f_back
            if caller is not None:
                found.append(caller.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, build in CASES.items():
      for returns in (False, True):
       for whole in (False, True):
        model = network()
        optimizer = build(model)
        x, y = torch.randn(16, 10), torch.randint(0, 3, (16,))

        def passes() -> None:
            from contextlib import nullcontext
            with optimizer.sampled() if name == "VOGN" else nullcontext():
                optimizer.zero_grad()
                outputs = model(x)
                loss = F.cross_entropy(outputs, y)
                if hasattr(optimizer, "observe"):
                    optimizer.observe(outputs)
                loss.backward()

        def step() -> None:
            passes()
            optimizer.step()

        for _ in range(3):
            step()
        if whole:
            files = files_of(step, returns)
        else:
            passes()
            files = files_of(optimizer.step, returns)
        switches = sum(a != b for a, b in zip(files, files[1:]))
        print(f"{name:10} returns={returns} whole={whole} {len(set(files)):3} files {switches:4} switches")
        if options.list:
            for file in sorted(set(files)):
                print(f"    {Path(file).relative_to(HOME)}")


if __name__ == "__main__":
    main()
