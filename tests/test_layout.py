"""The architecture, enforced: imports point only downwards, and importing stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "bayesgrad"
LAYERS = [
    ["__init__"],
    ["integrations"],
    ["plots"],
    ["conformal", "metrics"],
    ["models"],
    ["inference"],
    ["families"],
    ["samplers"],
    ["laplace"],
    ["optim"],
    ["optimizer"],
    ["finite"],
    ["closures", "initial_state"],
    ["preconditioners"],
    ["sources"],
    ["passes"],
    ["checkpoint"],
    ["saved_state"],
    ["constraints"],
    ["parts"],
    ["rules"],
    ["posterior"],
    ["structures"],
    ["layers"],
    ["belief"],
    ["precision"],
    ["data_shards"],
    ["custom_likelihoods"],
    ["likelihoods"],
    ["lognormal", "predictions"],
    ["packing"],
    ["shards"],
    ["joining", "lost_processes", "process_limits"],
    ["directions", "distributed", "kernels", "noise", "schedule"],
    ["products", "warning"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imported(path: Path) -> set[str]:
    """The top-level modules of the package that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "bayesgrad" and len(parts) > 1:
                found.add(parts[1] if parts[1] in LEVEL else "__init__")
    return found


def test_imports_point_downwards() -> None:
    upward = []
    for path in SOURCE.rglob("*.py"):
        top = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        assert top in LEVEL, f"{path.name} has no place in the layout"
        upward += [f"{top} imports {name}" for name in imported(path) if name != top and LEVEL[name] <= LEVEL[top]]
    assert not upward


def test_warnings_name_the_line_of_the_user() -> None:
    """By one function: a number of frames would be right for one way to call only."""
    found = [path.name for path in SOURCE.rglob("*.py") if "warnings.warn(" in path.read_text()]
    assert found == ["warning.py"]


def test_importing_needs_nothing_but_torch_and_numpy_and_no_compiler() -> None:
    code = (
        "import sys, bayesgrad; names = {name.split('.')[0] for name in sys.modules};"
        "others = {'sklearn', 'scipy', 'matplotlib', 'hypothesis', 'pytest', 'transformers', 'accelerate', 'skorch'};"
        "print(sorted(names & (others | {'pytorch_lightning', 'lightning', 'optuna'})),"
        "'torch._inductor.compile_fx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False"


@pytest.mark.parametrize(
    ("package", "use", "remedy"),
    [
        ("sklearn", "import bayesgrad.models", "bayesgrad.models needs scikit-learn: pip install scikit-learn."),
        (
            "torchmetrics",
            "import torch; from bayesgrad import metrics; metrics.calibration_error(torch.ones(1, 1), torch.zeros(1))",
            "scores of predictions need torchmetrics: pip install torchmetrics.",
        ),
        *[
            (package, f"import bayesgrad.integrations.{name}", f"bayesgrad.integrations.{name} needs {words}.")
            for package, name, words in (
                ("transformers", "huggingface", "transformers: pip install transformers"),
                ("skorch", "skorch", "skorch: pip install skorch"),
                ("pytorch_lightning", "lightning", "Lightning: pip install lightning"),
            )
        ],
        (
            "optuna",
            "from bayesgrad.integrations import report; report(None, {'loss': 1.0}, 'loss', 0)",
            "pruning needs optuna: pip install optuna.",
        ),
    ],
)
def test_a_missing_extra_is_named(package: str, use: str, remedy: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None\ntry: {use}\nexcept ImportError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == remedy


def test_no_file_asks_to_be_split() -> None:
    long = {path.name: lines for path in SOURCE.rglob("*.py") if (lines := len(path.read_text().splitlines())) > 450}
    assert not long


def test_models_are_imported_when_they_are_used() -> None:
    """They need scikit-learn, which nothing else of the library does."""
    code = (
        "import sys, bayesgrad; assert 'sklearn' not in sys.modules; assert 'models' in dir(bayesgrad);"
        "assert bayesgrad.models.GLM; assert not hasattr(bayesgrad, 'nonesuch')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
