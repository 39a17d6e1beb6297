"""What a GPU needs: state and draws on the device of their parameters, and no tensor of another one.

Without DEVICE=cuda (`make test DEVICE=cuda`), the second device is an imitation on the CPU, see tests/second_device.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from bayesgrad.structures import Structure
from cases import CASES

SCRIPT = Path(__file__).parents[1] / "second_device.py"


def test_all_rules_and_posteriors_on_another_device_are_those_on_the_cpu() -> None:
    device = os.environ.get("DEVICE", "")
    command = [sys.executable, str(SCRIPT), *([device] if device else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {*(case.name for case in CASES), *Structure.by_name}
    assert not any(found.values()), "\n".join(f"{name}: {words}" for name, words in found.items() if words)
