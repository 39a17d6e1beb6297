"""Running statistics of normalisation layers: estimated for given weights, or a warning where they are of others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from bayesgrad.layers.stateless import functional_call
from bayesgrad.warning import warn

SPREAD = 0.05  # of the weights, from which statistics matter: docs/binary.md has the measurements
_warned: WeakSet[nn.Module] = WeakSet()


def running_norms(model: nn.Module) -> dict[str, _NormBase]:
    """Name -> layer with running statistics: BatchNorm, and InstanceNorm with `track_running_stats`."""
    modules = model.named_modules()
    return {name: m for name, m in modules if isinstance(m, _NormBase) and m.running_mean is not None}


def spread(mean: Mapping[str, Tensor], variance: Mapping[str, Tensor]) -> float:
    """The largest fraction of variance in the mean square of a matrix or filter: 0 for constants, 1 for noise alone."""
    fractions = [0.0]
    for name, v in variance.items():
        total = float((v + mean[name].square()).sum()) if v.ndim > 1 else 0.0
        fractions.append(float(v.sum()) / total if total else 0.0)
    return max(fractions)


def warn_of_statistics(model: nn.Module, spread: Callable[[], float], remedy: str) -> None:
    """Warns, once for a model, if it has running statistics and weights vary so much that they are of other weights."""
    if model in _warned or not running_norms(model) or not spread() > SPREAD:
        return
    _warned.add(model)
    warn(
        "the model's BatchNorm has running statistics of other weights than those to predict with (of weights that "
        f"training sampled, or of a new model): {remedy}.",
    )


def batches_of(given: Any) -> Iterable[tuple[Tensor, ...]]:
    """The model's arguments for each batch of `given`: inputs, a tuple of them, or a loader.

    Raises:
        TypeError: an iterator, which could be read only once.
    """
    if isinstance(given, Tensor):
        return [(given,)]
    if isinstance(given, tuple) and all(isinstance(part, Tensor) for part in given):
        return [given]
    if isinstance(given, str | Iterator) or not isinstance(given, Iterable):
        raise TypeError(
            "statistics must be training inputs, or a loader that is iterated once for each sample, got "
            f"{given if isinstance(given, str) else type(given).__name__!r}."
        )
    return map(_arguments, given)


def _arguments(batch: Any) -> tuple[Tensor, ...]:
    """Those of a batch of a loader, which may have labels too."""
    inputs = batch[0] if isinstance(batch, tuple | list) else batch
    return inputs if isinstance(inputs, tuple) else (inputs,)


@torch.no_grad()
def estimated(model: nn.Module, weights: Mapping[str, Tensor], given: Any) -> dict[str, Tensor]:
    """The buffers of normalisation layers by name: averages over the batches of `given` with these weights.

    All batches have the same weight, as in torch.optim.swa_utils.update_bn. The model's own buffers are not changed,
    and all else in it runs in its mode.

    Raises:
        ValueError: there are no batches.
    """
    norms = running_norms(model)
    buffers = {f"{name}.{key}": b.clone() for name, norm in norms.items() for key, b in norm.named_buffers()}
    for name in norms:
        buffers[f"{name}.num_batches_tracked"].zero_()
    before = [(norm, norm.training, norm.momentum) for norm in norms.values()]
    count = 0
    try:
        for count, inputs in enumerate(batches_of(given) if norms else (), 1):
            for norm in norms.values():
                norm.training, norm.momentum = True, 1 / count
            functional_call(model, {**weights, **buffers}, inputs)
    finally:
        for norm, training, momentum in before:
            norm.training, norm.momentum = training, momentum
    if norms and not count:
        raise ValueError("statistics must have at least one batch of training inputs, got none.")
    return buffers
