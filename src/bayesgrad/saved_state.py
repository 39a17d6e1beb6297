"""State dicts: what is copied into them, in which order they are read, and which of them are refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from bayesgrad import shards
from bayesgrad.parts import Host

NAMES = "state_names"  # in saved groups: the names of the tensors of each parameter's state


class Restored(Protocol):
    """What reading a state dict needs of the optimizer; `CheckedOptimizer` explains each of them."""

    model: nn.Module | None
    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]

    def check_group(self, group: Mapping[str, Any]) -> None: ...

    def slots_of(self, p: Tensor, group: Mapping[str, Any]) -> tuple[str, ...]: ...

    def is_partial(self, entry: Mapping[str, Tensor]) -> bool: ...


def check_rule(optimizer: Restored, saved: Mapping[str, Any]) -> None:
    """Raises ValueError if a state dict is that of another rule, or of an optimizer of another package."""
    groups, name = saved.get("param_groups"), type(optimizer).__name__
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, Mapping) and (rule := group.get("rule")) != name:
            other = "another optimizer, as of torch.optim: its groups name no rule" if rule is None else rule
            raise ValueError(f"the saved state is that of {other}, but this optimizer is {name}.")


def check_saved(optimizer: Restored, saved: Mapping[str, Any]) -> None:
    """Raises ValueError if a state dict does not fit the optimizer's class, groups or parameters."""
    name = type(optimizer).__name__
    groups = saved.get("param_groups")
    whole = isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups)
    if not whole or not isinstance(saved.get("state"), Mapping):
        raise ValueError(
            f"a state of {name} must have 'state' and 'param_groups', but one is missing: is the file truncated?"
        )
    check_rule(optimizer, saved)
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
        optimizer.check_group(given_group)
        for position, (p, key) in enumerate(zip(group["params"], given_group["params"])):
            where = f"parameter {position} of group {index}"
            entry = saved["state"].get(key, {})
            if not isinstance(entry, Mapping):
                raise ValueError(f"the saved state of {where} must be a dict, got {type(entry).__name__}.")
            slots = optimizer.slots_of(p, given_group)
            odd = next((k for k, value in entry.items() if not isinstance(value, Tensor)), None)
            if odd is not None or ("step" in entry and entry["step"].numel() != 1):
                raise ValueError(
                    f"{odd or 'step'} in the saved state of {where} must be a tensor{'' if odd else ' of one element'}."
                )
            if entry and not {"step", *slots} <= set(entry) and not optimizer.is_partial(entry):
                lost = sorted({"step", *slots} - set(entry))
                raise ValueError(
                    f"the saved state of {where} lacks {lost}: it is not a state of {name}, or it is truncated."
                )
            if lost := sorted(set(read_names(given_group, position)) - set(entry)):
                raise ValueError(
                    f"the saved state of {where} has {lost}, which were not read: a distributed checkpoint is read "
                    f"into the tensors that this {name} has. Take a step before it is read, or load the whole state "
                    "dict from one file."
                )
            for slot in slots:
                if slot in entry and entry[slot].shape != p.shape:
                    raise ValueError(
                        f"{slot} of {where} has shape {tuple(entry[slot].shape)} in the saved state, "
                        f"but the parameter has {tuple(p.shape)}: load it into the model it came from."
                    )


def written_names(group: Mapping[str, Any], state: Mapping[Any, Any]) -> str:
    """The names of the state tensors of each parameter in a saved group, as one word for each."""
    entries = (state.get(key, {}) for key in group["params"])
    return " ".join(f"{','.join(sorted(map(str, entry)))}." for entry in entries)


def read_names(group: Mapping[str, Any], position: int) -> list[str]:
    """The names of the state tensors that a parameter in a saved group had."""
    words = str(group.get(NAMES, "")).split()
    return [name for name in words[position].removesuffix(".").split(",") if name] if position < len(words) else []


def copied(values: dict[str, Any]) -> dict[str, Any]:
    """A dict with clones of its tensors."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}


def unshared(entry: dict[str, Tensor]) -> dict[str, Tensor]:
    """An entry of the state with clones of views into larger storages: pickling a view stores the whole storage."""
    return {name: value.clone() if _is_view(shards.local(value)) else value for name, value in entry.items()}


def _is_view(value: Tensor) -> bool:
    return value.untyped_storage().nbytes() > value.numel() * value.element_size()


def in_order(optimizer: Restored, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved state with parameters in the order of the optimizer's groups, by their names in the model."""
    groups = saved.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(g, Mapping) for g in groups):
        return dict(saved)
    mine = [group.get("param_names", ()) for group in optimizer.param_groups]
    given = [[_plain(name) for name in group.get("param_names", ())] for group in groups]
    alike = [sorted(map(_plain, names)) for names in mine] == [sorted(names) for names in given]
    whole = all(len(set(names)) == len(group.get("params", ())) for names, group in zip(given, groups))
    names = sorted(_plain(name) for some in mine for name in some)
    if names and not alike and names == sorted(name for some in given for name in some):
        raise ValueError(
            f"the saved state has the parameters of this {type(optimizer).__name__} in other param groups: build it "
            "with the groups of the saved run, in their order."
        )
    if optimizer.model is None and not (alike and whole):  # parameters without names, or with others: as in torch.optim
        return dict(saved)
    if not alike:
        odd = sorted({n for names in mine for n in names} ^ {n for names in given for n in names})
        where = f"; see {', '.join(odd[:3])}" if odd else ""
        raise ValueError(
            f"the saved state must have the parameters of this {type(optimizer).__name__}, but they differ{where}."
        )
    ordered = []
    for group, names, own in zip(groups, given, mine):
        keys = dict(zip(names, group["params"]))
        words = dict(zip(names, str(group.get(NAMES, "")).split()))
        mine = {"params": [keys[_plain(name)] for name in own], "param_names": list(own)}
        ordered.append({**group, **mine, NAMES: " ".join(words.get(_plain(name), ".") for name in own)})
    return {**saved, "param_groups": ordered}


def saved_entry(optimizer: Host, saved: Mapping[str, Any], p: Tensor) -> tuple[Mapping, Mapping]:
    """The state of a parameter in a state dict, and its group; both empty if there are none."""
    for group, given in zip(optimizer.param_groups, saved["param_groups"]):
        for own, key in zip(group["params"], given["params"]):
            if own is p:
                return saved["state"].get(key, {}), given
    return {}, {}


def _plain(name: str) -> str:
    """A parameter's name without the prefixes of torch.compile and DataParallel."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def pairs(groups: list[dict[str, Any]], saved: Mapping[str, Any]) -> Iterable[tuple[Tensor, dict[str, Tensor]]]:
    for group, given in zip(groups, saved["param_groups"]):
        for p, key in zip(group["params"], given["params"]):
            if key in saved["state"]:
                yield p, saved["state"][key]
