"""Files of posteriors in the safetensors format, which cannot contain code.

A tensor's key is the JSON list `["group", "name"]`. The metadata of the file contains everything else: the format and
its version, the plain values of the state, the order of names and of dimensions in memory, and a checksum of all of
that and of the bytes of every tensor.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FORMAT, VERSION = "bayesgrad posterior", 1
NUMBERS = ("prior", "fit", "likelihood")  # groups of tensors that are numbers, in float64


def write(path: str | os.PathLike, state: Mapping[str, Any]) -> None:
    """Writes the state of a posterior to a file, atomically."""
    safetensors = _package()
    path = Path(path)
    given = {_key(group, name): t for group, named in state["tensors"].items() for name, t in named.items()}
    layout = {key: _layout(t) for key, t in given.items() if _layout(t) != list(range(t.dim()))}
    tensors, storages = {}, set()
    for key, t in given.items():
        tensors[key] = _alone(t.permute(_layout(t)))
        if tensors[key].untyped_storage()._cdata in storages:  # a bias may share the errors of its layer's weight
            tensors[key] = tensors[key].clone()
        storages.add(tensors[key].untyped_storage()._cdata)
    plain = {key: value for key, value in state.items() if key != "tensors"}
    order = {group: list(named) for group, named in state["tensors"].items()}
    header = {"format": FORMAT, "version": str(VERSION), "state": json.dumps(plain), "order": json.dumps(order)}
    header["layout"] = json.dumps(layout)
    header["sha256"] = _checksum(header, tensors)
    partial = path.with_name(path.name + ".partial")
    try:
        safetensors.torch.save_file(tensors, partial, metadata=header)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: str | os.PathLike) -> dict[str, Any]:
    """Reads the state that `write` stored.

    Raises:
        ValueError: the file is damaged, truncated, altered, of another version, or not a posterior.
    """
    safetensors, name = _package(), os.fspath(path)
    with open(path, "rb"):  # raises FileNotFoundError if there is no such file
        pass
    try:
        with safetensors.safe_open(name, framework="pt") as file:
            header = dict(file.metadata() or {})
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(
            f"{name} cannot be read as a posterior: it is damaged, truncated or not a safetensors file; save it again."
        ) from error
    if header.get("format") != FORMAT:
        raise ValueError(f"{name} is not a file of a posterior: pass a file that Posterior.save() wrote.")
    if header.get("version") != str(VERSION):
        raise ValueError(
            f"{name} has version {header.get('version')!r} of the format, but this bayesgrad reads {VERSION}: "
            "read it with the release that wrote it, or a later one."
        )
    if header.pop("sha256", None) != _checksum(header, tensors):
        raise ValueError(f"{name} was altered after it was saved: its checksum does not match; save it again.")
    try:
        order, plain, layout = (json.loads(header[key]) for key in ("order", "state", "layout"))
        for key, dims in layout.items():
            tensors[key] = tensors[key].permute([dims.index(dim) for dim in range(len(dims))])
        groups = {group: {own: tensors[_key(group, own)] for own in names} for group, names in order.items()}
    except KeyError as error:
        raise ValueError(f"{name} is incomplete: it lacks {error}; save the posterior again.") from error
    except (ValueError, TypeError, AttributeError, IndexError, RuntimeError, RecursionError) as error:
        raise ValueError(f"{name} has a damaged header ({error}); save the posterior again.") from error
    if not isinstance(plain, dict):
        raise ValueError(f"{name} has a damaged header ({plain!r} is no state); save the posterior again.")
    return {**plain, "tensors": groups}


def check_state(state: Mapping[str, Any], kinds: Iterable[str]) -> None:
    """Raises if the state of a posterior is incomplete or of an unknown kind."""
    missing = [key for key in ("kind", "seed", "draws", "tensors") if key not in state]
    if missing:
        raise ValueError(f"the state of a posterior needs the keys {', '.join(map(repr, missing))}, which are missing.")
    if state["kind"] not in kinds:
        known = ", ".join(map(repr, kinds))
        raise ValueError(f"the kind of a posterior must be one of {known}, got {state['kind']!r}.")


def converted(
    tensors: Mapping[str, Mapping[str, Tensor]], device: Any, dtype: torch.dtype | None
) -> dict[str, dict[str, Tensor]]:
    """Copies of the tensors of a posterior on a device and in a dtype; numbers stay as they are."""
    device, dtype = (None, device) if isinstance(device, torch.dtype) else (device, dtype)
    if dtype not in (None, torch.float32, torch.float64):
        raise ValueError(f"the dtype of a posterior must be float32 or float64, got {dtype}.")
    found = {group: dict(parts) for group, parts in tensors.items()}
    for group, parts in found.items():
        for name, tensor in parts.items() if group not in NUMBERS else ():
            parts[name] = tensor.to(device, dtype if tensor.is_floating_point() else None, copy=True)
    return found


def _key(group: str, name: str) -> str:
    return json.dumps([group, name])


def _layout(tensor: Tensor) -> list[int]:
    """The dimensions from the largest to the smallest stride, because the rounding of products depends on it."""
    return sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))


def _alone(tensor: Tensor) -> Tensor:
    """A tensor on the CPU that owns its memory: safetensors cannot store views."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes and tensor._base is None else tensor.clone()


def _checksum(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(sorted(header.items())).encode())
    for key, tensor in sorted(tensors.items()):
        digest.update(json.dumps([key, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _package() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError("saving and loading posteriors needs safetensors: pip install safetensors.") from error
    return safetensors
