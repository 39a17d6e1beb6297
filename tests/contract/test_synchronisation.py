"""No value of a tensor is read by the host in a steady step, so that a GPU would never wait for it."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from cases import SAMPLERS, Case, batch, every_case, small_model

READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "bincount", "unique_dim", "_unique2", "masked_select"}
METHODS = ("tolist", "cpu", "numpy")


class HostReads(TorchDispatchMode):
    """Counts what would make the host wait for a device, by the line of the package that asks for it.

    On a CPU nothing waits, so the tensors that the package keeps on the CPU (`on_cpu`) are told by their memory.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        names = optimizer.on_cpu()
        self.own = [v for entry in optimizer.state.values() for k, v in entry.items() if k in names]
        self.on_cpu = {t.untyped_storage().data_ptr() for t in self.own}
        self.found: Counter[str] = Counter()

    def note(self, what: str, tensor: Tensor) -> None:
        if tensor.untyped_storage().data_ptr() in self.on_cpu:
            return
        if frames := [frame for frame in inspect.stack(0) if "/bayesgrad/" in frame.filename]:
            place = frames[0].filename.rsplit("/bayesgrad/", 1)[1]
            self.found[f"{what} in {place}:{frames[0].lineno} {frames[0].function}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.overloadpacket.__name__ in READS:
            self.note(func.overloadpacket.__name__, args[0])
        return func(*args, **(kwargs or {}))

    def method(self, name: str) -> Any:
        original = getattr(Tensor, name)

        def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.note(name, tensor)
            return original(tensor, *args, **kwargs)

        return noted


@contextmanager
def counted(optimizer: Any, found: Counter[str]) -> Iterator[None]:
    reads = HostReads(optimizer)
    with pytest.MonkeyPatch.context() as patch, reads:
        for name in METHODS:
            patch.setattr(Tensor, name, reads.method(name))
        yield
    found += reads.found


def refreshes(optimizer: Any) -> list[list[int]]:
    """The steps of the latest refresh: an inversion, a comparison that decides about one, or an update from a batch,
    which is checked first."""
    return [entry["clock"].tolist() for entry in optimizer.state.values() if "clock" in entry]


@every_case
def test_a_steady_step_reads_nothing(case: Case) -> None:
    options = inspect.signature(case.make).parameters
    wanted: dict[str, Any] = {"fused": False, "update_every": 100, "stats_every": 10}
    if case in SAMPLERS:
        wanted["nonfinite"] = "ignore"
    model = small_model(width=30)
    optimizer: Any = case.of(model, **{k: v for k, v in wanted.items() if k in options})
    steady = 0
    for index in range(40):
        x, y = batch(index)
        found: Counter[str] = Counter()
        before = refreshes(optimizer)
        with optimizer.sampled():
            optimizer.zero_grad()
            outputs = model(x)
            loss = F.cross_entropy(outputs, y)
            with counted(optimizer, found):
                optimizer.observe(outputs, loss=loss)
                loss.backward()
        with counted(optimizer, found):
            optimizer.step()
        if index >= 20 and index + 1 != 32 and refreshes(optimizer) == before:  # step 32 looks for NaN
            steady += 1
            assert not found, "\n".join(f"{n}  {what}" for what, n in found.items())
    assert steady > 10
