"""What races have found, in one file: it has workloads that were run at different times, and the page shows them all.

A file is small and can be kept beside the page. All optimizers of a workload are run on one machine, because processor
times of different machines are not comparable; ratios of times are.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bayesgrad import products
from bayesgrad_lab.race import Finish, Protocol
from bayesgrad_lab.race_entrants import ENTRANTS
from bayesgrad_lab.race_workloads import WORKLOADS
from bayesgrad_lab.store import held, read_json, versions, write_json

TRACKS = {True: "With a search", False: "Without a search"}
Finishes = dict[tuple[str, str], Finish]  # by workload and optimizer
NUMBERS = ("target", "seconds", "steps", "losses", "flops")


def keep(path: Path, protocol: Protocol, targets: dict[str, Any], searched: bool, found: Finish) -> None:
    """Adds how an optimizer did on a workload, in place of an earlier entry.

    Raises:
        ValueError: the file has results of another protocol, or of other targets of this workload.
    """
    name, kind = found.workload.name, found.entrant.kind
    values = {key: _written(getattr(found, key)) for key in NUMBERS}
    entry = {**values, "setting": dict(found.setting), "at_edge": found.at_edge}
    with held(path):
        every = _opened(path, protocol)
        own = every["workloads"].setdefault(name, {"target": targets, "results": {}})
        if own["target"] != json.loads(json.dumps(targets)):
            raise ValueError(f"{path} has results for {name} with another target: record this race in another file.")
        entry["versions"] = {**versions(), **_instructions()}
        own["results"].setdefault(kind, {})[TRACKS[searched]] = entry
        write_json(path, every)


def _instructions() -> dict[str, str]:
    """What decides how fast products of matrices are: ours may be by another library than those of others."""
    own = "oneDNN" if products.uses_onednn() else "torch"
    return {"instructions": torch.backends.cpu.get_cpu_capability(), "products of bayesgrad's optimizers": own}


def recorded(path: Path, protocol: Protocol) -> tuple[dict[str, Finishes], dict[str, Any], dict[str, Any]]:
    """All results of a file, by track; the targets by workload; and what each workload was run with, once each."""
    every = _opened(path, protocol)["workloads"]
    tracks: dict[str, Finishes] = {title: {} for title in TRACKS.values()}
    names = [name for name in WORKLOADS if name in every]
    for name in names:
        for kind in (kind for kind in ENTRANTS if kind in every[name]["results"]):
            for title, entry in every[name]["results"][kind].items():
                values = {key: _read(entry[key]) for key in NUMBERS}
                found = Finish(WORKLOADS[name], ENTRANTS[kind], entry["setting"], **values)
                tracks[title][name, kind] = replace(found, at_edge=entry["at_edge"])
    conditions: dict[str, list[dict[str, str]]] = {name: [] for name in names}
    for name in names:
        for entry in (entry for results in every[name]["results"].values() for entry in results.values()):
            if entry["versions"] not in conditions[name]:
                conditions[name].append(entry["versions"])
    return tracks, {name: every[name]["target"] for name in names}, conditions


def _opened(path: Path, protocol: Protocol) -> dict[str, Any]:
    if not path.exists():
        return {"protocol": protocol.digest(), "workloads": {}}
    every = read_json(path)
    if every.get("protocol") != protocol.digest():
        raise ValueError(
            f"{path} has results of another protocol ({every.get('protocol')}, not {protocol.digest()}): record this "
            "race in another file."
        )
    return every


def _written(value: Any) -> Any:
    """Infinite numbers as None, because JSON has none."""
    if isinstance(value, (list, tuple)):
        return [_written(one) for one in value]
    return value if math.isfinite(value) else None


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(one) for one in value]
    return math.inf if value is None else value
