"""Scripts in examples/ run; what they show is tested in tests/contract, in small and with closed forms."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
RANGES = {  # of the last number that a script prints after these words
    "accelerate_loop": ("accuracy", 0.85, 1.0),
    "binary_network": ("accuracy", 0.93, 1.0),  # averaged over networks
    "calibrated_regression": ("coverage", 0.82, 0.98),  # conformal: 0.9 and two standard errors of 100 + 150 labels
    "continual_learning": ("mean accuracy", 0.8, 1.0),  # 0.65 without a prior
    "ignite_digits": ("accuracy", 0.85, 1.0),
    "laplace_lora": ("NLL", 0.25, 0.39),  # 0.40 at the mode
    "lightning_digits": ("accuracy", 0.7, 1.0),
    "optuna_pruning": ("loss", 0.0, 1.8),
    "ood_detection": ("AUROC", 0.9, 1.0),  # the epistemic score
    "posterior_sampling": ("R-hat", 0.99, 1.15),
    "replace_adamw": ("accuracy", 0.92, 1.0),
    "skorch_digits": ("accuracy", 0.9, 1.0),
    "topics": ("recovered", 1.0, 1.0),
    "trainer_bert": ("accuracy", 0.8, 1.0),
    "trainer_lora": ("->", 2.0, 2.54),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RANGES)
def test_script(name: str) -> None:
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py", "--small"],
        capture_output=True,
        text=True,
        env=os.environ | quiet,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    words, low, high = RANGES[name]
    found = [float(number) for number in re.findall(rf"{words} ([0-9.]+)", done.stdout)]
    assert found
    assert low <= found[-1] <= high


def test_every_script_is_listed_and_run() -> None:
    listed = set(re.findall(r"\[(\w+)\.py\]", (FOLDER / "README.md").read_text()))
    shared, elsewhere = {"digits", "small_gpt"}, {"ddp", "fsdp"}
    scripts = {path.stem for path in FOLDER.glob("*.py")} - shared
    assert listed == scripts
    assert set(RANGES) == scripts - elsewhere
