"""The memory of a training step, counted tensor by tensor: recorded layers keep nothing that nobody reads."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bayesgrad import SubsampledFisher, laplace
from bayesgrad.layers import output_covariance
from bayesgrad.layers.network import Network
from bayesgrad.optim import FOOF, KFAC, OGN, VOGN, KroneckerFilterFP


class Memory(TorchDispatchMode):
    """Counts the bytes of all tensors made by operations, now and at most; `given` are not counted."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {tensor.untyped_storage()._cdata: 0 for tensor in given}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._freed, storage._cdata)
        return found

    def _freed(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))


def peak(model: nn.Module, optimizer: Any, *parts: Tensor) -> int:
    """Of the third step with these micro-batches; the first two make the state."""
    for step in range(3):
        with Memory(*parts) as memory:
            optimizer.zero_grad()
            for x in parts:
                outputs = model(x)
                loss = F.cross_entropy(outputs, torch.zeros(len(x), dtype=torch.long)) / len(parts)
                if hasattr(optimizer, "observe"):
                    optimizer.observe(outputs, loss=loss)
                loss.backward()
                del outputs, loss
            optimizer.step()
        if step == 2:
            return memory.peak
    raise AssertionError


RULES: dict[str, Callable[[nn.Module, int], Any]] = {
    "FOOF": lambda m, n: FOOF(m, stats_every=1, fused=False),
    "FOOF-backward": lambda m, n: FOOF(m, stats_every=1, precondition="backward", fused=False),
    "KFAC": lambda m, n: KFAC(m, stats_every=1, fused=False),
    "KroneckerFilterFP": lambda m, n: KroneckerFilterFP(m, batch_size=n, stats_every=1, fused=False),
    "OGN": lambda m, n: OGN(m, num_data=1000, fused=False),
}


@pytest.mark.parametrize("rule", RULES)
def test_micro_batches_cost_no_memory(rule: str) -> None:
    """Sixteen micro-batches need as much as one of them."""
    one, many = perceptron(), perceptron()
    parts = [torch.randn(64, 64) for _ in range(16)]
    whole = peak(one, RULES[rule](one, 64), parts[0])
    assert peak(many, RULES[rule](many, 1024), *parts) < 1.1 * whole


def test_convolutions_are_not_unfolded_all_at_once() -> None:
    x = torch.randn(256, 3, 32, 32)
    plain, model = convolutional(), convolutional()
    base = peak(plain, torch.optim.SGD(plain.parameters(), lr=0.1), x)
    assert peak(model, FOOF(model, stats_every=1, fused=False), x) < 1.5 * base


def test_nothing_is_kept_after_a_step() -> None:
    model = perceptron()
    optimizer = VOGN(model, num_data=1000, fused=False)
    x, y = torch.randn(64, 64), torch.zeros(64, dtype=torch.long)
    sizes = []
    for _ in range(4):
        with Memory() as memory:
            with optimizer.sampled():
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        sizes.append(memory.now)
    assert sizes[-1] <= sizes[1]


# --- many outputs ---

CLASSES = 1000


def classifier(classes: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(392, 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    ).eval()


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("structure", ["diag", "kron", "input"])
def test_linearised_predictions_of_many_classes(structure: str, joint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 8 BLOCK elements beside the result: errors of two blocks of outputs, activations, temporary tensors.

    The Jacobian of a single example is ten times as large.
    """
    monkeypatch.setattr(output_covariance, "BLOCK", 1 << 20)
    monkeypatch.setattr(output_covariance, "CHUNK", 1 << 20)
    x, y = torch.randn(2, 1, 14, 14), torch.tensor([0, 1])
    model = classifier(CLASSES)
    posterior = laplace(
        model, [(x, y)], likelihood="categorical", structure=structure, fisher="sampled", progress=False
    )
    with torch.no_grad(), Memory(x) as memory:
        found = posterior._linear_moments(Network(model, (x,)), joint)[1]
    limit = 4 * 8 * (1 << 20)
    assert 4 * CLASSES * sum(p.numel() for p in model.parameters()) > 10 * limit
    assert memory.peak < limit + found.nbytes


@pytest.mark.parametrize("fisher", ["SubsampledFisher", "laplace"])
def test_the_exact_fisher_has_the_inputs_of_layers_once(fisher: str) -> None:
    """Inputs are much larger than errors here; ten times the classes may not take twice the memory."""
    sizes = []
    for classes in (2, 20):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(8, 2, 5), nn.Tanh(), nn.Flatten(), nn.Linear(32, classes))
        x, y = torch.randn(16, 8, 8, 8), torch.zeros(16, dtype=torch.long)
        with Memory(x) as memory:
            if fisher == "laplace":
                posterior = laplace(model, [(x, y)], likelihood="categorical", structure="subsampled", progress=False)
                kept = posterior.hessians
            else:
                kept = SubsampledFisher(model, x, fisher="exact")
            sizes.append(memory.now)
        del kept
    inputs = 4 * 16 * 16 * 200  # of the convolution, unfolded
    assert inputs < sizes[0] < sizes[1] < 2 * inputs
