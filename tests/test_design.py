"""The architecture of optimizers: one definition of each verb, a tree two deep, and the examples of the design page."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

import bayesgrad
from bayesgrad import optim, samplers
from bayesgrad.optimizer import BeliefOptimizer

ROOT = Path(__file__).parents[1]
SOURCE, PAGE = ROOT / "src" / "bayesgrad", ROOT / "docs" / "design.md"
VERBS = ("step", "zero_grad", "sampled", "add_param_group", "state_dict", "load_state_dict", "train", "eval")
OPTIMIZERS = ("optim", "samplers")  # and the files beside them
FILES = [*SOURCE.glob("*.py"), *(path for folder in OPTIMIZERS for path in (SOURCE / folder).glob("*.py"))]


def methods() -> list[tuple[str, str]]:
    """(class, method) of every class in the files of optimizers and samplers."""
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found += [(node.name, item.name) for item in node.body if isinstance(item, ast.FunctionDef)]
    return found


def optimizers(cls: type = BeliefOptimizer) -> list[type]:
    """All classes of the package under a class."""
    own = sorted((c for c in cls.__subclasses__() if c.__module__.startswith("bayesgrad.")), key=lambda c: c.__name__)
    return [found for one in own for found in (one, *optimizers(one))]


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_is_defined_once(verb: str) -> None:
    names = {c.__name__ for c in [*optimizers(), BeliefOptimizer, *BeliefOptimizer.__mro__[1:-2]]}
    owners = [cls for cls, method in methods() if method == verb and cls in names]
    assert len(owners) == 1, owners


def test_observe_is_defined_once() -> None:
    """Parts collect in methods of the same name, which only `BeliefOptimizer.observe` calls."""
    owners = [cls for cls, method in methods() if method == "observe"]
    assert sorted(owners) == ["BeliefOptimizer", "MetricPreconditioner", "Part"]


def test_no_optimizer_is_deeper_than_two_and_none_has_two_bases() -> None:
    assert optimizers()
    for cls in optimizers():
        depth = cls.__mro__.index(BeliefOptimizer)
        assert depth <= 2, cls
        assert len(cls.__bases__) == 1, cls


def tree(cls: type, indent: str = "") -> list[str]:
    own = sorted((c for c in cls.__subclasses__() if c.__module__.startswith("bayesgrad.")), key=lambda c: c.__name__)
    lines = []
    for i, one in enumerate(own):
        last = i == len(own) - 1
        lines.append(f"{indent}{'└── ' if last else '├── '}{one.__name__}")
        lines += tree(one, indent + ("    " if last else "│   "))
    return lines


def test_the_page_shows_the_tree_of_classes() -> None:
    (shown,) = re.findall(r"```\n(BeliefOptimizer\n.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown.splitlines() == ["BeliefOptimizer", *tree(BeliefOptimizer)]


def test_every_public_optimizer_is_in_the_tree() -> None:
    public = {*optim.__all__, "Langevin", "SNGD"}
    assert public <= {c.__name__ for c in optimizers()}
    assert all(hasattr(optim, name) or hasattr(samplers, name) for name in public)


def code(heading: str) -> list[str]:
    """The blocks of code of one section of the design page."""
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def test_a_new_optimizer_in_a_dozen_lines() -> None:
    """Precisions add up: P = 1/sigma^2 + sum of (B g)^2, and the step is B g/P."""
    source, use = code("A new optimizer in a dozen lines")
    assert len([line for line in source.splitlines() if line.strip() and "import" not in line]) <= 14
    page: dict = {}
    exec(compile(source + use, str(PAGE), "exec"), page)
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = page["RecursiveBayes"]([weight], batch_size=4, prior_std=2.0)
    gradients = torch.randn(50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected, precision = torch.zeros(3, dtype=torch.float64), torch.full((3,), 0.25, dtype=torch.float64)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
        precision = precision + (4 * gradient) ** 2
        expected = expected - 4 * gradient / precision
    model = torch.nn.Module()
    model.register_parameter("w", weight)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(optimizer.posterior(model).variance()["w"], 1 / precision, rtol=1e-12, atol=0)


def test_a_new_structure_in_one_file() -> None:
    """The block of each parameter is that of the dense Hessian."""
    page: dict = {}
    (source,) = code("A new structure in one file")
    exec(compile(source, str(PAGE), "exec"), page)
    dense = bayesgrad.laplace(page["model"], page["data"], likelihood="categorical", structure="full")
    blocks = bayesgrad.laplace(page["model"], page["data"], likelihood="categorical", structure="block diagonal")
    (whole,) = dense.hessians
    found, expected = torch.block_diag(*[hessian.dense() for hessian in blocks.hessians]), whole.dense()
    torch.testing.assert_close(found[:12, :12], expected[:12, :12])
    torch.testing.assert_close(found[12:, 12:], expected[12:, 12:])
    assert page["penalty"].item() == 0.0
