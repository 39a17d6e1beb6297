"""All optimizers, samplers and posteriors on another device; prints JSON: name -> what differs from the CPU.

Run: python second_device.py [DEVICE]. Without one, its tensors are computed on the CPU, but every operation refuses
tensors of both devices, as CUDA's do (single numbers excepted). It has a process of its own since torch lets a process
name such a device once, and then takes it for the accelerator.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from bayesgrad import laplace
from bayesgrad.structures import Structure
from cases import CASES, Case, batch, drawn, small_model

NAME = "elsewhere"
COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default, torch.ops.aten._foreach_copy_.default)
D = torch.float64


class Elsewhere(Tensor):
    """A tensor of the second device, with its values on the CPU."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Elsewhere:
        where = dict(strides=values.stride(), storage_offset=values.storage_offset(), layout=values.layout)
        self = Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=f"{NAME}:0", **where)
        self.values = values
        return self

    def tolist(self) -> list:
        return self.values.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        return run(func, args, kwargs or {})


class SecondDevice(TorchDispatchMode):
    """Also for functions that create tensors, as `torch.empty(3, device="elsewhere")`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        return run(func, args, kwargs or {})


class NewTensors(TorchFunctionMode):
    """`torch.tensor` and `torch.as_tensor` do not dispatch."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, new = kwargs or {}, func in (torch.tensor, torch.as_tensor)
        if not new or isinstance(args[0], Tensor) or torch.device(kwargs.get("device") or "cpu").type != NAME:
            return func(*args, **kwargs)
        return Elsewhere(func(*args, **{**kwargs, "device": "cpu"}))


def run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    here = [t for t in tensors if not isinstance(t, Elsewhere)]
    there, target = len(here) < len(tensors), kwargs.get("device")
    if there and func not in COPIES and any(t.dim() for t in here):
        raise RuntimeError(f"{func} of tensors on two devices: {[(t.device.type, tuple(t.shape)) for t in tensors]}")
    if target is not None:
        there = torch.device(target).type == NAME
        kwargs = {**kwargs, "device": torch.device("cpu")}
    with _disable_current_modes():
        found = func(*tree_map_only(Elsewhere, values_of, args), **tree_map_only(Elsewhere, values_of, kwargs))
    if func is torch.ops.aten.copy_.default:
        return args[0]
    if not there or found is None:
        return found
    found = tree_map_only(Tensor, Elsewhere, found)
    return found if target is not None else return_and_correct_aliasing(func, args, kwargs, found)


def values_of(tensor: Tensor) -> Tensor:
    return tensor.values if isinstance(tensor, Elsewhere) else tensor.cpu()


def moved(value: Tensor, device: str) -> Tensor:
    return Elsewhere(value.detach().clone()) if device == NAME else value.detach().to(device, copy=True)


def model_on(device: str) -> nn.Module:
    model = small_model(D, width=24)
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = nn.Parameter(moved(p, device))
    return model


def train(model: nn.Module, optimizer: Any, steps: range, device: str) -> None:
    for index in steps:
        x, y = (moved(value, device) for value in batch(index, D))
        optimizer.zero_grad()
        with drawn(optimizer):
            outputs = model(x)
            loss = nn.functional.cross_entropy(outputs, y)
            optimizer.observe(outputs, loss=loss)
            loss.backward()
        optimizer.step()


def training(case: Case, device: str) -> list[Tensor]:
    """The weights after three steps, of which the last follows a saved state, and those to evaluate with."""
    model = model_on(device)
    torch.manual_seed(0)
    optimizer: Any = case.of(model)
    train(model, optimizer, range(2), device)
    state, cpu = optimizer.state_dict(), optimizer.on_cpu()
    found = {(n, v.device.type) for entry in state["state"].values() for n, v in entry.items() if isinstance(v, Tensor)}
    odd = {(name, where) for name, where in found if where != (torch.device("cpu").type if name in cpu else device)}
    assert not odd, f"state on another device: {odd}"
    optimizer = case.of(model)
    optimizer.load_state_dict(state)
    train(model, optimizer, range(2, 3), device)
    trained = [values_of(p.detach()).clone() for p in model.parameters()]
    optimizer.eval()
    return [*trained, *(values_of(p.detach()).clone() for p in model.parameters())]


def predicting(structure: str, device: str) -> list[Tensor]:
    """Linearised predictions and their variance, and the evidence."""
    model = model_on(device)
    data = [tuple(moved(value, device) for value in batch(index, D)) for index in range(2)]
    posterior = laplace(model, data, likelihood="categorical", structure=structure, num_data=64)
    found = posterior.predict(data[0][0], seed=0)
    return [
        values_of(found if isinstance(found, Tensor) else found[0]),
        values_of(posterior.log_marginal_likelihood().detach()),
    ]


def difference(compute: Callable[..., list[Tensor]], what: Any, device: str) -> str:
    """What a computation on the device has raised, or by how much it differs from that on the CPU."""
    expected = compute(what, "cpu")
    try:
        with ExitStack() as stack:
            for mode in (SecondDevice(), NewTensors()) if device == NAME else ():
                stack.enter_context(mode)
            found = compute(what, device)
    except Exception as error:
        return "".join(traceback.format_exception(error))[-2000:]
    most = max(float((a - b).abs().max()) for a, b in zip(expected, found))
    return "" if most <= 1e-10 else f"differs by {most:.1e}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = sys.argv[1] if len(sys.argv) > 1 else NAME
    if chosen == NAME:
        backend_registration._setup_privateuseone_for_python_backend(NAME)
    results = {case.name: difference(training, case, chosen) for case in CASES}
    results |= {structure: difference(predicting, structure, chosen) for structure in Structure.by_name}
    print(json.dumps(results))
