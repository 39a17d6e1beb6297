"""Checks and copies of an optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from bayesgrad.optimizer.base import BeliefOptimizer


def check_saved(optimizer: BeliefOptimizer, saved: Mapping[str, Any]) -> None:
    """Raises ValueError if a state dict does not fit the optimizer's class, groups or parameters."""
    name = type(optimizer).__name__
    groups = saved.get("param_groups")
    whole = isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups)
    if not whole or not isinstance(saved.get("state"), Mapping):
        raise ValueError(
            f"a state of {name} must have 'state' and 'param_groups', but one is missing: is the file truncated?"
        )
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    given = [len(group.get("params", ())) for group in saved["param_groups"]]
    if sizes != given:
        raise ValueError(f"the saved state has param groups of {given} parameters, but this {name} has {sizes}.")
    for index, (group, given_group) in enumerate(zip(optimizer.param_groups, saved["param_groups"])):
        # torch adds "differentiable" to the defaults when it unpickles or loads; groups do not have it.
        missing = sorted({*optimizer.defaults, "base_lr", "last_lr"} - {"differentiable"} - set(given_group))
        if missing:
            raise ValueError(
                f"group {index} of the saved state lacks {missing}: it is not a state of {name}, or it is truncated."
            )
        optimizer._check(given_group)
        for position, (p, key) in enumerate(zip(group["params"], given_group["params"])):
            where = f"parameter {position} of group {index}"
            entry = saved["state"].get(key, {})
            slots = optimizer._slots_of(p, given_group)
            odd = next((k for k, value in entry.items() if not isinstance(value, Tensor)), None)
            if odd is not None or ("step" in entry and entry["step"].numel() != 1):
                raise ValueError(
                    f"{odd or 'step'} in the saved state of {where} must be a tensor{'' if odd else ' of one element'}."
                )
            if entry and not {"step", *slots} <= set(entry) and not optimizer._is_partial(entry):
                lost = sorted({"step", *slots} - set(entry))
                raise ValueError(
                    f"the saved state of {where} lacks {lost}: it is not a state of {name}, or it is truncated."
                )
            for slot in slots:
                if slot in entry and entry[slot].shape != p.shape:
                    raise ValueError(
                        f"{slot} of {where} has shape {tuple(entry[slot].shape)} in the saved state, "
                        f"but the parameter has {tuple(p.shape)}: load it into the model it came from."
                    )


def copied(values: dict[str, Any]) -> dict[str, Any]:
    """A dict with clones of its tensors."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}


def unshared(entry: dict[str, Tensor]) -> dict[str, Tensor]:
    """An entry of the state with clones of views into larger storages: pickling a view stores the whole storage."""
    return {
        name: value.clone() if value.untyped_storage().nbytes() > value.numel() * value.element_size() else value
        for name, value in entry.items()
    }
