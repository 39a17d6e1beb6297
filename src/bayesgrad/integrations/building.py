"""Optimizers from a model and a loader: param groups, counts of data, devices and dtypes."""

from __future__ import annotations

import inspect
from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from bayesgrad.distributed import joint_processes
from bayesgrad.layers.network import unwrap
from bayesgrad.optimizer import BeliefOptimizer


def parameter_groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """Two param groups: weight matrices, and the biases and parameters of normalisation, which are not decayed.

    An option is one value, or a pair of one for each group. One value is for both groups, except for `weight_decay`,
    which is 0 in the second. Rules with a prior have no weight decay: they take `prior_precision=(10.0, 0.1)`, a wide
    prior for the second group, and one value for all weights is the usual choice. Parameters that do not require
    gradients are left out.

    Args:
        model: whose parameters to group.
        options: of the optimizer.

    Returns:
        Groups of named parameters, as optimizers of this package and of torch take them; empty ones are left out.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
        >>> [group["weight_decay"] for group in parameter_groups(model, weight_decay=0.01)]
        [0.01, 0.0]

    Checked by: tests/contract/test_integration_helpers.py.
    """
    model = unwrap(model)
    kept = {
        id(p)
        for name, module in model.named_modules()
        for own, p in module.named_parameters(recurse=False)
        if p.dim() < 2 or own.endswith("bias") or "norm" in type(module).__name__.lower()
    }
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = []
    for second in (False, True):
        members = [(name, p) for name, p in named if (id(p) in kept) == second]
        if members:
            own = {name: _of_group(name, value, second) for name, value in options.items()}
            groups.append({"params": members, **own})
    return groups


def _is_pair(name: str, value: Any) -> bool:
    return isinstance(value, tuple) and name != "betas"


def _of_group(name: str, value: Any, second: bool) -> Any:
    if _is_pair(name, value):
        if len(value) != 2:
            raise ValueError(f"{name} must be one value, or a pair of values for two groups, got {value!r}.")
        return value[second]
    return 0.0 if name == "weight_decay" and second else value


def counts(loader: Any, *, accumulate: int = 1) -> dict[str, int]:
    """`num_data` and `batch_size` of a DataLoader, as optimizers of this package count them.

    `num_data` is the number of examples that the loader chooses from; `batch_size` is the number of examples whose mean
    loss is differentiated in a step, in all processes that train this model. Where an example has several losses, as
    tokens, multiply `batch_size` by their number.

    Args:
        loader: a DataLoader.
        accumulate: the number of batches of a step.

    Raises:
        ValueError: a number does not follow from the loader.

    Example:
        >>> counts(torch.utils.data.DataLoader(range(100), batch_size=8))
        {'num_data': 100, 'batch_size': 8}

    Checked by: tests/contract/test_integration_helpers.py.
    """
    dataset, batches = getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", getattr(loader, "sampler", None))
    if not isinstance(dataset, Sized):
        raise ValueError("the number of examples does not follow from the loader: pass num_data=.")
    if isinstance(sampler, SubsetRandomSampler):
        num_data = len(sampler)
    elif isinstance(sampler, (SequentialSampler, RandomSampler, WeightedRandomSampler, DistributedSampler)) or (
        isinstance(sampler, Sized) and len(sampler) == len(dataset)
    ):
        num_data = len(dataset)
    else:
        raise ValueError(
            f"the number of examples does not follow from a loader with a {type(sampler).__name__}: pass num_data=."
        )
    size = getattr(batches, "batch_size", None) or getattr(loader, "batch_size", None)
    if not isinstance(size, int):
        raise ValueError("the size of a batch does not follow from the loader: pass batch_size=.")
    # accelerate's: batches of this size are divided between processes.
    divided = getattr(batches, "split_batches", False) or getattr(loader, "split_batches", False)
    processes = 1 if divided else joint_processes()
    return {"num_data": num_data, "batch_size": min(size * accumulate * processes, num_data)}


def build_optimizer(
    kind: type[BeliefOptimizer], model: nn.Module, loader: Any = None, *, accumulate: int = 1, **options: Any
) -> BeliefOptimizer:
    """An optimizer of a model, with the param groups of `parameter_groups` and the `counts` of a loader.

    `num_data` and `batch_size` are filled in where the class has them and they are not given. State is created on the
    devices of the parameters, in float32 at least, so move the model before: `.to(device)` and `.to(dtype)` of the
    model do not move the state of an optimizer that has taken a step.

    Args:
        kind: a class of `bayesgrad.optim` or `bayesgrad.samplers`.
        model: to train.
        loader: of the training data; None if the counts are given, or not needed.
        accumulate: the number of batches of a step.
        options: of the class. `weight_decay`, `lr` and `prior_precision` may be pairs, see `parameter_groups`.

    Example:
        >>> from bayesgrad.optim import IVON
        >>> loader = torch.utils.data.DataLoader(range(100), batch_size=8)
        >>> build_optimizer(IVON, nn.Linear(3, 2), loader, lr=0.1).param_groups[0]["num_data"]
        100

    Checked by: tests/contract/test_integration_helpers.py.
    """
    model = unwrap(model)
    if (odd := next((name for name, p in model.named_parameters() if p.is_meta), None)) is not None:
        raise ValueError(f"{odd} is on the meta device and has no values: load or initialise the model first.")
    known = inspect.signature(kind).parameters
    if loader is not None:
        wanted = [name for name in ("num_data", "batch_size") if name in known and name not in options]
        found = counts(loader, accumulate=accumulate) if wanted else {}
        options |= {name: found[name] for name in wanted}
    paired = [name for name, value in options.items() if name == "weight_decay" or _is_pair(name, value)]
    groups = parameter_groups(model, **{name: options.pop(name) for name in paired})
    make: Any = kind
    return make(model, params=groups, **options) if kind.takes_model else make(groups, **options)


def batch_to(model: nn.Module, batch: Any) -> Any:
    """A batch with its tensors on the device of the model, and floating-point tensors in its dtype.

    Args:
        model: whose first floating-point parameter says where.
        batch: a tensor, or tuples, lists and dicts of tensors; other objects are kept.

    Example:
        >>> model = nn.Linear(3, 2).to(torch.bfloat16)
        >>> x, y = batch_to(model, (torch.ones(4, 3), torch.zeros(4, dtype=torch.long)))
        >>> x.dtype, y.dtype
        (torch.bfloat16, torch.int64)

    Checked by: tests/contract/test_integration_helpers.py.
    """
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)

    return pytree.tree_map(move, batch)
