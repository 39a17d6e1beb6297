"""Processes of which some have fewer batches than others, in the context `Join` of torch.distributed.algorithms."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from bayesgrad import distributed

_replicas: WeakKeyDictionary[Any, WeakSet[Any]] = WeakKeyDictionary()
_states: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def joined_state(optimizer: Any) -> Any:
    """Keeps the state of an optimizer equal in all processes if some have fewer batches: `Join([net, this])`.

    In `torch.distributed.algorithms.Join`, a process that has no more batches takes no more steps. At the end of the
    context it receives the weights from DistributedDataParallel, and by this the optimizer's state, from a process that
    has taken all steps. This is for optimizers that communicate nothing else; others are refused in this context.

    Args:
        optimizer: of the parameters of the `DistributedDataParallel` that comes first in the list.

    Checked by: tests/contract/test_data_parallel.py
    """
    from torch.distributed.algorithms.join import Joinable, JoinHook

    class JoinedState(Joinable, JoinHook):
        def __init__(self) -> None:
            super().__init__()

        @property
        def join_device(self) -> torch.device:
            return optimizer.param_groups[0]["params"][0].device

        @property
        def join_process_group(self) -> Any:
            return torch.distributed.group.WORLD

        def join_hook(self, **kwargs: Any) -> Any:
            return self

        def post_hook(self, is_last_joiner: bool) -> None:
            own = distributed.process_index()
            source = distributed.largest(own if is_last_joiner else -1, self.join_device)
            state = distributed.from_process(optimizer.state_dict() if own == source else None, source)
            if not is_last_joiner:
                optimizer.load_state_dict(state)

    found = _states[optimizer] = JoinedState()
    return found


def _keeps_state(optimizer: Any) -> bool:
    return optimizer in _states and _states[optimizer]._join_config.enable


def _replicas_of(optimizer: Any) -> WeakSet[Any]:
    """The modules `DistributedDataParallel` that average gradients of an optimizer's parameters."""
    if (found := _replicas.get(optimizer)) is None:
        # Neither a parameter nor a model knows of the module that averages its gradients.
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        kind = nn.parallel.DistributedDataParallel
        known = [one for one in gc.get_objects() if issubclass(type(one), kind)]
        found = _replicas[optimizer] = WeakSet(one for one in known if mine & {id(p) for p in one.parameters()})
    return found


def in_join(optimizer: Any) -> bool:
    """Whether DistributedDataParallel expects that some processes have fewer batches than others."""
    return distributed.joint_processes() > 1 and any(one._join_config.enable for one in _replicas_of(optimizer))


def _refuse_other_group(optimizer: Any, processes: int) -> None:
    """Raises if gradients are averaged over other processes than those that share what they have collected."""
    if sizes := {size for one in _replicas_of(optimizer) if (size := one.process_group.size()) != processes}:
        raise RuntimeError(
            f"{type(optimizer).__name__} uses more than gradients, of all processes that train one model, {processes}, "
            f"but DistributedDataParallel averages gradients over {max(sizes)}: give it a process_group of all "
            "processes, outside of independent_processes(), or use a rule of gradients and draws, such as AdaBayes."
        )


def trains_alone(optimizer: Any, parts: Iterable[Any]) -> bool:
    """Whether other processes train other models.

    Raises if DistributedDataParallel averages gradients with them nevertheless, and a part uses more than gradients.
    """
    if optimizer.independent and any(part.needs.outputs or part.needs.loss or part.recorded for part in parts):
        _refuse_other_group(optimizer, 1)
    return optimizer.independent


def check_join(optimizer: Any) -> None:
    """Raises if processes may stop to take steps, and their state would differ from then on."""
    if in_join(optimizer) and not _keeps_state(optimizer):
        raise RuntimeError(
            f"in join(), a process without batches would miss steps of {type(optimizer).__name__}, and its state would "
            "differ: use `with Join([net, bayesgrad.joined_state(optimizer)]):`, with Join of "
            "torch.distributed.algorithms."
        )


def refuse_join(optimizer: Any) -> None:
    """Raises if this optimizer would wait for processes that take no more steps, or have replicas of other models."""
    if in_join(optimizer):
        raise RuntimeError(
            f"{type(optimizer).__name__} exchanges more than gradients, and cannot go on without the processes that "
            "have no more batches: use no join(), and give all processes the same number of batches, for example by "
            "drop_last=True."
        )
    if (processes := distributed.joint_processes()) > 1:
        _refuse_other_group(optimizer, processes)
