"""A user's script is checked with the types that the package ships: right code passes, wrong code is found."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RIGHT = """
import torch
import bayesgrad
from bayesgrad import optim, samplers

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))

adabayes: torch.optim.Optimizer = optim.AdaBayes(model.parameters(), lr=1e-3, batch_size=16)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(adabayes, 10)
ivon = optim.IVON(model.named_parameters(), num_data=16)
with ivon.sampled():
    ivon.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
ivon.step()
kfac = optim.KFAC(model, lr=0.03, losses_per_example=1)
kfac.observe(model(x))

posterior: bayesgrad.Posterior = bayesgrad.laplace(model, [(x, y)], likelihood="categorical", structure="kron")
draws: dict[str, torch.Tensor] = posterior.sample(3)
sampler = samplers.Langevin(model, lr=0.1, num_data=16)
penalty: torch.Tensor = bayesgrad.EWC(posterior)(model)
"""
WRONG = """
import torch
import bayesgrad

model = torch.nn.Linear(4, 3)
optimizer = bayesgrad.optim.AdaBayes(model.parameters())
optimizer = bayesgrad.optim.AdaBayes(model.parameters(), batch_size=16, learning_rate=0.1)
optimizer.posteriors(model)
"""


def check(folder: Path, source: str) -> list[tuple[int, str]]:
    """The lines in which pyright finds an error, with the rules."""
    pyright = shutil.which("pyright", path=str(Path(sys.executable).parent))
    if pyright is None:
        pytest.skip("pyright is not installed")
    (folder / "script.py").write_text(source)
    (folder / "pyrightconfig.json").write_text(json.dumps({"include": ["script.py"], "typeCheckingMode": "standard"}))
    command = [pyright, "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    return [
        (d["range"]["start"]["line"], d["rule"]) for d in found["generalDiagnostics"] if d.get("severity") == "error"
    ]


def test_a_right_script_has_no_errors(tmp_path: Path) -> None:
    assert check(tmp_path, RIGHT) == []


def test_mistakes_are_found(tmp_path: Path) -> None:
    assert check(tmp_path, WRONG) == [
        (5, "reportCallIssue"),
        (6, "reportCallIssue"),
        (7, "reportAttributeAccessIssue"),
    ]
