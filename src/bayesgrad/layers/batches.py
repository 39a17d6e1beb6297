"""Batches and outputs of other forms than tensors: mappings of arguments, and objects with logits.

A batch is a pair (inputs, labels), or a mapping with the key `"labels"`. Inputs are a tensor, a tuple of positional
arguments, or a mapping of keyword arguments. `Call` turns a model of such inputs into a function of tensors that
returns one tensor, which everything else expects.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayesgrad.layers.network import WRAPPED, unwrap

LABELS = "labels"
Inputs = Tensor | tuple[Tensor, ...] | Mapping[str, Any]
Forward = Callable[[nn.Module, Any], Any]
Output = Callable[[Any], Tensor]


def split_batch(batch: Any) -> tuple[Inputs, Tensor]:
    """Inputs and labels of a batch.

    Raises:
        TypeError: the batch is neither a pair nor a mapping with labels, or its labels are no tensor.
    """
    if isinstance(batch, Mapping):
        if LABELS not in batch:
            raise TypeError(f"a batch that is a mapping needs the key {LABELS!r}, got the keys {sorted(batch)}.")
        inputs, labels = {key: value for key, value in batch.items() if key != LABELS}, batch[LABELS]
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, labels = batch
    else:
        raise TypeError(
            "the loader must give pairs (inputs, labels) of tensors, or mappings with the key 'labels', got a "
            f"{type(batch).__name__}."
        )
    if not isinstance(labels, Tensor):
        raise TypeError(
            "the loader must give pairs (inputs, labels) of tensors, or mappings with the key 'labels', got labels of "
            f"type {type(labels).__name__}."
        )
    return inputs, labels


@dataclass(frozen=True)
class Call:
    """How a model is called, and which of its outputs is the one that the likelihood is about.

    Args:
        forward: `forward(model, inputs)`; None for `model(x)`, `model(*inputs)` for a tuple and `model(**inputs)` for a
            mapping, without labels.
        output: the tensor of outputs from what the model returns; None for the tensor itself, the attribute or key
            `logits`, or the only floating-point tensor of a tuple.
    """

    forward: Forward | None = None
    output: Output | None = None

    def __call__(self, model: nn.Module, inputs: Inputs) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """A model of tensors that returns one tensor, and the tensors; the model itself if it is one already."""
        model = unwrap(model)
        if isinstance(inputs, Mapping):
            inputs = {key: value for key, value in inputs.items() if key != LABELS}
            keys = [key for key, value in inputs.items() if isinstance(value, Tensor)]
            first = inputs[keys[0]].shape[:1] if keys else None
            keys = [key for key in keys if inputs[key].shape[:1] == first]  # others are no examples
            fixed = {key: value for key, value in inputs.items() if key not in keys}
            tensors = tuple(inputs[key] for key in keys)
        else:
            tensors = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
            keys, fixed = None, {}
        if not tensors or not all(isinstance(x, Tensor) for x in tensors):
            raise TypeError(
                "inputs must be a tensor, a tuple of tensors, or a mapping with tensors, got "
                f"{type(inputs).__name__} of {sorted({type(x).__name__ for x in tensors})}."
            )
        return Adapter(model, self, keys, fixed, isinstance(inputs, tuple | list)), tensors


class Adapter(nn.Module):
    """A model as a function of tensors that returns one tensor. Its parameters have the names of the model's own."""

    def __init__(
        self, model: nn.Module, call: Call, keys: list[str] | None, fixed: Mapping[str, Any], several: bool
    ) -> None:
        super().__init__()
        self.train(model.training)
        self.add_module(WRAPPED, model)
        self._call, self._keys, self._fixed, self._several = call, keys, fixed, several

    def forward(self, *tensors: Tensor) -> Tensor:
        model: Any = getattr(self, WRAPPED)
        given: Any = tensors if self._several else tensors[0]
        if self._keys is not None:
            given = {**self._fixed, **dict(zip(self._keys, tensors))}
        if self._call.forward is not None:
            found = self._call.forward(model, given)
        else:
            found = model(**given) if self._keys is not None else model(*tensors)
        return found if isinstance(found, Tensor) and self._call.output is None else self._chosen(found)

    def _chosen(self, found: Any) -> Tensor:
        if self._call.output is not None:
            found = self._call.output(found)
        elif isinstance(found, Mapping) and "logits" in found:
            found = found["logits"]
        elif isinstance(logits := getattr(found, "logits", None), Tensor):
            found = logits
        elif isinstance(found, tuple | list):
            some = [part for part in found if isinstance(part, Tensor) and part.is_floating_point()]
            found = some[0] if len(some) == 1 else found
        if not isinstance(found, Tensor):
            what = "output= returned" if self._call.output is not None else "the model returned"
            raise TypeError(
                f"outputs must be one tensor, and {what} {_described(found)}: pass output=, a function from what the "
                "model returns to the tensor of outputs."
            )
        return found


def _described(found: Any) -> str:
    if isinstance(found, Mapping):
        return f"a {type(found).__name__} with the keys {sorted(map(str, found))}"
    if isinstance(found, tuple | list):
        return f"a {type(found).__name__} of {', '.join(type(part).__name__ for part in found)}"
    return f"a {type(found).__name__}"


def to_device(inputs: Inputs, device: torch.device) -> Inputs:
    """The inputs with all tensors on a device."""
    if isinstance(inputs, Mapping):
        return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(x.to(device) if isinstance(x, Tensor) else x for x in inputs)
    return inputs.to(device) if isinstance(inputs, Tensor) else inputs


def batches_on(loader: Iterable, device: torch.device) -> Iterator[tuple[Inputs, Tensor]]:
    """Inputs and labels of each batch with examples, on a device."""
    for inputs, labels in map(split_batch, loader):
        if len(labels):
            yield to_device(inputs, device), labels.to(device)


def with_progress(loader: Iterable, progress: bool | None, title: str) -> Iterable:
    """The loader, with a progress bar if one is wanted and rich is installed; None shows it in a terminal."""
    if progress is False or (progress is None and not sys.stderr.isatty()):
        return loader
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return loader
    total = len(loader) if hasattr(loader, "__len__") else None  # pyright: ignore[reportArgumentType]
    return track(loader, title, total=total, console=Console(stderr=True), transient=True)


class ProgressLine:
    """A progress line, written to stderr for operations that take more than two seconds.

    Args:
        enabled: whether to write it; None writes it in a terminal.
        steps: the number of steps.
        value: what `update` shows beside the number of steps that were taken.
    """

    def __init__(self, enabled: bool | None, steps: int, value: str = "bound") -> None:
        self.enabled = sys.stderr.isatty() if enabled is None else enabled
        self.steps, self.value, self.last, self.written = steps, value, time.monotonic() + 2, False

    def update(self, count: int, value: float | None) -> None:
        if self.enabled and time.monotonic() > self.last:
            words = "" if value is None else f", {self.value} {value:.6g}"
            print(f"\r  step {count}/{self.steps}{words} ", end="", file=sys.stderr, flush=True)
            self.last, self.written = time.monotonic() + 0.2, True

    def close(self) -> None:
        if self.written:
            print(file=sys.stderr)
