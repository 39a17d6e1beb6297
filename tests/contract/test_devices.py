"""What a GPU needs: state and draws on the device of their parameters, and no tensor of another one.

Without DEVICE=cuda (`make test DEVICE=cuda`), the second device is an imitation on the CPU, see tests/second_device.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

from cases import CASES

DEVICE = os.environ.get("DEVICE", "")
SCRIPT = Path(__file__).parents[1] / "second_device.py"


@pytest.mark.skipif(
    not DEVICE and not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no devices that are written in Python",
)
def test_all_rules_and_posteriors_on_another_device_are_those_on_the_cpu() -> None:
    command = [sys.executable, str(SCRIPT), *([DEVICE] if DEVICE else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) >= {*(case.name for case in CASES), "diag", "kron", "full"}
    assert not any(found.values()), "\n".join(f"{name}: {words}" for name, words in found.items() if words)
